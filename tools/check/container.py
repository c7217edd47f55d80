"""Whether the image of ``make container`` works: ``python tools/check/container.py``.

It needs podman or docker, and makes the image if it is not there. In containers without a network
``ctrl-check-env`` must find nothing wrong, and the sandbox be isolated as expected: ``standard`` as
the image's user with the engine's own flags, ``strict`` as that user with
``--security-opt seccomp=unconfined`` and as root with ``--cap-add SYS_ADMIN``. Then that user makes
one step of GRPO with tiny models.

Exit code 1 if something failed, 3 if no container can run here: a sentence then names the
permission that is missing.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NOT_HERE = 3
LEVELS = ("none", "standard", "strict")
FLAGS: dict[tuple[str, ...], str] = {
    (): "standard",
    ("--security-opt", "seccomp=unconfined"): "strict",
    ("--user", "0", "--cap-add", "SYS_ADMIN"): "strict",
}
"""Flags of a container -> the isolation that is expected at least."""
PERMISSIONS = {
    "daemon|docker.sock": "a running Docker daemon, and the group docker or root to reach it",
    "rlimit": "the capability CAP_SYS_RESOURCE, with which the engine sets a container's limits",
    "subuid|subgid|newuidmap|newgidmap|uid_map": "user ids for this user in /etc/subuid and "
    "/etc/subgid, and newuidmap (Debian, Ubuntu: apt install uidmap)",
    "cgroup": "control groups that the engine may write",
    "unshare|clone|namespace": "namespaces: unprivileged ones, or the capability CAP_SYS_ADMIN",
    "mount|overlay": "mounts: the capability CAP_SYS_ADMIN, or fuse-overlayfs",
}
"""Words of an engine that runs no container -> what it was not allowed."""
STEP = """
import sys
from pathlib import Path
sys.path[:0] = ["/opt/ctrl_megatron/tests", "/opt/ctrl_megatron/tests/integration"]
from launched_run import Job
from tiny_run import JUDGMENTS, PROGRAM, chain_model, smollm2, write_problems
folder, model = Path.home(), smollm2(Path.home())
job = Job(
    actor=chain_model(folder / "actor", model, JUDGMENTS, 0.8),
    proxy=chain_model(folder / "proxy", model, [PROGRAM], 0.9),
    data=write_problems(folder / "train.parquet"),
    folder=folder / "runs",
)
with job.launch("step", steps=1, own=True) as run:
    code = run.ends()
    print(run.output())
sys.exit(code or len(run.metrics()) != 1)
"""


def ran(*command: str) -> subprocess.CompletedProcess[str]:
    """The end of a command, with its output and errors as one text."""
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
    )


def missing_permission(words: str) -> str:
    """What an engine that said these ``words`` was not allowed."""
    for pattern, permission in PERMISSIONS.items():
        if re.search(pattern, words, re.IGNORECASE):
            return permission
    return "a permission that this tool does not know"


class Container:
    """Containers of one image, without a network."""

    def __init__(self, engine: str, image: str) -> None:
        self.image, self.failed = image, False
        self._run = (engine, "run", "--rm", "--network", "none")

    def ran(self, *command: str, flags: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        """The end of a command in a new container."""
        return ran(*self._run, *flags, self.image, *command)

    def check_isolation(self, flags: tuple[str, ...], expected: str) -> None:
        """Print what ``ctrl-check-env`` finds with these ``flags``."""
        done = self.ran("ctrl-check-env", flags=flags)
        level = re.search(r"^\w+ +sandbox +isolation (\w+)", done.stdout, re.MULTILINE)
        reached = level[1] if level else "none"
        good = done.returncode == 0 and LEVELS.index(reached) >= LEVELS.index(expected)
        item = f"ctrl-check-env {' '.join(flags) or '(default flags)'}"
        self.report(good, item, f"isolation {reached}, expected {expected}", done.stdout)

    def check_step(self) -> None:
        """Print whether a step of GRPO succeeds."""
        begun = time.monotonic()
        done = self.ran("python", "-c", STEP)
        seconds = f"{time.monotonic() - begun:.0f} s"
        self.report(done.returncode == 0, "one step of GRPO", seconds, done.stdout)

    def report(self, good: bool, item: str, found: str, output: str) -> None:
        """Print a line and, of what failed, the ``output``."""
        print(f"{'pass' if good else 'FAIL'}  {item}: {found}", flush=True)
        if not good:
            print(output, file=sys.stderr, flush=True)
            self.failed = True


def main() -> int:
    """Entry point; see the module's docstring for the exit codes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", help="podman, else docker")
    parser.add_argument("--image", default="ctrl_megatron:cpu")
    options = parser.parse_args()
    engine = options.engine or next(filter(shutil.which, ("podman", "docker")), None)
    if engine is None or not shutil.which(engine):
        print(f"no container can run here: {engine or 'podman or docker'} is not installed")
        return NOT_HERE
    there = ran(engine, "info")
    if there.returncode == 0 and ran(engine, "image", "inspect", options.image).returncode:
        made = ("make", "container", f"BUILDER={engine}", f"IMAGE={options.image}")
        if subprocess.run(made, cwd=ROOT).returncode:
            return 1
    container = Container(engine, options.image)
    first = container.ran("id", "-u") if there.returncode == 0 else there
    if first.returncode:
        words = first.stdout.strip()
        print(
            f"no container can run here; missing is {missing_permission(words)}. {engine}: {words}"
        )
        return NOT_HERE
    user = first.stdout.strip()
    container.report(user not in ("", "0"), "user of the image", user, first.stdout)
    for flags, expected in FLAGS.items():
        container.check_isolation(flags, expected)
    container.check_step()
    return int(container.failed)


if __name__ == "__main__":
    raise SystemExit(main())

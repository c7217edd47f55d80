"""``torchrun tools/train_rl.py`` as a process tree that a test watches, hurts and ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from free_port import free_port
from patience import PATIENCE
from preloaded import ForkedProgram
from tiny_run import REPOSITORY

from ctrl_megatron.metrics import read_json_lines

PRELOADED = Path(__file__).parents[1] / "preloaded.py"
AGAIN = """
until "$@"; do
  [ "$PET_NODE_RANK" != 0 ] || { : > "$0.over"; exit 1; }
  while [ ! -e "$0.over" ] && [ ! -e "$0" ]; do sleep 0.2; done
  [ ! -e "$0.over" ] || exit 1
done
: > "$0.over"
"""
"""The first host does not start its launcher again, since the others meet there; they wait for
``back`` no longer than it runs."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Models, data and folder of the runs of a test."""

    actor: Path
    proxy: Path
    data: Path
    folder: Path

    def overrides(self, name: str, steps: int) -> list[str]:
        """Settings of a run that takes seconds."""
        family = "actor_rollout_ref"
        return [
            *(f"data.train_files={self.data}", "data.val_files=[]"),
            *("data.max_prompt_length=512", "data.max_response_length=16"),
            *("data.train_batch_size=4", f"{family}.actor.ppo_mini_batch_size=4"),
            *(f"{family}.model.path={self.actor}", f"{family}.proxy.model.path={self.proxy}"),
            *(f"{family}.model.dtype=float32", f"{family}.rollout.name=hf"),
            *(f"{family}.rollout.n=2", f"{family}.rollout.revision_max_tokens=24"),
            *(f"{family}.rollout.threads=1", f"{family}.actor.optim.lr=1e-3"),
            *(f"{family}.actor.use_kl_loss=true", f"{family}.actor.entropy_coeff=0.01"),
            *("sandbox.workers=1", "trainer.verify_weight_sync=true"),
            *(f"trainer.default_local_dir={self.folder}", f"trainer.experiment_name={name}"),
            f"trainer.total_training_steps={steps}",
        ]

    def sft_overrides(self, name: str, steps: int) -> list[str]:
        """Settings of a fine-tuning run that takes seconds; its files are still to be named."""
        family = "actor_rollout_ref"
        return [
            *(f"{family}.model.path={self.actor}", f"{family}.model.dtype=float32"),
            *(
                "sft.train_batch_size=4",
                "sft.max_length=256",
                f"{family}.actor.ppo_max_token_len_per_gpu=512",
            ),
            *(f"sft.total_training_steps={steps}", "sft.lr=1e-3", "sft.val_files=[]"),
            *(f"trainer.default_local_dir={self.folder}", f"trainer.experiment_name={name}"),
        ]

    @contextmanager
    def launch(
        self,
        name: str,
        *,
        steps: int,
        extra: tuple[str, ...] = (),
        hosts: int = 1,
        ranks: int = 2,
        preloaded: bool = False,
        restarts: int = 0,
        own: bool = False,
        least: int | None = None,
        stopped_at: str = "",
        under: tuple[str, ...] = (),
    ) -> Iterator[Run]:
        """``ranks`` on each host; nothing of them outlives the block. torchrun starts them or, with
        ``own``, the command itself, again after ``restarts`` failures; with ``under``, a command
        that runs the rest of its words. With ``least`` so many hosts suffice, and the package's
        launcher takes torchrun's place; a host whose launcher has ended starts it again when
        ``run.back`` exists.

        ``preloaded`` is for tests that look at a run and not at how it comes up: torchrun and all
        processes below it are then forks of one that has imported everything (``preloaded.py``).
        With ``stopped_at``, which is ``MODULE:NAME NTH``, the nth call of that function on rank 0
        sends SIGTERM to the launcher.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        log = self.folder / f"{name}.{time.monotonic_ns()}.log"
        several = (str(Path(__file__).with_name("several_hosts.sh")), str(hosts))
        count = ("--nproc-per-node", str(ranks), "--max-restarts", str(restarts))
        first = "host0" if hosts > 1 else "127.0.0.1"
        meeting = ("--master-addr", first, "--master-port", str(free_port()))
        nodes, back = str(hosts), self.folder / f"{name}.back"
        if least is not None:
            Path(f"{back}.over").unlink(missing_ok=True)
            nodes = f"{least}:{hosts}"
            meeting = (
                *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first}:{free_port()}"),
                *(
                    "--rdzv-conf",
                    "keep_alive_interval=2,keep_alive_max_attempt=5,last_call_timeout=5",
                ),
                *("--shutdown-timeout", "120"),
            )
            several = (*several, "sh", "-c", AGAIN, str(back))
        module = "torch.distributed.run" if least is None else "ctrl_megatron.commands.launcher"
        torchrun = ("-m", module, "--nnodes", nodes, *count, *meeting)
        command = [
            *(() if own else torchrun),
            *("tools/train_rl.py", "--config", "examples/ctrl_smollm2_cpu.yaml"),
            *(count if own else ()),
            *self.overrides(name, steps),
            *extra,
        ]
        process: subprocess.Popen[bytes] | ForkedProgram
        if preloaded and hosts == 1 and not under:
            environ = {"STOPPED_AT": stopped_at} if stopped_at else {}
            below = (ranks * (1 + restarts), 1)
            process = ForkedProgram(command, log, below=below, environ=environ)
        else:
            # On each host an engine per rank, of which it may need fewer.
            fork = (str(PRELOADED), str(ranks), str(ranks)) if preloaded else ()
            with log.open("wb") as output:
                process = subprocess.Popen(
                    [*(several if hosts > 1 else under), sys.executable, *fork, *command],
                    cwd=REPOSITORY,
                    env=os.environ
                    # torchrun sets it for several ranks of a host; other numbers round otherwise.
                    | ({"OMP_NUM_THREADS": "1"} if preloaded or least is not None else {})
                    | ({} if least is None else {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        run = Run(process=process, log=log, folder=self.folder / name, back=back)
        try:
            yield run
        finally:
            run.kill()


@dataclass(kw_only=True)
class Run:
    """A launcher and everything that has descended from it."""

    process: subprocess.Popen[bytes] | ForkedProgram
    log: Path
    folder: Path
    back: Path | None = None
    """Exists when hosts whose launcher has ended may start it again."""
    seen: dict[int, psutil.Process] = field(default_factory=dict)

    def output(self) -> str:
        """The output of launcher and ranks."""
        return self.log.read_text(errors="replace")

    def metrics(self) -> list[dict[str, Any]]:
        """The finished steps, oldest first."""
        path = self.folder / "metrics.jsonl"
        return read_json_lines(path) if path.is_file() else []

    def look(self) -> list[psutil.Process]:
        """The processes that have been seen so far and still run; zombies do not."""
        if self.process.poll() is None:
            try:
                found = psutil.Process(self.process.pid).children(recursive=True)
            except psutil.NoSuchProcess:
                found = []
            self.seen |= {p.pid: p for p in found}
        return [p for p in self.seen.values() if _runs(p)]

    def find(self, pattern: str) -> psutil.Process:
        """The oldest process whose command line matches."""
        found = sorted(self.look(), key=lambda p: (p.create_time(), p.pid))
        return next(p for p in found if re.search(pattern, " ".join([p.name(), *p.cmdline()])))

    def rank(self, number: int) -> psutil.Process:
        """The trainer process of that rank."""
        for process in self.look():
            if process.name() == f"rank {number}":
                return process
            if "tools/train_rl.py" in process.cmdline():
                with_rank = process.environ()
                if with_rank.get("RANK") == str(number) and process.ppid() == self.process.pid:
                    return process
        raise LookupError(f"no rank {number} among {self.look()}")

    def wait_for(
        self, condition: Callable[[], bool], pause: float = 0.1, within: float = PATIENCE
    ) -> None:
        """Return when the condition holds; fails with the output if the run ends before."""
        deadline = time.monotonic() + within
        while not condition():
            assert self.process.poll() is None, self.output()[-8000:]
            assert time.monotonic() < deadline, self.output()[-8000:]
            time.sleep(pause)

    def wait_for_steps(self, count: int) -> None:
        """Return when so many steps have been recorded."""
        self.wait_for(lambda: len(self.metrics()) >= count)
        self.look()

    def ends(self, within: float = PATIENCE) -> int:
        """The launcher's exit code."""
        deadline = time.monotonic() + within
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"still runs\n{self.output()[-8000:]}"
            self.look()
            time.sleep(0.1)
        return self.process.returncode

    def kill(self) -> None:
        """End every process that still runs with SIGKILL, as the kernel would."""
        for process in [*self.look()]:
            _end(process)
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(30)
        # End processes that were started meanwhile.
        for process in self.look():
            _end(process)

    def shared_memory(self) -> list[str]:
        """Segments in /dev/shm that processes of this run have made."""
        pids = {self.process.pid, *self.seen}
        parts = {name: name.split("-") for name in os.listdir("/dev/shm")}
        ours = {str(pid) for pid in pids}
        return [n for n, p in parts.items() if p[0] == "ctrl" and len(p) > 1 and p[1] in ours]


def _runs(process: psutil.Process) -> bool:
    """Whether it is a living process of the run; a spare of the tests, which waits to become one,
    ends a moment after its parent.
    """
    try:
        if process.name() == "spare":
            return False
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _end(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        # The process has already ended.
        return

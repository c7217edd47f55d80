"""A script as shell commands, for machines that offer a shell and nothing else."""

from __future__ import annotations

import base64
import shlex
from collections.abc import Iterator

from ctrl_megatron.rewards.providers.scripts import Script, ScriptResult

OUTPUT_BYTES = 1 << 20
"""Kept of a program's output; it is cut off on the machine, so a flood never travels."""
STDERR_BYTES = 4096
NEEDED = ("bash", "python3", "timeout", "head", "tail", "base64")
"""Programs that the machine must have."""
_KILLED = 137  # what coreutils' timeout says after its SIGKILL
_CHUNK = 1 << 16
"""Bytes of base64 in one command: the kernel takes 128 KiB per argument."""


def probe() -> str:
    """A command that prints the names among ``NEEDED`` that the machine lacks."""
    names = " ".join(NEEDED)
    return f'for n in {names}; do command -v "$n" >/dev/null || echo "$n"; done'


def uploads(directory: str, name: str, text: str) -> Iterator[str]:
    """Commands that write a file. Each may be repeated: a client may retry what did arrive."""
    data = base64.b64encode(text.encode(errors="surrogatepass")).decode()
    parts = [data[i : i + _CHUNK] for i in range(0, len(data), _CHUNK)] or [""]
    for number, part in enumerate(parts):
        target = f"{directory}/{name}.{number:05d}"
        yield f"mkdir -p {directory} && printf %s {shlex.quote(part)} > {target}"
    yield f"cat {directory}/{name}.[0-9]* | base64 -d > {directory}/{name}"


def run_command(directory: str, seconds: float) -> str:
    """Runs ``main.py`` there with ``stdin.txt``, which is gone before the program starts."""
    inner = (
        f"cd {directory} && exec 0<stdin.txt && rm -f stdin.txt stdin.txt.* && "
        f"timeout -s KILL {seconds:.3f} python3 main.py 2>stderr.txt | head -c {OUTPUT_BYTES + 1}; "
        f"code=${{PIPESTATUS[0]}}; tail -c {STDERR_BYTES} stderr.txt >&2; exit $code"
    )
    return f"bash -c {shlex.quote(inner)}"


def result_of(stdout: str, stderr: str, exit_code: int) -> ScriptResult:
    """What ``run_command`` printed, as a result."""
    timed_out = exit_code == _KILLED
    flooded = len(stdout.encode(errors="surrogatepass")) > OUTPUT_BYTES
    return ScriptResult(
        stdout=stdout[:OUTPUT_BYTES],
        stderr=stderr,
        exit_code=None if timed_out else exit_code,
        timed_out=timed_out,
        cut_at=OUTPUT_BYTES if flooded else None,
    )


def slack(script: Script) -> float:
    """Seconds after which a command that should have ended counts as lost."""
    return script.seconds + 15.0

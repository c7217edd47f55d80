"""A command in a separate process that begins with everything imported: a test may let it get a
signal at an exact place, run it as an ordinary user, and look at how it ends.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from pathlib import Path
from typing import Any

from forked_ranks import fork_context
from patience import PATIENCE

NOBODY = 65534


@dataclass(frozen=True)
class Interrupt:
    """``number`` comes when the main thread begins the ``nth`` call of ``place``."""

    place: str
    """``module:name``, where it is looked up."""
    number: int = signal.SIGINT
    nth: int = 1


@dataclass(frozen=True)
class Command:
    """A command that has been started."""

    process: Any
    log: Path

    def output(self) -> str:
        """All that it has printed."""
        return self.log.read_text(errors="replace")

    def ends(self, within: float = PATIENCE) -> int:
        """Its exit code."""
        self.process.join(within)
        assert self.process.exitcode is not None, f"still runs\n{self.output()[-6000:]}"
        return self.process.exitcode

    def wait_for(self, file: Path, within: float = PATIENCE) -> None:
        """Until the file is there."""
        deadline = time.monotonic() + within
        while not file.exists():
            assert self.process.is_alive() and time.monotonic() < deadline, self.output()[-6000:]
            time.sleep(0.05)


@contextmanager
def started(
    module: str,
    arguments: list[str],
    folder: Path,
    *,
    interrupt: Interrupt | None = None,
    user: int | None = None,
) -> Iterator[Command]:
    """``module.main(arguments)`` in ``folder``; nothing of it outlives the block."""
    log = folder.parent / f"{folder.name}.{time.monotonic_ns()}.log"
    log.touch()
    log.chmod(0o666)
    process = fork_context().Process(
        target=_command, args=(module, arguments, str(folder), str(log), interrupt, user)
    )
    process.start()
    try:
        yield Command(process, log)
    finally:
        if process.is_alive():
            assert process.pid is not None
            os.killpg(process.pid, signal.SIGKILL)
        process.join()


def run(module: str, arguments: list[str], folder: Path, **more: Any) -> tuple[int, str]:
    """(exit code, output) of a command that ends without a signal."""
    with started(module, arguments, folder, **more) as command:
        return command.ends(), command.output()


def _command(
    module: str,
    arguments: list[str],
    folder: str,
    log: str,
    interrupt: Interrupt | None,
    user: int | None,
) -> None:
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(folder)
    import torch

    torch.set_num_threads(1)
    main = import_module(module).main
    if interrupt is not None:
        _signal_at(interrupt)
    if user is not None:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    raise SystemExit(main(arguments))


def _signal_at(interrupt: Interrupt) -> None:
    module, _, path = interrupt.place.partition(":")
    *owners, name = path.split(".")
    owner = reduce(getattr, owners, import_module(module))
    function, calls = getattr(owner, name), [0]

    def called(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == interrupt.nth:
            os.kill(os.getpid(), interrupt.number)
        return function(*arguments, **options)

    setattr(owner, name, called)

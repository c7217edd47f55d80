"""Runs a function of ``policy_workers`` in a process of its own: one rank, no launcher.

The process and its engine are forked from one that has imported Megatron already."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import torch
from forked_ranks import fork_context
from patience import PATIENCE
from preloaded import reserve
from tiny_run import REPOSITORY


def in_process(
    function: str, timeout: float = PATIENCE, code: int = 0, **arguments: Any
) -> dict[str, Any]:
    """The result of ``policy_workers.<function>(**arguments)``; fails with the process's output.

    A process that is to end with another exit ``code`` has no result but its output, ``log``.
    """
    with tempfile.TemporaryDirectory() as folder:
        torch.save(arguments, f"{folder}/arguments.pt")
        process = fork_context().Process(target=_run, args=(function, folder))
        process.start()
        try:
            process.join(timeout)
        finally:
            if process.is_alive():
                assert process.pid is not None
                os.kill(process.pid, signal.SIGKILL)
                process.join()
        log = Path(f"{folder}/log").read_text(errors="replace")
        assert process.exitcode == code, log[-6000:]
        if code:
            return {"log": log}
        return torch.load(f"{folder}/result.pt", weights_only=False)


def _run(function: str, folder: str) -> None:
    with open(f"{folder}/log", "wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.chdir(REPOSITORY)
    reserve(1)
    import policy_workers

    arguments = torch.load(f"{folder}/arguments.pt", weights_only=False)
    torch.save(getattr(policy_workers, function)(**arguments), f"{folder}/result.pt")

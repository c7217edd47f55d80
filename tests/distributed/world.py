"""Runs a function of this folder's worker module in several real processes over gloo.

Ranks are forked from one process that has imported torch and Megatron already: importing them takes
longer than most of what the ranks do.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from forked_ranks import fork_context
from free_port import free_port
from patience import PATIENCE

HERE = Path(__file__).parent


def run_world(
    function: str, world_size: int, timeout: float = PATIENCE, **arguments: Any
) -> list[Any]:
    """``workers.<function>(rank, **arguments)`` in ``world_size`` processes; their results by rank.

    A failing process fails the call with its output, and no process outlives it. Whoever has not
    ended by then is killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        torch.save(arguments, f"{folder}/arguments.pt")
        launch = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
        }
        forks = fork_context()
        processes = [
            forks.Process(target=_rank, args=(function, folder, rank, launch))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            deadline = time.monotonic() + timeout
            # The first to end badly: the others may only have lost their peer.
            while running := [process for process in processes if process.exitcode is None]:
                if any(process.exitcode for process in processes) or time.monotonic() > deadline:
                    break
                wait([process.sentinel for process in running], deadline - time.monotonic())
            failed = [rank for rank, process in enumerate(processes) if process.exitcode != 0]
            assert not failed, "\n".join(_output(folder, rank)[-6000:] for rank in failed)
        finally:
            for process in processes:
                if process.is_alive():
                    assert process.pid is not None
                    os.kill(process.pid, signal.SIGKILL)
                process.join()
        return [torch.load(f"{folder}/result{r}.pt", weights_only=False) for r in range(world_size)]


def _output(folder: str, rank: int) -> str:
    log = Path(f"{folder}/log{rank}")
    return f"rank {rank}:\n{log.read_text(errors='replace') if log.is_file() else '(no output)'}"


def _rank(function: str, folder: str, rank: int, launch: dict[str, str]) -> None:
    os.environ |= launch | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    with open(f"{folder}/log{rank}", "wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sys.path.insert(0, str(HERE))
    import workers

    workers.run(function, folder, rank)

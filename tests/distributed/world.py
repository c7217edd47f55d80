"""Runs a function of this folder's worker module in several real processes over gloo."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent


def free_port() -> int:
    """A loopback port nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run_world(
    function: str, world_size: int, timeout: float = 240.0, **arguments: Any
) -> list[Any]:
    """``workers.<function>(rank, **arguments)`` in ``world_size`` processes; their results by rank.

    A failing process fails the call with its output, and no process outlives it.
    """
    with tempfile.TemporaryDirectory() as folder:
        torch.save(arguments, f"{folder}/arguments.pt")
        environment = os.environ | {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "OMP_NUM_THREADS": "1",
        }
        processes = []
        for rank in range(world_size):
            with open(f"{folder}/log{rank}", "wb") as log:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, str(HERE / "workers.py"), function, folder, str(rank)],
                        env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        try:
            for rank, process in enumerate(processes):
                code = process.wait(timeout)
                assert code == 0, Path(f"{folder}/log{rank}").read_text()[-6000:]
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        return [torch.load(f"{folder}/result{r}.pt", weights_only=False) for r in range(world_size)]

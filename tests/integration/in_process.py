"""Runs a function of ``policy_workers`` in a process of its own: one rank, no launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

WORKERS = Path(__file__).with_name("policy_workers.py")


def in_process(function: str, timeout: float = 280.0, **arguments: Any) -> dict[str, Any]:
    """What ``policy_workers.<function>(**arguments)`` returns; fails with the process's output."""
    with tempfile.TemporaryDirectory() as folder:
        torch.save(arguments, f"{folder}/arguments.pt")
        with open(f"{folder}/log", "wb") as log:
            process = subprocess.Popen(
                [sys.executable, str(WORKERS), function, folder],
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            code = process.wait(timeout)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        assert code == 0, Path(f"{folder}/log").read_text()[-6000:]
        return torch.load(f"{folder}/result.pt", weights_only=False)

"""A process that holds the lock of a run's directory until it is killed."""

from __future__ import annotations

import time
from pathlib import Path

from ctrl_megatron.checkpoint.run_directory import RunLock


def main(arguments: list[str]) -> int:
    RunLock(Path(arguments[0])).acquire()
    while True:
        time.sleep(1)

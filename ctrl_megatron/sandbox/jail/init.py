"""Pid 1 of a whole program: starts it, reaps what it leaves, reports how it ended."""

from __future__ import annotations

import os
import signal
from typing import Any

from ctrl_megatron.sandbox.jail import descriptors, files, frames, linux, native, program
from ctrl_megatron.sandbox.jail.worker import Worker, read_spec


def run(worker: Worker, spec: int, report: int, stdin: int, stdout: int, stderr: int) -> None:
    """Serve one job; never returns."""
    try:
        descriptors.close_all_but(2, spec, report, stdin, stdout, stderr)
        told = read_spec(spec)
        directory = worker.settle(told)
        pid = os.fork()
        if pid == 0:
            _become(worker, directory, told, (stdin, stdout, stderr))
        descriptors.close_all_but(2, report)
        while True:
            ended, status = os.waitpid(-1, 0)
            if ended == pid:
                break
        found = {}
        if told["fetch"] and worker.isolated:
            # Nothing that the program has started may change what is read.
            _end_others()
            found = files.fetch(directory, told["fetch"])
        frames.send(report, {"exit": status, "files": found})
    finally:
        os._exit(0)


def _become(
    worker: Worker, directory: str, told: dict[str, Any], streams: tuple[int, int, int]
) -> None:
    try:
        linux.die_with_parent()
        descriptors.standard(*streams)
        descriptors.close_all_but(2)
        wanted = told["native"]
        worker.confine(
            directory,
            memory_mb=told["memory_mb"],
            cpu_seconds=told["seconds"],
            profile=wanted["profile"] if wanted else None,
        )
        if wanted:
            native.run(directory, wanted["profile"], wanted["command"])
        program.run(directory, told["code"], told["prelude"])
    finally:
        os._exit(1)


def _end_others() -> None:
    """Of this pid namespace, of which the caller is the first."""
    try:
        os.kill(-1, signal.SIGKILL)
        while True:
            os.waitpid(-1, 0)
    except (ProcessLookupError, ChildProcessError):
        return

"""Processes that begin with torch and Megatron imported, which takes longer than most tests."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import forkserver
from pathlib import Path

_HERE = Path(__file__).parent


def fork_context() -> multiprocessing.context.ForkServerContext:
    """A context whose processes are forked from one that has imported ``imported_once``."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["imported_once"])
    # Python 3.11 hands its path to the server's children, but not to the server's own imports.
    given = os.environ.get("PYTHONPATH")
    path = [str(_HERE), str(_HERE.parent), *([given] if given else [])]
    changed = {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    return context

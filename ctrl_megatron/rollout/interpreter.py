"""The Python interpreter of an engine's process: the trainer's, or one of another environment.

An engine whose library requires another torch than the trainer has its own environment
(``actor_rollout_ref.rollout.python``). The two processes exchange JSON and bytes, so that only this
package has to be the same in both.
"""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path

from ctrl_megatron.config.environment import child_environment
from ctrl_megatron.errors import UserError

_KEY = "actor_rollout_ref.rollout.python"
_PACKAGE_PARENT = Path(__file__).resolve().parents[2]
"""The folder with this package: a checkout, or site-packages."""
_SERVER_MODULES = ("ctrl_megatron", "aiohttp", "blake3", "numpy", "safetensors", "torch")
"""Modules that the process imports besides the engine's own library."""
_ASK = """
import importlib.util, sys
print(*(name for name in sys.argv[1:] if importlib.util.find_spec(name) is None))
"""
_ASK_SECONDS = 60.0


def engine_python_path(python: str | None, given: str | None) -> str:
    """``PYTHONPATH`` of an engine's process: the folder of this package, then ``given``.

    An interpreter of another environment must not see the packages of this one, so this package has
    to be installed there, unless it is a checkout here.
    """
    among_packages = _PACKAGE_PARENT.name in ("site-packages", "dist-packages")
    ours = "" if python is not None and among_packages else str(_PACKAGE_PARENT)
    return os.pathsep.join(filter(None, (ours, given)))


@cache
def require_modules(python: str, engine_module: str) -> None:
    """UserError unless ``python`` runs and finds what an engine's process imports. A process asks
    an interpreter once."""
    kept = child_environment()
    environment = {**kept, "PYTHONPATH": engine_python_path(python, kept.get("PYTHONPATH"))}
    try:
        done = subprocess.run(
            [python, "-c", _ASK, engine_module, *_SERVER_MODULES],
            capture_output=True,
            text=True,
            env=environment,
            timeout=_ASK_SECONDS,
        )
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{_KEY}={python} does not run: {error}") from error
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise UserError(f"{_KEY}={python} is no usable Python: {said[0][:300]}")
    if missing := done.stdout.split():
        raise UserError(
            f"{_KEY}={python} lacks {', '.join(missing)}, which an engine's process imports",
            remedy="make its environment with make env-sglang-cuda, or install them there",
        )

"""Runs a whole program as ``__main__``, as a fresh interpreter would, in a confined process."""

from __future__ import annotations

import atexit
import io
import os
import sys
import threading
import traceback
import types

NAME = "main.py"
_HARNESS: list[str] = []
_HIDDEN: list[types.ModuleType | None] = []


def harness_modules() -> list[str]:
    """Names of our modules that are imported; kept for ``forget_harness``."""
    _HARNESS[:] = [name for name in sys.modules if name.startswith("ctrl_megatron")]
    return _HARNESS


def fresh_streams() -> None:
    """Text streams over the descriptors 0, 1 and 2 in place of the forker's."""
    source = io.BufferedReader(io.FileIO(0, closefd=False))
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(source, encoding="utf-8")  # type: ignore[misc]
    for number, name in ((1, "stdout"), (2, "stderr")):
        raw = io.BufferedWriter(io.FileIO(number, "w", closefd=False))
        errors = "strict" if name == "stdout" else "backslashreplace"
        stream = io.TextIOWrapper(raw, encoding="utf-8", errors=errors)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def forget_harness() -> None:
    """Take our modules out of the program's sight; randomness of its own it has since the fork."""
    # A copied list: walking all modules would touch, and so copy, memory shared with the forker.
    # Kept: taking them down would touch as much.
    _HIDDEN.extend(sys.modules.pop(name, None) for name in _HARNESS or harness_modules())


def run(directory: str, code: str, prelude: str = "") -> None:
    """Execute ``code`` from ``directory`` and exit as Python would; never returns.

    ``prelude`` runs before it in the same module, so that the code keeps its line numbers.
    """
    path = os.path.join(directory, NAME)
    os.setsid()
    os.chdir(directory)
    fresh_streams()
    forget_harness()
    sys.argv, sys.path[:0] = [path], [directory]
    sys.orig_argv = [sys.executable, path]
    status = _execute(path, code, prelude)
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    os._exit(_flush(status))


def _execute(path: str, code: str, prelude: str) -> int:
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=path, __builtins__=__builtins__)
    sys.modules["__main__"] = module
    try:
        with open(path, "w", encoding="utf-8", errors="surrogatepass") as stream:
            stream.write(code)
        if prelude:
            exec(compile(prelude, "prelude.py", "exec", dont_inherit=True), module.__dict__)
        exec(compile(code, path, "exec", dont_inherit=True), module.__dict__)
    except SystemExit as stop:
        return _exit_status(stop.code)
    except BaseException as error:
        # The first frame is ours.
        trace = error.__traceback__.tb_next if error.__traceback__ else None
        sys.stdout.flush()
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return 1
    return 0


def _exit_status(code: object) -> int:
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    print(code, file=sys.stderr)
    return 1


def _flush(status: int) -> int:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            status = status or 120  # what the interpreter itself exits with
    return status

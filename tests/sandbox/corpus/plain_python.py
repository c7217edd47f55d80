"""The oracle: what plain CPython and pytest say of a program on tests, in one process.

Each test runs in a fork of this process, in an empty folder that holds the program as
``solution.py``. A text that defines test functions or classes runs under pytest, which imports the
program's names; any other text runs as a script whose globals are the program's.
"""

from __future__ import annotations

import logging
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import types
import warnings
from pathlib import Path

import pytest

from .cases import Case

SECONDS = 20.0
"""How long a test may take."""

_UNIT_TESTS = re.compile(
    r"^(?:def test|async def test|class \w+\([\w., ]*TestCase|class Test)", re.MULTILINE
)
_PYTEST = ("-q", "-s", "--noconftest", "--rootdir=.", "--basetemp=pytest", "-p", "no:cacheprovider")
_IMPORTS = """
import solution as _s
globals().update({k: v for k, v in vars(_s).items() if k[0] != "_"})
del _s
"""


def passes(case: Case, program: str) -> bool:
    """Whether the program passes all tests."""
    return all(passes_test(case, program, test) for test in case.tests)


def passes_test(case: Case, program: str, test: str) -> bool:
    """Whether the program passes one test, in a process of its own."""
    folder = tempfile.mkdtemp(prefix="corpus-")
    try:
        child = os.fork()
        if child == 0:
            _run_and_exit(folder, case.setup, program, test)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run_and_exit(folder: str, setup: str, program: str, test: str) -> None:
    status = 1
    try:
        _settle(folder)
        Path("solution.py").write_text(f"{program}\n{setup}")
        if _UNIT_TESTS.search(test):
            Path("test_case.py").write_text(_IMPORTS + test)
            status = int(pytest.main([*_PYTEST, "test_case.py"]))
        else:
            _run_script(program, setup, test)
            status = 0
    finally:
        sys.stdout.flush()
        os._exit(status)


def _settle(folder: str) -> None:
    """Make the forked process look like one that has just been started in the folder."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(null, descriptor)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    os.chdir(folder)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.environ.pop("PYTEST_ADDOPTS", None)
    tempfile.tempdir = folder
    sys.argv = ["test_case.py"]
    sys.path.insert(0, folder)
    sys.modules.pop("solution", None)
    sys.dont_write_bytecode = True
    logging.root.handlers.clear()
    warnings.resetwarnings()
    random.seed()


def _run_script(program: str, setup: str, test: str) -> None:
    module = types.ModuleType("solution")
    module.__file__ = os.path.abspath("solution.py")
    sys.modules["solution"] = module
    for name, text in (("solution.py", program), ("setup.py", setup), ("test_case.py", test)):
        code = compile(text, os.path.abspath(name), "exec", dont_inherit=True)
        exec(code, vars(module))

"""A value that keeps the judge busy in C, where no alarm reaches it, costs its test's time and no
more: not the tests after it, nor the service's patience.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from ctrl_megatron.sandbox.wire import CommandRunStatus, EvalResult

Judge = Callable[..., EvalResult]
SECONDS = 0.4
LATE = 1.0
"""Seconds per test for the supervisor's grace, a new judge, and a busy machine."""
VALUES = {
    "a sum": ("range(10**12)", "sum(f(1)) == 6"),
    "a search": ("range(10**12)", "0.5 in f(1)"),
    "a power": ("10**9", "3 ** f(1) == 5"),
    "digits": ("1 << (1 << 24)", "str(f(1)) == '5'"),
    "a list": ("range(10**12)", "max(f(1)) == 5"),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_loop_in_c_ends_with_its_tests_time(judge: Judge, name: str) -> None:
    value, test = VALUES[name]
    tests = [f"import sys\nsys.set_int_max_str_digits(0)\nassert {test}"] * 3
    started = time.monotonic()
    result = judge(f"def f(x): return {value}", tests, run_timeout=SECONDS)
    assert time.monotonic() - started < 2 * (SECONDS + LATE)
    runs = [case.exec_info.run_result for case in result.tests]
    assert [run.status for run in runs[:2] if run] == [CommandRunStatus.TIME_LIMIT_EXCEEDED] * 2
    assert (result.tests[2].test_info or {})["reason"].startswith("not run: 2 tests timed out")


def test_the_tests_after_it_are_judged(judge: Judge) -> None:
    tests = ["assert f(0) == 0", "assert sum(f(1)) == 3", "assert f(2) == R", "assert f(3) == 3"]
    code = "def f(x): return range(10**12) if x == 1 else x"
    result = judge(code, tests, setup="R = f(2)", entry_point="f", run_timeout=SECONDS)
    assert [case.passed for case in result.tests] == [True, False, True, True]


def test_it_is_the_last_verdict_where_the_first_failure_ends_all(judge: Judge) -> None:
    tests = ["assert sum(f(1)) == 3", "assert f(2) == 1"]
    result = judge("def f(x): return range(10**12)", tests, run_all=False, run_timeout=SECONDS)
    assert [case.passed for case in result.tests] == [False]


def test_a_setup_that_is_kept_busy(judge: Judge) -> None:
    code, setup = "def f(x): return range(10**12)", "R = sum(f(1))"
    tests = ["assert f(1) == R", "assert f(2) == R", "assert f(3) == R"]
    result = judge(code, tests, setup=setup, entry_point="f", run_timeout=SECONDS)
    reasons = [(case.test_info or {})["reason"] for case in result.tests]
    assert reasons[:2] == ["time limit exceeded (wall-clock time)"] * 2 and "not run" in reasons[2]


def test_a_test_that_catches_its_own_end(judge: Judge) -> None:
    tests = [
        "x = f(1)\nwhile x == 1:\n    try:\n        while True: pass\n"
        "    except BaseException: x = 1\nassert x == 2",
        "assert f(1) == 1",
    ]
    result = judge("def f(x): return 1", tests, run_timeout=SECONDS)
    assert [case.passed for case in result.tests] == [False, True]

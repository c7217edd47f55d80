"""Limits count processor time, with a multiple of it by the clock, and a verdict says which one the
program met.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest

from ctrl_megatron.sandbox.jail.linux import cpu_seconds
from ctrl_megatron.sandbox.wire import EvalResult

Judge = Callable[..., EvalResult]
CPU, WALL = "time limit exceeded (CPU time)", "time limit exceeded (wall-clock time)"
COMPUTE = "import time\nend = time.process_time() + {}\nwhile time.process_time() < end: pass\n"
SLEEP = "import time\ntime.sleep({})\n"


def reason(result: EvalResult) -> str:
    return str((result.tests[0].test_info or {})["reason"])


@pytest.mark.parametrize(
    ("body", "passes", "why"),
    [
        (SLEEP.format(0.6), True, ""),
        (COMPUTE.format(0.1), True, ""),
        (COMPUTE.format(9), False, "time limit exceeded ("),
        (SLEEP.format(9), False, WALL),
        ("x = bytearray(1 << 40)", False, "memory limit exceeded"),
    ],
)
def test_functions_and_programs_have_the_same_limits(
    judge: Judge, judge_stdio: Judge, body: str, passes: bool, why: str
) -> None:
    lines = "\n    ".join(body.strip().split("\n"))
    function = judge(f"def f(x):\n    {lines}\n    return x", ["assert f(1) == 1"], run_timeout=0.4)
    program = judge_stdio(f"{body}\nprint(input())", [("1", "1")], run_timeout=0.4)
    for result in (function, program):
        assert (result.accepted, why in reason(result)) == (passes, True), reason(result)


def test_a_function_that_computes_meets_the_limit_of_processor_time(judge: Judge) -> None:
    code = "def f(x):\n    while True: pass"
    loads = "while True: pass"
    for text, tests in ((code, ["assert f(1) == 1"]), (loads, ["assert f(1) == 1"])):
        began = time.monotonic()
        result = judge(text, tests, entry_point="f", run_timeout=1.0)
        assert reason(result).endswith(CPU) or time.monotonic() - began > 3.0


def test_flooding_is_named(judge_stdio: Judge) -> None:
    assert reason(judge_stdio("print('x' * (1 << 24))", [("", "")])) == "output limit exceeded"


def test_the_clock_of_another_process() -> None:
    before, own = cpu_seconds(os.getpid()), time.process_time()
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    used = cpu_seconds(os.getpid()) - before
    assert 0.05 <= used <= time.process_time() - own + 0.05
    assert cpu_seconds(2**22 + 1) == 0.0

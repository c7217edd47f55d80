"""A program sees the arguments of the call that it answers, and of no other test's."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ctrl_megatron.sandbox.wire import EvalResult

Judge = Callable[..., EvalResult]

FRAMES = """
def seen():
    frame, values = sys._getframe(1), []
    while frame is not None:
        values += frame.f_locals.values()
        frame = frame.f_back
    return values
"""
COLLECTED = """
def seen():
    return [o for o in gc.get_objects() if type(o) in (list, tuple, dict, str)]
"""
READERS = """
def seen():
    return [vars(o) for o in gc.get_objects() if type(o).__name__ == "FrameReader"]
"""
DESCRIPTORS = """
def seen():
    peeked = []
    for fd in range(3, 32):
        try:
            with socket.socket(fileno=os.dup(fd)) as line:
                peeked.append(line.recv(1 << 16, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except OSError:
            pass
    return peeked
"""
SPY = """
import gc, os, socket, sys
{look}
def f(number, word):
    words = ["wo" + "rd%02d" % n for n in range(6)]
    found = [repr(thing) for thing in seen() if thing is not words]
    return [n for n, w in enumerate(words) if n != number and any(w in text for text in found)]
"""


@pytest.mark.parametrize("look", [FRAMES, COLLECTED, READERS, DESCRIPTORS])
def test_arguments_of_other_tests_are_not_in_the_programs_process(judge: Judge, look: str) -> None:
    tests = [f"assert f({n}, 'word{n:02}') == []" for n in range(6)]
    result = judge(SPY.format(look=look), tests)
    assert result.accepted, [(case.test_info or {})["reason"] for case in result.tests]


def test_large_calls_and_large_answers_do_not_deadlock(judge: Judge) -> None:
    """Sending must not block on a program that blocks on sending."""
    tests = [f"assert f([{x}] * {n}) != 0" for x, n in enumerate([10, 20_000, 9, 300_000, 8, 7])]
    result = judge("def f(x): return [x[0]] * 400_000", tests, run_timeout=20.0)
    assert [case.passed for case in result.tests] == [True] * len(tests)


def test_each_test_has_its_own_time(judge: Judge) -> None:
    code = "import time\ndef f(x):\n    time.sleep(0.25)\n    return x"
    assert judge(code, [f"assert f({x}) == {x}" for x in range(5)], run_timeout=1.0).accepted

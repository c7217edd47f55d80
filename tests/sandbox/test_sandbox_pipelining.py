"""Calls that are sent ahead change no verdict."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

import pytest

from ctrl_megatron.sandbox.jail import frames
from ctrl_megatron.sandbox.jail.judge import certain_call
from ctrl_megatron.sandbox.jail.remote_calls import CandidateConnection, RemoteCall
from ctrl_megatron.sandbox.wire import EvalResult

CERTAIN = {
    "assert f(1) == 2": ((1,), {}),
    "assert not f()": ((), {}),
    "assert (f([1, {2: 'a'[0]}], k=-1.5)) in (1, 2), 'why'": (([1, {2: "a"}],), {"k": -1.5}),
    "assert f(2 ** 3)[0] < 3": ((8,), {}),
    "assert 1 < f('x') <= 3": (("x",), {}),
    "assert f(1).real + 1 == 2": None,  # an attribute is a name too
    "assert f(1) == f(1)": None,
    "assert f(f(1))": None,
    "assert g(1) == 1": None,
    "assert f(x) == 1": None,
    "assert f(len('a')) == 1": None,
    "assert set() == f(1)": None,
    "assert [f(x) for x in (1, 2)] == [1, 2]": None,
    "assert (lambda: f(1))() == 1": None,
    "assert (f := 3) == 3": None,
    "assert 1 or f(2)": None,
    "assert 0 and f(2)": None,
    "assert 1 / 0 == f(1)": None,
    "assert f(1) == 'f'": None,  # perhaps a second use
    "assert f(1) == 1; f(2)": None,
    "assert f(1) == 1\nf(2)": None,
    "while f(1): pass": None,
    "f(1)": None,
    "assert True": None,
}

PROGRAMS = {
    "right": "def f(x): return x",
    "counts": "n = 0\ndef f(x):\n    global n\n    n += 1\n    return n",
    "ends at the third call": "import os\nn = 0\ndef f(x):\n    global n\n    n += 1\n"
    "    if n == 3: os._exit(0)\n    return x",
    "hangs on 2": "def f(x):\n    while x == 2: pass\n    return x",
    "raises on 3": "def f(x):\n    if x == 3: raise KeyError(x)\n    return x",
    "changes its argument": "def f(x):\n    if isinstance(x, list): x.append(1)\n    return x",
    "prints": "def f(x):\n    print('x' * 1000)\n    return x",
    "answers twice": 'import os, struct\ndef f(x):\n    body = b\'{"id":"","value":1}\'\n'
    "    for fd in range(3, 9):\n        try: os.write(fd, struct.pack('>I', len(body)) + body)\n"
    "        except OSError: pass\n    return x",
}
TESTS = (
    *(f"assert f({x}) == {x}" for x in range(6)),
    "y = f(6)\nassert y == 6",
    "assert f(7) == f(7)",
    "assert f(...) is None",  # cannot cross
    "assert f([8]) == [8]",
    *(f"assert f({x}) == {x}" for x in range(9, 50)),
)


@pytest.mark.parametrize("test", CERTAIN)
def test_a_call_is_certain_only_where_nothing_else_can_happen(test: str) -> None:
    call = certain_call(test, compile(test, "test.py", "exec"), {"f": "f"})
    wanted = CERTAIN[test]
    assert (call and (call.arguments, call.named)) == wanted
    assert call is None or call.name == "f"


def test_a_name_that_is_no_stub_any_more_is_not_called() -> None:
    test = "assert f(1) == 1"
    assert certain_call(test, compile(test, "test.py", "exec"), {}) is None


def test_a_stub_may_have_another_name_in_the_tests() -> None:
    test = "assert candidate(1) == 1"
    call = certain_call(test, compile(test, "test.py", "exec"), {"f": "f", "candidate": "f"})
    assert call == RemoteCall("f", (1,), {})


@pytest.mark.parametrize("run_all", [True, False])
@pytest.mark.parametrize("name", PROGRAMS)
def test_verdicts_are_those_of_calls_one_by_one(
    judge: Callable[..., EvalResult], name: str, run_all: bool
) -> None:
    # A test of more than one line is never looked at ahead.
    apart = [test + "\n" for test in TESTS]
    seconds = 1.5 if name.startswith("hangs") else 10.0
    ahead, plain = (
        judge(PROGRAMS[name], list(tests), run_all=run_all, run_timeout=seconds)
        for tests in (TESTS, apart)
    )
    found, wanted = (
        [(case.passed, (case.test_info or {})["reason"]) for case in result.tests]
        for result in (ahead, plain)
    )
    assert found == wanted
    if name == "right" and run_all:
        assert sum(passed for passed, _ in found) == len(TESTS) - 1


def test_calls_that_are_sent_ahead_are_not_sent_again() -> None:
    asks, supervisor = socket.socketpair()
    line, given = socket.socketpair()
    with asks, supervisor, line, given:
        socket.send_fds(supervisor, [b"candidate"], [given.fileno()])
        connection = CandidateConnection(asks, 5.0)
        connection.begin_test(time.monotonic() + 5.0)
        connection.pipeline([RemoteCall("f", (1,), {}), RemoteCall("f", (2,), {"k": 3})])
        calls = frames.FrameReader(line.fileno(), limit=1 << 16)
        sent = [calls.receive() for _ in range(2)]
        assert [(call["args"], call["named"]) for call in sent] == [([1], {}), ([2], {"k": 3})]
        for call in sent:
            frames.send(line.fileno(), {"id": call["id"], "value": call["args"][0] * 10})
        assert connection.pipelined == 2
        assert connection.call("f", (1,), {}) == 10 and connection.pipelined == 1
        assert connection.call("f", (2,), {"k": 3}) == 20 and connection.pipelined == 0
        line.setblocking(False)
        with pytest.raises(BlockingIOError):
            line.recv(1)
        connection.close()


def test_large_calls_and_large_answers_wait_for_nobody(judge: Callable[..., EvalResult]) -> None:
    """Sending must not block on a program that blocks on sending."""
    tests = [f"assert f([{x}] * {n}) != 0" for x, n in enumerate([10, 20_000, 9, 300_000, 8, 7])]
    result = judge("def f(x): return [x[0]] * 400_000", tests, run_timeout=20.0)
    assert [case.passed for case in result.tests] == [True] * len(tests)


def test_a_setup_that_takes_a_stubs_place_is_heard(judge: Callable[..., EvalResult]) -> None:
    tests = ["assert f(1) == 'mine'", "assert f(2) == 'mine'"]
    result = judge("def f(x): return x", tests, setup="globals()['f'] = lambda x: 'mine'")
    assert [case.passed for case in result.tests] == [True, True]

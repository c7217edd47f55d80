"""Executes the tests. The functions under test are stubs that call into the candidate's process.

Only data of exact builtin types comes back, so comparisons are Python's own; a test that saw the
candidate die, overrun its time or break the protocol has failed, whatever the test's own code
caught.
"""

from __future__ import annotations

import ast
import os
import random
import signal
import socket
import time
from collections.abc import Callable, Container, Iterator
from types import CodeType
from typing import Any, TypeGuard

from ctrl_megatron.sandbox.jail import frames, pytest_stand_in
from ctrl_megatron.sandbox.jail.evidence import NAME, Evidence
from ctrl_megatron.sandbox.jail.remote_calls import (
    CandidateConnection,
    CandidateLost,
    HarnessFailure,
)

_REASON_LENGTH = 600
_CHANGING = "_changing"
"""A function of ours in the tests' namespace."""
SETUP = -1
"""Stands for the setup among the numbers of tests."""
_AT_ONCE = 1e-6
"""Seconds; 0 would switch the timer off."""


def run_tests(requests: socket.socket, verdicts: int, spec: dict[str, Any]) -> None:
    """Run the tests of ``spec``; never returns. A candidate comes for each request on ``requests``.

    For each test goes a frame to ``verdicts``: this job's nonce, the test's index, its status
    (``passed``, ``failed``, ``timeout``, ``died``, ``protocol``, ``not_run``), the reason where it
    did not pass, seconds of wall clock. The nonce alone, and exit status 0, mean that was all.
    """
    signal.signal(signal.SIGALRM, _alarm)
    # Equal tests draw equal numbers, which a program that does not know the tests cannot foresee.
    random.seed("\n".join((spec["setup"], *spec["tests"])))
    pytest_stand_in.install()
    _TestRunner(requests, verdicts, spec).run()
    os._exit(0)


def _alarm(_number: int, _frame: object) -> None:
    raise CandidateLost("timeout", "time limit exceeded")


class _TestRunner:
    def __init__(self, requests: socket.socket, verdicts: int, spec: dict[str, Any]) -> None:
        self._requests = requests
        self._verdicts = verdicts
        self._spec = spec
        self._seconds: float = spec["seconds"]
        self._in_place = frozenset(spec["in_place"])
        """Tests that look at what a call does to its arguments; ``SETUP`` is the setup."""
        self._candidate: CandidateConnection | None = None
        self._timeouts = 0
        self._reloading = 0.0
        """Seconds spent on starting the program again, since they last counted as a time-out."""
        stubs = {name: self._stub(name) for name in spec["stubs"]}
        self._namespace: dict[str, Any] = {"__name__": "tests", _CHANGING: self._changing, **stubs}
        self._stub_names = {id(stub): name for name, stub in stubs.items()}
        self._evidence = Evidence(lambda: self._candidate.calls if self._candidate else 0)
        self._namespace[NAME] = self._evidence

    def run(self) -> None:
        unusable = self._prepare()
        for index in range(len(self._spec["tests"])):
            started = time.monotonic()
            if unusable is None and self._timeouts >= self._spec["max_timeouts"]:
                unusable = "not_run", f"not run: {self._timeouts} tests timed out before"
            status, reason = unusable or self._run_test(index)
            self._timeouts += status == "timeout"
            # A program chooses part of this text; lone surrogates are no text on the wire.
            reason = reason[:_REASON_LENGTH].encode(errors="backslashreplace").decode()
            self._report(index, status, reason, time.monotonic() - started)
            if status != "passed" and not self._spec["run_all"]:
                break
        self._report()

    def _report(self, *verdict: Any) -> None:
        frames.send(self._verdicts, [self._spec["nonce"], *verdict])

    def _prepare(self) -> tuple[str, str] | None:
        """Load the program and run the setup; what makes every test fail, or None."""
        try:
            failure = self._connect()
        except CandidateLost as lost:
            failure = f"the program failed to load: {lost.reason}"
            return ("timeout" if lost.status == "timeout" else "failed"), failure
        return ("failed", failure) if failure is not None else self._run_setup()

    def _run_setup(self) -> tuple[str, str] | None:
        assert self._candidate is not None
        deadline = time.monotonic() + self._seconds
        setup, in_place = self._spec["setup"], SETUP in self._in_place
        status, reason = self._guarded(setup, "setup.py", deadline, in_place=in_place)
        self._evidence.setup_called = self._candidate.calls > 0
        return None if status == "passed" else (status, f"the tests' setup failed: {reason}")

    def _connect(self) -> str | None:
        if self._candidate is not None:
            self._candidate.close()
        self._candidate = CandidateConnection(self._requests, self._seconds)
        return self._candidate.load()

    def _reconnect(self) -> tuple[str, str] | None:
        """Start the program again; what makes the test fail, or None. A program that takes long to
        load and dies at every call uses up time as one that hangs does.
        """
        started = time.monotonic()
        try:
            failure = self._connect()
            if failure is not None:
                return "failed", failure
            return self._run_setup() if self._evidence.setup_called else None
        except CandidateLost as lost:
            return lost.status, lost.reason
        finally:
            self._reloading += time.monotonic() - started
            if self._reloading >= self._seconds:
                self._timeouts, self._reloading = self._timeouts + 1, 0.0

    def _run_test(self, index: int) -> tuple[str, str]:
        candidate = self._candidate
        unusable = candidate is None or candidate.lost is not None or candidate.busy
        if unusable and (failure := self._reconnect()):
            return failure
        deadline, in_place = time.monotonic() + self._seconds, index in self._in_place
        marked = self._spec["marked"][index]
        self._evidence.begin()
        status, reason = self._guarded(
            marked or self._spec["tests"][index], "test.py", deadline, in_place=in_place
        )
        if status == "passed" and (missing := self._evidence.missing(marked=marked is not None)):
            return "failed", missing
        return status, reason

    def _until(self, deadline: float, work: Callable[[], None]) -> None:
        signal.setitimer(signal.ITIMER_REAL, max(deadline - time.monotonic(), _AT_ONCE))
        try:
            work()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _guarded(
        self, source: str, name: str, deadline: float, *, in_place: bool
    ) -> tuple[str, str]:
        """Run ``source``, which may call the candidate, until ``deadline``: status and reason."""
        candidate = self._candidate
        assert candidate is not None
        candidate.begin_test(deadline)
        changing = self._spec["stubs"] if in_place else ()
        status, reason = "failed", ""
        try:
            self._until(deadline, lambda: exec(_compiled(source, name, changing), self._namespace))
            status = "passed"
        except AssertionError as error:
            reason = _join("AssertionError", error, candidate.last_call)
        except HarnessFailure as failure:
            status, reason = failure.status, failure.reason
            if candidate.busy and isinstance(failure, CandidateLost):
                candidate.lost = candidate.lost or failure
        except BaseException as error:
            reason = _join(type(error).__name__, error, "")
        if candidate.lost is not None:
            return candidate.lost.status, candidate.lost.reason
        if candidate.busy:
            return "protocol", "a call was left unanswered"
        # What follows holds although the test's own code may have swallowed it.
        if time.monotonic() >= candidate.deadline:
            return "timeout", "time limit exceeded"
        if candidate.failure is not None:
            return candidate.failure.status, candidate.failure.reason
        return status, reason

    def _stub(self, name: str) -> Callable[..., Any]:
        def remote(*arguments: Any, **named: Any) -> Any:
            assert self._candidate is not None
            return self._candidate.call(name, arguments, named)

        remote.__name__ = remote.__qualname__ = name
        return remote

    def _changing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` so that its call changes arguments here as it does in the program."""
        name = self._stub_names.get(id(function))

        def remote(*arguments: Any, **named: Any) -> Any:
            assert self._candidate is not None and name is not None
            return self._candidate.call(name, arguments, named, in_place=True)

        return function if name is None else remote


def _compiled(source: str, name: str, changing: Container[str] = ()) -> CodeType:
    """Calls of ``changing`` that are made for what they do to their arguments do it to the test's.

    No others: a program could change what its answer is compared with.
    """
    if not changing:
        return compile(source, name, "exec", dont_inherit=True)
    tree = ast.parse(source, name)
    for call in list(ignored_calls(tree, changing)):
        call.func = ast.Call(ast.Name(_CHANGING, ast.Load()), [call.func], [])
    return compile(ast.fix_missing_locations(tree), name, "exec", dont_inherit=True)


def ignored_calls(tree: ast.AST, names: Container[str]) -> Iterator[ast.Call]:
    """Calls of ``names`` whose result is thrown away or compared with None."""
    for node in ast.walk(tree):
        call: ast.AST | None = node.value if isinstance(node, ast.Expr) else None
        if isinstance(node, ast.Compare) and any(
            isinstance(c, ast.Constant) and c.value is None for c in node.comparators
        ):
            call = node.left
        if is_call_of(call, names):
            yield call


def is_call_of(node: ast.AST | None, names: Container[str]) -> TypeGuard[ast.Call]:
    """Whether ``node`` calls one of ``names``."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names


def _join(kind: str, error: BaseException, call: str) -> str:
    try:
        text = str(error)
    except Exception:
        text = ""
    return ": ".join(part for part in (kind, text, call) if part)

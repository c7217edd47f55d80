"""Executes the tests. The functions under test are stubs that call into the candidate's process.

Only data of exact builtin types comes back, so comparisons are Python's own; a test that saw the
candidate die, overrun its time or break the protocol has failed, whatever the test's own code
caught.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable
from types import CodeType, ModuleType
from typing import Any

from ctrl_megatron.sandbox.jail import frames, pytest_stand_in
from ctrl_megatron.sandbox.jail.evidence import CHANGING, NAME, Evidence
from ctrl_megatron.sandbox.jail.remote_calls import (
    CandidateConnection,
    CandidateLost,
    HarnessFailure,
)
from ctrl_megatron.sandbox.jail.remote_objects import RemoteObject, Stub, Trust

_REASON_LENGTH = 600
_STARTING_SECONDS = 2.0
"""For what the supervisor does before the program loads."""
_AT_ONCE = 1e-6
"""Seconds; 0 would switch the timer off."""


def run_tests(requests: socket.socket, verdicts: int, spec: dict[str, Any]) -> None:
    """Run the tests of ``spec``; never returns. A candidate comes for each request on ``requests``.

    For each test goes a frame to ``verdicts``: this job's nonce, the test's index, its status
    (``passed``, ``failed``, ``timeout``, ``died``, ``protocol``, ``not_run``), the reason where it
    did not pass, seconds of wall clock. The nonce alone, and exit status 0, mean that was all. A
    time (``time.monotonic``) behind a verdict, or in its place, says until when what follows may
    take: no alarm ends a loop in C, so the supervisor ends a judge that is late. Another goes on
    with test ``first``.
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
        self._candidate: CandidateConnection | None = None
        self._timeouts: int = spec["timeouts"]
        self._reloading = 0.0
        """Seconds spent on starting the program again, since they last counted as a time-out."""
        # Dataclasses look for the module of their annotations.
        sys.modules["tests"] = ModuleType("tests")
        self._namespace: dict[str, Any] = vars(sys.modules["tests"])
        self._namespace[CHANGING] = self._changing
        for name in spec["stubs"]:
            trust = Trust.MEMBER if name in spec["classes"] else Trust.RESULT
            self._namespace[name] = Stub(self._connection, name, trust)
        for name in spec["exceptions"]:
            self._namespace[name] = type(name, (Exception,), {"__module__": "tests"})
        self._verdict: list[Any] = []
        """That the supervisor has not been told."""
        self._evidence = Evidence(lambda: self._candidate.calls if self._candidate else 0)
        self._namespace[NAME] = self._evidence

    def run(self) -> None:
        most = self._spec["max_timeouts"]
        unusable = self._prepare() if self._timeouts < most else None
        for index in range(self._spec["first"], len(self._spec["tests"])):
            started = time.monotonic()
            if unusable is None and self._timeouts >= most:
                unusable = "not_run", f"not run: {self._timeouts} tests timed out before"
            status, reason = unusable or self._run_test(index)
            self._timeouts += status == "timeout"
            # A program chooses part of this text; lone surrogates are no text on the wire.
            reason = reason[:_REASON_LENGTH].encode(errors="backslashreplace").decode()
            # It is sent with what follows: a write costs as much as a call of the program.
            self._send_verdict()
            self._verdict = [index, status, reason, time.monotonic() - started]
            if status != "passed" and not self._spec["run_all"]:
                break
        self._send_verdict()
        self._report()

    def _report(self, *told: Any) -> None:
        frames.send(self._verdicts, [self._spec["nonce"], *told])

    def _send_verdict(self, *until: float) -> None:
        """Tell the verdict that is not told yet, and until when what follows may take."""
        if self._verdict or until:
            self._report(*self._verdict, *until)
        self._verdict = []

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
        status, reason = self._guarded(self._spec["setup"], "setup.py", deadline)
        self._evidence.setup_called = self._candidate.calls > 0
        return None if status == "passed" else (status, f"the tests' setup failed: {reason}")

    def _connect(self) -> str | None:
        if self._candidate is not None:
            self._candidate.close()
        self._send_verdict(time.monotonic() + self._seconds + _STARTING_SECONDS)
        self._candidate = CandidateConnection(
            self._requests,
            self._seconds,
            classes=frozenset(self._spec["classes"]),
            class_of_tests=self._class_of_tests,
        )
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
        deadline, marked = time.monotonic() + self._seconds, self._spec["marked"][index]
        self._evidence.begin()
        source = self._spec["tests"][index] if marked is None else marked
        status, reason = self._guarded(source, "test.py", deadline)
        if status == "passed" and (missing := self._evidence.missing(marked=marked is not None)):
            return "failed", missing
        return status, reason

    def _until(self, deadline: float, work: Callable[[], None]) -> None:
        self._send_verdict(deadline)
        signal.setitimer(signal.ITIMER_REAL, max(deadline - time.monotonic(), _AT_ONCE))
        try:
            work()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _guarded(self, source: str, name: str, deadline: float) -> tuple[str, str]:
        """Run ``source``, which may call the candidate, until ``deadline``: status and reason."""
        candidate = self._candidate
        assert candidate is not None
        candidate.begin_test(deadline)
        status, reason = "failed", ""
        try:
            self._until(deadline, lambda: exec(_compiled(source, name), self._namespace))
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

    def _connection(self) -> CandidateConnection:
        assert self._candidate is not None
        return self._candidate

    def _class_of_tests(self, name: str) -> type | None:
        """The class that setup or tests define under a name."""
        found = self._namespace.get(name)
        return found if isinstance(found, type) and found.__module__ == "tests" else None

    def _changing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` so that its call changes arguments here as it does in the program."""
        if not isinstance(function, (Stub, RemoteObject)):
            return function

        def remote(*arguments: Any, **named: Any) -> Any:
            return self._connection().ask(
                function._of, "call", "", arguments, named, trust=function._trust, in_place=True
            )

        return remote


def _compiled(source: str, name: str) -> CodeType:
    return compile(source, name, "exec", dont_inherit=True)


def _join(kind: str, error: BaseException, call: str) -> str:
    try:
        text = str(error)
    except Exception:
        text = ""
    return ": ".join(part for part in (kind, text, call) if part)

"""The judge process: executes the tests. The functions under test are stubs that call into the
candidate's process.

Only data of exact builtin types is returned, so comparisons are Python's own. A test during which
the candidate died, exceeded its time or broke the protocol has failed, whatever the test's own code
caught.
"""

from __future__ import annotations

import os
import random
import socket
import sys
import time
from collections.abc import Callable
from types import CodeType, ModuleType
from typing import Any

from ctrl_megatron.sandbox.jail import frames, pytest_stand_in
from ctrl_megatron.sandbox.jail.clock import JudgeClock
from ctrl_megatron.sandbox.jail.evidence import CHANGING, NAME, Evidence
from ctrl_megatron.sandbox.jail.exceptions import ENDINGS, CandidateLost, HarnessFailure
from ctrl_megatron.sandbox.jail.remote_calls import CandidateConnection
from ctrl_megatron.sandbox.jail.remote_objects import RemoteObject, Stub, Trust

_REASON_LENGTH = 600
_STARTING_SECONDS = 2.0
"""Allowance for the supervisor's work before the program loads."""


def run_tests(requests: socket.socket, verdicts: int, spec: dict[str, Any]) -> None:
    """Run the tests of ``spec``; never returns. Each request on ``requests`` brings a new
    candidate.

    For each test one frame is written to ``verdicts``: this job's nonce, the test's index, its
    status (``passed``, ``failed``, ``timeout``, ``died``, ``protocol``, ``not_run``), the reason if
    it did not pass, and seconds of wall clock. A frame with the nonce alone, and exit status 0,
    mark the end. A time (``time.monotonic``) at the end of a frame is the deadline of the next
    step: an alarm cannot interrupt a loop in C, so the supervisor ends a judge that is late, and
    another judge continues with test ``first``.
    """
    # Equal tests draw equal random numbers. A program that does not know the tests cannot predict
    # them.
    random.seed("\n".join((spec["setup"], *spec["tests"])))
    pytest_stand_in.install()
    _TestRunner(requests, verdicts, spec).run()
    os._exit(0)


class _TestRunner:
    def __init__(self, requests: socket.socket, verdicts: int, spec: dict[str, Any]) -> None:
        self._requests = requests
        self._verdicts = verdicts
        self._spec = spec
        self._seconds: float = spec["seconds"]
        self._clock = JudgeClock(spec["seconds"], spec["wall_seconds"], self._send_verdict)
        self._candidate: CandidateConnection | None = None
        self._timeouts: int = spec["timeouts"]
        self._reloading = 0.0
        """Seconds spent on restarts of the program since they last counted as a time-out."""
        # Dataclasses look up the module of their annotations.
        sys.modules["tests"] = ModuleType("tests")
        self._namespace: dict[str, Any] = vars(sys.modules["tests"])
        self._namespace[CHANGING] = self._changing
        for name in spec["stubs"]:
            trust = Trust.MEMBER if name in spec["classes"] else Trust.RESULT
            self._namespace[name] = Stub(self._connection, name, trust)
        for name in spec["exceptions"]:
            self._namespace[name] = type(name, (Exception,), {"__module__": "tests"})
        self._endings: dict[str, type[BaseException]] = {}
        """Those of ``ENDINGS`` that the current test names."""
        self._verdict: list[Any] = []
        """The last verdict, until it is sent."""
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
            # A program influences this text, and lone surrogates cannot be encoded.
            reason = reason[:_REASON_LENGTH].encode(errors="backslashreplace").decode()
            # Sent together with the next frame, because a write costs as much as a call of the
            # program.
            self._send_verdict()
            self._verdict = [index, status, reason, time.monotonic() - started]
            if status != "passed" and not self._spec["run_all"]:
                break
        self._send_verdict()
        self._report()

    def _report(self, *parts: Any) -> None:
        frames.send(self._verdicts, [self._spec["nonce"], *parts])

    def _send_verdict(self, *until: float) -> None:
        """Send the pending verdict, and the deadline of the next step."""
        if self._verdict or until:
            self._report(*self._verdict, *until)
        self._verdict = []

    def _prepare(self) -> tuple[str, str] | None:
        """Load the program and run the setup. Returns None, or the status and reason that every
        test gets.
        """
        try:
            failure = self._connect()
        except CandidateLost as lost:
            failure = f"the program failed to load: {lost.reason}"
            return ("timeout" if lost.status == "timeout" else "failed"), failure
        return ("failed", failure) if failure is not None else self._run_setup()

    def _run_setup(self) -> tuple[str, str] | None:
        assert self._candidate is not None
        status, reason = self._guarded(self._spec["setup"], "setup.py")
        self._evidence.setup_called = self._candidate.calls > 0
        return None if status == "passed" else (status, f"the tests' setup failed: {reason}")

    def _connect(self) -> str | None:
        if self._candidate is not None:
            self._candidate.close()
        self._send_verdict(time.monotonic() + self._spec["wall_seconds"] + _STARTING_SECONDS)
        self._candidate = CandidateConnection(
            self._requests,
            self._clock,
            classes=frozenset(self._spec["classes"]),
            class_of_tests=self._class_of_tests,
        )
        return self._candidate.load()

    def _reconnect(self) -> tuple[str, str] | None:
        """Restart the program. Returns None, or the status and reason of the test's failure. The
        time counts: a program that loads slowly and dies at every call must not use more time than
        one that hangs.
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
        marked = self._spec["marked"][index]
        self._evidence.begin()
        source = self._spec["tests"][index] if marked is None else marked
        status, reason = self._guarded(source, "test.py")
        if status == "passed" and (missing := self._evidence.missing(marked=marked is not None)):
            return "failed", missing
        return status, reason

    def _in_time(self, work: Callable[[], None]) -> None:
        self._clock.start()
        try:
            work()
        finally:
            self._clock.stop()

    def _guarded(self, source: str, name: str) -> tuple[str, str]:
        """Run ``source``, which may call the candidate, for the time of a test. Returns status and
        reason.
        """
        candidate = self._candidate
        assert candidate is not None
        text = f"{source}\n{self._spec['setup']}"
        self._endings = {name: kind for name, kind in ENDINGS.items() if name in text}
        self._clock.begin()
        candidate.begin_test()
        status, reason = "failed", ""
        try:
            self._in_time(lambda: exec(_compiled(source, name), self._namespace))
            status = "passed"
        except AssertionError as error:
            reason = _join("AssertionError", error, candidate.last_call)
        except HarnessFailure as failure:
            status, reason = failure.status, failure.reason
            if candidate.busy and isinstance(failure, CandidateLost):
                candidate.lost = candidate.lost or failure
        except BaseException as error:
            limit = "memory limit exceeded" if isinstance(error, MemoryError) else ""
            reason = _join(type(error).__name__, error, limit)
        if candidate.lost is not None:
            return candidate.lost.status, candidate.lost.reason
        if candidate.busy:
            return "protocol", "a call was left unanswered"
        # These apply even if the test's own code swallowed the exception.
        if over := self._clock.over:
            return "timeout", over
        if candidate.failure is not None:
            return candidate.failure.status, candidate.failure.reason
        return status, reason

    def _connection(self) -> CandidateConnection:
        assert self._candidate is not None
        return self._candidate

    def _class_of_tests(self, name: str) -> type | None:
        """The class that the setup or a test defines under a name, an ending that the test names,
        or None.
        """
        if name in self._endings:
            return self._endings[name]
        found = self._namespace.get(name)
        return found if isinstance(found, type) and found.__module__ == "tests" else None

    def _changing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a stub so that a call changes the test's own arguments as it does in the program."""
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

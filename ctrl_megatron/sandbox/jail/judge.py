"""Executes the tests. The functions under test are stubs that call into the candidate's process.

Only data of exact builtin types comes back, so comparisons are Python's own; a test that saw the
candidate die, overrun its time or break the protocol has failed, whatever the test's own code
caught.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

from ctrl_megatron.sandbox.jail import frames
from ctrl_megatron.sandbox.jail.connection import Connection, Lost

_REASON_LENGTH = 600


def run(asks: socket.socket, verdicts: int, spec: dict[str, Any]) -> None:
    """Run the tests of ``spec``, report each verdict on ``verdicts``; never returns. Exit status 0
    means all told. A candidate comes for each request on ``asks``.
    """
    signal.signal(signal.SIGALRM, _alarm)
    _Judge(asks, verdicts, spec).judge()
    os._exit(0)


def _alarm(_number: int, _frame: object) -> None:
    raise Lost("timeout", "time limit exceeded")


class _Judge:
    def __init__(self, asks: socket.socket, verdicts: int, spec: dict[str, Any]) -> None:
        self._asks = asks
        self._verdicts = verdicts
        self._spec = spec
        self._candidate: Connection | None = None
        self._timeouts = 0
        self._namespace: dict[str, Any] = {"__name__": "tests"}

    def judge(self) -> None:
        for name in self._spec["stubs"]:
            self._namespace[name] = self._stub(name)
        unusable = self._prepare()
        for index, test in enumerate(self._spec["tests"]):
            started = time.monotonic()
            if unusable is None and self._timeouts >= self._spec["max_timeouts"]:
                unusable = "not_run", f"not run: {self._timeouts} tests timed out before"
            status, reason = unusable or self._run(test)
            self._timeouts += status == "timeout"
            self._tell(
                kind="verdict",
                index=index,
                passed=status == "passed",
                status=status,
                # A program chooses part of this text; lone surrogates are no text on the wire.
                reason=reason[:_REASON_LENGTH].encode(errors="backslashreplace").decode(),
                seconds=time.monotonic() - started,
            )
            if status != "passed" and not self._spec["run_all"]:
                break
        self._tell(kind="done")

    def _tell(self, **message: Any) -> None:
        frames.send(self._verdicts, {"nonce": self._spec["nonce"], **message})

    def _prepare(self) -> tuple[str, str] | None:
        """Load the program and run the setup; what makes every test fail, or None."""
        try:
            failure = self._connect()
        except Lost as lost:
            failure = f"the program failed to load: {lost.reason}"
            return ("timeout" if lost.status == "timeout" else "failed"), failure
        if failure is not None:
            return "failed", failure
        status, reason = self._guarded(self._spec["setup"], "setup.py")
        return None if status == "passed" else (status, f"the tests' setup failed: {reason}")

    def _connect(self) -> str | None:
        if self._candidate is not None:
            self._candidate.close()
        self._candidate = Connection(self._asks, self._spec["seconds"])
        return self._candidate.load()

    def _run(self, test: str) -> tuple[str, str]:
        if self._candidate is None or self._candidate.broken is not None or self._candidate.busy:
            try:
                failure = self._connect()
            except Lost as lost:
                return lost.status, lost.reason
            if failure is not None:
                return "failed", failure
        return self._guarded(test, "test.py")

    def _guarded(self, source: str, name: str) -> tuple[str, str]:
        candidate = self._candidate
        assert candidate is not None
        candidate.begin(time.monotonic() + self._spec["seconds"])
        status, reason = "failed", ""
        signal.setitimer(signal.ITIMER_REAL, self._spec["seconds"])
        try:
            exec(compile(source, name, "exec", dont_inherit=True), self._namespace)
            status = "passed"
        except AssertionError as error:
            reason = _join("AssertionError", error, candidate.last_call)
        except Lost as lost:
            status, reason = lost.status, lost.reason
            if candidate.busy:
                candidate.broken = candidate.broken or lost
        except BaseException as error:
            reason = _join(type(error).__name__, error, "")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if candidate.broken is not None:
            return candidate.broken.status, candidate.broken.reason
        if candidate.busy:
            return "protocol", "a call was left unanswered"
        if time.monotonic() >= candidate.deadline:
            # Also when the test's own code swallowed the alarm.
            status, reason = "timeout", "time limit exceeded"
        return status, reason

    def _stub(self, name: str) -> Callable[..., Any]:
        def remote(*arguments: Any, **named: Any) -> Any:
            assert self._candidate is not None
            return self._candidate.call(name, arguments, named)

        remote.__name__ = remote.__qualname__ = name
        return remote


def _join(kind: str, error: BaseException, call: str) -> str:
    try:
        text = str(error)
    except Exception:
        text = ""
    return ": ".join(part for part in (kind, text, call) if part)

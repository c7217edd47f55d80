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
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

from ctrl_megatron.sandbox.jail import foresight, frames
from ctrl_megatron.sandbox.jail.connection import Connection, Lost
from ctrl_megatron.sandbox.jail.verdict import Verdict

_REASON_LENGTH = 600
_AHEAD = 32
"""Tests whose calls may be sent together."""


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
        stubs = {name: self._stub(name) for name in spec["stubs"]}
        self._namespace: dict[str, Any] = {"__name__": "tests", **stubs}
        self._stub_names = {id(stub): name for name, stub in stubs.items()}
        self._codes: dict[int, CodeType] = {}
        """Of tests that were looked at before their turn."""
        self._sent_until = 0
        """The test from which on no call was sent ahead."""

    def judge(self) -> None:
        unusable = self._prepare()
        for index in range(len(self._spec["tests"])):
            started = time.monotonic()
            if unusable is None and self._timeouts >= self._spec["max_timeouts"]:
                unusable = "not_run", f"not run: {self._timeouts} tests timed out before"
            status, reason = unusable or self._run(index)
            self._timeouts += status == "timeout"
            # A program chooses part of this text; lone surrogates are no text on the wire.
            reason = reason[:_REASON_LENGTH].encode(errors="backslashreplace").decode()
            self._tell(*Verdict(index, status, reason, time.monotonic() - started))
            if status != "passed" and not self._spec["run_all"]:
                break
        self._tell()

    def _tell(self, *words: Any) -> None:
        """A verdict, or nothing more: that was all."""
        frames.send(self._verdicts, [self._spec["nonce"], *words])

    def _prepare(self) -> tuple[str, str] | None:
        """Load the program and run the setup; what makes every test fail, or None."""
        try:
            failure = self._connect()
        except Lost as lost:
            failure = f"the program failed to load: {lost.reason}"
            return ("timeout" if lost.status == "timeout" else "failed"), failure
        if failure is not None:
            return "failed", failure
        setup = self._spec["setup"]
        status, reason = self._guarded(lambda: self._execute(setup, "setup.py"))
        return None if status == "passed" else (status, f"the tests' setup failed: {reason}")

    def _connect(self) -> str | None:
        if self._candidate is not None:
            self._candidate.close()
        self._sent_until = 0
        self._candidate = Connection(self._asks, self._spec["seconds"])
        return self._candidate.load()

    def _run(self, index: int) -> tuple[str, str]:
        if not self._usable(index):
            try:
                failure = self._connect()
            except Lost as lost:
                return lost.status, lost.reason
            if failure is not None:
                return "failed", failure
        if index >= self._sent_until:
            self._look_ahead(index)
        test = self._codes.pop(index, None) or self._spec["tests"][index]
        return self._guarded(lambda: self._execute(test, "test.py"))

    def _usable(self, index: int) -> bool:
        """Whether the candidate can take the calls of a test, or has them, and no other's."""
        candidate = self._candidate
        if candidate is None or candidate.broken is not None or candidate.busy:
            return False
        return candidate.ahead == max(0, self._sent_until - index)

    def _look_ahead(self, index: int) -> None:
        """Send the calls of this test and of those after it, as far as they are certain."""
        candidate = self._candidate
        assert candidate is not None
        # What goes wrong here goes wrong again in the test about to begin, and counts there.
        self._guarded(lambda: candidate.send_ahead(self._certain_calls(index)))
        self._sent_until = index + candidate.ahead

    def _certain_calls(self, index: int) -> Iterator[foresight.Call]:
        # A setup may have named a stub anew, or put something else in its place.
        names = ((n, self._stub_names.get(id(value))) for n, value in self._namespace.items())
        stubs = {seen: name for seen, name in names if name is not None}
        for at, test in enumerate(self._spec["tests"][index : index + _AHEAD], index):
            if at not in self._codes:
                self._codes[at] = _compiled(test, "test.py")
            call = foresight.certain_call(test, self._codes[at], stubs)
            if call is None:
                break
            yield call

    def _execute(self, source: str | CodeType, name: str) -> None:
        code = _compiled(source, name) if isinstance(source, str) else source
        exec(code, self._namespace)

    def _guarded(self, work: Callable[[], None]) -> tuple[str, str]:
        """Do something that needs the candidate, within the time of a test: status and reason."""
        candidate = self._candidate
        assert candidate is not None
        candidate.begin(time.monotonic() + self._spec["seconds"])
        status, reason = "failed", ""
        signal.setitimer(signal.ITIMER_REAL, self._spec["seconds"])
        try:
            work()
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


def _compiled(source: str, name: str) -> CodeType:
    return compile(source, name, "exec", dont_inherit=True)


def _join(kind: str, error: BaseException, call: str) -> str:
    try:
        text = str(error)
    except Exception:
        text = ""
    return ": ".join(part for part in (kind, text, call) if part)

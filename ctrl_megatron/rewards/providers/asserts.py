"""Function problems on a machine that only runs scripts: the job for the harness, and the verdicts
in its output.

A test ``assert LEFT == LITERAL`` is split: the remote process evaluates LEFT and sends the value,
and the comparison happens here. A program cannot forge this verdict, because the expected value is
never sent. Any other test runs in the process of the program and passes where that process sends a
nonce back; a program that searches its own memory for the nonce can forge this verdict.
"""

from __future__ import annotations

import ast
import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ctrl_megatron.rewards.providers import codec, harness_child, harness_driver
from ctrl_megatron.rewards.providers.contract import (
    ProviderError,
    Script,
    ScriptResult,
    case_verdict,
)
from ctrl_megatron.sandbox.wire import EvalTestCase

MAX_TIMEOUTS = 2
"""Tests of one program that may time out before the remaining tests count as failed."""
JOB_SECONDS = 160.0
"""Limit of the wall clock of all tests of one program, in seconds; at least that of one test."""
OVERHEAD_SECONDS = 1.0
"""Seconds that the harness may need per test, for up to five tests."""
_SMALLEST_LIMIT = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitTest:
    """One test: its part for the remote process and its part for the comparison here."""

    source: str
    """Code for the remote process: an expression where ``compared``, else the whole test."""
    compared: bool
    """True where the value of ``source`` is compared here with ``expected``, which is not sent."""
    expected: Any = None
    identical: bool = False
    """True where the comparison is ``is`` (None, True, False)."""


def split_off_expected_value(test: str) -> SplitTest:
    """Split the expected value off ``test`` where it is a literal. Raises ``ValueError`` for a test
    that is not Python.
    """
    try:
        body = ast.parse(test).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"test is not valid Python: {error}: {test[:200]!r}") from error
    whole = SplitTest(source=test, compared=False)
    if len(body) != 1 or not isinstance(body[0], ast.Assert):
        return whole
    condition = body[0].test
    if not isinstance(condition, ast.Compare) or len(condition.ops) != 1:
        return whole
    left, right = condition.left, condition.comparators[0]
    identical = isinstance(condition.ops[0], ast.Is)
    if not identical and not isinstance(condition.ops[0], ast.Eq):
        return whole
    for expression, literal in ((left, right), (right, left)):
        known, value = _literal(literal)
        if not known or _literal(expression)[0]:
            continue
        if identical and not (value is None or isinstance(value, bool)):
            return whole
        source = ast.unparse(expression)
        return SplitTest(source=source, compared=True, expected=value, identical=identical)
    return whole


@dataclass(frozen=True, slots=True, kw_only=True)
class AssertsJob:
    """Tests of one program for one run of the harness."""

    code: str
    names: tuple[str, ...] = ()
    """Names that the program must define."""
    setup: str
    tests: tuple[SplitTest, ...]
    seconds: float
    """Limit of the wall clock per test."""
    run_all: bool
    """True to run the tests after the first failure too."""
    nonce: str = field(default_factory=lambda: secrets.token_hex(16))
    """32 hexadecimal digits that only this run knows."""

    @property
    def job_seconds(self) -> float:
        """Limit of the wall clock of all tests, including the start of their processes."""
        one = self.seconds + harness_driver.STARTUP_SECONDS
        return min(len(self.tests) * one, max(JOB_SECONDS, one))

    def script(self) -> Script:
        source = Path(harness_driver.__file__).read_text(encoding="utf-8")
        # The harness ends before the provider's time limit.
        seconds = self.job_seconds + OVERHEAD_SECONDS * min(len(self.tests), 5)
        return Script(source=source, stdin=self.stdin(), seconds=seconds)

    def stdin(self) -> str:
        """The harness's input, without the expected values of compared tests."""
        child = Path(harness_child.__file__).read_text(encoding="utf-8")
        library = Path(codec.__file__).read_text(encoding="utf-8")
        # Both files start with a docstring and one __future__ import, which must come first.
        future = "from __future__ import annotations\n"
        text = future + (library + "\n" + child).replace(future, "")
        longest = max((len(repr(t.expected)) for t in self.tests if t.compared), default=0)
        return json.dumps(
            {
                "nonce": self.nonce,
                "child": text,
                "setup": self.setup,
                "code": self.code,
                "names": self.names,
                "tests": [
                    {"kind": "value" if t.compared else "assert", "source": t.source}
                    for t in self.tests
                ],
                "seconds": self.seconds,
                "job_seconds": self.job_seconds,
                "max_timeouts": MAX_TIMEOUTS,
                "run_all": self.run_all,
                "limit": max(_SMALLEST_LIMIT, 16 * longest),
            }
        )

    def verdicts(self, result: ScriptResult) -> list[EvalTestCase]:
        """The verdicts in the harness's output; without ``run_all`` they end at the first failure.

        A missing verdict is a failure: the program stopped the harness, or the provider stopped it
        at the time limit. Raises ``ProviderError`` where the harness did not start.
        """
        if result.cut_at is not None:  # the harness bounds what it writes
            raise ProviderError(
                f"the verdicts do not fit into the provider's output limit of {result.cut_at} "
                "characters; raise it"
            )
        messages = list(self._messages(result.stdout))
        if not messages or messages[0].get("ready") != len(self.tests):
            raise ProviderError(
                f"the harness did not start; it wrote {result.stdout[:200]!r}. "
                f"The provider's machine needs Python 3.9 or newer; {result.failure}"
            )
        if len(messages) > 1 and "fault" in messages[1]:
            raise ProviderError(
                f"the machine does not let a script start processes ({messages[1]['fault']}); use "
                "the provider local for this project's sandbox service, which is such a machine"
            )
        by_index = {m["index"]: m for m in messages if type(m.get("index")) is int}
        verdicts: list[EvalTestCase] = []
        for index, test in enumerate(self.tests):
            verdicts.append(_verdict(test, by_index.get(index), result.timed_out))
            if not verdicts[-1].passed and not self.run_all:
                break
        return verdicts

    def _messages(self, stdout: str) -> Iterator[dict[str, Any]]:
        for line in stdout.splitlines():
            nonce, _, text = line.partition(" ")
            if nonce != self.nonce:
                continue
            try:
                message = json.loads(text)
            except (ValueError, RecursionError):
                continue  # a line that was cut off: its verdict counts as missing
            if isinstance(message, dict):
                yield message


def _literal(node: ast.expr) -> tuple[bool, Any]:
    try:
        return True, ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False, None


def _verdict(test: SplitTest, message: dict[str, Any] | None, stopped: bool) -> EvalTestCase:
    if message is None:
        reason = "time limit exceeded" if stopped else "the program stopped the harness"
        return case_verdict(False, reason, timed_out=stopped)
    error = str(message.get("error") or "")[:400]
    if message.get("timeout") is True:
        return case_verdict(False, error, timed_out=True)
    if not test.compared:
        passed = message.get("passed") is True
        return case_verdict(passed, "" if passed else error or "failed")
    if "value" not in message:
        return case_verdict(False, error or "no value")
    try:
        value = codec.decode(json.loads(message["value"]))
        passed = value is test.expected if test.identical else bool(value == test.expected)
        shown = repr(value)
    except (ValueError, TypeError, ArithmeticError, RecursionError, MemoryError) as problem:
        # The program's value is malformed, or has a type that cannot be compared here.
        return case_verdict(False, f"{type(problem).__name__}: {problem}"[:400])
    return case_verdict(
        passed, "" if passed else f"got {shown[:150]}, expected {test.expected!r:.150}"
    )

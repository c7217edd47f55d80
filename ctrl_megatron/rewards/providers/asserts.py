"""Function problems on a machine that only runs scripts: the job for the harness, and the verdicts
in its output.

A test ``assert LEFT == LITERAL`` is split: the remote process evaluates LEFT and sends the value,
the comparison happens here. It cannot be forged, because the expected value never leaves us. Any
other test runs in the process of the program, which passes it by sending back a nonce; a program
that looks for that nonce in its own memory finds it.
"""

from __future__ import annotations

import ast
import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ctrl_megatron.rewards.providers import harness_child, harness_driver
from ctrl_megatron.rewards.providers.contract import ProviderError, Script, ScriptResult, judged
from ctrl_megatron.sandbox.jail import codec
from ctrl_megatron.sandbox.wire import EvalTestCase

MAX_TIMEOUTS = 2
"""Tests of one program that may time out before the rest counts as failed unseen."""
JOB_SECONDS = 160.0
"""Wall clock of all tests of one program together, never less than one test's."""
OVERHEAD_SECONDS = 1.0
"""What the harness itself may need per test, for five tests at most."""
_SMALLEST_LIMIT = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitTest:
    """One test, as the remote process gets it and as it is judged here."""

    source: str
    """An expression where ``compared``, else the whole test."""
    compared: bool
    """The expected value stays here."""
    expected: Any = None
    identical: bool = False
    """Compared by ``is`` (None, True, False)."""


def split_test(test: str) -> SplitTest:
    """Take the expected value out of ``test`` where it is a literal. Raises ``ValueError`` for a
    test that is not Python.
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
    """Some tests of one program for one run of the harness."""

    code: str
    names: tuple[str, ...] = ()
    """What the program has to define."""
    setup: str
    tests: tuple[SplitTest, ...]
    seconds: float
    """Wall clock per test."""
    run_all: bool
    nonce: str = field(default_factory=lambda: secrets.token_hex(16))
    """32 hexadecimal digits of this run."""

    @property
    def job_seconds(self) -> float:
        """Wall clock of all tests, start-up of their processes included."""
        one = self.seconds + harness_driver.STARTUP_SECONDS
        return min(len(self.tests) * one, max(JOB_SECONDS, one))

    def script(self) -> Script:
        """The harness and its input."""
        source = Path(harness_driver.__file__).read_text(encoding="utf-8")
        # The harness ends by itself before the provider's time is over.
        seconds = self.job_seconds + OVERHEAD_SECONDS * min(len(self.tests), 5)
        return Script(source=source, stdin=self.stdin(), seconds=seconds)

    def stdin(self) -> str:
        """What the harness reads. No expected value of a compared test is in it."""
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
        """The verdicts in the harness's output; the first failure is the last one unless
        ``run_all``.

        A verdict that never came is a failure: the program stopped the harness, or the provider
        did, for its time. Raises ``ProviderError`` when the harness did not even start.
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
                f"the machine does not let a script start processes ({messages[1]['fault']}); our "
                "own sandbox service is such a machine, use the provider local for it"
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
                continue  # cut off: the verdict it was counts as missing
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
        return judged(False, reason, timed_out=stopped)
    error = str(message.get("error") or "")[:400]
    if message.get("timeout") is True:
        return judged(False, error, timed_out=True)
    if not test.compared:
        passed = message.get("passed") is True
        return judged(passed, "" if passed else error or "failed")
    if "value" not in message:
        return judged(False, error or "no value")
    try:
        value = codec.decode(json.loads(message["value"]))
        passed = value is test.expected if test.identical else bool(value == test.expected)
        shown = repr(value)
    except (ValueError, TypeError, ArithmeticError, RecursionError, MemoryError) as problem:
        # The program's value: malformed, or of a type that cannot be compared outside of it.
        return judged(False, f"{type(problem).__name__}: {problem}"[:400])
    return judged(passed, "" if passed else f"got {shown[:150]}, expected {test.expected!r:.150}")

"""Hints from execution for the model that writes a critique.

Source: CTRL (arXiv 2502.03492, section 3.1): the sandbox's feedback is in the prompt that produces
the critique, and not in the training example.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from ctrl_megatron.problems.long_integers import load_long_integer_json
from ctrl_megatron.rewards.grading import TIMED_OUT, descriptions_of_tests
from ctrl_megatron.types import Attempt, Verdict

HintKind = Literal["accepted", "wrong answer", "exception", "time limit", "all failed"]
_LONGEST = 300
"""Most characters of a test, an input or an output in a hint."""


class ExecutionHint(NamedTuple):
    """A hint and the kind of outcome that it describes."""

    kind: HintKind
    text: str


def execution_hint(attempt: Attempt, verdict: Verdict) -> ExecutionHint:
    """The hint: whether the attempt is right and, if not, the first failed test.

    Its kind is ``all failed`` if several tests all failed in the same way: then the approach, the
    name or the format is wrong rather than a corner case. Raises ``ValueError`` for a verdict
    without tests.
    """
    if not verdict.passed:
        raise ValueError(f"attempt {attempt.id!r}: the verdict covers no test")
    if verdict.accepted:
        return ExecutionHint("accepted", "The answer is correct: it passes every test.")
    first = verdict.passed.index(False) if False in verdict.passed else len(verdict.passed) - 1
    told = verdict.detail[first] if first < len(verdict.detail) else ""
    failed = verdict.passed.count(False)
    share = f"It fails {failed} of {len(verdict.passed)} tests."
    case = _case(attempt, verdict, first)
    if told.startswith(TIMED_OUT) or "time limit" in told.lower():
        kind: HintKind = "time limit"
        said = "It does not finish in time on this test:"
    elif _is_exception(told):
        kind, said = "exception", f"It stops with `{_last_line(told)}` on this test:"
    else:
        kind, said = "wrong answer", "It gives a wrong answer on this test:"
        case += f"\n{_cut(told)}" if told not in ("", "AssertionError") else ""
    alike = len({_last_line(detail) for detail in verdict.detail if detail}) <= 1
    if failed == len(verdict.passed) > 1 and alike:
        kind, share = "all failed", f"It fails all {failed} tests in the same way."
    return ExecutionHint(kind, f"The answer is incorrect. {share} {said}\n{case}")


def _case(attempt: Attempt, verdict: Verdict, number: int) -> str:
    tests = attempt.problem.selected_uts
    if not isinstance(tests, str):
        return _cut(descriptions_of_tests(attempt.problem, verdict)[number])
    case = load_long_integer_json(tests)[number]
    stdin, stdout = case["input"].get("stdin", ""), case["output"]["stdout"]
    return f"input:\n{_cut(stdin)}\nexpected output:\n{_cut(stdout)}"


def _is_exception(detail: str) -> bool:
    name = _last_line(detail).partition(":")[0].rpartition(" ")[2]
    return name.endswith(("Error", "Exception", "Exit", "Interrupt")) and name != "AssertionError"


def _last_line(detail: str) -> str:
    return _cut(detail.strip().rpartition("\n")[2])


def _cut(text: str) -> str:
    text = text.strip()
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."

"""Scores of one round of critique and revision: pure arithmetic on outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One held-out attempt, its critique and its revision."""

    valid: bool
    """The critique contains a judgment."""
    judged_correct: bool | None
    passed_before: bool
    """The first solution passes every test."""
    pass_rate_before: float
    passed_after: bool
    """The revision passes every test."""
    pass_rate_after: float


def summarise(rounds: Sequence[Round]) -> dict[str, float]:
    """Rates over the rounds; ValueError if there is none.

    ``to_right`` and ``to_wrong`` are the shares of all rounds that turned from failing to passing
    and back (the paper's up and down arrows). ``judgment_accuracy`` counts a missing judgment as
    wrong.
    """
    if not rounds:
        raise ValueError("no round to summarise")

    def share(selected: Sequence[bool]) -> float:
        return sum(selected) / len(rounds)

    return {
        "valid_critique_rate": share([r.valid for r in rounds]),
        "judgment_accuracy": share([r.judged_correct == r.passed_before for r in rounds]),
        "pass_rate_before": sum(r.pass_rate_before for r in rounds) / len(rounds),
        "revision_pass_rate": sum(r.pass_rate_after for r in rounds) / len(rounds),
        "solved_before": share([r.passed_before for r in rounds]),
        "solved_after": share([r.passed_after for r in rounds]),
        "to_right": share([r.passed_after and not r.passed_before for r in rounds]),
        "to_wrong": share([r.passed_before and not r.passed_after for r in rounds]),
        "rounds": float(len(rounds)),
    }

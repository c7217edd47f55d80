"""The rates of a validation: one critique and one revision of every row."""

from __future__ import annotations

from collections.abc import Sequence

from ctrl_megatron.eval.measures import discrimination_rates, judgment_counts, pass_rate_of_draws
from ctrl_megatron.eval.scores import SCORE_STATISTICS, score_cells, scored_solutions
from ctrl_megatron.eval.transcripts import Turn


def validation_rates(results: Sequence[Turn]) -> dict[str, float]:
    """Rates over the turns whose two verdicts are known; no rates where there is no such turn.

    ``to_right`` and ``to_wrong`` are the shares of turns that changed a wrong solution to a right
    one and a right one to a wrong one (the paper's up and down arrows). ``judgment_accuracy``
    counts a missing judgment as wrong. ``f1_macro``, and ``auc``, ``ece`` and ``brier`` of the
    probabilities that the critic gives to "Correct", are missing where there is nothing to tell
    apart, or no probability. ``rounds`` is the number of turns with both verdicts;
    ``unjudged``, where it is not 0, the number of the others; ``pass@K`` the share of rows that one
    of K revisions solves, where each has several. Raises ValueError without a turn.
    """
    if not results:
        raise ValueError("no critique to summarise")
    known = [
        (result.judgment, result.before, result.after)
        for result in results
        if result.before is not None and result.after is not None
    ]
    if not known:
        return {"rounds": 0.0, "unjudged": float(len(results))}

    def share(selected: Sequence[bool]) -> float:
        return sum(selected) / len(known)

    rates = {
        "valid_critique_rate": share([judgment is not None for judgment, _, _ in known]),
        "judgment_accuracy": share([judgment == b.accepted for judgment, b, _ in known]),
        "pass_rate_before": sum(b.pass_rate for _, b, _ in known) / len(known),
        "revision_pass_rate": sum(a.pass_rate for _, _, a in known) / len(known),
        "solved_before": share([b.accepted for _, b, _ in known]),
        "solved_after": share([a.accepted for _, _, a in known]),
        "to_right": share([a.accepted and not b.accepted for _, b, a in known]),
        "to_wrong": share([b.accepted and not a.accepted for _, b, a in known]),
        "rounds": float(len(known)),
    }
    rates |= _judging_rates(results) | _solved_by_one_of(results)
    unjudged = len(results) - len(known)
    return {**rates, "unjudged": float(unjudged)} if unjudged else rates


def _solved_by_one_of(results: Sequence[Turn]) -> dict[str, float]:
    draws: dict[str, dict[int, bool | None]] = {}
    for turn in results:
        draws.setdefault(turn.attempt, {})[turn.sample] = turn.after and turn.after.accepted
    return pass_rate_of_draws({row: [*own.values()] for row, own in draws.items()})


def _judging_rates(results: Sequence[Turn]) -> dict[str, float]:
    judged = [turn for turn in results if turn.before is not None and turn.critique is not None]
    counts = judgment_counts(
        (turn.judgment, turn.before.accepted) for turn in judged if turn.before is not None
    )
    rates = {"f1_macro": float(discrimination_rates(counts)["f1_macro"])}
    scored = scored_solutions(results, "logprob")
    problems = sorted({one.problem for one in scored})
    seeds = sorted({one.seed for one in scored})
    for name, cells in score_cells(scored, seeds, problems).items():
        rates[name] = float(SCORE_STATISTICS[name](cells.sum(axis=(0, 1))))
    return {name: value for name, value in rates.items() if value == value}

"""The chains of a critic, and the rates that are computed from them.

A rate is the mean over problems of the mean over a problem's chains, so that every problem counts
the same. Counts of judgments are sums over all chains.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial

import numpy as np
from numpy.typing import NDArray

from ctrl_megatron.errors import UserError
from ctrl_megatron.eval.measures import (
    discrimination_rates,
    judgment_counts,
    pass_at_k,
    program_similarity,
)
from ctrl_megatron.eval.resampling import Cells, Statistic, ratio_of_columns, sum_into_cells
from ctrl_megatron.eval.rounds import round_rates, single_rounds
from ctrl_megatron.eval.scores import (
    SCORE_STATISTICS,
    Confidence,
    ScoredSolution,
    score_cells,
    scored_solutions,
)
from ctrl_megatron.eval.transcripts import Turn, require_verdict
from ctrl_megatron.types import Verdict

RATES = {
    "pass@1": "solved: every test passes",
    "pass@K": "one of K samples of a problem solves it (unbiased estimator)",
    "pass_rate": "share of a problem's tests that pass",
    "delta": "pass@1 minus that of the first solutions, paired by problem",
    "delta_up": "share of all solutions that were wrong at first and are right now",
    "delta_down": "share of all solutions that were right at first and are wrong now",
    "stopped_pass@1": "solved where revising stops at the first critique that says correct",
    "over_first_turn": "pass@1 minus that after the first turn, paired by problem",
    "undone": "share of all solutions that the turn has made wrong",
    "stopped_right": "share of chains whose first critique with correct, so far, is about a right "
    "program",
    "stopped_wrong": "the same of a wrong program",
    "tokens": "tokens of a chain's critiques and revisions so far",
    "majority_of_n": "solved by the program that most of n single rounds write, which cost no more "
    "tokens than the turns",
    "any_of_n": "solved by any of these: an upper bound that knows all tests",
    "time_limit_rate": "share of programs that ran into a time limit",
    "similarity": "how much of the draft a revision keeps, 1 for all",
    "valid_critique_rate": "share of critiques with a judgment",
    "judgment_accuracy": "share of critiques whose judgment is true; a missing one is not",
    "judged_correct_rate": "share of critiques that say correct",
    "precision_correct": "right programs among those called correct",
    "recall_correct": "right programs that are called correct",
    "f1_correct": "harmonic mean of the two",
    "precision_incorrect": "wrong programs among those called incorrect",
    "recall_incorrect": "wrong programs that are called incorrect",
    "f1_incorrect": "harmonic mean of the two",
    "f1_macro": "mean of both F1",
    "auc": "a right program scored above a wrong one; 50 % is chance",
    "ece": "distance of scores from the share of right programs (calibration error, ten bins)",
    "brier": "mean square of score minus right (1) or wrong (0); always one half has 25 %",
    "gain_after_true_judgment": "change of the tests passed where the judgment is true",
    "gain_after_false_judgment": "the same where it is false",
    "critique_tokens": "tokens of a critique",
    "revision_tokens": "tokens of a revision",
}
"""Name of every rate -> its meaning, for reports; K is a number."""
SCORED = tuple(SCORE_STATISTICS)
"""Rates of scores, which are those of first solutions in the first turn."""
JUDGED = tuple(name for name in RATES if name.startswith(("precision", "recall", "f1")))

Chain = tuple[Turn, ...]
Given = tuple[int, str, str, str]
"""(seed, problem, id of the first solution, its text). The text is needed because rows of another
evaluation may have the same ids."""


@dataclass(frozen=True, kw_only=True)
class CriticChains:
    """The judged chains of a critic, and the cells of every rate."""

    chains: Mapping[tuple[int, str], list[Chain]]
    """Chains by seed and problem."""
    seeds: tuple[int, ...]
    problems: tuple[str, ...]
    given: frozenset[Given]
    """All first solutions that the critic criticised, judged or not."""
    unjudged: int
    least_drawn: int
    """Least number of chains, judged or not, of a problem and seed."""
    confidence: Confidence = "votes"
    """Where the scores of first solutions come from."""
    cells: dict[tuple[int, str], Cells] = field(default_factory=dict)
    """Cells by turn and rate; all rates of ``JUDGED`` share the cells of "judgments"."""

    @cached_property
    def single_rounds(self) -> tuple[int, ...]:
        """``rounds.single_rounds`` of all chains."""
        return single_rounds([chain for chains in self.chains.values() for chain in chains])

    @property
    def judged_solutions(self) -> set[Given]:
        """The entries of ``given`` with at least one judged chain."""
        return {_given(chain) for chains in self.chains.values() for chain in chains}

    @property
    def scored(self) -> list[ScoredSolution]:
        """The first solutions with the critic's scores."""
        every = (chain[0] for chains in self.chains.values() for chain in chains)
        return scored_solutions(every, self.confidence)


def chains_by_critic(turns: Iterable[Turn]) -> dict[str, list[Chain]]:
    """Critic -> its chains. Raises UserError for a turn that occurs twice and for a chain without
    all turns.
    """
    found: dict[str, dict[tuple[int, str, str, int], dict[int, Turn]]] = {}
    for turn in turns:
        chain = (turn.seed, turn.problem_id, turn.attempt, turn.sample)
        parts = found.setdefault(turn.critic, {}).setdefault(chain, {})
        if turn.turn in parts:
            raise UserError(f"two transcripts of {turn.critic}, {chain}, turn {turn.turn}")
        parts[turn.turn] = turn
    chains: dict[str, list[Chain]] = {}
    for critic, parts_of in found.items():
        last = max(max(parts) for parts in parts_of.values())
        for name, parts in parts_of.items():
            if sorted(parts) != list(range(1, last + 1)):
                raise UserError(
                    f"the chain {name} of {critic} has turns {sorted(parts)}, others {last}",
                    remedy="evaluate this critic again",
                )
        chains[critic] = [tuple(parts[t] for t in sorted(parts)) for parts in parts_of.values()]
    return chains


def _given(chain: Chain) -> Given:
    first = chain[0]
    return first.seed, first.problem_id, first.attempt, first.solution


def critic_chains(
    critic: str, chains: list[Chain], confidence: Confidence = "votes"
) -> CriticChains:
    """The judged ones of ``chains``, without cells. Raises UserError where no chain was judged."""
    known = [c for c in chains if all(t.before is not None and t.after is not None for t in c)]
    if not known:
        raise UserError(f"the sandbox judged no whole chain of {critic}: nothing to report")
    given = frozenset(map(_given, chains))
    drawn = Counter((chain[0].seed, chain[0].problem_id) for chain in chains)
    unjudged, least = len(chains) - len(known), min(drawn.values())
    return _of_chains(
        known, given=given, unjudged=unjudged, least_drawn=least, confidence=confidence
    )


def _of_chains(
    known: Iterable[Chain],
    *,
    given: frozenset[Given],
    unjudged: int,
    least_drawn: int,
    confidence: Confidence,
) -> CriticChains:
    by_place: dict[tuple[int, str], list[Chain]] = {}
    for chain in known:
        by_place.setdefault((chain[0].seed, chain[0].problem_id), []).append(chain)
    return CriticChains(
        chains=by_place,
        seeds=tuple(sorted({seed for seed, _ in by_place})),
        problems=tuple(sorted({problem for _, problem in by_place})),
        given=given,
        unjudged=unjudged,
        least_drawn=least_drawn,
        confidence=confidence,
    )


def restrict_to_solutions(played: CriticChains, wanted: set[Given]) -> CriticChains:
    """The chains of the first solutions in ``wanted``, with their cells."""
    if wanted == played.judged_solutions:
        return played
    every = (chain for chains in played.chains.values() for chain in chains)
    kept = _of_chains(
        [chain for chain in every if _given(chain) in wanted],
        given=played.given,
        unjudged=played.unjudged,
        least_drawn=played.least_drawn,
        confidence=played.confidence,
    )
    fill_rate_cells(kept, ())
    return kept


# Cells: the sums that a rate is computed from, by seed and problem


def fill_rate_cells(played: CriticChains, ks: Sequence[int]) -> None:
    """Fill in ``played.cells``. pass@k exists where every problem has k chains; it counts the
    problems with k judged chains.
    """
    ks = [k for k in ks if k <= played.least_drawn]
    parts: dict[tuple[int, str], list[tuple[int, int, Sequence[float]]]] = {}
    for (seed, problem), chains in played.chains.items():
        place = played.seeds.index(seed), played.problems.index(problem)
        for turn in range(len(chains[0]) + 1):
            of_turn = _of_problem(chains, turn, ks)
            if turn and len(chains[0]) > 1:
                of_turn |= _of_rounds(chains, turn, played.single_rounds[turn - 1])
            for name, values in of_turn.items():
                parts.setdefault((turn, name), []).append((*place, values))
    sizes = len(played.seeds), len(played.problems)
    played.cells.update({key: sum_into_cells(found, *sizes) for key, found in parts.items()})
    of_scores = score_cells(played.scored, played.seeds, played.problems)
    played.cells.update({(1, name): cells for name, cells in of_scores.items()})


def _of_problem(chains: Sequence[Chain], turn: int, ks: Sequence[int]) -> dict[str, list[float]]:
    """Name of a rate after ``turn`` -> its columns: (mean, 1), or the counts of judgments."""
    first = [require_verdict(chain[0].before) for chain in chains]
    now = first if turn == 0 else [require_verdict(chain[turn - 1].after) for chain in chains]
    means = {
        "pass@1": [program.accepted for program in now],
        "pass_rate": [program.pass_rate for program in now],
        "time_limit_rate": [program.timed_out for program in now],
    }
    columns: dict[str, list[float]] = {}
    if turn:
        at = [chain[turn - 1] for chain in chains]
        both = list(zip(first, now, strict=True))
        judged = [
            (t.judgment, require_verdict(t.before).accepted) for t in at if t.critique is not None
        ]
        means |= {
            "delta": [n.accepted - f.accepted for f, n in both],
            "delta_up": [n.accepted and not f.accepted for f, n in both],
            "delta_down": [f.accepted and not n.accepted for f, n in both],
            "stopped_pass@1": [_stopped(chain[:turn]).accepted for chain in chains],
            "similarity": [_similarity(t.solution, t.revision) for t in at],
            "valid_critique_rate": [judgment is not None for judgment, _ in judged],
            "judgment_accuracy": [judgment is true for judgment, true in judged],
            "judged_correct_rate": [judgment is True for judgment, _ in judged],
            "critique_tokens": [t.critique_tokens for t in at if t.critique is not None],
            "revision_tokens": [t.revision_tokens for t in at if t.critique is not None],
        }
        right = sum(program.accepted for program in now)
        columns |= {
            f"pass@{k}": [pass_at_k(len(now), right, k), 1.0] for k in ks if 1 < k <= len(now)
        }
        columns["judgments"] = judgment_counts(judged).tolist()
        gains = [
            (t.judgment is before.accepted, after.pass_rate - before.pass_rate)
            for t, after in zip(at, now, strict=True)
            for before in [require_verdict(t.before)]
            if t.judgment is not None
        ]
        for name, wanted in (("true", True), ("false", False)):
            changes = [change for true, change in gains if true is wanted]
            columns[f"gain_after_{name}_judgment"] = [sum(changes), float(len(changes))]
    columns |= {name: [sum(v) / len(v), 1.0] for name, v in means.items() if v}
    return columns


def _of_rounds(chains: Sequence[Chain], turn: int, n: int) -> dict[str, list[float]]:
    rates = round_rates([chain[:turn] for chain in chains], n)
    return {name: [sum(found) / len(found), 1.0] for name, found in rates.items() if found}


def _stopped(chain: Sequence[Turn]) -> Verdict:
    """The verdict on the answer that the first critique with "Correct" would keep."""
    for turn in chain:
        if turn.judgment:
            return require_verdict(turn.before)
    return require_verdict(chain[-1].after)


@cache
def _similarity(draft: str, revision: str) -> float:
    return 1.0 if draft == revision else program_similarity(draft, revision)


def _judged(name: str, counts: NDArray[np.float64]) -> NDArray[np.float64]:
    return discrimination_rates(counts)[name]


def turn_statistics(played: CriticChains, turn: int) -> dict[str, tuple[Cells, Statistic]]:
    """Name of every rate of a turn, in the order of ``RATES`` -> (its cells, its statistic)."""
    found: dict[str, tuple[Cells, Statistic]] = {}
    for name in RATES:
        key = "judgments" if name in JUDGED else name
        if name == "pass@K":
            numbers = (n for t, n in played.cells if t == turn and n.startswith("pass@"))
            for more in sorted(set(numbers) - {"pass@1"}, key=lambda n: int(n.partition("@")[2])):
                found[more] = played.cells[turn, more], ratio_of_columns
        elif (turn, key) in played.cells:
            statistic = SCORE_STATISTICS.get(name, ratio_of_columns)
            if name in JUDGED:
                statistic = partial(_judged, name)
            found[name] = played.cells[turn, key], statistic
    return found

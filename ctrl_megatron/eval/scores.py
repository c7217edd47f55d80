"""A critic's scores of first solutions: the probability that it gives to "this program is right".

A score comes from the critiques of one first solution and seed, by *votes*, the share of "Correct"
among their judgments, or by *logprob*, the mean probability of "Correct" at the place of the
judgment (``Turn.confidence``). A critique without a judgment says nothing; where none of them has
one, the score is a half.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from random import Random
from statistics import mean
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ctrl_megatron.eval.measures import pass_at_k, ratio_or_nan
from ctrl_megatron.eval.resampling import Cells, Statistic, ratio_of_columns, sum_into_cells
from ctrl_megatron.eval.transcripts import Turn
from ctrl_megatron.prompts import extract_code

Confidence = Literal["votes", "logprob"]
SCORES: dict[Confidence, str] = {
    "votes": "the share of a program's critiques that say correct",
    "logprob": "the mean probability of the word Correct in a program's critiques",
}
"""Kind of scores -> its meaning, for reports."""
SELECTORS = {
    "random": "any one of them",
    "majority": "the program that most of them are; the same texts are one program",
    "critic": "the one with the highest score",
    "oracle": "a right one where there is one: pass@n",
}
"""Rule that chooses one of n candidates -> its meaning; equal candidates share the choice."""
BINS = 10
"""Bins of equal width of a reliability diagram and of the calibration error (Aletheia's number)."""
_UNKNOWN = 0.5
_MOST_SUBSETS = 2000
"""Subsets of candidates that ``majority`` is averaged over: all, or so many drawn ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredSolution:
    """A first solution with a critic's score."""

    seed: int
    problem: str
    attempt: str
    solution: str
    score: float
    """In [0, 1]."""
    right: bool
    """Whether it passes every test."""


def scored_solutions(turns: Iterable[Turn], confidence: Confidence) -> list[ScoredSolution]:
    """The scores of the first solutions of judged first turns; none where a judgment of one has no
    ``confidence`` and the scores are of that kind.
    """
    drawn: dict[tuple[int, str, str], list[Turn]] = {}
    for turn in turns:
        if turn.turn == 1 and turn.critique is not None and turn.before is not None:
            drawn.setdefault((turn.seed, turn.problem_id, turn.attempt), []).append(turn)
    found = []
    for (seed, problem, attempt), critiques in drawn.items():
        judged = [turn for turn in critiques if turn.judgment is not None]
        said: list[float | None] = [
            float(bool(turn.judgment)) if confidence == "votes" else turn.confidence
            for turn in judged
        ]
        known = [value for value in said if value is not None]
        if len(known) < len(said):
            return []
        first = critiques[0]
        assert first.before is not None
        found.append(
            ScoredSolution(
                seed=seed,
                problem=problem,
                attempt=attempt,
                solution=first.solution,
                score=mean(known) if known else _UNKNOWN,
                right=first.before.accepted,
            )
        )
    return found


def score_cells(
    scored: Sequence[ScoredSolution], seeds: Sequence[int], problems: Sequence[str]
) -> dict[str, Cells]:
    """The cells of ``auc``, ``ece`` and ``brier``, whose statistics are ``SCORE_STATISTICS``."""
    # At most a thousand levels: the columns of the AUC are twice as many.
    levels = sorted({round(one.score, 3) for one in scored})
    level_of = {score: number for number, score in enumerate(levels)}
    parts: dict[str, list[tuple[int, int, Sequence[float]]]] = {}
    for one in scored:
        place = seeds.index(one.seed), problems.index(one.problem)
        counts = [0.0] * (2 * len(levels))
        counts[level_of[round(one.score, 3)] + (0 if one.right else len(levels))] = 1.0
        bins = [0.0] * (3 * BINS)
        start = 3 * bin_of_score(one.score)
        bins[start : start + 3] = 1.0, one.score, float(one.right)
        square = [(one.score - one.right) ** 2, 1.0]
        for name, columns in (("auc", counts), ("ece", bins), ("brier", square)):
            parts.setdefault(name, []).append((*place, columns))
    return {name: sum_into_cells(found, len(seeds), len(problems)) for name, found in parts.items()}


def bin_of_score(score: float) -> int:
    """The number of the bin (low, high] that holds the score; the first one has both ends."""
    return max(math.ceil(score * BINS) - 1, 0)


def area_under_roc(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """P(the score of a right program is above that of a wrong one) + P(equal) / 2.

    ``counts`` (..., 2 m): of right programs with each of m scores in ascending order, then of wrong
    ones. (...), nan without programs of both kinds.
    """
    right, wrong = np.split(counts, 2, axis=-1)
    below = np.cumsum(wrong, axis=-1) - wrong
    pairs = (right * (below + wrong / 2)).sum(axis=-1)
    return ratio_or_nan(pairs, right.sum(axis=-1) * wrong.sum(axis=-1))


def calibration_error(bins: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean distance of a score from the share of right programs in its bin (expected calibration
    error, ECE).

    ``bins`` (..., 3 b): number of programs, sum of scores and number of right ones of every bin.
    (...), nan without programs.
    """
    count, scores, right = (bins[..., part::3] for part in range(3))
    return ratio_or_nan(np.abs(scores - right).sum(axis=-1), count.sum(axis=-1))


SCORE_STATISTICS: dict[str, Statistic] = {
    "auc": area_under_roc,
    "ece": calibration_error,
    "brier": ratio_of_columns,
}
"""Measures of scores by name -> the statistic of their cells."""


def reliability(scored: Sequence[ScoredSolution]) -> list[tuple[float, float, int]]:
    """(mean score, share of right programs, number of programs) of every bin with programs."""
    of_bin: dict[int, list[ScoredSolution]] = {}
    for one in scored:
        of_bin.setdefault(bin_of_score(one.score), []).append(one)
    return [
        (mean(one.score for one in part), mean(float(one.right) for one in part), len(part))
        for _, part in sorted(of_bin.items())
    ]


def roc_curve(scored: Sequence[ScoredSolution]) -> list[tuple[float, float]]:
    """(share of wrong programs, share of right ones) whose score is at least a threshold, from no
    program to all; empty without programs of both kinds.
    """
    right = sum(one.right for one in scored)
    wrong = len(scored) - right
    if not (right and wrong):
        return []
    points = [(0.0, 0.0)]
    for threshold in sorted({one.score for one in scored}, reverse=True):
        kept = [one.right for one in scored if one.score >= threshold]
        points.append(((len(kept) - sum(kept)) / wrong, sum(kept) / right))
    return points


def best_of_n_cells(
    scored: Sequence[ScoredSolution], seeds: Sequence[int], problems: Sequence[str]
) -> dict[int, dict[str, Cells]]:
    """n of 2, 4, 8 and 16 -> selector -> cells of the share of problems solved by the candidate
    that it chooses among n of a problem's first solutions, averaged over their subsets. An n exists
    where every problem has as many.
    """
    candidates: dict[tuple[int, int], list[ScoredSolution]] = {}
    for one in scored:
        place = seeds.index(one.seed), problems.index(one.problem)
        candidates.setdefault(place, []).append(one)
    least = min(map(len, candidates.values()), default=0)
    found: dict[int, dict[str, Cells]] = {}
    for n in (2, 4, 8, 16):
        if n > least:
            break
        chosen = {place: best_of_n(part, n) for place, part in candidates.items()}
        found[n] = {
            selector: sum_into_cells(
                [(*place, [values[selector], 1.0]) for place, values in chosen.items()],
                len(seeds),
                len(problems),
            )
            for selector in SELECTORS
        }
    return found


def best_of_n(candidates: Sequence[ScoredSolution], n: int) -> dict[str, float]:
    """Selector -> probability that the candidate which it chooses among ``n`` drawn ones is right.
    Raises ValueError where there are fewer than ``n``.
    """
    right = [one.right for one in candidates]
    return {
        "random": mean(map(float, right)),
        "majority": _majority(candidates, n),
        "critic": _highest_score(candidates, n),
        "oracle": pass_at_k(len(right), sum(right), n),
    }


def _highest_score(candidates: Sequence[ScoredSolution], n: int) -> float:
    """Equal scores share the choice: the top score of a subset is the one of a group of equals if
    the subset has one of them and none that is better.
    """
    total, left = math.comb(len(candidates), n), len(candidates)
    value = 0.0
    for score in sorted({one.score for one in candidates}, reverse=True):
        group = [float(one.right) for one in candidates if one.score == score]
        below = left - len(group)
        value += (math.comb(left, n) - math.comb(below, n)) / total * mean(group)
        left = below
    return value


def _majority(candidates: Sequence[ScoredSolution], n: int) -> float:
    programs = [extract_code(one.solution).strip() for one in candidates]
    everything = range(len(candidates))
    if math.comb(len(candidates), n) <= _MOST_SUBSETS:
        subsets = list(combinations(everything, n))
    else:
        # The same draws for equal candidates, in every process.
        random = Random(f"{candidates[0].problem}/{candidates[0].seed}/{n}")
        subsets = [tuple(random.sample(everything, n)) for _ in range(_MOST_SUBSETS)]
    return mean(_share_right_of_most(subset, programs, candidates) for subset in subsets)


def _share_right_of_most(
    subset: Sequence[int], programs: Sequence[str], candidates: Sequence[ScoredSolution]
) -> float:
    counts: dict[str, int] = {}
    for number in subset:
        counts[programs[number]] = counts.get(programs[number], 0) + 1
    most = max(counts.values())
    return mean(float(candidates[n].right) for n in subset if counts[programs[n]] == most)

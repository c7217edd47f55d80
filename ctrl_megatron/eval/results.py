"""The results of an evaluation, computed from its transcripts: rates of every critic with
intervals, curves over turns, rates by difficulty, gains over the first critic, and a record of
each problem.

A rate is the mean over problems of the mean over a problem's chains, so that every problem counts
the same. Counts of judgments are sums over all chains.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

import numpy as np
from numpy.typing import NDArray

from ctrl_megatron.errors import UserError
from ctrl_megatron.eval.measures import (
    discrimination,
    judgment_counts,
    pass_at_k,
    similarity,
    wilson_interval,
)
from ctrl_megatron.eval.pairwise import JudgedPair, pair_columns
from ctrl_megatron.eval.resampling import Cells, Estimate, Resampling, Statistic, cells_of, ratio
from ctrl_megatron.eval.transcripts import Turn
from ctrl_megatron.types import Verdict

RATES = {
    "pass@1": "solved: every test passes",
    "pass@K": "one of K samples of a problem solves it (unbiased estimator)",
    "pass_rate": "share of a problem's tests that pass",
    "delta_up": "share of all solutions that were wrong at first and are right now",
    "delta_down": "share of all solutions that were right at first and are wrong now",
    "stopped_pass@1": "solved where revising stops at the first critique that says correct",
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
    "critique_tokens": "tokens of a critique",
    "revision_tokens": "tokens of a revision",
}
"""Name of every rate -> its meaning, for reports; K is a number."""
PAIR_RATES = {
    "choice_accuracy": "better response named, asked in both orders; a tie is wrong",
    "choice_consistency": "the same response named in both orders",
    "choice_answered_rate": "questions in either order that are answered",
    "choice_first_rate": "share of answers that name the first response; 0.5 is no bias",
    "critique_accuracy": "better response judged correct more often; a tie is wrong",
}
JUDGED = tuple(name for name in RATES if name.startswith(("precision", "recall", "f1")))
_COMPARED = ("pass@1", "pass_rate", "delta_up", "delta_down", "f1_macro", "judgment_accuracy")
_TURN_OF_JUDGMENTS = 1
"""The turn in which all critics judge the same programs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemResult:
    """The result of one critic on one problem after the last turn."""

    critic: str
    problem_id: str
    difficulty: int
    chains: int
    """Number of chains: first solutions times samples times seeds."""
    solved_before: int
    """Number of chains whose first solution is right."""
    solved: int
    """Number of chains whose last revision is right."""
    interval: tuple[float, float]
    """Interval of the share of chains that are solved, for independent chains."""
    pass_rate_before: float
    pass_rate: float
    judgment_accuracy: float
    """Share of the first turn's judgments that are true."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelResult:
    """The results on problems of one difficulty."""

    problems: int
    before: Estimate | None
    """pass@1 of first solutions."""
    after: Estimate | None
    """pass@1 after the last turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticResult:
    """The results of one critic."""

    critic: str
    problems: int
    attempts: int
    chains: int
    seeds: tuple[int, ...]
    unjudged: int
    """Chains that are left out because the sandbox failed on one of their programs."""
    overlong: int
    """Turns without a critique because the request was too long."""
    curves: tuple[dict[str, Estimate], ...]
    """Rates by turn; turn 0 is the first solutions. A rate without a value is left out."""
    by_difficulty: dict[int, LevelResult]
    gains: dict[str, Estimate]
    """Differences to the first critic, paired by problem, over the first solutions that were judged
    for both."""
    compared: tuple[int, int] | None
    """(first solutions times seeds that were judged for both critics, those that both criticised).
    None for the first critic, and where the two did not criticise the same ones: then there are no
    gains."""
    too_few: dict[str, tuple[int, int]]
    """pass@K -> (problems times seeds with fewer than K judged chains, all problems times seeds); K
    without such a problem is left out. Where a problem has fewer than K chains, judged or not,
    there is no pass@K."""
    pairs: dict[str, dict[str, Estimate]]
    """Rates of ``PAIR_RATES`` by source of the questions, first ``all``; empty without pairs."""
    per_problem: tuple[ProblemResult, ...]

    @property
    def last(self) -> dict[str, Estimate]:
        """The rates after the last turn; rates of judgments are those of the first turn."""
        judged = ("judgment_accuracy", "valid_critique_rate", "judged_correct_rate", *JUDGED)
        first = self.curves[_TURN_OF_JUDGMENTS]
        rest = {name: value for name, value in self.curves[-1].items() if name not in judged}
        return {**rest, **{name: first[name] for name in judged if name in first}}


Chain = tuple[Turn, ...]
Given = tuple[int, str, str, str]
"""(seed, problem, id of the first solution, its text). The text is needed because rows of another
evaluation may have the same ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Played:
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
    cells: dict[tuple[int, str], Cells] = field(default_factory=dict)
    """Cells by turn and rate; all rates of ``JUDGED`` share the cells of "judgments"."""

    @property
    def judged(self) -> set[Given]:
        """The entries of ``given`` with at least one judged chain."""
        return {_given(chain) for chains in self.chains.values() for chain in chains}


def evaluate_turns(
    turns: Iterable[Turn],
    pairs: Iterable[JudgedPair] = (),
    *,
    ks: Sequence[int] = (1,),
    level: float = 0.9,
    draws: int = 2000,
) -> list[CriticResult]:
    """The results of every critic, in the order of their first turns.

    ``ks`` are the values k of pass@k; a critic has pass@k where each problem has k chains.
    Intervals contain the share ``level`` of ``draws`` bootstrap values. Raises UserError for a
    chain without all its turns, and for a critic without a judged chain.
    """

    @cache
    def plan(problems: int, seeds: int) -> Resampling:
        # Equal sizes have equal draws, so that critics are paired.
        return Resampling(problems, seeds, draws=draws, level=level)

    judged: dict[str, list[JudgedPair]] = {}
    for pair in pairs:
        judged.setdefault(pair.critic, []).append(pair)
    played = {critic: _played(critic, chains) for critic, chains in _chains(turns).items()}
    base: _Played | None = None
    results = []
    for critic, mine in played.items():
        _measure(mine, ks)
        results.append(_result(critic, mine, base, judged.get(critic, []), ks, plan))
        base = base or mine
    return results


def _chains(turns: Iterable[Turn]) -> dict[str, list[Chain]]:
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


def _played(critic: str, chains: list[Chain]) -> _Played:
    known = [c for c in chains if all(t.before is not None and t.after is not None for t in c)]
    if not known:
        raise UserError(f"the sandbox judged no whole chain of {critic}: nothing to report")
    given = frozenset(map(_given, chains))
    drawn = Counter((chain[0].seed, chain[0].problem_id) for chain in chains)
    unjudged, least = len(chains) - len(known), min(drawn.values())
    return _of_chains(known, given=given, unjudged=unjudged, least_drawn=least)


def _of_chains(
    known: Iterable[Chain], *, given: frozenset[Given], unjudged: int, least_drawn: int
) -> _Played:
    by_place: dict[tuple[int, str], list[Chain]] = {}
    for chain in known:
        by_place.setdefault((chain[0].seed, chain[0].problem_id), []).append(chain)
    return _Played(
        chains=by_place,
        seeds=tuple(sorted({seed for seed, _ in by_place})),
        problems=tuple(sorted({problem for _, problem in by_place})),
        given=given,
        unjudged=unjudged,
        least_drawn=least_drawn,
    )


def _only(played: _Played, wanted: set[Given]) -> _Played:
    """The chains of the first solutions in ``wanted``, with their cells."""
    if wanted == played.judged:
        return played
    every = (chain for chains in played.chains.values() for chain in chains)
    kept = _of_chains(
        [chain for chain in every if _given(chain) in wanted],
        given=played.given,
        unjudged=played.unjudged,
        least_drawn=played.least_drawn,
    )
    _measure(kept, ())
    return kept


# Cells: the sums that a rate is computed from, by seed and problem


def _measure(played: _Played, ks: Sequence[int]) -> None:
    """Fill in ``played.cells``. pass@k exists where every problem has k chains; it counts the
    problems with k judged chains.
    """
    ks = [k for k in ks if k <= played.least_drawn]
    parts: dict[tuple[int, str], list[tuple[int, int, Sequence[float]]]] = {}
    for (seed, problem), chains in played.chains.items():
        place = played.seeds.index(seed), played.problems.index(problem)
        for turn in range(len(chains[0]) + 1):
            for name, values in _of_problem(chains, turn, ks).items():
                parts.setdefault((turn, name), []).append((*place, values))
    sizes = len(played.seeds), len(played.problems)
    played.cells.update({key: cells_of(found, *sizes) for key, found in parts.items()})


def _of_problem(chains: Sequence[Chain], turn: int, ks: Sequence[int]) -> dict[str, list[float]]:
    """Name of a rate after ``turn`` -> its columns: (mean, 1), or the counts of judgments."""
    first = [_known(chain[0].before) for chain in chains]
    now = first if turn == 0 else [_known(chain[turn - 1].after) for chain in chains]
    means = {
        "pass@1": [program.accepted for program in now],
        "pass_rate": [program.pass_rate for program in now],
        "time_limit_rate": [program.timed_out for program in now],
    }
    found: dict[str, list[float]] = {}
    if turn:
        at = [chain[turn - 1] for chain in chains]
        both = list(zip(first, now, strict=True))
        judged = [(t.judgment, _known(t.before).accepted) for t in at if t.critique is not None]
        means |= {
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
        found |= {
            f"pass@{k}": [pass_at_k(len(now), right, k), 1.0] for k in ks if 1 < k <= len(now)
        }
        found["judgments"] = judgment_counts(judged).tolist()
    found |= {name: [sum(v) / len(v), 1.0] for name, v in means.items() if v}
    return found


def _known(program: Verdict | None) -> Verdict:
    assert program is not None  # chains with an unknown verdict are left out
    return program


def _stopped(chain: Sequence[Turn]) -> Verdict:
    """The verdict on the answer that the first critique with "Correct" would keep."""
    for turn in chain:
        if turn.judgment:
            return _known(turn.before)
    return _known(chain[-1].after)


@cache
def _similarity(draft: str, revision: str) -> float:
    return 1.0 if draft == revision else similarity(draft, revision)


def _judged(name: str, counts: NDArray[np.float64]) -> NDArray[np.float64]:
    return discrimination(counts)[name]


def _statistics(played: _Played, turn: int) -> dict[str, tuple[Cells, Statistic]]:
    """Name of every rate of a turn, in the order of ``RATES`` -> (its cells, its statistic)."""
    found: dict[str, tuple[Cells, Statistic]] = {}
    for name in RATES:
        key = "judgments" if name in JUDGED else name
        if name == "pass@K":
            numbers = (n for t, n in played.cells if t == turn and n.startswith("pass@"))
            for more in sorted(set(numbers) - {"pass@1"}, key=lambda n: int(n.partition("@")[2])):
                found[more] = played.cells[turn, more], ratio
        elif (turn, key) in played.cells:
            statistic = partial(_judged, name) if name in JUDGED else ratio
            found[name] = played.cells[turn, key], statistic
    return found


# Results


def _result(
    critic: str,
    mine: _Played,
    base: _Played | None,
    pairs: Sequence[JudgedPair],
    ks: Sequence[int],
    plan: Callable[[int, int], Resampling],
) -> CriticResult:
    every = [chain for chains in mine.chains.values() for chain in chains]
    last, size = len(every[0]), (len(mine.problems), len(mine.seeds))
    curves = [
        {
            name: value
            for name, given in _statistics(mine, turn).items()
            if (value := plan(*size).estimate(*given)) is not None
        }
        for turn in range(last + 1)
    ]
    gains: dict[str, Estimate] = {}
    compared = None
    if base is not None and base.given == mine.given:
        gains, shared = _gains(mine, base, plan)
        compared = shared, len(mine.given)
    return CriticResult(
        critic=critic,
        problems=len(mine.problems),
        attempts=len({chain[0].attempt for chain in every}),
        chains=len(every),
        seeds=mine.seeds,
        unjudged=mine.unjudged,
        overlong=sum(turn.critique is None for chain in every for turn in chain),
        curves=tuple(curves),
        by_difficulty=_by_difficulty(mine, last, plan),
        gains=gains,
        compared=compared,
        too_few=_too_few(mine, ks),
        pairs=_by_source(pairs, plan),
        per_problem=tuple(_per_problem(critic, mine)),
    )


def _gains(
    mine: _Played, base: _Played, plan: Callable[[int, int], Resampling]
) -> tuple[dict[str, Estimate], int]:
    """(gains of ``mine`` over ``base``, number of first solutions they are computed from). A first
    solution that was not judged for both critics is left out.
    """
    shared = mine.judged & base.judged
    if not shared:
        return {}, 0
    mine, base = _only(mine, shared), _only(base, shared)
    gains: dict[str, Estimate] = {}
    for name in _COMPARED:
        # Judgments are compared where both critics judge the same programs.
        judged = name in (*JUDGED, "judgment_accuracy")
        turns = (1, 1) if judged else (_turns(mine), _turns(base))
        given = _statistics(mine, turns[0]).get(name)
        against = _statistics(base, turns[1]).get(name)
        if given and against:
            resampling = plan(len(mine.problems), len(mine.seeds))
            gain = resampling.difference(given[0], against[0], given[1])
            gains |= {} if gain is None else {name: gain}
    return gains, len(shared)


def _too_few(mine: _Played, ks: Sequence[int]) -> dict[str, tuple[int, int]]:
    places = {(seed, problem) for seed, problem, *_ in mine.given}
    counts = {k: sum(len(mine.chains.get(place, ())) < k for place in places) for k in ks if k > 1}
    return {f"pass@{k}": (count, len(places)) for k, count in counts.items() if count}


def _turns(played: _Played) -> int:
    return max(turn for turn, _ in played.cells)


def _by_difficulty(
    mine: _Played, last: int, plan: Callable[[int, int], Resampling]
) -> dict[int, LevelResult]:
    level_of = {p: chains[0][0].difficulty for (_, p), chains in mine.chains.items()}
    levels: dict[int, LevelResult] = {}
    for level in sorted(set(level_of.values())):
        at = [place for place, problem in enumerate(mine.problems) if level_of[problem] == level]
        resampling = plan(len(at), len(mine.seeds))
        before, after = (
            resampling.estimate(mine.cells[turn, "pass@1"][:, at], ratio) for turn in (0, last)
        )
        levels[level] = LevelResult(problems=len(at), before=before, after=after)
    return levels


def _by_source(
    pairs: Sequence[JudgedPair], plan: Callable[[int, int], Resampling]
) -> dict[str, dict[str, Estimate]]:
    if not pairs:
        return {}
    parts: dict[str, list[JudgedPair]] = {}
    for pair in sorted(pairs, key=lambda p: p.source):
        # JudgeBench's categories; the sources of its knowledge questions also name a field.
        category = "mmlu-pro" if pair.source.startswith("mmlu-pro-") else pair.source
        parts.setdefault(category, []).append(pair)
    parts = {"all": list(pairs), **(parts if len(parts) > 1 else {})}
    return {source: _pair_rates(part, plan) for source, part in parts.items()}


def _pair_rates(
    pairs: Sequence[JudgedPair], plan: Callable[[int, int], Resampling]
) -> dict[str, Estimate]:
    seeds = sorted({pair.seed for pair in pairs})
    names = sorted({pair.pair_id for pair in pairs})
    found: dict[str, Estimate] = {}
    for name in PAIR_RATES:
        parts = [
            (seeds.index(p.seed), names.index(p.pair_id), pair_columns(p)[name]) for p in pairs
        ]
        value = plan(len(names), len(seeds)).estimate(
            cells_of(parts, len(seeds), len(names)), ratio
        )
        found |= {} if value is None else {name: value}
    return found


def _per_problem(critic: str, mine: _Played) -> Iterable[ProblemResult]:
    for problem in mine.problems:
        chains = [c for (_, name), part in mine.chains.items() if name == problem for c in part]
        before = [_known(chain[0].before) for chain in chains]
        after = [_known(chain[-1].after) for chain in chains]
        solved, total = sum(program.accepted for program in after), len(chains)
        true = (c[0].judgment is b.accepted for c, b in zip(chains, before, strict=True))
        yield ProblemResult(
            critic=critic,
            problem_id=problem,
            difficulty=chains[0][0].difficulty,
            chains=total,
            solved_before=sum(program.accepted for program in before),
            solved=solved,
            interval=wilson_interval(solved, total),
            pass_rate_before=sum(program.pass_rate for program in before) / total,
            pass_rate=sum(program.pass_rate for program in after) / total,
            judgment_accuracy=sum(true) / total,
        )

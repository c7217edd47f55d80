"""The results of an evaluation, computed from its transcripts: rates of every critic with
intervals, curves over turns, rates by difficulty, gains over the first critic, and a record of
each problem.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from ctrl_megatron.eval.labelled import other_rules
from ctrl_megatron.eval.measures import wilson_interval
from ctrl_megatron.eval.pairwise import JudgedPair, pair_rates_by_source
from ctrl_megatron.eval.rates import (
    JUDGED,
    SCORED,
    CriticChains,
    chains_by_critic,
    critic_chains,
    fill_rate_cells,
    restrict_to_solutions,
    turn_statistics,
)
from ctrl_megatron.eval.resampling import Estimate, Resampling, ratio_of_columns
from ctrl_megatron.eval.scores import (
    Confidence,
    ScoredSolution,
    best_of_n_cells,
    reliability,
    roc_curve,
)
from ctrl_megatron.eval.transcripts import Turn, require_verdict

_COMPARED = (
    *("pass@1", "pass_rate", "delta_up", "delta_down", "f1_macro", "judgment_accuracy"),
    *SCORED,
)
_OF_FIRST_TURN = (
    *("judgment_accuracy", "valid_critique_rate", "judged_correct_rate"),
    *("gain_after_true_judgment", "gain_after_false_judgment"),
)
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
    other_rules: dict[str, Estimate]
    """Rates of ``OTHER_RULES`` of the first turn's judgments."""
    best_of: dict[int, dict[str, Estimate]]
    """n -> selector (``SELECTORS``) -> share of problems that the chosen one of n first solutions
    solves; empty where a problem has one first solution only."""
    single_rounds: tuple[int, ...]
    """The n of ``majority_of_n`` and ``any_of_n``, turn by turn."""
    confidence: Confidence
    """The kind of the scores."""
    reliability: tuple[tuple[float, float, int], ...]
    """(mean score, share of right programs, number of programs) of every bin of scores."""
    roc: tuple[tuple[float, float], ...]
    """(share of wrong programs, share of right ones) above a threshold of the score."""

    @property
    def last_turn_rates(self) -> dict[str, Estimate]:
        """The rates after the last turn; rates of judgments are those of the first turn."""
        judged = (*_OF_FIRST_TURN, *JUDGED, *SCORED)
        first = self.curves[_TURN_OF_JUDGMENTS]
        rest = {name: value for name, value in self.curves[-1].items() if name not in judged}
        return {**rest, **{name: first[name] for name in judged if name in first}}


def evaluate_turns(
    turns: Iterable[Turn],
    pairs: Iterable[JudgedPair] = (),
    *,
    ks: Sequence[int] = (1,),
    level: float = 0.9,
    draws: int = 2000,
    confidence: Confidence = "votes",
) -> list[CriticResult]:
    """The results of every critic, in the order of their first turns. ``confidence`` says where
    its scores of first solutions come from (``eval.scores``).

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
    played = {
        critic: critic_chains(critic, chains, confidence)
        for critic, chains in chains_by_critic(turns).items()
    }
    base: CriticChains | None = None
    results = []
    for critic, mine in played.items():
        fill_rate_cells(mine, ks)
        results.append(_result(critic, mine, base, judged.get(critic, []), ks, plan))
        base = base or mine
    return results


def _result(
    critic: str,
    mine: CriticChains,
    base: CriticChains | None,
    pairs: Sequence[JudgedPair],
    ks: Sequence[int],
    plan: Callable[[int, int], Resampling],
) -> CriticResult:
    every = [chain for chains in mine.chains.values() for chain in chains]
    last, size = len(every[0]), (len(mine.problems), len(mine.seeds))
    curves = [
        {
            name: value
            for name, given in turn_statistics(mine, turn).items()
            if (value := plan(*size).estimate(*given)) is not None
        }
        for turn in range(last + 1)
    ]
    gains: dict[str, Estimate] = {}
    scored = mine.scored
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
        pairs=pair_rates_by_source(pairs, plan),
        per_problem=tuple(_per_problem(critic, mine)),
        other_rules=other_rules([chain[0] for chain in every], plan),
        best_of=_best_of(mine, scored, plan),
        single_rounds=mine.single_rounds,
        confidence=mine.confidence,
        reliability=tuple(reliability(scored)),
        roc=tuple(roc_curve(scored)),
    )


def _best_of(
    mine: CriticChains,
    scored: Sequence[ScoredSolution],
    plan: Callable[[int, int], Resampling],
) -> dict[int, dict[str, Estimate]]:
    resampling = plan(len(mine.problems), len(mine.seeds))
    return {
        n: {
            selector: value
            for selector, part in cells.items()
            if (value := resampling.estimate(part, ratio_of_columns)) is not None
        }
        for n, cells in best_of_n_cells(scored, mine.seeds, mine.problems).items()
    }


def _gains(
    mine: CriticChains, base: CriticChains, plan: Callable[[int, int], Resampling]
) -> tuple[dict[str, Estimate], int]:
    """(gains of ``mine`` over ``base``, number of first solutions they are computed from). A first
    solution that was not judged for both critics is left out.
    """
    shared = mine.judged_solutions & base.judged_solutions
    if not shared:
        return {}, 0
    mine, base = restrict_to_solutions(mine, shared), restrict_to_solutions(base, shared)
    gains: dict[str, Estimate] = {}
    for name in _COMPARED:
        # Judgments are compared where both critics judge the same programs.
        judged = name in (*JUDGED, *SCORED, "judgment_accuracy")
        turns = (1, 1) if judged else (_turns(mine), _turns(base))
        given = turn_statistics(mine, turns[0]).get(name)
        against = turn_statistics(base, turns[1]).get(name)
        if given and against:
            resampling = plan(len(mine.problems), len(mine.seeds))
            gain = resampling.difference(given[0], against[0], given[1])
            gains |= {} if gain is None else {name: gain}
    return gains, len(shared)


def _too_few(mine: CriticChains, ks: Sequence[int]) -> dict[str, tuple[int, int]]:
    places = {(seed, problem) for seed, problem, *_ in mine.given}
    counts = {k: sum(len(mine.chains.get(place, ())) < k for place in places) for k in ks if k > 1}
    return {f"pass@{k}": (count, len(places)) for k, count in counts.items() if count}


def _turns(played: CriticChains) -> int:
    return max(turn for turn, _ in played.cells)


def _by_difficulty(
    mine: CriticChains, last: int, plan: Callable[[int, int], Resampling]
) -> dict[int, LevelResult]:
    level_of = {p: chains[0][0].difficulty for (_, p), chains in mine.chains.items()}
    levels: dict[int, LevelResult] = {}
    for level in sorted(set(level_of.values())):
        at = [place for place, problem in enumerate(mine.problems) if level_of[problem] == level]
        resampling = plan(len(at), len(mine.seeds))
        before, after = (
            resampling.estimate(mine.cells[turn, "pass@1"][:, at], ratio_of_columns)
            for turn in (0, last)
        )
        levels[level] = LevelResult(problems=len(at), before=before, after=after)
    return levels


def _per_problem(critic: str, mine: CriticChains) -> Iterable[ProblemResult]:
    for problem in mine.problems:
        chains = [c for (_, name), part in mine.chains.items() if name == problem for c in part]
        before = [require_verdict(chain[0].before) for chain in chains]
        after = [require_verdict(chain[-1].after) for chain in chains]
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

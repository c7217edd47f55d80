"""What chains of several turns do turn by turn, and what as many tokens of single rounds would."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean

from ctrl_megatron.eval.scores import ScoredSolution, best_of_n
from ctrl_megatron.eval.transcripts import Turn, require_verdict

ROUNDS = (
    *("undone", "stopped_right", "stopped_wrong", "over_first_turn", "tokens"),
    *("majority_of_n", "any_of_n"),
)
"""The rates of this file, of ``RATES``."""


def single_rounds(chains: Sequence[Sequence[Turn]]) -> tuple[int, ...]:
    """For every turn n, the most single rounds (a critique of the first solution and its revision)
    that cost no more tokens in the mean than a chain up to that turn; 0 where some first solution
    has fewer chains of a seed.
    """
    costs = [mean(map(_tokens_of, at)) for at in zip(*chains, strict=True)]
    drawn = Counter((c[0].seed, c[0].problem_id, c[0].attempt) for c in chains)
    least, found = min(drawn.values()), []
    for turn in range(1, len(costs) + 1):
        # Without any token, as written critiques may have, a round costs a round.
        n = int(sum(costs[:turn]) / costs[0] + 1e-9) if costs[0] else turn
        found.append(n if n <= least else 0)
    return tuple(found)


def _tokens_of(turn: Turn) -> int:
    return turn.critique_tokens + turn.revision_tokens


def round_rates(chains: Iterable[Sequence[Turn]], n: int) -> Mapping[str, list[float | bool]]:
    """Values of ``ROUNDS`` for the chains of a problem and seed, cut after a turn: one number a
    chain, or for the last two one a first solution, with ``n`` single rounds (0: no such rate). All
    of their verdicts are known.
    """
    cut = list(chains)
    last, first = [chain[-1] for chain in cut], [chain[0] for chain in cut]
    stops = [next((turn for turn in chain if turn.judgment), None) for chain in cut]
    kept = [None if stop is None else require_verdict(stop.before).accepted for stop in stops]
    found: dict[str, list[float | bool]] = {
        "undone": [
            require_verdict(t.before).accepted and not require_verdict(t.after).accepted
            for t in last
        ],
        "stopped_right": [right is True for right in kept],
        "stopped_wrong": [right is False for right in kept],
        "over_first_turn": [
            require_verdict(t.after).accepted - require_verdict(f.after).accepted
            for t, f in zip(last, first, strict=True)
        ],
        "tokens": [sum(map(_tokens_of, chain)) for chain in cut],
        "majority_of_n": [],
        "any_of_n": [],
    }
    of_attempt: dict[str, list[ScoredSolution]] = {}
    for turn in first:
        of_attempt.setdefault(turn.attempt, []).append(_candidate(turn))
    for candidates in of_attempt.values():
        if 0 < n <= len(candidates):
            chosen = best_of_n(candidates, n)
            found["majority_of_n"].append(chosen["majority"])
            found["any_of_n"].append(chosen["oracle"])
    return found


def _candidate(turn: Turn) -> ScoredSolution:
    """The revision of a single round, which nobody has scored."""
    return ScoredSolution(
        seed=turn.seed,
        problem=turn.problem_id,
        attempt=turn.attempt,
        solution=turn.revision,
        score=0.5,
        right=require_verdict(turn.after).accepted,
    )

"""Named scalars with a reduction, mergeable across micro-batches and data-parallel ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

Reduction = Literal["mean", "sum", "max", "min", "last"]
_REDUCTIONS = get_args(Reduction)


@dataclass(frozen=True, slots=True)
class Partial:
    """What is known of one metric so far; small, picklable, and enough to go on."""

    reduction: Reduction
    value: float
    """mean: sum of value times weight; sum, max, min: the result so far; last: the last value."""
    weight: float
    """mean: sum of weights; others: number of additions."""


State = dict[str, Partial]
"""Partial results by metric name; what ranks exchange."""


class MetricBag:
    """Collects the metrics of one step on one rank."""

    def __init__(self) -> None:
        self._state: State = {}

    def add(
        self, name: str, value: float, weight: float = 1.0, reduction: Reduction = "mean"
    ) -> None:
        """Add one observation.

        ``weight`` counts what a mean is over (tokens, samples); 0 contributes nothing, negative or
        non-finite weights are a ValueError, as is a second reduction for the same name.
        """
        if reduction not in _REDUCTIONS:
            raise ValueError(f"metric {name!r}: reduction must be one of {', '.join(_REDUCTIONS)}")
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"metric {name!r}: weight {weight} must be finite and not negative")
        if weight == 0:
            return
        number = float(value)
        new = Partial("mean", number * weight, weight)
        if reduction != "mean":
            new = Partial(reduction, number, 1.0)
        old = self._state.get(name)
        self._state[name] = new if old is None else _join(name, [old, new], in_order=True)

    def update(
        self, values: Mapping[str, float], weight: float = 1.0, reduction: Reduction = "mean"
    ) -> None:
        """Add one observation of every metric in ``values``."""
        for name, value in values.items():
            self.add(name, value, weight, reduction)

    def state(self) -> State:
        """A copy of the partial results, to be merged with those of other ranks."""
        return dict(self._state)

    def result(self) -> dict[str, float]:
        """The metrics of this rank alone."""
        return reduce(self._state)


def merge(states: Iterable[State]) -> State:
    """Partial results of several ranks as one; the order of ``states`` does not matter.

    ``last`` takes the value of the rank that added most often, then the larger value.
    Raises ValueError where two ranks reduce one name differently.
    """
    collected: dict[str, list[Partial]] = {}
    for state in states:
        for name, partial in state.items():
            collected.setdefault(name, []).append(partial)
    return {name: _join(name, collected[name], in_order=False) for name in sorted(collected)}


def reduce(state: State) -> dict[str, float]:
    """The final number of every metric, sorted by name."""
    return {
        name: partial.value / partial.weight if partial.reduction == "mean" else partial.value
        for name, partial in sorted(state.items())
    }


def _join(name: str, partials: list[Partial], *, in_order: bool) -> Partial:
    reductions: set[Reduction] = {p.reduction for p in partials}
    if len(reductions) > 1:
        raise ValueError(
            f"metric {name!r} is added as {' and as '.join(sorted(reductions))}; "
            f"give it one reduction or two names"
        )
    (reduction,) = reductions
    values, weight = [p.value for p in partials], _total([p.weight for p in partials])
    if reduction in ("mean", "sum"):
        return Partial(reduction, _total(values), weight)
    if reduction == "last":
        newest = partials[-1] if in_order else max(partials, key=_last_order)
        return Partial(reduction, newest.value, weight if in_order else newest.weight)
    if any(math.isnan(v) for v in values):
        return Partial(reduction, math.nan, weight)
    return Partial(reduction, max(values) if reduction == "max" else min(values), weight)


def _last_order(partial: Partial) -> tuple[float, bool, float]:
    return partial.weight, math.isnan(partial.value), partial.value


def _total(values: list[float]) -> float:
    # fsum rounds once, so that the order of the ranks cannot change the last bit; it refuses
    # infinities of both signs and sums that overflow, where plain addition gives nan and inf.
    try:
        return math.fsum(values)
    except (ValueError, OverflowError):
        return sum(sorted(values))

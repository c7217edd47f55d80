"""Even shares of work: multiway number partitioning by largest differencing.

Source: Karmarkar and Karp, "The differencing method of set partitioning", 1982, in the balanced
variant of Michiels et al., 2003. The functions are deterministic, so every rank computes the same
result.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Hashable, Sequence

_Partial = tuple[tuple[float, tuple[int, ...]], ...]
"""A partition of some of the items: (sum of costs, indices) of each part, largest sum first."""


def partition_by_cost(costs: Sequence[float], k: int) -> list[list[int]]:
    """Indices of ``costs`` in ``k`` parts of equal size with nearly equal sums.

    Parts are ordered by their smallest index, indices ascend within a part. Sums differ by at most
    the largest cost. Raises ``ValueError`` for k < 1, a cost that is negative or not
    finite, and a number of items that ``k`` does not divide.
    """
    if k < 1:
        raise ValueError(f"the number of parts must be positive, is {k}")
    for index, cost in enumerate(costs):
        if not 0 <= cost < float("inf"):
            raise ValueError(f"item {index} costs {cost}; costs must be finite and not negative")
    if len(costs) % k:
        raise ValueError(f"{len(costs)} items cannot be shared in {k} parts of equal size")
    if not costs:
        return [[] for _ in range(k)]
    descending = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    starts = [descending[i : i + k] for i in range(0, len(costs), k)]
    partials = [tuple((costs[i], (i,)) for i in items) for items in starts]
    return sorted(sorted(items) for _, items in _difference(partials))


def partition_groups(
    costs: Sequence[float], groups: Sequence[Hashable], k: int, *, swaps: bool = False
) -> list[list[int]]:
    """Like :func:`partition_by_cost`, but all items of a group are in the same part.

    ``groups`` has one name per item, in any order; every part gets the same number of groups. With
    ``swaps`` groups change places afterwards (:func:`swap_items_to_balance`), which many parts with
    a few very large groups need. Raises ``ValueError`` for unequal lengths and as
    :func:`partition_by_cost` does, for groups.
    """
    members: dict[Hashable, list[int]] = {}
    for index, (_, group) in enumerate(zip(costs, groups, strict=True)):
        members.setdefault(group, []).append(index)
    blocks = list(members.values())
    sums = [sum(costs[i] for i in block) for block in blocks]
    shared = partition_by_cost(sums, k)
    if swaps:
        shared = swap_items_to_balance(sums, shared)
    return [sorted(i for block in part for i in blocks[block]) for part in shared]


def swap_items_to_balance(
    costs: Sequence[float], parts: Sequence[Sequence[int]]
) -> list[list[int]]:
    """``parts`` after items of the part with the largest sum have changed places with items of
    smaller parts, until that sum is within a thousandth of the mean or no change lowers it.
    """
    inside = [sorted((costs[i], i) for i in part) for part in parts]
    sums = [sum(cost for cost, _ in part) for part in inside]
    goal = 1.001 * sum(sums) / len(sums)
    while (most := max(sums)) > goal:
        high = sums.index(most)
        for low in sorted(range(len(sums)), key=sums.__getitem__):
            gap = most - sums[low]
            exchange = _best_exchange(inside[high], inside[low], gap) if gap > 0 else None
            if exchange is not None:
                break
        else:
            break
        give, take = inside[high][exchange[0]], inside[low][exchange[1]]
        inside[high] = sorted(
            [*inside[high][: exchange[0]], *inside[high][exchange[0] + 1 :], take]
        )
        inside[low] = sorted([*inside[low][: exchange[1]], *inside[low][exchange[1] + 1 :], give])
        sums[high] += take[0] - give[0]
        sums[low] += give[0] - take[0]
    return [sorted(i for _, i in part) for part in inside]


def _best_exchange(
    high: Sequence[tuple[float, int]], low: Sequence[tuple[float, int]], gap: float
) -> tuple[int, int] | None:
    """Places of the items whose exchange brings two sums, ``gap`` apart, nearest to each other;
    None if none does."""
    best, found = gap / 2, None
    for place, (cost, _) in enumerate(high):
        at = bisect_left(low, (cost - gap / 2,))
        for other in (at - 1, at):
            if 0 <= other < len(low):
                off = abs(cost - low[other][0] - gap / 2)
                # A thousandth less, so that rounding cannot repeat an exchange for ever.
                if off < best * 0.999:
                    best, found = off, (place, other)
    return found


def _difference(partials: Sequence[_Partial]) -> _Partial:
    """Merge the two partials with the largest spread, large parts with small ones, until one is
    left.
    """
    # The running number breaks ties, so that partials themselves are never compared.
    heap = [(p[-1][0] - p[0][0], number, p) for number, p in enumerate(partials)]
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        joined = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(first, reversed(second), strict=True)]
        merged = tuple(sorted(joined, key=lambda part: (-part[0], part[1])))
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], number, merged))
        number += 1
    return heap[0][2]

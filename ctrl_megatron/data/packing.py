"""Token-budget micro-batches: first-fit decreasing."""

from __future__ import annotations

from collections.abc import Sequence


def pack(lengths: Sequence[int], budget: int, *, key: str = "the token budget") -> list[list[int]]:
    """Groups of indices whose lengths sum to at most ``budget``, longest items and fullest groups
    first.

    The result depends on the arguments alone; equal lengths keep their order. At most 11/9 of the
    least possible number of groups, plus one (Dósa 2007). Raises ``ValueError`` naming the item
    that alone exceeds the budget and ``key``, the option that sets it, and for a length that is not
    positive.
    """
    groups: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        if length > budget:
            raise ValueError(
                f"item {index} has {length} tokens, more than {key} of {budget} allows; raise it"
            )
        if length < 1:
            raise ValueError(f"item {index} has {length} tokens; every item needs at least one")
        slot = next((i for i, free in enumerate(room) if length <= free), len(groups))
        if slot == len(groups):
            groups.append([])
            room.append(budget)
        groups[slot].append(index)
        room[slot] -= length
    return groups

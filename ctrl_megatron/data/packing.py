"""Token-budget micro-batches: first-fit decreasing, over rows or groups of rows."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


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


def pack_groups(
    prompts: Sequence[int], responses: Sequence[int], groups: Sequence[Hashable], budget: int
) -> list[list[list[int]]]:
    """Micro-batches of at most ``budget`` tokens, each of groups of row numbers, in which a group's
    prompt counts once.

    Row i has ``prompts[i]`` and ``responses[i]`` tokens; rows of one name in ``groups`` have the
    same prompt. A group above the budget is cut into some that repeat the prompt. Groups of one row
    are packed as by ``pack``, which raises ValueError for a row above the budget.
    """
    members: dict[Hashable, list[int]] = {}
    for row, name in enumerate(groups):
        members.setdefault(name, []).append(row)
    pack([p + r for p, r in zip(prompts, responses, strict=True)], budget)  # names a wrong row
    units: list[list[int]] = []
    for rows in members.values():
        prompt = prompts[rows[0]]
        if prompt + sum(responses[row] for row in rows) <= budget:
            units.append(rows)
            continue
        # A response without tokens needs no room of its own; one more does no harm.
        parts = pack([max(1, responses[row]) for row in rows], budget - prompt)
        units += [sorted(rows[i] for i in part) for part in parts]
    costs = [prompts[rows[0]] + sum(responses[row] for row in rows) for rows in units]
    return [[units[i] for i in micro_batch] for micro_batch in pack(costs, budget)]

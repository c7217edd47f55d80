"""Micro-batches under a token budget: first-fit decreasing over rows or groups of rows."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def pack_by_length(
    lengths: Sequence[int], budget: int, *, key: str = "the token budget"
) -> list[list[int]]:
    """Pack items of ``lengths`` tokens into groups of at most ``budget`` tokens: lists of indices.

    Items are placed in descending order of length, equal lengths in their given order, each into
    the first group with room. The number of groups is at most 11/9 of the optimum plus one (Dósa
    2007). Raises ``ValueError`` for an item that alone exceeds the budget, naming the option
    ``key`` that sets it, and for a length below 1.
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
    """Micro-batches of at most ``budget`` tokens, where the prompt of a group counts once. A
    micro-batch is a list of groups, a group a list of row numbers.

    Row i has ``prompts[i]`` and ``responses[i]`` tokens; rows with the same name in ``groups``
    have the same prompt. A group above the budget is split into parts that each repeat the prompt.
    Raises ValueError for a row that alone exceeds the budget.
    """
    members: dict[Hashable, list[int]] = {}
    for row, name in enumerate(groups):
        members.setdefault(name, []).append(row)
    pack_by_length(
        [p + r for p, r in zip(prompts, responses, strict=True)], budget
    )  # raises for a long row
    units: list[list[int]] = []
    for rows in members.values():
        prompt = prompts[rows[0]]
        if prompt + sum(responses[row] for row in rows) <= budget:
            units.append(rows)
            continue
        # ``pack_by_length`` requires at least one token; one for an empty response is harmless.
        parts = pack_by_length([max(1, responses[row]) for row in rows], budget - prompt)
        units += [sorted(rows[i] for i in part) for part in parts]
    costs = [prompts[rows[0]] + sum(responses[row] for row in rows) for rows in units]
    return [[units[i] for i in micro_batch] for micro_batch in pack_by_length(costs, budget)]

"""Rows that answer the same prompt form a group; statistics of such groups."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

import torch

GroupIndex = Iterable[Hashable] | torch.Tensor
"""(B,) ids, equal for rows of a group: a list, a numpy array (of objects too), a tensor."""


class GroupStatistics(NamedTuple):
    """Per row, (B,) each: what the row's group looks like."""

    count: torch.Tensor
    mean: torch.Tensor
    std: torch.Tensor
    """Unbiased. NaN where the group has fewer than two rows."""


def group_numbers(index: GroupIndex, rows: int) -> torch.Tensor:
    """(rows,) int64, equal for equal ids, numbered by first appearance.

    Raises ValueError if there is not exactly one id per row, or naming a row whose id cannot be
    hashed.
    """
    ids: list[Any] = index.tolist() if hasattr(index, "tolist") else list(index)  # type: ignore[union-attr]
    if len(ids) != rows:
        raise ValueError(f"{len(ids)} group ids for {rows} rows")
    numbers: dict[Hashable, int] = {}
    found: list[int] = []
    for row, group in enumerate(ids):
        # A tensor hashes by identity, so equal 0-dim tensors would be different groups.
        key = group.item() if isinstance(group, torch.Tensor) else group
        try:
            found.append(numbers.setdefault(key, len(numbers)))
        except TypeError as error:
            raise ValueError(f"the group id of row {row} is {error}: {key!r}") from error
    return torch.tensor(found, dtype=torch.int64)


def group_statistics(
    scores: torch.Tensor, groups: torch.Tensor, counted: torch.Tensor
) -> GroupStatistics:
    """Statistics of ``scores`` (B,) by ``groups`` (B,), over rows where ``counted`` (B,) is on.

    Group numbers are below B, as ``group_numbers`` gives them.
    """

    def total(values: torch.Tensor) -> torch.Tensor:
        sums = torch.zeros_like(values)
        return sums.index_add_(0, groups, torch.where(counted, values, 0))[groups]

    count = total(torch.ones_like(scores))
    mean = total(scores) / count
    # Two passes: the sum of squares less the squared sum would cancel where rewards are alike.
    variance = total((scores - mean).square()) / (count - 1)
    return GroupStatistics(count=count, mean=mean, std=variance.sqrt())

"""Rows that answer the same prompt form a group; statistics of such groups."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

import numpy as np
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
    # A tensor hashes by identity, so equal 0-dim tensors would be different groups.
    keys = ids
    if any(issubclass(kind, torch.Tensor) for kind in set(map(type, ids))):
        keys = [group.item() if isinstance(group, torch.Tensor) else group for group in ids]
    numbers = defaultdict(itertools.count().__next__)
    try:
        # By way of numpy: torch.tensor takes longer for a list than all the rest.
        return torch.from_numpy(np.fromiter(map(numbers.__getitem__, keys), np.int64, rows))
    except TypeError as error:
        row, key = next(item for item in enumerate(keys) if not _hashable(item[1]))
        raise ValueError(f"the group id of row {row} is {error}: {key!r}") from error


def _hashable(key: Any) -> bool:
    try:
        hash(key)
    except TypeError:
        return False
    return True


def group_sums(values: torch.Tensor, groups: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Per row, (B,): the sum of ``values`` (B,) over the counted rows of its group."""
    sums = torch.zeros_like(values)
    return sums.index_add_(0, groups, torch.where(counted, values, 0))[groups]


def group_statistics(
    scores: torch.Tensor, groups: torch.Tensor, counted: torch.Tensor
) -> GroupStatistics:
    """Statistics of ``scores`` (B,) by ``groups`` (B,), over rows where ``counted`` (B,) is on.

    Group numbers are below B, as ``group_numbers`` gives them.
    """
    count = group_sums(torch.ones_like(scores), groups, counted)
    mean = group_sums(scores, groups, counted) / count
    # Two passes: the sum of squares less the squared sum would cancel where rewards are alike.
    variance = group_sums((scores - mean).square(), groups, counted) / (count - 1)
    return GroupStatistics(count=count, mean=mean, std=variance.sqrt())


def centred(scores: torch.Tensor, group: GroupStatistics) -> torch.Tensor:
    """Scores less the mean of their group, (B,); a group of one has no baseline, so it keeps its
    score."""
    return scores - torch.where(group.count <= 1, 0.0, group.mean)


def group_extremes(
    scores: torch.Tensor, groups: torch.Tensor, counted: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per row, (B,) each: the lowest and the highest score among the counted rows of its group.

    (inf, -inf) where the group has no counted row.
    """

    def extreme(reduce: str, start: float) -> torch.Tensor:
        found = torch.full_like(scores, start)
        kept = torch.where(counted, scores, start)
        return found.scatter_reduce_(0, groups, kept, reduce, include_self=True)[groups]

    return extreme("amin", float("inf")), extreme("amax", float("-inf"))


def without_spread(
    scores: torch.Tensor, groups: torch.Tensor, counted: torch.Tensor
) -> torch.Tensor:
    """Per row, (B,) bool: whether the counted rows of its group all have the same score.

    Also true for a group of one and for a group without a counted row.
    """
    lowest, highest = group_extremes(scores, groups, counted)
    return lowest >= highest

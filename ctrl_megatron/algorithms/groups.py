"""Groups: the samples of one prompt, and statistics of a sample's group."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import torch

from ctrl_megatron.algorithms.masked import masked_row_sums, require_equal_shapes, zero_outside_mask

GroupIndex = Iterable[Hashable] | torch.Tensor
"""(B,) ids, equal for rows of a group: a list, a numpy array (of objects too), a tensor."""


class GroupedScores:
    """One score per row of (B, R) token rewards, and statistics of the row's group. Every method
    returns (B,) float64: for each row the statistic of its group, equal for all rows of the group.

    A score is the sum of the row's token rewards under the mask. In float64, so that equal rewards
    have a spread of 0 and not of a rounding blown up by a division. A row without tokens has no
    score and is in no statistics. ``index`` (B,) holds the ids of the groups. Raises ValueError for
    shapes that differ and if there is not one hashable id per row.
    """

    def __init__(
        self, token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: GroupIndex
    ) -> None:
        require_equal_shapes(response_mask=response_mask, token_level_rewards=token_level_rewards)
        self._mask, self._dtype = response_mask, advantage_dtype(token_level_rewards)
        self._groups = group_number_of_rows(index, len(response_mask)).to(response_mask.device)
        self.scores = masked_row_sums(token_level_rewards, response_mask)
        self.counted = response_mask.bool().any(dim=-1)
        """Rows that have tokens, (B,) bool."""
        self.count = self.sum(torch.ones_like(self.scores))
        """Counted rows of the group."""

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """(B,): for every row the sum of ``values`` (B,) over the counted rows of its group."""
        own = torch.where(self.counted, values, 0.0)
        return torch.zeros_like(values).index_add_(0, self._groups, own)[self._groups]

    def max(self, values: torch.Tensor) -> torch.Tensor:
        """(B,): for every row the maximum of ``values`` (B,) over the counted rows of its group;
        -inf where the group has none."""
        return _group_max(torch.where(self.counted, values, -torch.inf), self._groups)

    def mean(self) -> torch.Tensor:
        """(B,): for every row the mean score of its group."""
        return self.sum(self.scores) / self.count

    def std(self) -> torch.Tensor:
        """(B,): for every row the unbiased standard deviation of its group's scores; NaN in a group
        of one."""
        # Two passes: the sum of squares less the squared sum would cancel where rewards are alike.
        return (self.sum((self.scores - self.mean()).square()) / (self.count - 1)).sqrt()

    def broadcast_to_tokens(self, advantages: torch.Tensor) -> torch.Tensor:
        """(B, R): a row's advantage (B,) on each of its tokens, 0 off the mask, in the rewards'
        dtype.

        The advantage of a row alone in its group is 0, because there is nothing to compare it with.
        """
        rows = torch.where(self.count > 1, advantages, 0.0).to(self._dtype)
        return zero_outside_mask(rows.unsqueeze(-1).expand(self._mask.shape), self._mask)


def advantage_dtype(rewards: torch.Tensor) -> torch.dtype:
    """The dtype of advantages: that of the rewards, float32 where they are integers."""
    return rewards.dtype if rewards.dtype.is_floating_point else torch.float32


def group_number_of_rows(index: GroupIndex, rows: int) -> torch.Tensor:
    """(rows,) int64, equal for equal ids, numbered by first appearance.

    Raises ValueError if there is not exactly one id per row, or naming a row whose id cannot be
    hashed.
    """
    ids: list[Any] = index.tolist() if hasattr(index, "tolist") else list(index)  # type: ignore[union-attr]
    if len(ids) != rows:
        raise ValueError(f"{len(ids)} group ids for {rows} rows")
    numbers: dict[Hashable, int] = {}
    found = []
    for row, group in enumerate(ids):
        # A tensor hashes by identity, so equal 0-dim tensors would be different groups.
        key = group.item() if isinstance(group, torch.Tensor) else group
        try:
            found.append(numbers.setdefault(key, len(numbers)))
        except TypeError as error:
            raise ValueError(f"the group id of row {row} is {error}: {key!r}") from error
    return torch.tensor(found, dtype=torch.int64)


@torch.no_grad()
def rows_in_varied_groups(scores: torch.Tensor, groups: GroupIndex) -> torch.Tensor:
    """(B,) bool: rows whose group has at least two different scores.

    ``scores`` (B,); ``groups`` (B,) hashable ids. A group whose scores are all equal has group-
    relative advantages of 0, and a group of one has nothing to differ from. Source: DAPO, arXiv
    2503.14476, section 3.2. Raises ValueError if there is not one id per row or a score is NaN.
    """
    if bool(scores.isnan().any()):
        row = int(scores.isnan().nonzero()[0])
        raise ValueError(f"the score of row {row} is NaN; mask failed rows out before filtering")
    numbers = group_number_of_rows(groups, len(scores)).to(scores.device)
    return _group_max(scores, numbers) > -_group_max(-scores, numbers)


def _group_max(values: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    return torch.full_like(values, -torch.inf).scatter_reduce_(0, groups, values, "amax")[groups]

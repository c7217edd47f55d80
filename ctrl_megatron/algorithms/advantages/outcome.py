"""From token rewards to one score per row, and from one advantage per row back to tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ctrl_megatron.algorithms.advantages.groups import GroupIndex, group_numbers
from ctrl_megatron.algorithms.masked import masked_copy, row_sums, rows_with_any
from ctrl_megatron.algorithms.shapes import check_shapes


class Outcomes(NamedTuple):
    """What group-relative estimators look at, (B,) each."""

    scores: torch.Tensor
    """Sum of the row's token rewards under the mask, float64."""
    groups: torch.Tensor
    """Group numbers, int64."""
    counted: torch.Tensor
    """Off for a row without tokens: it has no score and is in no statistics."""


def outcomes(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: GroupIndex
) -> Outcomes:
    """Scores and groups of (B, R) rewards; ``index`` (B,) holds hashable group ids.

    Float64, so that equal rewards have a spread of 0 and not of a rounding blown up by a division.
    Raises ValueError for shapes that differ and if there is not one id per row.
    """
    check_shapes(response_mask=response_mask, token_level_rewards=token_level_rewards)
    scores = row_sums(token_level_rewards, response_mask)
    groups = group_numbers(index, len(scores)).to(scores.device)
    return Outcomes(scores, groups, rows_with_any(response_mask))


def spread_over_tokens(
    advantages: torch.Tensor, token_level_rewards: torch.Tensor, response_mask: torch.Tensor
) -> torch.Tensor:
    """(B, R): a row's advantage on each of its tokens, 0 off the mask, in the rewards' dtype."""
    rows = advantages.to(floating(token_level_rewards).dtype).unsqueeze(-1)
    return masked_copy(rows, response_mask)


def floating(values: torch.Tensor) -> torch.Tensor:
    """``values``, integers as float32."""
    return values if values.dtype.is_floating_point else values.to(torch.float32)

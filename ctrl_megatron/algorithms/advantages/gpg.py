"""Centred scores, scaled up by the share of rows that say nothing."""

from __future__ import annotations

import torch

from ctrl_megatron.algorithms.advantages.groups import (
    GroupIndex,
    centred,
    group_extremes,
    group_statistics,
)
from ctrl_megatron.algorithms.advantages.outcome import outcomes, spread_over_tokens
from ctrl_megatron.algorithms.advantages.registry import (
    BatchScale,
    register_adv_est,
    register_adv_stages,
)
from ctrl_megatron.algorithms.masked import rows_with_any

# Differences to the mean below this share of the group's largest score are rounding.
_ROUNDING = 1e-12


@torch.no_grad()
def unscaled_gpg_advantages(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: GroupIndex,
    f_norm: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(score - group mean) / ``f_norm`` on every token of the row: (B, R), twice.

    Exactly 0 where the score is the group's mean up to rounding. A group of one keeps its score, as
    in ``grpo``. Raises ValueError for an ``f_norm`` that is not positive and if there is not one id
    per row.
    """
    if not f_norm > 0:
        raise ValueError(f"f_norm must be positive, got {f_norm}")
    found = outcomes(token_level_rewards, response_mask, index)
    advantages = centred(found.scores, group_statistics(*found))
    lowest, highest = group_extremes(*found)
    rounding = _ROUNDING * torch.maximum(lowest.abs(), highest.abs())
    advantages = torch.where(advantages.abs() <= rounding, 0.0, advantages) / f_norm
    spread = spread_over_tokens(advantages, token_level_rewards, response_mask)
    return spread, spread


def _sums(
    advantages: torch.Tensor, *, response_mask: torch.Tensor, **_others: object
) -> torch.Tensor:
    """Rows with tokens; rows with an advantage."""
    rows = rows_with_any(response_mask).sum()
    telling = rows_with_any(advantages != 0).sum()
    return torch.stack([rows, telling]).to(torch.float64)


def _apply(advantages: torch.Tensor, sums: torch.Tensor, **_inputs: object) -> torch.Tensor:
    return advantages * (sums[0] / sums[1].clamp(min=1))


_ALPHA = BatchScale(sums=_sums, apply=_apply)


@register_adv_est("gpg")
@torch.no_grad()
def compute_gpg_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: GroupIndex,
    f_norm: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """alpha (score - group mean) / ``f_norm`` on every token; returns are without alpha.

    alpha = B / (B - M) with B rows, M of them with advantage 0: rows without a gradient do not
    water down the others. ``token_level_rewards``, ``response_mask`` (B, R); ``index`` (B,)
    hashable group ids. Source: GPG, arXiv 2504.02546. (verl counts rows whose score is 0
    instead of those whose advantage is 0; that would change with the offset of the reward.)
    Pieces of a batch are for ``estimate_advantages``. Raises ValueError as
    ``unscaled_gpg_advantages`` does.
    """
    advantages, returns = unscaled_gpg_advantages(token_level_rewards, response_mask, index, f_norm)
    return _apply(advantages, _sums(advantages, response_mask=response_mask)), returns


register_adv_stages("gpg", raw=unscaled_gpg_advantages, scale=_ALPHA)

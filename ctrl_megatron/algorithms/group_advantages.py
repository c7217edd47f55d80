"""Advantages relative to the group, which differ in their baseline and scale.

``token_level_rewards``, ``response_mask`` (B, R); ``index`` (B,) hashable group ids, whole groups.
A row's score is the sum of its token rewards under the mask. A row without tokens has no score and
is in no statistics. Results (advantages, returns) are (B, R) in the dtype of the rewards, 0 off the
mask and 0 for a row alone in its group (for which verl's grpo gives its score). Raises ValueError
for shapes that differ and if there is not one id per row.
"""

from __future__ import annotations

import torch

from ctrl_megatron.algorithms.groups import GroupedScores, GroupIndex, advantage_dtype
from ctrl_megatron.algorithms.masked import (
    Reduce,
    identity_reduce,
    masked_whiten,
    zero_outside_mask,
)
from ctrl_megatron.algorithms.registry import register_adv_est

# Differences to the mean below this share of the group's largest score are rounding.
_ROUNDING = 1e-12
_CPGD_WEIGHTS = ("STD_weight", "clip_filter_like_weight", "naive")
_LARGEST_CPGD_WEIGHT = 3.0


@register_adv_est("grpo")
@torch.no_grad()
def compute_grpo_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: GroupIndex,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(score - group mean) / (group std + epsilon) on every token of the row.

    The std is unbiased. With ``norm_adv_by_std_in_grpo=False`` there is no division (Dr.GRPO, arXiv
    2503.20783). Source: DeepSeekMath, arXiv 2402.03300, section 4.1.2.
    """
    group = GroupedScores(token_level_rewards, response_mask, index)
    advantages = group.scores - group.mean()
    if norm_adv_by_std_in_grpo:
        advantages = advantages / (group.std() + epsilon)
    found = group.broadcast_to_tokens(advantages)
    return found, found


@register_adv_est("gdpo")
@torch.no_grad()
def compute_gdpo_outcome_advantage(
    reward_parts: torch.Tensor,
    reward_weights: torch.Tensor,
    response_mask: torch.Tensor,
    index: GroupIndex,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    reduce: Reduce = identity_reduce,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(whitened sum, sum) of ``reward_weights`` (K,) times the group-relative advantages of every
    column of ``reward_parts`` (B, K), on every token of the row.

    A column is normalised as ``grpo`` does, over the rows of the group where it is known: a reward
    that is NaN is left out of its group's mean and of the row's sum. The sum is then whitened over
    the rows of the whole batch: (sum - mean) / (std + epsilon), both unbiased. Source: GDPO, arXiv
    2601.05242. Its implementations differ: this is TRL's rule
    (``normalize_then_sum``), whereas verl whitens over tokens, so that long rows weigh more, and
    the authors' code takes an unknown reward for an average one.
    """
    rows = torch.zeros(len(reward_parts), dtype=torch.float64, device=reward_parts.device)
    for column, weight in zip(reward_parts.unbind(dim=1), reward_weights.tolist(), strict=True):
        known = response_mask.bool() & ~column.isnan()[:, None]
        scores, values = torch.zeros_like(known, dtype=torch.float64), column.nan_to_num(0.0)
        # Any one token under the mask: a score is the sum of them.
        first = known.int().argmax(dim=1, keepdim=True)
        scores.scatter_(1, first, values.double()[:, None])
        group = GroupedScores(scores, known, index)
        relative = group.scores - group.mean()
        if norm_adv_by_std_in_grpo:
            relative = relative / (group.std() + epsilon)
        compared = group.counted & (group.count > 1)
        rows += weight * torch.where(compared, relative, 0.0)
    counted = response_mask.bool().any(dim=-1)
    count, total, squares = reduce(
        torch.stack([counted.double().sum(), rows.sum(), rows.square().sum()])
    ).unbind()
    # The rows' mean is nearly 0, since each group's is, so that this difference cancels nothing.
    variance = (squares - total * total / count.clamp(min=1)) / (count - 1).clamp(min=1)
    whitened = (rows - total / count.clamp(min=1)) / (variance.clamp(min=0).sqrt() + epsilon)
    dtype = advantage_dtype(reward_parts)
    advantages, returns = (
        zero_outside_mask(one.to(dtype)[:, None].expand(response_mask.shape), response_mask)
        for one in (whitened, rows)
    )
    return advantages, returns


@register_adv_est("grpo_passk")
@torch.no_grad()
def compute_grpo_passk_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: GroupIndex,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Best - second best score on the tokens of the best row, 0 on all others.

    Divided by (group std + epsilon) with ``norm_adv_by_std_in_grpo``. If the best score occurs
    twice, all advantages of the group are 0. Source: arXiv 2503.19595.
    """
    group = GroupedScores(token_level_rewards, response_mask, index)
    best = group.scores == group.max(group.scores)
    leads = best & (group.sum(best.double()) == 1)
    lead = group.scores - group.max(group.scores.masked_fill(best, -torch.inf))
    if norm_adv_by_std_in_grpo:
        lead = lead / (group.std() + epsilon)
    found = group.broadcast_to_tokens(torch.where(leads, lead, 0.0))
    return found, found


@register_adv_est("rloo")
@torch.no_grad()
def compute_rloo_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: GroupIndex,
    norm_by_std: bool = False,
    epsilon: float = 1e-4,
) -> tuple[torch.Tensor, torch.Tensor]:
    """score - (sum of the group's scores - score) / (k - 1) on every token of the row.

    k counts the rows of the group that have tokens. Source: Ahmadian et al., arXiv 2402.14740.
    ``norm_by_std`` divides by (unbiased std of the group + ``epsilon``), as DiffuCoder's trainer
    can (arXiv 2506.20639).
    """
    group = GroupedScores(token_level_rewards, response_mask, index)
    others = group.sum(group.scores) - group.scores
    advantages = group.scores - others / (group.count - 1)
    if norm_by_std:
        advantages = advantages / (group.std() + epsilon)
    found = group.broadcast_to_tokens(advantages)
    return found, found


@register_adv_est("opo")
@torch.no_grad()
def compute_opo_outcome_advantage(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: GroupIndex
) -> tuple[torch.Tensor, torch.Tensor]:
    """score - sum(length * score) / sum(length) over the group, on every token of the row.

    The baseline of least gradient variance where a row's squared gradient grows with its length,
    which is that of its tokens under the mask. Source: OPO, arXiv 2505.23585.
    """
    group = GroupedScores(token_level_rewards, response_mask, index)
    lengths = response_mask.bool().sum(dim=-1).double()
    baseline = group.sum(lengths * group.scores) / group.sum(lengths)
    found = group.broadcast_to_tokens(group.scores - baseline)
    return found, found


@register_adv_est("gpg")
@torch.no_grad()
def compute_gpg_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: GroupIndex,
    f_norm: float = 1.0,
    reduce: Reduce = identity_reduce,
) -> tuple[torch.Tensor, torch.Tensor]:
    """alpha (score - group mean) / ``f_norm`` on every token; returns are without alpha.

    alpha = B / (B - M) with B rows, M of them with advantage 0, in the whole batch: rows without a
    gradient do not water down the others. Exactly 0 where the score is the group's mean up to
    rounding. Source: GPG, arXiv 2504.02546. (verl counts rows whose score is 0 instead of those
    whose advantage is 0; that would change with the offset of the reward.) Raises ValueError for an
    ``f_norm`` that is not positive.
    """
    if not f_norm > 0:
        raise ValueError(f"f_norm must be positive, got {f_norm}")
    group = GroupedScores(token_level_rewards, response_mask, index)
    advantages = group.scores - group.mean()
    rounding = _ROUNDING * group.max(group.scores.abs())
    returns = group.broadcast_to_tokens(
        torch.where(advantages.abs() <= rounding, 0.0, advantages) / f_norm
    )
    telling = (returns != 0).any(dim=-1).sum()
    rows, telling = reduce(torch.stack([group.counted.sum(), telling]).double()).unbind()
    return returns * (rows / telling.clamp(min=1)), returns


@register_adv_est("cpgd")
@torch.no_grad()
def compute_cpgd_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: GroupIndex,
    epsilon: float = 1e-6,
    weight_factor_in_cpgd: str = "STD_weight",
    reduce: Reduce = identity_reduce,
) -> tuple[torch.Tensor, torch.Tensor]:
    """weight * (score - group mean) on every token; returns are before the batch's weight.

    The weight is 1 / (group std + epsilon) for ``STD_weight``, 1 for ``naive``, and for
    ``clip_filter_like_weight`` min(groups / groups whose scores are not all equal, 3), counted in
    the whole batch. Source: CPGD, arXiv 2505.12504. Raises ValueError for another weight.
    """
    if weight_factor_in_cpgd not in _CPGD_WEIGHTS:
        raise ValueError(
            f"unknown weight_factor_in_cpgd {weight_factor_in_cpgd!r}; known: "
            f"{', '.join(_CPGD_WEIGHTS)}"
        )
    group = GroupedScores(token_level_rewards, response_mask, index)
    advantages = group.scores - group.mean()
    if weight_factor_in_cpgd == "STD_weight":
        advantages = advantages / (group.std() + epsilon)
    returns = group.broadcast_to_tokens(advantages)
    if weight_factor_in_cpgd != "clip_filter_like_weight":
        return returns, returns
    share = torch.where(group.counted, 1 / group.count, 0.0)
    differ = group.max(group.scores) > -group.max(-group.scores)
    sums = reduce(torch.stack([share.sum(), torch.where(differ, share, 0.0).sum()]))
    # A share per row adds up to whole groups only up to rounding.
    groups, telling = sums.round().unbind()
    return returns * (groups / telling.clamp(min=1)).clamp(max=_LARGEST_CPGD_WEIGHT), returns


@register_adv_est("reinforce_plus_plus_baseline")
@torch.no_grad()
def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: GroupIndex,
    reduce: Reduce = identity_reduce,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(whitened returns, returns), the latter score - group mean on every token of the row.

    Scaled by the whole batch instead of the group. Every token counts once in the moments, so long
    rows weigh more. Source: arXiv 2501.03262, the variant with a baseline. Raises ValueError if the
    mask selects fewer than two tokens.
    """
    group = GroupedScores(token_level_rewards, response_mask, index)
    returns = group.broadcast_to_tokens(group.scores - group.mean())
    return masked_whiten(returns, response_mask, reduce=reduce), returns

"""What verl and siiRL's guide call by name in their ``core_algos``, over a whole batch.

Each is derived from the one implementation that the trainer uses on pieces of a batch; the
advantage estimators need no other form.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, TypeVar

import torch

from ctrl_megatron.algorithms.aggregation import agg_loss
from ctrl_megatron.algorithms.covariance import (
    clip_cov_terms,
    covariance_sums,
    kl_cov_terms,
    over_tokens,
)
from ctrl_megatron.algorithms.kl import KLController, penalise
from ctrl_megatron.algorithms.masked import check_shapes, masked_mean
from ctrl_megatron.algorithms.policy_losses import (
    cispo_terms,
    cpgd_terms,
    geo_mean_terms,
    gpg_terms,
    gspo_terms,
    vanilla_terms,
)
from ctrl_megatron.algorithms.registry import (
    PolicyLossFn,
    PolicyLossTermsFn,
    policy_loss_options,
    register_policy_loss,
    token_selection,
)
from ctrl_megatron.algorithms.value_loss import value_loss_terms

Scalars = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Data = TypeVar("Data", bound=Any)
"""A mapping or TensorDict."""


def _whole_batch(
    name: str, terms: PolicyLossTermsFn, default_mode: str = "token-mean"
) -> PolicyLossFn:
    """Registers the loss of a whole batch by its ``terms``.

    It returns four scalars (pg_loss, pg_clipfrac, ppo_kl, pg_clipfrac_lower): the loss by
    ``loss_agg_mode``, the others as means over tokens, without gradient. Losses that select tokens
    also take ``selected``, or the ``generator`` of the draw. Raises ValueError for tensors that
    differ in shape, and naming the options where these are read and ``config`` is None.
    """
    options, selection = sorted(policy_loss_options(name)), token_selection(name)

    def compute(
        old_log_prob: torch.Tensor,
        log_prob: torch.Tensor,
        advantages: torch.Tensor,
        response_mask: torch.Tensor,
        loss_agg_mode: str = default_mode,
        config: Any = None,
        rollout_is_weights: torch.Tensor | None = None,
        selected: torch.Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Scalars:
        if config is None and options:
            raise ValueError(f"compute_policy_loss_{name} needs config with {', '.join(options)}")
        check_shapes(
            response_mask=response_mask,
            old_log_prob=old_log_prob,
            log_prob=log_prob,
            advantages=advantages,
            rollout_is_weights=rollout_is_weights,
            selected=selected,
        )
        given = (old_log_prob, log_prob, advantages, response_mask, config)
        chosen: dict[str, torch.Tensor] = {}
        if selection is not None:
            if selected is None:
                sums = covariance_sums(log_prob, advantages, response_mask)
                covariances = selection.covariances(*given, sums)[response_mask.bool()]
                lots = torch.rand(len(covariances), generator=generator, dtype=torch.float64)
                picked = selection.choose(covariances, config, lots.to(covariances.device))
                selected = over_tokens(picked, response_mask)
            chosen = {"selected": selected}
        found = terms(*given, rollout_is_weights, **chosen)
        return (
            agg_loss(found.loss, response_mask, loss_agg_mode),
            agg_loss(found.clipped, response_mask, "token-mean"),
            agg_loss(found.approx_kl, response_mask, "token-mean"),
            agg_loss(found.clipped_lower, response_mask, "token-mean"),
        )

    compute.__name__ = compute.__qualname__ = f"compute_policy_loss_{name}"
    compute.__doc__ = (
        f"The policy loss {name} of a whole batch: (pg_loss, pg_clipfrac, ppo_kl, "
        "pg_clipfrac_lower), scalars; docs/algorithms.md has the formula."
    )
    return register_policy_loss(name)(compute)


compute_policy_loss_vanilla = _whole_batch("vanilla", vanilla_terms)
compute_policy_loss_gspo = _whole_batch("gspo", gspo_terms, "seq-mean-token-mean")
compute_policy_loss_cpgd = _whole_batch("cpgd", cpgd_terms)
compute_policy_loss_gpg = _whole_batch("gpg", gpg_terms)
compute_policy_loss_cispo = _whole_batch("cispo", cispo_terms)
compute_policy_loss_geo_mean = _whole_batch("geo_mean", geo_mean_terms, "seq-mean-token-mean")
compute_policy_loss_clip_cov = _whole_batch("clip_cov", clip_cov_terms)
compute_policy_loss_kl_cov = _whole_batch("kl_cov", kl_cov_terms)


def compute_policy_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    cliprange: float,
    cliprange_low: float | None = None,
    cliprange_high: float | None = None,
    clip_ratio_c: float = 3.0,
    loss_agg_mode: str = "token-mean",
) -> Scalars:
    """``compute_policy_loss_vanilla`` with its options as arguments."""
    config = SimpleNamespace(
        clip_ratio=cliprange,
        clip_ratio_low=cliprange_low,
        clip_ratio_high=cliprange_high,
        clip_ratio_c=clip_ratio_c,
    )
    given = (old_log_prob, log_prob, advantages, response_mask)
    return compute_policy_loss_vanilla(*given, loss_agg_mode, config)


def compute_value_loss(
    vpreds: torch.Tensor,
    returns: torch.Tensor,
    values: torch.Tensor,
    response_mask: torch.Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
) -> tuple[torch.Tensor, torch.Tensor]:
    """``value_loss_terms`` of a whole batch: (vf_loss, vf_clipfrac), two scalars.

    The loss by ``loss_agg_mode``, the share as a mean over tokens, without gradient.
    """
    terms = value_loss_terms(vpreds, returns, values, response_mask, cliprange_value)
    return (
        agg_loss(terms.loss, response_mask, loss_agg_mode),
        agg_loss(terms.clipped, response_mask, "token-mean"),
    )


def apply_kl_penalty(
    data: Data, kl_ctrl: KLController, kl_penalty: str = "kl"
) -> tuple[Data, dict[str, float]]:
    """Write ``token_level_rewards`` = scores - beta * KL into ``data``, then update the controller.

    ``data`` is a mapping or TensorDict of a whole batch with ``token_level_scores``,
    ``old_log_probs``, ``ref_log_prob``, ``response_mask``, all (B, R). It comes back with the
    metrics ``actor/reward_kl_penalty`` and ``actor/kl_coef`` (beta as it was used). The former,
    which the controller learns, is the mean KL over tokens, as in siiRL's guide; verl's code takes
    the mean of the rows' means. Raises ValueError if there is no response token.
    """
    mask, beta = data["response_mask"], kl_ctrl.value
    rewards, kl = penalise(
        data["token_level_scores"],
        data["old_log_probs"],
        data["ref_log_prob"],
        mask,
        beta=beta,
        kl_penalty=kl_penalty,
    )
    data["token_level_rewards"] = rewards
    mean_kl = float(masked_mean(kl, mask))
    kl_ctrl.update(current_kl=mean_kl, n_steps=len(mask))
    return data, {"actor/reward_kl_penalty": mean_kl, "actor/kl_coef": beta}

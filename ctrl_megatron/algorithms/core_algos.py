"""Functions of a whole batch under the names that verl and siiRL's guide use in ``core_algos``.

Each is derived from the one implementation that the trainer uses on pieces of a batch. The
advantage estimators need no other form.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import cache
from types import SimpleNamespace
from typing import Any, TypeVar

import torch

from ctrl_megatron.algorithms import covariance, policy_losses
from ctrl_megatron.algorithms.aggregation import agg_loss
from ctrl_megatron.algorithms.kl import KLController, subtract_kl_penalty
from ctrl_megatron.algorithms.masked import masked_mean, require_equal_shapes
from ctrl_megatron.algorithms.registry import (
    POLICY_LOSS_REGISTRY,
    LossScalars,
    PolicyLoss,
    PolicyLossTerms,
    registry_name,
)
from ctrl_megatron.algorithms.value_loss import value_loss_terms
from ctrl_megatron.config.options import accepted_options

Data = TypeVar("Data", bound=Any)
"""A mapping or TensorDict."""
_LOSSES = (policy_losses, covariance)
"""Modules that register losses when they are imported."""


def get_policy_loss(name: str | Enum) -> Callable[..., LossScalars]:
    """The policy loss ``name`` of a whole batch, as a function that returns four scalars.

    Its arguments are those of siiRL's guide (section 11.4): (old_log_prob, log_prob, advantages,
    response_mask, loss_agg_mode, config, rollout_is_weights). It returns (pg_loss, pg_clipfrac,
    ppo_kl, pg_clipfrac_lower): the loss by ``loss_agg_mode``, the others as means over tokens,
    without a gradient. A loss that selects tokens also accepts ``selected``, or the ``generator``
    of the draw; options of the loss are keyword arguments. The function raises ValueError for
    tensors that differ in shape, and naming a key that the loss reads if ``config`` is None.
    """
    return _whole_batch(registry_name(name), POLICY_LOSS_REGISTRY.get(name))


@cache
def _whole_batch(name: str, loss: PolicyLoss) -> Callable[..., LossScalars]:
    selection = loss.selection

    def compute(
        old_log_prob: torch.Tensor,
        log_prob: torch.Tensor,
        advantages: torch.Tensor,
        response_mask: torch.Tensor,
        loss_agg_mode: str = loss.loss_agg_mode,
        config: Any = None,
        rollout_is_weights: torch.Tensor | None = None,
        selected: torch.Tensor | None = None,
        generator: torch.Generator | None = None,
        **options: Any,
    ) -> LossScalars:
        config = _NoConfig(name) if config is None else config
        tensors = {
            "response_mask": response_mask,
            "old_log_prob": old_log_prob,
            "log_prob": log_prob,
            "advantages": advantages,
            "rollout_is_weights": rollout_is_weights,
            "selected": selected,
        }
        require_equal_shapes(**tensors)
        if selection is not None and selected is None:
            sums = covariance.log_prob_and_advantage_sums(log_prob, advantages, response_mask)
            pieces = (old_log_prob, log_prob, advantages, response_mask, config, sums)
            covariances = selection.covariances(*pieces)[response_mask.bool()]
            lots = torch.rand(len(covariances), generator=generator, dtype=torch.float64)
            picked = selection.choose(covariances, config, lots.to(covariances.device))
            tensors["selected"] = covariance.scatter_selection(picked, response_mask)
        offered = {**tensors, "config": config, "loss_agg_mode": loss_agg_mode, **options}
        terms = loss.function(**accepted_options(loss.function, offered))
        if not isinstance(terms, PolicyLossTerms):
            return terms
        return (
            agg_loss(terms.loss, response_mask, loss_agg_mode),
            agg_loss(terms.clipped, response_mask, "token-mean"),
            agg_loss(terms.approx_kl, response_mask, "token-mean"),
            agg_loss(terms.clipped_lower, response_mask, "token-mean"),
        )

    compute.__name__ = compute.__qualname__ = f"compute_policy_loss_{name}"
    compute.__doc__ = (
        f"The policy loss {name} of a whole batch: (pg_loss, pg_clipfrac, ppo_kl, "
        "pg_clipfrac_lower), scalars; docs/algorithms.md has the formula."
    )
    return compute


class _NoConfig:
    """In place of a ``config`` that was not given."""

    def __init__(self, name: str) -> None:
        self._loss = name

    def __getattr__(self, key: str) -> Any:
        raise ValueError(f"compute_policy_loss_{self._loss} needs config with {key}")


compute_policy_loss_vanilla = get_policy_loss("vanilla")
compute_policy_loss_gspo = get_policy_loss("gspo")
compute_policy_loss_cpgd = get_policy_loss("cpgd")
compute_policy_loss_gpg = get_policy_loss("gpg")
compute_policy_loss_cispo = get_policy_loss("cispo")
compute_policy_loss_geo_mean = get_policy_loss("geo_mean")
compute_policy_loss_clip_cov = get_policy_loss("clip_cov")
compute_policy_loss_kl_cov = get_policy_loss("kl_cov")


def compute_policy_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    cliprange: float,
    cliprange_low: float | None = None,
    cliprange_high: float | None = None,
    clip_ratio_c: float | None = 3.0,
    loss_agg_mode: str = "token-mean",
) -> LossScalars:
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
    rewards, kl = subtract_kl_penalty(
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

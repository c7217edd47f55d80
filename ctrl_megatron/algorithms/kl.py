"""KL(policy || reference) of tokens that the policy drew: estimators, penalty, and coefficient."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ctrl_megatron.algorithms.masked import clamp_log_ratio, require_equal_shapes, zero_outside_mask

_K3_BOUND = 10.0
_LARGEST_ERROR = 0.2


def _k2(gap: torch.Tensor) -> torch.Tensor:
    return 0.5 * gap.square()


def _k3(gap: torch.Tensor) -> torch.Tensor:
    back = clamp_log_ratio(-gap)
    return (back.exp() - back - 1).clamp(max=_K3_BOUND)


_ESTIMATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "kl": torch.positive,
    "k1": torch.positive,
    "abs": torch.abs,
    "mse": _k2,
    "k2": _k2,
    "low_var_kl": _k3,
    "k3": _k3,
}
KL_ESTIMATORS = (*_ESTIMATES, *(f"{name}+" for name in _ESTIMATES))
"""Names of the KL estimators; those with + have that value and k2's gradient."""


def kl_penalty(
    logprob: torch.Tensor,
    ref_logprob: torch.Tensor,
    kl_penalty: str,
    response_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """The estimate called ``kl_penalty``, of the tensors' common shape. With g = logp - ref:

    - ``kl``, ``k1``: g. Unbiased, may be negative.
    - ``abs``: |g|.
    - ``mse``, ``k2``: g^2 / 2. Its gradient is the KL's.
    - ``low_var_kl``, ``k3``: exp(-g) + g - 1. Unbiased, never negative. g is bounded to +-20
      and the result to 10; a token that far from the reference gets no gradient.
    - any name with ``+``: that estimate's value with the gradient of k2, which is the KL's: that of
      k1 is 0 on average, that of k3 belongs to the reverse KL. For the loss; in a reward, where no
      gradient flows, the same as without.

    With ``response_mask`` the estimate is 0 off the mask, and the values there reach neither the
    result nor the gradient. Source: J. Schulman, "Approximating KL Divergence" (2020); bounds as in
    verl. Raises ValueError for an unknown name and for shapes that differ.
    """
    if kl_penalty not in KL_ESTIMATORS:
        raise ValueError(f"unknown kl_penalty {kl_penalty!r}; known: {', '.join(KL_ESTIMATORS)}")
    require_equal_shapes(
        None, logprob=logprob, ref_logprob=ref_logprob, response_mask=response_mask
    )
    gap = logprob - ref_logprob
    if response_mask is not None:
        gap = zero_outside_mask(gap, response_mask)
    estimate = _ESTIMATES[kl_penalty.removesuffix("+")](gap)
    if not kl_penalty.endswith("+"):
        return estimate
    slope = _k2(gap)
    return slope - slope.detach() + estimate.detach()


_estimate = kl_penalty  # The name is that of an argument below.


def subtract_kl_penalty(
    token_level_scores: torch.Tensor,
    old_log_probs: torch.Tensor,
    ref_log_prob: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    beta: float,
    kl_penalty: str = "kl",
) -> tuple[torch.Tensor, torch.Tensor]:
    """(``token_level_scores`` - beta * KL, KL): both (B, R), the KL 0 off the mask.

    Inputs (B, R). Off the mask the scores stay as they are. Raises ValueError for shapes that
    differ.
    """
    require_equal_shapes(
        response_mask=response_mask,
        token_level_scores=token_level_scores,
        old_log_probs=old_log_probs,
        ref_log_prob=ref_log_prob,
    )
    kl = _estimate(old_log_probs, ref_log_prob, kl_penalty, response_mask)
    return token_level_scores - beta * kl, kl


class FixedKLController:
    """A constant coefficient; a resumed run takes it from its own configuration."""

    def __init__(self, kl_coef: float) -> None:
        self.value = _checked_coefficient("kl_coef", kl_coef)

    def update(self, current_kl: float, n_steps: int) -> None:
        """Nothing to learn."""

    def state_dict(self) -> dict[str, Any]:
        """The kind of the controller; there is nothing else to restore."""
        return {"type": "fixed"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the configured value; ValueError if another kind of controller saved ``state``."""
        _demand_kind("fixed", state)


class AdaptiveKLController:
    """Proportional control of the coefficient (Ziegler et al., arXiv 1909.08593, section 2.2).

    ``target_kl`` is a mean per token, like ``current_kl``; ``horizon`` counts sequences.
    """

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: int) -> None:
        if not (target_kl > 0 and horizon > 0):
            raise ValueError(f"target_kl={target_kl} and horizon={horizon} must be positive")
        self.value = _checked_coefficient("init_kl_coef", init_kl_coef)
        self.target, self.horizon = target_kl, horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """Scale by 1 + clip(current_kl / target - 1, -0.2, 0.2) * n_steps / horizon.

        All ranks must pass the same numbers. Raises ValueError for a KL that is not finite, which
        would destroy the coefficient, and for a horizon so short that its sign would flip.
        """
        if not math.isfinite(current_kl):
            raise ValueError(f"current_kl={current_kl} is not finite; look at the log-probs")
        error = min(max(current_kl / self.target - 1, -_LARGEST_ERROR), _LARGEST_ERROR)
        scale = 1 + error * n_steps / self.horizon
        if scale <= 0:
            raise ValueError(
                f"kl_ctrl.horizon={self.horizon} is too short for steps of {n_steps} sequences; "
                f"make it larger than {_LARGEST_ERROR * n_steps:g}"
            )
        self.value *= scale

    def state_dict(self) -> dict[str, Any]:
        """Kind and coefficient; target and horizon come from the configuration."""
        return {"type": "adaptive", "value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict``; ValueError if another kind of controller saved it."""
        _demand_kind("adaptive", state)
        self.value = _checked_coefficient("the saved KL coefficient", float(state["value"]))


KLController = FixedKLController | AdaptiveKLController


def get_kl_controller(
    type: str, kl_coef: float, target_kl: float | None = None, horizon: int | None = None
) -> KLController:
    """The controller of a configuration's ``kl_ctrl`` group; ``type`` is ``fixed`` or ``adaptive``.

    Raises ValueError for another type, and for ``adaptive`` without target or horizon.
    """
    if type == "fixed":
        return FixedKLController(kl_coef)
    if type != "adaptive":
        raise ValueError(f"unknown kl_ctrl.type {type!r}; known: fixed, adaptive")
    if target_kl is None or horizon is None:
        raise ValueError("kl_ctrl.type=adaptive needs kl_ctrl.target_kl and kl_ctrl.horizon")
    return AdaptiveKLController(kl_coef, target_kl, horizon)


def _checked_coefficient(name: str, value: float) -> float:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} must be a finite number of at least 0, got {value}")
    return value


def _demand_kind(kind: str, state: dict[str, Any]) -> None:
    if state.get("type") != kind:
        raise ValueError(
            f"the checkpoint holds a {state.get('type')!r} KL controller, the configuration asks "
            f"for {kind!r}; resume with the same kl_ctrl.type"
        )

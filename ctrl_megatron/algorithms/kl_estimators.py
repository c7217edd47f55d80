"""Per-token estimates of KL(policy || reference) from tokens that the policy drew."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ctrl_megatron.algorithms.masked import masked
from ctrl_megatron.algorithms.shapes import check_shapes

# Beyond exp(20) nothing is learnt, and inf * 0 in the backward pass would be NaN.
_LOG_RATIO_BOUND = 20.0
_K3_BOUND = 10.0

Estimate = Callable[[torch.Tensor], torch.Tensor]


def _k3(gap: torch.Tensor) -> torch.Tensor:
    back = (-gap).clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND)
    return (back.exp() - back - 1).clamp(max=_K3_BOUND)


def _k2(gap: torch.Tensor) -> torch.Tensor:
    return 0.5 * gap.square()


def _k1(gap: torch.Tensor) -> torch.Tensor:
    return gap


def _with_gradient_of_k2(estimate: Estimate) -> Estimate:
    def straight_through(gap: torch.Tensor) -> torch.Tensor:
        slope = _k2(gap)
        return slope - slope.detach() + estimate(gap).detach()

    return straight_through


_PLAIN: dict[str, Estimate] = {
    "kl": _k1,
    "k1": _k1,
    "abs": torch.abs,
    "mse": _k2,
    "k2": _k2,
    "low_var_kl": _k3,
    "k3": _k3,
}
KL_ESTIMATORS: dict[str, Estimate] = {
    **_PLAIN,
    **{f"{name}+": _with_gradient_of_k2(estimate) for name, estimate in _PLAIN.items()},
}
"""Name -> function of log p - log q."""


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

    With ``response_mask`` the estimate is 0 off the mask, and what stands there reaches neither the
    value nor the gradient. Source: J. Schulman, "Approximating KL Divergence" (2020); bounds as in
    verl. Raises ValueError for an unknown name and for shapes that differ.
    """
    if kl_penalty not in KL_ESTIMATORS:
        raise ValueError(f"unknown kl_penalty {kl_penalty!r}; known: {', '.join(KL_ESTIMATORS)}")
    check_shapes(None, logprob=logprob, ref_logprob=ref_logprob, response_mask=response_mask)
    gap = logprob - ref_logprob
    if response_mask is not None:
        gap = masked(gap, response_mask)
    return KL_ESTIMATORS[kl_penalty](gap)

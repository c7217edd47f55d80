"""KL(policy || reference) of tokens that the policy drew: its estimates, and as a reward."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ctrl_megatron.algorithms.masked import check_shapes, masked

# Beyond exp(20) nothing is learnt, and inf * 0 in the backward pass would be NaN.
_LOG_RATIO_BOUND = 20.0
_K3_BOUND = 10.0


def _k1(gap: torch.Tensor) -> torch.Tensor:
    return gap


def _k2(gap: torch.Tensor) -> torch.Tensor:
    return 0.5 * gap.square()


def _k3(gap: torch.Tensor) -> torch.Tensor:
    back = (-gap).clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND)
    return (back.exp() - back - 1).clamp(max=_K3_BOUND)


_ESTIMATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "kl": _k1,
    "k1": _k1,
    "abs": torch.abs,
    "mse": _k2,
    "k2": _k2,
    "low_var_kl": _k3,
    "k3": _k3,
}
KL_ESTIMATORS = (*_ESTIMATES, *(f"{name}+" for name in _ESTIMATES))


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
    estimate = _ESTIMATES[kl_penalty.removesuffix("+")](gap)
    if not kl_penalty.endswith("+"):
        return estimate
    slope = _k2(gap)
    return slope - slope.detach() + estimate.detach()


_estimate = kl_penalty  # The name is that of an argument below.


def penalise(
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
    check_shapes(
        response_mask=response_mask,
        token_level_scores=token_level_scores,
        old_log_probs=old_log_probs,
        ref_log_prob=ref_log_prob,
    )
    kl = _estimate(old_log_probs, ref_log_prob, kl_penalty, response_mask)
    return token_level_scores - beta * kl, kl

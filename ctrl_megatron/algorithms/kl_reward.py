"""The KL to the reference as a part of the token rewards."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

import torch

from ctrl_megatron.algorithms.kl_controllers import KLController
from ctrl_megatron.algorithms.kl_estimators import kl_penalty as estimate_kl
from ctrl_megatron.algorithms.masked import masked_mean
from ctrl_megatron.algorithms.shapes import check_shapes


class Fields(Protocol):
    """A mapping or TensorDict."""

    def __getitem__(self, name: str, /) -> Any: ...
    def __setitem__(self, name: str, value: Any, /) -> None: ...


Data = TypeVar("Data", bound=Fields)


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
    kl = estimate_kl(old_log_probs, ref_log_prob, kl_penalty, response_mask)
    return token_level_scores - beta * kl, kl


def apply_kl_penalty(
    data: Data,
    kl_ctrl: KLController,
    kl_penalty: str = "kl",
    *,
    current_kl: float | None = None,
    n_steps: int | None = None,
) -> tuple[Data, dict[str, float]]:
    """Write ``token_level_rewards`` = scores - beta * KL into ``data``, then update the controller.

    ``data`` is a mapping or TensorDict with ``token_level_scores``, ``old_log_probs``,
    ``ref_log_prob``, ``response_mask``, all (B, R). It comes back with the metrics
    ``actor/reward_kl_penalty`` (mean KL per token) and ``actor/kl_coef`` (beta as it was used).

    The controller must learn the same on every rank. Where ``data`` is one data-parallel rank's
    rows, give the global batch's mean KL and number of sequences as ``current_kl`` and ``n_steps``;
    without them ``data`` is the whole batch. Raises ValueError if only one of them is given, or if
    there is no response token to take the mean of.
    """
    if (current_kl is None) != (n_steps is None):
        raise ValueError("give current_kl and n_steps together: both speak of the global batch")
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
    mean_kl = float(masked_mean(kl, mask)) if current_kl is None else current_kl
    kl_ctrl.update(current_kl=mean_kl, n_steps=len(mask) if n_steps is None else n_steps)
    return data, {"actor/reward_kl_penalty": mean_kl, "actor/kl_coef": beta}

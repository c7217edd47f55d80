"""Aggregation of per-token losses to one number."""

from __future__ import annotations

import torch

from ctrl_megatron.algorithms.masked import require_equal_shapes, zero_outside_mask

LOSS_AGG_MODES = (
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)
"""The aggregations of per-token losses."""

Count = float | torch.Tensor


def agg_loss(
    loss_mat: torch.Tensor,
    loss_mask: torch.Tensor,
    loss_agg_mode: str,
    *,
    batch_num_tokens: Count | None = None,
    global_batch_size: Count | None = None,
    loss_scale_factor: Count | None = None,
) -> torch.Tensor:
    """Scalar of a (B, R) per-token loss. With T_i tokens in row i and N rows that have any token:

    - ``token-mean``: sum of all tokens / sum of T_i. Long sequences weigh more (DAPO, 2503.14476).
    - ``seq-mean-token-sum``: sum of all tokens / N.
    - ``seq-mean-token-mean``: sum over rows of (row sum / T_i) / N. Every sequence weighs the same
      (GRPO, 2402.03300).
    - ``seq-mean-token-sum-norm``: sum of all tokens / N / ``loss_scale_factor``, a constant that
      defaults to R (Dr.GRPO, 2503.20783). Give the response limit where R varies between batches.

    A row without tokens is not a sequence: it adds nothing and is not counted. A mask without any
    token gives 0, the loss of nothing.

    Without denominators the tensor's own counts are used. For a piece of a batch (micro-batch,
    data-parallel rank) pass the whole batch's ``batch_num_tokens`` (sum of T_i) and
    ``global_batch_size`` (N): the pieces' results then add up to the whole batch's.

    Raises ValueError for an unknown mode, for shapes that differ, and where the caller gives one
    global denominator but not the one that the mode divides by.
    """
    if loss_agg_mode not in LOSS_AGG_MODES:
        raise ValueError(
            f"unknown loss_agg_mode {loss_agg_mode!r}; known: {', '.join(LOSS_AGG_MODES)}"
        )
    require_equal_shapes(loss_mask=loss_mask, loss_mat=loss_mat)
    losses = zero_outside_mask(loss_mat, loss_mask)
    tokens = loss_mask.bool().sum(dim=-1)
    if loss_agg_mode == "token-mean":
        _demand("batch_num_tokens", batch_num_tokens, global_batch_size, loss_agg_mode)
        return losses.sum() / _either(batch_num_tokens, tokens.sum())
    _demand("global_batch_size", global_batch_size, batch_num_tokens, loss_agg_mode)
    rows = losses.sum(dim=-1)
    if loss_agg_mode == "seq-mean-token-mean":
        rows = rows / tokens.clamp(min=1)
    elif loss_agg_mode == "seq-mean-token-sum-norm":
        rows = rows / (loss_mat.shape[-1] if loss_scale_factor is None else loss_scale_factor)
    return rows.sum() / _either(global_batch_size, (tokens > 0).sum())


def _either(given: Count | None, own: torch.Tensor) -> Count:
    return own.clamp(min=1) if given is None else given


def _demand(name: str, needed: Count | None, other: Count | None, mode: str) -> None:
    if needed is None and other is not None:
        raise ValueError(
            f"loss_agg_mode {mode!r} divides by {name}, which is missing although the other "
            "global denominator is given; pass both"
        )

"""Advantages scaled to mean 0 and variance 1 over all tokens of the batch."""

from __future__ import annotations

import torch

from ctrl_megatron.algorithms.advantages.registry import BatchScale
from ctrl_megatron.algorithms.masked import moment_sums, moments, whiten_with


def _sums(
    advantages: torch.Tensor, *, response_mask: torch.Tensor, **_others: object
) -> torch.Tensor:
    return moment_sums(advantages, response_mask)


def _apply(
    advantages: torch.Tensor,
    sums: torch.Tensor,
    *,
    response_mask: torch.Tensor,
    **_others: object,
) -> torch.Tensor:
    return whiten_with(advantages, response_mask, *moments(sums))


WHITENING = BatchScale(sums=_sums, apply=_apply, whitens=True)
"""``moment_sums``, then ``whiten_with`` their ``moments``."""


def whitened(advantages: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """A whole batch by its own moments; ValueError if the mask selects fewer than two tokens."""
    return whiten_with(advantages, response_mask, *moments(moment_sums(advantages, response_mask)))

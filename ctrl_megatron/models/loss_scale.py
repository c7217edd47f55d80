"""The denominators of every loss.

A loss is a sum over all tokens or sequences of the global mini-batch divided by one global count.
Every piece (micro-batch, data-parallel rank) divides its own sum by the *global* count, and pieces
are added. Megatron itself does not divide (``calculate_per_token_loss``, finalise without a token
count), so the result depends on neither micro-batches nor the parallel layout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ctrl_megatron.parallel.groups import ProcessGroups


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalCounts:
    """Denominators of a global mini-batch."""

    tokens: int
    """Response tokens that take part in the loss."""
    sequences: int
    """Rows with at least one such token."""


def global_counts(response_mask: torch.Tensor, groups: ProcessGroups) -> GlobalCounts:
    """Counts of ``response_mask`` (B, R) summed over the data-parallel ranks.

    Raises ValueError if no token takes part: the mean would be 0 / 0.
    """
    per_row = response_mask.bool().sum(dim=1)
    local = torch.stack([per_row.sum(), (per_row > 0).sum()])
    tokens, sequences = (int(x) for x in groups.sum_over_data(local))
    if tokens == 0:
        raise ValueError("no response token takes part in the loss; every row is masked out")
    return GlobalCounts(tokens=tokens, sequences=sequences)

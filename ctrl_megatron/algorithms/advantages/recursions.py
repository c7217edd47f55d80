"""Recursions along the tokens of a row, from the last to the first, over all rows at once.

They run in float64, whatever the inputs are: an error of one token would go on to all before it.
Tokens that the mask leaves out, also in the middle of a row, are passed over.
"""

from __future__ import annotations

import torch

from ctrl_megatron.algorithms.masked import masked


def discounted_sums(values: torch.Tensor, mask: torch.Tensor, discount: float) -> torch.Tensor:
    """S_t = x_t + ``discount`` * S of the row's next valid token, 0 after the last.

    ``values`` x and ``mask`` (B, R); gives (B, R) float64, 0 off the mask.
    """
    # Time first: a step reads contiguous memory.
    sums = masked(values, mask).double().t().contiguous()
    factors = torch.ones_like(sums).masked_fill_(mask.bool().t(), discount)
    for t in reversed(range(len(sums) - 1)):
        sums[t].addcmul_(factors[t], sums[t + 1])
    return masked(sums.t(), mask)


def next_values(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(B, R) float64: at t the value of the row's next valid token after t, 0 after the last."""
    on, own = mask.bool().t().contiguous(), masked(values, mask).double().t().contiguous()
    found = torch.zeros_like(own)
    for t in reversed(range(len(own) - 1)):
        found[t] = torch.where(on[t + 1], own[t + 1], found[t + 1])
    return found.t()

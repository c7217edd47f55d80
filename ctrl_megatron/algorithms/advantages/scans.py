"""Recursions along the tokens of a row, from the last to the first, over all rows at once.

Time is the leading dimension inside, so that a step reads contiguous memory.
"""

from __future__ import annotations

import torch

from ctrl_megatron.algorithms.masked import masked


def discounted_sums(values: torch.Tensor, mask: torch.Tensor, discount: float) -> torch.Tensor:
    """S_t = x_t + ``discount`` * S of the row's next valid token, 0 after the last; (B, R).

    Masked tokens are passed over, also in the middle of a row, and hold 0 in the result.
    """
    sums = masked(values, mask).t().contiguous()
    on = mask.bool().t()
    factors = torch.ones_like(sums).masked_fill_(on, discount).unbind()
    steps = sums.unbind()
    for t in reversed(range(len(steps) - 1)):
        steps[t].addcmul_(factors[t], steps[t + 1])
    return masked(sums.t().contiguous(), mask)


def next_values(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The value of the row's next valid token, 0 after the last; (B, R), also at masked places."""
    own, on = masked(values, mask).t().contiguous(), mask.bool().t().contiguous()
    after = torch.zeros_like(own)
    values_at, valid_at, steps = own.unbind(), on.unbind(), after.unbind()
    for t in reversed(range(len(steps) - 1)):
        torch.where(valid_at[t + 1], values_at[t + 1], steps[t + 1], out=steps[t])
    return after.t().contiguous()

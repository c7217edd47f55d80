"""Recursions along the tokens of a row, from the last to the first, over all rows at once.

They run in float64, whatever the inputs are: an error of one token would go on to all before it.
Columns come in blocks that stay in a CPU's cache, so that the wider numbers cost little. Time is
the leading dimension of a block: a step reads contiguous memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ctrl_megatron.algorithms.advantages.outcome import floating
from ctrl_megatron.algorithms.masked import masked_copy
from ctrl_megatron.algorithms.shapes import check_shapes

# Numbers per block of columns, and the columns that it has at least.
_BLOCK = 2**18
_FEWEST = 16


class Columns(NamedTuple):
    """n neighbouring columns of (B, R) tensors."""

    place: slice
    """Where they stand in a row."""
    on: torch.Tensor
    """(B, n) bool: the mask."""
    values: list[torch.Tensor]
    """(n, B) float64 each, contiguous, 0 where the mask is off."""


def columns_from_the_end(mask: torch.Tensor, *values: torch.Tensor) -> Iterator[Columns]:
    """Blocks of the columns of ``mask`` and ``values``, (B, R) each, the last ones first."""
    on, values = mask.bool(), tuple(floating(x) for x in values)
    step = max(_FEWEST, _BLOCK // max(1, len(on)))
    for end in range(on.shape[-1], 0, -step):
        place = slice(max(0, end - step), end)
        part = on[:, place]
        wide = [masked_copy(x[:, place], part).double().t().contiguous() for x in values]
        yield Columns(place, part, wide)


def discount_(sums: torch.Tensor, on: torch.Tensor, after: torch.Tensor, discount: float) -> None:
    """In place, S_t = x_t + ``discount`` * S_{t+1}, or S_{t+1} where the mask is off.

    ``sums`` (n, B) holds x, 0 off the mask; ``on`` (B, n); ``after`` (B,) is S behind the block.
    """
    factors = torch.ones_like(sums).masked_fill_(on.t(), discount).unbind()
    steps = (*sums.unbind(), after)
    for t in reversed(range(len(factors))):
        steps[t].addcmul_(factors[t], steps[t + 1])


def nearest_values(values: torch.Tensor, on: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """(n + 1, B): in line t the value of the row's first valid token from t on.

    ``values`` (n, B); ``on`` (B, n); ``after`` (B,) is that of the line behind the block.
    """
    found = torch.cat([torch.empty_like(values), after.unsqueeze(0)])
    valid_at, values_at, lines = on.t().contiguous().unbind(), values.unbind(), found.unbind()
    for t in reversed(range(len(values_at))):
        torch.where(valid_at[t], values_at[t], lines[t + 1], out=lines[t])
    return found


def put(out: torch.Tensor, columns: Columns, values: torch.Tensor) -> None:
    """Write the (n, B) ``values`` to their place in (B, R) ``out``, 0 where the mask is off."""
    out[:, columns.place] = masked_copy(values.t().contiguous().to(out.dtype), columns.on)


def discounted_sums(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    discount: float,
    baselines: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(S - ``baselines``, S): (B, R) each in the floating dtype of the rewards, 0 off the mask.

    S_t = r_t + ``discount`` * S of the row's next valid token, 0 after the last. Masked tokens are
    passed over, also in the middle of a row. ``baselines`` (B,); without them the same tensor
    twice. No gradient. Raises ValueError for shapes that differ.
    """
    check_shapes(response_mask=response_mask, token_level_rewards=token_level_rewards)
    sums = torch.empty_like(floating(token_level_rewards))
    less = sums if baselines is None else torch.empty_like(sums)
    after = sums.new_zeros(len(sums), dtype=torch.float64)
    for columns in columns_from_the_end(response_mask, token_level_rewards):
        (block,) = columns.values
        discount_(block, columns.on, after, discount)
        after = block[0]
        put(sums, columns, block)
        if baselines is not None:
            put(less, columns, block - baselines.double())
    return less, sums

"""Weights in 8 bits with one scale for each block, as DeepSeek-V3 and others are published.

Beside a weight ``NAME`` in float8_e4m3fn its file has ``NAME_scale_inv``, float32, with one factor
for each block of rows and columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ctrl_megatron.errors import UserError

SCALES = "_scale_inv"
"""What the name of a weight's scales has after the weight's name."""

Block = tuple[int, int]
"""Rows and columns of a weight that have one scale."""


def weight_block(config: Mapping[str, Any], where: str) -> Block | None:
    """The blocks of a ``config.json`` mapping's weights; None if they are not quantised.

    Raises UserError for another quantisation.
    """
    given = config.get("quantization_config")
    if given is None:
        return None
    block = given.get("weight_block_size") if isinstance(given, dict) else None
    known = isinstance(given, dict) and given.get("quant_method") == "fp8"
    sizes = [size for size in block or () if isinstance(size, int) and size > 0]
    if not known or given.get("fmt", "e4m3") != "e4m3" or len(sizes) != 2:
        raise UserError(
            f"{where}: quantization_config={given!r} is not supported, only quant_method 'fp8' "
            "with fmt 'e4m3' and the two numbers of weight_block_size"
        )
    return sizes[0], sizes[1]


def dequantised(
    weight: torch.Tensor, scales: torch.Tensor, start: tuple[int, int], block: Block
) -> torch.Tensor:
    """The float32 values of a rectangle (rows, columns) of a weight that begins at ``start``;
    ``scales`` are those of the whole weight."""
    rows, columns = (
        torch.arange(begin, begin + count) // size
        for begin, count, size in zip(start, weight.shape, block, strict=True)
    )
    return weight.float().mul_(scales[rows][:, columns])

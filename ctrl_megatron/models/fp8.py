"""Weights in 8 bits with one scale for each block, as DeepSeek-V3 and others are published.

Beside a weight ``NAME`` in float8_e4m3fn its file has ``NAME_scale_inv``, float32, with one factor
for each block of rows and columns. ``dequantise`` reads this form, ``quantise`` writes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from ctrl_megatron.errors import UserError
from ctrl_megatron.models.shape import Dense, Experts, GroupedQueryAttention, ModelShape
from ctrl_megatron.types import TensorSpec

SCALES = "_scale_inv"
"""The suffix that makes a weight's name the name of its scales."""

Block = tuple[int, int]
"""Rows and columns of a weight that have one scale."""

BLOCK: Block = (128, 128)
"""The blocks of what is written."""
FP8 = "float8_e4m3fn"
"""The type of a quantised weight."""
_LARGEST = torch.finfo(torch.float8_e4m3fn).max


def parse_weight_block_size(config: Mapping[str, Any], where: str) -> Block | None:
    """The blocks of a ``config.json`` mapping's weights; None if they are not quantised.

    Raises UserError for another quantisation.
    """
    entry = config.get("quantization_config")
    if entry is None:
        return None
    block = entry.get("weight_block_size") if isinstance(entry, dict) else None
    known = isinstance(entry, dict) and entry.get("quant_method") == "fp8"
    sizes = [size for size in block or () if isinstance(size, int) and size > 0]
    if not known or entry.get("fmt", "e4m3") != "e4m3" or len(sizes) != 2:
        raise UserError(
            f"{where}: quantization_config={entry!r} is not supported, only quant_method 'fp8' "
            "with fmt 'e4m3' and the two numbers of weight_block_size"
        )
    return sizes[0], sizes[1]


def dequantise(
    weight: torch.Tensor, scales: torch.Tensor, start: tuple[int, int], block: Block
) -> torch.Tensor:
    """The float32 values of a rectangle (rows, columns) of a weight in 8 bits that begins at
    ``start``; ``scales`` (a number for each block) are those of the whole weight."""
    return weight.float().mul_(_of_elements(scales, start, weight.shape, block))


def _of_elements(
    scales: torch.Tensor, start: tuple[int, ...], extent: Iterable[int], block: Block
) -> torch.Tensor:
    """The scale of every element of a rectangle that begins at ``start``."""
    rows, columns = (
        torch.arange(begin, begin + count, device=scales.device) // size
        for begin, count, size in zip(start, extent, block, strict=True)
    )
    return scales[rows][:, columns]


def quantization_config() -> dict[str, Any]:
    """``quantization_config`` of a ``config.json`` beside weights that ``quantise`` has made."""
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(BLOCK),
    }


def misaligned_part_widths(
    shape: ModelShape, workers: int, *, whole_experts: bool
) -> dict[str, int]:
    """Part of a layer -> its width on each of an engine's tensor ``workers``, of the parts that end
    within a block. ``whole_experts``: each worker has some experts whole.

    vLLM 0.32 refuses them (``fp8_utils.validate_fp8_block_shape``): it joins queries, keys and
    values in one weight, gate and up projection in another, and only a joined weight's last part
    may end anywhere, where there is one worker.
    """
    widths: dict[str, int] = {}
    if isinstance(attention := shape.attention, GroupedQueryAttention):
        keys = attention.head_dim * max(1, attention.groups // workers)
        widths |= {"queries": attention.heads * attention.head_dim // workers, "keys": keys}
    if (delta := shape.delta_net) is not None:
        widths["delta nets' keys"] = delta.key_width // workers
        widths["delta nets' values"] = delta.value_width // workers
    for kind in shape.layers_by_kind:
        match kind:
            case Dense():
                widths["feed-forward layers"] = kind.width // workers
            case Experts():
                widths["experts"] = kind.expert_width // (1 if whole_experts else workers)
                widths["shared experts"] = kind.shared_width // workers
    return {part: width for part, width in widths.items() if width % BLOCK[0]}


def quantised_specs(specs: Iterable[TensorSpec]) -> Iterator[TensorSpec]:
    """``specs`` with the linear layers' weights in 8 bits, each followed by its scales. Embeddings,
    head, norms, biases and routers stay as they are, as in what DeepSeek publishes."""
    for spec in specs:
        linear = ".layers." in spec.name and spec.name.endswith(".weight") and len(spec.shape) == 2
        if not linear or spec.name.endswith(".gate.weight"):
            yield spec
            continue
        blocks = tuple(-(-size // of) for size, of in zip(spec.shape, BLOCK, strict=True))
        yield replace(spec, dtype=FP8)
        yield TensorSpec(name=spec.name + SCALES, dtype="float32", shape=blocks)


def block_maxima(weight: torch.Tensor, start: tuple[int, ...]) -> torch.Tensor:
    """The largest magnitude of each block that a rectangle of a weight touches, float32; the
    rectangle begins at ``start`` of the weight, and the result at block ``start // BLOCK``."""
    top, left = (begin % size for begin, size in zip(start, BLOCK, strict=True))
    height, width = weight.shape
    bottom, right = -(top + height) % BLOCK[0], -(left + width) % BLOCK[1]
    padded = torch.nn.functional.pad(weight.abs(), (left, right, top, bottom))
    blocks = padded.unflatten(1, (-1, BLOCK[1])).unflatten(0, (-1, BLOCK[0]))
    return blocks.amax(dim=(1, 3)).float()


def update_block_maxima(largest: torch.Tensor, part: torch.Tensor, start: tuple[int, ...]) -> None:
    """Raise ``largest`` of a whole weight, in place, to ``part``, the ``block_maxima`` of its
    rectangle that begins at ``start``."""
    row, column = (begin // size for begin, size in zip(start, BLOCK, strict=True))
    blocks = largest[row : row + part.shape[0], column : column + part.shape[1]]
    torch.maximum(blocks, part, out=blocks)


def block_scales(largest: torch.Tensor) -> torch.Tensor:
    """float32 scales of blocks whose largest magnitudes are ``largest``, of the same shape: with
    them these become the largest number that 8 bits can hold. A block of zeros has scale 1."""
    return torch.where(largest > 0, largest / _LARGEST, 1.0)


def quantise(weight: torch.Tensor, scales: torch.Tensor, start: tuple[int, ...]) -> torch.Tensor:
    """A rectangle of a weight that begins at ``start``, as float8_e4m3fn of the same shape;
    ``scales`` (a number for each block) are those of the whole weight."""
    divided = weight.float() / _of_elements(scales, start, weight.shape, BLOCK)
    return divided.clamp_(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)

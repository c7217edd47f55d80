"""Memory of the passes of a model of transformers, in bytes, on one rank. Pure."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from ctrl_megatron.memory.activations import PassShape, logits_workspace
from ctrl_megatron.memory.model_state import DTYPE_SIZE
from ctrl_megatron.models.shape import TransformersShape

if TYPE_CHECKING:
    from ctrl_megatron.models.kept_by_modules import ActivationBytes


def fsdp_update_activations_and_workspace(
    p: PassShape, shape: TransformersShape
) -> tuple[int, int]:
    """(activations kept, workspace) in bytes at the peak of an update.

    A pass has the weights outside layers and two layers gathered in the model's type; a layer's
    gradients, or those outside layers, are whole in that type and in float32 before ranks sum them.
    """
    found = _kept(p, shape)
    block = 0.0
    kept = found.layers
    if p.recompute_granularity == "full":
        kept, block = shape.num_layers * p.residual_bytes_per_token, found.layer
    summed = (p.dtype_size + 4) * max(_elements(shape))
    head = logits_workspace(p, backward=True)
    workspace = _gathered(p, shape) + max(summed, int(head))
    return int(p.tokens * (kept + block + found.outside)), int(workspace)


def fsdp_inference_bytes(p: PassShape, shape: TransformersShape) -> int:
    """Bytes of a pass without gradients at its peak; a layer has no more at once than it would
    keep."""
    found = _kept(p, shape)
    head = logits_workspace(p, backward=False)
    return int(_gathered(p, shape) + max(p.tokens * found.layer, head))


def _gathered(p: PassShape, shape: TransformersShape) -> int:
    """Bytes of the weights that a pass has whole: those outside layers and of two layers."""
    inside, outside = _elements(shape)
    return p.dtype_size * (outside + 2 * inside)


def _kept(p: PassShape, shape: TransformersShape) -> ActivationBytes:
    # Other strategies need no modules.
    from ctrl_megatron.models.kept_by_modules import count_activation_bytes

    return count_activation_bytes(shape, _name(p.dtype_size))


def _name(dtype_size: int) -> str:
    return next(name for name, size in DTYPE_SIZE.items() if size == dtype_size)


def _elements(shape: TransformersShape) -> tuple[int, int]:
    """(elements of the largest layer, elements outside layers)."""
    sizes: dict[int | None, int] = {}
    for layer, tensor in shape.tensors:
        sizes[layer] = sizes.get(layer, 0) + prod(tensor.shape)
    outside = sizes.pop(None, 0)
    return max(sizes.values()), outside

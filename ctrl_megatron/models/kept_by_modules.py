"""The activations that a model of transformers keeps, counted on its modules without memory.

The modules run on the meta device, and what autograd would keep for the backward pass is counted
layer by layer; attention keeps queries, keys, values and its result, as the package's own does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from ctrl_megatron.errors import UserError
from ctrl_megatron.models.build import DTYPES
from ctrl_megatron.models.shape import TransformersShape
from ctrl_megatron.models.transformers_model import empty_model, register_attention

_COUNTED, _TOKENS = "ctrl_counted", 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationBytes:
    """Bytes per token that a forward pass keeps."""

    layers: float
    """In all layers together."""
    layer: float
    """In the layer that keeps most."""
    outside: float
    """Outside layers, without the output layer."""


class _Attended(torch.autograd.Function):
    """Keeps what attention keeps."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        heads, tokens = query.shape[1:3]
        found = value.new_empty(1, tokens, heads, value.shape[-1])
        ctx.save_for_backward(query, key, value, found, query.new_empty(heads, tokens, 1).float())
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError("only what is kept is counted")


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    return _Attended.apply(query, key, value), None  # type: ignore[return-value]


register_attention(_COUNTED, _attention)


@lru_cache(maxsize=8)
def count_activation_bytes(shape: TransformersShape, dtype: str) -> ActivationBytes:
    """Bytes of activations that a pass of the model in ``dtype`` keeps, without recomputation.

    UserError for a model whose passes depend on the numbers in its tensors.
    """
    model, blocks = empty_model(shape.config, DTYPES[dtype], buffers=False)
    model.config._attn_implementation = _COUNTED
    for module in model.modules():
        _forget_lengths(module)
    own = {weight.untyped_storage()._cdata for weight in model.parameters()}
    kept, current, seen = dict[int, int](), [-1], list[torch.Tensor]()

    def count(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            own.add(storage._cdata)
            seen.append(tensor)  # so that no other gets its address
            kept[current[0]] = kept.get(current[0], 0) + storage.nbytes()
        return tensor

    for number, block in enumerate(blocks):
        block.register_forward_pre_hook(lambda *_, number=number: current.__setitem__(0, number))
        block.register_forward_hook(lambda *_: current.__setitem__(0, -1))
    tokens = torch.zeros(1, _TOKENS, dtype=torch.int64, device="meta")
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor), _said(shape):
        # With a mask of its own no model looks for the ends of sequences in the numbers.
        mask = torch.zeros(1, 1, _TOKENS, _TOKENS, device="meta")
        model.base_model(tokens, attention_mask=mask, position_ids=tokens, use_cache=False)
    of_layers = [kept.get(number, 0) / _TOKENS for number in range(len(blocks))]
    return ActivationBytes(
        layers=sum(of_layers), layer=max(of_layers), outside=kept.get(-1, 0) / _TOKENS
    )


def _forget_lengths(module: torch.nn.Module) -> None:
    """Let a rotary embedding whose frequencies depend on the numbers in positions keep those that
    it has, which are as large."""
    kind: Any = getattr(module, "rope_type", None)
    if isinstance(kind, str):
        module.rope_type = "default"  # type: ignore[assignment]
    elif isinstance(kind, dict):
        module.rope_type = dict.fromkeys(kind, "default")  # type: ignore[assignment]


@contextmanager
def _said(shape: TransformersShape) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        raise UserError(
            f"the memory of a {shape.family!r} model cannot be counted without weights: {error}",
            key="actor_rollout_ref.actor.strategy=fsdp",
            remedy="try the run itself with small token budgets",
        ) from error

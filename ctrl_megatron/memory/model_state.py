"""Bytes of a model's parameters, gradients, master weights and moments on one rank. Pure.

Counts come from the shard tables that build the models (``models.shards.shard_params``), sizes of
buffers from how Megatron-Core 0.16 pads them (``_ParamAndGradBuffer``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ctrl_megatron.models.rules import rules
from ctrl_megatron.models.shape import ModelShape
from ctrl_megatron.models.shards import shard_params
from ctrl_megatron.parallel.layout import Layout

DTYPE_SIZE = {"bfloat16": 2, "float32": 4}
_PARAM_ALIGNMENT, _BUCKET_ALIGNMENT = 64, 128
"""Elements to which Megatron's distributed optimizer aligns parameters and ends of buckets."""
_VLLM_VOCAB_ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelState:
    """Bytes of one model on one rank."""

    parameters: int
    gradients: int = 0
    master: int = 0
    """float32 copies of bfloat16 parameters."""
    moments: int = 0

    @property
    def optimizer(self) -> int:
        """Bytes of the optimizer: master weights and moments."""
        return self.master + self.moments


@lru_cache(maxsize=256)
def stage_elements(shape: ModelShape, layout: Layout, *, pp: int) -> tuple[tuple[int, ...], ...]:
    """Elements of every parameter of a stage, by virtual stage; equal on all tensor ranks."""
    return tuple(
        tuple(
            math.prod(param.shape)
            for param in shard_params(shape, layout, layout.first_of(pp), chunk=c)
            if not param.buffer
        )
        for c in range(layout.virtual_pipeline)
    )


def frozen_state(shape: ModelShape, layout: Layout, *, pp: int, dtype: str) -> ModelState:
    """A model that is not trained, on a rank of stage ``pp``."""
    elements = sum(sum(chunk) for chunk in stage_elements(shape, layout, pp=pp))
    return ModelState(parameters=elements * DTYPE_SIZE[dtype])


def trained_state(
    shape: ModelShape, layout: Layout, *, pp: int, dtype: str, distributed: bool
) -> ModelState:
    """A trained model on the fullest data-parallel rank of stage ``pp``.

    Gradients are float32, Adam has two float32 moments. With the ``distributed`` optimizer master
    weights and moments are split over the data-parallel ranks.
    """
    size = DTYPE_SIZE[dtype]
    chunks = stage_elements(shape, layout, pp=pp)
    if not distributed:
        elements = sum(map(sum, chunks))
        master = 0 if dtype == "float32" else 4 * elements
        return ModelState(
            parameters=size * elements,
            gradients=4 * elements,
            master=master,
            moments=8 * elements,
        )
    buffers = 0
    for chunk, sizes in enumerate(chunks):
        buckets = [sizes]
        if shape.tied_embeddings and layout.pipeline > 1:
            # The shared embedding has a separate bucket on the ranks that have it.
            if layout.is_first(pp=pp, chunk=chunk):
                buckets = [sizes[:1], sizes[1:]]
            elif layout.is_last(pp=pp, chunk=chunk):
                buckets = [sizes[:-1], sizes[-1:]]
        buffers += sum(_padded_bucket(bucket, layout.data) for bucket in buckets)
    own = buffers // layout.data
    return ModelState(
        parameters=size * buffers,
        gradients=4 * buffers,
        master=0 if dtype == "float32" else 4 * own,
        moments=8 * own,
    )


def _padded_bucket(sizes: Sequence[int], data: int) -> int:
    aligned = sum(_up(size, _PARAM_ALIGNMENT) for size in sizes)
    return _up(aligned, math.lcm(data, _BUCKET_ALIGNMENT))


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def largest_in_layer(shape: ModelShape, layout: Layout) -> int:
    """Elements of the largest parameter of a layer."""
    params = shard_params(shape, layout, layout.first_of(0), chunk=0)
    return max(math.prod(param.shape) for param in params if ".layers." in param.name)


def engine_weight_bytes(shape: ModelShape, *, tensor: int, dtype: str) -> int:
    """Weights of one of vLLM's ``tensor`` workers, in bytes: matrices are split, norms are not,
    keys and values at most over their heads, and the vocabulary is padded."""
    total = 0
    for rule in rules(shape):
        if rule.part == "output" and shape.tied_embeddings:
            continue
        for position, (rows, *tail) in enumerate(whole.shape for whole in rule.hf):
            parts = 1 if rule.kind == "replicated" else tensor
            if rule.kind == "vocab":
                rows = _up(_up(rows, _VLLM_VOCAB_ALIGNMENT), tensor)
            if rule.kind == "qkv" and position > 0:
                parts = min(tensor, shape.attention.groups)
            total += len(rule.layers) * rule.experts * (math.prod((rows, *tail)) // parts)
    return total * DTYPE_SIZE[dtype]

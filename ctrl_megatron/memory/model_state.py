"""Bytes of a model's parameters, gradients, master weights and moments on one rank. Pure.

Counts come from the shard tables that build the models (``models.shards.shard_params``), sizes of
buffers from how Megatron-Core 0.16 pads them (``_ParamAndGradBuffer``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ctrl_megatron.models.fp8 import quantised_specs
from ctrl_megatron.models.rules import param_rules
from ctrl_megatron.models.shape import AnyShape, ModelShape, TransformersShape
from ctrl_megatron.models.shards import shard_params
from ctrl_megatron.parallel.layout import Layout, MeshName
from ctrl_megatron.rollout.weight_chunks import spec_bytes
from ctrl_megatron.types import TensorSpec

DTYPE_SIZE = {"bfloat16": 2, "float32": 4}
_PARAM_ALIGNMENT, _BUCKET_ALIGNMENT = 64, 128
"""Elements to which Megatron's distributed optimizer aligns parameters and ends of buckets."""
_VLLM_VOCAB_ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMemory:
    """Bytes of one model on one rank."""

    parameters: int
    untrained: int = 0
    """The part of these that stays as it is."""
    gradients: int = 0
    passing: int = 0
    """Gradients that exist during an update only."""
    master: int = 0
    """float32 copies of bfloat16 parameters."""
    moments: int = 0
    saved: int = 0
    """Bytes that one rank writes into a checkpoint: the ranks with the same part share them."""

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of the optimizer: master weights and moments."""
        return self.master + self.moments


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientBucket:
    """Consecutive parameters in one of Megatron's gradient buffers."""

    mesh: MeshName
    sizes: tuple[int, ...]
    """Elements of each parameter."""


@lru_cache(maxsize=256)
def stage_buckets(shape: ModelShape, layout: Layout, *, pp: int) -> tuple[GradientBucket, ...]:
    """The trained parameters of a stage, equal on all of its ranks; experts have buffers of their
    own."""
    found = []
    for chunk in range(layout.virtual_pipeline):
        params = shard_params(shape, layout, layout.first_coordinates_of_stage(pp), chunk=chunk)
        sizes: dict[MeshName, list[int]] = {"dense": [], "expert": []}
        for param in params:
            if param.trained and not param.buffer:
                sizes[param.mesh].append(math.prod(param.shape))
        dense, parts = sizes["dense"], [sizes["dense"]]
        if shape.tied_embeddings and layout.pipeline > 1 and shape.lora is None:
            # The shared embedding has a separate bucket on the ranks that have it.
            if layout.has_embedding(pp=pp, chunk=chunk):
                parts = [dense[:1], dense[1:]]
            elif layout.has_output_layer(pp=pp, chunk=chunk):
                parts = [dense[:-1], dense[-1:]]
        found += [GradientBucket(mesh="dense", sizes=tuple(part)) for part in parts]
        found += [GradientBucket(mesh="expert", sizes=tuple(sizes["expert"]))]
    return tuple(found)


def frozen_model_memory(shape: AnyShape, layout: Layout, *, pp: int, dtype: str) -> ModelMemory:
    """A model that is not trained, on a rank of stage ``pp``."""
    if isinstance(shape, TransformersShape):
        return _sharded_state(shape, layout, trained=False)
    elements = sum(sum(bucket.sizes) for bucket in stage_buckets(shape, layout, pp=pp))
    return ModelMemory(parameters=elements * DTYPE_SIZE[dtype])


@lru_cache(maxsize=256)
def _untrained_elements(shape: ModelShape, layout: Layout, pp: int) -> int:
    """Elements of the weights beside which a rank's adapters are trained."""
    return sum(
        math.prod(param.shape)
        for chunk in range(layout.virtual_pipeline)
        for param in shard_params(shape, layout, layout.first_coordinates_of_stage(pp), chunk=chunk)
        if not param.trained
    )


@lru_cache(maxsize=64)
def _sharded_state(shape: TransformersShape, layout: Layout, *, trained: bool) -> ModelMemory:
    """A model of transformers on the fullest rank: shards are float32 and their own master copies,
    and gradients are freed after a step."""
    own = learning = 0
    for param in shard_params(shape, layout, layout.first_coordinates_of_stage(0), chunk=0):
        own += math.prod(param.shape)
        learning += math.prod(param.shape) if param.trained and trained else 0
    return ModelMemory(
        parameters=4 * own,
        untrained=4 * (own - learning),
        passing=4 * learning,
        moments=8 * learning,
        saved=(4 + 8) * learning // layout.fsdp_replicas,
    )


def trained_model_memory(
    shape: AnyShape, layout: Layout, *, pp: int, dtype: str, distributed: bool
) -> ModelMemory:
    """A trained model on the fullest rank of stage ``pp``.

    Gradients are float32, Adam has two float32 moments. The ``distributed`` optimizer splits master
    weights and moments over the ranks with the same weights.
    """
    if isinstance(shape, TransformersShape):
        return _sharded_state(shape, layout, trained=True)
    size, master = DTYPE_SIZE[dtype], 0 if dtype == "float32" else 4
    elements = own = share = 0
    for bucket in stage_buckets(shape, layout, pp=pp):
        replicas = layout.replicas(bucket.mesh)
        count = _padded(bucket.sizes, replicas) if distributed else sum(bucket.sizes)
        elements += count
        own += count // replicas if distributed else count
        share += count // replicas
    untrained = size * _untrained_elements(shape, layout, pp)
    return ModelMemory(
        parameters=size * elements + untrained,
        untrained=untrained,
        gradients=4 * elements,
        master=master * own,
        moments=8 * own,
        saved=(size + master + 8) * share,
    )


def _padded(sizes: Sequence[int], replicas: int) -> int:
    """Elements of a bucket that is split over ``replicas`` ranks."""
    aligned = sum(_up(size, _PARAM_ALIGNMENT) for size in sizes)
    return _up(aligned, math.lcm(replicas, _BUCKET_ALIGNMENT))


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def largest_layer_parameter(shape: AnyShape, layout: Layout) -> int:
    """Elements of the largest trained parameter of a layer."""
    if isinstance(shape, TransformersShape):
        return max(math.prod(t.shape) for layer, t in shape.tensors if layer is not None)
    params = shard_params(shape, layout, layout.first_coordinates_of_stage(0), chunk=0)
    return max(math.prod(p.shape) for p in params if ".layers." in p.name and p.trained)


def largest_trained_parameter(shape: AnyShape, layout: Layout, *, pp: int) -> int:
    """Elements of the largest trained parameter of a rank of stage ``pp``."""
    return max(
        math.prod(param.shape)
        for chunk in range(layout.virtual_pipeline)
        for param in shard_params(shape, layout, layout.first_coordinates_of_stage(pp), chunk=chunk)
        if param.trained
    )


def engine_weight_bytes(
    shape: AnyShape, *, tensor: int, dtype: str, quantised: bool = False
) -> int:
    """Weights of one of vLLM's ``tensor`` workers, in bytes: matrices are split, norms are not,
    keys and values at most over their heads, and the vocabulary is padded. ``quantised``: linear
    layers have 8 bits and scales."""
    total = 0
    for rule in param_rules(shape.without_adapters):
        if rule.part == "output" and shape.tied_embeddings:
            continue
        for position, whole in enumerate(rule.hf):
            rows, *tail = whole.shape
            whole_on_each = rule.kind == "replicated" or (rule.kind == "shard" and not tail)
            parts = 1 if whole_on_each else tensor
            if rule.kind == "vocab":
                rows = _up(_up(rows, _VLLM_VOCAB_ALIGNMENT), tensor)
            if rule.kind == "qkv" and position > 0:
                parts = min(tensor, shape.attention.groups)
            spec, size = TensorSpec(name=whole.name, dtype=dtype, shape=(rows, *tail)), 0
            for held in quantised_specs([spec]) if quantised else [spec]:
                size += spec_bytes(held)
            total += len(rule.layers) * (1 if rule.stacked else rule.experts) * (size // parts)
    return total

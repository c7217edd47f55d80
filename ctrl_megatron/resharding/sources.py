"""Where pushed weights come from: a model of the trainer, or an HF directory (the proxy)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from ctrl_megatron.models.adapters import merged
from ctrl_megatron.models.hf_config import read_model_shape
from ctrl_megatron.models.layer_spec import fuses_norms
from ctrl_megatron.models.parallel_model import ParallelModel
from ctrl_megatron.models.safetensors_dir import SafetensorsDirectory
from ctrl_megatron.models.shape import ModelShape
from ctrl_megatron.models.shards import Piece
from ctrl_megatron.parallel.groups import ProcessGroups
from ctrl_megatron.resharding.plan import (
    EngineLayout,
    TensorPlace,
    hf_specs,
    place_in_buckets,
    plan,
)
from ctrl_megatron.rollout.weight_chunks import tensor_at


class WeightSource(Protocol):
    """Fills buckets with whole HF tensors; all ranks do it together."""

    @property
    def places(self) -> Sequence[TensorPlace]:
        """Every tensor's place, in the order of buckets; equal on all ranks of a host, and on all
        hosts but for ``sources``."""
        ...

    @property
    def model(self) -> ParallelModel | None:
        """The trainer's model whose weights are read, which must be on the device; None for a
        directory."""
        ...

    def fill(self, bucket: int, memory: torch.Tensor) -> None:
        """Write this rank's share of ``bucket`` into ``memory`` (uint8, shared by the ranks)."""
        ...


class MegatronSource:
    """The trainer's shards: each rank copies its own rectangles; nothing is gathered."""

    def __init__(self, model: ParallelModel, layout: EngineLayout) -> None:
        self.model, self.layout = model, layout
        groups = model.groups
        self.places = plan(
            model.shape,
            groups.layout,
            layout,
            fuses_norms(model.shape),
            groups.hosts.of_rank,
            groups.here,
        )
        self._copies: dict[int, dict[tuple[int, str], list[tuple[TensorPlace, Piece]]]]
        self._copies = defaultdict(lambda: defaultdict(list))
        for place in self.places:
            for source in place.sources:
                if source.rank == groups.rank:
                    pieces = self._copies[place.bucket][source.chunk, source.param]
                    pieces.append((place, source.piece))

    def weight(self, chunk: int, param: str) -> torch.Tensor:
        """A parameter or buffer of this rank's virtual stage ``chunk``, with its adapter merged."""
        return merged(self.model.models[chunk], param)

    def fill(self, bucket: int, memory: torch.Tensor) -> None:
        for param, pieces in self._copies[bucket].items():
            weight = self.weight(*param)
            for place, piece in pieces:
                whole = tensor_at(memory, place.spec, place.offset)
                whole[piece.hf_slices].copy_(weight[piece.slices])


class NoAdapters:
    """Adapters that change nothing: with them an engine computes what its base does."""

    def __init__(self, shape: ModelShape, layout: EngineLayout, groups: ProcessGroups) -> None:
        self.model = None
        specs = hf_specs(shape, layout.dtype, layout.sends)
        self.places = place_in_buckets(specs, layout.bucket_bytes)
        self._fills = groups.is_first_here

    def fill(self, bucket: int, memory: torch.Tensor) -> None:
        if self._fills:
            memory.zero_()


class DirectorySource:
    """The safetensors of an HF directory, read on each host with an engine; the ranks of a host
    share the reading tensor by tensor."""

    def __init__(self, directory: str | Path, layout: EngineLayout, groups: ProcessGroups) -> None:
        self.model = None
        shape = read_model_shape(directory)
        self.places = place_in_buckets(hf_specs(shape, layout.dtype), layout.bucket_bytes)
        self._tensors = SafetensorsDirectory(directory)
        self._tensors.check(shape)
        ranks = [rank for rank, host in enumerate(groups.hosts.of_rank) if host == groups.here]
        needed = self.places if groups.here in layout.hosts else ()
        self._own_places = needed[ranks.index(groups.rank) :: len(ranks)]

    def fill(self, bucket: int, memory: torch.Tensor) -> None:
        for place in self._own_places:
            if place.bucket == bucket:
                whole = self._tensors.read(place.spec.name)
                tensor_at(memory, place.spec, place.offset).copy_(whole)

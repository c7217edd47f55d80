"""Where pushed weights come from: a model of the trainer, or an HF directory (the proxy)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from ctrl_megatron.models.fp8 import FP8, SCALES, largest_of_blocks, quantised, raise_to, scales_of
from ctrl_megatron.models.hf_config import read_shape
from ctrl_megatron.models.layer_spec import fuses_norms
from ctrl_megatron.models.parallel_model import ParallelModel
from ctrl_megatron.models.safetensors_dir import SafetensorsDirectory
from ctrl_megatron.models.shape import AnyShape
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
from ctrl_megatron.types import StrategyName


class WeightSource(Protocol):
    """Fills buckets with whole HF tensors; all ranks do it together."""

    @property
    def layout(self) -> EngineLayout:
        """The engines that read them."""
        ...

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

    @property
    def kept(self) -> bool:
        """Whether a medium should keep the filled buckets for later pushes: the weights do not
        change, and there is host memory for all of them."""
        ...

    def fill(self, bucket: int, memory: torch.Tensor) -> None:
        """Write this rank's share of ``bucket`` into ``memory`` (uint8, shared by the ranks)."""
        ...


class ModelSource:
    """A model's shards in the trainer, whatever its strategy: each rank copies its own rectangles;
    of what is quantised the largest magnitudes of blocks are gathered, and nothing else."""

    kept = False

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
        return self.model.sent(chunk, param)

    def fill(self, bucket: int, memory: torch.Tensor) -> None:
        scales = self._scales(bucket) if self.layout.quantised else {}
        for param, pieces in self._copies[bucket].items():
            weight = self.weight(*param)
            for place, piece in pieces:
                whole, part = tensor_at(memory, place.spec, place.offset), weight[piece.slices]
                if place.spec.dtype == FP8:
                    own = scales[place.spec.name + SCALES].to(part.device)
                    part = quantised(part, own, piece.hf_start)
                whole[piece.hf_slices].copy_(part)
        for place in self._scale_places(bucket) if self.model.groups.is_first_here else ():
            whole = tensor_at(memory, place.spec, place.offset)
            whole.copy_(scales[place.spec.name])

    def _scale_places(self, bucket: int) -> list[TensorPlace]:
        return [p for p in self.places if p.bucket == bucket and p.spec.name.endswith(SCALES)]

    def _scales(self, bucket: int) -> dict[str, torch.Tensor]:
        """Name -> the bucket's scales, on the host. Collective over all ranks: a block may lie in
        the shards of several."""
        specs = [place.spec for place in self._scale_places(bucket)]
        sizes = [prod(spec.shape) for spec in specs]
        largest = torch.zeros(sum(sizes))
        parts = largest.split(sizes)
        of = {s.name: part.view(s.shape) for s, part in zip(specs, parts, strict=True)}
        for param, pieces in self._copies[bucket].items():
            weight = self.weight(*param)
            for place, piece in pieces:
                if place.spec.dtype == FP8:
                    own = largest_of_blocks(weight[piece.slices], piece.hf_start).cpu()
                    raise_to(of[place.spec.name + SCALES], own, piece.hf_start)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.model.groups.host)
        return {name: scales_of(blocks) for name, blocks in of.items()}


class NoAdapters:
    """Adapters that change nothing: with them an engine computes what its base does."""

    kept = False

    def __init__(self, shape: AnyShape, layout: EngineLayout, groups: ProcessGroups) -> None:
        self.model, self.layout = None, layout
        specs = hf_specs(shape, layout.dtype, layout.sends)
        self.places = place_in_buckets(specs, layout.bucket_bytes)
        self._fills = groups.is_first_here

    def fill(self, bucket: int, memory: torch.Tensor) -> None:
        if self._fills:
            memory.zero_()


class DirectorySource:
    """The safetensors of an HF directory, read on each host with an engine; the ranks of a host
    share the reading tensor by tensor."""

    def __init__(
        self,
        directory: str | Path,
        layout: EngineLayout,
        groups: ProcessGroups,
        *,
        strategy: StrategyName = "megatron",
        kept: bool = False,
    ) -> None:
        self.model, self.kept, self.layout = None, kept, layout
        shape = read_shape(directory, strategy)
        specs = hf_specs(shape, layout.dtype, quantised=layout.quantised)
        self.places = place_in_buckets(specs, layout.bucket_bytes)
        self._tensors = SafetensorsDirectory(directory)
        self._tensors.check(shape)
        ranks = [rank for rank, host in enumerate(groups.hosts.of_rank) if host == groups.here]
        needed = self.places if groups.here in layout.hosts else ()
        self._scales = {p.spec.name: p for p in needed if p.spec.name.endswith(SCALES)}
        read = [place for place in needed if place.spec.name not in self._scales]
        self._own_places = read[ranks.index(groups.rank) :: len(ranks)]

    def fill(self, bucket: int, memory: torch.Tensor) -> None:
        for place in self._own_places:
            if place.bucket == bucket:
                whole = self._tensors.read(place.spec.name)
                if place.spec.dtype == FP8:
                    scales = scales_of(largest_of_blocks(whole, (0, 0)))
                    beside = self._scales[place.spec.name + SCALES]
                    tensor_at(memory, beside.spec, beside.offset).copy_(scales)
                    whole = quantised(whole, scales, (0, 0))
                tensor_at(memory, place.spec, place.offset).copy_(whole)

"""Where pushed weights come from: a model of the trainer, or an HF directory (the proxy)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from ctrl_megatron.models.hf_config import read_shape
from ctrl_megatron.models.layer_spec import fuses_norms
from ctrl_megatron.models.parallel_model import ParallelModel
from ctrl_megatron.models.safetensors_dir import SafetensorsDirectory
from ctrl_megatron.models.shape import AnyShape
from ctrl_megatron.parallel.groups import ProcessGroups
from ctrl_megatron.parallel.layout import Layout
from ctrl_megatron.resharding.plan import EngineLayout, Rectangle, hf_specs
from ctrl_megatron.types import StrategyName, TensorSpec


class WeightSource(Protocol):
    """Weights of which each rank has shards, as ``models.shards`` cuts ``shape`` for
    ``trainer_layout``.
    """

    @property
    def engine_layout(self) -> EngineLayout:
        """The engines that take them."""
        ...

    @property
    def shape(self) -> AnyShape: ...

    @property
    def trainer_layout(self) -> Layout:
        """The ranks that have the shards."""
        ...

    @property
    def te_names(self) -> bool:
        """Whether parameters have the names of the Transformer Engine spec."""
        ...

    @property
    def specs(self) -> Sequence[TensorSpec]:
        """Every HF tensor that is sent, in checkpoint order."""
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

    def values(self, chunk: int, rectangle: Rectangle) -> torch.Tensor:
        """The values of a rectangle of this rank's shards, in virtual stage ``chunk``: a tensor of
        the shape ``rectangle.piece.extent``."""
        ...


class ModelSource:
    """A model's shards in the trainer, whatever its strategy; adapters are merged."""

    kept = False

    def __init__(self, model: ParallelModel, layout: EngineLayout) -> None:
        self.model, self.engine_layout, self.shape = model, layout, model.shape
        self.trainer_layout, self.te_names = model.groups.layout, fuses_norms(model.shape)
        self.specs = hf_specs(model.shape, layout.dtype, layout.sends, quantised=layout.quantised)

    def values(self, chunk: int, rectangle: Rectangle) -> torch.Tensor:
        own, piece = self.model.engine_part(chunk, rectangle.param).detach(), rectangle.piece
        # An expert's weight is a part of an HF tensor with one more dimension.
        return own.view(*(1,) * (len(piece.start) - own.dim()), *own.shape)[piece.shard_slices]


class ZeroAdapters:
    """Adapters that change nothing: with them an engine computes what its base does."""

    kept, te_names, model = False, False, None

    def __init__(self, shape: AnyShape, layout: EngineLayout, groups: ProcessGroups) -> None:
        self.shape, self.engine_layout, self.trainer_layout = shape, layout, _replicated(groups)
        self.specs = hf_specs(shape, layout.dtype, layout.sends)

    def values(self, chunk: int, rectangle: Rectangle) -> torch.Tensor:
        return torch.zeros(rectangle.piece.extent)


class DirectorySource:
    """The safetensors of an HF directory, which every rank can read; those of a host share it."""

    te_names, model = False, None

    def __init__(
        self,
        directory: str | Path,
        layout: EngineLayout,
        groups: ProcessGroups,
        *,
        strategy: StrategyName = "megatron",
        kept: bool = False,
    ) -> None:
        self.kept, self.engine_layout, self.trainer_layout = kept, layout, _replicated(groups)
        self.shape = read_shape(directory, strategy)
        self.specs = hf_specs(self.shape, layout.dtype, quantised=layout.quantised)
        self._tensors = SafetensorsDirectory(directory)
        self._tensors.check(self.shape)

    def values(self, chunk: int, rectangle: Rectangle) -> torch.Tensor:
        return self._tensors.read_part(rectangle.piece.hf, rectangle.piece.hf_slices)


def _replicated(groups: ProcessGroups) -> Layout:
    return Layout(data=groups.size, sharded=1)

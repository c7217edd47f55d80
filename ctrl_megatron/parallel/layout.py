"""Arithmetic of parallel layouts; no other file computes with global ranks. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ctrl_megatron.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """The coordinates of one rank."""

    tp: int
    pp: int
    dp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of the parallel dimensions; ranks count tensor, data, pipeline, the first fastest
    (Megatron's default)."""

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    data: int = 1
    sequence_parallel: bool = False

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tensor * self.pipeline * self.data

    @property
    def model_size(self) -> int:
        """Number of ranks in one model copy."""
        return self.tensor * self.pipeline

    def coordinates(self, rank: int) -> Coordinates:
        """The coordinates of global ``rank``."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside a layout of {self.world_size} ranks")
        return Coordinates(
            tp=rank % self.tensor,
            dp=rank // self.tensor % self.data,
            pp=rank // (self.tensor * self.data),
        )

    def rank(self, *, tp: int, pp: int, dp: int) -> int:
        """The global rank at the coordinates; the inverse of ``coordinates``."""
        return tp + self.tensor * (dp + self.data * pp)

    def check_layers(self, num_layers: int) -> None:
        """ValueError unless the layers divide evenly over stages and virtual stages."""
        chunks = self.pipeline * self.virtual_pipeline
        if num_layers % chunks:
            raise UserError(
                f"{num_layers} layers do not divide over pipeline_model_parallel_size="
                f"{self.pipeline} x virtual_pipeline_model_parallel_size={self.virtual_pipeline}; "
                f"choose sizes whose product divides {num_layers}"
            )

    def layers(self, num_layers: int, *, pp: int, chunk: int) -> range:
        """Global indices of the layers in virtual stage ``chunk`` of pipeline stage ``pp``.

        Virtual stages are interleaved: every stage has chunk 0 before any stage has chunk 1.
        """
        self.check_layers(num_layers)
        per_chunk = num_layers // (self.pipeline * self.virtual_pipeline)
        first = (chunk * self.pipeline + pp) * per_chunk
        return range(first, first + per_chunk)

    def stages(self) -> list[tuple[int, int]]:
        """Every (pipeline stage, virtual stage) in the order of the layers."""
        return [(pp, c) for c in range(self.virtual_pipeline) for pp in range(self.pipeline)]

    def is_first(self, *, pp: int, chunk: int) -> bool:
        """True for the virtual stage with the embedding."""
        return pp == 0 and chunk == 0

    def is_last(self, *, pp: int, chunk: int) -> bool:
        """True for the virtual stage with the output layer."""
        return pp == self.pipeline - 1 and chunk == self.virtual_pipeline - 1


def layout_for(
    world_size: int,
    *,
    tensor: int,
    pipeline: int,
    virtual_pipeline: int | None,
    sequence_parallel: bool,
) -> Layout:
    """The layout of ``world_size`` ranks; tensor and pipeline leave the data-parallel size."""
    model_size = tensor * pipeline
    if world_size % model_size:
        raise UserError(
            f"{world_size} ranks cannot hold whole copies of a model split "
            f"tensor_model_parallel_size={tensor} x pipeline_model_parallel_size={pipeline}; "
            f"start a multiple of {model_size} ranks"
        )
    return Layout(
        tensor=tensor,
        pipeline=pipeline,
        virtual_pipeline=virtual_pipeline or 1,
        data=world_size // model_size,
        sequence_parallel=sequence_parallel,
    )

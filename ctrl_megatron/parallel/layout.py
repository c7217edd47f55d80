"""Arithmetic of parallel layouts; no other file computes with global ranks. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import lcm, prod
from typing import TYPE_CHECKING, Literal, get_args

from ctrl_megatron.errors import UserError

if TYPE_CHECKING:
    # An engine's process imports this file, and its environment may lack what config imports.
    from ctrl_megatron.config import Config
    from ctrl_megatron.config.actor_rollout_ref import Actor

Axis = Literal["tp", "cp", "dp", "pp", "etp", "ep", "edp", "shard", "copy"]
"""Tensor, context, data and pipeline ranks; expert tensor, expert and expert data ranks; ranks that
share one copy of whole modules, and the copies."""
MeshName = Literal["dense", "expert", "module"]
REPLICAS: Mapping[MeshName, tuple[Axis, ...]] = {
    **{"dense": ("cp", "dp"), "expert": ("edp",)},
    # Its optimizer keeps the state of what a rank holds.
    "module": (),
}
"""The axes over whose ranks a mesh's weights are always replicated, so that the distributed
optimizer divides their state."""
Indices = tuple[tuple[Axis, int], ...]
"""An index on each of some axes of one mesh."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Named axes over all ranks of a layout; the index of the first axis changes fastest."""

    sizes: tuple[tuple[Axis, int], ...]

    @property
    def axes(self) -> frozenset[Axis]:
        return frozenset(axis for axis, _ in self.sizes)

    def indices(self, rank: int) -> dict[Axis, int]:
        found: dict[Axis, int] = {}
        for axis, size in self.sizes:
            rank, found[axis] = divmod(rank, size)
        return found

    def all_indices(self, axes: Sequence[Axis]) -> Iterator[Indices]:
        sizes = dict(self.sizes)
        for indices in product(*(range(sizes[axis]) for axis in axes)):
            yield tuple(zip(axes, indices, strict=True))

    def ranks(self, at: Mapping[Axis, int]) -> tuple[int, ...]:
        """The ranks with the indices ``at``, whatever their other indices are, ascending."""
        if unknown := at.keys() - self.axes:
            raise ValueError(f"the mesh of {sorted(self.axes)} has no axes {sorted(unknown)}")
        ranks, stride = [0], prod(size for _, size in self.sizes)
        for axis, size in reversed(self.sizes):
            stride //= size
            own = (at[axis],) if axis in at else range(size)
            ranks = [rank + stride * index for rank in ranks for index in own]
        return tuple(ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """The index of one rank on every axis of all meshes."""

    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int
    shard: int
    copy: int

    def indices_on(self, *axes: Axis) -> Indices:
        return tuple((axis, getattr(self, axis)) for axis in axes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of the parallel dimensions, which meshes arrange in Megatron's default order.

    The mesh of dense weights counts tensor, context, data and pipeline ranks, that of expert
    weights expert tensor, expert, expert data and pipeline ranks, that of FSDP's modules the ranks
    of a copy, copies and pipeline ranks; all count the same ranks. Raises UserError if the sizes of
    a mesh do not divide a pipeline stage.
    """

    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    data: int = 1
    expert: int = 1
    """Ranks over which the experts of a layer are spread."""
    expert_tensor: int | None = None
    """Ranks that split one expert's weights; None: as many as ``tensor``."""
    sequence_parallel: bool = False
    sharded: int | None = None
    """Consecutive ranks that share one copy of whole modules; None: all."""

    def __post_init__(self) -> None:
        stage = self.tensor * self.context * self.data
        if stage % self.ranks_per_expert_layer:
            raise UserError(
                f"the {stage} ranks of a pipeline stage do not divide over "
                f"expert_tensor_parallel_size={self.expert_tensor_ranks} x "
                f"expert_model_parallel_size={self.expert}; choose sizes whose product divides "
                f"{stage}"
            )
        if stage % self.fsdp_shard_size:
            raise UserError(
                f"the {stage} ranks do not divide over copies of "
                f"actor_rollout_ref.actor.fsdp_config.fsdp_size={self.fsdp_shard_size} ranks",
                remedy=f"choose a divisor of {stage}, or -1 for one copy",
            )

    @property
    def fsdp_shard_size(self) -> int:
        """Number of ranks that share one copy of whole modules."""
        return self.sharded or self.tensor * self.context * self.data

    @property
    def fsdp_replicas(self) -> int:
        """Number of FSDP's copies of whole modules, each shared by ``fsdp_shard_size`` ranks."""
        return self.tensor * self.context * self.data // self.fsdp_shard_size

    @property
    def expert_tensor_ranks(self) -> int:
        """Number of ranks that share one expert."""
        return self.tensor if self.expert_tensor is None else self.expert_tensor

    @property
    def ranks_per_expert_layer(self) -> int:
        """Number of ranks that hold the experts of a layer once, and that compute them together."""
        return self.expert_tensor_ranks * self.expert

    @property
    def experts_join_data_ranks(self) -> bool:
        """Whether ranks with different data indices compute a layer's experts together, so that
        they take part in the same passes."""
        return self.ranks_per_expert_layer > self.tensor * self.context

    @property
    def world_size(self) -> int:
        return self.model_parallel_size * self.data

    @property
    def model_parallel_size(self) -> int:
        """Number of ranks with the same data index, which compute the same rows together."""
        return self.tensor * self.context * self.pipeline

    @property
    def token_multiple(self) -> int:
        """A micro-batch has a multiple of so many tokens: tensor ranks split those of a context
        rank under sequence parallelism, and a context rank has two pieces of them."""
        tensor = self.tensor if self.sequence_parallel else 1
        return tensor if self.context == 1 else self.context * lcm(2, tensor)

    def mesh(self, name: MeshName) -> Mesh:
        """The mesh over which weights of that kind are cut."""
        if name == "dense":
            return Mesh(
                sizes=(
                    ("tp", self.tensor),
                    ("cp", self.context),
                    ("dp", self.data),
                    ("pp", self.pipeline),
                )
            )
        if name == "module":
            return Mesh(
                sizes=(
                    ("shard", self.fsdp_shard_size),
                    ("copy", self.fsdp_replicas),
                    ("pp", self.pipeline),
                )
            )
        rest = self.tensor * self.context * self.data // self.ranks_per_expert_layer
        return Mesh(
            sizes=(
                ("etp", self.expert_tensor_ranks),
                ("ep", self.expert),
                ("edp", rest),
                ("pp", self.pipeline),
            )
        )

    def replicas(self, name: MeshName) -> int:
        """Number of ranks with the same part of a mesh's weights, among which a distributed
        optimizer divides their state; 1 for ``module`` (FSDP), whose copies keep it each."""
        sizes = dict(self.mesh(name).sizes)
        return prod(sizes[axis] for axis in REPLICAS[name])

    def coordinates(self, rank: int) -> Coordinates:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside a layout of {self.world_size} ranks")
        indices: dict[Axis, int] = {}
        for mesh in map(self.mesh, get_args(MeshName)):
            indices |= mesh.indices(rank)
        return Coordinates(**indices)

    def rank(self, *, tp: int = 0, pp: int = 0, dp: int = 0, cp: int = 0) -> int:
        """The global rank at these indices of the dense mesh."""
        return self.mesh("dense").ranks({"tp": tp, "cp": cp, "dp": dp, "pp": pp})[0]

    def first_coordinates_of_stage(self, pp: int) -> Coordinates:
        return self.coordinates(self.rank(pp=pp))

    def ranks_at(self, mesh: MeshName, at: Indices) -> tuple[int, ...]:
        """The ranks with the indices ``at``, ascending.

        They have the same piece of a weight if ``at`` has the index of every axis that cuts the
        weight; the other axes of the mesh replicate it.
        """
        return self.mesh(mesh).ranks(dict(at))

    def ranks_along(self, rank: int, axis: Axis) -> tuple[int, ...]:
        """The ranks that differ from ``rank`` on ``axis`` of its mesh at most, ascending."""
        mesh = next(m for m in map(self.mesh, get_args(MeshName)) if axis in m.axes)
        return mesh.ranks({a: i for a, i in mesh.indices(rank).items() if a != axis})

    def rank_sets_along(self, *axes: Axis) -> list[tuple[int, ...]]:
        """The ranks in sets that differ on ``axes`` of one mesh at most; each set ascends."""
        meshes = map(self.mesh, get_args(MeshName))
        mesh = next(m for m in meshes if m.axes.issuperset(axes))
        others: list[Axis] = [axis for axis, _ in mesh.sizes if axis not in axes]
        return [mesh.ranks(dict(at)) for at in mesh.all_indices(others)]

    def check_layers(self, num_layers: int) -> None:
        """UserError unless every virtual stage of every stage gets a layer."""
        if num_layers < self.pipeline * self.virtual_pipeline:
            raise UserError(
                f"{num_layers} layers are too few for pipeline_model_parallel_size="
                f"{self.pipeline} x virtual_pipeline_model_parallel_size={self.virtual_pipeline}; "
                f"choose sizes whose product is at most {num_layers}"
            )

    def layers(self, num_layers: int, *, pp: int, chunk: int) -> range:
        """Global indices of the layers in virtual stage ``chunk`` of pipeline stage ``pp``.

        Virtual stages are interleaved: every stage has chunk 0 before any stage has chunk 1. Where
        the layers do not divide evenly, those at the ends have one layer less, because they also
        compute the output layer and the embedding: the last one, the first one, the second to last
        one, and so on.
        """
        self.check_layers(num_layers)
        chunks = self.pipeline * self.virtual_pipeline
        most, position = -(-num_layers // chunks), chunk * self.pipeline + pp
        short = most * chunks - num_layers
        at_the_start, at_the_end = short // 2, chunks - (short + 1) // 2
        missing = min(position, at_the_start) + max(position - at_the_end, 0)
        count = most - (position < at_the_start or position >= at_the_end)
        first = most * position - missing
        return range(first, first + count)

    def virtual_stages(self) -> list[tuple[int, int]]:
        """Every (pipeline stage, virtual stage) in the order of the layers."""
        return [(pp, c) for c in range(self.virtual_pipeline) for pp in range(self.pipeline)]

    def has_embedding(self, *, pp: int, chunk: int) -> bool:
        """True for the virtual stage with the embedding."""
        return pp == 0 and chunk == 0

    def has_output_layer(self, *, pp: int, chunk: int) -> bool:
        """True for the virtual stage with the output layer."""
        return pp == self.pipeline - 1 and chunk == self.virtual_pipeline - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Ranks of a run that share a layout and have the models or the services of some roles."""

    ranks: tuple[int, ...]
    """The run's numbers of the ranks, ascending; in the world they are numbered from 0."""
    layout: Layout
    roles: tuple[str, ...] = ("actor",)
    """The roles that ``placement`` gives it; the first world has those without ranks of their own
    too."""

    @property
    def name(self) -> str:
        """The role that it is named after."""
        return self.roles[0]

    @property
    def serves(self) -> bool:
        """Whether its ranks have no model: they start engines or sandboxes only."""
        from ctrl_megatron.config.placement import SERVICES

        return {*self.roles} <= {*SERVICES}


def layout_for(world_size: int, actor: Actor) -> Layout:
    """The layout of ``world_size`` ranks that the actor's keys ask for; the other sizes leave the
    data-parallel one."""
    keys, sharded = actor.megatron, actor.fsdp_config.fsdp_size
    tensor, pipeline = keys.tensor_model_parallel_size, keys.pipeline_model_parallel_size
    context = keys.context_parallel_size
    model_size = tensor * context * pipeline
    if world_size % model_size:
        raise UserError(
            f"{world_size} ranks cannot hold whole copies of a model split "
            f"tensor_model_parallel_size={tensor} x pipeline_model_parallel_size={pipeline}, with "
            f"context_parallel_size={context}; start a multiple of {model_size} ranks"
        )
    return Layout(
        tensor=tensor,
        context=context,
        pipeline=pipeline,
        virtual_pipeline=keys.virtual_pipeline_model_parallel_size or 1,
        data=world_size // model_size,
        expert=keys.expert_model_parallel_size,
        expert_tensor=keys.expert_tensor_parallel_size,
        sequence_parallel=keys.sequence_parallel,
        sharded=None if sharded == -1 else sharded,
    )


def worlds_of(world_size: int, config: Config) -> tuple[World, ...]:
    """The worlds of ``world_size`` ranks (``placement``), that of rank 0 first, which alone has the
    models of a further policy."""
    from ctrl_megatron.config.placement import separate_role_ranks

    actor, run = config.actor_rollout_ref.actor, config.run or config
    apart = separate_role_ranks(run, world_size)
    taken = {rank for one in apart for rank in one.ranks}
    others = tuple(rank for rank in range(world_size) if rank not in taken)
    worlds = [World(ranks=others, layout=layout_for(len(others), actor))]
    for one in apart if run is config else ():
        tensor = one.layout.tensor_model_parallel_size
        # Ranks without a model are as good as data ranks of one.
        layout = Layout(
            tensor=tensor,
            pipeline=one.layout.pipeline_model_parallel_size,
            data=len(one.ranks) // one.ranks_per_model_copy,
            sequence_parallel=actor.megatron.sequence_parallel and tensor > 1,
        )
        worlds.append(World(ranks=one.ranks, layout=layout, roles=one.roles))
    return tuple(worlds)


def world_of_role(worlds: Sequence[World], role: str) -> World:
    """The world that has the models of ``role``."""
    return next((world for world in worlds if role in world.roles), worlds[0])

"""Process groups; this file alone creates them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from ctrl_megatron.config.environment import Launch, read_launch
from ctrl_megatron.errors import UserError
from ctrl_megatron.parallel.devices import local_device
from ctrl_megatron.parallel.hosts import (
    Hosts,
    connection_addresses_to,
    host_identity,
    hosts_from_identities,
)
from ctrl_megatron.parallel.layout import Axis, Coordinates, Layout, World
from ctrl_megatron.parallel.meeting import rendezvous

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection

T = TypeVar("T")
_LONGEST_WRITE = timedelta(hours=2)
_LONGEST_MAIL = timedelta(days=30)
"""Those who work have limits of their own, and a dead rank closes its connections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSet:
    """Ranks that communicate: all of a run, or those of one world, which are numbered from 0 then.
    Every method that begins with ``from`` or ``on``, and ``barrier``, is collective over them."""

    ranks: tuple[int, ...]
    """The run's numbers of the ranks in the set, ascending."""
    rank: int
    """This rank's number in the set."""
    device: torch.device
    hosts: Hosts
    """The hosts of the set's ranks."""
    host: Any
    """The ranks over gloo: for objects, barriers and host memory, whatever the devices are."""
    writers: Any
    """The ranks over gloo, for the threads that write checkpoints beside the training."""

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_first_of_host(self) -> bool:
        """True on the rank that acts for its host."""
        return self.rank == self.hosts.first_rank(self.host_index)

    @property
    def host_index(self) -> int:
        return self.hosts.of_rank[self.rank]

    def broadcast_from_first(self, value: T | None) -> T:
        """Rank 0's ``value`` on every rank (pickled, over gloo). Collective."""
        box = [value]
        dist.broadcast_object_list(box, group_src=0, group=self.host)
        return box[0]  # type: ignore[return-value]

    def all_gather(self, value: T) -> list[T]:
        """One value per rank, in rank order, on every rank. Collective."""
        return _gather(value, self.size, self.host)

    def gather_from_host(self, value: T) -> dict[int, T]:
        """The values of this host's ranks by rank, ascending. Collective over all ranks."""
        values = enumerate(self.all_gather(value))
        return {
            rank: given for rank, given in values if self.hosts.of_rank[rank] == self.host_index
        }

    def broadcast_from_host_first(self, value: T) -> T:
        """The ``value`` of the first rank of this rank's host. Collective over all ranks."""
        return next(iter(self.gather_from_host(value).values()))

    def any_rank(self, *flags: bool) -> tuple[bool, ...]:
        """For each flag whether it is set on any rank. Collective over all ranks."""
        raised = torch.tensor([int(flag) for flag in flags])
        dist.all_reduce(raised, op=dist.ReduceOp.MAX, group=self.host)
        return tuple(map(bool, raised.tolist()))

    def barrier(self) -> None:
        """Wait for all ranks (host side). Collective."""
        dist.barrier(group=self.host)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroups(RankSet):
    """The ranks of one world, this rank's place in its layout, and its process groups."""

    layout: Layout
    place: Coordinates
    megatron: ProcessGroupCollection
    """The groups that Megatron's parts are given."""
    alone: Any
    """This rank; for code of Megatron's that would cut sequences over context ranks itself."""
    shards: Any
    """The ranks that share one copy of FSDP's modules with this one."""
    copies: Any
    """The ranks that have this one's part of the other copies."""
    host_model: Any
    """The ranks of this model copy, which have this rank's data index, over gloo."""
    host_data: Any
    """The ranks that differ from this rank in the data index at most, over gloo."""

    @property
    def tensor_group(self) -> Any:
        """The ranks that split one weight with this one."""
        return self.megatron.tp

    @property
    def pipeline_group(self) -> Any:
        """The ranks that have this one's part of the other stages."""
        return self.megatron.pp

    @property
    def context_group(self) -> Any:
        """The ranks that share this rank's rows and have the same part of the weights."""
        return self.megatron.cp

    @property
    def is_leader(self) -> bool:
        """True on the first rank of a model copy, which calls engines and sandboxes for it."""
        return self.place.tp == self.place.cp == self.place.pp == 0

    @property
    def is_last_stage(self) -> bool:
        """True on the ranks with the model's output layer."""
        return self.place.pp == self.layout.pipeline - 1

    def broadcast_from_leader(self, value: T | None) -> T:
        """The leader's ``value`` on every rank of this model copy (pickled, over gloo). Collective
        over the copy."""
        if self.layout.model_parallel_size == 1:
            return value  # type: ignore[return-value]
        box = [value]
        dist.broadcast_object_list(box, group_src=0, group=self.host_model)
        return box[0]  # type: ignore[return-value]

    def gather_data_ranks(self, value: T) -> list[T]:
        """One value per data-parallel rank, in their order, on every rank. Collective over them."""
        return _gather(value, self.layout.data, self.host_data)

    def sum_over_data(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of ``values`` over the data-parallel ranks, of the same shape, as float64 on the
        host. Collective over them."""
        total = values.detach().to("cpu", torch.float64)
        dist.all_reduce(total, group=self.host_data)
        return total

    def max_over_data(self, count: int) -> int:
        """The largest ``count`` of the data-parallel ranks. Collective over them."""
        most = torch.tensor(count)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.host_data)
        return int(most)

    def broadcast_from_last_stage(self, tensor: torch.Tensor) -> torch.Tensor:
        """The last pipeline stage's ``tensor`` on all stages; each passes one of that shape
        and dtype. Collective over them.
        """
        if self.layout.pipeline > 1:
            dist.broadcast(tensor, group_src=self.layout.pipeline - 1, group=self.pipeline_group)
        return tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedGroups:
    """The process groups that a rank has joined."""

    everyone: RankSet
    """All ranks of the run; with one world these are its groups."""
    groups: ProcessGroups
    """This rank's world."""
    world: World
    mail: Any
    """All ranks over gloo, for messages between worlds, whose sender may need hours; None where
    there is one world."""
    further: tuple[ProcessGroups, ...] = ()
    """The groups of each further policy's layout on the ranks of the first world; none on the
    others."""

    def of_policy(self, number: int) -> JoinedGroups:
        """The same with the groups of the policy of that ``agent_group`` as ``groups``."""
        return replace(self, groups=self.further[number - 1]) if number and self.further else self


def _gather(value: T, count: int, group: Any) -> list[T]:
    values: list[Any] = [None] * count
    dist.all_gather_object(values, value, group=group)
    return values


def initialize_groups(
    layout: Layout, *, seed: int, timeout_seconds: float, launch: Launch | None = None
) -> ProcessGroups:
    """``join_worlds`` for a run of one world."""
    world = World(ranks=tuple(range(layout.world_size)), layout=layout)
    return join_worlds((world,), seed=seed, timeout_seconds=timeout_seconds, launch=launch).groups


def join_worlds(
    worlds: Sequence[World],
    *,
    seed: int,
    timeout_seconds: float,
    launch: Launch | None = None,
    further: Sequence[Layout] = (),
) -> JoinedGroups:
    """Start torch.distributed with the launcher's settings and make the groups of ``worlds``,
    which have each rank once, and those of ``further`` layouts over the ranks of the first.

    CUDA devices communicate over NCCL; without one, the CPU platform is installed and everything
    uses gloo. Raises ValueError if the number of launched ranks does not fit the worlds, if the
    tensor-parallel ranks of one group are on several hosts, or if torch cannot use the machine's
    GPUs.
    """
    from megatron.core import tensor_parallel

    from ctrl_megatron.parallel import cpu_platform, gloo, host_memory

    launch = launch or read_launch()
    device = local_device(launch.local_rank)
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    else:
        cpu_platform.install_cpu_platform()
        host_memory.keep_freed_memory()
    timeout = timedelta(seconds=timeout_seconds)
    if not dist.is_initialized():
        met = rendezvous(launch, timeout)
        _require_same(worlds, met["store"], launch.rank)
        dist.init_process_group("nccl" if cuda else "gloo", timeout=timeout, **met)
    needed = sum(len(world.ranks) for world in worlds)
    if dist.get_world_size() != needed:
        raise ValueError(f"{dist.get_world_size()} ranks were started, the layout needs {needed}")
    with gloo.shared_gloo_thread():
        joined = _collect(worlds, further, device, timeout, launch.master_addr)
    set_megatron_globals(joined.groups.megatron)
    coordinates = joined.groups.place
    tensor_parallel.model_parallel_cuda_manual_seed(
        seed, tp_rank=coordinates.tp, ep_rank=coordinates.ep, etp_rank=coordinates.etp
    )
    for groups in (joined.groups, *joined.further):
        groups.hosts.require_tensor_groups_within_host(groups.layout)
    return joined


def _require_same(worlds: Sequence[World], store: Any, rank: int) -> None:
    """UserError where this rank has other worlds than rank 0, whose groups would never meet."""
    local = repr([world.ranks for world in worlds])
    if rank == 0:
        store.set("worlds", local)
    elif (first := store.get("worlds").decode()) != local:
        raise UserError(
            f"rank {rank} places its worlds on {local}, and rank 0 on {first}",
            key="placement",
            remedy="give all ranks the same settings; with placement=auto on machines of different "
            "GPUs set placement.gpu_memory",
        )


def _collect(
    worlds: Sequence[World],
    further: Sequence[Layout],
    device: torch.device,
    timeout: timedelta,
    master: str,
) -> JoinedGroups:
    me, every = dist.get_rank(), tuple(range(dist.get_world_size()))
    world = next(w for w in worlds if me in w.ranks)
    makers = [_Makers.of(w.ranks, timeout) for w in worlds]
    # All ranks make the groups of all worlds, in one order.
    made = [_groups_of(w.layout, maker) for w, maker in zip(worlds, makers, strict=True)]
    others = [_groups_of(layout, makers[0]) for layout in further]
    local_groups = made[worlds.index(world)]
    alone = len(worlds) == 1
    ours = _Makers.of(every, timeout)
    host = local_groups["host"] if alone else ours.host.create_own_group([every])
    writers = local_groups["writers"] if alone else ours.writers.create_own_group([every])
    identities = _gather(host_identity(), len(every), host)
    hosts = hosts_from_identities(identities)
    several = len(hosts.names) > 1
    hosts = hosts.with_addresses(
        _gather(connection_addresses_to(master), len(every), host) if several else []
    )
    groups = ProcessGroups(
        ranks=world.ranks,
        rank=world.ranks.index(me),
        place=world.layout.coordinates(world.ranks.index(me)),
        layout=world.layout,
        device=device,
        hosts=hosts.restricted_to_ranks(world.ranks),
        **local_groups,
    )
    everyone = RankSet(ranks=every, rank=me, device=device, hosts=hosts, host=host, writers=writers)
    mail = None if alone else GroupMaker(every, _LONGEST_MAIL, "gloo").create_own_group([every])
    own = zip(further, others, strict=True) if world is worlds[0] else ()
    return JoinedGroups(
        everyone=groups if alone else everyone,
        groups=groups,
        world=world,
        mail=mail,
        further=tuple(
            replace(groups, layout=layout, place=layout.coordinates(groups.rank), **local)
            for layout, local in own
        ),
    )


@dataclass(frozen=True, slots=True)
class _Makers:
    """Groups of different kinds are apart, because a rank's threads may use them at once."""

    devices: GroupMaker
    host: GroupMaker
    writers: GroupMaker

    @staticmethod
    def of(ranks: tuple[int, ...], timeout: timedelta) -> _Makers:
        # A rank that has written its share waits for the others; a dead rank closes its
        # connections.
        return _Makers(
            GroupMaker(ranks, timeout),
            GroupMaker(ranks, timeout, "gloo"),
            GroupMaker(ranks, _LONGEST_WRITE, "gloo"),
        )


def _groups_of(layout: Layout, make: _Makers) -> dict[str, Any]:
    every = [tuple(range(layout.world_size))]
    return {
        "host": make.host.create_own_group(every),
        "host_model": make.host.create_own_group(layout.rank_sets_along("tp", "cp", "pp")),
        "host_data": make.host.create_own_group(layout.rank_sets_along("dp")),
        "writers": make.writers.create_own_group(every),
        "megatron": megatron_groups(layout, make.devices),
        "shards": make.devices.create_own_group(layout.rank_sets_along("shard")),
        "copies": make.devices.create_own_group(layout.rank_sets_along("copy")),
        "alone": make.devices.create_own_group((number,) for number in range(layout.world_size)),
    }


class GroupMaker:
    """Makes process groups of a world, one for each set of its ranks. All ranks of the run ask for
    the same, in one order."""

    def __init__(
        self, world: Sequence[int], timeout: timedelta, backend: str | None = None
    ) -> None:
        """``world`` has the run's numbers of its ranks; ``backend`` None takes that of the
        devices."""
        self._world, self._timeout, self._backend = world, timeout, backend
        self._made: dict[tuple[int, ...], Any] = {}

    def create_own_group(self, sets: Iterable[tuple[int, ...]]) -> Any:
        """The group of that one of the disjoint ``sets``, which have ranks' numbers in the world,
        that has this rank; None if none has. Collective over the world."""
        local_group = None
        for numbers in sets:
            ranks = tuple(self._world[number] for number in numbers)
            if ranks not in self._made:
                self._made[ranks] = dist.new_group(
                    list(ranks), backend=self._backend, timeout=self._timeout
                )
            local_group = self._made[ranks] if dist.get_rank() in ranks else local_group
        return local_group


def megatron_groups(layout: Layout, maker: GroupMaker) -> ProcessGroupCollection:
    """This rank's groups under Megatron's names."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    def along(*axes: Axis) -> Any:
        return maker.create_own_group(layout.rank_sets_along(*axes))

    stages = layout.rank_sets_along("pp")
    return ProcessGroupCollection(
        tp=along("tp"),
        cp=along("cp"),
        dp=along("dp"),
        pp=maker.create_own_group(stages),
        mp=along("tp", "pp"),
        tp_cp=along("tp", "cp"),
        dp_cp=along("cp", "dp"),
        tp_dp_cp=along("tp", "cp", "dp"),
        ep=along("ep"),
        expt_tp=along("etp"),
        expt_dp=along("edp"),
        tp_ep=along("etp", "ep"),
        tp_ep_pp=along("etp", "ep", "pp"),
        # The optimizer's state is divided over all replicas.
        intra_dp_cp=along("cp", "dp"),
        intra_expt_dp=along("edp"),
        intra_dist_opt=along("tp", "cp", "dp", "pp"),
        inter_dist_opt=None,
        hcp=None,
        # The stages with the embedding and with the output layer; with one stage both.
        embd=maker.create_own_group(tuple(dict.fromkeys((s[0], s[-1]))) for s in stages),
        pos_embd=maker.create_own_group(stage[:1] for stage in stages),
    )


def set_megatron_globals(groups: ProcessGroupCollection) -> None:
    """Make ``groups`` Megatron's global state too, for its code that does not pass on the groups
    that it was given: the padding mask under sequence parallelism, for example."""
    from megatron.core import parallel_state

    for name, group in (
        ("_TENSOR_MODEL_PARALLEL_GROUP", groups.tp),
        ("_PIPELINE_MODEL_PARALLEL_GROUP", groups.pp),
        ("_CONTEXT_PARALLEL_GROUP", groups.cp),
        ("_DATA_PARALLEL_GROUP", groups.dp),
        ("_DATA_PARALLEL_GROUP_WITH_CP", groups.dp_cp),
        ("_EXPERT_MODEL_PARALLEL_GROUP", groups.ep),
        ("_EXPERT_TENSOR_PARALLEL_GROUP", groups.expt_tp),
    ):
        if not hasattr(parallel_state, name):
            raise RuntimeError(f"this megatron-core has no {name}; use 0.16.1")
        setattr(parallel_state, name, group)
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()


@contextmanager
def as_default_group(group: Any) -> Iterator[None]:
    """Make ``group`` torch's group of all ranks meanwhile, for code of Megatron's that meets all
    ranks of a run: ``get_megatron_optimizer`` compares the parameter groups of every rank, and
    other worlds have other models or none."""
    member = dist.distributed_c10d.GroupMember
    everyone, member.WORLD = member.WORLD, group
    try:
        yield
    finally:
        member.WORLD = everyone


def shutdown_groups() -> None:
    """Leave all groups; safe to call when none exist."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()

"""Process groups; this file alone creates them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ctrl_megatron.config.environment import Launch, read_launch
from ctrl_megatron.parallel.devices import local_device
from ctrl_megatron.parallel.hosts import Hosts, host_identity, number_hosts, way_to
from ctrl_megatron.parallel.layout import Coordinates, Layout
from ctrl_megatron.parallel.meeting import rendezvous

T = TypeVar("T")
_LONGEST_WRITE = timedelta(hours=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroups:
    """This rank's place in the layout and its process groups."""

    layout: Layout
    rank: int
    place: Coordinates
    device: torch.device
    hosts: Hosts
    tensor: Any
    pipeline: Any
    context: Any
    """The ranks that share this rank's rows and have the same part of the weights."""
    alone: Any
    """This rank; for code of Megatron's that would cut sequences over context ranks itself."""
    host: Any
    """All ranks over gloo: for objects, barriers and host memory, whatever the devices are."""
    writers: Any
    """All ranks over gloo, for the threads that write checkpoints beside the training."""
    host_model: Any
    """The ranks of this model copy, which have this rank's data index, over gloo."""
    host_data: Any
    """The ranks that differ from this rank in the data index at most, over gloo."""

    @property
    def is_leader(self) -> bool:
        """True on the first rank of a model copy, which calls engines and sandboxes for it."""
        return self.place.tp == self.place.cp == self.place.pp == 0

    @property
    def is_first(self) -> bool:
        """True on global rank 0."""
        return self.rank == 0

    @property
    def is_first_here(self) -> bool:
        """True on the rank that acts for its host."""
        return self.rank == self.hosts.first_rank(self.here)

    @property
    def here(self) -> int:
        """The number of this rank's host."""
        return self.hosts.of_rank[self.rank]

    @property
    def is_last_stage(self) -> bool:
        """True on the ranks with the model's output layer."""
        return self.place.pp == self.layout.pipeline - 1

    def from_leader(self, value: T | None) -> T:
        """The leader's ``value`` on every rank of this model copy (pickled, over gloo)."""
        if self.layout.model_size == 1:
            return value  # type: ignore[return-value]
        box = [value]
        source = self.layout.rank(tp=0, pp=0, dp=self.place.dp)
        dist.broadcast_object_list(box, src=source, group=self.host_model)
        return box[0]  # type: ignore[return-value]

    def from_first(self, value: T | None) -> T:
        """Rank 0's ``value`` on every rank."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.host)
        return box[0]  # type: ignore[return-value]

    def from_all(self, value: T) -> list[T]:
        """One value per rank, in rank order, on every rank."""
        return _gather(value, self.layout.world_size, self.host)

    def from_data_ranks(self, value: T) -> list[T]:
        """One value per data-parallel rank, in their order, on every rank."""
        return _gather(value, self.layout.data, self.host_data)

    def from_here(self, value: T) -> dict[int, T]:
        """The values of this host's ranks by rank, ascending. Collective over all ranks."""
        values = enumerate(self.from_all(value))
        return {rank: given for rank, given in values if self.hosts.of_rank[rank] == self.here}

    def from_first_here(self, value: T) -> T:
        """The ``value`` of the first rank of this rank's host. Collective over all ranks."""
        return next(iter(self.from_here(value).values()))

    def sum_over_data(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of ``values`` over the data-parallel ranks (float64 host arithmetic)."""
        total = values.detach().to("cpu", torch.float64)
        dist.all_reduce(total, group=self.host_data)
        return total

    def most_over_data(self, count: int) -> int:
        """The largest ``count`` of the data-parallel ranks."""
        most = torch.tensor(count)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.host_data)
        return int(most)

    def from_last_stage(self, tensor: torch.Tensor) -> torch.Tensor:
        """The last pipeline stage's ``tensor`` on all stages; each passes one of that shape."""
        if self.layout.pipeline > 1:
            source = self.layout.along(self.rank, "pp")[-1]
            dist.broadcast(tensor, src=source, group=self.pipeline)
        return tensor

    def on_any(self, *flags: bool) -> tuple[bool, ...]:
        """For each flag whether it is set on any rank. Collective over all ranks."""
        raised = torch.tensor([int(flag) for flag in flags])
        dist.all_reduce(raised, op=dist.ReduceOp.MAX, group=self.host)
        return tuple(map(bool, raised.tolist()))

    def barrier(self) -> None:
        """Wait for all ranks (host side)."""
        dist.barrier(group=self.host)


def _gather(value: T, count: int, group: Any) -> list[T]:
    values: list[Any] = [None] * count
    dist.all_gather_object(values, value, group=group)
    return values


def initialize(
    layout: Layout, *, seed: int, timeout_seconds: float, launch: Launch | None = None
) -> ProcessGroups:
    """Start torch.distributed with the launcher's settings and build Megatron's groups.

    CUDA devices communicate over NCCL; without one, the CPU platform is installed and everything
    uses gloo. Raises ValueError if the number of launched ranks does not fit the layout, if the
    tensor-parallel ranks of one group are on several hosts, or if torch cannot use the machine's
    GPUs.
    """
    from megatron.core import parallel_state, tensor_parallel

    from ctrl_megatron.parallel import cpu_platform, gloo, host_memory

    launch = launch or read_launch()
    device = local_device(launch.local_rank)
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    else:
        cpu_platform.install()
        host_memory.keep()
    timeout = timedelta(seconds=timeout_seconds)
    if not dist.is_initialized():
        dist.init_process_group(
            "nccl" if cuda else "gloo", timeout=timeout, **rendezvous(launch, timeout)
        )
    if dist.get_world_size() != layout.world_size:
        raise ValueError(
            f"{dist.get_world_size()} ranks were started, the layout needs {layout.world_size}"
        )
    virtual = layout.virtual_pipeline if layout.virtual_pipeline > 1 else None
    with gloo.one_loop():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor,
            context_parallel_size=layout.context,
            pipeline_model_parallel_size=layout.pipeline,
            virtual_pipeline_model_parallel_size=virtual,
            expert_model_parallel_size=layout.expert,
            expert_tensor_parallel_size=layout.expert_tensor,
            distributed_timeout_minutes=max(1, int(timeout_seconds // 60)),
            create_gloo_process_groups=True,
        )
        groups = _collect(layout, device, timeout, launch.master_addr)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    groups.hosts.require_whole_tensor_groups(layout)
    return groups


def _collect(
    layout: Layout, device: torch.device, timeout: timedelta, master: str
) -> ProcessGroups:
    from megatron.core import parallel_state

    rank = dist.get_rank()
    place = layout.coordinates(rank)
    every = range(layout.world_size)
    host_model = host_data = None
    for dp in range(layout.data):
        ranks = layout.holders("dense", (("dp", dp),))
        group = dist.new_group(list(ranks), backend="gloo", timeout=timeout)
        host_model = group if rank in ranks else host_model
    for first in layout.holders("dense", (("dp", 0),)):
        ranks = layout.along(first, "dp")
        group = dist.new_group(list(ranks), backend="gloo", timeout=timeout)
        host_data = group if rank in ranks else host_data
    host = dist.new_group(list(every), backend="gloo", timeout=timeout)
    # A rank that has written its share waits for the others; a dead rank closes its connections.
    writers = dist.new_group(list(every), backend="gloo", timeout=_LONGEST_WRITE)
    identities = _gather(host_identity(), layout.world_size, host)
    hosts = number_hosts(identities)
    alone = len(hosts.names) == 1
    hosts = hosts.reached([] if alone else _gather(way_to(master), layout.world_size, host))
    return ProcessGroups(
        layout=layout,
        rank=rank,
        place=place,
        device=device,
        hosts=hosts,
        tensor=parallel_state.get_tensor_model_parallel_group(),
        pipeline=parallel_state.get_pipeline_model_parallel_group(),
        context=parallel_state.get_context_parallel_group(),
        alone=dist.new_group([rank], backend="gloo", use_local_synchronization=True),
        host=host,
        writers=writers,
        host_model=host_model,
        host_data=host_data,
    )


def shutdown() -> None:
    """Leave all groups; safe to call when none exist."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()

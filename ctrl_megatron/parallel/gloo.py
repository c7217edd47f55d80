"""Additions to torch's gloo: fewer idle threads and copies, and parts of unequal sizes.

Every process group has a thread that polls for messages a hundred times a second, and a rank is in
up to some twenty groups. An engine on the same cores is interrupted thousands of
times a second and draws 7 % fewer tokens (``docs/experiments/engines.md``). ``shared_gloo_thread``
lets the groups of a rank share the thread of the first one.

Gloo has no reduce-scatter and no gather into one tensor. Torch copies the whole buffer (gradients
of all weights in float32), sums the copy and copies the requested part back.
``install_in_place_reduction`` makes Megatron sum the buffer itself, of which its shard is a view
already. FSDP2's shard is a tensor of its own: with ``OrderedReduceScatter`` a rank gets only the
others' parts of that, and adds them.

Gloo's collectives also require equal parts. The tensor ranks of an expert exchange as many tokens
as were sent to each of them, for which ``install_uneven_collectives`` uses broadcasts and sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


@contextmanager
def shared_gloo_thread() -> Iterator[None]:
    """Gloo groups that are created within the context use the thread of the default group.

    The default group must exist; nothing happens if it has no gloo.
    """
    original: Any = distributed_c10d.ProcessGroupGloo
    try:
        devices = dist.group.WORLD._get_backend(torch.device("cpu")).options._devices  # type: ignore[union-attr]
    except RuntimeError:
        yield
        return

    class OnTheSameLoop(original):  # type: ignore[misc,valid-type]
        """The options of a group, as torch makes them from a time-out."""

        def __init__(self, store: Any, rank: int, size: int, *, timeout: timedelta) -> None:
            options = original._Options()
            options._devices, options._timeout = devices, timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = OnTheSameLoop  # type: ignore[misc]
    try:
        yield
    finally:
        distributed_c10d.ProcessGroupGloo = original  # type: ignore[misc]


def install_in_place_reduction() -> None:
    """Make Megatron's distributed optimizer sum gradients and gather weights in place."""
    from megatron.core.distributed import param_and_grad_buffer

    for name, function in (
        ("dist_reduce_scatter_func", _sum),
        ("dist_all_gather_func", _gather),
        ("_coalescing_manager", _together),
    ):
        if not hasattr(param_and_grad_buffer, name):
            raise RuntimeError(f"this megatron-core has no {name}; use 0.16.1")
        setattr(param_and_grad_buffer, name, function)


class _Works(list[Any]):
    """Running operations; ``wait`` returns when all of them are done."""

    def wait(self) -> None:
        for work in self:
            work.wait()


_started = _Works()
"""The operations of the open ``_together``."""


@contextmanager
def _together(group: Any, async_ops: bool = False) -> Iterator[_Works]:
    """Torch's coalescing manager, extended by our operations in place."""
    global _started
    _started = works = _Works()
    with distributed_c10d._coalescing_manager(group, async_ops=async_ops) as others:
        yield works
    works.append(others)
    if not async_ops:
        works.wait()


def _sum(shard: torch.Tensor, buffer: torch.Tensor, op: Any, group: Any, async_op: bool) -> None:
    """Replace ``buffer``, of which ``shard`` is a part, by the sum over the ranks."""
    options = distributed_c10d.AllreduceOptions()
    options.reduceOp = op
    # ``dist.all_reduce`` would leave it to the manager, which copies.
    _started.append(group.allreduce([buffer], options))


def _gather(buffer: torch.Tensor, shard: torch.Tensor, group: Any, async_op: bool) -> None:
    """Send every rank's ``shard``, its part of ``buffer``, to the others."""
    ranks = dist.get_process_group_ranks(group)
    for rank, part in zip(ranks, buffer.chunk(len(ranks)), strict=True):
        _started.append(dist.broadcast(part, src=rank, group=group, async_op=True))


class OrderedReduceScatter:
    """For ``FSDPModule.set_custom_reduce_scatter``: the sum over ranks, each of which keeps a part
    of it."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A tensor of its own for every call."""
        return torch.empty(tuple(size), dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Fill ``output_tensor`` with this rank's part, added in the order of the ranks."""
        if op != dist.ReduceOp.SUM or async_op:
            raise ValueError(f"only sums that are waited for, not {op}")
        group_rank, parts = group.rank(), input_tensor.chunk(group.size())
        sent: list[Any] = [
            dist.isend(part, group=group, group_dst=rank)
            for rank, part in enumerate(parts)
            if rank != group_rank
        ]
        received = {rank: torch.empty_like(output_tensor) for rank in range(group.size())}
        received[group_rank] = parts[group_rank]
        for rank, part in received.items():
            if rank != group_rank:
                dist.recv(part, group=group, group_src=rank)
        # In one order, so that the sum does not depend on which part arrives first.
        output_tensor.copy_(received[0])
        for rank in range(1, group.size()):
            output_tensor += received[rank]
        for work in sent:
            work.wait()


def install_uneven_collectives() -> None:
    """Let Megatron gather and reduce-scatter rows of which the ranks have different numbers."""
    from megatron.core.tensor_parallel import mappings

    gather, scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gathered(
        rows: torch.Tensor, group: Any, sizes: list[int] | None = None, buffered: bool = False
    ) -> torch.Tensor:
        if sizes is None or group.size() == 1:
            return gather(rows, group, sizes, buffered)
        whole = rows.new_empty((sum(sizes), *rows.shape[1:]))
        parts = whole.split(sizes)
        parts[group.rank()].copy_(rows)
        for rank, part in zip(dist.get_process_group_ranks(group), parts, strict=True):
            dist.broadcast(part, src=rank, group=group)
        return whole

    def scattered(
        rows: torch.Tensor, group: Any, sizes: list[int] | None = None, buffered: bool = False
    ) -> torch.Tensor:
        if sizes is None or group.size() == 1:
            return scatter(rows, group, sizes, buffered)
        parts = rows.split(sizes)
        local = parts[group.rank()].clone()
        for rank, part in enumerate(parts):
            # Gloo also writes into what the others give.
            summand = local if rank == group.rank() else part.clone()
            dist.reduce(summand, dst=dist.get_global_rank(group, rank), group=group)
        return local

    mappings._gather_along_first_dim = gathered
    mappings._reduce_scatter_along_first_dim = scattered

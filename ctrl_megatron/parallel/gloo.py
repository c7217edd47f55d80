"""What torch's gloo spends where nothing is sent, and what it copies to send it.

Every process group has a thread that looks for messages a hundred times a second, and Megatron
makes some forty groups on each rank: thousands of times a second an engine on the same cores is
interrupted, and draws 7 % fewer tokens (``docs/experiments/engines.md``). ``one_loop`` lets the
groups of a rank share the first one's.

And gloo has no reduce-scatter and no gather into one tensor of its own: it copies the whole buffer,
gradients of all weights in float32, sums the copy and copies back what was asked for.
``sum_in_place`` makes Megatron sum the buffer itself, of which its shard is a view already.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


@contextmanager
def one_loop() -> Iterator[None]:
    """Gloo groups that are made meanwhile use the connections of the default group's thread.

    The default group exists; nothing happens where it has no gloo.
    """
    own: Any = distributed_c10d.ProcessGroupGloo
    try:
        devices = dist.group.WORLD._get_backend(torch.device("cpu")).options._devices  # type: ignore[union-attr]
    except RuntimeError:
        yield
        return

    class OnTheSameLoop(own):  # type: ignore[misc,valid-type]
        """As torch makes it from a time-out."""

        def __init__(self, store: Any, rank: int, size: int, *, timeout: timedelta) -> None:
            options = own._Options()
            options._devices, options._timeout = devices, timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = OnTheSameLoop  # type: ignore[misc]
    try:
        yield
    finally:
        distributed_c10d.ProcessGroupGloo = own  # type: ignore[misc]


def sum_in_place() -> None:
    """Let Megatron's distributed optimizer sum gradients and gather weights so, from now on."""
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
    """What runs; ``wait`` returns when all of it is done."""

    def wait(self) -> None:
        for work in self:
            work.wait()


_started = _Works()
"""Of the ``_together`` that is open."""


@contextmanager
def _together(group: Any, async_ops: bool = False) -> Iterator[_Works]:
    """Torch's coalescing manager, which has its part in what else is sent meanwhile."""
    global _started
    _started = works = _Works()
    with distributed_c10d._coalescing_manager(group, async_ops=async_ops) as others:
        yield works
    works.append(others)
    if not async_ops:
        works.wait()


def _sum(shard: torch.Tensor, buffer: torch.Tensor, op: Any, group: Any, async_op: bool) -> None:
    """``shard``, a part of ``buffer``, becomes the ranks' sum; so does the rest."""
    options = distributed_c10d.AllreduceOptions()
    options.reduceOp = op
    # ``dist.all_reduce`` would leave it to the manager, which copies.
    _started.append(group.allreduce([buffer], options))


def _gather(buffer: torch.Tensor, shard: torch.Tensor, group: Any, async_op: bool) -> None:
    """Every rank's ``shard``, its part of ``buffer``, reaches the others."""
    ranks = dist.get_process_group_ranks(group)
    for rank, part in zip(ranks, buffer.chunk(len(ranks)), strict=True):
        _started.append(dist.broadcast(part, src=rank, group=group, async_op=True))

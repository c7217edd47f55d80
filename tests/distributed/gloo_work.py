"""The work of a rank of ``test_gloo``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def collectives(rank: int, size: int, elements: int) -> dict[str, Any]:
    """Megatron's collectives of a bucket, with a sum that has nothing to do with it among them."""
    from megatron.core.distributed import param_and_grad_buffer as megatron

    from ctrl_megatron.parallel.gloo import OrderedReduceScatter
    from ctrl_megatron.parallel.groups import initialize_groups
    from ctrl_megatron.parallel.layout import Layout

    initialize_groups(Layout(data=size), seed=1, timeout_seconds=60)
    group = dist.group.WORLD
    names = [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]
    found: dict[str, Any] = {"loops": names.count("gloo_tcp_loop")}
    sums = found["sums"] = []
    for is_async in (True, False):
        buffer = torch.arange(elements, dtype=torch.float32) * (rank + 1)
        shard, other = buffer.chunk(size)[rank], torch.full((1 << 20,), float(rank))
        with megatron._coalescing_manager(group, async_ops=is_async) as works:
            megatron.dist_reduce_scatter_func(
                shard, buffer, op=dist.ReduceOp.SUM, group=group, async_op=is_async
            )
            dist.all_reduce(other, group=group, async_op=is_async)
        if is_async:
            works.wait()
        sums.append((shard.tolist(), other.unique().tolist()))
    whole = torch.full((elements,), -1.0)
    own = whole.chunk(size)[rank].fill_(rank)
    with megatron._coalescing_manager(group, async_ops=False):
        megatron.dist_all_gather_func(whole, own, group=group, async_op=False)
    found["gathered"] = whole.tolist()
    scatter, buffer = (
        OrderedReduceScatter(),
        torch.arange(elements, dtype=torch.float32) * (rank + 1),
    )
    part = scatter.allocate((elements // size,), dtype=torch.float32, device=buffer.device)
    scatter(part, buffer, group, dist.ReduceOp.SUM)
    found["part"] = part.tolist()
    return found

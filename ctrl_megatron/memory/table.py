"""A memory budget as text."""

from __future__ import annotations

from ctrl_megatron.config import Config
from ctrl_megatron.memory.budget import RESERVE, MemoryBudget, format_gib
from ctrl_megatron.memory.engine import GIB, EngineMemoryUse

_ITEMS = 5


def memory_table(config: Config, budget: MemoryBudget, *, proxy_is_unknown: str = "") -> str:
    """A line per phase with its fullest GPU, then lines for the engines and the host;
    ``proxy_is_unknown`` is the reason why the proxy's own engines have no plan."""
    trainer = config.trainer
    ranks = trainer.nnodes * trainer.n_gpus_per_node
    own = config.engine_gpus_per_node * trainer.nnodes if budget.engine is not None else 0
    alone = f", and {own} of engines alone" if own else ""
    width = max(14, *(len(use.phase) for use in budget.phases))
    lines = [
        f"{ranks} GPUs of {format_gib(budget.gpu_memory)} on {trainer.nnodes} hosts{alone}; "
        f"{format_gib(budget.limit_bytes)} of each may be used, {RESERVE:.0%} stay free",
        "",
        f"{'phase':<{width}} {'GiB':>6}  {'rank':>5}  largest",
    ]
    for use in budget.phases:
        mark = " " if use.total <= budget.limit_bytes else "!"
        lines.append(
            f"{use.phase:<{width}} {use.total / GIB:>6.1f}{mark} {use.rank:>5}  "
            f"{use.describe_largest_items(_ITEMS)}"
        )
    lines += [
        "",
        f"fullest: {budget.fullest_phase.phase}, rank {budget.fullest_phase.rank} (pipeline stage ",
    ]
    lines[-1] += f"{budget.fullest_phase.stage}), {format_gib(budget.fullest_phase.total)}"
    if budget.engine is not None:
        engine, received = budget.engine, ""
        if engine.received:
            received = f", {format_gib(engine.received)} for arriving weights"
        lines.append(f"engine: {_cache(engine)}{received}")
    if budget.engine is not None and config.has_proxy_engines:
        gpus = config.actor_rollout_ref.proxy.engine.n_gpus_per_node or 0
        more, of = ("", " with engines") if config.placement.rollout else ("more ", "")
        where = f"proxy's engines: {gpus} {more}GPUs of each host{of}"
        if (proxy := budget.proxy) is not None:
            lines.append(f"{where}, {format_gib(proxy.awake_bytes)} of each; {_cache(proxy)}")
        else:
            lines.append(f"{where}, whose memory is not planned: {proxy_is_unknown}")
    host = ", ".join(f"{item} {format_gib(size)}" for item, size in budget.host.items())
    lines.append(f"host {budget.host_number}: {format_gib(sum(budget.host.values()))} ({host})")
    lines.append(
        f"checkpoint: at most {format_gib(budget.checkpoint_per_rank)} written by one rank"
    )
    return "\n".join(lines)


def _cache(engine: EngineMemoryUse) -> str:
    sequences = engine.kv_cache_tokens // engine.longest
    return (
        f"key-value cache {format_gib(max(0, engine.kv_cache_bytes))} of each GPU, "
        f"{engine.kv_cache_tokens} tokens, {sequences} sequences of {engine.longest}"
    )

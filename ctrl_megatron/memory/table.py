"""A memory budget as text."""

from __future__ import annotations

from ctrl_megatron.config import Config
from ctrl_megatron.memory.budget import RESERVE, MemoryBudget, gib
from ctrl_megatron.memory.engine import GIB

_ITEMS = 5


def table(config: Config, budget: MemoryBudget) -> str:
    """A line per phase with its fullest GPU, then lines for the engine and the host."""
    trainer = config.trainer
    ranks = trainer.nnodes * trainer.n_gpus_per_node
    lines = [
        f"{ranks} GPUs of {gib(budget.gpu_memory)} on {trainer.nnodes} hosts; "
        f"{gib(budget.limit)} of each may be used, {RESERVE:.0%} stay free",
        "",
        f"{'phase':<14} {'GiB':>6}  {'rank':>5}  largest",
    ]
    for use in budget.phases:
        mark = " " if use.total <= budget.limit else "!"
        lines.append(
            f"{use.phase:<14} {use.total / GIB:>6.1f}{mark} {use.rank:>5}  {use.largest(_ITEMS)}"
        )
    lines += ["", f"fullest: {budget.fullest.phase}, rank {budget.fullest.rank} (pipeline stage "]
    lines[-1] += f"{budget.fullest.stage}), {gib(budget.fullest.total)}"
    if (engine := budget.engine) is not None:
        sequences = engine.cache_tokens // config.max_model_len
        lines.append(
            f"engine: key-value cache {gib(max(0, engine.cache))} of each GPU, "
            f"{engine.cache_tokens} tokens, {sequences} sequences of {config.max_model_len}"
        )
    host = ", ".join(f"{item} {gib(size)}" for item, size in budget.host.items())
    lines.append(f"host {budget.host_number}: {gib(sum(budget.host.values()))} ({host})")
    lines.append(f"checkpoint: at most {gib(budget.checkpoint_per_rank)} written by one rank")
    return "\n".join(lines)

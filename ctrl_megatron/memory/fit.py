"""Checks whether a configuration fits its GPUs, and finds changes that make it fit. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ctrl_megatron.config import Config, Purpose
from ctrl_megatron.config.actor_rollout_ref import EngineConfig
from ctrl_megatron.config.keys import value_at_key
from ctrl_megatron.memory.activations import Kernels
from ctrl_megatron.memory.budget import RESERVE, MemoryBudget, format_gib, memory_budget
from ctrl_megatron.memory.engine import CUDA_CONTEXT
from ctrl_megatron.memory.shapes import ModelShapes

Change = tuple[str, Any]
"""A key and its new value."""
_ACTOR = "actor_rollout_ref.actor."
_MEGATRON, _COMPUTE = _ACTOR + "megatron.", _ACTOR + "compute."
_ROLLOUT = "actor_rollout_ref.rollout."
_PROXY = "actor_rollout_ref.proxy.engine."
_SMALLEST_SHARE, _SHARE_STEPS = 0.1, 20


def phase_over_limit(config: Config, budget: MemoryBudget) -> str | None:
    """The phase that does not fit, with its largest items; None if all fit."""
    dedicated = config.actor_rollout_ref.rollout.placement == "dedicated"
    for name, prefix, engine, alone in (
        ("engine", _ROLLOUT, budget.engine, dedicated),
        ("proxy's engine", _PROXY, budget.proxy, True),
    ):
        if engine is None:
            continue
        if engine.kv_cache_tokens < engine.longest:
            share = value_at_key(config, f"{prefix}gpu_memory_utilization")
            return (
                f"start: {name}: {prefix}gpu_memory_utilization={share} of "
                f"{format_gib(budget.gpu_memory)} leaves the key-value cache room for "
                f"{engine.kv_cache_tokens} tokens beside weights {format_gib(engine.weights)}, a "
                f"sequence of max_model_len needs {engine.longest}"
            )
        # On ranks of their own the rank has a context beside the engine's.
        rank = CUDA_CONTEXT if config.placement.rollout else 0
        needed = engine.awake_bytes + engine.reload + rank
        if alone and needed > budget.gpu_memory:
            beside = engine.outside + engine.received + engine.reload + rank
            return (
                f"start: {name} needs {format_gib(needed)} on a GPU of "
                f"its own, which has {format_gib(budget.gpu_memory)}: "
                f"{prefix}gpu_memory_utilization of it and {format_gib(beside)} for "
                "its context, buffers and arriving weights"
            )
    use = budget.fullest_phase
    if use.total <= budget.limit_bytes:
        return None
    return (
        f"{use.phase} needs {format_gib(use.total)} on rank {use.rank} "
        f"(pipeline stage {use.stage}), a GPU has {format_gib(budget.gpu_memory)} and "
        f"{RESERVE:.0%} of it must stay free; largest: {use.describe_largest_items()}"
    )


def describe_misfit(
    config: Config,
    shapes: ModelShapes,
    *,
    gpu_memory: int,
    purpose: Purpose = "rl",
    kernels: Kernels = "te",
) -> str | None:
    """Why a configuration does not fit GPUs of ``gpu_memory`` bytes, in one line that names the
    phase, the largest items and the remedy; None if it fits."""

    def budget_of(changed: Config) -> MemoryBudget:
        return memory_budget(
            changed, shapes, gpu_memory=gpu_memory, purpose=purpose, kernels=kernels
        )

    if (wrong := phase_over_limit(config, budget_of(config))) is None:
        return None
    return f"{wrong}; {_remedy(config, purpose, lambda c: not phase_over_limit(c, budget_of(c)))}"


def _remedy(config: Config, purpose: Purpose, fits: Callable[[Config], bool]) -> str:
    """Changes of keys that make the configuration fit: each alone, or the fewest together."""
    changes = list(_changes(config, purpose))
    alone = {key: value for key, value in reversed(changes) if fits(_changed(config, key, value))}
    if alone:
        words = [f"{key}={_text(value)}" for key, value in reversed(alone.items())]
        return "it fits with " + ", or with ".join(words[:3])
    chosen: dict[str, Any] = {}
    for key, value in changes:
        chosen[key] = value
        if fits(with_changed_keys(config, chosen)):
            for key in list(chosen):
                fewer = {k: v for k, v in chosen.items() if k != key}
                if fits(with_changed_keys(config, fewer)):
                    chosen = fewer
            return "it fits with " + " ".join(f"{k}={_text(v)}" for k, v in chosen.items())
    proxy = f", {_PROXY}n_gpus_per_node" if config.has_proxy_engines else ""
    few = "no offloading, recomputation or smaller share is enough: "
    if config.actor_rollout_ref.actor.strategy == "fsdp":
        return f"{few}take more GPUs"
    return (
        f"{few}raise "
        f"{_MEGATRON}tensor_model_parallel_size or pipeline_model_parallel_size{proxy}, or take "
        "more GPUs"
    )


def _changes(config: Config, purpose: Purpose) -> Iterator[Change]:
    """Changes that may help, the least harmful to speed first."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    if purpose == "rl":
        for name in ("grad_offload", "optimizer_offload", "param_offload"):
            if not getattr(actor.compute, name):
                yield _COMPUTE + name, True
        if not rollout.free_cache_engine:
            yield _ROLLOUT + "free_cache_engine", True
    budget = _ACTOR + "ppo_max_token_len_per_gpu"
    longest = config.sft.max_length if purpose == "sft" else config.max_critique_sequence_tokens
    longest = -(-longest // actor.megatron.context_parallel_size)
    tokens = value_at_key(config, budget)
    while (tokens := tokens // 2) >= longest:
        yield budget, tokens
    if actor.compute.recompute_granularity != "full":
        yield _COMPUTE + "recompute_granularity", "full"
    if not actor.compute.optimizer_cpu_offload:
        yield _COMPUTE + "optimizer_cpu_offload", True
    own = rollout.log_prob_max_token_len_per_gpu
    tokens = actor.ppo_max_token_len_per_gpu if own is None else own
    while purpose == "rl" and (tokens := tokens // 2) >= longest:
        yield _ROLLOUT + "log_prob_max_token_len_per_gpu", tokens
    if purpose == "rl":
        yield from _shares(_ROLLOUT, rollout)
    if config.has_proxy_engines:
        own = config.actor_rollout_ref.proxy.engine
        yield from _shares(_PROXY, own)
        gpus = own.n_gpus_per_node or 0
        for size in range(own.tensor_model_parallel_size + 1, gpus + 1):
            if gpus % size == 0:
                yield _PROXY + "tensor_model_parallel_size", size


def _shares(prefix: str, keys: EngineConfig) -> Iterator[Change]:
    for step in range(_SHARE_STEPS - 1, int(_SMALLEST_SHARE * _SHARE_STEPS), -1):
        share = step / _SHARE_STEPS
        if share != keys.gpu_memory_utilization:
            yield prefix + "gpu_memory_utilization", share


def with_changed_keys(config: Config, changes: Mapping[str, Any]) -> Config:
    for key, value in changes.items():
        config = _changed(config, key, value)
    return config


def _changed(config: Any, key: str, value: Any) -> Any:
    """The configuration with a new value of a dotted key."""
    name, _, below = key.partition(".")
    if below:
        value = _changed(getattr(config, name), below, value)
    if isinstance(config, Config):
        return config.replace_groups(**{name: value})
    return dataclasses.replace(config, **{name: value})


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

"""Whether the engines get adapters by themselves or weights with the adapters merged into them."""

from __future__ import annotations

from collections.abc import Iterator

from ctrl_megatron.config.schema import Config
from ctrl_megatron.engine_kinds import ENGINES

CUT_TRANSPORTS = ("shards", "cuda_ipc", "nccl")
"""The values of ``rollout.weight_transport`` with which a worker gets only its part of a tensor."""
_P, _R = "actor_rollout_ref.proxy.", "actor_rollout_ref.rollout."


def pushes_adapters(config: Config) -> bool:
    """``rollout.adapter_push``; where it is null, whether the engines can take adapters alone."""
    asked = config.actor_rollout_ref.rollout.adapter_push
    return next(adapter_push_problems(config), None) is None if asked is None else asked


def adapter_push_problems(config: Config) -> Iterator[str]:
    """Why the engines cannot take adapters alone, with the remedy."""
    family, rollout = config.actor_rollout_ref, config.actor_rollout_ref.rollout
    key, kind = f"{_R}adapter_push=true", ENGINES[rollout.name]
    if family.model.lora_rank == 0:
        yield f"{key} needs adapters; set actor_rollout_ref.model.lora_rank, or leave it out"
    if not kind.adapters:
        able = " or ".join(name for name, one in ENGINES.items() if one.adapters)
        yield f"{key} is not possible with {_R}name={rollout.name}; use {able}, or leave it out"
    if rollout.weight_transport in CUT_TRANSPORTS:
        yield f"{key} sends whole adapters; use {_R}weight_transport=shared_memory"
    if rollout.quantization is not None:
        yield (
            f"{_R}quantization={rollout.quantization} replaces whole weights; leave "
            f"{_R}adapter_push out"
        )
    if rollout.update_in_flight and not kind.changes_adapters_while_drawing:
        yield (
            f"{_R}update_in_flight changes weights while completions are drawn, and {kind.title} "
            f"changes adapters only while it draws none; leave {key} out"
        )
    if rollout.uses_whole_hosts(config.trainer.n_gpus_per_node, config.trainer.nnodes):
        yield (
            f"{key} writes adapters on the host that serves an engine, and "
            f"{_R}tensor_model_parallel_size={rollout.tensor_model_parallel_size} needs several; "
            "leave it out"
        )
    if 0 in config.engine_owners[1:]:
        yield (
            f"{key} lets engines keep the weights of actor_rollout_ref.model.path, and others "
            "of policies draw with them; give those engines of their own, or leave it out"
        )
    own, proxy = family.model.path, family.proxy.model.path
    if config.proxy_shares_engines and proxy not in (None, own):
        yield (
            f"{key} lets engines keep the weights of actor_rollout_ref.model.path, which are not "
            f"those of {_P}model.path={proxy}; set {_P}kind=engine, or leave it out"
        )

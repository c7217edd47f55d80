"""How fast a step was, compared with what the devices could do."""

from __future__ import annotations

import sys

import torch
from tensordict import TensorDict

from ctrl_megatron.config import Config
from ctrl_megatron.metrics import (
    device_peak,
    measure_peak_flops,
    mfu,
    model_flops,
    seconds_by_name,
)
from ctrl_megatron.models.hf_config import ModelShape
from ctrl_megatron.parallel.groups import ProcessGroups
from ctrl_megatron.pipeline.worker import DAGWorker
from ctrl_megatron.rollout.engine import Engine
from ctrl_megatron.rollout.pool import EnginePool


def flops_of(shape: ModelShape, lengths: list[int], *, responses: int, backward: bool) -> int:
    """Model flops of one pass over sequences of these lengths with ``responses`` response tokens.

    Only response tokens meet the vocabulary, as in ``models.policy``.
    """
    return model_flops(
        n_layers=shape.num_layers,
        hidden=shape.hidden_size,
        ffn=shape.ffn_hidden_size,
        heads=shape.num_attention_heads,
        kv_heads=shape.num_query_groups,
        head_dim=shape.head_dim,
        vocab=shape.vocab_size,
        seq_lens=lengths,
        projected_tokens=responses,
        backward=backward,
    )


def sequence_lengths(batch: TensorDict, groups: ProcessGroups) -> tuple[list[int], int]:
    """Tokens of every row of the global batch, and its number of response tokens. Collective."""
    mine = batch["attention_mask"].sum(dim=1).tolist(), int(batch["response_mask"].sum())
    lengths, responses = zip(*groups.from_data_ranks(mine), strict=True)
    return [n for part in lengths for n in part], sum(responses)


def performance(worker: DAGWorker, batch: TensorDict) -> dict[str, float]:
    """``perf/tokens_per_second`` and ``perf/mfu`` of a step of ``ctrl.add_update_nodes``, and of
    several engines ``perf/engine_balance``.

    MFU counts the trainer's passes (log-probs, values, updates) over the time they took; tokens per
    second counts the sequences over the whole step. Collective.
    """
    lengths, responses = sequence_lengths(batch, worker.groups)
    seconds = seconds_by_name(worker.timeline.phases())
    actor, config = worker.config.actor_rollout_ref.actor, worker.config
    body = flops_of(worker.policy.shape, lengths, responses=responses, backward=False)
    # The step is counted already: the first one that the actor learns in is critic_warmup + 1.
    learned = worker.step > config.trainer.critic_warmup
    passes = {
        "old_log_prob": int("time/old_log_prob" in seconds),
        "ref_log_prob": int(worker.reference is not None),
    }
    passes["actor_update"] = 3 * actor.ppo_epochs * learned
    flops = body * sum(passes.values())
    phases = [*passes]
    if worker.value is not None:
        without_head = flops_of(worker.value.shape, lengths, responses=0, backward=False)
        flops += (1 + 3 * config.value_epochs) * without_head
        phases += ["values", "critic_update"]
    return {
        "perf/tokens_per_second": sum(lengths) / worker.timeline.elapsed(),
        "perf/mfu": mfu(
            flops=flops,
            seconds=sum(seconds.get(f"time/{name}", 0.0) for name in phases),
            devices=worker.groups.layout.world_size,
            peak=worker.peak_flops,
        ),
        **engine_balance(worker.engine, worker.groups),
    }


def engine_balance(engine: Engine | None, groups: ProcessGroups) -> dict[str, float]:
    """``perf/engine_balance``: the fewest tokens that an engine drew since the last call, as a
    share of the most that one drew. Nothing where there is one engine. Collective.
    """
    mine = engine.take_drawn() if isinstance(engine, EnginePool) else []
    drawn = [sum(parts) for parts in zip(*groups.from_data_ranks(mine), strict=True)]
    return {"perf/engine_balance": min(drawn) / max(drawn)} if any(drawn) else {}


def peak_flops_per_device(config: Config, groups: ProcessGroups) -> float:
    """Peak flop/s of one device; a CPU is measured by every rank at once, as it will be used.

    Warns where a CPU lacks instructions for the configured type. Collective.
    """
    cuda, dtype = groups.device.type == "cuda", config.actor_rollout_ref.model.dtype
    name = torch.cuda.get_device_name() if cuda else "cpu"
    groups.barrier()
    peak = device_peak(name, configured_tflops=config.trainer.peak_tflops_per_device, dtype=dtype)
    if not cuda and dtype != "float32" and groups.is_first:
        plain = measure_peak_flops("float32")
        if plain > 2 * peak:
            print(
                f"warning: this CPU multiplies {plain / peak:.0f} times faster in float32 than in "
                f"{dtype}; set actor_rollout_ref.model.dtype=float32",
                file=sys.stderr,
            )
    return sum(groups.from_all(peak)) / groups.layout.world_size

"""How fast a step was, and a few of its critiques for the report."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDict

from ctrl_megatron.metrics import hidden_seconds, mfu, model_flops, seconds_by_name
from ctrl_megatron.models.hf_config import ModelShape
from ctrl_megatron.parallel.groups import Groups
from ctrl_megatron.pipeline.worker import DAGWorker, texts

EXAMPLES_PER_STEP = 6
"""Critiques that are kept for the report."""
_TRAINER_PHASES = ("old_log_prob", "ref_log_prob", "values", "critic_update", "actor_update")


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


def sequence_lengths(batch: TensorDict, groups: Groups) -> tuple[list[int], int]:
    """Tokens of every row of the global batch, and its number of response tokens. Collective."""
    mine = batch["attention_mask"].sum(dim=1).tolist(), int(batch["response_mask"].sum())
    lengths, responses = zip(*groups.from_data_ranks(mine), strict=True)
    return [n for part in lengths for n in part], sum(responses)


def performance(worker: DAGWorker, batch: TensorDict, *, peak_flops: float) -> dict[str, float]:
    """Seconds per phase of this rank, tokens per second and MFU of the whole job. Collective.

    MFU counts the trainer's passes (log-probs, values, updates) over the time they took;
    tokens per second counts critique sequences over the whole step.
    """
    timeline, config = worker.timeline, worker.config
    elapsed = timeline.elapsed()
    lengths, responses = sequence_lengths(batch, worker.groups)
    seconds = seconds_by_name(timeline.phases())
    training = sum(seconds.get(f"time/{name}", 0.0) for name in _TRAINER_PHASES)
    # The step is counted already: the first one that the actor learns in is critic_warmup + 1.
    actor_epochs = config.actor_rollout_ref.actor.ppo_epochs
    passes = 1 + (worker.reference is not None)
    passes += 3 * actor_epochs * (worker.step > config.trainer.critic_warmup)
    flops = passes * flops_of(worker.policy.shape, lengths, responses=responses, backward=False)
    if worker.value is not None:
        body = flops_of(worker.value.shape, lengths, responses=0, backward=False)
        flops += (1 + 3 * config.value_epochs) * body
    devices = worker.groups.layout.world_size
    return {
        **seconds,
        "time/step": elapsed,
        "perf/overlap_seconds": hidden_seconds(timeline.phases()),
        "perf/tokens_per_second": sum(lengths) / elapsed,
        "perf/mfu": mfu(flops=flops, seconds=training, devices=devices, peak=peak_flops),
    }


def examples_of(worker: DAGWorker, batch: TensorDict) -> list[dict[str, Any]]:
    """The first critiques of the batch with what came of them, one per group."""
    problem, uids = texts(batch["problem_id"]), texts(batch["uid"])
    critiques, revisions = texts(batch["critique"]), texts(batch["revision"])
    details, versions = texts(batch["detail"]), texts(batch["critique_version"])
    valid = batch["valid"].tolist()
    # Critiques that led to a revision say more than those that broke the format.
    order = sorted(range(len(uids)), key=lambda i: not valid[i])
    seen: set[str] = set()
    found = []
    for i in order:
        if uids[i] in seen or len(found) == EXAMPLES_PER_STEP:
            continue
        seen.add(uids[i])
        row = worker.train.row(problem[i])
        found.append(
            {
                "problem": row.problem,
                "solution": row.solution,
                "critique": critiques[i],
                "judgment": "valid" if valid[i] else "none",
                "revision": revisions[i],
                "reward": float(batch["reward"][i]),
                "passed_before": row.pass_rate,
                "passed_after": float(batch["pass_rate"][i]),
                "detail": details[i],
                "versions": f"critique by {versions[i]}, revision by proxy",
            }
        )
    return found

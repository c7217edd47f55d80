"""The nodes of the critique-revision pipeline. Each reads and writes fields of the batch.

B rows are critiques, R response columns. Every function runs on all ranks of a model copy, except
``judge_revisions``, which runs on its leader's background loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict

from ctrl_megatron.algorithms import estimate_advantages, penalise
from ctrl_megatron.pipeline.batch import (
    CritiqueRow,
    level_over_data_ranks,
    make_batch,
    tensors_of,
)
from ctrl_megatron.pipeline.executor import NodeOutput
from ctrl_megatron.pipeline.greedy_baseline import baselines, greedy_rows, over_rows, per_group
from ctrl_megatron.pipeline.reward_terms import further_scores, reward_terms
from ctrl_megatron.pipeline.rounds import draw_critiques, judge, write_revisions
from ctrl_megatron.pipeline.worker import DAGWorker, texts
from ctrl_megatron.prompts import parse_judgment
from ctrl_megatron.rewards.critic import RewardOutcome


def generate_critiques(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """``row`` (prompts of the global batch) -> the critique batch of this data-parallel rank."""
    size = worker.config.actor_rollout_ref.actor.ppo_mini_batch_size
    drawn = draw_critiques(worker, batch["row"].tolist(), mini_batch_size=size)
    if worker.config.trainer.balance_batch:
        drawn = level_over_data_ranks(drawn, worker.groups)
    made = critique_batch(worker, drawn)
    return NodeOutput(batch=made, metrics=worker.means(critique_lengths(drawn, made["valid"])))


def critique_batch(worker: DAGWorker, drawn: Sequence[CritiqueRow]) -> TensorDict:
    """``make_batch`` with ``critique`` (text) and ``valid`` (B,) bool."""
    made = make_batch(drawn, pad_token_id=worker.codec.pad_token_id)
    critiques = [worker.codec.decode(r.completion.token_ids) for r in drawn]
    made["critique"] = NonTensorStack(*critiques)
    made["valid"] = torch.tensor([parse_judgment(c) is not None for c in critiques])
    return made


def critique_lengths(drawn: Sequence[CritiqueRow], valid: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the metrics say of critiques as they were drawn."""
    completions = [r.completion for r in drawn]
    return {
        "critique/length": torch.tensor([float(len(c.token_ids)) for c in completions]),
        "critique/cut_rate": torch.tensor(
            [float(c.finish_reason == "length") for c in completions]
        ),
        "critique/valid_rate": valid.float(),
    }


def generate_revisions(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """``critique``, ``valid`` -> ``revision``: the frozen proxy's, empty for invalid critiques.

    Where there are greedy critiques, ``greedy_revision`` as well.
    """
    ids, said, valid = texts(batch["problem_id"]), texts(batch["critique"]), batch["valid"].tolist()
    greedy_ids, greedy_said, greedy_valid = greedy_rows(batch)
    written, lengths = write_revisions(
        worker, [*ids, *greedy_ids], [*said, *greedy_said], [*valid, *greedy_valid]
    )
    fields: dict[str, Any] = {"revision": NonTensorStack(*written[: len(ids)])}
    if greedy_ids:
        fields |= over_rows(batch, greedy_revision=written[len(ids) :])
    return NodeOutput(
        fields=fields,
        metrics=worker.means({"revision/length": torch.tensor([float(n) for n in lengths])}),
    )


async def judge_revisions(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """``critique``, ``revision`` -> the fields of ``outcome_fields``.

    With greedy critiques also ``reward_baselines`` (B,); a row without one counts as not judged.
    Runs beside the log-probs.
    """
    ids, said, written = (texts(batch[name]) for name in ("problem_id", "critique", "revision"))
    greedy_ids, greedy_said, _ = greedy_rows(batch)
    greedy_written = per_group(batch, "greedy_revision") if greedy_ids else []
    outcomes = await judge(
        worker, [*ids, *greedy_ids], [*said, *greedy_said], [*written, *greedy_written]
    )
    fields = outcome_fields(outcomes[: len(ids)])
    if greedy_ids:
        fields |= baselines(batch, outcomes[len(ids) :])
        fields["judged"] = fields["judged"] & ~fields["reward_baselines"].isnan()
        fields["reward_baselines"] *= worker.config.reward.weights.get("critic", 0.0)
    return NodeOutput(fields=fields)


def outcome_fields(outcomes: Sequence[RewardOutcome]) -> dict[str, Any]:
    """``reward``, ``judged`` (bool), ``pass_rate``, ``cached``, ``forged`` (B,) and ``detail``.

    A row whose judging failed has ``judged`` False and a reward of 0 that nobody may read.
    """
    passed = [sum(o.passed) / len(o.passed) if o.passed else 0.0 for o in outcomes]
    details = [next((d for d in o.detail if d), "") or o.error for o in outcomes]
    return {
        "reward": torch.tensor([0.0 if o.reward is None else o.reward for o in outcomes]),
        "judged": torch.tensor([o.reward is not None for o in outcomes]),
        "pass_rate": torch.tensor(passed),
        "cached": torch.tensor([o.cached for o in outcomes]),
        "detail": NonTensorStack(*details),
        # -1 where no lax grader was asked.
        "forged": torch.tensor([-1 if o.forged is None else int(o.forged) for o in outcomes]),
    }


def old_log_prob(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """``old_log_probs`` (B, R): the trainer's own log-probs before the update."""
    log_probs, entropy = worker.policy.log_probs(tensors_of(batch), worker.temperature)
    mask = batch["response_mask"]
    metrics = worker.means({"actor/entropy": entropy[mask]})
    return NodeOutput(fields={"old_log_probs": log_probs}, metrics=metrics)


def ref_log_prob(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """``ref_log_prob`` (B, R): the frozen reference's; nothing where the objective has no KL."""
    if worker.reference is None:
        return NodeOutput()
    away = worker.config.actor_rollout_ref.actor.megatron.param_offload
    if away:
        worker.reference.to_device()
    log_probs, _ = worker.reference.log_probs(tensors_of(batch), worker.temperature)
    if away:
        worker.reference.to_host()
    return NodeOutput(fields={"ref_log_prob": log_probs})


def place_scores(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """``token_level_scores`` (B, R): the reward on the critique's last valid token.

    A row that could not be judged leaves the loss and its group: its mask becomes empty and its uid
    its own.
    """
    mask, weights = batch["response_mask"], worker.config.reward.weights
    scores = torch.zeros(mask.shape, dtype=torch.float32)
    rows = torch.arange(len(mask))
    terms, further = reward_terms(worker, batch), further_scores(worker, batch)
    critic = weights.get("critic", 0.0) * batch["reward"].float()
    parts = [weights[name] * part for name, part in further.items() if weights[name]]
    earned = torch.stack([critic, *parts, *terms.values()]).sum(dim=0)
    judged = batch["judged"] & ~earned.isnan()
    scores[rows, mask.sum(dim=1).clamp(min=1) - 1] = earned
    uids = [
        uid if ok else f"{uid}/unjudged/{i}"
        for i, (uid, ok) in enumerate(zip(texts(batch["uid"]), judged.tolist(), strict=True))
    ]
    known = [worker.train.row(i).pass_rate for i in texts(batch["problem_id"])]
    metrics = worker.means(
        {
            "reward/mean": batch["reward"][judged],
            "reward/judged_rate": judged.float(),
            "reward/cached_rate": batch["cached"].float(),
            "pass_rate/after": batch["pass_rate"][judged & batch["valid"]],
            "pass_rate/before": torch.tensor([k for k in known if k is not None]),
            **{f"reward/{name}": values[judged] for name, values in terms.items()},
            **{f"reward/{name}": part[~part.isnan()] for name, part in further.items()},
            **({"reward/total": earned[judged]} if further else {}),
            "reward/forgery_rate": batch["forged"][batch["forged"] >= 0].float(),
        }
    )
    return NodeOutput(
        fields={
            "token_level_scores": torch.where(judged[:, None], scores, 0.0),
            "response_mask": mask & judged[:, None],
            "uid": NonTensorStack(*uids),
        },
        metrics=metrics,
    )


def token_rewards(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """``token_level_rewards`` (B, R): scores, less beta times KL where the KL is in the reward."""
    algorithm, mask = worker.config.algorithm, batch["response_mask"]
    metrics: dict[str, float] = {}
    rewards = batch["token_level_scores"]
    if worker.reference is not None:
        gap = (batch["old_log_probs"] - batch["ref_log_prob"])[mask]
        metrics = worker.means({"actor/kl_to_reference": gap})
    if algorithm.use_kl_in_reward:
        beta = worker.kl_controller.value
        rewards, kl = penalise(
            rewards,
            batch["old_log_probs"],
            batch["ref_log_prob"],
            mask,
            beta=beta,
            kl_penalty=algorithm.kl_penalty,
        )
        mean = worker.means({"kl": kl[mask]})["kl"]
        rows = worker.config.data.train_batch_size * worker.config.actor_rollout_ref.rollout.n
        worker.kl_controller.update(current_kl=mean, n_steps=rows)
        metrics |= {"actor/reward_kl_penalty": mean, "actor/kl_coef": beta}
    return NodeOutput(fields={"token_level_rewards": rewards}, metrics=metrics)


def advantages(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """``advantages``, ``returns`` (B, R) by the configured estimator; no group is split.

    The estimator gets those of these inputs that it names.
    """
    algorithm, mask = worker.config.algorithm, batch["response_mask"]
    offered = {
        "token_level_rewards": batch["token_level_rewards"],
        "response_mask": mask,
        "index": texts(batch["uid"]),
        "gamma": algorithm.gamma,
        "lam": algorithm.lam,
        "norm_adv_by_std_in_grpo": algorithm.norm_adv_by_std_in_grpo,
        "weight_factor_in_cpgd": algorithm.weight_factor_in_cpgd,
    }
    for name in ("values", "reward_baselines"):
        if name in batch:
            offered[name] = batch[name]
    estimates, returns = estimate_advantages(
        algorithm.adv_estimator, offered, reduce=worker.groups.sum_over_data
    )
    metrics = worker.means({"advantage/mean_abs": estimates[mask].abs()})
    return NodeOutput(fields={"advantages": estimates, "returns": returns}, metrics=metrics)


def sync_weights(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """The updated actor's weights go to the engine; reports what all pushes of the step moved."""
    worker.make_room()
    if worker.actor_learns:
        worker.weights.actor_changed(worker.step + 1)
    worker.weights.load("actor")
    reports = worker.weights.take_reports()
    moved, seconds = sum(r.num_bytes for r in reports), sum(r.seconds for r in reports)
    return NodeOutput(
        metrics={
            "sync/gigabytes_per_second": moved / seconds / 1e9,
            "sync/seconds": seconds,
            "sync/pushes": float(len(reports)),
        }
    )

"""The nodes of the critique-revision pipeline. Each reads and writes fields of the batch.

B rows are critiques, R response columns. Every function runs on all ranks of a model copy, except
``judge_revisions``, which runs on its leader's background loop.
"""

from __future__ import annotations

import uuid

import torch
from tensordict import NonTensorStack, TensorDict

from ctrl_megatron.algorithms import get_adv_estimator, penalise
from ctrl_megatron.pipeline import speech
from ctrl_megatron.pipeline.batch import (
    CritiqueRow,
    level_over_data_ranks,
    make_batch,
    share_prompts,
    tensors_of,
    versions_of,
)
from ctrl_megatron.pipeline.executor import NodeOutput
from ctrl_megatron.pipeline.worker import DAGWorker, texts
from ctrl_megatron.prompts import parse_judgment


def generate_critiques(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """``row`` (prompts of the global batch) -> the critique batch of this data-parallel rank."""
    actor, chosen = worker.config.actor_rollout_ref.actor, batch["row"].tolist()
    worker.make_room()
    version = worker.weights.use("actor")
    mine = share_prompts(len(chosen), actor.ppo_mini_batch_size, worker.groups)
    rows = [chosen[prompt] for prompt, _ in mine]
    answers = worker.ask(lambda: speech.critiques(worker, worker.train, rows, greedy=False))
    name = f"{worker.config.trainer.experiment_name}/{worker.step}"
    drawn = [
        CritiqueRow(
            uid=str(uuid.uuid5(uuid.NAMESPACE_OID, f"{name}/{prompt}")),
            problem_id=worker.train.rows[row].id,
            mini_batch=mini_batch,
            prompt=worker.train.prompts[row],
            completion=completion,
        )
        for (prompt, mini_batch), row, group in zip(mine, rows, answers, strict=True)
        for completion in group
    ]
    _assert_spoken_by(version, [versions_of(r.completion) for r in drawn])
    if worker.config.trainer.balance_batch:
        drawn = level_over_data_ranks(drawn, worker.groups)
    made = make_batch(drawn, pad_token_id=worker.codec.pad_token_id)
    lengths = made["response_mask"].sum(dim=1).float()
    cut = torch.tensor([r.completion.finish_reason == "length" for r in drawn]).float()
    critiques = [worker.codec.decode(r.completion.token_ids) for r in drawn]
    made["critique"] = NonTensorStack(*critiques)
    made["valid"] = torch.tensor([parse_judgment(c) is not None for c in critiques])
    metrics = worker.means(
        {
            "critique/length": lengths,
            "critique/cut_rate": cut,
            "critique/valid_rate": made["valid"].float(),
        }
    )
    return NodeOutput(batch=made, metrics=metrics)


def generate_revisions(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """``critique``, ``valid`` -> ``revision``: the frozen proxy's, empty for invalid critiques."""
    version = worker.weights.use("proxy")
    valid = batch["valid"].tolist()
    ids, critiques = texts(batch["problem_id"]), texts(batch["critique"])
    rows = [i for i, ok in enumerate(valid) if ok]
    answers = worker.ask(
        lambda: speech.revisions(worker, [ids[i] for i in rows], [critiques[i] for i in rows])
    )
    worker.weights.rest()
    _assert_spoken_by(version, [versions_of(a) for a in answers])
    written = [""] * len(valid)
    for i, answer in zip(rows, answers, strict=True):
        written[i] = worker.codec.decode(answer.token_ids)
    lengths = torch.tensor([float(len(a.token_ids)) for a in answers])
    return NodeOutput(
        fields={"revision": NonTensorStack(*written)},
        metrics=worker.means({"revision/length": lengths}),
    )


async def judge_revisions(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """``critique``, ``revision`` -> ``reward``, ``judged`` (bool), ``pass_rate`` (B,), ``detail``.

    Runs beside the log-probs. A row whose judging failed has ``judged`` False and a reward of 0
    that nobody may read.
    """
    assert worker.reward is not None
    _, samples = worker.reward.parse_query(texts(batch["problem_id"]))
    outcomes = await worker.reward.judge_all(
        texts(batch["critique"]), texts(batch["revision"]), samples
    )
    rewards = [0.0 if o.reward is None else o.reward for o in outcomes]
    passed = [sum(o.passed) / len(o.passed) if o.passed else 0.0 for o in outcomes]
    details = [next((d for d in o.detail if d), "") or o.error for o in outcomes]
    return NodeOutput(
        fields={
            "reward": torch.tensor(rewards),
            "judged": torch.tensor([o.reward is not None for o in outcomes]),
            "pass_rate": torch.tensor(passed),
            "cached": torch.tensor([o.cached for o in outcomes]),
            "detail": NonTensorStack(*details),
        }
    )


def old_log_prob(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """``old_log_probs`` (B, R): the trainer's own log-probs before the update."""
    log_probs, entropy = worker.policy.log_probs(tensors_of(batch), worker.temperature)
    mask = batch["response_mask"]
    gap = (log_probs.exp() - batch["rollout_log_probs"].exp()).abs()[mask]
    metrics = worker.means({"actor/entropy": entropy[mask], "rollout/probs_diff_mean": gap})
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
    mask, judged = batch["response_mask"], batch["judged"]
    scores = torch.zeros(mask.shape, dtype=torch.float32)
    rows = torch.arange(len(mask))
    scores[rows, mask.sum(dim=1).clamp(min=1) - 1] = batch["reward"].float()
    uids = [
        uid if ok else f"{uid}/unjudged/{i}"
        for i, (uid, ok) in enumerate(zip(texts(batch["uid"]), judged.tolist(), strict=True))
    ]
    before = {row.id: row.pass_rate for row in worker.train.rows}
    known = [before[i] for i in texts(batch["problem_id"])]
    metrics = worker.means(
        {
            "reward/mean": batch["reward"][judged],
            "reward/judged_rate": judged.float(),
            "reward/cached_rate": batch["cached"].float(),
            "pass_rate/after": batch["pass_rate"][judged & batch["valid"]],
            "pass_rate/before": torch.tensor([k for k in known if k is not None]),
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
    """``advantages``, ``returns`` (B, R) by the configured estimator; no group is split."""
    algorithm = worker.config.algorithm
    values, returns = get_adv_estimator(algorithm.adv_estimator)(
        token_level_rewards=batch["token_level_rewards"],
        response_mask=batch["response_mask"],
        index=texts(batch["uid"]),
        norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
    )
    mask = batch["response_mask"]
    metrics = worker.means({"advantage/mean_abs": values[mask].abs()})
    return NodeOutput(fields={"advantages": values, "returns": returns}, metrics=metrics)


def sync_weights(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """The updated actor's weights go to the engine; reports what all pushes of the step moved."""
    worker.make_room()
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


def _assert_spoken_by(version: str, found: list[str]) -> None:
    wrong = {v for v in found if v != version}
    if wrong:
        raise RuntimeError(f"completions were drawn from {sorted(wrong)}, not from {version}")

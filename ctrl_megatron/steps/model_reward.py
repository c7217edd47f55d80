"""The reward that a model computes (``reward_model``): its node, and its place in the sum.

The conversation of a row's prompt and the text of its response is written anew with the reward
model's own chat template and tokenizer (``reward_reader``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from tensordict import TensorDict

from ctrl_megatron.algorithms import reads_reward_parts
from ctrl_megatron.config import Config
from ctrl_megatron.data.rows import Row
from ctrl_megatron.errors import UserError
from ctrl_megatron.graph.declarations import OF_REWARD_MODEL, REWARD_MODEL, always, node
from ctrl_megatron.graph.node import NodeOutput
from ctrl_megatron.models.micro_batch import split_attended_values
from ctrl_megatron.rewards import RewardItem
from ctrl_megatron.rewards.items import Rewards
from ctrl_megatron.rewards.registry import MODEL_REWARD
from ctrl_megatron.rewards.reward_sum import combine_rewards
from ctrl_megatron.steps.batch import data_rows_of, number_or_none
from ctrl_megatron.steps.sample import Sample
from ctrl_megatron.steps.worker import DAGWorker, RolloutWorker


def required_score_fields(config: Config) -> dict[str, str]:
    """The fields of ``total_rewards``, as ``node_fields.needs`` has them."""
    own = {OF_REWARD_MODEL: "reward_model.enable=true"} if config.needs_reward_model else {}
    return {"score": "", **own}


@node(reads=REWARD_MODEL, needs=always("input_ids", "response_mask"), writes=(OF_REWARD_MODEL,))
def model_reward(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """``reward/reward_model`` (B,) float32, not multiplied by its weight: NaN for a conversation
    that is too long for the model, and for a row of a task that it does not reward. Nothing where
    the run has no reward model, or the batch has the field already.
    """
    if MODEL_REWARD not in worker.reward_weights or OF_REWARD_MODEL in batch:
        return NodeOutput()
    # A row without a reward of another kind has an empty response_mask.
    start = batch["prompts"].shape[1]
    tokens = split_attended_values(batch["input_ids"], batch["attention_mask"].bool(), start)[1]
    answers = [worker.codec.decode(answer.tolist()) for answer in tokens]
    found, lengths = model_rewards_of_answers(worker, data_rows_of(worker.train, batch), answers)
    measured = {"reward_model/length": torch.tensor(lengths, dtype=torch.float32)}
    return NodeOutput(fields={OF_REWARD_MODEL: found}, metrics=worker.global_means(measured))


def with_model_rewards(worker: DAGWorker, samples: Sequence[Sample]) -> list[Sample]:
    """The judged samples with the reward of ``model_reward``, if the run has such a model.
    Collective.
    """
    if MODEL_REWARD not in worker.reward_weights:
        return [*samples]
    rows = [sample.row_with_program(worker.train.row(sample.row_id)) for sample in samples]
    answers = [worker.codec.decode(sample.completion.token_ids) for sample in samples]
    found, _ = model_rewards_of_answers(worker, rows, answers)
    rewarded = []
    for sample, reward in zip(samples, found, strict=True):
        assert sample.outcome is not None
        rewards = {**sample.outcome.rewards, MODEL_REWARD: number_or_none(reward)}
        outcome = dataclasses.replace(sample.outcome, rewards=rewards)
        rewarded.append(dataclasses.replace(sample, outcome=outcome))
    return rewarded


def model_reward_parts(worker: RolloutWorker, items: Sequence[RewardItem]) -> dict[str, Rewards]:
    """The model's rewards of the items, as in ``Scores.parts``; nothing where this rank has no
    reward model. Collective.
    """
    if not isinstance(worker, DAGWorker) or worker.reward_model is None:
        return {}
    rows = [item.row for item in items if item.row is not None]
    found, _ = model_rewards_of_answers(worker, rows, [item.text for item in items])
    return {MODEL_REWARD: [number_or_none(reward) for reward in found]}


def model_rewards_of_answers(
    worker: DAGWorker, rows: Sequence[Row], answers: Sequence[str]
) -> tuple[torch.Tensor, list[int]]:
    """(the model's rewards of the answers to the rows' prompts (B,) float32, NaN where there is
    none; tokens of each conversation). Collective. UserError where other ranks have the model.
    """
    reader = worker.reward_model
    if reader is None:
        raise UserError(
            "a node asks for rewards of the model, which is on the ranks of another world",
            key="placement.reward_model",
            remedy="give it the role NodeRole.REWARD_MODEL, or leave the key out",
        )
    conversations = [
        reader.conversation_tokens(row.prompt, answer)
        for row, answer in zip(rows, answers, strict=True)
    ]
    found = reader.score_conversations(conversations)
    if worker.config.actor_rollout_ref.actor.compute.param_offload and worker.has_actor:
        reader.model.offload("weights")
    rewarded = _is_rewarded(worker, MODEL_REWARD, rows)
    numbers = [float("nan") if reward is None else reward for reward in found]
    return (
        torch.where(rewarded, torch.tensor(numbers, dtype=torch.float32), float("nan")),
        [len(shared) + len(rest) for shared, rest in conversations],
    )


def total_rewards(worker: DAGWorker, batch: TensorDict) -> torch.Tensor:
    """(B,) float32: ``score``, the sum of the reward functions, and the weighted reward of the
    model where the run has one; NaN where a part with a weight is unknown.

    With ``reward.schedule`` or ``reward.judge.gate`` the parts are added anew, with the weights of
    this step, and with an estimator that reads the parts (``gdpo``) those that are known.
    """
    if reads_reward_parts(worker.config.algorithm.adv_estimator):
        known, factors = weighted_parts(worker, batch)
        total = (known.nan_to_num(0.0).double() * factors).sum(dim=1)
        return torch.where(known.isnan().all(dim=1), float("nan"), total).float()
    reward, weights = worker.config.reward, worker.step_weights
    gate = reward.judge.gate
    names, parts = [*weights], dict[str, Rewards]()
    if not reward.schedule and gate is None:
        names = [name for name in weights if name == MODEL_REWARD]
        parts["score"] = [number_or_none(one) for one in batch["score"]]
        weights = {"score": 1.0, **{name: weights[name] for name in names}}
    rows = data_rows_of(worker.train, batch) if names else []
    for name in names:
        # To the sum of a row of another task it adds nothing.
        mine = _is_rewarded(worker, name, rows)
        column = torch.where(mine, reward_column(batch, name), 0.0)
        parts[name] = [number_or_none(one) for one in column]
    totals = combine_rewards(parts, weights, gate)
    return torch.tensor([float("nan") if total is None else total for total in totals])


def weighted_parts(worker: DAGWorker, batch: TensorDict) -> tuple[torch.Tensor, torch.Tensor]:
    """(rewards (B, K) float32 of the functions whose weight in this step is not 0, NaN where one is
    unknown or does not reward the row's task; their weights (K,) float64)."""
    used = {name: weight for name, weight in worker.step_weights.items() if weight}
    rows = data_rows_of(worker.train, batch)
    columns = [
        torch.where(_is_rewarded(worker, name, rows), reward_column(batch, name), float("nan"))
        for name in used
    ]
    weights = torch.tensor([*used.values()], dtype=torch.float64)
    return torch.stack(columns, dim=1), weights


def reward_column(batch: TensorDict, name: str) -> torch.Tensor:
    """``reward/NAME`` (B,) of the batch. UserError where the pipeline does not write it."""
    if f"reward/{name}" not in batch:
        raise UserError(
            "reward.schedule, reward.judge.gate and algorithm.adv_estimator=gdpo read every reward "
            f"by itself, and no node of this pipeline writes the field reward/{name}",
            remedy="write it beside score, or leave these keys out",
        )
    return batch[f"reward/{name}"]


def _is_rewarded(worker: DAGWorker, name: str, rows: Sequence[Row]) -> torch.Tensor:
    """(B,) bool: whether the function rewards the rows' tasks (``reward.reward_tasks``)."""
    tasks = worker.config.reward.tasks_by_function.get(name)
    return torch.tensor([tasks is None or row.task in tasks for row in rows], dtype=torch.bool)

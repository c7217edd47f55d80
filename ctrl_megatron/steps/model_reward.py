"""The reward that a model computes (``reward_model``): its node, and its place in the sum.

The conversation of a row's prompt and the text of its response is written anew with the reward
model's own chat template and tokenizer (``reward_reader``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from tensordict import TensorDict

from ctrl_megatron.config import Config
from ctrl_megatron.data.rows import Row
from ctrl_megatron.errors import UserError
from ctrl_megatron.graph.declarations import OF_REWARD_MODEL, REWARD_MODEL, always, node
from ctrl_megatron.graph.node import NodeOutput
from ctrl_megatron.models.micro_batch import split_attended_values
from ctrl_megatron.rewards import RewardItem, weighted_sum
from ctrl_megatron.rewards.items import Rewards
from ctrl_megatron.rewards.registry import MODEL_REWARD
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
    rows = [worker.train.row(sample.row_id) for sample in samples]
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
    rewarded = _is_rewarded(worker, rows)
    numbers = [float("nan") if reward is None else reward for reward in found]
    return (
        torch.where(rewarded, torch.tensor(numbers, dtype=torch.float32), float("nan")),
        [len(shared) + len(rest) for shared, rest in conversations],
    )


def total_rewards(worker: DAGWorker, batch: TensorDict) -> torch.Tensor:
    """(B,) float32: ``score``, the sum of the reward functions, and the weighted reward of the
    model where the run has one; NaN where a part with a weight is unknown.
    """
    score = batch["score"]
    if MODEL_REWARD not in worker.reward_weights:
        return score
    # To the sum of a row of another task it adds nothing.
    mine = _is_rewarded(worker, data_rows_of(worker.train, batch))
    parts = {
        "score": [number_or_none(one) for one in score],
        MODEL_REWARD: [
            number_or_none(one) for one in torch.where(mine, batch[OF_REWARD_MODEL], 0.0)
        ],
    }
    weights = {"score": 1.0, MODEL_REWARD: worker.reward_weights[MODEL_REWARD]}
    totals = weighted_sum(parts, weights)
    return torch.tensor([float("nan") if total is None else total for total in totals])


def _is_rewarded(worker: DAGWorker, rows: Sequence[Row]) -> torch.Tensor:
    """(B,) bool: whether the model rewards the rows' tasks (``reward.reward_tasks``)."""
    tasks = worker.config.reward.tasks_by_function.get(MODEL_REWARD)
    return torch.tensor([tasks is None or row.task in tasks for row in rows], dtype=torch.bool)

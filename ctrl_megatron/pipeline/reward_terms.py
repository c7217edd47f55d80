"""What is added to the paper's reward where the configuration asks for it."""

from __future__ import annotations

import dataclasses

import torch
from tensordict import TensorDict

from ctrl_megatron.pipeline.worker import DAGWorker, texts
from ctrl_megatron.prompts import parse_judgment
from ctrl_megatron.rewards import RewardItem
from ctrl_megatron.rewards.ablations import (
    TransitionTable,
    judgment_rewards,
    transition_rewards,
    truth_of,
)
from ctrl_megatron.rewards.overlong import soft_overlong_punishment


def reward_terms(worker: DAGWorker, batch: TensorDict) -> dict[str, torch.Tensor]:
    """Name -> (B,) float32 for every term that is on: overlong, judgment, transition.

    Raises ValueError naming the row where a term needs the first solution's verdict and the data
    have none.
    """
    reward, terms = worker.config.reward, {}
    if reward.overlong_buffer.enable:
        buffer, limit = reward.overlong_buffer, worker.config.data.max_response_length
        lengths = batch["response_mask"].sum(dim=1).tolist()
        found = [
            soft_overlong_punishment(length, max_length=limit, cache_length=buffer.len)
            for length in lengths
        ]
        terms["overlong"] = buffer.penalty_factor * torch.tensor(found)
    if reward.judgment_weight:
        judgments = [parse_judgment(critique) for critique in texts(batch["critique"])]
        found = judgment_rewards(judgments, _truths(worker, batch), reward.judgment_weight)
        terms["judgment"] = torch.tensor(found)
    table = reward.transition
    if table.is_on:
        # Without a judgment nothing was revised: that is no transition.
        after = [
            rate >= 1 if ok else None
            for rate, ok in zip(batch["pass_rate"].tolist(), batch["valid"].tolist(), strict=True)
        ]
        made = transition_rewards(
            _truths(worker, batch), after, TransitionTable(**dataclasses.asdict(table))
        )
        terms["transition"] = torch.tensor([0.0 if value is None else value for value in made])
    return terms


def further_scores(worker: DAGWorker, batch: TensorDict) -> dict[str, torch.Tensor]:
    """Name -> (B,) float32, NaN where nothing is known, of the reward functions besides the
    critic's, without their weights. Collective.

    A function's text is the revision, its length that of the critique in tokens.
    """
    further = worker.further_rewards
    if further is None:
        return {}
    lengths = [int(n) for n in batch["response_mask"].sum(dim=1)]
    said, written = texts(batch["critique"]), texts(batch["revision"])

    async def work() -> dict[str, list[float | None]]:
        assert worker.reward is not None and worker.further_rewards is not None
        _, samples = worker.reward.parse_query(texts(batch["problem_id"]))
        items = [
            RewardItem(text=revision, critique=critique, sample=sample, length=length)
            for revision, critique, sample, length in zip(
                written, said, samples, lengths, strict=True
            )
        ]
        return (await worker.further_rewards.score(items)).parts

    found = worker.ask(work)
    return {
        name: torch.tensor([float("nan") if value is None else value for value in part])
        for name, part in found.items()
    }


def _truths(worker: DAGWorker, batch: TensorDict) -> list[bool]:
    truths = []
    for row in texts(batch["problem_id"]):
        truth = truth_of(worker.train.row(row).pass_rate)
        if truth is None:
            raise ValueError(
                f"row {row!r} of data.train_files has no pass_rate, which reward.judgment_weight "
                "and reward.transition compare with; judge the first solutions "
                "(tools/prepare_data.py) or leave these keys at 0"
            )
        truths.append(truth)
    return truths

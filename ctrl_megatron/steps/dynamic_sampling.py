"""Sampling until enough groups teach something (DAPO, arXiv 2503.14476, section 3.2)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict

from ctrl_megatron.algorithms import groups_with_signal
from ctrl_megatron.errors import UserError
from ctrl_megatron.graph.graph import Pipeline
from ctrl_megatron.graph.node import NodeOutput
from ctrl_megatron.graph.node_fields import DRAWN, OF_REWARD_MODEL
from ctrl_megatron.graph.siirl_names import NodeRole
from ctrl_megatron.rewards import weighted_sum
from ctrl_megatron.rewards.registry import refuse_without_rewards
from ctrl_megatron.rewards.shaping import OVERLONG
from ctrl_megatron.steps.batch import Group, Sample, make_batch
from ctrl_megatron.steps.sampling import share_rows

if TYPE_CHECKING:
    from ctrl_megatron.steps.worker import DAGWorker

Draw = Callable[["DAGWorker", Sequence[int], int], list[Sample]]
"""Takes the worker, positions of rows and the number of the draw in this step; returns this data
rank's samples with rewards among their ``fields``. Collective."""
Measure = Callable[[Sequence[Sample]], dict[str, torch.Tensor]]
"""Takes this data rank's samples; returns vectors whose means are reported."""


class DynamicSampling:
    """The node that draws and judges where ``algorithm.filter_groups`` is on.

    It draws batches of ``data.gen_batch_size`` rows until ``data.train_batch_size`` groups contain
    different rewards. The punishment of long responses does not count as one, because nearly every
    group differs in it (DAPO filters by accuracy). Groups beyond that number wait for the next
    step, which computes their log-probs. Raises, on all ranks, ServiceFault where too few programs
    could be judged, and UserError where no sample of a draw has a reward or
    ``max_num_gen_batches`` batches do not give enough groups.
    """

    def __init__(self, draw: Draw, measure: Measure) -> None:
        self._draw, self._measure = draw, measure
        self.reads: tuple[str, ...] = getattr(draw, "reads", ())
        self.writes = (*DRAWN, "score", OF_REWARD_MODEL)

    def __call__(self, worker: DAGWorker, batch: TensorDict) -> NodeOutput:
        """The step's batch of this data rank. Collective."""
        config, wanted = worker.config, worker.config.data.train_batch_size
        useful, drawn = worker.leftover.take(), list[Sample]()
        rounds = sampled = new = 0
        while len(useful) < wanted and rounds < config.algorithm.filter_groups.max_num_gen_batches:
            fresh = self._draw(worker, worker.draw(config.gen_batch_size), rounds)
            worker.check_judging()
            everything = [row for part in worker.groups.from_data_ranks(fresh) for row in part]
            require_rewards(everything, worker.reward_weights)
            teaching = groups_that_teach(everything, worker.reward_weights)
            useful += teaching
            new += len(teaching)
            sampled += len({row.uid for row in everything})
            drawn += fresh
            rounds += 1
        if len(useful) < wanted:
            raise UserError(
                f"algorithm.filter_groups: after {rounds} batches of {config.gen_batch_size} "
                f"prompts only {len(useful)} groups had different rewards, {wanted} are needed; "
                "raise algorithm.filter_groups.max_num_gen_batches, actor_rollout_ref.rollout.n "
                "or actor_rollout_ref.rollout.temperature, lower data.train_batch_size, or train "
                "on problems that are neither always nor never solved"
            )
        worker.leftover.keep(useful[wanted:])
        metrics = {
            "sampling/rounds": float(rounds),
            "sampling/reserve": float(len(useful) - wanted),
            **({"sampling/useful_rate": new / sampled} if sampled else {}),
            **worker.means(self._measure(drawn)),
        }
        return NodeOutput(batch=_batch_of(worker, useful[:wanted]), metrics=metrics)


def add_dynamic_sampling(pipeline: Pipeline, draw: Draw, measure: Measure) -> tuple[str, list[str]]:
    """Add the node to ``pipeline``; returns the node that draws and those that judge."""
    name = "dynamic_sampling"
    pipeline.add_node(
        name,
        DynamicSampling(draw, measure),
        node_role=NodeRole.DYNAMIC_SAMPLING,
    )
    return name, [name]


def counted_rewards(weights: Mapping[str, float]) -> dict[str, float]:
    return {name: w for name, w in weights.items() if w and name not in OVERLONG}


def require_rewards(rows: Sequence[Sample], weights: Mapping[str, float]) -> None:
    """Raise UserError where none of ``rows``, a draw of all data ranks, has a reward."""
    if rows and all(row.fields["score"] is None for row in rows):
        names = [name for name, weight in weights.items() if weight]
        refuse_without_rewards(
            [n for n in names if all(row.fields[f"reward/{n}"] is None for row in rows)]
        )


def groups_that_teach(rows: Sequence[Sample], weights: Mapping[str, float]) -> list[Group]:
    """The groups, whole and in order, whose judged samples earned different rewards: sums weighted
    by ``weights``, without the punishment of long responses.
    """
    counted = counted_rewards(weights)
    parts: dict[str, Any] = {
        name: [row.fields[f"reward/{name}"] for row in rows] for name in counted
    }
    earned = zip(rows, weighted_sum(parts, counted), strict=True)
    judged = [(row.uid, reward) for row, reward in earned if reward is not None]
    if not judged:
        return []
    uids = [uid for uid, _ in judged]
    signal = groups_with_signal(torch.tensor([reward for _, reward in judged]), uids)
    groups: dict[str, Group] = {
        uid: [] for uid, useful in zip(uids, signal.tolist(), strict=True) if useful
    }
    for row in rows:
        if row.uid in groups:
            groups[row.uid].append(row)
    return list(groups.values())


def _batch_of(worker: DAGWorker, groups: Sequence[Group]) -> TensorDict:
    """This data rank's share of the step's groups, divided into mini-batches."""
    size = worker.config.actor_rollout_ref.actor.ppo_mini_batch_size
    rows = [
        dataclasses.replace(row, mini_batch=number // size)
        for number, group in enumerate(groups)
        for row in group
    ]
    mine = share_rows(
        [row.size for row in rows],
        worker.groups,
        shared_prefix=worker.config.shares_prefixes,
    )
    return make_batch([rows[number] for number in mine], pad_token_id=worker.codec.pad_token_id)

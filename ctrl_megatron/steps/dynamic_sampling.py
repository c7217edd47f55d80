"""Sampling until enough groups teach something (DAPO, arXiv 2503.14476, section 3.2)."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict

from ctrl_megatron.algorithms import reads_reward_parts, rows_in_varied_groups
from ctrl_megatron.errors import UserError
from ctrl_megatron.graph.declarations import (
    DRAWN,
    OF_REWARD_MODEL,
    REWARD_MODEL,
    NodeFunction,
    Service,
    node,
)
from ctrl_megatron.graph.graph import Pipeline
from ctrl_megatron.graph.node import NodeOutput
from ctrl_megatron.graph.siirl_names import NodeRole
from ctrl_megatron.rewards.registry import raise_no_rewards
from ctrl_megatron.rewards.reward_sum import combine_rewards
from ctrl_megatron.rewards.shaping import OVERLONG
from ctrl_megatron.steps.batch import fields_of_samples, make_batch, samples_of
from ctrl_megatron.steps.model_reward import with_model_rewards
from ctrl_megatron.steps.sample import ColumnMaker, Group, Sample, SampleRewards
from ctrl_megatron.steps.sampling import share_rows

if TYPE_CHECKING:
    from ctrl_megatron.steps.worker import DAGWorker

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

    def __init__(
        self,
        nodes: Sequence[NodeFunction[..., Any]],
        measure: Measure,
        makers: Sequence[ColumnMaker],
    ) -> None:
        """``nodes`` are those of a pipeline without dynamic sampling, from rows to judged samples,
        and ``makers`` make the batch's columns of these."""
        self._nodes, self._measure, self._makers = nodes, measure, makers

    @property
    def judges(self) -> list[NodeFunction[..., Any]]:
        """The nodes that judge on the leader's event loop."""
        return [one for one in self._nodes if inspect.iscoroutinefunction(one.function)]

    def __call__(self, worker: DAGWorker, batch: TensorDict) -> NodeOutput:
        """The step's batch of this data rank. Collective."""
        config, wanted = worker.config, worker.config.data.train_batch_size
        weighted = partial(
            groups_with_varied_rewards,
            weights=worker.step_weights,
            gate=config.reward.judge.gate,
            separately=reads_reward_parts(config.algorithm.adv_estimator),
        )
        # Groups that were left over under the weights of an earlier stage may differ no more.
        useful = weighted([sample for group in worker.leftover.take_all() for sample in group])
        drawn = list[Sample]()
        rounds = sampled = new = 0
        while len(useful) < wanted and rounds < config.algorithm.filter_groups.max_num_gen_batches:
            fresh = self.draw(worker, worker.draw(config.gen_batch_size), rounds)
            # Groups without rewards do not teach: a service that failed would pass for prompts that
            # are always or never solved.
            worker.count_judge_requests()
            everything = [row for part in worker.groups.gather_data_ranks(fresh) for row in part]
            require_rewards(everything, worker.step_weights)
            teaching = weighted(everything)
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
        worker.leftover.add_groups(useful[wanted:])
        metrics = {
            "sampling/rounds": float(rounds),
            "sampling/reserve": float(len(useful) - wanted),
            **({"sampling/useful_rate": new / sampled} if sampled else {}),
            **worker.global_means(self._measure(drawn)),
        }
        samples = _shared(worker, useful[:wanted])
        batch = make_batch(samples, pad_token_id=worker.codec.pad_token_id)
        return NodeOutput(
            batch=batch, fields=fields_of_samples(samples, *self._makers), metrics=metrics
        )

    def draw(self, worker: DAGWorker, rows: Sequence[int], attempt: int) -> list[Sample]:
        """This data rank's judged samples of a round. Collective."""
        row = torch.tensor(rows, dtype=torch.int64)
        given = {"row": row, "attempt": torch.full_like(row, attempt)}
        batch = TensorDict(given, batch_size=[len(rows)])
        for one in self._nodes:
            if inspect.iscoroutinefunction(one.function):
                judging = partial(one, worker, batch)
                output = worker.run_on_leader(judging, "the judging of samples")
            else:
                output = one(worker, batch)
            batch = batch if output.batch is None else output.batch
            for name, value in output.fields.items():
                batch[name] = value
        return with_model_rewards(worker, samples_of(batch))


def dynamic_sampling(
    nodes: Sequence[NodeFunction[..., Any]], measure: Measure, makers: Sequence[ColumnMaker]
) -> NodeFunction[..., NodeOutput]:
    """The node's function, which reads, writes and uses what ``nodes`` do (``DynamicSampling``)."""
    reads = (*REWARD_MODEL, *(key for one in nodes for key in one.reads))
    uses: tuple[Service, ...] = tuple({used: None for one in nodes for used in one.uses})
    own = (name for one in nodes for name in one.writes or ())
    written = tuple(dict.fromkeys((*DRAWN, "sample", "score", OF_REWARD_MODEL, *own)))
    declare = node(reads=reads, writes=written, uses=uses)
    return declare(DynamicSampling(nodes, measure, makers))


def add_dynamic_sampling(
    pipeline: Pipeline,
    nodes: Sequence[NodeFunction[..., Any]],
    measure: Measure,
    makers: Sequence[ColumnMaker],
) -> tuple[str, list[str]]:
    """Add the node to ``pipeline``; returns the node that draws and those that judge."""
    name, function = "dynamic_sampling", dynamic_sampling(nodes, measure, makers)
    pipeline.add_node(name, function, node_role=NodeRole.DYNAMIC_SAMPLING)
    return name, [name]


def group_filter_weights(weights: Mapping[str, float]) -> dict[str, float]:
    """``weights`` without the punishment of long responses and without those that are 0."""
    return {name: w for name, w in weights.items() if w and name not in OVERLONG}


def require_rewards(samples: Sequence[Sample], weights: Mapping[str, float]) -> None:
    """Raise UserError where none of ``samples``, a draw of all data ranks, has a reward."""
    if samples and all(_outcome(sample).total is None for sample in samples):
        names = [name for name, weight in weights.items() if weight]
        raise_no_rewards([n for n in names if all(_outcome(s).rewards[n] is None for s in samples)])


def _outcome(sample: Sample) -> SampleRewards:
    assert sample.outcome is not None
    return sample.outcome


def groups_with_varied_rewards(
    samples: Sequence[Sample],
    weights: Mapping[str, float],
    *,
    gate: float | None = None,
    separately: bool = False,
) -> list[Group]:
    """The groups, whole and in order, whose judged samples earned different rewards: sums weighted
    by ``weights``, with the ``gate`` of ``combine_rewards``, and without the punishment of long
    responses; or, ``separately``, any one of the weighted rewards.
    """
    counted = group_filter_weights(weights)
    names = [*counted, *(["judge_gate"] if gate is not None else [])]
    parts: dict[str, Any] = {
        name: [_outcome(sample).rewards[name] for sample in samples] for name in names
    }
    compared = [*map(parts.get, counted)] if separately else [combine_rewards(parts, counted, gate)]
    useful = {uid for rewards in compared for uid in _varied(samples, rewards)}
    groups: dict[str, Group] = {}
    for sample in samples:
        if sample.uid in useful:
            groups.setdefault(sample.uid, []).append(sample)
    return list(groups.values())


def _varied(samples: Sequence[Sample], rewards: Any) -> set[str]:
    """The groups whose known rewards are not all equal."""
    judged = [(s.uid, r) for s, r in zip(samples, rewards, strict=True) if r is not None]
    if not judged:
        return set()
    uids = [uid for uid, _ in judged]
    signal = rows_in_varied_groups(torch.tensor([reward for _, reward in judged]), uids)
    return {uid for uid, differs in zip(uids, signal.tolist(), strict=True) if differs}


def _shared(worker: DAGWorker, groups: Sequence[Group]) -> list[Sample]:
    """This data rank's share of the step's groups, divided into mini-batches."""
    size = worker.config.actor_rollout_ref.actor.ppo_mini_batch_size
    samples = [
        dataclasses.replace(sample, mini_batch=number // size)
        for number, group in enumerate(groups)
        for sample in group
    ]
    mine = share_rows(
        [sample.size for sample in samples],
        worker.groups,
        shared_prefix=worker.config.shares_prefixes,
    )
    return [samples[number] for number in mine]

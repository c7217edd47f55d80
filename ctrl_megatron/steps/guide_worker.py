"""The worker of a run with the methods of siiRL's ``DAGWorker`` (section 5.5 of its guide).

A graph that was written after the guide names them ``ctrl_megatron.pipeline:DAGWorker.generate``.
They are the functions of ``grpo`` and ``ctrl``; some do the work of several of these, one after the
other.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

from ctrl_megatron.config import Config
from ctrl_megatron.graph.declarations import NodeFunction, node
from ctrl_megatron.graph.node import NodeOutput
from ctrl_megatron.graph.siirl_names import NodeRole
from ctrl_megatron.steps.ctrl import (
    advantages,
    compute_values,
    old_log_prob,
    place_scores,
    ref_log_prob,
    report_weight_sync,
    token_rewards,
    update_actor,
    update_critic,
)
from ctrl_megatron.steps.dynamic_sampling import dynamic_sampling
from ctrl_megatron.steps.grpo import (
    JUDGED,
    JUDGED_COLUMNS,
    generate_completions,
    measure_completions,
    reward_completions,
)
from ctrl_megatron.steps.model_reward import model_reward
from ctrl_megatron.steps.worker import DAGWorker as BaseWorker

Step = NodeFunction[..., NodeOutput]


def chain_node_functions(*steps: Step) -> Step:
    """A node's function that calls others in turn, each with the fields of those before it; it
    declares what they declare.
    """

    @node(
        reads=tuple(key for step in steps for key in step.reads),
        needs=lambda config: _needed(steps, config),
        writes=tuple(dict.fromkeys(name for step in steps for name in step.writes or ())),
        uses=tuple(dict.fromkeys(used for step in steps for used in step.uses)),
    )
    def every_step(worker: BaseWorker, batch: TensorDict) -> NodeOutput:
        # Coroutine functions that were started earlier may still read the batch.
        seen, fields, metrics = batch.copy(), dict[str, Any](), dict[str, float]()
        for step in steps:
            output = step(worker, seen)
            for name, value in output.fields.items():
                seen[name] = fields[name] = value
            metrics |= output.metrics
        return NodeOutput(fields=fields, metrics=metrics)

    return every_step


def _needed(steps: tuple[Step, ...], config: Config) -> dict[str, str]:
    """The fields that a step needs and none before it writes, as ``NodeFunction.needs``."""
    found, made = dict[str, str](), set[str]()
    for step in steps:
        found |= {name: why for name, why in step.needed_fields(config).items() if name not in made}
        made |= {*(step.writes or ())}
    return found


@node(writes=("score",), uses=("rewards",))
def rewarded(worker: BaseWorker, batch: TensorDict) -> NodeOutput:
    """``reward_completions`` and its end; nothing where dynamic sampling has judged already.
    Collective.
    """
    if "score" in batch:
        return NodeOutput()
    return worker.run_on_leader(lambda: reward_completions(worker, batch), "the judging of texts")


_REWARD = chain_node_functions(rewarded, model_reward, place_scores, token_rewards)
_REWARDED_LATER = "rewarded_later"
"""A field of an empty batch that asks for the work of ``_REWARD`` behind the draw."""


@node(writes=generate_completions.writes)
def completions(worker: BaseWorker, batch: TensorDict) -> NodeOutput:
    """``generate_completions``; nothing in a step whose rows dynamic sampling draws. Collective."""
    # The rows of all ranks.
    return generate_completions(worker, batch) if len(batch["row"]) else NodeOutput()


@node(reads=_REWARD.reads, needs=_REWARD.needs, writes=_REWARD.writes, uses=_REWARD.uses)
def scored(worker: BaseWorker, batch: TensorDict) -> NodeOutput:
    """The rewards on their tokens; for a step whose rows dynamic sampling has still to draw, the
    wish that it computes them. Collective.
    """
    if "response_mask" in batch:
        return _REWARD(worker, batch)
    return NodeOutput(fields={_REWARDED_LATER: torch.zeros(0)})


_SAMPLING = dynamic_sampling(JUDGED, measure_completions, JUDGED_COLUMNS)


@node(reads=_SAMPLING.reads, writes=_SAMPLING.writes, uses=_SAMPLING.uses)
def drawn_groups(worker: BaseWorker, batch: TensorDict) -> NodeOutput:
    """Completions of groups with different rewards, judged; with the rewards on their tokens if the
    node that computes them came before, as the guide has it. Collective.
    """
    output = _SAMPLING(worker, batch)
    if _REWARDED_LATER not in batch:
        return output
    assert output.batch is not None
    placed = _REWARD(worker, output.batch)
    metrics = {**output.metrics, **placed.metrics}
    return NodeOutput(batch=output.batch, fields=placed.fields, metrics=metrics)


class ModelOfRole:
    """A model of the run under the guide's method names (section 5.5). Each takes the batch and
    returns a copy of it with the fields that were computed, and the entry ``metrics`` (a dict).
    Collective.
    """

    def __init__(self, worker: BaseWorker) -> None:
        self._worker = worker

    def generate_sequences(self, batch: TensorDict) -> TensorDict:
        return self._done(generate_completions, batch)

    def compute_log_prob(self, batch: TensorDict) -> TensorDict:
        return self._done(old_log_prob, batch)

    def compute_ref_log_prob(self, batch: TensorDict) -> TensorDict:
        return self._done(ref_log_prob, batch)

    def compute_values(self, batch: TensorDict) -> TensorDict:
        return self._done(compute_values, batch)

    def update_actor(self, batch: TensorDict) -> TensorDict:
        return self._done(_TRAIN_ACTOR, batch)

    def update_critic(self, batch: TensorDict) -> TensorDict:
        return self._done(update_critic, batch)

    def _done(self, step: Step, batch: TensorDict) -> TensorDict:
        output = step(self._worker, batch)
        done = (batch if output.batch is None else output.batch).copy()
        for name, value in output.fields.items():
            done[name] = value
        return done.set_non_tensor("metrics", dict(output.metrics))


_TRAIN_ACTOR = chain_node_functions(update_actor, report_weight_sync)


class GuideWorker(BaseWorker):
    """The worker of a run; ``DAGWorker`` of ``ctrl_megatron.pipeline``."""

    @property
    def agent_group(self) -> dict[NodeRole, ModelOfRole]:
        """The models of the policy that a node belongs to, by role, as the guide's methods get
        them in ``kwargs["agent_group"]``."""
        model = ModelOfRole(self)
        roles = NodeRole.ROLLOUT, NodeRole.ACTOR, NodeRole.REFERENCE, NodeRole.CRITIC
        return dict.fromkeys(roles, model)

    generate = completions
    compute_reward = scored
    compute_model_reward = model_reward
    dynamic_sampling = drawn_groups
    compute_value = compute_values
    compute_advantage = advantages
    compute_old_log_prob = old_log_prob
    compute_ref_log_prob = ref_log_prob
    train_actor = _TRAIN_ACTOR
    train_critic = update_critic


DAGWorker = GuideWorker
"""The guide's name."""

"""The pipelines that come with the package."""

from __future__ import annotations

from typing import NamedTuple

from ctrl_megatron.pipeline.builder import Pipeline
from ctrl_megatron.pipeline.node import NodePlace, NodeRole, NodeType
from ctrl_megatron.pipeline.task_graph import TaskGraph

_HERE = "ctrl_megatron.pipeline."
_INFERENCE, _TRAIN = NodeType.MODEL_INFERENCE, NodeType.MODEL_TRAIN


def ctrl_pipeline(
    *, values: bool = False, dynamic_sampling: bool = False, greedy_baseline: bool = False
) -> TaskGraph:
    """Critique, revise, judge beside the log-probs, estimate advantages, update, sync.

    The sandbox node stands before the log-probs and nothing up to the scores depends on it, so it
    runs while they are computed. ``values`` adds the value model of PPO. ``dynamic_sampling`` makes
    one node of speaking and judging, which repeats until enough groups teach something; nothing can
    run beside it. ``greedy_baseline`` adds a greedy critique per prompt.
    """
    pipeline = Pipeline("ctrl_training_pipeline", "critique-revision policy optimisation")
    judged = _sampled(pipeline) if dynamic_sampling else _spoken(pipeline, greedy_baseline)
    _forward(pipeline, "old_log_prob", "ctrl_nodes:old_log_prob", judged.spoken, NodeRole.ACTOR)
    _forward(
        pipeline, "ref_log_prob", "ctrl_nodes:ref_log_prob", "old_log_prob", NodeRole.REFERENCE
    )
    estimated_from = ["token_rewards"]
    if values:
        _forward(pipeline, "values", "value_update:compute_values", "ref_log_prob", NodeRole.CRITIC)
        estimated_from.append("values")
    _compute(pipeline, "scores", "ctrl_nodes:place_scores", [judged.verdicts], NodeRole.REWARD)
    _compute(
        pipeline,
        "rollout_correction",
        "mismatch:correct_mismatch",
        ["scores", "old_log_prob"],
        NodeRole.ADVANTAGE,
    )
    _compute(
        pipeline,
        "token_rewards",
        "ctrl_nodes:token_rewards",
        ["scores", "old_log_prob", "ref_log_prob"],
        NodeRole.REWARD,
    )
    _compute(pipeline, "advantages", "ctrl_nodes:advantages", estimated_from, NodeRole.ADVANTAGE)
    ready = ["advantages", "rollout_correction"]
    if values:
        _train(pipeline, "critic_update", "value_update:update_critic", ready, NodeRole.CRITIC)
        ready = ["critic_update"]
    _train(pipeline, "actor_update", "actor_update:update_actor", ready, NodeRole.ACTOR)
    _train(pipeline, "sync_weights", "ctrl_nodes:sync_weights", ["actor_update"], NodeRole.ACTOR)
    return pipeline.build()


class _Judged(NamedTuple):
    """Names of the nodes after which the texts, and the verdicts, exist."""

    spoken: str
    verdicts: str


def _spoken(pipeline: Pipeline, greedy_baseline: bool) -> _Judged:
    after: list[str] = []
    speakers = {"generate_critiques": "ctrl_nodes:generate_critiques"}
    if greedy_baseline:
        speakers["greedy_baseline"] = "greedy_baseline:draw_greedy"
    speakers["generate_revisions"] = "ctrl_nodes:generate_revisions"
    for name, function in speakers.items():
        pipeline.add_node(
            name,
            _HERE + function,
            after,
            node_type=_INFERENCE,
            node_role=NodeRole.ROLLOUT,
            place=NodePlace.ROLLOUT,
        )
        after = [name]
    pipeline.add_node(
        "sandbox",
        f"{_HERE}ctrl_nodes:judge_revisions",
        after,
        node_type=NodeType.ENV_INTERACT,
        node_role=NodeRole.REWARD,
        place=NodePlace.HOST,
    )
    return _Judged("generate_revisions", "sandbox")


def _sampled(pipeline: Pipeline) -> _Judged:
    pipeline.add_node(
        "dynamic_sampling",
        f"{_HERE}dynamic_sampling:sample_groups",
        node_type=NodeType.COMPUTE,
        node_role=NodeRole.DYNAMIC_SAMPLING,
        place=NodePlace.ROLLOUT,
    )
    return _Judged("dynamic_sampling", "dynamic_sampling")


def _forward(pipeline: Pipeline, name: str, function: str, after: str, role: NodeRole) -> None:
    pipeline.add_node(
        name,
        _HERE + function,
        [after],
        node_type=_TRAIN,
        node_role=role,
        only_forward_compute=True,
    )


def _compute(
    pipeline: Pipeline, name: str, function: str, after: list[str], role: NodeRole
) -> None:
    pipeline.add_node(name, _HERE + function, after, node_role=role)


def _train(pipeline: Pipeline, name: str, function: str, after: list[str], role: NodeRole) -> None:
    pipeline.add_node(name, _HERE + function, after, node_type=_TRAIN, node_role=role)

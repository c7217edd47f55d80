"""A graph that lacks what its keys need is refused before it starts, by key and node."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from ctrl_megatron.algorithms import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
from ctrl_megatron.config import Config, load_config
from ctrl_megatron.errors import UserError
from ctrl_megatron.graph.declarations import node
from ctrl_megatron.pipeline import NodeRole, NodeType, Pipeline
from ctrl_megatron.run.checks.nodes import check_fields
from ctrl_megatron.steps import ctrl, grpo
from examples import two_agents

ACTOR, CORRECTION = "actor_rollout_ref.actor.", "algorithm.rollout_correction."
TRAIN: dict[str, Any] = {"node_type": NodeType.MODEL_TRAIN}
CHAIN: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "draw": (grpo.generate_completions, {"node_type": NodeType.MODEL_INFERENCE}),
    "reward": (grpo.reward_completions, {}),
    "old": (ctrl.old_log_prob, {"only_forward_compute": True, **TRAIN}),
    "ref": (ctrl.ref_log_prob, {"only_forward_compute": True, **TRAIN}),
    "values": (ctrl.compute_values, {"only_forward_compute": True, **TRAIN}),
    "scores": (ctrl.place_scores, {}),
    "correction": (ctrl.rollout_correction, {}),
    "rewards": (ctrl.token_rewards, {}),
    "advantages": (ctrl.advantages, {}),
    "critic": (ctrl.update_critic, {"node_role": NodeRole.CRITIC, **TRAIN}),
    "update": (ctrl.update_actor, TRAIN),
}
OF_VALUES = ("values", "critic")


def config_of(*overrides: str) -> Config:
    own = "dag.custom_pipeline_fn=mine:build"
    return load_config(None, [own, "reward.reward_funcs=[code]", *overrides], "none")


def check(config: Config, *without: str, **instead: tuple[Callable[..., Any], dict]) -> None:
    """The chain of all nodes except ``without``, in its order."""
    pipeline, before = Pipeline("mine"), list[str]()
    for name, (function, options) in ({**CHAIN, **instead}).items():
        if name not in without:
            pipeline.add_node(name, function, before, **options)
            before = [name]
    check_fields(config, pipeline.build())


@pytest.mark.parametrize(
    ("overrides", "lacks", "said"),
    [
        ((ACTOR + "use_kl_loss=true",), ("ref",), "use_kl_loss=true: the node 'update'"),
        (
            ("algorithm.use_kl_in_reward=true",),
            ("ref",),
            "algorithm.use_kl_in_reward=true: the node 'rewards'",
        ),
        (("algorithm.use_kl_in_reward=true",), ("old",), "'rewards' .* needs the field old_log_pr"),
        ((ACTOR + "ppo_epochs=2",), ("old",), "ppo_epochs=2: the node 'update'"),
        ((ACTOR + "policy_loss=clip_cov",), ("old",), "'update' .* needs the field old_log_probs"),
        ((CORRECTION + "rollout_is=token",), ("old",), "rollout_is=token: the node 'correction'"),
        (
            (CORRECTION + "rollout_rs=token",),
            ("correction",),
            "rollout_rs=token: the node 'update'",
        ),
        (("algorithm.adv_estimator=gae",), ("values",), "adv_estimator=gae: the node 'advantages'"),
        (("algorithm.adv_estimator=gae",), ("critic",), "adv_estimator=gae: no node .* trains"),
        (("algorithm.adv_estimator=remax",), OF_VALUES, "remax: the node 'advantages' .*baselines"),
        ((), (), "adv_estimator=grpo: the node 'values' .* uses a value model"),
        (("critic.enable=false",), (), "critic.enable=false: the node 'values' .* uses a"),
        ((), ("advantages", *OF_VALUES), "the node 'update' .* needs the field advantages"),
        ((), ("scores", *OF_VALUES), "the node 'rewards' .* needs the field token_level_scores"),
        ((), ("reward", *OF_VALUES), "the node 'scores' .* needs the field score"),
        ((), ("draw", *OF_VALUES), "the node 'correction' .* needs the field rollout_log_probs"),
    ],
)
def test_a_missing_field_is_reported_with_key_and_node(
    overrides: tuple[str, ...], lacks: tuple[str, ...], said: str
) -> None:
    config = config_of(*overrides)
    without = {*lacks} | ({*OF_VALUES} if not config.needs_value_model and lacks else set())
    with pytest.raises(UserError, match=said):
        check(config, *without)


@pytest.mark.parametrize(
    "overrides",
    [
        (ACTOR + "use_kl_loss=true",),
        ("algorithm.use_kl_in_reward=true",),
        ("algorithm.adv_estimator=gae", ACTOR + "ppo_epochs=2", CORRECTION + "rollout_is=token"),
        (ACTOR + "policy_loss=kl_cov",),
    ],
)
def test_a_whole_graph_is_right(overrides: tuple[str, ...]) -> None:
    config = config_of(*overrides)
    check(config, *(() if config.needs_value_model else OF_VALUES))


def anything(worker: Any, batch: Any) -> None: ...


def test_a_function_of_ones_own_may_write_anything_but_what_its_role_does_not_say() -> None:
    config = config_of(ACTOR + "use_kl_loss=true")
    check(config, *OF_VALUES, advantages=(anything, {}), rewards=(anything, {}))
    with pytest.raises(UserError, match=r"the node 'update' .*ref_log_prob.*role REFERENCE"):
        check(config, *OF_VALUES, ref=(anything, {}))
    check(config, *OF_VALUES, ref=(anything, {"node_role": NodeRole.REFERENCE}))
    check(config, *OF_VALUES, ref=(node(writes=("ref_log_prob",))(anything), {}))


def test_what_a_function_of_ones_own_needs_is_asked_for_too() -> None:
    hungry = node(needs=lambda config: {"hints": "my.key=true"})(anything)
    with pytest.raises(UserError, match=r"^my.key=true: the node 'old' .* needs the field hints"):
        check(config_of(), *OF_VALUES, old=(hungry, {}))


def test_a_host_node_must_be_waited_for() -> None:
    pipeline = Pipeline("mine")
    pipeline.add_node("draw", grpo.generate_completions)
    pipeline.add_node("reward", grpo.reward_completions, ["draw"])
    pipeline.add_node("scores", ctrl.place_scores, ["draw"])
    with pytest.raises(UserError, match=r"the node 'scores' .* score, .*depend on the host node"):
        check_fields(config_of(), pipeline.build())


SECOND = "agent1.model.path=solver"


def test_the_nodes_of_each_policy_have_what_they_need_from_its_own() -> None:
    config = config_of(SECOND, ACTOR + "use_kl_loss=true", "data.train_batch_size=256")
    check_fields(config, two_agents.build(config))
    pipeline = Pipeline("mine")
    pipeline.add_node("draw", grpo.generate_completions)
    pipeline.add_node("other", grpo.generate_completions, agent_group=1)
    reference: dict[str, Any] = {"node_role": NodeRole.REFERENCE, **TRAIN}
    pipeline.add_node("ref", ctrl.ref_log_prob, ["draw", "other"], **reference)
    pipeline.add_node("update", ctrl.update_actor, ["ref"], agent_group=1, **TRAIN)
    with pytest.raises(UserError) as refused:
        check_fields(config, pipeline.build())
    lines = str(refused.value).splitlines()
    assert len(lines) == 3 and all("pipeline mine" in line for line in lines)
    # The first policy's reference is of no use to the second, which the graph gives none.
    assert "'update'" in lines[0] and "advantages" in lines[0]
    assert "'update'" in lines[1] and "ref_log_prob" in lines[1]
    assert "no node of the pipeline mine uses the reference" in lines[2]


@pytest.mark.parametrize(
    ("overrides", "policy", "said"),
    [
        ((), 1, "'draw' .* agent_group=1, .* trains 1 policy; name a directory in policies.agent1"),
        (
            (SECOND,),
            2,
            "'draw' .* agent_group=2, .* trains 2 policies; .* give the node a smaller",
        ),
        ((SECOND,), 0, "policies.agent1: no node .* has agent_group 1"),
    ],
)
def test_policies_are_those_of_the_configuration(
    overrides: tuple[str, ...], policy: int, said: str
) -> None:
    pipeline = Pipeline("mine").add_node("draw", grpo.generate_completions, agent_group=policy)
    with pytest.raises(UserError, match=said):
        check_fields(config_of(*overrides), pipeline.build())


KL = ((), (ACTOR + "use_kl_loss=true",), ("algorithm.use_kl_in_reward=true",))
SAMPLING = ((), ("algorithm.filter_groups.enable=true",), (CORRECTION + "rollout_is=token",))


def test_the_pipelines_of_the_package_lack_nothing() -> None:
    for estimator, kl, sampling in itertools.product(ADV_ESTIMATOR_REGISTRY, KL, SAMPLING):
        if estimator == "remax" and "filter" in str(sampling):
            continue
        if estimator == "gdpo" and "use_kl_in_reward=true" in str(kl):
            continue
        keys = [f"algorithm.adv_estimator={estimator}", *kl, *sampling]
        config = load_config(None, keys, "none")
        check_fields(config, ctrl.ctrl_pipeline(config))
        if estimator != "remax":
            own = ["dag.custom_pipeline_fn=ctrl_megatron.pipeline:grpo_pipeline"]
            config = load_config(None, [*keys, *own, "reward.reward_funcs=[code]"], "none")
            check_fields(config, grpo.grpo_pipeline(config))
    for loss, epochs in itertools.product(POLICY_LOSS_REGISTRY, (1, 2)):
        keys = [f"{ACTOR}policy_loss={loss}", f"{ACTOR}ppo_epochs={epochs}"]
        config = load_config(None, [*keys, "data.train_batch_size=256"], "none")
        check_fields(config, ctrl.ctrl_pipeline(config))

"""Steps that compute ``old_log_probs`` before the update, and steps that use the update's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from ctrl_megatron.config import Config, load_config
from ctrl_megatron.pipeline import ctrl_pipeline, grpo_pipeline
from ctrl_megatron.steps.ctrl import update_actor

_A = "actor_rollout_ref.actor."
ONE_STEP = ("data.train_batch_size=8", _A + "ppo_mini_batch_size=8")


def config_of(*overrides: str) -> Config:
    return load_config("examples/ctrl_smollm2_cpu.yaml", [*ONE_STEP, *overrides])


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        (_A + "use_kl_loss=true",),
        ("algorithm.adv_estimator=gae", "trainer.critic_warmup=2"),
        ("algorithm.adv_estimator=remax",),
        ("algorithm.filter_groups.enable=true",),
        (_A + "policy_loss=gspo",),
    ],
)
def test_one_step_on_the_weights_that_drew_the_batch_needs_none(overrides: tuple[str, ...]) -> None:
    graph = ctrl_pipeline(config_of(*overrides))
    assert "old_log_prob" not in graph.nodes
    order = graph.get_topological_sort()
    # Their metrics are reported after the update has computed them.
    assert order.index("actor_update") < order.index("rollout_correction")


@pytest.mark.parametrize(
    "overrides",
    [
        (_A + "ppo_epochs=2",),
        (_A + "ppo_mini_batch_size=4",),
        (_A + "use_kl_loss=false", "algorithm.use_kl_in_reward=true"),
        ("algorithm.rollout_correction.rollout_is=token",),
        ("algorithm.rollout_correction.rollout_rs=sequence",),
        (_A + "policy_loss=kl_cov",),
        (_A + "policy_loss=clip_cov",),
    ],
)
def test_whatever_reads_them_before_the_update_brings_the_node(overrides: tuple[str, ...]) -> None:
    graph = ctrl_pipeline(config_of(*overrides))
    assert "old_log_prob" in graph.get_ancestors("rollout_correction")
    assert "rollout_correction" in graph.get_ancestors("actor_update")


def test_the_pipeline_without_critiques_ends_the_same_way() -> None:
    keys = ("dag.custom_pipeline_fn=ctrl_megatron.pipeline:grpo_pipeline",)
    keys += ("reward.reward_funcs=[code]",)
    assert "old_log_prob" not in grpo_pipeline(config_of(*keys)).nodes
    assert "old_log_prob" in grpo_pipeline(config_of(*keys, _A + "ppo_epochs=3")).nodes


def test_a_pipeline_without_the_node_is_refused() -> None:
    worker: Any = SimpleNamespace(actor_learns=True, config=config_of(_A + "ppo_epochs=2"))
    ones = torch.ones(2, 3)
    batch = TensorDict({"response_mask": ones.bool(), "advantages": ones}, batch_size=[2])
    batch["uid"] = NonTensorStack("a", "b")
    with pytest.raises(ValueError, match="add the node old_log_prob to the pipeline"):
        update_actor(worker, batch)

"""The shipped examples load, fit their machines, and keep the recipe they claim."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctrl_megatron.config import check_world_size, load_config

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.yaml")), ids=lambda p: p.name)
def test_every_example_loads_and_fits_its_world(file: Path) -> None:
    config = load_config(file)
    assert load_config(file, purpose="sft") == config
    check_world_size(config, config.trainer.nnodes * config.trainer.n_gpus_per_node)


def test_the_examples_exist() -> None:
    names = {p.name for p in EXAMPLES.glob("*.yaml")}
    assert {"ctrl_smollm2_cpu.yaml", "ctrl_7b.yaml", "ctrl_70b.yaml"} <= names
    assert {"qwen3_30b_a3b.yaml", "qwen3_235b.yaml", "diffucoder_7b.yaml"} <= names


def test_the_weak_critic_has_a_stranger_of_its_own_engines() -> None:
    keys = load_config(EXAMPLES / "weak_to_strong_cpu.yaml").actor_rollout_ref
    assert keys.proxy.kind == "engine" and keys.proxy.engine.name == "vllm"
    assert keys.proxy.model.path != keys.model.path


def test_the_70b_example_is_the_papers_recipe_on_64_gpus() -> None:
    config = load_config(EXAMPLES / "ctrl_70b.yaml")
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    megatron = actor.megatron
    assert (megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size) == (8, 8)
    assert megatron.sequence_parallel and actor.compute.recompute_granularity == "selective"
    assert (rollout.name, rollout.tensor_model_parallel_size, rollout.n) == ("vllm", 8, 8)
    assert (config.data.train_batch_size, actor.ppo_mini_batch_size) == (1024, 256)
    assert (config.data.max_prompt_length, config.data.max_response_length) == (1536, 768)
    assert (actor.optim.lr, actor.optim.lr_scheduler_type) == (1e-5, "constant")
    assert (actor.use_kl_loss, actor.kl_loss_coef, actor.kl_loss_type) == (
        True,
        0.001,
        "low_var_kl",
    )
    assert config.trainer.nnodes * config.trainer.n_gpus_per_node == 64

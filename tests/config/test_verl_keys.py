"""A key of verl is a key here, or the error names the key that replaces it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ctrl_megatron.config import load_config
from ctrl_megatron.config.foreign import FOREIGN, foreign_key_hint
from ctrl_megatron.config.schema import KEYS

PAGE = (Path(__file__).parents[2] / "docs/coming_from.md").read_text(encoding="utf-8")
EXAMPLE = {
    "algorithm": "adv_estimator use_kl_in_reward",
    "data": "train_files val_files return_raw_chat train_batch_size max_prompt_length "
    "max_response_length filter_overlong_prompts truncation",
    "actor_rollout_ref.model": "path enable_gradient_checkpointing",
    "actor_rollout_ref.actor.optim": "lr",
    "actor_rollout_ref.actor": "ppo_mini_batch_size ppo_micro_batch_size_per_gpu use_kl_loss "
    "kl_loss_coef kl_loss_type entropy_coeff",
    "actor_rollout_ref.actor.megatron": "pipeline_model_parallel_size tensor_model_parallel_size",
    "actor_rollout_ref.rollout": "log_prob_micro_batch_size_per_gpu tensor_model_parallel_size "
    "name mode gpu_memory_utilization n",
    "actor_rollout_ref.ref": "log_prob_micro_batch_size_per_gpu",
    "actor_rollout_ref.ref.megatron": "pipeline_model_parallel_size tensor_model_parallel_size",
    "trainer": "critic_warmup logger project_name experiment_name n_gpus_per_node nnodes "
    "save_freq test_freq total_epochs",
}
"""By their groups, the keys of verl's ``run_qwen2-7b_math_megatron.sh`` (commit 3f38806)."""
ROW = re.compile(r"^\| `([a-z_.]+)` \| (.*) \|$", re.MULTILINE)
TABLES = PAGE.partition("key by key")[2].partition("## A run")[0]
SHOWN = dict(ROW.findall(TABLES))


def test_every_key_of_the_example_has_a_line() -> None:
    keys = [f"{group}.{name}" for group, names in EXAMPLE.items() for name in names.split()]
    assert len(keys) == 39
    assert [key for key in keys if key not in SHOWN] == []


@pytest.mark.parametrize(("key", "here"), SHOWN.items(), ids=SHOWN)
def test_the_page_says_what_the_command_says(key: str, here: str) -> None:
    if here == "the same":
        assert key in KEYS
        return
    assert key not in KEYS
    if here.startswith("none: "):
        answer = f"{here.removeprefix('none: ')}; leave it out"
    else:
        assert here.strip("`") == FOREIGN[key].here
        answer = f"here that is {FOREIGN[key].here}"
    with pytest.raises(ValueError) as raised:
        load_config(None, [f"{key}=1"], "none")
    assert str(raised.value) == f"override '{key}=1': unknown key {key!r}: {answer}"


def test_a_group_of_theirs_is_answered_key_by_key(tmp_path: Path) -> None:
    file = tmp_path / "verl.yaml"
    file.write_text(
        "reward_model:\n  reward_manager: dapo\n  reward_kwargs: {max_resp_len: 9}\n"
        "  enable: false\n  model: {input_tokenizer: models/actor}\n"
        "actor_rollout_ref:\n  ref: {megatron: {param_offload: true}}\n"
    )
    with pytest.raises(ValueError) as raised:
        load_config(file, [], "none")
    lines = str(raised.value).splitlines()
    told = [line.partition("unknown key ")[2].partition(":")[0] for line in lines]
    assert sorted(told) == [
        "'actor_rollout_ref.ref.megatron.param_offload'",
        "'reward_model.model.input_tokenizer'",
        "'reward_model.reward_kwargs.max_resp_len'",
        "'reward_model.reward_manager'",
    ]
    assert all(str(file) in line for line in lines)


@pytest.mark.parametrize(
    "name", ["trainer.log_val_generations", "trainer.log_val_generations.anything.else"]
)
def test_keys_below_a_group_of_theirs_are_answered(name: str) -> None:
    assert FOREIGN["trainer.log_val_generations"].reason in foreign_key_hint(name)
    assert foreign_key_hint("nobodys.key") == foreign_key_hint("actor_rollout_ref.actor.lrr") == ""


def test_hydras_plus_is_named() -> None:
    with pytest.raises(ValueError, match=r"'\+trainer.seed'.*without a \+"):
        load_config(None, ["+trainer.seed=2"], "none")


DIFFUCODER = """
    model_name_or_path torch_dtype trust_remote_code dataset_name dataset_prompt_column
    system_prompt sync_ref_model ref_model_sync_steps beta epsilon scale_rewards bf16 use_vllm
    do_eval num_generations num_iterations per_device_eval_batch_size per_device_train_batch_size
    gradient_accumulation_steps gradient_checkpointing gradient_checkpointing_kwargs.use_reentrant
    learning_rate adam_beta1 adam_beta2 weight_decay max_grad_norm log_completions log_level
    logging_first_step logging_steps logging_strategy lr_scheduler_type
    lr_scheduler_kwargs.min_lr_rate num_train_epochs output_dir overwrite_output_dir e2b_router_url
    max_prompt_length max_completion_length random_masking p_mask_prompt diffusion_steps
    generation_batch_size generation_temperature report_to wandb_entity wandb_project reward_funcs
    reward_weights save_strategy save_steps save_total_limit seed warmup_ratio
"""
"""The keys of DiffuCoder's ``recipes/config_coupled_code.yaml`` (commit 29c2225)."""


def test_every_key_of_diffucoders_recipe_is_answered(tmp_path: Path) -> None:
    names, file = DIFFUCODER.split(), tmp_path / "config_coupled_code.yaml"
    lines = [n if "." not in n else "{}:\n  {}".format(*n.split(".")) for n in names]
    file.write_text("".join(f"{line}: 1\n" for line in lines))
    with pytest.raises(ValueError) as raised:
        load_config(file, [], "none")
    answers = dict(re.findall(r"unknown key '(.*?)': (.*)", str(raised.value)))
    assert sorted(answers) == sorted(names)
    assert all(
        a.removeprefix("here that is ") in KEYS or a.endswith("; leave it out")
        for a in answers.values()
    )

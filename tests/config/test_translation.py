"""``config_format``: files of other trainers become the configuration that a reader would write."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from ctrl_megatron.config import KEYS, Config, load_config
from ctrl_megatron.config.foreign import FOREIGN
from ctrl_megatron.config.load import to_dict, to_yaml
from ctrl_megatron.config.translation import CONFIG_FORMATS
from ctrl_megatron.errors import UserError

GUIDE = Path(__file__).parents[2] / "examples/guide"
ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
OURS: dict[str, tuple[str, ...]] = {
    "siirl": (
        *("data.train_files=/path/to/train.parquet", "data.train_batch_size=512"),
        *("data.max_prompt_length=2048", "data.max_response_length=4096"),
        *("actor_rollout_ref.model.path=/path/to/model", "actor_rollout_ref.model.dtype=bfloat16"),
        *(ACTOR + "strategy=fsdp", ACTOR + "clip_ratio=0.2", ACTOR + "entropy_coeff=0.01"),
        *(ACTOR + "ppo_epochs=1", ACTOR + "ppo_mini_batch_size=256", ACTOR + "grad_clip=1"),
        *(ACTOR + "optim.lr=1e-6", ACTOR + "optim.weight_decay=0.01"),
        *(ACTOR + "optim.lr_scheduler_type=cosine", ACTOR + "optim.lr_warmup_steps_ratio=0.1"),
        *(ROLLOUT + "name=vllm", ROLLOUT + "tensor_model_parallel_size=2", ROLLOUT + "n=8"),
        *(ROLLOUT + "temperature=1.0", ROLLOUT + "top_p=1.0"),
        *("trainer.n_gpus_per_node=8", "trainer.total_epochs=30", "trainer.save_freq=10"),
        *("trainer.project_name=my_project", "trainer.experiment_name=grpo_training"),
        *("trainer.logger=wandb", "reward.reward_funcs=[code]"),
        "dag.custom_pipeline_fn=ctrl_megatron.pipeline:grpo_pipeline",
    ),
    "ctrl": (
        *("data.train_files=/path/to/train.parquet", "data.val_files=/path/to/test.parquet"),
        *("actor_rollout_ref.model.path=/path/to/model", ACTOR + "ppo_mini_batch_size=256"),
        *(ACTOR + "entropy_coeff=0.001", ROLLOUT + "placement=colocated", ROLLOUT + "name=vllm"),
        *(ROLLOUT + "n=4", "algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0.001"),
    ),
    "diffucoder": (
        *("data.train_files=/path/to/train.parquet", "data.train_batch_size=2"),
        *("actor_rollout_ref.model.path=/path/to/model", "data.max_response_length=256"),
        *("reward.reward_funcs=[code, code_format]", "reward.reward_weights=[2.0, 0.5]"),
        *("reward.max_requests=2", ROLLOUT + "name=diffusion", ROLLOUT + "n=10"),
        *(ROLLOUT + "engine_kwargs={steps: 256}", ACTOR + "ppo_mini_batch_size=2"),
        *(ACTOR + "ppo_epochs=2", ACTOR + "clip_ratio=0.5", ACTOR + "clip_ratio_c=null"),
        *(ACTOR + "use_kl_loss=true", ACTOR + "kl_loss_coef=0.01", "algorithm.adv_estimator=rloo"),
        "algorithm.adv_estimator_options={norm_by_std: false}",
        "dag.custom_pipeline_fn=ctrl_megatron.pipeline:coupled_grpo_pipeline",
    ),
}
"""What a reader of the printed block would write here."""


@pytest.mark.parametrize("form", OURS)
def test_a_printed_block_is_what_a_reader_would_write(form: str, tmp_path: Path) -> None:
    config = load_config(GUIDE / f"{form}.yaml")
    wanted = load_config(None, OURS[form])
    assert _read(config) == _read(wanted)
    again = tmp_path / "config.yaml"
    again.write_text(to_yaml(config))
    assert "config_format" not in again.read_text()
    assert load_config(again).written and _read(load_config(again)) == _read(wanted)


def _read(config: Config) -> dict[str, Any]:
    """What is read of a configuration, as its file has it."""
    return yaml.safe_load(to_yaml(config))


@pytest.mark.parametrize("form", OURS)
def test_every_key_of_a_printed_block_has_its_line(form: str) -> None:
    config = load_config(GUIDE / f"{form}.yaml")
    lines = (GUIDE / f"{form}.yaml").read_text().splitlines()
    told = {int(n) for n in re.findall(r"\.yaml line (\d+)", "\n".join(config.translation))}
    for number, line in enumerate(lines, 1):
        name, colon, value = line.partition("#")[0].strip().partition(":")
        if not colon or not value.strip() or name == "config_format":
            continue
        kept = any(place.text.endswith(f" line {number}") for place in config.written.values())
        null = value.strip() == "null"
        assert (number in told) or kept or null or name == "val_before_train", line


@pytest.mark.parametrize("name", FOREIGN)
def test_every_entry_of_the_table_does_what_it_says(name: str) -> None:
    entry, tree = FOREIGN[name], to_dict(Config())
    values = (
        *(1, 2, 0.5, True, False, 0, -1, "text", "error", "naive", "DAPO", "cosine", "steps"),
        *("data_source", "auto", ["x"], {"path": "a.py"}, tree["data"]["max_response_length"]),
    )
    found = []
    for value in values:
        try:
            found.append(entry.taken(value, tree))
        except (TypeError, AttributeError):  # a value of a type that the key cannot have
            continue
    settings = [one for one in found if one]
    assert all(key in KEYS for one in settings for key in one)
    mapped, refused = bool(settings), None in found
    if not entry.here.startswith("actor_rollout_ref.ref.sync"):  # sync_ref_model decides
        assert mapped == ("mapped" in entry.fate)
    assert refused == ("refused" in entry.fate) or entry.reason.endswith("is that of both models")
    assert ({} in found) or "passed" not in entry.fate or entry.here or entry.reason


def translated(form: str, *overrides: str) -> Config:
    return load_config(None, [f"config_format={form}", *overrides], "none")


@pytest.mark.parametrize("form", CONFIG_FORMATS)
@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.truncation=left", "no prompt is cut"),
        (ACTOR + "optim.lr_warmup_steps=10", "lr_warmup_steps_ratio"),
        ("actor_rollout_ref.hybrid_engine=false", "rollout.placement"),
        ("algorithm.workflow_type=EMBODIED", "embodied_srpo_pipeline"),
        ("actor_rollout_ref.model.lora_dropout=0.1", "adapters have no dropout"),
        ("critic.grad_clip=0.3", "actor.grad_clip is that of both models"),
        ("trainer.val_only=true", "ctrl-evaluate"),
        ("system_prompt=Be kind", "whole conversations"),
    ],
)
def test_what_would_change_the_result_is_refused(form: str, override: str, said: str) -> None:
    with pytest.raises(UserError, match=re.escape(override.partition("=")[0])) as raised:
        translated(form, override)
    assert "has no counterpart" in str(raised.value) and said in str(raised.value)


def test_unknown_keys_and_groups_of_one_are_refused_as_ever() -> None:
    with pytest.raises(
        UserError, match=r"unknown key 'trainer\.sed'.*did you mean 'trainer\.seed'"
    ):
        translated("verl", "trainer.sed=1")
    with pytest.raises(UserError, match=r"rollout\.n=1 gives .* groups of one"):
        translated("ctrl", ROLLOUT + "n=1")
    with pytest.raises(UserError, match="config_format must be one of ctrl, siirl"):
        translated("slime")
    with pytest.raises(UserError, match=r"unknown key 'actor_rollout_ref\.hybrid_engine'"):
        load_config(None, ["actor_rollout_ref.hybrid_engine=true"], "none")


def test_two_keys_for_one_setting(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("learning_rate: 1e-5\nactor_rollout_ref: {actor: {optim: {lr: 1e-6}}}\n")
    with pytest.raises(UserError, match=r"line 2.*optim.lr=1e-06 sets .*learning_rate=1e-05 sets"):
        load_config(file, ["config_format=diffucoder"], "none")
    for override in ("learning_rate=3e-6", ACTOR + "optim.lr=3e-6"):
        config = load_config(file, ["config_format=diffucoder", override], "none")
        assert config.actor_rollout_ref.actor.optim.lr == 3e-6


def test_references_are_those_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SECRET_PATH", "/secret/model")
    file = tmp_path / "run.yaml"
    file.write_text(
        "config_format: verl\n"
        "data: {max_prompt_length: 100, max_response_length: 60, train_batch_size: 8}\n"
        "actor_rollout_ref:\n"
        "  model: {path: '${oc.env:MY_SECRET_PATH}', use_remove_padding: true}\n"
        "  actor: {max_grad_norm: 0.7, ppo_mini_batch_size: '${data.train_batch_size}'}\n"
        "critic: {grad_clip: '${actor_rollout_ref.actor.max_grad_norm}'}\n"
        "algorithm: {adv_estimator: gae}\n"
        "custom_reward_function: {path: mine.py, name: null, reward_kwargs: {a: 1}}\n"
    )
    with pytest.raises(UserError, match=r"critic\.grad_clip=0\.7 has no counterpart"):
        load_config(file, [], "none")
    file.write_text(file.read_text().replace("max_grad_norm", "grad_clip"))
    config = load_config(file, [], "none")
    assert config.actor_rollout_ref.actor.ppo_mini_batch_size == 8
    assert config.actor_rollout_ref.actor.grad_clip == 0.7
    assert config.reward.reward_funcs == ("mine.py:compute_score",)
    assert config.reward.reward_options == {"mine.py:compute_score": {"a": 1}}
    assert config.actor_rollout_ref.model.path == "/secret/model"
    assert "${oc.env:MY_SECRET_PATH}" in to_yaml(config) and "/secret" not in to_yaml(config)
    assert not any("/secret" in line for line in config.translation)


def test_what_may_be_a_secret_is_in_no_line() -> None:
    config = translated(
        "diffucoder", "code_provider=e2b", "e2b_router_url='http://me:correct-horse@10.0.0.1:8000'"
    )
    url = config.reward.provider_options["e2b_router_url"]
    assert url.startswith("http://me:correct-horse@")
    (line,) = [line for line in config.translation if "e2b_router_url" in line]
    assert line.endswith("e2b_router_url is reward.provider_options=***")


def test_nulls_and_estimators() -> None:
    config = translated(
        "siirl", *(ACTOR + "fsdp_config.wrap_policy=null", "algorithm.adv_estimator=gspo")
    )
    assert config.actor_rollout_ref.actor.policy_loss == "gspo"
    assert config.algorithm.adv_estimator == "grpo"
    config = translated("siirl", "algorithm.workflow_type=DAPO", ROLLOUT + "n=4")
    assert config.algorithm.filter_groups.enable
    assert config.dag.custom_pipeline_fn == "ctrl_megatron.pipeline:dapo_pipeline"
    config = translated(
        "diffucoder", "num_generations=4", "sync_ref_model=false", "ref_model_sync_steps=64"
    )
    assert config.actor_rollout_ref.ref.sync_steps is None
    assert dataclasses.asdict(config)["actor_rollout_ref"]["actor"]["clip_ratio_c"] is None

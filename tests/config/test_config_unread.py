"""An option that nothing reads is refused with what makes it so and how to mend it."""

from __future__ import annotations

from pathlib import Path

import pytest
from refusals import ACTOR, PATHS, messages

from ctrl_megatron.config import KEYS, Config, load_config, to_yaml
from ctrl_megatron.config.actor_rollout_ref import POLICY_LOSSES
from ctrl_megatron.config.algorithm import ADV_ESTIMATORS

CONTROL = "algorithm.kl_ctrl."
CORRECTION = "algorithm.rollout_correction."
FILTER = "algorithm.filter_groups."
OVERLONG = "reward.overlong_buffer."
COMPUTE = ACTOR + "compute."
ENGINE = "actor_rollout_ref.rollout."
GSPO = ACTOR + "policy_loss=gspo"
LISTENING = "sandbox.endpoint=http://127.0.0.1:8080"
ELSEWHERE = "reward.provider=e2b"
OWN_PIPELINE = "dag.custom_pipeline_fn=my.module:build"
IN_REWARD = "algorithm.use_kl_in_reward=true"
IN_LOSS = ACTOR + "use_kl_loss=true"


@pytest.mark.parametrize(
    ("option", "others", "settings", "read_with"),
    [
        (CONTROL + "kl_coef=0.5", (), (IN_REWARD,), ()),
        (CONTROL + "kl_coef=0.001", (), (IN_REWARD,), ()),
        (CONTROL + "kl_coef=0.5", (IN_LOSS,), (IN_REWARD,), (ACTOR + "use_kl_loss=false",)),
        (CONTROL + 'type="fixed"', (), (IN_REWARD,), ()),
        ('algorithm.kl_penalty="k3"', (), (IN_REWARD,), ()),
        (ACTOR + "kl_loss_coef=0.5", (), (IN_LOSS,), ()),
        (ACTOR + 'kl_loss_type="k2"', (), (IN_LOSS,), ()),
        (CONTROL + "target_kl=0.5", (IN_REWARD,), (CONTROL + "type=adaptive",), ()),
        (CONTROL + "horizon=5000", (IN_REWARD,), (CONTROL + "type=adaptive",), ()),
        ('actor_rollout_ref.ref.model.path="anchor"', (), (IN_LOSS, IN_REWARD), ()),
        (COMPUTE + "recompute_num_layers=2", (), (COMPUTE + "recompute_granularity=full",), ()),
        (FILTER + "max_num_gen_batches=3", (), (FILTER + "enable=true",), ()),
        ("data.gen_batch_size=512", (), (FILTER + "enable=true",), ()),
        (OVERLONG + "len=5", (), (OVERLONG + "enable=true",), ()),
        (OVERLONG + "penalty_factor=1.0", (), (OVERLONG + "enable=true",), ()),
        (CORRECTION + "rollout_is_threshold=3.0", (), (CORRECTION + "rollout_is=token",), ()),
        (
            CORRECTION + "rollout_rs_threshold=3.0",
            (),
            (CORRECTION + "rollout_rs=token", "sequence", "geometric"),
            (),
        ),
        (
            CORRECTION + "rollout_rs_threshold_lower=1.0",
            (),
            (CORRECTION + "rollout_rs=token",),
            (),
        ),
        (ACTOR + "optim.min_lr_ratio=0.1", (), (ACTOR + "optim.lr_scheduler_type=cosine",), ()),
        (
            ACTOR + "clip_ratio=0.4",
            (ACTOR + "clip_ratio_low=0.1", ACTOR + "clip_ratio_high=0.2"),
            (ACTOR + "clip_ratio_low=null", ACTOR + "clip_ratio_high=null"),
            (),
        ),
        (ACTOR + "clip_ratio_c=3.0", (GSPO,), (ACTOR + "policy_loss=vanilla",), ()),
        (ACTOR + "clip_cov_ratio=0.0002", (), (ACTOR + "policy_loss=clip_cov",), ()),
        (ACTOR + "clip_cov_ratio=0.1", (OWN_PIPELINE,), (ACTOR + "policy_loss=clip_cov",), ()),
        ("algorithm.lam=1.0", (), ("algorithm.adv_estimator=gae",), ()),
        ("algorithm.gamma=0.9", (), ("algorithm.adv_estimator=gae",), ()),
        (
            "algorithm.norm_adv_by_std_in_grpo=true",
            ("algorithm.adv_estimator=rloo",),
            ("algorithm.adv_estimator=grpo",),
            (),
        ),
        ("critic.cliprange_value=0.1", (), ("algorithm.adv_estimator=gae",), ()),
        ("critic.optim.lr=1e-05", (), ("algorithm.adv_estimator=gae",), ()),
        (
            "critic.ppo_epochs=4",
            ("algorithm.adv_estimator=rloo", "critic.enable=false"),
            ("algorithm.adv_estimator=gae",),
            ("critic.enable=null",),
        ),
        (ENGINE + "gpu_memory_utilization=0.5", (), (ENGINE + "name=vllm", "sglang"), ()),
        ("data.val_batch_size=4", (), ("data.val_files=FILES",), ()),
        (
            'trainer.project_name="p"',
            (),
            ("trainer.logger=[wandb]", "[mlflow]", "[trackio]", "[swanlab]", "[module:Class]"),
            (),
        ),
        (
            "trainer.total_epochs=2",
            ("trainer.total_training_steps=3",),
            ("trainer.total_training_steps=null",),
            (),
        ),
        ('sandbox.token_file="t"', (), ("sandbox.endpoint=ADDRESS",), (LISTENING,)),
        ("sandbox.workers=2", (LISTENING,), ("sandbox.endpoint=null",), ()),
        ('sandbox.isolation="strict"', (ELSEWHERE,), ("reward.provider=local",), ()),
        (
            'reward.provider_options={"template": "t"}',
            (),
            ("reward.provider=sandbox_fusion", "morph"),
            (),
        ),
    ],
)
def test_what_nothing_reads_is_one_line(
    option: str, others: tuple[str, ...], settings: tuple[str, ...], read_with: tuple[str, ...]
) -> None:
    (line,) = messages(option, *others)
    place, _, text = line.partition(f": {option} is not read with ")
    assert place.startswith(f"override '{option.partition('=')[0]}=")
    why, _, remedy = text.partition("; set ")
    assert all(setting in remedy for setting in settings), remedy
    assert remedy.endswith(", or leave it out")
    if settings[0].endswith("ADDRESS"):
        settings = ()
    assert settings == () or settings[0].partition("=")[0] in why
    assert messages(option, *others, *settings[:1], *read_with) == []


def test_only_keys_that_are_set_are_checked(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("algorithm:\n  adv_estimator: grpo\n  kl_ctrl:\n    kl_coef: 0.001\n")
    with pytest.raises(ValueError) as caught:
        load_config(file, PATHS)
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"{file} line 4: algorithm.kl_ctrl.kl_coef=0.001 is not read with ")
    assert load_config(None, PATHS).algorithm.kl_ctrl.kl_coef == 0.001
    assert len(messages("algorithm={kl_ctrl: {kl_coef: 0.001}}")) == 1
    assert messages(ACTOR + "clip_ratio_low=null", ACTOR + "policy_loss=gpg") == []


def test_a_key_of_the_file_may_be_switched_off_by_an_override(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    actor = "{use_kl_loss: true, kl_loss_coef: 0.01}"
    file.write_text(f"actor_rollout_ref:\n  actor: {actor}\nalgorithm: {{lam: 0.9}}\n")
    assert load_config(file, [*PATHS, "algorithm.adv_estimator=gae"])
    off = [*PATHS, "algorithm.adv_estimator=grpo", IN_LOSS.replace("true", "false")]
    config = load_config(file, off)
    file.write_text(to_yaml(config))
    assert "lam" not in file.read_text() and "kl_loss_coef" not in file.read_text()
    again = load_config(file)
    assert again.algorithm.adv_estimator == "grpo" and to_yaml(again) == to_yaml(config)
    with pytest.raises(ValueError, match=r"override .*kl_loss_coef=0\.02 is not read"):
        load_config(file, [*off, ACTOR + "kl_loss_coef=0.02"])


def test_an_override_of_the_other_training_is_refused() -> None:
    assert messages("sft.lr=1e-4") == [
        "override 'sft.lr=1e-4': sft.lr has no effect on RL; leave it out"
    ]


def test_what_names_and_pipelines_of_ones_own_read_is_not_judged() -> None:
    options = (ACTOR + "clip_cov_ratio=0.1", ACTOR + "ppo_kl_coef=2", "algorithm.lam=0.9")
    own = (ACTOR + "policy_loss=mine", "algorithm.adv_estimator=mine")
    assert messages(OWN_PIPELINE, *own, *options) == []
    revisions = (ENGINE + "revision_max_tokens=9", "reward.judge.weight=0.1")
    assert messages(OWN_PIPELINE, *revisions, "critic.enable=true", "critic.optim.lr=1e-4") == []


def test_every_option_of_the_value_model_needs_one() -> None:
    for key in KEYS:
        if not key.startswith("critic.") or key == "critic.enable":
            continue
        (line,) = messages(f"{key}=7")
        assert f"{key}=" in line and "is not read with critic.enable=null" in line


@pytest.mark.parametrize("kl", [IN_REWARD, IN_LOSS, "trainer.seed=1"])
def test_a_runs_own_file_starts_it_again(kl: str, tmp_path: Path) -> None:
    config = load_config(None, [*PATHS, kl])
    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(config))
    assert load_config(file) == config == load_config(file, purpose="none")
    for loss in POLICY_LOSSES:
        load_config(file, [f"{ACTOR}policy_loss={loss}"])
    for estimator in ADV_ESTIMATORS:
        load_config(file, [f"algorithm.adv_estimator={estimator}"])


@pytest.mark.parametrize(
    ("overrides", "fragments"),
    [
        (
            (ACTOR + "policy_loss=clip_cov", ACTOR + "clip_cov_lb=6"),
            ["clip_cov_lb=6.0 is above", "clip_cov_ub=5.0", "lower the first or raise the second"],
        ),
        (
            (CORRECTION + "rollout_rs=token", CORRECTION + "rollout_rs_threshold=0.5"),
            ["rollout_rs_threshold=0.5 is below", "lower=2.0 (1 / 0.5 where that is unset)"],
        ),
        (
            (
                *(CORRECTION + "rollout_rs=token", CORRECTION + "rollout_rs_threshold=0.5"),
                CORRECTION + "rollout_rs_threshold_lower=0.6",
            ),
            ["rollout_rs_threshold=0.5 is below", "lower=0.6", "raise it or lower the other"],
        ),
        (
            (IN_REWARD, CONTROL + "type=adaptive", CONTROL + "horizon=1638"),
            [
                "kl_ctrl.horizon=1638 is too short",
                "train_batch_size x",
                "8192 sequences",
                "least 1639",
            ],
        ),
    ],
)
def test_what_could_not_train_is_refused_at_once(
    overrides: tuple[str, ...], fragments: list[str]
) -> None:
    (line,) = messages(*overrides)
    assert all(fragment in line for fragment in fragments), line


@pytest.mark.parametrize(
    "overrides",
    [
        (ACTOR + "policy_loss=clip_cov", ACTOR + "clip_cov_lb=5"),
        (CORRECTION + "rollout_rs=token", CORRECTION + "rollout_rs_threshold=1"),
        (
            *(CORRECTION + "rollout_rs=token", CORRECTION + "rollout_rs_threshold=0.5"),
            CORRECTION + "rollout_rs_threshold_lower=0",
        ),
        (
            # A value model may learn alone, and the run be resumed with more steps.
            *("algorithm.adv_estimator=gae", "trainer.critic_warmup=3"),
            "trainer.total_training_steps=3",
        ),
        (ACTOR + "clip_ratio=0",),
        (ACTOR + "clip_ratio_low=0", ACTOR + "clip_ratio_high=0"),
        ("algorithm.adv_estimator=gae", "critic.cliprange_value=0"),
    ],
)
def test_the_last_value_that_works_is_accepted(overrides: tuple[str, ...]) -> None:
    assert messages(*overrides) == []


@pytest.mark.parametrize("sequences", [8, 15, 8190, 8192])
def test_the_shortest_horizon_is_the_controllers(sequences: int) -> None:
    from ctrl_megatron.algorithms import AdaptiveKLController

    batch = (f"data.train_batch_size={sequences // 2}", "actor_rollout_ref.rollout.n=2")
    if sequences % 2:
        batch = (f"data.train_batch_size={sequences}", "actor_rollout_ref.rollout.n=1")
    whole = ("algorithm.adv_estimator=gae", f"{ACTOR}ppo_mini_batch_size=1")
    shortest = sequences // 5 + 1
    for horizon in (shortest - 1, shortest):
        control = (IN_REWARD, CONTROL + "type=adaptive", f"{CONTROL}horizon={horizon}")
        refused = messages(*batch, *whole, *control) != []
        controller = AdaptiveKLController(0.1, Config().algorithm.kl_ctrl.target_kl, horizon)
        try:
            controller.update(0.0, sequences)
            fails = False
        except ValueError:
            fails = True
        assert refused == fails == (horizon < shortest)

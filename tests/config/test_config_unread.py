"""An option that nothing reads is refused with what makes it so and how to mend it."""

from __future__ import annotations

from pathlib import Path

import pytest
from refusals import ACTOR, PATHS, messages

from ctrl_megatron.config import Config, load_config, to_yaml
from ctrl_megatron.config.algorithm import Critic
from ctrl_megatron.config.coerce import leaf_keys
from ctrl_megatron.config.unread import ADV_ESTIMATORS, POLICY_LOSSES

CONTROL = "algorithm.kl_ctrl."
CORRECTION = "algorithm.rollout_correction."
OWN_PIPELINE = "dag.custom_pipeline_fn=my.module:build"
IN_REWARD = "algorithm.use_kl_in_reward=true"
IN_LOSS = ACTOR + "use_kl_loss=true"


@pytest.mark.parametrize(
    ("option", "others", "why", "remedy", "read_with"),
    [
        (
            CONTROL + "kl_coef=0.5",
            (),
            "algorithm.use_kl_in_reward=false",
            "turn that on or leave it at 0.001",
            (IN_REWARD,),
        ),
        (
            CONTROL + "kl_coef=0.5",
            (IN_LOSS,),
            "algorithm.use_kl_in_reward=false",
            "leave it at 0.001",
            (IN_REWARD, ACTOR + "use_kl_loss=false"),
        ),
        (
            'algorithm.kl_penalty="k3"',
            (),
            "algorithm.use_kl_in_reward=false",
            'turn that on or leave it at "kl"',
            (IN_REWARD,),
        ),
        (
            ACTOR + "kl_loss_coef=0.5",
            (),
            ACTOR + "use_kl_loss=false",
            "turn that on or leave it at 0.001",
            (IN_LOSS,),
        ),
        (
            ACTOR + 'kl_loss_type="k2"',
            (IN_REWARD,),
            ACTOR + "use_kl_loss=false",
            'leave it at "low_var_kl"',
            (IN_LOSS, "algorithm.use_kl_in_reward=false"),
        ),
        (
            CONTROL + "target_kl=0.5",
            (IN_REWARD,),
            CONTROL + "type=fixed",
            "use type=adaptive or leave it at 0.1",
            (CONTROL + "type=adaptive",),
        ),
        (
            CONTROL + "horizon=5000",
            (),
            CONTROL + "type=fixed",
            "use type=adaptive or leave it at 10000",
            (CONTROL + "type=adaptive", IN_REWARD),
        ),
        (
            'actor_rollout_ref.ref.model.path="anchor"',
            (),
            "without a KL to the reference",
            f"turn on {ACTOR}use_kl_loss or {IN_REWARD.partition('=')[0]}, or leave it at null",
            (IN_LOSS,),
        ),
        (
            "algorithm.filter_groups.max_num_gen_batches=3",
            (),
            "algorithm.filter_groups.enable=false",
            "turn that on or leave it at 10",
            ("algorithm.filter_groups.enable=true",),
        ),
        (
            "reward.overlong_buffer.len=5",
            (),
            "reward.overlong_buffer.enable=false",
            "turn that on or leave it at 64",
            ("reward.overlong_buffer.enable=true",),
        ),
        (
            "reward.overlong_buffer.penalty_factor=2.0",
            (),
            "reward.overlong_buffer.enable=false",
            "turn that on or leave it at 1.0",
            ("reward.overlong_buffer.enable=true",),
        ),
        (
            CORRECTION + "rollout_is_threshold=3.0",
            (),
            CORRECTION + "rollout_is=none",
            "use token or sequence there or leave it at 2.0",
            (CORRECTION + "rollout_is=token",),
        ),
        (
            CORRECTION + "rollout_rs_threshold=3.0",
            (),
            CORRECTION + "rollout_rs=none",
            "use token, sequence or geometric there or leave it at 2.0",
            (CORRECTION + "rollout_rs=geometric",),
        ),
        (
            CORRECTION + "rollout_rs_threshold_lower=3.0",
            (),
            CORRECTION + "rollout_rs=none",
            "leave it at null",
            (CORRECTION + "rollout_rs=token", CORRECTION + "rollout_rs_threshold=4"),
        ),
        (
            ACTOR + "optim.min_lr_ratio=0.1",
            (),
            ACTOR + "optim.lr_scheduler_type=constant",
            "use cosine there or leave it at 0.0",
            (ACTOR + "optim.lr_scheduler_type=cosine",),
        ),
        (
            "critic.optim.min_lr_ratio=0.1",
            ("algorithm.adv_estimator=gae",),
            "critic.optim.lr_scheduler_type=constant",
            "use cosine there or leave it at 0.0",
            ("critic.optim.lr_scheduler_type=cosine",),
        ),
        (
            ACTOR + "clip_ratio=0.4",
            (ACTOR + "clip_ratio_low=0.1", ACTOR + "clip_ratio_high=0.2"),
            f"{ACTOR}clip_ratio_low and {ACTOR}clip_ratio_high are both set",
            "unset one of them or leave it at 0.2",
            (ACTOR + "clip_ratio_low=null",),
        ),
        (
            ACTOR + "clip_cov_ratio=0.1",
            (OWN_PIPELINE,),
            ACTOR + "policy_loss=vanilla",
            "leave it at 0.0002",
            (ACTOR + "policy_loss=clip_cov",),
        ),
        (
            ACTOR + "clip_cov_ratio=0.1",
            (OWN_PIPELINE, "algorithm.adv_estimator=mine"),
            ACTOR + "policy_loss=vanilla",
            "leave it at 0.0002",
            (ACTOR + "policy_loss=mine",),
        ),
        (
            "algorithm.lam=0.9",
            (OWN_PIPELINE, ACTOR + "policy_loss=mine"),
            "algorithm.adv_estimator=grpo",
            "leave it at 1.0",
            ("algorithm.adv_estimator=mine",),
        ),
        (
            "critic.cliprange_value=0.1",
            (),
            "without a value model, which algorithm.adv_estimator=grpo does not train",
            "use adv_estimator=gae or leave it at 0.5",
            ("algorithm.adv_estimator=gae",),
        ),
        (
            "critic.optim.lr=0.001",
            (OWN_PIPELINE,),
            "without a value model, which algorithm.adv_estimator=grpo does not train",
            "set critic.enable=true or leave it at 1e-05",
            ("critic.enable=true",),
        ),
        (
            "critic.ppo_epochs=4",
            ("algorithm.adv_estimator=rloo", "critic.enable=false"),
            "critic.enable=false",
            "leave that unset with adv_estimator=gae or leave it at null",
            ("algorithm.adv_estimator=gae", "critic.enable=null"),
        ),
    ],
)
def test_what_nothing_reads_is_one_line(
    option: str, others: tuple[str, ...], why: str, remedy: str, read_with: tuple[str, ...]
) -> None:
    (line,) = messages(option, *others)
    assert line.startswith(f"{option} is not read ")
    said, _, mend = line.partition("; ")
    assert why in said and mend.endswith(remedy)
    assert messages(option, *others, *read_with) == []


def test_every_option_of_the_value_model_needs_one() -> None:
    other = {
        **{"critic.model.path": "m", "critic.loss_agg_mode": "seq-mean-token-sum"},
        **{"critic.optim.betas": "[0.8, 0.9]", "critic.optim.lr_scheduler_type": "cosine"},
        **{"critic.ppo_mini_batch_size": "512", "critic.ppo_max_token_len_per_gpu": "9000"},
        "critic.optim.lr_warmup_steps_ratio": "0.3",
    }
    for key in leaf_keys(Critic, "critic."):
        if key == "critic.enable":
            continue
        lines = messages(f"{key}={other.get(key, '7')}")
        assert any(
            line.startswith(f"{key}=") and "is not read without a value model" in line
            for line in lines
        ), key


@pytest.mark.parametrize("kl", [IN_REWARD, IN_LOSS, "data.seed=1"])
def test_defaults_that_are_written_out_are_no_settings(kl: str, tmp_path: Path) -> None:
    config = load_config(None, [*PATHS, kl])
    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(config))
    assert load_config(file) == config
    for loss in POLICY_LOSSES:
        load_config(file, [f"{ACTOR}policy_loss={loss}"])
    for estimator in ADV_ESTIMATORS:
        load_config(file, [f"algorithm.adv_estimator={estimator}"])


@pytest.mark.parametrize(
    ("overrides", "fragments"),
    [
        (
            (ACTOR + "policy_loss=clip_cov", ACTOR + "clip_cov_lb=6"),
            ["clip_cov_lb=6.0 is above", "clip_cov_ub=5.0", "lower it or raise the other"],
        ),
        (
            (CORRECTION + "rollout_rs=token", CORRECTION + "rollout_rs_threshold=0.5"),
            ["rollout_rs_threshold=0.5", "rollout_rs_threshold_lower is unset", "1 or more"],
        ),
        (
            (
                *(CORRECTION + "rollout_rs=token", CORRECTION + "rollout_rs_threshold=0.5"),
                CORRECTION + "rollout_rs_threshold_lower=0.6",
            ),
            ["rollout_rs_threshold_lower=0.6 is above", "rollout_rs_threshold=0.5", "lower it"],
        ),
        (
            (IN_REWARD, CONTROL + "type=adaptive", CONTROL + "horizon=1638"),
            ["kl_ctrl.horizon=1638 is too short", "train_batch_size=1024", "n=8", "least 1639"],
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

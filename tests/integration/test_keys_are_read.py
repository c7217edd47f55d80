"""Every key of the configuration is read by some run; the keys that were read are recorded."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked_run import run_forked
from golden_runs import sft_examples
from launched_run import Job
from tiny_reward_models import save_reward_model
from tiny_run import write_problems

from ctrl_megatron.config import KEYS

pytestmark = pytest.mark.timeout(600)

ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
RUNS: dict[str, tuple[str, ...]] = {
    "ppo": (
        *("algorithm.adv_estimator=gae", "algorithm.kl_ctrl.type=adaptive"),
        *(ACTOR + "use_kl_loss=false", "algorithm.use_kl_in_reward=true"),
        *("algorithm.filter_groups.enable=true", "data.gen_batch_size=6", ROLLOUT + "n=4"),
        *("algorithm.rollout_correction.rollout_is=token", "reward.overlong_buffer.enable=true"),
        *("reward.overlong_buffer.len=8", ROLLOUT + "quantization=fp8"),
        ROLLOUT + "val_kwargs.temperature=1.0",
    ),
    "grpo": (
        *(ACTOR + "policy_loss=clip_cov", "reward.judge.weight=0.1", "reward.judge.gate=-9"),
        *("reward.transition.wrong_to_right=0.1", "reward.reward_funcs=[critic,code_format]"),
        *(f"{ACTOR}optim.lr_scheduler_type=cosine", "trainer.test_freq=1"),
        *("algorithm.distillation.teacher=policy", "algorithm.distillation.divergence=jsd"),
        "trainer.total_training_steps=null",
    ),
}
"""A step or two each; together with a step of fine-tuning they read nearly everything."""
NOT_HERE = {
    ACTOR + "kl_cov_ratio": "the loss kl_cov, with which test_algorithms.py trains",
    ACTOR + "ppo_kl_coef": "the same",
    "reward.provider_options": "services outside",
    "reward.function_timeout": "a run with a reward function of the user's",
    "trainer.metrics_host": "a run that serves its metrics, as in test_scraped_run.py",
    "actor_rollout_ref.model.lora_alpha": "a run with adapters, as in test_adapters_train.py",
    "actor_rollout_ref.model.target_modules": "the same",
    "actor_rollout_ref.model.experts_shared_outer_loras": "as in test_experts_train.py",
    **{
        f"{group}.megatron.{size}_model_parallel_size": "a model on ranks of its own, as in "
        "test_apart.py"
        for group in ("critic", "actor_rollout_ref.ref", "reward_model")
        for size in ("tensor", "pipeline")
    },
    "placement.auto": "the start of a command, as in test_apart.py",
    "placement.gpu_memory": "the same",
    "trainer.min_nnodes": "the start of a job on fewer hosts, as in test_several_hosts.py",
    ACTOR + "random_masking": "coupled GRPO, as in test_coupled_grpo.py",
    ACTOR + "p_mask_prompt": "the same",
    "actor_rollout_ref.ref.sync_mix": "the same",
    "trainer.profile_torch": "a profiled step, as in test_profile.py",
    **{
        key: "a proxy of that kind, as in test_proxies.py, which records its keys"
        for key in KEYS
        if key.startswith(("actor_rollout_ref.proxy.engine.", "actor_rollout_ref.proxy.api."))
    },
}
"""Keys that these runs do not read, and who reads them."""


def test_every_key_is_read_by_a_run(job: Job, tmp_path: Path) -> None:
    seen: set[str] = set()
    validation = write_problems(tmp_path / "validation.parquet", first=8)
    rewarding = save_reward_model(tmp_path / "rewards")
    for name, extra in RUNS.items():
        files = (f"data.val_files={validation}",)
        if name == "grpo":
            files += ("reward_model.enable=true", f"reward_model.model.path={rewarding}")
        done = run_forked(
            job, f"read_{name}", steps=1, extra=(*files, *extra), reads=str(tmp_path / name)
        )
        assert done.codes == (0, 0), done.output[-8000:]
        seen |= set((tmp_path / name).read_text().splitlines())
    examples = sft_examples(tmp_path / "sft.parquet")
    extra = (f"sft.train_files={examples}", "sft.total_training_steps=null")
    done = run_forked(
        job, "read_sft", steps=1, extra=extra, purpose="sft", reads=str(tmp_path / "sft")
    )
    assert done.codes == (0, 0), done.output[-8000:]
    seen |= set((tmp_path / "sft").read_text().splitlines())
    assert set(KEYS) - seen == set(NOT_HERE)

"""The keys of the configuration that the nodes of a step read. A key that is set and that no node
of the pipeline reads is refused, also in a user's own pipeline.

Keys that are not listed here belong to every run: models, engines, data, the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ctrl_megatron.config import KEYS

F = TypeVar("F", bound=Callable[..., object])
_ACTOR = "actor_rollout_ref.actor."
REWARDS = ("reward", "sandbox")
REWARD_MODEL = ("reward_model",)
REVISIONS = ("actor_rollout_ref.proxy", "actor_rollout_ref.rollout.revision_max_tokens")
CORRECTION = ("algorithm.rollout_correction",)
KL_IN_REWARD = (
    "algorithm.use_kl_in_reward",
    "algorithm.kl_penalty",
    "algorithm.kl_ctrl",
)
ADVANTAGES = (
    *("algorithm.adv_estimator", "algorithm.adv_estimator_options"),
    *("algorithm.gamma", "algorithm.lam"),
    *("algorithm.norm_adv_by_std_in_grpo", "algorithm.weight_factor_in_cpgd"),
)
VALUES = ("critic",)
REFRESH = ("actor_rollout_ref.ref.sync_steps", "actor_rollout_ref.ref.sync_mix")
_OF_MODELS = ("megatron", "optim", "ppo_mini_batch_size", "ppo_max_token_len_per_gpu", "grad_clip")
LOSS = tuple(
    name
    for name in KEYS
    if name.startswith(_ACTOR) and name.removeprefix(_ACTOR).split(".")[0] not in _OF_MODELS
)
VALIDATION = (
    *("data.val_files", "data.val_batch_size", "trainer.test_freq", "trainer.val_before_train"),
)
OF_NODES = (
    *(
        *REWARDS,
        *REWARD_MODEL,
        *REVISIONS,
        *CORRECTION,
        *KL_IN_REWARD,
        *ADVANTAGES,
        *VALUES,
        *LOSS,
        *REFRESH,
    ),
    *VALIDATION,
)
"""Keys that belong to nodes, or to validation, and not to every run."""


def reads(*keys: str) -> Callable[[F], F]:
    """Decorator of a node's function that declares the keys, or groups of keys, that it reads."""

    def mark(function: F) -> F:
        function.reads = keys  # type: ignore[attr-defined]
        return function

    return mark

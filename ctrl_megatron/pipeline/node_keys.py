"""The keys of the configuration that the nodes of a step read. A key that is set and that no node
of the pipeline reads is refused, also in a user's own pipeline.

Keys that are not listed here belong to every run: models, engines, data, the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ctrl_megatron.config import KEYS, Config
from ctrl_megatron.config.keys import value_of
from ctrl_megatron.errors import UserError
from ctrl_megatron.pipeline.graph import TaskGraph

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
_VALIDATION = (
    *("data.val_files", "data.val_batch_size", "trainer.test_freq", "trainer.val_before_train"),
)
_OF_NODES = (
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
    *_VALIDATION,
)


def reads(*keys: str) -> Callable[[F], F]:
    """Decorator of a node's function that declares the keys, or groups of keys, that it reads."""

    def mark(function: F) -> F:
        function.reads = keys  # type: ignore[attr-defined]
        return function

    return mark


def check_read(config: Config, graph: TaskGraph) -> None:
    """Raise UserError for every key that is set and that only nodes outside of ``graph`` read.

    Keys of the configuration file are not refused where the pipeline is chosen by an override: the
    file may have been written for another pipeline.
    """
    read = (*graph.reads, *(_VALIDATION if graph.report.validate else ()))
    written, pipeline = config.written, config.written.get("dag.custom_pipeline_fn")
    by_override = pipeline is not None and pipeline.is_override
    problems = [
        f"{place}: {name} is not read by any node of the pipeline {graph.graph_id}; leave it out, "
        "or name it in the attribute reads of the function that reads it"
        for name, place in written.items()
        if _is_below(name, _OF_NODES)
        and not _is_below(name, read)
        and (place.is_override or not by_override)
        and not (name == "data.val_files" and not value_of(config, name))
    ]
    if problems:
        raise UserError("\n".join(problems))


def _is_below(name: str, keys: tuple[str, ...]) -> bool:
    return any(name == key or name.startswith(f"{key}.") for key in keys)

"""Declarations of a node's function: the keys that it reads, the fields of the batch that it needs
and writes, and the services that it uses. ``run.checks.nodes`` refuses, before a run starts,
a graph of which a node lacks one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Literal, ParamSpec, TypeVar

from ctrl_megatron.config import KEYS, Config
from ctrl_megatron.graph.siirl_names import NodeRole

P = ParamSpec("P")
R = TypeVar("R", covariant=True)
Needs = Callable[[Config], Mapping[str, str]]
"""Takes the configuration; returns the fields that a function needs, each with the setting that
makes it necessary, or "" where it is always necessary."""
Service = Literal["rewards", "proxy", "value"]
"""``rewards``: ``worker.score``, with a sandbox if a reward function runs programs; ``proxy``: the
model that revises; ``value``: the value model."""

# Keys that belong to nodes. All others belong to every run: models, engines, data, the loop.

_ACTOR = "actor_rollout_ref.actor."
_OF_MODELS = ("megatron", "optim", "ppo_mini_batch_size", "ppo_max_token_len_per_gpu", "grad_clip")
KEYS_OF_SERVICES: Mapping[Service, tuple[str, ...]] = {
    "rewards": ("reward", "sandbox"),
    "proxy": ("actor_rollout_ref.proxy", "actor_rollout_ref.rollout.revision_max_tokens"),
    "value": ("critic",),
}
"""Keys, or groups of keys, that a node reads because it uses a service."""
REWARD_MODEL = ("reward_model",)
CORRECTION = ("algorithm.rollout_correction",)
KL_IN_REWARD = ("algorithm.use_kl_in_reward", "algorithm.kl_penalty", "algorithm.kl_ctrl")
ADVANTAGES = (
    *("algorithm.adv_estimator", "algorithm.adv_estimator_options"),
    *("algorithm.gamma", "algorithm.lam"),
    *("algorithm.norm_adv_by_std_in_grpo", "algorithm.weight_factor_in_cpgd"),
)
DISTILLATION = ("algorithm.distillation",)
REFRESH = tuple(f"actor_rollout_ref.ref.sync_{name}" for name in ("steps", "at", "mix"))
LOSS = tuple(
    name
    for name in KEYS
    if name.startswith(_ACTOR) and name.removeprefix(_ACTOR).split(".")[0] not in _OF_MODELS
)
VALIDATION = (
    *("data.val_files", "data.val_batch_size", "trainer.test_freq", "trainer.val_before_train"),
    "actor_rollout_ref.rollout.val_kwargs",
)
KEYS_OF_NODES = (
    *(key for keys in KEYS_OF_SERVICES.values() for key in keys),
    *(*REWARD_MODEL, *CORRECTION, *KL_IN_REWARD, *ADVANTAGES, *LOSS, *DISTILLATION, *REFRESH),
    *VALIDATION,
)
"""Keys that a run refuses where no node of its graph, and no validation, reads them."""

KEYS_OF_ROLES: Mapping[NodeRole, tuple[str, ...]] = {
    NodeRole.ACTOR: (*LOSS, *DISTILLATION),
    NodeRole.REFERENCE: REFRESH,
    NodeRole.CRITIC: KEYS_OF_SERVICES["value"],
}
"""Keys that a method of the user's may read through the models of its role (``agent_group``), if it
declares nothing."""

# Fields of the batch

OF_REWARD_MODEL = "reward/reward_model"
"""The field of a model's reward."""
OF_MODELS = {
    "old_log_probs": NodeRole.ACTOR,
    "ref_log_prob": NodeRole.REFERENCE,
    "values": NodeRole.CRITIC,
    OF_REWARD_MODEL: NodeRole.REWARD_MODEL,
}
"""Fields that only a model can compute, and the role of the node that runs the model. A function
that declares nothing may write any field but these, and these in a node of the model's role."""
DRAWN = ("input_ids", "response_mask", "rollout_log_probs", "mini_batch", "uid")
"""Fields that every batch of samples has (``batch.make_batch``)."""
OF_TOKENS = (
    *("response_mask", "loss_mask", "rollout_log_probs", "old_log_probs", "ref_log_prob", "values"),
    *("token_level_scores", "token_level_rewards", "advantages", "returns"),
)
"""Fields with one number per token of the responses, (B, R)."""


@dataclass(frozen=True, kw_only=True)
class NodeFunction(Generic[P, R]):
    """A function with what it declares; called, it is the function."""

    function: Callable[P, R]
    reads: tuple[str, ...] = ()
    """Configuration keys, or groups of keys, beside those of ``uses``."""
    needs: Needs | None = None
    """None where the function does not say what it needs."""
    writes: tuple[str, ...] | None = None
    """Every field of the batch that it may write; None where it does not say."""
    uses: tuple[Service, ...] = ()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """As a plain function: its class gives the function, an instance binds it."""
        return self if instance is None else partial(self.function, instance)

    @property
    def config_keys(self) -> tuple[str, ...]:
        """All keys, or groups of keys, that it reads."""
        return (*self.reads, *(key for used in self.uses for key in KEYS_OF_SERVICES[used]))

    def needed_fields(self, config: Config) -> Mapping[str, str]:
        """The fields that it says it needs, with the settings that make them necessary."""
        return {} if self.needs is None else self.needs(config)


def node(
    *,
    reads: tuple[str, ...] = (),
    needs: Needs | None = None,
    writes: tuple[str, ...] | None = None,
    uses: tuple[Service, ...] = (),
) -> Callable[[Callable[P, R]], NodeFunction[P, R]]:
    """Decorator of a node's function, or of a validation, that declares what it reads, needs,
    writes and uses (``NodeFunction``)."""

    def declare(function: Callable[P, R]) -> NodeFunction[P, R]:
        return NodeFunction(function=function, reads=reads, needs=needs, writes=writes, uses=uses)

    return declare


def always(*fields: str) -> Needs:
    """``NodeFunction.needs`` of fields that are necessary under every configuration."""
    return lambda config: dict.fromkeys(fields, "")


def as_node_function(function: Callable[..., Any]) -> NodeFunction[..., Any]:
    """The function with its declaration; a plain one declares nothing."""
    return function if isinstance(function, NodeFunction) else NodeFunction(function=function)

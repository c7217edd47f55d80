"""The fields of the batch that the nodes of a step need and write. A graph without a field that
one of its nodes needs is refused before the run starts.

A function that declares nothing may write any field, except those of ``OF_MODELS``, which it may
write only in a node of the model's role.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from ctrl_megatron.config import Config
from ctrl_megatron.graph.node import Node
from ctrl_megatron.graph.siirl_names import NodeRole

F = TypeVar("F", bound=Callable[..., object])
Needs = Callable[[Config], Mapping[str, str]]
"""Takes the configuration; returns the fields that a function needs, each with the setting that
makes it necessary, or "" where it is always necessary."""
OF_REWARD_MODEL = "reward/reward_model"
"""The field of a model's reward."""
OF_MODELS = {
    "old_log_probs": NodeRole.ACTOR,
    "ref_log_prob": NodeRole.REFERENCE,
    "values": NodeRole.CRITIC,
    OF_REWARD_MODEL: NodeRole.REWARD_MODEL,
}
"""Fields that only a model can compute, and the role of the node that runs the model."""
DRAWN = ("input_ids", "response_mask", "rollout_log_probs", "mini_batch", "uid")
"""Fields that every batch of samples has (``batch.make_batch``)."""
OF_TOKENS = (
    *("response_mask", "loss_mask", "rollout_log_probs", "old_log_probs", "ref_log_prob", "values"),
    *("token_level_scores", "token_level_rewards", "advantages", "returns"),
)
"""Fields with one number per token of the responses, (B, R)."""


def writes(*fields: str) -> Callable[[F], F]:
    """Decorator of a node's function that declares every field that it may write."""

    def mark(function: F) -> F:
        function.writes = fields  # type: ignore[attr-defined]
        return function

    return mark


def needs(fields: Needs) -> Callable[[F], F]:
    """Decorator of a node's function that declares the fields that it needs."""

    def mark(function: F) -> F:
        function.needs = fields  # type: ignore[attr-defined]
        return function

    return mark


def asks_values(function: F) -> F:
    """Decorator of a node's function that uses the run's value model."""
    function.asks_values = True  # type: ignore[attr-defined]
    return function


def last_writer(nodes: Sequence[Node], field: str) -> Node | None:
    """The last of ``nodes`` that may write the field; None if none may."""
    masks = ("response_mask", "loss_mask")
    return next(
        (
            node
            for node in reversed(nodes)
            if may_write(node, field) or (node.filter_plugin is not None and field in masks)
        ),
        None,
    )


def may_write(node: Node, field: str) -> bool:
    declared = getattr(node.executable, "writes", None)
    if declared is not None:
        return field in declared
    role = OF_MODELS.get(field)
    return role is None or node.node_role is role

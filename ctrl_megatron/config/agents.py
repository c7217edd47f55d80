"""Further policies of a step: what each may set for itself, over the settings of the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_PATH = "actor_rollout_ref.model.path"
_OWN_KEYS = (
    _PATH,
    *(f"actor_rollout_ref.rollout.{name}" for name in ("n", "temperature", "top_p", "top_k")),
)
"""Keys that a further policy may set."""
_OWN = (
    *("actor_rollout_ref.model.lora_", "actor_rollout_ref.actor.", "actor_rollout_ref.ref."),
    *("critic.", "algorithm."),
)
"""How the names of others begin."""
_SHARED = (
    *("actor_rollout_ref.actor.strategy", "actor_rollout_ref.actor.megatron."),
    *("actor_rollout_ref.actor.compute.", "actor_rollout_ref.actor.fsdp"),
    *("actor_rollout_ref.actor.ppo_mini_batch_size", "algorithm.filter_groups"),
    "algorithm.distillation",
)
"""Among these, the keys of the run: layouts, memory, and what the policies draw together."""
_FROM_OWN_MODEL = (
    *("actor_rollout_ref.ref.model.path", "critic.model.path"),
    "actor_rollout_ref.model.tokenizer_path",
)
"""Paths that follow from a policy's own model where it does not set them."""


def policy_problems(policies: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the names and keys of ``policies``."""
    if [*policies] != [f"agent{number}" for number in range(1, len(policies) + 1)]:
        yield f"policies names {', '.join(policies)}; name agent1, agent2, ... in this order"
    for name, settings in policies.items():
        if not isinstance(settings, Mapping):
            yield f"policies.{name} is a group of settings, not {settings!r}"
            continue
        written = dict(leaves(settings))
        if not written.get(_PATH):
            yield f"policies.{name} lacks {_PATH}; name the directory of its model"
        for key in written:
            own = key in _OWN_KEYS or key.startswith(_OWN)
            if not own or key.startswith(_SHARED):
                yield (
                    f"policies.{name}.{key} is the same for all policies; set {key} for the run, "
                    "or leave it out"
                )


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of everything in ``tree``."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def with_own_settings(run: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the ``run``, as plain values, with those of a policy over them."""
    given = dict(leaves(own))
    model = run["actor_rollout_ref"]["model"]
    tokenizer = model["tokenizer_path"] or model["path"]
    unset = dict.fromkeys(_FROM_OWN_MODEL) | {"actor_rollout_ref.model.tokenizer_path": tokenizer}
    tree = _copied(run)
    for key, value in {**unset, **given, "policies": {}}.items():
        *groups, name = key.split(".")
        inside = tree
        for group in groups:
            inside = inside.setdefault(group, {})
        inside[name] = value
    return tree


def _copied(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {n: _copied(v) if isinstance(v, Mapping) else v for n, v in tree.items()}

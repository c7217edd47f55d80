"""Further policies of a step: what each may set for itself, over the settings of the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_PATH = "actor_rollout_ref.model.path"
_TOKENIZER = "actor_rollout_ref.model.tokenizer_path"
_DTYPE = "actor_rollout_ref.model.dtype"
_ENGINE = "actor_rollout_ref.rollout.name"
_DRAWS = (
    *(_PATH, "actor_rollout_ref.model.lora_"),
    *(f"actor_rollout_ref.rollout.{name}" for name in ("n", "temperature", "top_p", "top_k")),
)
_OWN = (*_DRAWS, "actor_rollout_ref.actor.", "actor_rollout_ref.ref.", "critic.", "algorithm.")
"""Keys that a further policy may set, a group of them by how their names begin."""
_OF_ENGINES = (
    *("actor_rollout_ref.rollout.", "actor_rollout_ref.model."),
    *(f"actor_rollout_ref.actor.compute.{part}_offload" for part in ("param", "grad", "optimizer")),
    *("data.max_prompt_length", "data.max_response_length"),
)
"""Those that it may set where it has engines of its own, beside ``_DRAWS``."""
_SHARED = (
    *("actor_rollout_ref.actor.ppo_mini_batch_size", "algorithm.filter_groups."),
    *(
        f"actor_rollout_ref.rollout.{name}"
        for name in ("staleness", "update_in_flight", "streaming", "val_kwargs.", "router_replay")
    ),
)
"""Among these, the keys of the run: how the policies draw together."""
_FROM_OWN_MODEL = ("actor_rollout_ref.ref.model.path", "critic.model.path")
"""Paths that follow from a policy's own model where it does not set them."""


def has_own_engines(own: Any) -> bool:
    """Whether a policy with the settings ``own`` has engines of its own: it names their kind. The
    others draw with the run's in turn."""
    return isinstance(own, Mapping) and _ENGINE in dict(leaves(own))


def policy_problems(policies: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the names and keys of ``policies``."""
    if [*policies] != [f"agent{number}" for number in range(1, len(policies) + 1)]:
        yield f"policies names {', '.join(policies)}; name agent1, agent2, ... in this order"
    for name, settings in policies.items():
        if not isinstance(settings, Mapping):
            yield f"policies.{name} is a group of settings, not {settings!r}"
            continue
        written = dict(leaves(settings))
        if written.get(_DTYPE) == "auto" and _ENGINE in written:
            yield f"policies.{name}.{_DTYPE}=auto is measured for the run alone; name a type"
        if not written.get(_PATH):
            yield f"policies.{name} lacks {_PATH}; name the directory of its model"
        for key in written:
            if _is_of(key, _SHARED) or not _is_of(key, (*_OWN, *_OF_ENGINES)):
                yield (
                    f"policies.{name}.{key} is the same for all policies; set {key} for the run, "
                    "or leave it out"
                )
            elif _is_of(key, _OF_ENGINES) and not _is_of(key, _DRAWS) and _ENGINE not in written:
                yield (
                    f"policies.{name}.{key} belongs to engines, and {name} draws with those of the "
                    f"run; give it engines of its own (policies.{name}.{_ENGINE}), or leave it out"
                )


def _is_of(key: str, names: tuple[str, ...]) -> bool:
    """Whether one of ``names`` is the key, or a group that it is in."""
    return any(key == name or (name[-1] in "._" and key.startswith(name)) for name in names)


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of everything in ``tree``."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def with_own_settings(run: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the ``run``, as plain values, with those of a policy over them, whose models
    share the ranks of its actor."""
    given = dict(leaves(own))
    unset: dict[str, Any] = dict.fromkeys(_FROM_OWN_MODEL)
    # A teacher belongs to one model.
    unset["algorithm.distillation"] = {}
    model = run["actor_rollout_ref"]["model"]
    shared = model["tokenizer_path"] or model["path"]
    unset[_TOKENIZER] = None if has_own_engines(own) else shared
    tree = _copied(run)
    for key, value in {**unset, **given, "policies": {}, "placement": {}}.items():
        *groups, name = key.split(".")
        inside = tree
        for group in groups:
            inside = inside.setdefault(group, {})
        inside[name] = value
    return tree


def _copied(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {n: _copied(v) if isinstance(v, Mapping) else v for n, v in tree.items()}

"""``config_format``: the configuration of another trainer becomes one of this trainer.

A key of theirs is mapped, passed over where its value has no effect on the result, or refused
(``config.foreign``); a key of both trainers stays as it is. Every change has a line, which the run
prints. A ``null`` is a key that is not set, as in those trainers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ctrl_megatron.config.actor_rollout_ref import COUPLED_GRPO_PIPELINE, GRPO_PIPELINE
from ctrl_megatron.config.coerce import KeyPlace, require_one_of
from ctrl_megatron.config.foreign import Settings, Taken, Tree, at, foreign_key
from ctrl_megatron.config.schema import KEYS
from ctrl_megatron.config.secrets import HIDDEN
from ctrl_megatron.errors import UserError, raise_all

ConfigFormat = Literal["ctrl", "siirl", "diffucoder", "verl"]
CONFIG_FORMATS: tuple[str, ...] = get_args(ConfigFormat)
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
_COMPLETIONS = {"dag.custom_pipeline_fn": GRPO_PIPELINE, "reward.reward_funcs": ["code"]}


def _with_kl(tree: Tree) -> Settings:
    """CTRL's trainer always has the KL in the reward, unless it is in the loss."""
    in_loss = at(tree, _ACTOR + "use_kl_loss")
    return {} if in_loss else {"algorithm.use_kl_in_reward": True}


def _diffusion(tree: Tree) -> Settings:
    return {
        "dag.custom_pipeline_fn": COUPLED_GRPO_PIPELINE,
        _ROLLOUT + "name": "diffusion",
        "reward.reward_funcs": ["code"],
        _ACTOR + "clip_ratio_c": None,
        "algorithm.adv_estimator": "rloo",
    }


_IMPLIED: Mapping[str, Any] = {
    "ctrl": _with_kl,
    "siirl": lambda tree: _COMPLETIONS,
    "verl": lambda tree: _COMPLETIONS,
    "diffucoder": _diffusion,
}
"""Format -> the settings that its files leave unsaid."""


def _validating(value: Any, tree: Tree) -> Settings | None:
    return {} if value is True or value > 0 else None


def _estimator(value: Any, tree: Tree) -> Settings | None:
    loss = {"algorithm.adv_estimator": "grpo", _ACTOR + "policy_loss": "gspo"}
    return loss if value == "gspo" else None


def _shared_keys(tree: Tree) -> dict[str, tuple[str, Taken]]:
    """Keys of both trainers with a value that needs a translation -> the reason, and what becomes
    of it; None where the key stays."""
    found: dict[str, tuple[str, Taken]] = {"algorithm.adv_estimator": ("", _estimator)}
    if not at(tree, "data.val_files"):
        unheard = "there are no data.val_files", _validating
        found |= {"trainer.test_freq": unheard, "trainer.val_before_train": unheard}
    return found


@dataclass(frozen=True, slots=True)
class Translated:
    """A configuration of this trainer, made from another trainer's."""

    settings: Settings
    """Dotted key -> value, as if each had been written."""
    places: Mapping[str, KeyPlace]
    """Key -> where the key was written that it comes from."""
    notes: tuple[str, ...]
    """A line for every key that was mapped or passed over, and every setting that is implied."""


def translate(given: Tree, around: Tree, places: Mapping[str, KeyPlace], form: str) -> Translated:
    """``given``, the tree that was written in the format ``form``, as settings of this trainer.

    ``around`` is the same tree with the defaults of this trainer, and ``places`` says where a key
    of ``given`` was written. Keys that neither trainer knows stay, so that they are refused as in
    any file. Raises UserError with one line for every key whose value would change the result and
    has no counterpart here.
    """
    require_one_of(CONFIG_FORMATS, form)
    shared = _shared_keys(around)
    settings: dict[str, Any] = {}
    made_by: dict[str, str] = {}
    found: dict[str, KeyPlace] = {}
    notes: list[str] = []
    problems: list[UserError] = []
    for name, value in _written(given, ""):
        place = places.get(name) or next((p for k, p in places.items() if k.startswith(name)), None)
        reason, taken = shared.get(name, ("", None))
        known = None if taken or name in KEYS else foreign_key(name)
        if known is not None:
            reason, taken = known.reason, known.taken
        result = None if taken is None else {} if value is None else taken(value, around)
        secret = name in KEYS and KEYS[name].secret is not None
        shown = f"{name}={HIDDEN if secret else _text(value)}"
        if known is not None and result is None:
            why = known.reason or known.hint
            problems.append(UserError(f"{_at(place)}{shown} has no counterpart: {why}"))
            continue
        if result is None:
            # A key that is null has no say beside one that is mapped to it.
            result = {name: value} if value is not None or _overrides(place) else {}
        elif result:
            hidden = HIDDEN in (said := _list(result))
            notes.append(f"{_at(place)}{name if hidden else shown} is {said}")
        else:
            because = f": {reason}" if reason else ""
            notes.append(f"{_at(place)}{shown} is passed over{because}")
        for key, one in result.items():
            if isinstance(settings.get(key), dict) and isinstance(one, dict):
                one = {**settings[key], **one}
            elif key in settings and settings[key] != one:
                if _overrides(found.get(key)) and not _overrides(place):
                    continue
                if not _overrides(place):
                    twice = f"{_at(place)}{shown} sets {key}, which {made_by[key]} sets too"
                    problems.append(UserError(twice))
            settings[key], made_by[key] = one, shown
            if place is not None:
                found[key] = place
    raise_all(problems)
    implied = {k: v for k, v in _IMPLIED[form](around).items() if settings.get(k) is None}
    notes += [f"{_list({key: value})} is implied by {form}" for key, value in implied.items()]
    found |= {key: KeyPlace(f"config_format={form}") for key in implied}
    return Translated({**settings, **implied}, found, tuple(notes))


def _written(tree: Tree, prefix: str) -> Iterator[tuple[str, Any]]:
    """The keys of ``tree`` with their values: keys of this trainer, groups of the other that are
    answered as one, and every other leaf."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        whole = key in KEYS or key in ("custom_reward_function", "reward.custom_reward_function")
        if isinstance(value, Mapping) and value and not whole:
            yield from _written(value, f"{key}.")
        else:
            yield key, value


def _overrides(place: KeyPlace | None) -> bool:
    return place is not None and place.is_override


def _at(place: KeyPlace | None) -> str:
    return f"{place}: " if place is not None else ""


def _text(value: Any) -> str:
    return (
        str(value).lower() if isinstance(value, bool) else "null" if value is None else f"{value}"
    )


def _list(settings: Settings) -> str:
    return " with ".join(
        f"{key}={_text(value) if KEYS[key].secret is None else HIDDEN}"
        for key, value in settings.items()
    )

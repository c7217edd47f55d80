"""The declaration of a configuration key: its field in the schema.

A field has a type, a default, and its meaning in the text below it. ``key`` adds the range and the
conditions under which the key is read; ``group`` declares them for all keys below. Range checks,
the errors about keys that nothing reads, and ``docs/configuration.md`` are derived from these.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass
from functools import cache, partial, reduce
from typing import Any, Literal, TypeVar

T = TypeVar("T")
Stage = Literal["rl", "sft", "both"]
"""The training that reads a key."""


@dataclass(frozen=True, slots=True)
class Range:
    """The allowed values of a key, or of each entry of a list. None depends on the type alone."""

    text: str
    """Continues 'must be' in a message."""
    holds: Callable[[Any], object]

    def admits(self, value: Any) -> bool:
        """Whether the value, or each entry of a tuple, is in the range."""
        values = value if isinstance(value, tuple) else (value,)
        return all(v is None or self.holds(v) for v in values)


AT_LEAST_1 = Range("at least 1", lambda v: v >= 1)
AT_LEAST_0 = Range("0 or more", lambda v: v >= 0)
ABOVE_0 = Range("greater than 0", lambda v: v > 0)
ABOVE_1 = Range("greater than 1", lambda v: v > 1)
SHARE = Range("between 0 and 1", lambda v: 0 <= v <= 1)
SOME_SHARE = Range("in (0, 1]", lambda v: 0 < v <= 1)
DECAY = Range("in [0, 1)", lambda v: 0 <= v < 1)
COUNT_OR_MINUS_1 = Range("-1 or at least 1", lambda v: v == -1 or v >= 1)


@dataclass(frozen=True, slots=True)
class Condition:
    """Settings of other keys with which a key is read."""

    switches: tuple[str, ...]
    """The other keys; a name that begins with a dot is in the key's own group."""
    holds: Callable[..., bool]
    """Values of the switches, in their order -> whether the key is read."""
    text: str
    """Such a setting as a user writes it; {0}, {1} are the names of the switches."""

    def is_met(self, config: Any) -> bool:
        """Whether the key is read."""
        return self.holds(*(value_at_key(config, switch) for switch in self.switches))

    def with_prefix(self, prefix: str) -> Condition:
        """The condition of a key of the group ``prefix``."""
        switches = tuple(prefix + s if s.startswith(".") else s for s in self.switches)
        return Condition(switches, self.holds, self.text.format(*switches))


@dataclass(frozen=True, slots=True)
class Secret:
    """The declaration of a key whose value can be a secret, which no file, page or log may hold."""

    whole: bool = False
    """Every text in the value is hidden; False: the passwords of addresses, as in every key."""
    instead: str = ""
    """Advice in place of writing the secret, such as the variable to set."""


Read = Condition | tuple[Condition, ...]
"""One condition, or several that must all be met."""


def when(switch: str, *values: Any, known: tuple[Any, ...] | None = None) -> Condition:
    """The condition that ``switch`` has one of ``values``. With ``known``, the built-in values, any
    other value also meets the condition: it names a function of the user, which may read any key.
    """
    *others, last = (v if isinstance(v, str) else json.dumps(v) for v in values)
    words = f"{', '.join(others)} or {last}" if others else last
    return Condition(
        (switch,),
        lambda value: value in values or (known is not None and value not in known),
        "{0}=" + words,
    )


def key(
    default: T,
    allowed: Range | None = None,
    *,
    read: Read = (),
    stage: Stage | None = None,
    secret: Secret | None = None,
) -> T:
    """A field with a range (``allowed``), conditions (``read``), the training that reads it if
    that differs from its group's, and whether it can be a ``secret``.
    """
    factory: Any = partial(copy, default)
    facts = {"allowed": allowed, "read": read, "stage": stage, "secret": secret}
    return dataclasses.field(default_factory=factory, metadata=facts)


def group(cls: type[T], *, read: Read = (), stage: Stage | None = None) -> T:
    """A field that is a group of keys. The conditions apply to all of them except to the switches
    of the conditions.
    """
    return dataclasses.field(default_factory=cls, metadata={"read": read, "stage": stage})


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """The declaration of one key."""

    name: str
    """The name with its groups, such as ``trainer.seed``."""
    type: Any
    default: Any
    allowed: Range | None
    read: tuple[Condition, ...]
    """Nothing reads the key unless all of these are met."""
    stage: Stage
    secret: Secret | None = None


@cache
def field_types(cls: type) -> dict[str, Any]:
    """Name -> type of every field of a dataclass."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def keys_of_class(
    cls: type, prefix: str = "", above: tuple[Condition, ...] = (), stage: Stage = "rl"
) -> Iterator[Key]:
    """All keys of the config class ``cls``, depth first in the order of its fields, with names
    below ``prefix``. ``above`` are the conditions of the groups around ``cls``, which every key
    also has."""
    hints, defaults = field_types(cls), cls()
    for field in dataclasses.fields(cls):
        name = f"{prefix}.{field.name}" if prefix else field.name
        facts, hint = field.metadata, hints[field.name]
        own = facts.get("read", ())
        own = own if isinstance(own, tuple) else (own,)
        read = (*above, *(condition.with_prefix(prefix) for condition in own))
        of_stage: Stage = facts.get("stage") or stage
        if dataclasses.is_dataclass(hint):
            yield from keys_of_class(hint, name, read, of_stage)  # type: ignore[arg-type]
            continue
        yield Key(
            name=name,
            type=hint,
            default=getattr(defaults, field.name),
            allowed=facts.get("allowed"),
            read=tuple(condition for condition in read if name not in condition.switches),
            stage=of_stage,
            secret=facts.get("secret"),
        )


def value_at_key(config: Any, name: str) -> Any:
    return reduce(getattr, name.split("."), config)

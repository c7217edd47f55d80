"""What a configuration key declares about itself, in the one place where it stands.

A field has type and default, its meaning in the text below it, and, where it is made by ``key``,
its range and who reads it; one made by ``group`` says what is true of all keys below it. Range
checks, the errors about keys that nothing reads and ``docs/configuration.md`` follow from these.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, Literal, TypeVar

T = TypeVar("T")
Stage = Literal["rl", "sft", "both"]
"""Which of the two trainings reads a key."""


@dataclass(frozen=True, slots=True)
class Range:
    """Which values a key may have; of a list, each entry. None is always allowed by its type."""

    text: str
    """To be read after 'must be'."""
    holds: Callable[[Any], object]

    def admits(self, value: Any) -> bool:
        """Whether the value, or each of several, is in the range."""
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
    """Settings of other keys without which nothing reads a key."""

    switches: tuple[str, ...]
    """Those other keys; a name that begins with a dot is one of the key's own group."""
    holds: Callable[..., bool]
    """Of the switches' values, in their order."""
    text: str
    """Such a setting, as somebody would write it; {0}, {1} stand for the switches."""

    def is_met(self, config: Any) -> bool:
        """Whether the key is read."""
        return self.holds(*(value_of(config, switch) for switch in self.switches))

    def below(self, prefix: str) -> Condition:
        """The condition of a key of the group ``prefix``."""
        switches = tuple(prefix + s if s.startswith(".") else s for s in self.switches)
        return Condition(switches, self.holds, self.text.format(*switches))


Read = Condition | tuple[Condition, ...]
"""One condition, or several that must all be met."""


def when(switch: str, *values: Any, known: tuple[Any, ...] | None = None) -> Condition:
    """Read where ``switch`` has one of ``values``. Where ``known`` is given, other values than
    these are names of somebody's own, of which nobody knows what they read.
    """
    *others, last = (v if isinstance(v, str) else json.dumps(v) for v in values)
    words = f"{', '.join(others)} or {last}" if others else last
    return Condition(
        (switch,),
        lambda value: value in values or (known is not None and value not in known),
        "{0}=" + words,
    )


def key(
    default: T, allowed: Range | None = None, *, read: Read = (), stage: Stage | None = None
) -> T:
    """A field with more to declare than type and default: which values are ``allowed``, under
    which conditions it is ``read``, and by which training where its group does not say so.
    """
    factory: Any = partial(copy, default)
    facts = {"allowed": allowed, "read": read, "stage": stage}
    return dataclasses.field(default_factory=factory, metadata=facts)


def group(cls: type[T], *, read: Read = (), stage: Stage | None = None) -> T:
    """A field that holds a group of keys; the conditions hold for all of them but for the keys
    that the conditions ask themselves.
    """
    return dataclasses.field(default_factory=cls, metadata={"read": read, "stage": stage})


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """All facts about one key."""

    name: str
    """With its groups: ``trainer.seed``."""
    type: Any
    default: Any
    allowed: Range | None
    read: tuple[Condition, ...]
    """All must be met, or nothing reads the key."""
    stage: Stage


def field_types(cls: type) -> dict[str, Any]:
    """Name -> type of a dataclass's fields, and of nothing else that it has."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def declared(
    cls: type, prefix: str = "", above: tuple[Condition, ...] = (), stage: Stage = "rl"
) -> Iterator[Key]:
    """The keys below ``cls`` in the order of the schema; what is declared ``above`` holds too."""
    hints, defaults = field_types(cls), cls()
    for field in dataclasses.fields(cls):
        name = f"{prefix}.{field.name}" if prefix else field.name
        facts, hint = field.metadata, hints[field.name]
        own = facts.get("read", ())
        own = own if isinstance(own, tuple) else (own,)
        read = (*above, *(condition.below(prefix) for condition in own))
        of_stage: Stage = facts.get("stage") or stage
        if dataclasses.is_dataclass(hint):
            yield from declared(hint, name, read, of_stage)  # type: ignore[arg-type]
            continue
        yield Key(
            name=name,
            type=hint,
            default=getattr(defaults, field.name),
            allowed=facts.get("allowed"),
            read=tuple(condition for condition in read if name not in condition.switches),
            stage=of_stage,
        )


def value_of(config: Any, name: str) -> Any:
    """What stands at a dotted key."""
    return reduce(getattr, name.split("."), config)

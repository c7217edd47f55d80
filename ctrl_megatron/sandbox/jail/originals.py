"""Attributes of classes and modules that the other side replaces for a time."""

from __future__ import annotations

from typing import Any

_NONE = object()


class Originals:
    """The earlier values of replaced attributes."""

    def __init__(self) -> None:
        self._before: dict[tuple[int, str], tuple[Any, Any]] = {}
        """By ``id`` and name, with the object itself, so that its ``id`` stays its own."""

    def keep_attribute(self, target: Any, name: str) -> None:
        """Keep an attribute that is about to be replaced or deleted."""
        self._before.setdefault((id(target), name), (target, vars(target).get(name, _NONE)))

    def restore_attribute(self, target: Any, name: str) -> None:
        key = id(target), name
        if key not in self._before:
            return
        _, before = self._before.pop(key)
        if before is _NONE:
            delattr(target, name)
        else:
            setattr(target, name, before)

"""Names for functions and records, with an error that lists the known ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from typing import Generic, TypeVar

E = TypeVar("E")


class Registry(Generic[E]):
    """Entries of one kind by the names that a configuration uses. Enums count as their values."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._entries: dict[str, E] = {}

    def add(self, name: str | Enum, entry: E) -> None:
        """File ``entry`` under ``name``; ValueError if another one has it."""
        key = key_of(name)
        if self._entries.get(key, entry) != entry:
            raise ValueError(f"the {self._kind} {key!r} is registered already")
        self._entries[key] = entry

    def register(self, name: str | Enum) -> Callable[[E], E]:
        """Decorator that files a function under ``name``; ValueError if another one has it."""

        def keep(entry: E) -> E:
            self.add(name, entry)
            return entry

        return keep

    def get(self, name: str | Enum) -> E:
        """The entry called ``name``; ValueError listing the known names otherwise."""
        key = key_of(name)
        if key not in self._entries:
            raise ValueError(f"unknown {self._kind} {key!r}; known: {', '.join(self)}")
        return self._entries[key]

    def __contains__(self, name: object) -> bool:
        return (key_of(name) if isinstance(name, Enum) else name) in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))


def key_of(name: str | Enum) -> str:
    """The name that a configuration would give."""
    return str(name.value) if isinstance(name, Enum) else name

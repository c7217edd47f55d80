"""Names for functions, with an error that lists the known ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, Generic, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class Registry(Generic[F]):
    """Functions of one kind by the names that a configuration uses. Enums count as their values."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._functions: dict[str, F] = {}

    def register(self, name: str | Enum) -> Callable[[F], F]:
        """Decorator that files a function under ``name``; ValueError if another one has it."""
        key = _key(name)

        def keep(function: F) -> F:
            if self._functions.get(key, function) is not function:
                raise ValueError(f"the {self._kind} {key!r} is registered already")
            self._functions[key] = function
            return function

        return keep

    def get(self, name: str | Enum) -> F:
        """The function called ``name``; ValueError listing the known names otherwise."""
        key = _key(name)
        if key not in self._functions:
            raise ValueError(f"unknown {self._kind} {key!r}; known: {', '.join(self)}")
        return self._functions[key]

    def __contains__(self, name: object) -> bool:
        return name in self._functions

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._functions))


def _key(name: str | Enum) -> str:
    return str(name.value) if isinstance(name, Enum) else name

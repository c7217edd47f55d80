"""Media (``rollout.weight_transport``) whose checksums are right and whose weights are not."""

from __future__ import annotations

from functools import cache, cached_property
from typing import Any

from ctrl_megatron.resharding.transports.shared_memory import SharedMemorySender


class FirstWeights:
    """A ``WeightSource`` that goes on to give the weights of its first push."""

    def __init__(self, source: Any) -> None:
        self._source, self._first = source, dict[Any, Any]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def values(self, chunk: int, rectangle: Any) -> Any:
        if (chunk, rectangle) not in self._first:
            self._first[chunk, rectangle] = self._source.values(chunk, rectangle).clone()
        return self._first[chunk, rectangle]


class StaleSender(SharedMemorySender):
    """Engines keep the first weights."""

    @cached_property
    def _of(self) -> Any:
        return cache(FirstWeights)

    def send(self, source: Any, *given: Any) -> Any:
        return super().send(self._of(source), *given)


class ZeroUps:
    """A ``WeightSource`` whose B are zero."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def values(self, chunk: int, rectangle: Any) -> Any:
        values = self._source.values(chunk, rectangle)
        return values * 0 if "lora_B" in rectangle.piece.hf else values


class IgnoredAdapters(SharedMemorySender):
    """Engines compute as if they had no adapters."""

    def send(self, source: Any, *given: Any) -> Any:
        return super().send(ZeroUps(source), *given)

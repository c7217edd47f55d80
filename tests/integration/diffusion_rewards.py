"""A reward that differs between any two texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def variety(items: Sequence[Any]) -> list[float]:
    """The share of different characters."""
    return [len(set(item.text)) / 100 for item in items]

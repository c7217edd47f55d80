"""What a reward function gets and gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ctrl_megatron.rewards.samples import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardItem:
    """One text that is rewarded, and what is known about it."""

    text: str
    """The answer that hands in a program; for ``critic`` the revision."""
    sample: Sample | None = None
    """The row with the problem's tests; needed by functions that run programs."""
    critique: str = ""
    """The critique before ``text``; needed by ``critic``."""
    length: int | None = None
    """Tokens of the response that is trained; needed by ``soft_overlong_punishment``."""


class RewardFunction(Protocol):
    """Rewards of a batch, one per item and in order. None: nothing is known, mask the item out."""

    async def __call__(self, items: Sequence[RewardItem]) -> list[float | None]: ...


def samples_of(name: str, items: Sequence[RewardItem]) -> list[Sample]:
    """Every item's sample. Raises ``ValueError`` naming the function and the item without one."""
    samples: list[Sample] = []
    for number, item in enumerate(items):
        if item.sample is None:
            raise ValueError(
                f"reward {name!r} runs programs, but item {number} has no sample with tests"
            )
        samples.append(item.sample)
    return samples

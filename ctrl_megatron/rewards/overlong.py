"""The reward ``soft_overlong_punishment``: a penalty that grows towards the length limit.

Source: DAPO (arXiv 2503.14476), section 3.4.
"""

from __future__ import annotations

from collections.abc import Sequence

from ctrl_megatron.rewards.items import RewardItem


def soft_overlong_punishment(length: int, *, max_length: int, cache_length: int) -> float:
    """0 up to ``max_length - cache_length`` tokens, linear to -1 at ``max_length``, -1 beyond."""
    start = max_length - cache_length
    if length <= start:
        return 0.0
    return -1.0 if length >= max_length else (start - length) / cache_length


class SoftOverlongPunishment:
    """``soft_overlong_punishment`` of every item's ``length``.

    ``cache_length`` is the width of the slope in tokens. Raises ``ValueError`` for lengths that do
    not fit, and for an item whose length is unknown.
    """

    def __init__(self, *, max_length: int, cache_length: int) -> None:
        if not 0 < cache_length <= max_length:
            raise ValueError(
                f"soft_overlong_punishment needs 0 < cache_length <= max_length, got cache_length "
                f"{cache_length} and max_length {max_length}"
            )
        self._max_length, self._cache_length = max_length, cache_length

    async def __call__(self, items: Sequence[RewardItem]) -> list[float | None]:
        """See ``RewardFunction``."""
        return [self._punish(item) for item in items]

    def _punish(self, item: RewardItem) -> float:
        if item.length is None:
            raise ValueError(
                "soft_overlong_punishment needs RewardItem.length, the tokens of the response"
            )
        return soft_overlong_punishment(
            item.length, max_length=self._max_length, cache_length=self._cache_length
        )

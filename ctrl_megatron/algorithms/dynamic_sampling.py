"""Which groups teach anything."""

from __future__ import annotations

import torch

from ctrl_megatron.algorithms.advantages import GroupIndex, group_numbers, without_spread


@torch.no_grad()
def groups_with_signal(scores: torch.Tensor, groups: GroupIndex) -> torch.Tensor:
    """(B,) bool: rows whose group has at least two different scores.

    ``scores`` (B,); ``groups`` (B,) hashable ids. A group whose scores are all equal has group-
    relative advantages of 0, and a group of one has nothing to differ from. Source: DAPO, arXiv
    2503.14476, section 3.2. Raises ValueError if there is not one id per row or a score is NaN.
    """
    if bool(scores.isnan().any()):
        row = int(scores.isnan().nonzero()[0])
        raise ValueError(f"the score of row {row} is NaN; mask failed rows out before filtering")
    numbers = group_numbers(groups, len(scores)).to(scores.device)
    return ~without_spread(scores, numbers, torch.ones_like(numbers, dtype=torch.bool))

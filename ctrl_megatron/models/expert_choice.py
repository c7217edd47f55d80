"""The choice of experts in groups, which Megatron's router leaves to this file."""

from __future__ import annotations

from typing import Any

import torch

from ctrl_megatron.models.shape import GroupLimitedRouting


def group_limited_topk(
    scores: torch.Tensor, top_k: int, choice: GroupLimitedRouting
) -> tuple[torch.Tensor, torch.Tensor]:
    """(scores, numbers) of the chosen experts, both (T, top_k), of scores (T, experts).

    Megatron sums the ``top_k // chosen`` highest scores of a group, whatever the family: three
    groups and six experts of DeepSeek-V2 would be chosen by two scores instead of one.
    """
    grouped = scores.unflatten(1, (choice.groups, -1))
    sums = grouped.topk(choice.best, dim=-1).values.sum(dim=-1)
    own = torch.zeros_like(sums, dtype=torch.bool)
    own.scatter_(1, sums.topk(choice.chosen, dim=-1).indices, True)
    return grouped.masked_fill(~own[:, :, None], -torch.inf).flatten(1).topk(top_k, dim=1)


class GroupLimitedRouterReplay:
    """``group_limited_topk`` in place of Megatron's ``RouterReplay``, which a router asks for
    its choice.
    """

    def __init__(self, choice: GroupLimitedRouting) -> None:
        self._choice = choice

    def get_replay_topk(
        self, scores: torch.Tensor, top_k: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(scores, numbers) of the chosen experts, both (T, top_k), of scores (T, experts)."""
        return group_limited_topk(scores, top_k, self._choice)

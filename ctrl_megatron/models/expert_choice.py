"""The choice of experts in groups, which Megatron's router leaves to this file."""

from __future__ import annotations

from collections.abc import Callable

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


class ExpertChoice:
    """A router's choice of experts, in place of Megatron's ``RouterReplay``, which the router asks
    for it: its own, in groups where the family has them, or recorded ones.

    A recorded choice replaces numbers only: the weights are those of this router's scores at these
    experts, so that they have gradients. Source: R3, arXiv 2510.11370, section 3.
    """

    def __init__(self) -> None:
        self.groups: GroupLimitedRouting | None = None
        """How the family groups its experts; None if a token chooses among all."""
        self.table: RouteTable | None = None
        """The choices of the pass that is under way; None outside of passes with a replay."""
        self.layer = 0
        """Number of the router's layer among those with experts."""
        self.keys = torch.zeros(0, dtype=torch.int64)
        """(T,) int64: where the tokens of the router's next call are in the table; -1 for
        padding."""

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        top_k: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default: Callable[..., tuple[torch.Tensor, torch.Tensor]] = torch.topk,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(scores, numbers) of the chosen experts, both (T, top_k), of scores (T, experts)."""
        if self.groups is not None:
            values, own = group_limited_topk(scores, top_k, self.groups)
        else:
            values, own = default(scores, top_k, num_groups=num_groups, group_topk=group_topk)
        if self.table is None:
            return values, own
        chosen = self.table.choose(self.layer, self.keys, own)
        return (values, own) if chosen is own else (scores.gather(1, chosen), chosen)


class RouteTable:
    """The experts of every token of a pass: chosen by an earlier one, or to be recorded.

    Tokens have keys, which follow them through sequence-parallel, context and pipeline ranks, so
    that neither the order of micro-batches nor a recomputation matters.
    """

    def __init__(self, ids: torch.Tensor, *, records: bool = False) -> None:
        """``ids`` (tokens, layers with experts, top_k) int16, -1 where a token has no recorded
        choice; with ``records`` the routers write theirs into it."""
        self.ids, self._records = ids, records
        self.counts = torch.zeros(3, dtype=torch.int64, device=ids.device)
        """Choices of routers, those with a recorded one, and those of them that differ from the
        router's own."""

    def choose(self, layer: int, keys: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """The numbers (T, top_k) of the experts of the tokens with these keys (T,), ``own`` where
        there is no recorded choice."""
        real = keys >= 0
        if self._records:
            self.ids[keys[real], layer] = own[real].to(torch.int16)
            return own
        given = self.ids[keys.clamp(min=0), layer].to(own.dtype)
        known = real & (given >= 0).all(dim=-1)
        differs = (given.sort(dim=-1).values != own.sort(dim=-1).values).any(dim=-1) & known
        self.counts += torch.stack([real.sum(), known.sum(), differs.sum()])
        return torch.where(known[:, None], given, own)

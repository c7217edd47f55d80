"""siiRL's coordinator of samples between nodes (sections 6.2 to 6.4 of its guide), in one process.

A run needs none: its worlds send rows rank to rank (``worlds``). It serves code that is written
after the guide, keeps references of any kind, and knows nothing of the samples but their
``SampleInfo``. Groups stay whole, and any number of nodes may share their samples anew in a step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from ctrl_megatron.data.balance import partition_groups

R = TypeVar("R")
_LINEAR = 24576
"""Tokens at which attention costs as much as the rest of a layer."""


@dataclass(slots=True)
class SampleInfo:
    """A coordinator's record of a sample."""

    sum_tokens: int = 0
    """Tokens of prompt and response."""
    prompt_length: int = 0
    response_length: int = 0
    uid: str = ""
    """Samples of one group have the same; an empty one is a group of its own."""
    node_id: str | None = None
    """The node, or the host, that has put it; None until then."""
    dict_info: dict[str, Any] = field(default_factory=dict)
    """Anything else; ``key`` is by convention the node that is to get it."""


Filter = Callable[[SampleInfo], bool]


def workload(tokens: int) -> int:
    """The cost of a sequence, in units of its linear part: 24576 L + L²."""
    return _LINEAR * tokens + tokens * tokens


@dataclass(frozen=True, slots=True)
class _OpenDeal(Generic[R]):
    """Samples that have left the queue for the ranks that have not fetched theirs yet."""

    partitions: int
    parts: dict[int, list[tuple[SampleInfo, R]]]


class DataCoordinator(Generic[R]):
    """Samples that wait for a node, in the order in which they were put. Safe for threads."""

    def __init__(self, nnodes: int = 1, ppo_mini_batch_size: int = 1, world_size: int = 1) -> None:
        """The arguments are those of the guide; only calls decide how samples are shared."""
        self.nnodes, self.ppo_mini_batch_size, self.world_size = (
            nnodes,
            ppo_mini_batch_size,
            world_size,
        )
        self._queue: list[tuple[SampleInfo, R]] = []
        self._deals: list[_OpenDeal[R]] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Samples that no call has dealt yet."""
        return len(self._queue)

    def put_batch(
        self,
        sample_infos: Sequence[SampleInfo],
        sample_refs: Sequence[R],
        caller_node_id: str | None = None,
    ) -> int:
        """Append samples; returns how many are in the queue. ``caller_node_id`` fills in a missing
        ``node_id``. ValueError for lists of different lengths.
        """
        items = list(zip(sample_infos, sample_refs, strict=True))
        with self._lock:
            for info, _ in items:
                if info.node_id is None:
                    info.node_id = caller_node_id
            self._queue += items
            return len(self._queue)

    def get_batch(
        self,
        batch_size: int,
        dp_rank: int = 0,
        filter_plugin: Filter | Sequence[Filter] | None = None,
        balance_partitions: int | None = None,
    ) -> list[R]:
        """The share of ``dp_rank`` of the first ``batch_size * balance_partitions`` samples that
        pass all filters; ``[]`` while there are fewer, and the queue is as before then.

        The first rank that asks deals for all: each gets equally many groups, whole, and about the
        same ``workload``; its short samples come first and last, its long ones in the middle. Later
        ranks get the rest of that deal. Without ``balance_partitions`` the samples come in the
        order of the queue. ValueError for a rank outside the partitions, for a number of samples
        that ends inside a group, and for groups that the partitions cannot share equally.
        """
        partitions = balance_partitions or 1
        if batch_size < 1 or not 0 <= dp_rank < partitions:
            raise ValueError(
                f"get_batch needs a positive batch_size and a dp_rank below {partitions}, got "
                f"{batch_size} and {dp_rank}"
            )
        with self._lock:
            passes = _all_of(filter_plugin)
            for deal in self._deals:
                mine = deal.parts.get(dp_rank, [])
                if mine and deal.partitions == partitions and all(passes(i) for i, _ in mine):
                    return self._fetched(deal, dp_rank)
            wanted = [n for n, (info, _) in enumerate(self._queue) if passes(info)]
            taken = wanted[: batch_size * partitions]
            if len(taken) < batch_size * partitions:
                return []
            items = [self._queue[n] for n in taken]
            rest = {self._queue[n][0].uid for n in wanted[len(taken) :]}
            if cut := next((i.uid for i, _ in items if i.uid and i.uid in rest), None):
                raise ValueError(
                    f"{len(taken)} samples end inside the group {cut!r}; ask for whole groups"
                )
            parts = _shared(items, partitions) if partitions > 1 else [items]
            left = {*taken}
            self._queue = [item for n, item in enumerate(self._queue) if n not in left]
            deal = _OpenDeal(partitions, dict(enumerate(parts)))
            self._deals.append(deal)
            return self._fetched(deal, dp_rank)

    def _fetched(self, deal: _OpenDeal[R], dp_rank: int) -> list[R]:
        mine = deal.parts.pop(dp_rank)
        if not deal.parts:
            self._deals.remove(deal)
        return [ref for _, ref in mine]


def _all_of(filters: Filter | Sequence[Filter] | None) -> Filter:
    every = [filters] if callable(filters) else [*(filters or ())]
    return lambda info: all(one(info) for one in every)


def _shared(
    items: Sequence[tuple[SampleInfo, R]], partitions: int
) -> list[list[tuple[SampleInfo, R]]]:
    costs = [workload(info.sum_tokens) for info, _ in items]
    groups = [info.uid or number for number, (info, _) in enumerate(items)]
    parts = []
    for part in partition_groups(costs, groups, partitions, swaps=True):
        ascending = sorted(part, key=lambda n: (costs[n], n))
        parts.append([items[n] for n in (*ascending[::2], *reversed(ascending[1::2]))])
    return parts


def key_filter(key: str) -> Filter:
    return lambda info: info.dict_info.get("key") == key


def node_filter(node_id: str) -> Filter:
    return lambda info: info.node_id == node_id

"""The order of the tokens in a packed micro-batch, and which tokens each of them sees. Pure.

Rows with the same prompt are one group and share it: [prompt | r1 | r2 | ... | rn]. The positions
of every response continue those of the prompt; a response sees the prompt and, causally, itself,
never another response. So the prompt is computed once, forward and backward, and the gradients of
the responses add up in it (arXiv 2506.05433). A group of one row is an ordinary causal sequence.

In a layout that is not causal, for masked-diffusion models, every token sees its whole sequence,
and no sequence shares anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from operator import attrgetter
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens ``start`` to ``end``, which see the prefix's tokens and, causally unless the layout is
    not causal, each other."""

    start: int
    end: int
    prefix_start: int = 0
    prefix_end: int = 0

    @property
    def prefix(self) -> slice:
        """The tokens that the whole segment sees; empty for an ordinary sequence."""
        return slice(self.prefix_start, self.prefix_end)

    @property
    def num_queries(self) -> int:
        """The number of tokens."""
        return self.end - self.start

    @property
    def num_keys(self) -> int:
        """The number of tokens that the last token sees."""
        return self.prefix_end - self.prefix_start + self.num_queries


@dataclass(frozen=True, slots=True)
class RowPlace:
    """The place of a row of the batch. Its response follows token ``prompt_end - 1``, which all
    responses of a group share."""

    prompt_end: int
    start: int
    end: int

    def predecessors(self, places: torch.Tensor) -> torch.Tensor:
        """(n,) int64: the tokens whose states predict the response tokens at ``places`` (n,)."""
        return torch.where(places > 0, self.start + places - 1, self.prompt_end - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLayout:
    """T packed tokens in segments, in the order of the tokens."""

    segments: tuple[Segment, ...]
    rows: tuple[RowPlace, ...]
    """The rows of all groups, in their order."""
    causal: bool = True

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.segments[-1].end if self.segments else 0

    @property
    def attended_pairs(self) -> int:
        """Number of pairs of a token and a token that it sees, itself included."""
        if not self.causal:
            return sum(s.num_queries * s.num_keys for s in self.segments)
        return sum(
            s.num_queries * (s.num_keys - s.num_queries) + s.num_queries * (s.num_queries + 1) // 2
            for s in self.segments
        )

    @property
    def shares_prefix(self) -> bool:
        """Whether any segment has a prefix."""
        return any(s.prefix_end > s.prefix_start for s in self.segments)

    def segments_by_prefix(self) -> Iterator[tuple[slice, list[Segment]]]:
        """Every prefix with the segments that see it, which are neighbours; an ordinary sequence
        has an empty prefix."""
        for prefix, members in groupby(self.segments, key=attrgetter("prefix_start", "prefix_end")):
            yield slice(*prefix), list(members)

    def positions(self) -> torch.Tensor:
        """(T,) int64: the position of every token in its row."""
        return _joined(torch.arange(s.num_keys - s.num_queries, s.num_keys) for s in self.segments)

    def key_index(self) -> torch.Tensor:
        """(sum of the segments' keys,) int64: the tokens whose keys the segments see, one segment
        after the other. With queries and these keys a segment's mask is causal, aligned at the
        bottom right, or full."""
        return _joined(
            torch.cat([torch.arange(s.prefix_start, s.prefix_end), torch.arange(s.start, s.end)])
            for s in self.segments
        )

    def restricted_to_queries(self, pieces: Iterable[range]) -> tuple[PackedLayout, torch.Tensor]:
        """The layout in which only the tokens of ``pieces`` are queries, and as int64 the tokens of
        this layout that its tokens are.

        A segment that is a part of one of ours sees copies of the other tokens that it saw as its
        prefix.
        """
        segments, tokens, here = list[Segment](), list[range](), 0

        def copied(*parts: range) -> tuple[int, int]:
            nonlocal here
            start = here
            tokens.extend(parts)
            here += sum(map(len, parts))
            return start, here

        for piece in pieces:
            before, prefix = None, (0, 0)
            for segment in self.segments:
                first, end = max(segment.start, piece.start), min(segment.end, piece.stop)
                if first >= end:
                    continue
                seen = (
                    range(segment.prefix_start, segment.prefix_end),
                    range(segment.start, first),
                    range(segment.end if self.causal else end, segment.end),
                )
                if seen != before:
                    before, prefix = seen, copied(*seen) if any(map(len, seen)) else (0, 0)
                segments.append(Segment(*copied(range(first, end)), *prefix))
        layout = PackedLayout(segments=tuple(segments), rows=(), causal=self.causal)
        return layout, _joined(torch.arange(part.start, part.stop) for part in tokens)


def _joined(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([torch.zeros(0, dtype=torch.int64), *parts])


def build_packed_layout(
    groups: Sequence[tuple[int, Sequence[int]]], *, filler: int = 0, causal: bool = True
) -> PackedLayout:
    """The layout of groups given as (tokens of the prompt, tokens of each response).

    ``filler`` tokens, an additional sequence, come last. ValueError for a group of several rows in
    a layout that is not causal: its prompt would see every response.
    """
    if not causal and any(len(responses) > 1 for _, responses in groups):
        raise ValueError("rows share a prompt only in causal layouts")
    segments, rows, here = list[Segment](), list[RowPlace](), 0
    for prompt, responses in groups:
        start, end = here, here + prompt
        if len(responses) == 1:
            here = end + responses[0]
            segments.append(Segment(start, here))
            rows.append(RowPlace(end, end, here))
            continue
        bounds = list(accumulate(responses, initial=end))
        rows += [RowPlace(end, *pair) for pair in pairwise(bounds)]
        segments.append(Segment(start, end))
        segments += [Segment(a, b, start, end) for a, b in pairwise(bounds) if b > a]
        here = bounds[-1]
    if filler:
        segments.append(Segment(here, here + filler))
    return PackedLayout(segments=tuple(segments), rows=tuple(rows), causal=causal)


@dataclass
class PackedLayoutParams(PackedSeqParams):
    """A layout as it is passed through Megatron, on the device.

    Megatron itself reads ``cu_seqlens_q`` and ``cu_seqlens_kv`` only for the rotary embedding,
    where all tokens of a rank are one sequence because the table has a row for every token
    (``models.layer_spec.PackedRotaryEmbedding``).
    """

    layout: PackedLayout = field(default_factory=lambda: build_packed_layout([]))
    positions: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """(T,) int64; those of this rank's tokens where ranks share them."""
    attention: PackedSeqParams = field(default_factory=lambda: PackedSeqParams())
    """The segments' bounds among queries and keys, for variable-length kernels."""
    key_index: torch.Tensor | None = None
    """``PackedLayout.key_index``; None if every segment sees only itself."""
    shared: ContextShardedTokens | None = None
    """The tokens of all context ranks, of which ``positions`` has this rank's; None for one
    rank."""


@dataclass(frozen=True)
class ContextShardedTokens:
    """Tokens of a packed micro-batch over C context ranks, of which each has T / C.

    The tokens are cut into 2 C pieces, of which rank r has pieces r and 2 C - 1 - r: the later a
    token, the more keys it sees, and the more likely it belongs to a response, which alone is
    multiplied with the vocabulary.
    """

    group: Any
    """The process group of the ranks."""
    packed: PackedLayoutParams
    """The layout of all tokens."""

    @property
    def num_ranks(self) -> int:
        """C."""
        return self.group.size()

    @cached_property
    def own_tokens(self) -> torch.Tensor:
        """(T / C,) int64: this rank's tokens."""
        device = self.packed.positions.device
        tokens = reorder_by_rank(
            torch.arange(self.packed.layout.num_tokens, device=device), self.num_ranks
        )
        return tokens.chunk(self.num_ranks)[self.group.rank()]

    @cached_property
    def own_queries(self) -> tuple[PackedLayoutParams, torch.Tensor]:
        """The layout of this rank's queries, and where the keys of its tokens are among those of
        all ranks, one rank after the other."""
        device = self.packed.positions.device
        pieces = [range(int(p[0]), int(p[-1]) + 1) for p in self.own_tokens.chunk(2)]
        layout, keys = self.packed.layout.restricted_to_queries(pieces)
        places = reorder_by_token(
            torch.arange(self.packed.layout.num_tokens, device=device), self.num_ranks
        )
        return _params(layout, device), places[keys.to(device)]


def reorder_by_rank(x: torch.Tensor, ranks: int) -> torch.Tensor:
    """(T, ...) in the order of the tokens -> (T, ...) with those of one rank after the other's
    (``ContextShardedTokens``)."""
    pieces = x.unflatten(0, (2 * ranks, -1))
    return torch.stack([pieces[:ranks], pieces[ranks:].flip(0)], dim=1).flatten(0, 2)


def reorder_by_token(x: torch.Tensor, ranks: int) -> torch.Tensor:
    """(T, ...) with the tokens of one rank after the other's -> (T, ...) in the order of the
    tokens: the inverse of ``reorder_by_rank``."""
    pieces = x.unflatten(0, (ranks, 2, -1))
    return torch.cat([pieces[:, 0], pieces[:, 1].flip(0)]).flatten(0, 1)


def layout_params(
    layout: PackedLayout, device: torch.device, group: Any = None
) -> PackedLayoutParams:
    """The layout as an argument of Megatron's layers. ``group``: the ranks that share its tokens,
    whose number divides them twice."""
    packed = _params(layout, device)
    if group is None or group.size() == 1:
        return packed
    shared = ContextShardedTokens(group, packed)
    local = shared.own_tokens
    bounds = torch.tensor([0, len(local)], dtype=torch.int32, device=device)
    return PackedLayoutParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=len(local),
        max_seqlen_kv=len(local),
        layout=layout,
        positions=packed.positions[local],
        shared=shared,
    )


def _params(layout: PackedLayout, device: torch.device) -> PackedLayoutParams:

    def bounds(sizes: Iterable[int]) -> torch.Tensor:
        return torch.tensor([*accumulate(sizes, initial=0)], dtype=torch.int32, device=device)

    queries = [s.num_queries for s in layout.segments]
    keys = [s.num_keys for s in layout.segments]
    whole = bounds([layout.num_tokens])
    return PackedLayoutParams(
        qkv_format="thd",
        cu_seqlens_q=whole,
        cu_seqlens_kv=whole,
        max_seqlen_q=layout.num_tokens,
        max_seqlen_kv=layout.num_tokens,
        layout=layout,
        positions=layout.positions().to(device),
        attention=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=bounds(queries),
            cu_seqlens_kv=bounds(keys),
            max_seqlen_q=max(queries),
            max_seqlen_kv=max(keys),
        ),
        key_index=layout.key_index().to(device) if layout.shares_prefix else None,
    )

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
from itertools import accumulate, groupby, pairwise
from operator import attrgetter

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
    def queries(self) -> int:
        """The number of tokens."""
        return self.end - self.start

    @property
    def keys(self) -> int:
        """The number of tokens that the last token sees."""
        return self.prefix_end - self.prefix_start + self.queries


@dataclass(frozen=True, slots=True)
class RowPlace:
    """The place of a row of the batch. Its response follows token ``prompt_end - 1``, which all
    responses of a group share."""

    prompt_end: int
    start: int
    end: int

    def predecessors(self, count: int) -> torch.Tensor:
        """(count,) int64: the tokens whose states predict the first ``count`` response tokens."""
        places = torch.arange(self.start - 1, self.start + count - 1)
        places[:1] = self.prompt_end - 1
        return places


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLayout:
    """T packed tokens in segments, in the order of the tokens."""

    segments: tuple[Segment, ...]
    rows: tuple[RowPlace, ...]
    """The rows of all groups, in their order."""
    causal: bool = True

    @property
    def tokens(self) -> int:
        """T."""
        return self.segments[-1].end if self.segments else 0

    @property
    def pairs(self) -> int:
        """Number of pairs of a token and a token that it sees, itself included."""
        if not self.causal:
            return sum(s.queries * s.keys for s in self.segments)
        return sum(
            s.queries * (s.keys - s.queries) + s.queries * (s.queries + 1) // 2
            for s in self.segments
        )

    @property
    def shares(self) -> bool:
        """Whether any segment has a prefix."""
        return any(s.prefix_end > s.prefix_start for s in self.segments)

    def families(self) -> Iterator[tuple[slice, list[Segment]]]:
        """Every prefix with the segments that see it, which are neighbours; an ordinary sequence
        has an empty prefix."""
        for prefix, members in groupby(self.segments, key=attrgetter("prefix_start", "prefix_end")):
            yield slice(*prefix), list(members)

    def positions(self) -> torch.Tensor:
        """(T,) int64: the position of every token in its row."""
        return _joined(torch.arange(s.keys - s.queries, s.keys) for s in self.segments)

    def key_index(self) -> torch.Tensor:
        """(sum of the segments' keys,) int64: the tokens whose keys the segments see, one segment
        after the other. With queries and these keys a segment's mask is causal, aligned at the
        bottom right, or full."""
        return _joined(
            torch.cat([torch.arange(s.prefix_start, s.prefix_end), torch.arange(s.start, s.end)])
            for s in self.segments
        )


def _joined(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([torch.zeros(0, dtype=torch.int64), *parts])


def lay_out(
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
    where all tokens are one sequence because the table has a row for every token
    (``models.layer_spec.PackedRotaryEmbedding``).
    """

    layout: PackedLayout = field(default_factory=lambda: lay_out([]))
    positions: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """(T,) int64."""
    attention: PackedSeqParams = field(default_factory=lambda: PackedSeqParams())
    """The segments' bounds among queries and keys, for variable-length kernels."""
    key_index: torch.Tensor | None = None
    """``PackedLayout.key_index``; None if every segment sees only itself."""


def layout_params(layout: PackedLayout, device: torch.device) -> PackedLayoutParams:
    """The layout as an argument of Megatron's layers."""

    def bounds(sizes: Iterable[int]) -> torch.Tensor:
        return torch.tensor([*accumulate(sizes, initial=0)], dtype=torch.int32, device=device)

    queries = [s.queries for s in layout.segments]
    keys = [s.keys for s in layout.segments]
    whole = bounds([layout.tokens])
    return PackedLayoutParams(
        qkv_format="thd",
        cu_seqlens_q=whole,
        cu_seqlens_kv=whole,
        max_seqlen_q=layout.tokens,
        max_seqlen_kv=layout.tokens,
        layout=layout,
        positions=layout.positions().to(device),
        attention=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=bounds(queries),
            cu_seqlens_kv=bounds(keys),
            max_seqlen_q=max(queries),
            max_seqlen_kv=max(keys),
        ),
        key_index=layout.key_index().to(device) if layout.shares else None,
    )

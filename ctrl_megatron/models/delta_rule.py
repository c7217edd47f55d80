"""The gated delta rule and the short convolution before it, over packed rows.

A layer keeps a matrix S for each head (gated delta nets, Yang et al., arXiv 2412.06464). Token t,
with key k, value v, query q, a decay exp(g) and a rate beta, changes it and reads it:

    S <- exp(g) S;  S <- S + beta k (v - S' k)';  o = S' q

Rows are computed in chunks of 64 tokens: products within a chunk, and one step of S for each chunk
(sections 3.2 and 3.3 there). S is float32, or float64 where the tensors are. What a row needs of
its prompt is S after the prompt's last token and the tokens before its own first ones, so that a
prompt that rows share is computed once and continued by each of them, forward and backward.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from ctrl_megatron.models.packed_layout import PackedLayout, Segment
from ctrl_megatron.models.shape import GatedDeltaNet

CHUNK = 64
"""Tokens between two states. The products within a chunk grow with it, the number of steps
falls."""


def causal_convolution(u: torch.Tensor, weight: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
    """silu of every channel's weighted sum over a token and those before it in its row.

    u (T, C), weight (C, K) -> (T, C), all of one float dtype, summed in float32 or wider. The last
    column of ``weight`` is the token's own; before a row there are zeros.
    """
    before = _predecessors(layout, weight.shape[1] - 1, u.device)
    return _recomputed(_convolve, u, weight, before)


def _convolve(u: torch.Tensor, weight: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    padded, wide = torch.cat([u, u.new_zeros((1, u.shape[1]))]), weight.to(_wide(weight))
    total = u * wide[:, -1]
    for distance, tokens in enumerate(before, start=2):
        total = total + padded.index_select(0, tokens) * wide[:, -distance]
    return F.silu(total).to(u.dtype)


@lru_cache(maxsize=8)
def _predecessors(layout: PackedLayout, count: int, device: torch.device) -> torch.Tensor:
    """(count, T) int64: the token 1, 2, ... places before each token in its row, T where the row
    has none."""
    positions, tokens = layout.positions(), torch.arange(layout.num_tokens)
    ends = torch.cat([torch.full((s.num_queries,), s.prefix_end) for s in layout.segments])
    starts = torch.cat([torch.full((s.num_queries,), s.start) for s in layout.segments])
    found = []
    for distance in range(1, count + 1):
        before = tokens - distance
        # A response's first tokens follow the last ones of its prompt.
        before = torch.where(before < starts, ends - (starts - before), before)
        found.append(torch.where(positions < distance, layout.num_tokens, before))
    return torch.stack(found).to(device)


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    rate: torch.Tensor,
    layout: PackedLayout,
) -> torch.Tensor:
    """What the tokens read: (T, A, V) of the values' dtype.

    query and key (T, G, D), of any length (they are normalised here, and queries scaled by
    1 / sqrt(D)), value (T, A, V) of one float dtype; G divides A, and A / G neighbouring heads
    share a key. decay (T, A): g, in float32 or wider, at most 0. rate (T, A): beta.
    """
    plan = _plan(layout, query.device)
    given = DeltaTokens(query, key, value, decay, rate)
    if plan.branches is None:
        return continue_rows(given, plan.roots, None)[0]
    roots, branches = (given.selected(tokens) for tokens in plan.tokens)
    first, states = continue_rows(roots, plan.roots, None)
    second, _ = continue_rows(branches, plan.branches, states.index_select(0, plan.parents))
    return torch.cat([first, second]).index_select(0, plan.places)


class DeltaTokens(NamedTuple):
    """The tensors of ``gated_delta_rule`` for some tokens."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    decay: torch.Tensor
    rate: torch.Tensor

    def selected(self, tokens: torch.Tensor) -> DeltaTokens:
        """Those of ``tokens`` (n,) int64."""
        return DeltaTokens(*(x.index_select(0, tokens) for x in self))


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows of n tokens, one after the other, in chunks.

    The chunks are sorted by their number in the row, and among equals longest row first: the
    chunks of one step are neighbours, and the rows that have one are the first ones.
    """

    bounds: torch.Tensor
    """(N + 1,) int32: where the rows begin and end."""
    chunks: torch.Tensor
    """(M, 64) int64: the tokens, n where a chunk has none."""
    steps: tuple[int, ...]
    """Chunks of each step."""
    places: torch.Tensor
    """(n,) int64: where each token is in ``chunks``."""
    order: torch.Tensor
    """(N,) int64: the rows, longest first."""
    ranks: torch.Tensor
    """(N,) int64: the place of each row in ``order``."""


def packed_rows(lengths: Sequence[int], device: torch.device) -> PackedRows:
    """Rows of ``lengths`` tokens, of which none is 0."""
    bounds = torch.tensor([*accumulate(lengths, initial=0)])
    sizes = torch.tensor(lengths)
    order = sizes.argsort(descending=True, stable=True)
    counts = [-(-int(size) // CHUNK) for size in sizes[order]]
    steps = tuple(sum(count > step for count in counts) for step in range(counts[0]))
    at = torch.cat(
        [
            torch.stack([bounds[order[:count]] + step * CHUNK, bounds[order[:count] + 1]], dim=1)
            for step, count in enumerate(steps)
        ]
    )
    chunks = at[:, :1] + torch.arange(CHUNK)
    chunks = torch.where(chunks < at[:, 1:], chunks, bounds[-1])
    places = torch.empty(int(bounds[-1]) + 1, dtype=torch.int64)
    places[chunks.flatten()] = torch.arange(chunks.numel())
    return PackedRows(
        bounds=bounds.to(device, torch.int32),
        chunks=chunks.to(device),
        steps=steps,
        places=places[:-1].to(device),
        order=order.to(device),
        ranks=order.argsort().to(device),
    )


@dataclass(frozen=True, slots=True)
class _Plan:
    """The segments of a layout as rows: those that begin with nothing, and those that continue
    one of them."""

    roots: PackedRows
    branches: PackedRows | None
    """None if there are no such segments; then nothing below is read."""
    tokens: tuple[torch.Tensor, torch.Tensor]
    """The tokens of both, int64."""
    parents: torch.Tensor
    """(branches,) int64: the root that each of them continues."""
    places: torch.Tensor
    """(T,) int64: where each token is among those of both, one after the other."""


@lru_cache(maxsize=8)
def _plan(layout: PackedLayout, device: torch.device) -> _Plan:
    roots = [s for s in layout.segments if s.prefix_end == s.prefix_start]
    branches = [s for s in layout.segments if s.prefix_end > s.prefix_start]
    root_at = {(s.start, s.end): number for number, s in enumerate(roots)}

    def tokens(segments: Sequence[Segment]) -> torch.Tensor:
        empty = torch.zeros(0, dtype=torch.int64)
        return torch.cat([empty, *(torch.arange(s.start, s.end) for s in segments)])

    both = tokens(roots), tokens(branches)
    return _Plan(
        roots=packed_rows([s.num_queries for s in roots], device),
        branches=packed_rows([s.num_queries for s in branches], device) if branches else None,
        tokens=(both[0].to(device), both[1].to(device)),
        parents=torch.tensor(
            [root_at[s.prefix_start, s.prefix_end] for s in branches], dtype=torch.int64
        ).to(device),
        places=torch.cat(both).argsort().to(device),
    )


def continue_rows(
    given: DeltaTokens, rows: PackedRows, initial: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(what the n tokens of ``rows`` read (n, A, V), the rows' final states (N, A, D, V)).

    ``initial``: the states (N, A, D, V) with which the rows begin, None for zeros. States are
    float32, or float64 where the tensors are.
    """
    if given.query.is_cuda and (kernel := _fla_kernel()) is not None:
        return _by_fla(kernel, given, rows, initial)
    return _recomputed(_in_chunks, *given, rows, initial)


def products_per_token(net: GatedDeltaNet) -> int:
    """Multiplications of a token's chunk and state, over all heads of a layer."""
    keys, values = net.key_dim, net.value_dim
    # Half of the square in the triangular solution is zero.
    of_head = CHUNK * (keys + values) // 2 + CHUNK * values + 3 * keys * values
    return 2 * net.key_heads * CHUNK * keys + net.value_heads * of_head


def _recomputed(function: Callable[..., Any], *arguments: Any) -> Any:
    """``function`` of ``arguments``, of which alone a backward pass keeps memory: what lies between
    is some ten times as large and is computed again."""
    if not torch.is_grad_enabled():
        return function(*arguments)
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


def _in_chunks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    rate: torch.Tensor,
    rows: PackedRows,
    initial: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = _wide(query)
    times = value.shape[1] // query.shape[1]

    def chunked(x: torch.Tensor) -> torch.Tensor:
        """(n, heads, ...) -> (M, heads, 64, ...), with zeros where a chunk has no token: they
        change no state."""
        padded = torch.cat([x.to(wide), x.new_zeros((1, *x.shape[1:]), dtype=wide)])
        return padded[rows.chunks].transpose(1, 2).contiguous()

    def of_heads(x: torch.Tensor) -> torch.Tensor:
        """(M, G, ...) -> (M, A, ...)"""
        return x.repeat_interleave(times, dim=1) if times > 1 else x

    q, k = chunked(_unit(query.to(wide)) * query.shape[2] ** -0.5), chunked(_unit(key.to(wide)))
    v, g, beta = chunked(value), chunked(decay).cumsum(dim=2), chunked(rate).unsqueeze(-1)
    # The decay from token j to a later token i of the chunk.
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    between = (g.unsqueeze(3) - g.unsqueeze(2)).masked_fill(later, -torch.inf).exp()
    begun, ends = g.exp().unsqueeze(-1), (g[:, :, -1:] - g).exp().unsqueeze(-1)
    # A token's change of the state depends on those of the chunk's earlier ones: it solves
    # (1 + L) x = beta (v - S k) with a lower triangle L, here for both terms.
    lower = of_heads(k @ k.mT) * between * beta
    given = torch.cat([v, of_heads(k) * begun], dim=-1) * beta
    solved = torch.linalg.solve_triangular(lower, given, upper=False, unitriangular=True)
    new, old = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    scores = of_heads(q @ k.mT) * between
    reads, writes = of_heads(q) * begun, (of_heads(k) * ends).mT
    shrinks = begun[:, :, -1:]
    state = v.new_zeros((len(rows.order), v.shape[1], k.shape[-1], v.shape[-1]))
    if initial is not None:
        state = initial.to(wide)[rows.order]
    out, final, first = [], [], 0
    for count in rows.steps:
        step = slice(first, first + count)
        first += count
        final.append(state[count:])
        state = state[:count]
        change = new[step] - old[step] @ state
        out.append(reads[step] @ state + scores[step] @ change)
        state = state * shrinks[step] + writes[step] @ change
    found = torch.cat(out).transpose(1, 2).flatten(0, 1).index_select(0, rows.places)
    states = torch.cat([state, *reversed(final)]).index_select(0, rows.ranks)
    return found.to(value.dtype), states


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _unit(x: torch.Tensor) -> torch.Tensor:
    """Vectors of length 1 (the constant is that of the published models)."""
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6)


@cache
def _fla_kernel() -> Callable[..., Any] | None:
    """That of flash-linear-attention; None where it is not installed."""
    if importlib.util.find_spec("fla") is None:
        return None
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # type: ignore[import-not-found]

    return chunk_gated_delta_rule


def _by_fla(
    kernel: Callable[..., Any], given: DeltaTokens, rows: PackedRows, initial: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``continue_rows`` by ``_fla_kernel``."""
    times = given.value.shape[1] // given.query.shape[1]
    q, k = (x.repeat_interleave(times, dim=1).unsqueeze(0) for x in (given.query, given.key))
    out, states = kernel(
        q,
        k,
        given.value.unsqueeze(0),
        g=given.decay.unsqueeze(0),
        beta=given.rate.unsqueeze(0),
        initial_state=initial,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=rows.bounds.long(),
    )
    return out.squeeze(0), states

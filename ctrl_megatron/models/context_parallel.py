"""Attention over packed tokens that several ranks share (context parallelism).

C context ranks have the same micro-batch. Each of them computes t = T / C of its T tokens in every
layer, and only attention needs all of them. There are two ways, for A query and G key heads:

- If C divides A, an all-to-all gives every rank all tokens of A / C heads, and another one takes
  the results back (DeepSpeed Ulysses, arXiv 2309.14509). Key heads are repeated so that C divides
  them.
- Else every rank gathers all keys and values, and computes its own queries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import lcm

import torch
from megatron.core.tensor_parallel.mappings import (
    all_to_all,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)

from ctrl_megatron.models.packed_layout import (
    ContextShardedTokens,
    PackedLayoutParams,
    reorder_by_rank,
    reorder_by_token,
)

Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, PackedLayoutParams], torch.Tensor]
"""``models.attention.PackedAttentionFunction`` with its scale."""


def attend_over_context_ranks(
    kernel: Kernel,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packed: PackedLayoutParams,
) -> torch.Tensor:
    """(t, A, Dv) attention of query (t, A, Dk), key (t, G, Dk) and value (t, G, Dv) of this rank's
    tokens, by ``kernel`` and over the tokens of all context ranks."""
    shared = packed.shared
    if shared is None:
        return kernel(query, key, value, packed)
    if query.shape[1] % shared.num_ranks:
        return _with_all_keys(kernel, query, key, value, shared)
    return _with_all_tokens(kernel, query, key, value, shared)


def _with_all_tokens(
    kernel: Kernel,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    shared: ContextShardedTokens,
) -> torch.Tensor:
    ranks, groups = shared.num_ranks, key.shape[1]
    if times := lcm(groups, ranks) // groups - 1:
        key, value = (x.repeat_interleave(times + 1, dim=1) for x in (key, value))
    q, k, v = all_tokens_of_own_heads([query, key, value], shared)
    return own_tokens_of_all_heads(kernel(q, k, v, shared.packed), shared)


def all_tokens_of_own_heads(
    parts: Sequence[torch.Tensor], shared: ContextShardedTokens
) -> list[torch.Tensor]:
    """(t, heads, ...) of this rank's tokens each -> (T, heads / C, ...) of all tokens and this
    rank's part of the heads, in one message; differentiable. C divides each number of heads."""
    ranks = shared.num_ranks
    # (t, C, A / C * D) each.
    flat = [x.unflatten(1, (ranks, -1)).flatten(2) for x in parts]
    sent = torch.cat(flat, dim=2).transpose(0, 1).flatten(0, 1)
    found = reorder_by_token(all_to_all(shared.group, sent), ranks)
    pieces = found.split([part.shape[2] for part in flat], dim=1)
    return [
        piece.unflatten(1, (-1, *x.shape[2:])).contiguous()
        for piece, x in zip(pieces, parts, strict=True)
    ]


def own_tokens_of_all_heads(x: torch.Tensor, shared: ContextShardedTokens) -> torch.Tensor:
    """(T, heads / C, D) -> (t, heads, D): the way back."""
    back = all_to_all(shared.group, reorder_by_rank(x, shared.num_ranks))
    return back.unflatten(0, (shared.num_ranks, -1)).transpose(0, 1).flatten(1, 2)


def _with_all_keys(
    kernel: Kernel,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    shared: ContextShardedTokens,
) -> torch.Tensor:
    packed, places = shared.own_queries
    both = torch.cat([key.flatten(1), value.flatten(1)], dim=1)
    gathered = gather_from_sequence_parallel_region(both, group=shared.group)
    seen = gathered.index_select(0, places).split([x[0].numel() for x in (key, value)], dim=1)
    k, v = (
        part.unflatten(1, x.shape[1:]).contiguous()
        for part, x in zip(seen, (key, value), strict=True)
    )
    return kernel(query, k, v, packed)


def sum_over_context_ranks(x: torch.Tensor, packed: PackedLayoutParams) -> torch.Tensor:
    """The sum of ``x`` over the context ranks, of its shape and dtype; differentiable. Collective
    over them. All of them compute the same from the sum, so its gradient is the gradient of each
    summand."""
    if packed.shared is None:
        return x
    return reduce_from_tensor_model_parallel_region(x, group=packed.shared.group)

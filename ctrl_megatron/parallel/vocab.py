"""Log-probability and entropy from hidden states under a vocabulary split over tensor ranks.

The output layer and the softmax are computed together, a tile of logits at a time, and once more
in the backward pass unless they are few enough to be kept: at (tokens x vocabulary) = (16384 x
152064) the fp32 logits of a whole micro-batch would take 10 GB. The softmax's normaliser is known
when the last columns of a tile's tokens have been seen (Milakov and Gimelshein, arXiv 1805.02867).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist


def vocab_range(vocab_size: int, tensor_rank: int, tensor_size: int) -> tuple[int, int, int]:
    """(first token id, real columns, padded columns) of one tensor rank's share of the vocabulary.

    The vocabulary is padded to a multiple of the tensor size; padded columns are never predicted.
    """
    share = -(-vocab_size // tensor_size)
    first = tensor_rank * share
    return first, max(0, min(share, vocab_size - first)), share


def _all_reduce(tensor: torch.Tensor, op: Any, group: Any) -> torch.Tensor:
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, op=op, group=group)
    return tensor


_LOGITS, _COLUMNS = 1 << 21, 1024
"""Logits of a tile on a CPU, and the fewest of its columns: the gradient of its hidden states is
read and written once a tile for its columns, that of the weight for its tokens. A tile of a core's
own cache is a fifth slower in the backward pass (``docs/experiments/update.md``)."""
_BITS = math.log2(math.e)
"""Powers of two stand for exponentials: torch's exp is three times slower where MKL computes it on
an AMD."""


def _on_cpu(device: torch.device) -> bool:
    return device.type == "cpu"


def _tiles(tokens: int, columns: int, chunk: int, device: torch.device) -> tuple[int, int]:
    """(tokens, columns) of a tile, which holds at most ``chunk`` tokens' worth of logits.

    A GPU takes whole rows of ``chunk`` tokens, a CPU some 2,000 tokens and as many columns as that
    leaves.
    """
    columns = max(columns, 1)
    if not _on_cpu(device):
        return max(1, min(chunk, tokens)), columns
    most = min(chunk * columns, max(_LOGITS, chunk))
    rows = max(1, min(tokens, most // min(columns, _COLUMNS)))
    few = most // rows
    # Matrix products want multiples of the registers.
    return rows, min(columns, few - few % 64 if few > 64 else few)


class _Tile:
    """Buffers for the logits of one tile after the other, in float32 and in the type of the hidden
    states; in the latter, those of all tiles may be kept."""

    def __init__(self, rows: int, columns: int, kept: torch.Tensor) -> None:
        self._low = kept.new_empty(rows * columns)
        # Where the types are the same, products are computed in place.
        same = kept.dtype == torch.float32
        self._wide = self._low if same else kept.new_empty(rows * columns, dtype=torch.float32)
        self._kept, self._end = kept, 0

    def low(self, rows: int, columns: int) -> torch.Tensor:
        """(rows, columns) of the hidden states' type; shares memory with ``wide`` in float32."""
        return self._low[: rows * columns].view(rows, columns)

    def logits(self, rows: int, columns: int) -> torch.Tensor:
        """Where the next tile's logits lie: among all that are kept, or in ``low``."""
        if not len(self._kept):
            return self.low(rows, columns)
        start, self._end = self._end, self._end + rows * columns
        return self._kept[start : self._end].view(rows, columns)

    def wide(self, logits_TV: torch.Tensor) -> torch.Tensor:
        """Logits in float32, to be overwritten."""
        wide_TV = self._wide[: logits_TV.numel()].view_as(logits_TV)
        return wide_TV if wide_TV.data_ptr() == logits_TV.data_ptr() else wide_TV.copy_(logits_TV)

    def powers(self, bits_TV: torch.Tensor) -> torch.Tensor:
        """2^bits, in memory that every tile uses: the allocator would find another for each."""
        powers_TV = self._powers[: bits_TV.numel()].view_as(bits_TV)
        return torch.exp2(bits_TV, out=powers_TV)

    @cached_property
    def _powers(self) -> torch.Tensor:
        return torch.empty_like(self._wide)


def _ranges(total: int, size: int) -> Iterator[slice]:
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


def _inside(targets: torch.Tensor, columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """(is the target in these columns, (T, 1) how far from their start, clamped into range)."""
    mine = (targets >= columns.start) & (targets < columns.stop)
    column = (targets - columns.start).clamp(0, columns.stop - columns.start - 1)
    return mine, column.unsqueeze(-1)


class _Softmax:
    """Statistics of the softmax of some tokens, as far as their columns have been seen."""

    def __init__(self, like: torch.Tensor, tokens: int, temperature: float) -> None:
        self._scale = _BITS / temperature
        self.peak_T = like.new_full((tokens,), -torch.inf, dtype=torch.float32)
        """The largest logit z, before the temperature."""
        self.sum_T = torch.zeros_like(self.peak_T)
        """Sum of 2^b, where b = (z - peak) log2(e) / temperature."""
        self.weighted_T = torch.zeros_like(self.peak_T)
        """Sum of 2^b b."""

    def raise_to(self, peak_T: torch.Tensor) -> None:
        """Count from another peak, none of which is smaller than the own."""
        down_T = torch.where(self.sum_T > 0, (self.peak_T - peak_T) * self._scale, 0.0)
        factor_T = down_T.exp2()
        self.weighted_T = (self.weighted_T + down_T * self.sum_T) * factor_T
        self.sum_T = self.sum_T * factor_T
        self.peak_T = peak_T

    def add(self, logits_TV: torch.Tensor, tile: _Tile) -> None:
        """Further columns; the logits are overwritten."""
        self.raise_to(torch.maximum(self.peak_T, logits_TV.amax(dim=-1)))
        bits_TV = logits_TV.sub_(self.peak_T.unsqueeze(-1)).mul_(self._scale)
        powers_TV = tile.powers(bits_TV)
        self.sum_T += powers_TV.sum(dim=-1)
        self.weighted_T += powers_TV.mul_(bits_TV).sum(dim=-1)

    def over_ranks(self, group: Any) -> None:
        """Join the tensor ranks' columns."""
        self.raise_to(_all_reduce(self.peak_T.clone(), dist.ReduceOp.MAX, group))
        sums = torch.stack([self.sum_T, self.weighted_T])
        self.sum_T, self.weighted_T = _all_reduce(sums, dist.ReduceOp.SUM, group)


class _LinearLogProb(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        first: int,
        real: int,
        temperature: float,
        chunk: int,
        group: Any,
        is_embedding: bool,
        keep: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        targets = targets - first
        log_probs = hidden.new_empty(len(targets), dtype=torch.float32)
        entropy, peak, total = (torch.empty_like(log_probs) for _ in range(3))
        tokens, columns = _tiles(len(targets), len(weight), chunk, hidden.device)
        kept = hidden.new_empty(len(targets) * real if keep else 0)
        tile = _Tile(tokens, columns, kept)
        for part in _ranges(len(targets), tokens):
            stats = _Softmax(hidden, len(targets[part]), temperature)
            picked_T = torch.zeros_like(stats.peak_T)
            for block in _ranges(real, columns):
                logits_TV = tile.logits(len(targets[part]), len(weight[block]))
                torch.mm(hidden[part], weight[block].t(), out=logits_TV)
                mine, column = _inside(targets[part], block)
                picked_T = torch.where(mine, logits_TV.gather(-1, column).squeeze(-1), picked_T)
                stats.add(tile.wide(logits_TV), tile)
            stats.over_ranks(group)
            log_sum_T = stats.sum_T.log()
            entropy[part] = log_sum_T - stats.weighted_T / stats.sum_T / _BITS
            peak[part], total[part] = stats.peak_T, stats.sum_T
            # One of the ranks has the target's logit.
            own_T = (targets[part] >= 0) & (targets[part] < real)
            picked_T = torch.where(own_T, (picked_T - stats.peak_T) / temperature, 0.0)
            log_probs[part] = _all_reduce(picked_T, dist.ReduceOp.SUM, group) - log_sum_T
        ctx.save_for_backward(hidden, weight, targets, peak, total, entropy, kept)
        ctx.arguments = (real, temperature, chunk, is_embedding)
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, targets, peak, total, entropy, kept = ctx.saved_tensors
        real, temperature, chunk, is_embedding = ctx.arguments
        grad_log_probs, grad_entropy = grads
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(peak)
        tokens, columns = _tiles(len(targets), len(weight), chunk, hidden.device)
        tile = _Tile(tokens, columns, kept)
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = _WeightGradient(weight, in_one_piece=tokens >= len(targets))
        scale = _BITS / temperature
        for part in _ranges(len(targets), tokens):
            # d log p(y) / d z = 1[y] - p ;  d H / d z = -p (log p + H) ;  p = 2^b / sum
            hit_T = grad_log_probs[part] / temperature
            constant_T, slope_T = -hit_T / total[part], None
            if grad_entropy is not None:
                slope_T = -grad_entropy[part] / temperature / total[part]
                constant_T = constant_T + slope_T * (entropy[part] - total[part].log())
                slope_T = slope_T / _BITS
            grad_TH = torch.zeros_like(hidden[part], dtype=torch.float32)
            for block in _ranges(real, columns):
                logits_TV = tile.logits(len(targets[part]), len(weight[block]))
                if not len(kept):
                    torch.mm(hidden[part], weight[block].t(), out=logits_TV)
                grad_TV = tile.wide(logits_TV).sub_(peak[part].unsqueeze(-1)).mul_(scale)
                if slope_T is None:
                    grad_TV.exp2_().mul_(constant_T.unsqueeze(-1))
                else:
                    powers_TV = tile.powers(grad_TV)
                    grad_TV.mul_(slope_T.unsqueeze(-1)).add_(constant_T.unsqueeze(-1))
                    grad_TV.mul_(powers_TV)
                mine, column = _inside(targets[part], block)
                grad_TV.scatter_add_(-1, column, torch.where(mine, hit_T, 0.0).unsqueeze(-1))
                low_TV = tile.low(*grad_TV.shape)
                if low_TV.data_ptr() != grad_TV.data_ptr():
                    low_TV.copy_(grad_TV)
                grad_TH += low_TV @ weight[block]
                grad_weight.add(block, low_TV.t() @ hidden[part])
            grad_hidden[part] = grad_TH
        # Each tensor rank holds the part of grad_hidden that its columns give; the caller's
        # region function sums the parts.
        given = grad_weight.result(is_embedding=is_embedding)
        return grad_hidden, given, None, None, None, None, None, None, None, None


class _WeightGradient:
    """Collects the gradient of the output weight.

    Where Megatron has a float32 buffer for it (``main_grad``) on a CPU, it is added there and
    autograd gets nothing of it.
    """

    def __init__(self, weight: torch.Tensor, *, in_one_piece: bool) -> None:
        buffer = getattr(weight, "main_grad", None) if _on_cpu(weight.device) else None
        self._weight, self._returned = weight, buffer is None
        dtype = weight.dtype if in_one_piece else torch.float32
        self._sum = torch.zeros_like(weight, dtype=dtype) if buffer is None else buffer

    def add(self, rows: slice, grad: torch.Tensor) -> None:
        """The gradient of some rows by some tokens."""
        self._sum[rows] += grad

    def result(self, *, is_embedding: bool) -> torch.Tensor | None:
        """For autograd. Of a weight that is the embedding's too, that one's gradient is to come."""
        if self._returned:
            return self._sum.to(self._weight.dtype)
        if is_embedding:
            return None
        # Megatron's hook wants a gradient to be there, which it does not look at then.
        self._weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        return torch.empty_like(self._weight)


def linear_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    chunk: int = 1024,
    tensor_rank: int = 0,
    tensor_size: int = 1,
    group: Any = None,
    is_embedding: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of ``targets`` and entropy of softmax(hidden @ weight.T / temperature).

    hidden (T, H) in the compute dtype, equal on all tensor ranks; weight (V / tensor size, H), this
    rank's rows; targets (T,) int64 token ids. Returns two (T,) float32 tensors, equal on all ranks.
    The gradient of ``hidden`` is this rank's share of the sum over tensor ranks. ``is_embedding``:
    the weight is also the embedding's, in the same pass.
    """
    first, real, share = vocab_range(vocab_size, tensor_rank, tensor_size)
    if weight.shape[0] != share:
        raise ValueError(
            f"the output weight has {weight.shape[0]} rows, rank {tensor_rank} of {tensor_size} "
            f"owns {share} of a vocabulary of {vocab_size}"
        )
    if len(hidden) != len(targets):
        raise ValueError(f"{len(hidden)} hidden states for {len(targets)} targets")
    if chunk < 1:
        # A negative step would leave the result's memory as it was found.
        raise ValueError(f"chunk must be at least 1 token, got {chunk}")
    if not temperature > 0:
        raise ValueError(f"temperature must be positive to compute log-probs, got {temperature}")
    # A chunk of logits may exist in float32. Where all of them fit in its place, they stay for the
    # backward pass; a GPU's tiles take that place themselves.
    fit = len(targets) * hidden.element_size() <= chunk * torch.float32.itemsize
    keep = torch.is_grad_enabled() and fit and _on_cpu(hidden.device)
    arguments = (targets, first, real, temperature, chunk, group, is_embedding, keep)
    return _LinearLogProb.apply(hidden, weight, *arguments)  # type: ignore[return-value]

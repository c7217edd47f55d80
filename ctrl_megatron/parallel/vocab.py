"""Log-probability and entropy from hidden states under a vocabulary split over tensor ranks.

The output layer and the softmax are computed together, one tile of logits after the other, and
again in the backward pass unless the logits are few enough to be kept: at (tokens x vocabulary) =
(16384 x 152064) the fp32 logits of a whole micro-batch would take 10 GB. The softmax is normalised
online, while the columns of a tile's tokens are computed (Milakov and Gimelshein, arXiv
1805.02867). On a GPU ``softmax_kernels`` reads each logit once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache, cached_property
from importlib.util import find_spec
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


def all_reduce(tensor: torch.Tensor, op: Any, group: Any) -> torch.Tensor:
    """The tensor, combined in place over the ranks of ``group``; as it is where that is None."""
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, op=op, group=group)
    return tensor


_LOGITS, _COLUMNS = 1 << 21, 1024
"""Number of logits of a tile on a CPU, and the fewest columns of one. Every tile reads and writes
the gradients of its tokens' hidden states and of its columns' weights once, so small tiles cost
more: one that fits a core's own cache is a fifth slower in the backward pass
(``docs/experiments/update.md``)."""
_BITS = math.log2(math.e)
"""Powers of two replace exponentials: torch's exp is three times slower where MKL computes it on an
AMD processor."""


def _on_cpu(device: torch.device) -> bool:
    return device.type == "cpu"


@cache
def _kernels(device: str) -> Any:
    """``parallel.softmax_kernels`` on a GPU with Triton, which torch brings there; else None."""
    if device != "cuda" or find_spec("triton") is None:
        return None
    from ctrl_megatron.parallel import softmax_kernels

    return softmax_kernels


def _tiles(tokens: int, columns: int, chunk: int, device: torch.device) -> tuple[int, int]:
    """(tokens, columns) of a tile, which has at most as many logits as ``chunk`` whole rows.

    On a GPU it is ``chunk`` whole rows; on a CPU some 2,000 tokens and as many columns as that
    allows.
    """
    columns = max(columns, 1)
    if not _on_cpu(device):
        return max(1, min(chunk, tokens)), columns
    most = min(chunk * columns, max(_LOGITS, chunk))
    rows = max(1, min(tokens, most // min(columns, _COLUMNS)))
    few = most // rows
    # Matrix products are fastest at multiples of the register width.
    return rows, min(columns, few - few % 64 if few > 64 else few)


class _Tile:
    """Buffers for the logits of one tile after the other, in float32 and in the dtype of the hidden
    states; those of all tiles may be kept in that dtype."""

    def __init__(self, rows: int, columns: int, kept: torch.Tensor) -> None:
        self._low = kept.new_empty(rows * columns)
        self._kept, self._end = kept, 0

    def low(self, rows: int, columns: int) -> torch.Tensor:
        """(rows, columns) in the hidden states' dtype; shares memory with ``wide`` in float32."""
        return self._low[: rows * columns].view(rows, columns)

    def logits(self, rows: int, columns: int) -> torch.Tensor:
        """The memory of the next tile's logits: a part of those that are kept, or ``low``."""
        if not len(self._kept):
            return self.low(rows, columns)
        start, self._end = self._end, self._end + rows * columns
        return self._kept[start : self._end].view(rows, columns)

    def wide(self, logits_TV: torch.Tensor) -> torch.Tensor:
        """Logits in float32, to be overwritten."""
        wide_TV = self._wide[: logits_TV.numel()].view_as(logits_TV)
        return wide_TV if wide_TV.data_ptr() == logits_TV.data_ptr() else wide_TV.copy_(logits_TV)

    def powers(self, bits_TV: torch.Tensor) -> torch.Tensor:
        """2^bits, in memory that all tiles reuse: the allocator would provide new memory."""
        powers_TV = self._powers[: bits_TV.numel()].view_as(bits_TV)
        return torch.exp2(bits_TV, out=powers_TV)

    @cached_property
    def _wide(self) -> torch.Tensor:
        # With equal dtypes products are computed in place.
        same = self._low.dtype == torch.float32
        return self._low if same else torch.empty_like(self._low, dtype=torch.float32)

    @cached_property
    def _powers(self) -> torch.Tensor:
        return torch.empty_like(self._wide)


def slices_of(total: int, size: int) -> Iterator[slice]:
    """Consecutive slices of ``size`` that cover ``total``; the last may be shorter."""
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


def _inside(targets_TK: torch.Tensor, columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """(T, K) whether a target is in these columns; (T, K) its column there, clamped."""
    mine = (targets_TK >= columns.start) & (targets_TK < columns.stop)
    return mine, (targets_TK - columns.start).clamp(0, columns.stop - columns.start - 1)


class _Softmax:
    """Statistics of the softmax of some tokens over the columns seen so far."""

    def __init__(self, like: torch.Tensor, tokens: int, temperature: float) -> None:
        self._scale = _BITS / temperature
        self.peak_T = like.new_full((tokens,), -torch.inf, dtype=torch.float32)
        """The largest logit z, before the temperature."""
        self.sum_T = torch.zeros_like(self.peak_T)
        """Sum of 2^b, where b = (z - peak) log2(e) / temperature."""
        self.weighted_T = torch.zeros_like(self.peak_T)
        """Sum of 2^b b."""

    def raise_to(self, peak_T: torch.Tensor) -> None:
        """Rescale the sums to another peak, which must not be smaller anywhere."""
        down_T = torch.where(self.sum_T > 0, (self.peak_T - peak_T) * self._scale, 0.0)
        factor_T = down_T.exp2()
        self.weighted_T = (self.weighted_T + down_T * self.sum_T) * factor_T
        self.sum_T = self.sum_T * factor_T
        self.peak_T = peak_T

    def add(self, logits_TV: torch.Tensor, tile: _Tile) -> None:
        """Add further columns, in the dtype of the hidden states; may overwrite them."""
        if kernels := _kernels(logits_TV.device.type):
            peak_T, sum_T, weighted_T = kernels.softmax_statistics(logits_TV, self._scale)
            higher_T = torch.maximum(self.peak_T, peak_T)
            self.raise_to(higher_T)
            down_T = (peak_T - higher_T) * self._scale
            factor_T = down_T.exp2()
            self.sum_T += sum_T * factor_T
            self.weighted_T += (weighted_T + down_T * sum_T) * factor_T
            return
        logits_TV = tile.wide(logits_TV)
        self.raise_to(torch.maximum(self.peak_T, logits_TV.amax(dim=-1)))
        bits_TV = logits_TV.sub_(self.peak_T.unsqueeze(-1)).mul_(self._scale)
        powers_TV = tile.powers(bits_TV)
        self.sum_T += powers_TV.sum(dim=-1)
        self.weighted_T += powers_TV.mul_(bits_TV).sum(dim=-1)

    def over_ranks(self, group: Any) -> None:
        """Combine the columns of all tensor ranks."""
        self.raise_to(all_reduce(self.peak_T.clone(), dist.ReduceOp.MAX, group))
        sums = torch.stack([self.sum_T, self.weighted_T])
        self.sum_T, self.weighted_T = all_reduce(sums, dist.ReduceOp.SUM, group)


def _softmax_gradient(
    logits_TV: torch.Tensor,
    peak_T: torch.Tensor,
    constant_T: torch.Tensor,
    slope_T: torch.Tensor | None,
    targets_TK: torch.Tensor,
    hit_TK: torch.Tensor,
    scale: float,
    tile: _Tile,
) -> torch.Tensor:
    """2^b (constant + slope b) of the logits, plus ``hit_TK`` in the columns ``targets_TK``, in
    their dtype; b = (z - peak) ``scale``."""
    grad_TV = tile.wide(logits_TV).sub_(peak_T.unsqueeze(-1)).mul_(scale)
    if slope_T is None:
        grad_TV.exp2_().mul_(constant_T.unsqueeze(-1))
    else:
        powers_TV = tile.powers(grad_TV)
        grad_TV.mul_(slope_T.unsqueeze(-1)).add_(constant_T.unsqueeze(-1))
        grad_TV.mul_(powers_TV)
    inside, column = _inside(targets_TK, slice(0, grad_TV.shape[1]))
    grad_TV.scatter_add_(-1, column, torch.where(inside, hit_TK, 0.0))
    low_TV = tile.low(*grad_TV.shape)
    return low_TV if low_TV.data_ptr() == grad_TV.data_ptr() else low_TV.copy_(grad_TV)


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
        log_probs = hidden.new_empty(targets.shape, dtype=torch.float32)
        entropy, peak, total = (log_probs.new_empty(len(targets)) for _ in range(3))
        tokens, columns = _tiles(len(targets), len(weight), chunk, hidden.device)
        kept = hidden.new_empty(len(targets) * real if keep else 0)
        tile = _Tile(tokens, columns, kept)
        for part in slices_of(len(targets), tokens):
            stats = _Softmax(hidden, len(targets[part]), temperature)
            picked_TK = torch.zeros_like(log_probs[part])
            for block in slices_of(real, columns):
                logits_TV = tile.logits(len(targets[part]), len(weight[block]))
                torch.mm(hidden[part], weight[block].t(), out=logits_TV)
                inside, column = _inside(targets[part], block)
                picked_TK = torch.where(inside, logits_TV.gather(-1, column), picked_TK)
                stats.add(logits_TV, tile)
            stats.over_ranks(group)
            log_sum_T = stats.sum_T.log()
            entropy[part] = log_sum_T - stats.weighted_T / stats.sum_T / _BITS
            peak[part], total[part] = stats.peak_T, stats.sum_T
            # Exactly one rank has the target's logit.
            own_TK = (targets[part] >= 0) & (targets[part] < real)
            picked_TK = (picked_TK - stats.peak_T.unsqueeze(-1)) / temperature
            picked_TK = torch.where(own_TK, picked_TK, 0.0)
            picked_TK = all_reduce(picked_TK, dist.ReduceOp.SUM, group)
            log_probs[part] = picked_TK - log_sum_T.unsqueeze(-1)
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
            grad_log_probs = torch.zeros_like(targets, dtype=torch.float32)
        tokens, columns = _tiles(len(targets), len(weight), chunk, hidden.device)
        tile = _Tile(tokens, columns, kept)
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = WeightGradient(weight, in_one_piece=tokens >= len(targets))
        scale = _BITS / temperature
        for part in slices_of(len(targets), tokens):
            # d log p(y) / d z = 1[y] - p ;  d H / d z = -p (log p + H) ;  p = 2^b / sum
            hit_TK = grad_log_probs[part] / temperature
            constant_T, slope_T = -hit_TK.sum(dim=-1) / total[part], None
            if grad_entropy is not None:
                slope_T = -grad_entropy[part] / temperature / total[part]
                constant_T = constant_T + slope_T * (entropy[part] - total[part].log())
                slope_T = slope_T / _BITS
            grad_TH = torch.zeros_like(hidden[part], dtype=torch.float32)
            for block in slices_of(real, columns):
                logits_TV = tile.logits(len(targets[part]), len(weight[block]))
                if not len(kept):
                    torch.mm(hidden[part], weight[block].t(), out=logits_TV)
                own_TK = targets[part] - block.start
                vectors = (peak[part], constant_T, slope_T)
                if kernels := _kernels(hidden.device.type):
                    first = (own_TK[:, 0].contiguous(), hit_TK[:, 0].contiguous())
                    kernels.write_softmax_gradient(logits_TV, *vectors, *first, scale)
                    inside, column = _inside(own_TK[:, 1:], slice(0, logits_TV.shape[1]))
                    others_TK = torch.where(inside, hit_TK[:, 1:], 0.0)
                    low_TV = logits_TV.scatter_add_(-1, column, others_TK.to(logits_TV.dtype))
                else:
                    low_TV = _softmax_gradient(logits_TV, *vectors, own_TK, hit_TK, scale, tile)
                grad_TH += low_TV @ weight[block]
                if grad_weight is not None:
                    grad_weight.add(block, low_TV.t() @ hidden[part])
            grad_hidden[part] = grad_TH
        # Each tensor rank has the part of grad_hidden that its columns contribute; the caller's
        # region function sums the parts.
        given = None if grad_weight is None else grad_weight.result(is_embedding=is_embedding)
        return grad_hidden, given, None, None, None, None, None, None, None, None


class WeightGradient:
    """Collects the gradient of the output weight.

    On a CPU it is added to Megatron's float32 buffer (``main_grad``) if the weight has one, and
    autograd gets none.
    """

    def __init__(self, weight: torch.Tensor, *, in_one_piece: bool) -> None:
        buffer = getattr(weight, "main_grad", None) if _on_cpu(weight.device) else None
        self._weight, self._returned = weight, buffer is None
        dtype = weight.dtype if in_one_piece else torch.float32
        self._sum = torch.zeros_like(weight, dtype=dtype) if buffer is None else buffer

    def add(self, rows: slice, grad: torch.Tensor) -> None:
        """Add the contribution of some tokens to the gradient of some rows."""
        self._sum[rows] += grad

    def add_product(self, rows: slice, slopes: torch.Tensor, hidden: torch.Tensor) -> None:
        """``add`` of ``slopes`` (T, rows) times ``hidden`` (T, H), in place where dtypes allow."""
        if self._sum.dtype == slopes.dtype:
            self._sum[rows].addmm_(slopes.t(), hidden)
        else:
            self._sum[rows] += slopes.t() @ hidden

    def result(self, *, is_embedding: bool) -> torch.Tensor | None:
        """The gradient for autograd. If the weight is also the embedding's, the embedding's part is
        still to come."""
        if self._returned:
            return self._sum.to(self._weight.dtype)
        if is_embedding:
            return None
        # Megatron's hook requires a gradient, whose values it ignores then.
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
    rank's rows; targets (T,) int64 token ids, or (T, K) of them, which may repeat one. Returns the
    log-probabilities in the shape of the targets and the entropy (T,), both float32 and equal on
    all ranks.
    The gradient of ``hidden`` is this rank's share of the sum over tensor ranks. ``is_embedding``
    says that the weight is also the embedding's in the same pass.
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
    # The budget is one chunk of logits in float32. If all logits fit into it, they are kept for the
    # backward pass; on a GPU one tile already fills the budget.
    fit = len(targets) * hidden.element_size() <= chunk * torch.float32.itemsize
    keep = torch.is_grad_enabled() and fit and _on_cpu(hidden.device)
    columns = targets.unsqueeze(-1) if targets.ndim == 1 else targets
    arguments = (columns, first, real, temperature, chunk, group, is_embedding, keep)
    log_probs, entropy = _LinearLogProb.apply(hidden, weight, *arguments)  # type: ignore[misc]
    return log_probs.view(targets.shape), entropy

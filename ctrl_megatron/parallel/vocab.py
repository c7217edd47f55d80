"""Log-probability and entropy from hidden states under a vocabulary split over tensor ranks.

The output layer and the softmax are computed together, a chunk of tokens at a time, and once more
in the backward pass, so that logits exist for one chunk only: at (tokens x vocabulary) = (16384 x
152064) the fp32 logits of a whole micro-batch would take 10 GB.
"""

from __future__ import annotations

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


class _Chunk:
    """Softmax statistics of one chunk of tokens; the same arithmetic forward and backward."""

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        first: int,
        real: int,
        temperature: float,
        group: Any,
    ) -> None:
        logits_TV = (hidden @ weight[:real].t()).float() / temperature
        peak_T = (
            logits_TV.amax(dim=-1) if real else hidden.new_full((len(hidden),), -torch.inf).float()
        )
        _all_reduce(peak_T, dist.ReduceOp.MAX, group)
        self.shifted_TV = logits_TV.sub_(peak_T.unsqueeze(-1))
        exp_TV = self.shifted_TV.exp()
        sums = torch.stack([exp_TV.sum(dim=-1), (exp_TV * self.shifted_TV).sum(dim=-1)])
        normaliser_T, weighted_T = _all_reduce(sums, dist.ReduceOp.SUM, group)
        self.probs_TV = exp_TV.div_(normaliser_T.unsqueeze(-1))
        self.log_normaliser_T = normaliser_T.log()
        self.entropy_T = self.log_normaliser_T - weighted_T / normaliser_T
        self.first, self.real, self.group = first, real, group

    def own(self, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(is the target in this rank's columns, column clamped into range)."""
        column = targets - self.first
        mine = (column >= 0) & (column < self.real)
        return mine, column.clamp(0, max(self.real - 1, 0))

    def log_probs(self, targets: torch.Tensor) -> torch.Tensor:
        mine, column = self.own(targets)
        picked = torch.zeros_like(self.log_normaliser_T)
        if self.real:
            value = self.shifted_TV.gather(-1, column.unsqueeze(-1)).squeeze(-1)
            picked = torch.where(mine, value, picked)
        return _all_reduce(picked, dist.ReduceOp.SUM, self.group) - self.log_normaliser_T


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
    ) -> tuple[torch.Tensor, torch.Tensor]:
        log_probs = hidden.new_empty(len(targets), dtype=torch.float32)
        entropy = torch.empty_like(log_probs)
        for start in range(0, len(targets), chunk):
            part = slice(start, start + chunk)
            stats = _Chunk(hidden[part], weight, first, real, temperature, group)
            log_probs[part] = stats.log_probs(targets[part])
            entropy[part] = stats.entropy_T
        ctx.save_for_backward(hidden, weight, targets)
        ctx.arguments = (first, real, temperature, chunk, group)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_log_probs, grad_entropy = grads
        hidden, weight, targets = ctx.saved_tensors
        first, real, temperature, chunk, group = ctx.arguments
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for start in range(0, len(targets), chunk):
            part = slice(start, start + chunk)
            stats = _Chunk(hidden[part], weight, first, real, temperature, group)
            # d log p(y) / d z = 1[y] - p ;  d H / d z = -p (log p + H)
            log_p_TV = stats.shifted_TV - stats.log_normaliser_T.unsqueeze(-1)
            grad_TV = -stats.probs_TV * (
                grad_log_probs[part].unsqueeze(-1)
                + grad_entropy[part].unsqueeze(-1) * (log_p_TV + stats.entropy_T.unsqueeze(-1))
            )
            if real:
                mine, column = stats.own(targets[part])
                hit = torch.where(mine, grad_log_probs[part], torch.zeros_like(stats.entropy_T))
                grad_TV.scatter_add_(-1, column.unsqueeze(-1), hit.unsqueeze(-1))
            grad_TV = grad_TV.div_(temperature).to(hidden.dtype)
            grad_hidden[part] = grad_TV @ weight[:real]
            grad_weight[:real] += (grad_TV.t() @ hidden[part]).float()
        # Each tensor rank holds the part of grad_hidden that its columns give; the caller's
        # region function sums the parts.
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None, None


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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of ``targets`` and entropy of softmax(hidden @ weight.T / temperature).

    hidden (T, H) in the compute dtype, equal on all tensor ranks; weight (V / tensor size, H), this
    rank's rows; targets (T,) int64 token ids. Returns two (T,) float32 tensors, equal on all ranks.
    The gradient of ``hidden`` is this rank's share of the sum over tensor ranks.
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
    return _LinearLogProb.apply(hidden, weight, targets, first, real, temperature, chunk, group)  # type: ignore[return-value]

"""A teacher's likeliest tokens, and the divergence between student and teacher over the whole
vocabulary, from hidden states under a vocabulary split over tensor ranks.

As in ``parallel.vocab`` the output layer and the softmax are computed together, some tokens after
the other, and again in the backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ctrl_megatron.algorithms.distillation import DivergenceName, mixture_log_probs
from ctrl_megatron.parallel.vocab import (
    WeightGradient,
    all_reduce,
    linear_log_probs,
    slices_of,
    vocab_range,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputLayer:
    """The vectors that predict N tokens, and this rank's part of the layer that makes logits of
    them."""

    hidden: torch.Tensor
    """(N, H) in the compute dtype, equal on all tensor ranks; (N, V) logits without a weight."""
    weight: torch.Tensor | None
    """(V / tensor size, H): this rank's rows."""
    vocab_size: int
    chunk: int = 1024
    """Tokens whose logits are computed together."""
    tensor_rank: int = 0
    tensor_size: int = 1
    group: Any = None
    is_embedding: bool = False
    """Whether the weight is also the embedding's in the same pass."""

    def log_probs(
        self, targets: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probs of ``targets`` (N,) or (N, K) in their shape, entropies (N,)), float32; see
        ``linear_log_probs``."""
        if self.weight is None:
            logs = (self.hidden.float() / temperature).log_softmax(-1)
            columns = targets if targets.ndim == 2 else targets.unsqueeze(-1)
            chosen = logs.gather(-1, columns).view(targets.shape)
            return chosen, -(logs.exp() * logs).sum(-1)
        return linear_log_probs(
            self.hidden,
            self.weight,
            targets,
            vocab_size=self.vocab_size,
            temperature=temperature,
            chunk=self.chunk,
            tensor_rank=self.tensor_rank,
            tensor_size=self.tensor_size,
            group=self.group,
            is_embedding=self.is_embedding,
        )

    @torch.no_grad()
    def likeliest(self, count: int, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids (N, count) int64 of the likeliest tokens, their log-probs float32), the likeliest
        first; equal on all tensor ranks. Collective over them.

        ValueError for more tokens than the vocabulary has.
        """
        if count > self.vocab_size:
            raise ValueError(f"a vocabulary of {self.vocab_size} has no {count} likeliest tokens")
        first, real, _ = vocab_range(self.vocab_size, self.tensor_rank, self.tensor_size)
        ids = self.hidden.new_empty((len(self.hidden), count), dtype=torch.int64)
        log_probs = torch.empty_like(ids, dtype=torch.float32)
        for part in slices_of(len(self.hidden), self.chunk):
            logs = self._log_softmax(part, real, temperature)
            own, columns = logs.topk(min(count, real), dim=-1)
            found, tokens = _from_all_ranks(own, columns + first, count, self.group)
            log_probs[part], places = found.topk(count, dim=-1)
            ids[part] = tokens.gather(-1, places)
        return ids, log_probs

    def divergence_from(
        self,
        teacher: OutputLayer,
        divergence: DivergenceName,
        temperature: float,
        *,
        jsd_weight: float = 0.5,
    ) -> torch.Tensor:
        """(N,) float32: ``token_divergence`` over the whole vocabulary between this layer's
        distributions and the ``teacher``'s, which may have another hidden size; equal on all tensor
        ranks, differentiable in the student's hidden states and weight.

        The gradient of the hidden states is this rank's share of the sum over tensor ranks. Beside
        inputs and gradients, passes need the memory of 3 (``jsd``: 4) float32 matrices of ``chunk``
        tokens by this rank's vocabulary. Collective over the tensor ranks.
        """
        if self.weight is None or teacher.weight is None:
            raise ValueError("divergences over the whole vocabulary need hidden states, not logits")
        rows = len(self.weight), len(teacher.weight)
        share = vocab_range(self.vocab_size, self.tensor_rank, self.tensor_size)[2]
        if rows != (share, share):
            raise ValueError(f"output weights of {rows} rows for {share} of the vocabulary")
        given = _Given(self, teacher, divergence, temperature, jsd_weight)
        return _Divergence.apply(self.hidden, self.weight, given)  # type: ignore[return-value]

    def _log_softmax(self, part: slice, real: int, temperature: float) -> torch.Tensor:
        """(n, real columns of this rank) float32 log-probs of some of the tokens."""
        hidden, weight = self.hidden[part], self.weight
        logits = hidden.float().clone() if weight is None else (hidden @ weight[:real].t()).float()
        logits.div_(temperature)
        peak = logits.new_full((len(logits), 1), -torch.inf)
        if real:
            peak = logits.amax(dim=-1, keepdim=True)
        all_reduce(peak, dist.ReduceOp.MAX, self.group)
        logits.sub_(peak)
        return logits.sub_(all_reduce(_sum_of_exp(logits), dist.ReduceOp.SUM, self.group).log_())


@dataclass(frozen=True, slots=True)
class _Given:
    """The inputs of a divergence that get no gradient, and its layers."""

    student: OutputLayer
    teacher: OutputLayer
    divergence: DivergenceName
    temperature: float
    jsd_weight: float


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, given: _Given
    ) -> torch.Tensor:
        found = hidden.new_empty(len(hidden), dtype=torch.float32)
        for part in slices_of(len(hidden), given.student.chunk):
            found[part] = _values_and_slopes(given, part, slopes=False)[0]
        ctx.save_for_backward(hidden, weight)
        ctx.given = given
        return found

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        given: _Given = ctx.given
        grad_hidden, grad_weight = torch.empty_like(hidden), None
        chunk, real = given.student.chunk, _real(given.student)
        if ctx.needs_input_grad[1]:
            grad_weight = WeightGradient(weight, in_one_piece=chunk >= len(hidden))
        for part in slices_of(len(hidden), chunk):
            _, slopes = _values_and_slopes(given, part, slopes=True)
            slopes.mul_((grads[0][part] / given.temperature).unsqueeze(-1))
            low = slopes.to(hidden.dtype)
            del slopes
            grad_hidden[part] = low @ weight[:real]
            if grad_weight is not None:
                grad_weight.add_product(slice(0, real), low, hidden[part])
            del low
        done = None
        if grad_weight is not None:
            done = grad_weight.result(is_embedding=given.student.is_embedding)
        return grad_hidden, done, None


@torch.no_grad()
def _values_and_slopes(
    given: _Given, part: slice, *, slopes: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(divergences (n,) of some tokens, their derivatives (n, real columns) by the student's logits
    over the temperature).

    With D = sum of f(p), the derivative by such a logit is p (f'(p) - sum of p f'(p)).
    """
    real, group = _real(given.student), given.student.group
    student = given.student._log_softmax(part, real, given.temperature)
    teacher = given.teacher._log_softmax(part, real, given.temperature)

    def total(matrix: torch.Tensor) -> torch.Tensor:
        return all_reduce(matrix.sum(dim=-1), dist.ReduceOp.SUM, group)

    if given.divergence == "forward_kl":
        probability = teacher.exp()
        value = total(teacher.sub_(student).mul_(probability))
        return value, student.exp_().sub_(probability) if slopes else student
    if given.divergence == "reverse_kl":
        gap, weight = teacher.neg_().add_(student), 1.0
        probability = student.exp_()
        value = mean = total(gap * probability)
    else:
        mixed = mixture_log_probs(student, teacher, given.jsd_weight)
        weight = 1 - given.jsd_weight
        of_teacher = total(teacher.exp().mul_(teacher.sub_(mixed)))
        gap = mixed.neg_().add_(student)
        del teacher
        probability = student.exp_()
        mean = total(gap * probability)
        value = weight * mean + given.jsd_weight * of_teacher
    if not slopes:
        return value, gap
    return value, gap.sub_(mean.unsqueeze(-1)).mul_(probability).mul_(weight)


def _real(layer: OutputLayer) -> int:
    return vocab_range(layer.vocab_size, layer.tensor_rank, layer.tensor_size)[1]


def _sum_of_exp(logits: torch.Tensor) -> torch.Tensor:
    """(n, 1): the sum of exp of the columns, without a second matrix of them at once."""
    blocks = logits.split(max(1, logits.shape[1] // 16), dim=-1)
    return sum(
        (block.exp().sum(dim=-1, keepdim=True) for block in blocks),
        start=logits.new_zeros((len(logits), 1)),
    )


def _from_all_ranks(
    values: torch.Tensor, ids: torch.Tensor, count: int, group: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """(n, ranks * count) values and ids of all tensor ranks, those of a rank with fewer filled up
    with -inf."""
    if group is None or dist.get_world_size(group) == 1:
        return values, ids
    missing = count - values.shape[1]
    values = torch.nn.functional.pad(values, (0, missing), value=-torch.inf)
    ids = torch.nn.functional.pad(ids, (0, missing))
    every = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    names = [torch.empty_like(ids) for _ in every]
    dist.all_gather(every, values.contiguous(), group=group)
    dist.all_gather(names, ids.contiguous(), group=group)
    return torch.cat(every, dim=-1), torch.cat(names, dim=-1)

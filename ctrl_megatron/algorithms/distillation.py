"""Divergences of a student's next-token distribution from a teacher's, at one place of a text that
the student wrote.

p is the student's distribution and q the teacher's. Sources: GKD (arXiv 2306.13649) for the three
divergences, SDPO (arXiv 2601.20802) for the tail.
"""

from __future__ import annotations

import math
from typing import Literal

import torch

DivergenceName = Literal["reverse_kl", "forward_kl", "jsd"]
_SMALLEST_MASS = 1e-7
"""Least probability of the tail, whose logarithm must be finite."""


def token_divergence(
    student: torch.Tensor,
    teacher: torch.Tensor,
    divergence: DivergenceName,
    *,
    jsd_weight: float = 0.5,
) -> torch.Tensor:
    """(...) of log-probs (..., V) over all of a vocabulary, or over parts of it whose probabilities
    add up to 1; in nats, differentiable in ``student``.

    ``reverse_kl`` is KL(p || q), ``forward_kl`` KL(q || p). ``jsd`` is (1 - a) KL(p || m) +
    a KL(q || m) with m = (1 - a) p + a q and a = ``jsd_weight`` between 0 and 1, exclusive: towards
    either end it tends to 0, not to a KL.
    """
    if divergence == "reverse_kl":
        return (student.exp() * (student - teacher)).sum(dim=-1)
    if divergence == "forward_kl":
        return (teacher.exp() * (teacher - student)).sum(dim=-1)
    mean = mixture_log_probs(student, teacher, jsd_weight)
    of_student = (student.exp() * (student - mean)).sum(dim=-1)
    of_teacher = (teacher.exp() * (teacher - mean)).sum(dim=-1)
    return (1 - jsd_weight) * of_student + jsd_weight * of_teacher


def mixture_log_probs(
    student: torch.Tensor, teacher: torch.Tensor, jsd_weight: float
) -> torch.Tensor:
    """log((1 - a) p + a q) of log-probs, a = ``jsd_weight``."""
    mixed, other = student + math.log1p(-jsd_weight), teacher + math.log(jsd_weight)
    return torch.logaddexp(mixed, other, out=None if mixed.requires_grad else mixed)


def with_tail(log_probs: torch.Tensor) -> torch.Tensor:
    """(..., K + 1): log-probs (..., K) of different tokens, and that of all other tokens together.

    So a divergence over K tokens is that of a coarser partition of the vocabulary: never negative,
    and never above the one over all tokens. Without the tail it could be lowered by taking
    probability away from the K tokens.
    """
    mass = log_probs.logsumexp(dim=-1, keepdim=True).clamp(max=math.log1p(-_SMALLEST_MASS))
    return torch.cat([log_probs, torch.log(-torch.expm1(mass))], dim=-1)


def sampled_token_divergence(
    student: torch.Tensor, teacher: torch.Tensor, old: torch.Tensor | None = None
) -> torch.Tensor:
    """log p(y) - log q(y) of the tokens y that the student drew, whose mean over draws is
    KL(p || q), with the gradient (log p(y) - log q(y)) d log p(y): its mean is that of KL(p || q).

    ``student``, ``teacher`` and ``old`` are log-probs of one shape. The tokens were drawn with the
    probabilities of ``old``, where it is given, and the gradient is weighted by p / old.
    """
    gap = (student - teacher).detach()
    weight = gap if old is None else gap * (student - old).detach().exp()
    return gap + weight * (student - student.detach())


def capped_divergence(values: torch.Tensor, cap: float | None) -> torch.Tensor:
    """``values`` scaled down to at most ``cap`` in size, gradient included, one by one; unchanged
    without a cap."""
    if cap is None:
        return values
    return values * (cap / values.detach().abs().clamp(min=1e-20)).clamp(max=1.0)

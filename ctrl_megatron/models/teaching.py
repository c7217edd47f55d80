"""The output heads of distillation: what a teacher says about the tokens of responses, and the
student's divergence from it, token by token.

The teacher reads the student's responses behind prompts of its own. What it says are fields of the
batch (``TeacherFields``), so that the teacher may be on other ranks than the student. Only the
estimator ``full`` needs the teacher's output layer too, on the student's ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ctrl_megatron.algorithms.distillation import (
    capped_divergence,
    sampled_token_divergence,
    token_divergence,
    with_tail,
)
from ctrl_megatron.config.algorithm import Distillation
from ctrl_megatron.models.micro_batch import Fields, MicroBatch

if TYPE_CHECKING:
    from ctrl_megatron.models.strategy import Strategy

TeacherFields = dict[str, torch.Tensor]
"""``teacher_entropy``, ``teacher_log_probs`` (B, R) float32: entropy and log-prob of the token that
the student drew. With ``top_k`` also ``teacher_top_ids`` (B, R, K) int64 and
``teacher_top_log_probs`` float32 of the teacher's K likeliest tokens; with ``full``
``teacher_hidden`` (B, R, H), the vectors before its output layer. 0 off the mask."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherHead:
    """A ``models.forward_step.OutputHead`` of the teacher's pass."""

    strategy: Strategy
    keys: Distillation
    temperature: float

    def __call__(
        self, module: Any, micro: MicroBatch, output: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """(entropies, log-probs of the drawn tokens, then K ids and K log-probs, or the hidden
        states)."""
        layer = self.strategy.output_layer(module, micro, output)
        log_probs, entropy = layer.log_probs(micro.targets, self.temperature)
        more: tuple[torch.Tensor, ...] = ()
        if self.keys.estimator == "top_k":
            ids, likeliest = layer.likeliest(self.keys.top_k, self.temperature)
            # Numbers up to 2^24 are exact in float32, and no vocabulary is as large.
            more = (*ids.t().float(), *likeliest.t())
        elif self.keys.estimator == "full":
            more = tuple(layer.hidden.t().float())
        return entropy, log_probs, *more

    def vector_count(self, hidden_size: int) -> int:
        """Vectors that a call returns."""
        sizes = {"token": 0, "top_k": 2 * self.keys.top_k, "full": hidden_size}
        return 2 + sizes[self.keys.estimator]

    def fields(self, vectors: torch.Tensor) -> TeacherFields:
        """The fields of the batch, of the call's vectors (vectors, B, R)."""
        fields = {"teacher_entropy": vectors[0], "teacher_log_probs": vectors[1]}
        rest = vectors[2:].permute(1, 2, 0)
        if self.keys.estimator == "top_k":
            fields["teacher_top_ids"] = rest[..., : self.keys.top_k].long()
            fields["teacher_top_log_probs"] = rest[..., self.keys.top_k :].contiguous()
        elif self.keys.estimator == "full":
            fields["teacher_hidden"] = rest.to(self.strategy.dtype).contiguous()
        return fields


@dataclass(frozen=True, slots=True, kw_only=True)
class StudentHead:
    """A ``models.forward_step.OutputHead`` of the student's update."""

    strategy: Strategy
    keys: Distillation
    temperature: float
    rows: Fields
    """The rows of the mini-batch, with ``TeacherFields``."""
    teacher_weight: torch.Tensor | None
    """This rank's rows of the teacher's output weight; None but for ``full``."""

    def __call__(
        self, module: Any, micro: MicroBatch, output: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """(log-probs of the drawn tokens, entropies, divergences from the teacher)."""
        keys, layer = self.keys, self.strategy.output_layer(module, micro, output)
        if keys.estimator == "top_k":
            ids = self._of_tokens("teacher_top_ids", micro)
            targets = torch.cat([micro.targets.unsqueeze(-1), ids], dim=-1)
            every, entropy = layer.log_probs(targets, self.temperature)
            log_probs, student = every[:, 0], with_tail(every[:, 1:])
            teacher = with_tail(self._of_tokens("teacher_top_log_probs", micro))
            divergence = token_divergence(
                student, teacher, keys.divergence, jsd_weight=keys.jsd_weight
            )
        else:
            log_probs, entropy = layer.log_probs(micro.targets, self.temperature)
            divergence = (
                self._sampled(log_probs, micro)
                if keys.estimator == "token"
                else layer.divergence_from(
                    replace(
                        layer,
                        hidden=self._of_tokens("teacher_hidden", micro).to(layer.hidden.dtype),
                        weight=self.teacher_weight,
                    ),
                    keys.divergence,
                    self.temperature,
                    jsd_weight=keys.jsd_weight,
                )
            )
        return log_probs, entropy, capped_divergence(divergence, keys.cap)

    def _sampled(self, log_probs: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
        teacher = self._of_tokens("teacher_log_probs", micro)
        old = self._of_tokens("old_log_probs", micro) if "old_log_probs" in self.rows else None
        return sampled_token_divergence(log_probs, teacher, old)

    def _of_tokens(self, name: str, micro: MicroBatch) -> torch.Tensor:
        """(N, ...): a field of the rows, of the micro-batch's response tokens."""
        places = micro.rows[micro.row_of.cpu()], micro.column_of.cpu()
        return self.rows[name][places].to(micro.targets.device)

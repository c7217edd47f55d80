"""The language model of actor and reference: log-probs, entropies, a step on a policy loss."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from ctrl_megatron.config.algorithm import Distillation
from ctrl_megatron.models.loss_scale import GlobalCounts
from ctrl_megatron.models.micro_batch import Fields, MicroBatch
from ctrl_megatron.models.parallel_model import OffloadPart, ParallelModel
from ctrl_megatron.models.teaching import TeacherFields, TeacherHead


class LossFn(Protocol):
    """The loss of ``ParallelModel.step``, called once per micro-batch on the last pipeline stage.

    ``log_probs`` and ``entropy`` are (b, R) float32 with gradients; ``rows`` has the other fields
    of the same b rows. Returns this piece's share of the loss (already divided by the global
    ``counts``) and of named scalars; shares are added over micro-batches and data-parallel ranks.
    """

    def __call__(
        self,
        log_probs: torch.Tensor,
        entropy: torch.Tensor,
        rows: dict[str, torch.Tensor],
        counts: GlobalCounts,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]: ...


@dataclass(frozen=True, slots=True)
class BasePolicy:
    """The frozen policy that the adapters of ``policy`` change, in the same memory."""

    policy: Policy

    def log_probs(
        self, rows: Fields, temperature: float = 1.0, *, token_budget: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``Policy.log_probs``."""
        with self.policy.without_adapters():
            return self.policy.log_probs(rows, temperature, token_budget=token_budget)

    def teacher_pass(
        self,
        rows: Fields,
        keys: Distillation,
        temperature: float = 1.0,
        *,
        token_budget: int | None = None,
    ) -> TeacherFields:
        """As ``Policy.teacher_pass``."""
        with self.policy.without_adapters():
            return self.policy.teacher_pass(rows, keys, temperature, token_budget=token_budget)

    def output_weight(self) -> torch.Tensor | None:
        """As ``Policy.output_weight``: adapters leave the output layer as it is."""
        return self.policy.output_weight()

    def offload(self, *parts: OffloadPart) -> None:
        """Nothing: ``policy`` leaves the device by itself."""

    def take_flops(self) -> tuple[int, int]:
        """As ``ParallelModel.take_flops``: ``policy`` counts the passes of both."""
        return 0, 0


class Policy(ParallelModel):
    """A language model, trained or frozen."""

    def log_probs(
        self, rows: Fields, temperature: float = 1.0, *, token_budget: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs of the response tokens and entropies: (B, R) float32, host, 0 off the mask.

        A masked-diffusion model returns coupled scores in the place of log-probs
        (``algorithms.coupled``); ``rows`` then have masks (``models.masked_versions``). Every rank
        of the model copy calls this with the same rows and gets the same result.
        ``token_budget`` bounds the tokens of one micro-batch, which may be more than in training
        because nothing is kept for a backward pass; None takes the model's own.
        """
        head = partial(self._head, temperature=temperature)
        log_probs, entropy = self.infer(rows, head, 2, token_budget)
        return log_probs, entropy

    def log_probs_and_routes(
        self, rows: Fields, temperature: float, token_budget: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``log_probs``, and the experts that the routers chose for every token: (B, P+R, layers
        with experts, top_k) int16 on the host, -1 for padding. Collective."""
        head = partial(self._head, temperature=temperature)
        (log_probs, entropy), routes = self.record_routes(rows, head, 2, token_budget)
        return log_probs, entropy, routes

    def teacher_pass(
        self,
        rows: Fields,
        keys: Distillation,
        temperature: float = 1.0,
        *,
        token_budget: int | None = None,
    ) -> TeacherFields:
        """What this policy, as a teacher, says about the response tokens of ``rows``, on the host;
        otherwise as ``log_probs``."""
        head = TeacherHead(strategy=self.strategy, keys=keys, temperature=temperature)
        count = head.vector_count(self.shape.hidden_size)
        return head.fields(self.infer(rows, head, count, token_budget))

    def output_weight(self) -> torch.Tensor | None:
        """A copy of this rank's rows of the output layer's weight; None on ranks without the last
        stage. Collective."""
        self.onload("weights")
        return self.strategy.output_weight()

    def _head(
        self, module: Any, micro: MicroBatch, output: torch.Tensor, *, temperature: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A ``models.forward_step.OutputHead``: (log-probs of the response tokens, entropies).

        Where a masked-diffusion model predicts a token several times, the sums over its places are
        its score and its mean entropy.
        """
        layer = self.strategy.output_layer(module, micro, output)
        log_probs, entropy = layer.log_probs(micro.targets, temperature)
        return log_probs * micro.weights, entropy / micro.occurrences

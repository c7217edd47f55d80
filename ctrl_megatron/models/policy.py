"""The language model of actor and reference: log-probs, entropies, a step on a policy loss."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

from ctrl_megatron.models.build import output_weight
from ctrl_megatron.models.loss_scale import GlobalCounts
from ctrl_megatron.models.micro_batch import Fields, MicroBatch
from ctrl_megatron.models.parallel_model import Head, ParallelModel, Scalars
from ctrl_megatron.parallel.vocab import linear_log_probs


class LossFn(Protocol):
    """What ``Policy.step`` minimises; called once per micro-batch on the last pipeline stage.

    ``log_probs`` and ``entropy`` are (b, R) float32 with gradients; ``rows`` holds the other fields
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


class Policy(ParallelModel):
    """A language model, trained or frozen."""

    def log_probs(
        self, batch: Fields, temperature: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs of the response tokens and entropies: (B, R) float32, host, 0 off the mask.

        Every rank of the model copy calls this with the same batch and gets the same result.
        """
        log_probs, entropy = self.infer(batch, self._head_at(temperature), 2)
        return log_probs, entropy

    def step(self, batch: Fields, loss_fn: LossFn, temperature: float = 1.0) -> dict[str, float]:
        """One optimizer step on the global mini-batch whose local rows are ``batch``.

        Returns and raises as ``ParallelModel.optimise``.
        """

        def objective(
            vectors: tuple[torch.Tensor, ...], rows: dict[str, torch.Tensor], counts: GlobalCounts
        ) -> tuple[torch.Tensor, Scalars]:
            log_probs, entropy = vectors
            return loss_fn(log_probs, entropy, rows, counts)

        return self.optimise(batch, self._head_at(temperature), objective)

    def _head_at(self, temperature: float) -> Head:
        return partial(self._head, temperature=temperature)

    def _head(
        self, model: Any, micro: MicroBatch, hidden: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = hidden.transpose(0, 1)
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden)
        return linear_log_probs(
            hidden.squeeze(1)[micro.predictors],
            output_weight(model),
            micro.targets,
            vocab_size=self.shape.vocab_size,
            temperature=temperature,
            chunk=self.options.logprob_chunk,
            tensor_rank=self.groups.place.tp,
            tensor_size=self.groups.layout.tensor,
            group=self.groups.tensor,
        )

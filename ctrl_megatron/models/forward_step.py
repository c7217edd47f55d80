"""From a micro-batch to its loss: what Megatron's schedule calls, read from top to bottom.

Megatron lets the last stage return its output and a function that makes a loss of it. Here the
stage makes the loss at once, and the function (``ReportLoss``) only hands it over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from megatron.core.distributed import DistributedDataParallel

from ctrl_megatron.models.loss_scale import GlobalCounts
from ctrl_megatron.models.micro_batch import Fields, MicroBatch

Scalars = dict[str, torch.Tensor]


class Head(Protocol):
    """Reads the last stage's output where it predicts a response token."""

    def __call__(
        self, module: Any, micro: MicroBatch, output: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Some (N,) float32 vectors over the micro-batch's N response tokens, differentiable.

        ``module`` is the last stage's GPTModel, ``output`` what its forward pass has returned.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainStep:
    """Megatron's ``forward_step_func`` of an optimizer step: stage, head, loss.

    ``loss`` is called with the head's vectors as (b, R) matrices, the other fields of these b rows
    and ``counts``; see ``models.policy.LossFn`` and ``models.value.ValueLossFn``.
    """

    head: Head
    loss: Callable[..., tuple[torch.Tensor, Scalars]]
    rows: Fields
    """This rank's rows of the global mini-batch."""
    counts: GlobalCounts

    def __call__(self, micro_batches: Iterator[MicroBatch], model: Any) -> tuple[torch.Tensor, Any]:
        micro = next(micro_batches)
        module, output = run_stage(model, micro)
        if not module.post_process:
            return output, None  # goes to the next stage
        vectors = self.head(module, micro, output)
        if len(micro.rows):
            rows = {
                name: value[micro.rows].to(output.device)
                for name, value in self.rows.items()
                if isinstance(value, torch.Tensor)
            }
            loss, scalars = self.loss(*map(micro.to_rows, vectors), rows, self.counts)
            scalars = {"loss": loss.detach(), **scalars}
        else:
            loss, scalars = vectors[0].sum(), {}
        # Keeps every parameter in the graph of a micro-batch without rows.
        return loss + 0.0 * output.sum(), ReportLoss(scalars)


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceStep:
    """Megatron's ``forward_step_func`` of a pass without gradients: stage, head, result."""

    head: Head
    results: torch.Tensor
    """(vectors of the head, B, R) float32, filled on the last stage."""

    def __call__(self, micro_batches: Iterator[MicroBatch], model: Any) -> tuple[torch.Tensor, Any]:
        micro = next(micro_batches)
        module, output = run_stage(model, micro)
        if not module.post_process:
            return output, None
        vectors = self.head(module, micro, output)
        rows = micro.rows.to(self.results.device)
        self.results[:, rows] = torch.stack([micro.to_rows(vector) for vector in vectors])
        return vectors[0].sum(), ReportLoss({})


@dataclass(frozen=True, slots=True)
class ReportLoss:
    """Megatron's ``loss_func``: gets the loss back and says what the schedule shall return."""

    scalars: Scalars

    def __call__(self, loss: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Scalars]:
        # The token count is not used: the loss is normalised already (models.loss_scale).
        return loss, torch.tensor(1, dtype=torch.int), self.scalars


def run_stage(model: Any, micro: MicroBatch) -> tuple[Any, torch.Tensor]:
    """(this stage's GPTModel, its output for the micro-batch)."""
    output = model(
        input_ids=micro.tokens,
        position_ids=micro.positions,
        attention_mask=None,
        packed_seq_params=micro.packed,
    )
    return (model.module if isinstance(model, DistributedDataParallel) else model), output

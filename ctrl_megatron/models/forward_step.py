"""From a micro-batch to its loss: the functions that Megatron's schedule calls, in their order.

Megatron expects the last stage to return its output and a function that computes the loss from it.
Here the stage computes the loss itself, and the function (``precomputed_loss_func``) only returns
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel.mappings import scatter_to_sequence_parallel_region

from ctrl_megatron.models.context_parallel import sum_over_context_ranks
from ctrl_megatron.models.loss_scale import GlobalCounts
from ctrl_megatron.models.micro_batch import Fields, MicroBatch

Scalars = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossShare:
    """A micro-batch's share of the loss."""

    rows: torch.Tensor
    """(b,) int64: the indices of its rows."""
    scalars: Scalars
    """``loss`` and the scalars of the loss function; empty without rows."""


class OutputHead(Protocol):
    """Computes vectors from the last stage's output where it predicts a response token."""

    def __call__(
        self, module: Any, micro: MicroBatch, output: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Some (N,) float32 vectors over the micro-batch's N response tokens, differentiable.

        ``module`` is the last stage, ``output`` the result of its forward pass.
        """
        ...


def forward_with_loss(
    micro_batches: Iterator[MicroBatch],
    model: Any,
    *,
    head: OutputHead,
    loss: Callable[..., tuple[torch.Tensor, Scalars]],
    rows: Fields,
    counts: GlobalCounts,
    results: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Any]:
    """Megatron's ``forward_step_func`` of an optimizer step: stage, head, loss.

    ``rows`` are this rank's rows of the global mini-batch. ``loss`` is called with the head's
    vectors as (b, R) matrices, the other fields of these b rows and ``counts``; see
    ``models.policy.LossFn`` and ``models.value.ValueLossFn``. ``results`` is filled with the head's
    vectors as in ``forward_only``.
    """
    micro = next(micro_batches)
    module, output = run_stage(model, micro)
    if not module.post_process:
        return output, None  # goes to the next stage
    vectors = head(module, micro, output)
    if results is not None:
        _keep(vectors, micro, results)
    if len(micro.rows):
        fields = {name: value[micro.rows].to(output.device) for name, value in rows.items()}
        share, scalars = loss(*_as_rows(vectors, micro), fields, counts)
        scalars = {"loss": share.detach(), **scalars}
    else:
        share, scalars = vectors[0].sum(), {}
    # Keeps every parameter in the graph, also for a micro-batch without rows and for a constant
    # loss: the sum of gradients over data-parallel ranks waits for each parameter.
    return share + 0.0 * (output.sum() + vectors[0].sum()), partial(
        precomputed_loss_func, LossShare(rows=micro.rows, scalars=scalars)
    )


def forward_only(
    micro_batches: Iterator[MicroBatch], model: Any, *, head: OutputHead, results: torch.Tensor
) -> tuple[torch.Tensor, Any]:
    """Megatron's ``forward_step_func`` of a pass without gradients: stage, head, result.

    ``results`` (vectors of the head, B, R) float32 is filled on the last stage.
    """
    micro = next(micro_batches)
    module, output = run_stage(model, micro)
    if not module.post_process:
        return output, None
    vectors = head(module, micro, output)
    _keep(vectors, micro, results)
    return vectors[0].sum(), partial(precomputed_loss_func, LossShare(rows=micro.rows, scalars={}))


def _as_rows(vectors: tuple[torch.Tensor, ...], micro: MicroBatch) -> torch.Tensor:
    """(vectors, b, R): the (N,) vectors of all context ranks."""
    return sum_over_context_ranks(torch.stack([*map(micro.to_rows, vectors)]), micro.packed)


@torch.no_grad()
def _keep(vectors: tuple[torch.Tensor, ...], micro: MicroBatch, results: torch.Tensor) -> None:
    results[:, micro.rows.to(results.device)] = _as_rows(vectors, micro)


def precomputed_loss_func(
    share: LossShare, loss: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, LossShare]:
    """Megatron's ``loss_func``: (``loss`` (), 1 in the place of a number of tokens, ``share``): the
    schedule returns the last."""
    # The token count is not used: the loss is normalised already (models.loss_scale).
    return loss, torch.tensor(1, dtype=torch.int), share


def run_stage(model: Any, micro: MicroBatch) -> tuple[Any, torch.Tensor]:
    """(this stage, its output for the micro-batch)."""
    module: Any = model.module if isinstance(model, DistributedDataParallel) else model
    padding = micro.padding if micro.keys is None else micro.keys
    if not module.pre_process and module.config.sequence_parallel:
        # Megatron does this in the first stage only.
        group = module.pg_collection.tp
        padding = scatter_to_sequence_parallel_region(padding.T, group=group).T
    output = model(
        input_ids=micro.tokens,
        position_ids=micro.positions,
        attention_mask=None,
        packed_seq_params=micro.packed,
        padding_mask=padding,
    )
    return module, output

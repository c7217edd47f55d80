"""A decoder split over ranks: packed passes, optimizer steps, shards.

Subclasses (``models.policy``, ``models.value``) define what is computed from the last stage's
output, their callers the loss; ``models.forward_step`` combines both for one micro-batch.
``models.strategy`` says what splits and computes the layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist

from ctrl_megatron.models.adapters import adapters_disabled
from ctrl_megatron.models.flops import model_flops
from ctrl_megatron.models.forward_step import (
    LossShare,
    OutputHead,
    Scalars,
    forward_only,
    forward_with_loss,
)
from ctrl_megatron.models.layer_spec import fuses_norms
from ctrl_megatron.models.lora import LoraBaseWeights
from ctrl_megatron.models.loss_scale import global_counts
from ctrl_megatron.models.masked_versions import split_into_masked_versions
from ctrl_megatron.models.megatron import MegatronStrategy
from ctrl_megatron.models.micro_batch import (
    EXPERT_ROUTES,
    Fields,
    MicroBatch,
    split_into_micro_batches,
)
from ctrl_megatron.models.offload import OffloadedTensors, storages_of
from ctrl_megatron.models.router import Routers, replay_rates
from ctrl_megatron.models.shape import AnyShape, TransformersShape, context_of
from ctrl_megatron.models.shards import ShardParam, shard_params
from ctrl_megatron.models.strategy import ModelOptions, Optimizer, Strategy
from ctrl_megatron.parallel.groups import ProcessGroups, set_megatron_globals

OffloadPart = Literal["weights", "gradients", "optimizer"]
"""A part of a model that can leave the device: parameters; gradient buffers, which come back as
zeros; master weights and moments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedUpdate:
    """An optimizer step that was not made, because the loss or the gradient is not finite."""

    reason: str
    rows: tuple[int, ...]
    """This data rank's rows (their ``place``, or else their indices) in micro-batches whose loss is
    not finite; none where only the gradient is not."""
    learning_rate: str
    """``KEY=VALUE``."""


class ParallelModel:
    """A decoder of which this rank has a part.

    Weights are uninitialised until ``checkpoint.hf.load_hf`` or a checkpoint fills them.
    """

    load_metrics = "moe"
    """Prefix of the metrics of experts' loads."""

    def __init__(
        self,
        shape: AnyShape,
        groups: ProcessGroups,
        options: ModelOptions,
        take_device: Callable[[], None] = lambda: None,
    ) -> None:
        """``take_device`` is called before anything of the model is used or comes back to the
        device; it makes whatever shares the device leave."""
        self.shape: AnyShape = shape
        self.groups, self.options = groups, options
        self._take_device = take_device
        set_megatron_globals(groups.megatron)
        self.strategy = _strategy(shape, groups, options)
        self._routers = Routers(self.models, shape)
        self.strategy.make_trainable_or_frozen(self.shards_without_onload())
        self.base: LoraBaseWeights | None = None
        """The frozen weights beside which adapters are trained, once they are loaded."""
        self.optimization: Optimizer | None = None
        self._flops = (0, 0)
        self._skipped: list[SkippedUpdate] = []
        self._parts: dict[OffloadPart, OffloadedTensors] = {
            "weights": OffloadedTensors(self.strategy.weights, keep=True),
            "gradients": OffloadedTensors(self.strategy.gradient_buffers, keep=False),
            "optimizer": OffloadedTensors(self._optimizer_state, keep=True),
        }

    @property
    def models(self) -> Sequence[torch.nn.Module]:
        return self.strategy.models

    def start_optimizer(self) -> None:
        """Build the optimizer from the weights as they are now (it copies them in float32)."""
        if self.options.optimizer is None:
            raise ValueError("this model is frozen; give ModelOptions.optimizer to train it")
        if self.options.optimizer.on_host:
            self.offload("gradients")  # the master weights are made on the device
        self.optimization = self.strategy.start_optimizer()

    @property
    def update_count(self) -> int:
        """Optimizer steps that have changed the weights, those before a resume included."""
        return 0 if self.optimization is None else self.optimization.update_count

    @property
    def offloaded_parts(self) -> frozenset[OffloadPart]:
        """The parts whose memory is not on the device."""
        return frozenset(part for part, tensors in self._parts.items() if tensors.is_offloaded)

    def offload(self, *parts: OffloadPart) -> None:
        """Take the memory of ``parts`` off the device: passes, steps and checkpoints bring back
        what they need. Gradients are forgotten."""
        if self.optimization is not None and "gradients" in parts:
            self.optimization.forget_gradients()
        for part in parts:
            self._parts[part].offload()

    def onload(self, *parts: OffloadPart) -> None:
        """Take the device and bring those of ``parts`` back to it that are away; no other part."""
        self._take_device()
        # Another policy's model, which computes in turn, may have another layout.
        set_megatron_globals(self.groups.megatron)
        for part in parts:
            self._parts[part].onload()

    def _optimizer_state(self) -> Iterator[torch.Tensor]:
        """Optimizer state without the weights: a float32 model has no master copy of them."""
        if self.optimization is None or self.optimization.offloaded_state:
            return
        device, weights = self.groups.device.type, storages_of(self.strategy.weights())
        for tensor in self.optimization.state_tensors():
            shared = tensor.untyped_storage()._cdata in weights
            if tensor.device.type == device and not shared:
                yield tensor

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """In the block the model computes without its adapters, as its directory's weights do."""
        shape, self.shape = self.shape, self.shape.without_adapters
        with adapters_disabled(self.models):
            try:
                yield
            finally:
                self.shape = shape

    def current_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``, a weight or optimizer state; if it is away, the same view of its copy in host
        memory."""
        on_host = () if self.optimization is None else self.optimization.offloaded_state
        views = (part.host_view(tensor) for part in (*self._parts.values(), *on_host))
        return next((view for view in views if view is not None), tensor)

    def shards(self) -> Iterator[tuple[ShardParam, torch.Tensor]]:
        """This rank's parameters, and its buffers that have a rule, on the device, with their
        places in the HF tensors."""
        self.onload("weights")
        yield from self.shards_without_onload()

    def shards_without_onload(self) -> Iterator[tuple[ShardParam, torch.Tensor]]:
        """``shards``, wherever the weights' memory is."""
        for chunk in range(len(self.models)):
            for param in shard_params(
                self.shape,
                self.groups.layout,
                self.groups.place,
                chunk=chunk,
                te_names=fuses_norms(self.shape),
            ):
                yield param, self.strategy.rank_part(chunk, param)

    @torch.no_grad()
    def interpolate_towards(self, other: ParallelModel, share: float) -> None:
        """Move all weights the ``share`` of the way to those of ``other``, a model of the same
        shape on the same ranks, or onto them if it is 1. This model must be frozen: an optimizer
        has a copy of its weights."""
        if self.optimization is not None or self.shape != other.shape:
            raise ValueError("only a frozen model approaches, and only one of its own shape")
        # Both are on the device before the first weight is read.
        other.onload("weights")
        for (_, own), (_, theirs) in zip(self.shards(), other.shards_without_onload(), strict=True):
            if share == 1:
                own.copy_(theirs)
            else:
                own.lerp_(theirs, share)

    def engine_part(self, chunk: int, param: str) -> torch.Tensor:
        """This rank's part of what engines get for a parameter or buffer of its virtual stage
        ``chunk``: adapters are merged."""
        return self.strategy.engine_part(chunk, param)

    @torch.no_grad()
    def infer(
        self, rows: Fields, head: OutputHead, vectors: int, token_budget: int | None = None
    ) -> torch.Tensor:
        """The head's vectors as (vectors, B, R) float32 on the host, 0 off the mask.

        Every rank of the model copy calls this with the same rows and gets the same result.
        """
        results, _ = self._infer(rows, head, vectors, token_budget)
        self._routers.end_replay()
        return self.broadcast_results(results)

    def _infer(
        self,
        rows: Fields,
        head: OutputHead,
        vectors: int,
        token_budget: int | None,
        *,
        records: bool = False,
    ) -> tuple[torch.Tensor, list[MicroBatch]]:
        """(``allocate_results`` after the passes, their micro-batches)."""
        self.onload("weights")
        results = self.allocate_results(rows, vectors)
        micro_batches = self._micro_batches(
            rows, token_budget or self.options.token_budget, backward=False, records=records
        )
        passes = partial(forward_only, head=head, results=results)
        self.strategy.run_passes(passes, micro_batches, backward=False)
        return results, micro_batches

    def record_routes(
        self, rows: Fields, head: OutputHead, vectors: int, token_budget: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``infer``, and the experts that the routers chose (``EXPERT_ROUTES``) on the host."""
        shape = *rows["input_ids"].shape, *self.shape.expert_choices
        empty = torch.full(shape, -1, dtype=torch.int16)
        rows = {**rows, EXPERT_ROUTES: empty}
        results, micro_batches = self._infer(rows, head, vectors, token_budget, records=True)
        table = self._routers.end_replay()
        assert table is not None
        # Every stage knows its own layers, every tensor and context rank its own tokens.
        ids = table.ids.int().cpu()
        dist.all_reduce(ids, op=dist.ReduceOp.MAX, group=self.groups.host_model)
        for micro in micro_batches:
            assert micro.key_of is not None
            for row, keys in zip(micro.rows.tolist(), micro.key_of, strict=True):
                known = keys >= 0
                empty[row, known] = ids[keys[known]].to(torch.int16)
        return self.broadcast_results(results), empty

    def broadcast_results(self, results: torch.Tensor) -> torch.Tensor:
        """``allocate_results`` after a pass, on the host of every rank of the model copy.
        Collective."""
        return self.groups.broadcast_from_last_stage(results).cpu()

    def allocate_results(self, rows: Fields, vectors: int) -> torch.Tensor:
        """(vectors, B, R) float32 zeros on the device, for the vectors of a pass over ``rows``."""
        shape = (vectors, *rows["response_mask"].shape)
        return torch.zeros(shape, dtype=torch.float32, device=self.groups.device)

    def _head(
        self, module: Any, micro: MicroBatch, output: torch.Tensor, *, temperature: float = 1.0
    ) -> tuple[torch.Tensor, ...]:
        raise NotImplementedError

    def step(
        self,
        rows: Fields,
        loss: Callable[..., tuple[torch.Tensor, Scalars]],
        temperature: float = 1.0,
        *,
        head: OutputHead | None = None,
        results: torch.Tensor | None = None,
    ) -> dict[str, float]:
        """One optimizer step on the global mini-batch whose local rows are ``rows``; ``loss`` is a
        ``models.policy.LossFn``, or of a value model a ``models.value.ValueLossFn``.

        Rows count for the loss where ``loss_mask`` (B, R) is on, by default ``response_mask``.
        ``head`` takes the place of the model's own; ``loss`` gets its vectors.
        ``results`` (``allocate_results``) is filled with the head's vectors on the last stage.
        Returns the loss function's scalars (global) and ``loss``, ``grad_norm`` (before clipping),
        ``lr``, and the loads of experts (``models.router.Routers.metrics``). If the loss or the
        gradient is not finite, on any rank, the step is skipped on all: weights, optimizer and
        schedule stay as they were, the result is empty, and ``take_skipped_updates`` says why.
        Raises UserError on updated weights that are not finite.
        """
        if self.optimization is None:
            raise RuntimeError("call start_optimizer() after the weights are loaded")
        self.onload("weights", "gradients", "optimizer")
        counts = global_counts(rows.get("loss_mask", rows["response_mask"]), self.groups)
        self.strategy.zero_gradients()
        self.optimization.forget_gradients()
        shares = self.strategy.run_passes(
            partial(
                forward_with_loss,
                head=head or partial(self._head, temperature=temperature),
                loss=loss,
                rows={name: value for name, value in rows.items() if name != EXPERT_ROUTES},
                counts=counts,
                results=results,
            ),
            self._micro_batches(rows, self.options.token_budget, backward=True),
            backward=True,
        )
        loads = self._routers.metrics(self.groups)
        loads |= replay_rates(self._routers.end_replay(), self.groups)
        scalars, norm = self._sum(shares), self.optimization.grad_norm()
        fine = math.isfinite(norm) and math.isfinite(scalars.get("loss", 0.0))
        # All ranks skip or none does: otherwise the copies of the weights would differ.
        if self.groups.any_rank(not fine)[0]:
            self._skip(shares, scalars.get("loss", math.nan), norm, rows.get("place"))
            return {}
        stepped = self.optimization.step(norm)
        self._routers.update_expert_biases()
        return {
            **scalars,
            **stepped,
            **{f"{self.load_metrics}/{name}": value for name, value in loads.items()},
        }

    def take_skipped_updates(self) -> list[SkippedUpdate]:
        """The optimizer steps that were skipped since the last call, in their order."""
        taken, self._skipped = self._skipped, []
        return taken

    def _skip(
        self, shares: list[LossShare], loss: float, norm: float, place: torch.Tensor | None
    ) -> None:
        """Collective."""
        assert self.optimization is not None
        bad = [s.rows for s in shares if not all(v.isfinite().all() for v in _loss_of(s))]
        mine = sorted(int(row if place is None else place[row]) for rows in bad for row in rows)
        # Only the last stage has the losses.
        parts = self.groups.all_gather((self.groups.place.dp, mine))
        rows = {row for dp, found in parts if dp == self.groups.place.dp for row in found}
        self._skipped.append(
            SkippedUpdate(
                reason=f"the loss is {loss:g} and the norm of the gradient {norm:g} in update "
                f"{self.update_count + 1}",
                rows=tuple(sorted(rows)),
                learning_rate=self.optimization.learning_rate_setting,
            )
        )

    def take_flops(self) -> tuple[int, int]:
        """Floating-point operations of this model copy since the last call: (in passes without
        gradients, in updates), as counted by ``models.flops`` over the packed rows."""
        taken, self._flops = self._flops, (0, 0)
        return taken

    def _count(self, micro_batches: list[MicroBatch], *, backward: bool) -> None:
        layouts, shape = [micro.packed.layout for micro in micro_batches], self.shape
        # Only response tokens are multiplied with the vocabulary.
        responses = 0 if shape.value_head else sum(micro.num_predicted for micro in micro_batches)
        flops = model_flops(
            shape,
            tokens=sum(layout.num_tokens for layout in layouts),
            pairs=sum(layout.attended_pairs for layout in layouts),
            projected_tokens=responses,
            backward=backward,
        )
        passes, updates = self._flops
        self._flops = (passes, updates + flops) if backward else (passes + flops, updates)

    def _micro_batches(
        self, rows: Fields, token_budget: int, *, backward: bool, records: bool = False
    ) -> list[MicroBatch]:
        """The micro-batches of a pass. Collective. ValueError for a row beyond the model's context,
        where ropes of transformers depend on the other rows."""
        context, limit = context_of(self.shape)
        for row, length in enumerate(rows["attention_mask"].sum(1).tolist()):
            if length > context:
                raise ValueError(
                    f"row {row} has {length} tokens, and the model a context of {limit}={context}"
                )
        layout, diffusion = self.groups.layout, self.shape.diffusion
        if diffusion is None:
            split = partial(
                split_into_micro_batches,
                shared_prefix=self.options.shared_prefix,
                apart=not self.strategy.packs_rows,
            )
        else:
            split = partial(
                split_into_masked_versions, diffusion=diffusion, canvas=self.options.canvas
            )
        micro_batches = split(
            rows,
            token_budget=token_budget,
            multiple=layout.token_multiple,
            # Ranks without rows take part in the sums over ranks with a micro-batch without rows.
            count=lambda own: self.strategy.padded_micro_batch_count(max(own, 1)),
            device=self.groups.device,
            context=self.groups.context_group,
        )
        self._count(micro_batches, backward=backward)
        if backward:
            tokens = sum(micro.num_tokens for micro in micro_batches)
            self._routers.begin_mini_batch(self.options.router, tokens, self.groups)
        if EXPERT_ROUTES in rows:
            device = self.groups.device
            micro_batches = self._routers.begin_replay(micro_batches, device, records=records)
        return micro_batches

    def _sum(self, shares: list[LossShare]) -> dict[str, float]:
        """The sum over micro-batches and data-parallel ranks, on every stage."""
        totals: dict[str, float] | None = None
        if self.groups.is_last_stage:
            mine: dict[str, float] = {}
            for share in shares:
                _add(mine, share.scalars)
            totals = {}
            # A rank without rows does not know the names of the loss function's scalars.
            for of_rank in self.groups.gather_data_ranks(mine):
                _add(totals, of_rank)
        if self.groups.layout.pipeline == 1:
            return totals or {}
        box = [totals]
        layout, place = self.groups.layout, self.groups.place
        copy = layout.ranks_at("dense", (("dp", place.dp),))
        source = copy.index(layout.rank(tp=0, pp=layout.pipeline - 1, dp=place.dp))
        dist.broadcast_object_list(box, group_src=source, group=self.groups.host_model)
        return box[0] or {}


def _add(totals: dict[str, float], values: Mapping[str, Any]) -> None:
    for name, value in sorted(values.items()):
        totals[name] = totals.get(name, 0.0) + float(value)


def _strategy(shape: AnyShape, groups: ProcessGroups, options: ModelOptions) -> Strategy:
    if isinstance(shape, TransformersShape):
        # Most runs do not need transformers' models.
        from ctrl_megatron.models.fsdp import FsdpStrategy

        return FsdpStrategy(shape, groups, options)
    return MegatronStrategy(shape, groups, options)


def _loss_of(share: LossShare) -> list[torch.Tensor]:
    return [share.scalars["loss"]] if share.scalars else []

"""Adapters of Megatron's linear layers (LoRA, arXiv 2106.09685) under tensor and sequence
parallelism.

A linear layer of Megatron's holds one or several projections of the Hugging Face model (queries,
keys and values; gate and up). Its adapter has an A and a B for each of them that is adapted, as
``models.rules`` lists them, so that they are PEFT's own matrices.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)

from ctrl_megatron.errors import UserError
from ctrl_megatron.models.linear_adapters import LinearAdapter
from ctrl_megatron.models.rules import adapted_module, adapter_name
from ctrl_megatron.models.shards import ShardParam
from ctrl_megatron.types import Lora

_GROUPED_RANK = 8
"""What the rank is a multiple of: grouped products on a GPU read rows of whole 16 bytes."""
_EXPERT = re.compile(r"(\.local_experts)\.\d+\.")
Product = Callable[[torch.Tensor, Sequence[torch.Tensor]], torch.Tensor]
"""(tokens, the matrix of each adapter) -> every token times the transpose of its own matrix."""


def _product(tokens: torch.Tensor, matrices: Sequence[torch.Tensor]) -> torch.Tensor:
    return F.linear(tokens, *matrices)


class _SumGradients(torch.autograd.Function):
    """The identity, whose gradient is summed over the ranks of a group. Megatron's function sums it
    in place, and here others read the same gradient."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        total = grads[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


@dataclass(frozen=True, slots=True)
class _Rows:
    """Consecutive rows of a linear layer's output that belong to one projection."""

    rows: int
    number: int | None
    """Which of the adapter's projections it is; None if that one is not adapted."""


class Adapter(torch.nn.Module):
    """The addition to a linear layer's output: scale B A x for each adapted projection.

    Under tensor parallelism B is cut as the output of a column-parallel layer, whose A every rank
    has, and A as the input of a row-parallel one, whose B every rank has. Ranks exchange only
    products with A, ``rank`` numbers per token and projection. A layer that every rank has whole
    has a whole adapter. The tensor ranks of an expert have the same tokens, and what they compute
    is added up behind it.
    """

    def __init__(
        self,
        lora: Lora,
        weight: ShardParam,
        down: ShardParam,
        up: ShardParam,
        like: torch.Tensor,
        *,
        sequence_parallel: bool,
        group: Any,
        first: Adapter | None = None,
    ) -> None:
        """``weight`` is the linear layer's own parameter, ``like`` its tensor; ``group`` are the
        tensor ranks of the layer. ``first`` is the adapter of the rank's first expert, for the
        others: it has the matrices that experts share."""
        super().__init__()
        self._of_expert = weight.mesh == "expert"
        self._shares_down, self._shares_up = (
            self._of_expert and place.mesh == "dense" for place in (down, up)
        )
        self.down, self.up = (
            getattr(first, leaf)
            if shares and first is not None
            else torch.nn.Parameter(like.new_empty(place.shape))
            for leaf, place, shares in (
                ("down", down, self._shares_down),
                ("up", up, self._shares_up),
            )
        )
        self.on = True
        self._lora, self._group = lora, group
        self._cuts_input, self._cuts_output = bool(down.cuts), bool(up.cuts)
        self._sequence_parallel = sequence_parallel
        for param, place in ((self.down, down), (self.up, up)):
            # Each rank multiplies a matrix that it has whole with other tokens; the mark makes
            # Megatron sum its gradient over the tensor ranks, for one that experts share as well.
            whole = place.mesh == "dense" and not place.cuts
            param.sequence_parallel = sequence_parallel and whole  # type: ignore[attr-defined]
        matrix, places = ("B", up) if self._shares_down else ("A", down)
        numbers = {hf: n for n, hf in enumerate(dict.fromkeys(p.hf for p in places.pieces))}
        # A tensor in sections has neighbouring pieces.
        runs = [
            (hf, sum(piece.extent[-2] for piece in run))
            for hf, run in groupby(weight.pieces, key=attrgetter("hf"))
        ]
        names = dict(runs)
        self._blocks = len(runs) // len(names)
        self._parts = tuple(
            _Rows(rows, numbers.get(adapter_name(hf, matrix))) for hf, rows in runs[: len(names)]
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(T, 1, in) -> (T, 1, out), of the same ranks' tokens and columns as the layer's own input
        and output; without the dimension of one for experts."""
        return self.addition(hidden, [self], _product)

    def addition(
        self, hidden: torch.Tensor, adapters: Sequence[Adapter], product: Product
    ) -> torch.Tensor:
        """(T, ..., in) -> (T, ..., out): what the same layer of several experts, which have
        ``adapters``, get added; ``product`` multiplies each expert's tokens with its own matrix."""
        short = self._exchanged(hidden, product, [adapter.down for adapter in adapters])
        shorts = (short * self._lora.scale).split(self._lora.rank, dim=-1)
        ups = [adapter._ups() for adapter in adapters]
        lead = short.shape[:-1]
        parts = [
            short.new_zeros((*lead, self._blocks, part.rows))
            if part.number is None
            else product(shorts[part.number], [own[part.number] for own in ups]).view(
                *lead, self._blocks, part.rows
            )
            for part in self._parts
        ]
        added = torch.cat(parts, dim=-1).flatten(-2)
        if self._of_expert and self._cuts_input and (ranks := self._group.size()) > 1:
            # Each of them has the whole sum, of which a share is added up behind the expert. The
            # gradients are those of the whole.
            return added - added.detach() * (1 - 1 / ranks)
        return added

    def _exchanged(
        self, hidden: torch.Tensor, product: Product, downs: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """(T, ...) A x of all adapted projections, complete for the tokens of the output."""
        if self._of_expert:
            if self._group.size() == 1 or self._shares_down:
                # The gradient of a matrix that experts share is summed over all ranks.
                return product(hidden, downs)
            if self._cuts_input:
                short = product(hidden, downs)
                return reduce_from_tensor_model_parallel_region(short, group=self._group)
            # The gradient of x is a share of a sum, as that of the expert's own product, and A's is
            # whole.
            short = product(hidden, [down.detach() for down in downs])
            whole: Any = _SumGradients.apply(product(hidden.detach(), downs), self._group)
            return short + (whole - whole.detach())
        short = product(hidden, downs)
        match self._cuts_input, self._cuts_output, self._sequence_parallel:
            case True, _, True:
                return reduce_scatter_to_sequence_parallel_region(short, group=self._group)
            case True, _, False:
                return reduce_from_tensor_model_parallel_region(short, group=self._group)
            case False, True, True:
                return gather_from_sequence_parallel_region(
                    short, tensor_parallel_output_grad=True, group=self._group
                )
            case False, True, False:
                return copy_to_tensor_model_parallel_region(short, group=self._group)
            case _:
                return short

    @torch.no_grad()
    def delta(self) -> torch.Tensor:
        """(out, in) float32: what merging adds to this rank's part of the layer's weight."""
        ups, downs = self._ups(), self.down.float().split(self._lora.rank)
        width = self.down.shape[1]
        parts = [
            self.down.new_zeros((self._blocks, part.rows, width), dtype=torch.float32)
            if part.number is None
            else (ups[part.number].float() @ downs[part.number]).view(self._blocks, -1, width)
            for part in self._parts
        ]
        return self._lora.scale * torch.cat(parts, dim=1).flatten(0, 1)

    def _ups(self) -> list[torch.Tensor]:
        """B of each adapted projection, its rows one after the other."""
        sizes, up = [part.rows for part in self._parts if part.number is not None], self.up
        if self._shares_up and (ranks := self._group.size()) > 1:
            # Its gradient, which is whole on each of them, is summed over all ranks.
            up = up / ranks + (up * (1 - 1 / ranks)).detach()
        blocks = up.view(self._blocks, -1, self._lora.rank).split(sizes, dim=1)
        return [block.reshape(-1, self._lora.rank) for block in blocks]


def add_adapters(model: GPTModel, lora: Lora, params: Mapping[str, ShardParam]) -> None:
    """Give the linear layers of a model chunk their adapters; ``params`` are its parameters."""
    modules = {module for name in params if (module := adapted_module(name)) is not None}
    groups: Any = model.pg_collection
    for name in sorted(modules):
        linear: Any = model.get_submodule(name)
        # The first expert has the matrices that all of its layer share.
        first = _EXPERT.sub(r"\1.0.", name)
        down, up = (
            params.get(f"{name}.adapter.{leaf}") or params[f"{first}.adapter.{leaf}"]
            for leaf in ("down", "up")
        )
        weight = params[f"{name}.weight"]
        grouped = weight.mesh == "expert" and model.config.moe_grouped_gemm
        if grouped and torch.cuda.is_available() and lora.rank % _GROUPED_RANK:
            raise UserError(
                f"grouped products of experts need a multiple of {_GROUPED_RANK}, not {lora.rank}",
                key="actor_rollout_ref.model.lora_rank",
                remedy="change it, or name no layers of experts in target_modules",
            )
        linear.adapter = Adapter(
            lora,
            weight,
            down,
            up,
            linear.weight,
            sequence_parallel=bool(model.config.sequence_parallel),
            group=groups.expt_tp if weight.mesh == "expert" else groups.tp,
            first=None if first == name else model.get_submodule(first).adapter,  # type: ignore[arg-type]
        )
        linear.register_forward_hook(_add)
    if model.pre_process:
        model.embedding.register_forward_hook(_begin_graph)


def _add(linear: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, Any]) -> Any:
    if not linear.adapter.on:
        return None
    result, bias = output
    return result + linear.adapter(inputs[0]), bias


def _begin_graph(_: Any, __: Any, embedded: torch.Tensor) -> None:
    """A forward hook of the embedding. Recomputed layers have gradients only if their input needs
    one, which a frozen embedding's output does not."""
    if torch.is_grad_enabled() and not embedded.requires_grad:
        embedded.requires_grad_()


@torch.no_grad()
def merged_parameter(model: GPTModel, name: str) -> torch.Tensor:
    """The tensor of a parameter or buffer of a model chunk, in its shape and dtype on this rank; a
    linear layer's weight with its adapter added, if it has one."""
    module, _, leaf = name.rpartition(".")
    owner: Any = model.get_submodule(module)
    weight: torch.Tensor = getattr(owner, leaf).detach()
    adapter = getattr(owner, "adapter", None)
    if adapter is None or leaf != "weight":
        return weight
    return adapter.delta().add_(weight).to(weight.dtype)


def adapters_of(model: torch.nn.Module) -> Iterator[Adapter | LinearAdapter]:
    """The adapters in a model."""
    kinds = Adapter, LinearAdapter
    return (module for module in model.modules() if isinstance(module, kinds))


@contextmanager
def adapters_disabled(models: Iterable[torch.nn.Module]) -> Iterator[None]:
    """In the block the models compute without their adapters."""
    adapters = [adapter for model in models for adapter in adapters_of(model)]
    for adapter in adapters:
        adapter.on = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.on = True

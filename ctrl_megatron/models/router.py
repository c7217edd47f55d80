"""The router of a layer with experts: its losses, how many tokens it gives to each expert, and the
bias by which it balances them.

Both losses are means over the tokens of the global mini-batch and are added over the layers:

- balance (``moe_aux_loss_coeff``): E sum_e f_e P_e with the share f_e of the assignments that go to
  expert e and its mean probability P_e; 1 if both are even (Fedus et al., arXiv 2101.03961). f_e is
  taken within a micro-batch.
- z (``moe_z_loss_coeff``): the squared log-sum-exp of the logits (Zoph et al., arXiv 2202.08906).

Megatron's own losses are switched off: where the loss is normalised already
(``calculate_per_token_loss``) it multiplies them by the tokens of the micro-batch and expects a
division by all tokens afterwards. Here the weight of a token contains that division.

A router with a bias (DeepSeek-V3, arXiv 2412.19437) may balance without a loss: after an update
``moe_router_bias_update_rate`` is added to the bias of every expert with fewer tokens than the mean
of its layer in the global mini-batch and subtracted where there are more. Megatron's own update
counts over the ranks of its global state and is switched off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    compute_routing_scores_for_aux_loss,
)
from megatron.core.transformer.moe.router import TopKRouter

from ctrl_megatron.models.expert_choice import ExpertChoice, RouteTable
from ctrl_megatron.models.micro_batch import MicroBatch
from ctrl_megatron.models.shape import AnyShape, Experts, ModelShape
from ctrl_megatron.parallel.groups import ProcessGroups


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions:
    """How routers are trained beside the model's loss."""

    balance: float = 0.0
    """Coefficient of the balance loss; 0 for none."""
    z: float = 0.0
    """Coefficient of the z loss; 0 for none."""
    bias_rate: float = 0.0
    """Increment of the bias of an expert with too few tokens, per update; 0 leaves the biases."""


class Router(TopKRouter):
    """Megatron's router. It counts passes with gradients, in which a recomputed pass is one."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.choice = ExpertChoice()
        self.router_replay: Any = self.choice  # which Megatron asks for the choice
        self.begin_mini_batch(RouterOptions(), 1)

    def begin_mini_batch(self, options: RouterOptions, tokens: int) -> None:
        """Begin a global mini-batch of ``tokens`` tokens and forget what was counted."""
        self._weights = (options.balance / tokens, options.z / tokens)
        self.load = torch.zeros(self.config.num_moe_experts or 0, dtype=torch.int64)
        """(E,): tokens of this rank that each expert was chosen for."""
        self.sums = torch.zeros(2)
        """Both losses before their coefficients, added over the tokens of this rank."""

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Megatron's (weights, choice), both (T, E), for logits (T, 1, E); tokens where
        ``padding_mask`` (T, 1) is on count nowhere."""
        probs, chosen = super().routing(logits)
        if not (self.training and torch.is_grad_enabled()):
            return probs, chosen
        rows = logits.view(-1, logits.shape[-1])
        real = torch.ones_like(rows[:, :1], dtype=torch.bool)
        if padding_mask is not None:
            real = ~padding_mask.reshape(-1, 1)
        self.load = self.load.to(rows.device) + (chosen & real).sum(dim=0)
        if any(self._weights):
            probs = MoEAuxLossAutoScaler.apply(probs, self._loss(rows.float(), real))
        return probs, chosen

    def _loss(self, logits: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        """This rank's share of both losses; logits (T, E) float32, real (T, 1)."""
        choice, scores = compute_routing_scores_for_aux_loss(logits, self.topk, self.score_function)
        assigned = (choice & real).sum(dim=0).float()
        # Tensor ranks, which experts require to be sequence parallel, and context ranks have parts
        # of the micro-batch.
        dist.all_reduce(assigned, group=self.tp_cp_group)
        share = assigned / assigned.sum().clamp(min=1)
        balance = len(share) * (share * (scores * real).sum(dim=0)).sum()
        z = (logits.logsumexp(dim=-1, keepdim=True).square() * real).sum()
        self.sums = self.sums.to(logits.device) + torch.stack([balance, z]).detach()
        return self._weights[0] * balance + self._weights[1] * z


def take_keys(
    layer: Any, given: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A forward hook of a layer with experts, which takes the keys of its tokens
    (``expert_choice.RouteTable``), (1, T) int64 and -1 for padding, in the place of its padding
    mask."""
    keys = named.get("padding_mask")
    if keys is None or keys.dtype != torch.int64:
        return given, named
    # A recomputed layer comes here again, right before its router.
    layer.router.choice.keys = keys.reshape(-1)
    return given, {**named, "padding_mask": keys < 0}


class Routers:
    """The routers of one rank's part of a model."""

    def __init__(self, models: Sequence[torch.nn.Module], shape: AnyShape) -> None:
        kinds = enumerate(shape.feed_forward if isinstance(shape, ModelShape) else ())
        self._experts = {layer: kind.count for layer, kind in kinds if isinstance(kind, Experts)}
        self._own = [m for model in models for m in model.modules() if isinstance(m, Router)]
        self._options, self._tokens = RouterOptions(), 1
        self._loads: dict[int, torch.Tensor] = {}
        self._table: RouteTable | None = None
        places = {layer: place for place, layer in enumerate(self._experts)}
        for router in self._own:
            router.choice.layer = places[_layer(router)]

    def begin_mini_batch(self, options: RouterOptions, tokens: int, groups: ProcessGroups) -> None:
        """Begin a global mini-batch, of which ``tokens`` are this data rank's. Collective."""
        if not self._experts:
            return
        self._options = options
        self._tokens = int(groups.sum_over_data(torch.tensor(tokens)))
        for router in self._own:
            router.begin_mini_batch(options, self._tokens)

    def begin_replay(
        self, micro_batches: list[MicroBatch], device: torch.device, *, records: bool
    ) -> list[MicroBatch]:
        """The micro-batches with keys for their tokens. Until ``end_replay`` the routers take the
        choices that are recorded for them (``MicroBatch.routes``); with ``records`` theirs are
        recorded instead."""
        keyed, parts, first = list[MicroBatch](), list[torch.Tensor](), 0
        for micro in micro_batches:
            assert micro.routes is not None and micro.keys is not None and micro.key_of is not None
            keys = torch.where(micro.keys >= 0, micro.keys + first, -1)
            key_of = torch.where(micro.key_of >= 0, micro.key_of + first, -1)
            keyed.append(replace(micro, keys=keys, key_of=key_of))
            parts.append(micro.routes)
            first += len(micro.routes)
        self._table = RouteTable(torch.cat(parts).to(device), records=records)
        for router in self._own:
            router.choice.table = self._table
        return keyed

    def end_replay(self) -> RouteTable | None:
        """The table of the replay, which ends; None where there was none."""
        for router in self._own:
            router.choice.table = None
        table, self._table = self._table, None
        return table

    def metrics(self, groups: ProcessGroups) -> dict[str, float]:
        """``max_load`` and, for each layer with experts, ``max_load/LAYER``: the tokens of the
        expert with most, as a multiple of the mean; the losses in use as means over these layers.
        Collective over all ranks."""
        if not self._experts:
            return {}
        widest = max(self._experts.values())
        statistics = torch.zeros(len(self._experts), widest + 2, dtype=torch.float64)
        rows = {layer: statistics[row] for row, layer in enumerate(self._experts)}
        for router in self._own:
            row = rows[_layer(router)]
            row[: len(router.load)] += router.load.cpu()
            row[widest:] += router.sums.cpu()
        dist.all_reduce(statistics, group=groups.host)
        self._loads = {layer: rows[layer][:count] for layer, count in self._experts.items()}
        loads = {layer: float(load.max() / load.mean()) for layer, load in self._loads.items()}
        sums = (statistics[:, widest:].mean(dim=0) / self._tokens).tolist()
        used = {"balance_loss": self._options.balance, "z_loss": self._options.z}
        return {
            "max_load": max(loads.values()),
            **{f"max_load/{layer}": load for layer, load in loads.items()},
            **{name: value for (name, on), value in zip(used.items(), sums, strict=True) if on},
        }

    @torch.no_grad()
    def update_expert_biases(self) -> None:
        """Change the biases by the loads that ``metrics`` has counted."""
        for router in self._own if self._options.bias_rate else ():
            if router.expert_bias is not None:
                load = self._loads[_layer(router)]
                missing = (load.mean() - load).sign() * self._options.bias_rate
                router.expert_bias += missing.to(router.expert_bias)


def replay_rates(table: RouteTable | None, groups: ProcessGroups) -> dict[str, float]:
    """``replayed_rate``: the share of the routers' choices that were recorded ones, and
    ``replay_differs_rate``: that of these in which the router's own differs; nothing without a
    table. Collective over all ranks where there is one."""
    if table is None:
        return {}
    counts = table.counts.double().cpu()
    dist.all_reduce(counts, group=groups.host)
    real, known, differs = counts.tolist()
    rates = {"replayed_rate": known / real} if real else {}
    return rates | ({"replay_differs_rate": differs / known} if known else {})


def _layer(router: Router) -> int:
    """The router's layer among all of the model, from 0."""
    return (router.layer_number or 0) - 1

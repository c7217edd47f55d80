"""The strategy ``fsdp``: transformers' own modules, whose rows torch's FSDP2 shares among ranks.

The whole model computes on every rank: before a layer its weights are gathered, after it they are
freed. A rank keeps its rows of every weight in float32; they are cast to the model's type where
they are gathered, and gradients are summed in float32. Rows of a batch are packed as with Megatron,
through transformers' attention interface, where that computes the same; ``choose_row_packing``
finds out.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ctrl_megatron.errors import UserError
from ctrl_megatron.models.adapters import adapters_of
from ctrl_megatron.models.attention import attend_packed, masked_attention
from ctrl_megatron.models.build import DTYPES, check_options
from ctrl_megatron.models.delta_rule import causal_convolution, gated_delta_rule
from ctrl_megatron.models.linear_adapters import LinearAdapter, add_linear_adapters
from ctrl_megatron.models.micro_batch import MicroBatch, split_into_micro_batches
from ctrl_megatron.models.packed_layout import PackedLayoutParams
from ctrl_megatron.models.rules import param_rules
from ctrl_megatron.models.shape import TransformersShape
from ctrl_megatron.models.sharded_adam import ShardedAdam
from ctrl_megatron.models.shards import ShardParam
from ctrl_megatron.models.strategy import ForwardStep, ModelOptions
from ctrl_megatron.models.transformers_model import (
    ValueHeadDecoder,
    empty_model,
    longest_row_without_longrope,
    register_attention,
    register_delta_rule,
)
from ctrl_megatron.parallel.divergence import OutputLayer
from ctrl_megatron.parallel.gloo import OrderedReduceScatter
from ctrl_megatron.parallel.groups import ProcessGroups

_log = logging.getLogger(__name__)
_PACKED = "ctrl_packed"
"""The name of our attention in transformers' registry."""
_KINDS = ("full_attention", "sliding_attention", "linear_attention")
"""The kinds of ``layer_types`` that packed passes may compute; ``_seen`` tells whether they do."""
_GAPS = {torch.float32: 1e-4, torch.bfloat16: 0.25}
"""Largest difference of log-probs between packed and plain rows; in bfloat16 rounding decides."""


@dataclass
class _Seen:
    """Layers that packed attention computed during a pass, and obstacles that it met."""

    layers: int = 0
    obstacles: dict[str, None] = field(default_factory=dict)


_seen = _Seen()


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    packed: PackedLayoutParams | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: (1, A, T, Dk), (1, G, T, Dk), (1, G, T, Dv) ->
    (1, T, A, Dv)."""
    _seen.layers += 1
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    if softcap is not None:
        _seen.obstacles["its attention has soft caps"] = None
    if packed is None:
        _seen.obstacles["its layers pass no arguments on to their attention"] = None
        return torch.zeros_like(q).unsqueeze(0), None
    longest = max(segment.num_keys for segment in packed.layout.segments)
    if sliding_window is not None and sliding_window < longest:
        return masked_attention(q, k, v, packed, scaling, sliding_window).unsqueeze(0), None
    return attend_packed(q, k, v, packed, scaling).unsqueeze(0), None


def _convolution(
    u: torch.Tensor, weight: torch.Tensor, *_: Any, packed: PackedLayoutParams, **__: Any
) -> torch.Tensor:
    """(1, C, T) and (C, K) -> (1, C, T)."""
    return causal_convolution(u.squeeze(0).T, weight, packed.layout).T.unsqueeze(0)


def _delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    g: torch.Tensor,
    beta: torch.Tensor,
    packed: PackedLayoutParams,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """(1, T, A, D), (1, T, A, D), (1, T, A, V), decays and rates (1, T, A) -> (1, T, A, V)."""
    _seen.layers += 1
    q, k, v, decay, rate = (x.squeeze(0) for x in (query, key, value, g, beta))
    return gated_delta_rule(q, k, v, decay, rate, packed.layout).unsqueeze(0), None


register_attention(_PACKED, _attention)
register_delta_rule(_convolution, _delta_rule, "packed")


def _device_mesh(groups: ProcessGroups) -> DeviceMesh:
    """torch's mesh of the ranks: those that share a copy, and the copies where there are several
    (hybrid sharding)."""
    layout, device = groups.layout, groups.device.type
    if layout.fsdp_replicas == 1:
        return DeviceMesh.from_group(groups.shards, device, mesh_dim_names=("shard",))
    return DeviceMesh.from_group(
        [groups.copies, groups.shards],
        device,
        mesh=torch.tensor(groups.ranks).view(layout.fsdp_replicas, layout.fsdp_shard_size),
        mesh_dim_names=("copy", "shard"),
    )


class FsdpStrategy:
    """A ``models.strategy.Strategy``."""

    def __init__(
        self, shape: TransformersShape, groups: ProcessGroups, options: ModelOptions
    ) -> None:
        check_options(options.build)
        self._shape, self._groups, self._options = shape, groups, options
        self._dtype = DTYPES[options.build.dtype]
        self.packs_rows = True
        model, self._blocks = empty_model(shape.config, torch.float32)
        self._config = model.config
        bias = shape.head_bias
        self._module: Any = ValueHeadDecoder(model, bias=bias) if shape.value_head else model
        self._head: Any = self._module.score if shape.value_head else model.get_output_embeddings()
        if not shape.value_head:
            self._project()
        if options.build.recompute_granularity == "full" and options.optimizer is not None:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            for block in self._blocks:
                # transformers recomputes a layer that trains; what is in it has no dropout so.
                block.training = True
        mesh = _device_mesh(groups)
        policy = MixedPrecisionPolicy(param_dtype=self._dtype, reduce_dtype=torch.float32)
        if shape.lora is not None:
            add_linear_adapters(
                self._module, shape.lora, (rule.megatron for rule in param_rules(shape))
            )
        # Every rank has all of these, and the optimizer sums their gradients.
        whole = {a.down for a in adapters_of(self._module) if isinstance(a, LinearAdapter)}
        modules: Any = (*self._blocks, self._module)
        for module in modules:
            fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params=whole)
            # A loss is a sum over all ranks already (models.loss_scale).
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if groups.device.type == "cpu":
                module.set_custom_reduce_scatter(OrderedReduceScatter())
        self._module._apply(
            lambda t: (
                torch.empty_like(t, device=groups.device) if t.is_meta else t.to(groups.device)
            )
        )
        self.models = [self._module]

    def _project(self) -> None:
        """Let the output layer pass on its input in packed passes: vocabulary and softmax are
        computed together (``parallel.vocab``), from the hidden states as the family scales them."""
        head, project = self._head, self._head.forward
        head.forward = lambda hidden: hidden if self.packs_rows else project(hidden)

    @cached_property
    def _shards(self) -> dict[str, torch.Tensor]:
        """This rank's rows of every parameter, in the parameter's memory."""
        named = ((name, p.detach()) for name, p in self._module.named_parameters())
        return {name: p.to_local() if isinstance(p, DTensor) else p for name, p in named}

    def rank_part(self, chunk: int, param: ShardParam) -> torch.Tensor:
        return self._shards[param.name]

    def engine_part(self, chunk: int, param: str) -> torch.Tensor:
        module, _, leaf = param.rpartition(".")
        adapter = getattr(self._module.get_submodule(module), "adapter", None)
        own = self._shards[param]
        if adapter is None or leaf != "weight":
            return own
        down, up = (self._shards[f"{module}.adapter.{name}"] for name in ("down", "up"))
        return torch.addmm(own, up, down, alpha=adapter.scale)

    def weights(self) -> Iterator[torch.Tensor]:
        yield from self._shards.values()

    def gradient_buffers(self) -> Iterator[torch.Tensor]:
        """Empty: FSDP's gradients are freed after every step, so no buffer of them lives as long as
        the model."""
        return iter(())

    def make_trainable_or_frozen(self, places: Iterable[tuple[ShardParam, torch.Tensor]]) -> None:
        named = dict(self._module.named_parameters())
        for param, shard in places:
            if tuple(shard.shape) != param.shape:
                raise RuntimeError(
                    f"{param.name}: FSDP has {tuple(shard.shape)}, not {param.shape}"
                )
            learns = param.trained and self._options.optimizer is not None
            named[param.name].requires_grad_(learns)

    def start_optimizer(self) -> ShardedAdam:
        assert self._options.optimizer is not None
        pairs = [
            (weight, self._shards[name])
            for name, weight in self._module.named_parameters()
            if weight.requires_grad
        ]
        return ShardedAdam(pairs, self._options.optimizer, self._groups)

    def padded_micro_batch_count(self, own: int) -> int:
        """As in ``Strategy``: the most of any rank, because every pass gathers the layers from all
        ranks."""
        return self._groups.max_over_data(own)

    def zero_gradients(self) -> None:
        """As in ``Strategy``: the gradients of the last step are freed."""

    def run_passes(
        self, step: ForwardStep, micro_batches: Sequence[MicroBatch], *, backward: bool
    ) -> list[Any]:
        reports = []
        for micro in micro_batches:
            loss, report = step(iter([micro]), _Pass(self, micro))
            if backward:
                loss.backward()
            reports.append(report(loss)[-1])
        # FSDP keeps what is outside layers for a backward pass.
        self._module.reshard()
        return reports

    def forward(self, micro: MicroBatch) -> torch.Tensor:
        """(1, T, H) hidden states before the output layer of a packed pass and of a value model,
        else (1, N, V) logits for the response tokens of one row."""
        self._config._attn_implementation = self._attention_name
        arguments: dict[str, Any] = {"input_ids": micro.tokens, "position_ids": micro.positions}
        arguments["use_cache"] = False
        if self.packs_rows:
            arguments["packed"] = micro.packed
        if self._shape.value_head:
            return self._module(**arguments)
        if not self.packs_rows:
            arguments["logits_to_keep"] = micro.predictors
        return self._module(**arguments).logits

    @property
    def _attention_name(self) -> str:
        if self.packs_rows:
            return _PACKED
        # torch's own attention leaves soft caps out.
        capped = getattr(self._config, "attn_logit_softcapping", None) is not None
        return "eager" if capped else "sdpa"

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def output_layer(self, module: Any, micro: MicroBatch, output: torch.Tensor) -> OutputLayer:
        vectors = output.squeeze(0)
        return OutputLayer(
            hidden=vectors[micro.predictors] if self.packs_rows else vectors,
            weight=self._head.weight if self.packs_rows else None,
            vocab_size=self._shape.vocab_size,
            chunk=self._options.logprob_chunk,
        )

    def output_weight(self) -> torch.Tensor | None:
        weight = self._head.weight.detach()
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight.clone()
        return whole.to(self._dtype)

    def values(self, module: Any, micro: MicroBatch, output: torch.Tensor) -> torch.Tensor:
        hidden = output.squeeze(0)[micro.predictors].float()
        head = self._head
        bias = None if head.bias is None else head.bias.float()
        return F.linear(hidden, head.weight.float(), bias).squeeze(-1)

    @torch.no_grad()
    def choose_row_packing(self) -> None:
        """As in ``Strategy``: compare three rows with one prompt, packed and each for itself. A
        family that packed attention cannot compute runs with rows apart, which is said."""
        _seen.layers, _seen.obstacles = 0, self._obstacles()
        packed = self._sample()
        obstacles = [*_seen.obstacles]
        if not obstacles and _seen.layers != len(self._blocks):
            obstacles = [f"{_seen.layers} of {len(self._blocks)} layers can tell rows apart"]
        self.packs_rows = False
        if obstacles:
            if self._groups.is_first:
                _log.warning(
                    "%s: rows are not packed, because %s", self._shape.family, "; ".join(obstacles)
                )
            return
        plain = self._sample()
        self.packs_rows = True
        gap = float((packed - plain).abs().max())
        what = "hidden states" if self._shape.value_head else "log-probs"
        # Not ``>``, which is false for NaN.
        if not gap <= _GAPS[self._dtype]:
            raise UserError(
                f"{what} of packed rows of a {self._shape.family!r} model differ by {gap:.2g} "
                "from those of the same rows apart: strategy 'fsdp' does not compute this model",
                key="actor_rollout_ref.actor.strategy",
                remedy="set it to megatron if that knows the family, or name another model",
            )

    def _obstacles(self) -> dict[str, None]:
        """Properties of config.json and of the modules that rule out packed passes."""
        config, obstacles = self._config, {}
        kinds = {*(getattr(config, "layer_types", None) or ())}.difference(_KINDS)
        if kinds:
            obstacles[f"layer_types has {', '.join(sorted(kinds))}"] = None
        if (length := longest_row_without_longrope(config)) < self._options.token_budget:
            obstacles[f"rows of more than {length} tokens are rotated otherwise (longrope)"] = None
        if self._shape.value_head:
            return obstacles
        if getattr(config, "final_logit_softcapping", None) is not None:
            obstacles["its logits have soft caps"] = None
        if getattr(self._head, "bias", None) is not None:
            obstacles["its output layer has a bias"] = None
        return obstacles

    def _sample(self) -> torch.Tensor:
        """Log-probs of three short rows with one prompt, or a random projection of a value model's
        hidden states, whose head is zero at first. Collective."""
        generator = torch.Generator().manual_seed(0)
        prompt, width, rows = 7, 6, 3
        tokens = torch.randint(self._shape.vocab_size, (rows, prompt + width), generator=generator)
        tokens[:, :prompt] = tokens[0, :prompt]
        direction = F.normalize(torch.randn(self._shape.hidden_size, generator=generator), dim=0)
        answered = torch.arange(width) < torch.tensor([[6], [3], [5]])
        attended = torch.cat([torch.ones(rows, prompt, dtype=torch.bool), answered], dim=1)
        found = torch.zeros(rows, width, device=self._groups.device)
        for micro in split_into_micro_batches(
            {"input_ids": tokens, "attention_mask": attended, "response_mask": answered},
            token_budget=tokens.numel(),
            shared_prefix=True,
            multiple=1,
            count=lambda own: own,
            device=self._groups.device,
            apart=not self.packs_rows,
        ):
            output = self.forward(micro)
            if self._shape.value_head:
                hidden = output.squeeze(0)[micro.predictors].float()
                numbers = hidden @ direction.to(hidden.device)
            else:
                numbers, _ = self.output_layer(None, micro, output).log_probs(micro.targets, 1.0)
            found[micro.rows] = micro.to_rows(numbers)
        self._module.reshard()
        return found


@dataclass(frozen=True, slots=True)
class _Pass:
    """The model as ``models.forward_step`` calls it, for one micro-batch: one stage."""

    strategy: FsdpStrategy
    micro: MicroBatch
    pre_process = post_process = True

    def __call__(self, **_: Any) -> torch.Tensor:
        return self.strategy.forward(self.micro)

"""Reads back the weights that an engine's layers compute with, under their Hugging Face names.

vLLM and SGLang use the same names and attributes for their layers, so this file imports neither.
Collective over tensor ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ctrl_megatron.models.families import Family
from ctrl_megatron.models.rules import family_tensor_name
from ctrl_megatron.rollout.weight_update import checksums

Gather = Callable[[torch.Tensor, int], torch.Tensor]
"""Concatenates the tensors of all tensor ranks along a dimension."""
_EXPERTS = {"RoutedExperts", "FusedMoE"}
"""The classes of vLLM's and SGLang's experts of a layer."""
_BY_HEAD = {"A_log", "dt_bias"}
"""Parameters of gated delta nets with a number for each head, of which a tensor rank has its own
heads'."""

HF_NAMES = ("gate_proj", "up_proj", "down_proj")
"""The names of an expert's gate, up and down projection in most families."""


@dataclass(frozen=True, slots=True)
class RankExpertWeights:
    """The weights of a layer's experts on one tensor rank."""

    gate_up: torch.Tensor
    """(E, 2 * width, hidden): the rows of an expert's gate, then those of its up projection."""
    down: torch.Tensor
    """(E, hidden, width)."""
    numbers: torch.Tensor | None = None
    """(E,) int64, which of the layer's experts these are; None where every rank holds a share of
    the width of all of them."""
    width: int | None = None
    """An expert's width over all ranks without padding; None without padding."""
    names: tuple[str, str, str] = HF_NAMES
    """The projections' HF names."""


def engine_hf_tensors(
    model: Any,
    dtype: torch.dtype,
    *,
    gather: Gather,
    fused: Mapping[str, Sequence[str]],
    stacked: bool = False,
    computed_weight: Callable[[Any, int], torch.Tensor] = lambda module, width: module.weight,
    computed_experts: Callable[[Any], RankExpertWeights] = lambda module: RankExpertWeights(
        module.w13_weight, module.w2_weight
    ),
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (HF name, whole tensor) of everything that the model computes with, including a head
    that is tied to the embedding.

    ``fused`` maps a fused layer to the HF layers in it, of which the first may have several parts.
    ``stacked`` says that the files have a tensor of all experts of a layer.
    ``computed_weight(module, input width)`` returns the (out, in) weight of a linear layer or an
    output head, by default its attribute, and ``computed_experts(module)`` this rank's weights of a
    layer's experts.
    """
    for path, module in model.named_modules():
        parent, _, leaf = path.rpartition(".")
        kinds = _kinds(module)
        if "LinearBase" in kinds:
            width = getattr(module, "input_size_per_partition", module.input_size)
            held = {"weight": computed_weight(module, width)}
            if (bias := getattr(module, "bias", None)) is not None:
                held["bias"] = bias
            for kind, local in held.items():
                names = fused.get(leaf, [leaf])
                sizes = _part_sizes(module, leaf, model.get_submodule(parent))
                wholes = _hf_tensors(module, local, gather, sizes)
                if (several := len(wholes) - len(names) + 1) > 1:
                    wholes = [torch.cat(wholes[:several]), *wholes[several:]]
                for name, whole in zip(names, wholes, strict=True):
                    yield ".".join(filter(None, (parent, name, kind))), whole.to(dtype)
            for name, state in module.named_parameters(recurse=False):
                if name not in ("weight", "bias"):  # such as the bias of a router's choice
                    yield f"{path}.{name}", state
        elif "VocabParallelEmbedding" in kinds:
            used = torch.as_tensor(module.weight)
            if leaf == "lm_head":
                used = computed_weight(module, module.embedding_dim)
            yield f"{path}.weight", gather(used, 0)[: module.org_vocab_size]
        elif kinds & _EXPERTS:
            stem = path.removesuffix(".routed_experts")
            for name, whole in _expert_tensors(computed_experts(module), gather, stacked=stacked):
                yield f"{stem}.{name}", whole.to(dtype)
        else:
            for name, parameter in module.named_parameters(recurse=False):
                if name in _BY_HEAD:  # some in float32, whatever the dtype of the model
                    parameter = gather(parameter, 0).to(dtype)
                yield f"{path}.{name}" if path else name, parameter


def engine_hf_checksums(
    model: Any,
    dtype: torch.dtype,
    *,
    is_first: bool,
    tied: bool,
    family: Family | None = None,
    **how: Any,
) -> dict[str, str]:
    """HF name -> checksum of ``engine_hf_tensors(model, dtype, **how)`` in the form of ``family``'s
    files, with a ``tied`` pair once. Empty on every tensor rank but the first, which gathers the
    parts of the others.

    RuntimeError if a tied head computes with other weights than the embedding.
    """
    with torch.inference_mode():
        stacked = family is not None and family.stacked_experts
        held = engine_hf_tensors(model, dtype, stacked=stacked, **how)
        by_name = checksums(held if is_first else (pair for pair in held if False))
    if tied and "model.embed_tokens.weight" in by_name:
        head = by_name.pop("lm_head.weight", None)
        if head not in (None, by_name["model.embed_tokens.weight"]):
            raise RuntimeError("the tied output head differs from the embedding")
    names = () if family is None else family.file_names
    return {family_tensor_name(name, names): found for name, found in by_name.items()}


def _expert_tensors(
    held: RankExpertWeights, gather: Gather, *, stacked: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name below the experts, whole tensor) of all experts of a layer."""
    spread = held.numbers is not None
    parts = zip(held.names, (*held.gate_up.chunk(2, dim=1), held.down), (1, 1, 2), strict=True)
    wholes = {}
    for name, part, cut in parts:
        whole = gather(part.contiguous(), 0 if spread else cut)
        wholes[name] = whole.narrow(cut, 0, held.width or whole.shape[cut])
    count = len(next(iter(wholes.values())))
    numbers = range(count) if held.numbers is None else gather(held.numbers, 0).tolist()
    if stacked:
        order = torch.tensor(numbers).argsort()
        gate, up, down = (whole[order.to(whole.device)] for whole in wholes.values())
        yield "gate_up_proj", torch.cat([gate, up], dim=1)
        yield "down_proj", down
        return
    for place, number in enumerate(numbers):
        for name, whole in wholes.items():
            yield f"{number}.{name}.weight", whole[place]


def name_with_attention(own: str) -> str:
    """The HF name of a tensor that SGLang calls ``own``: its layers of Qwen3.5 have the parts of
    attention themselves."""
    return re.sub(r"(\.layers\.\d+)\.([qkvo]_proj|[qk]_norm)\.", r"\1.self_attn.\2.", own)


def _kinds(module: Any) -> set[str]:
    return {kind.__name__ for kind in type(module).__mro__}


def _part_sizes(module: Any, leaf: str, parent: Any) -> list[int] | None:
    """The whole rows of each part that tensor ranks share by itself; None for a layer of one
    part."""
    if _kinds(module) & {"MergedColumnParallelLinear", "QKVParallelLinear"}:
        return list(module.output_sizes)
    if leaf == "conv1d" and hasattr(parent, "key_dim"):  # over queries, keys and values
        return [parent.key_dim, parent.key_dim, parent.value_dim]
    return None


def _hf_tensors(
    module: Any, local: torch.Tensor, gather: Gather, sizes: list[int] | None
) -> list[torch.Tensor]:
    """The parts of a linear layer's weight or bias, in the order of their fusion and of these
    ``sizes``, gathered from all tensor ranks; ``local`` is this rank's part."""
    kinds = _kinds(module)
    if "RowParallelLinear" in kinds:
        return [gather(local, 1) if local.dim() == 2 else local]
    if "ColumnParallelLinear" not in kinds:
        return [local]
    if sizes is None:
        return [gather(local, 0)]
    ranks = sum(sizes) // len(local)
    if ranks == 1:
        return list(local.split(sizes))
    sizes = [size // ranks for size in sizes]
    parts = [gather(part.contiguous(), 0) for part in local.split(sizes)]
    copies = getattr(module, "num_kv_head_replicas", 1)
    if copies == 1:
        return parts
    heads = [p.view(-1, size, *p.shape[1:]) for p, size in zip(parts[1:], sizes[1:], strict=True)]
    return [parts[0], *(h[::copies].flatten(0, 1) for h in heads)]

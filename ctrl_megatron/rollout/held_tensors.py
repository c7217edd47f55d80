"""Reads back the weights that an engine's layers compute with, under their Hugging Face names.

vLLM and SGLang use the same names and attributes for their layers, so this file imports neither.
Collective over tensor ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ctrl_megatron.rollout.weight_update import checksums

Gather = Callable[[torch.Tensor, int], torch.Tensor]
"""Concatenates the tensors of all tensor ranks along a dimension."""


def held_tensors(
    model: Any,
    dtype: torch.dtype,
    *,
    gather: Gather,
    fused: Mapping[str, Sequence[str]],
    computed_weight: Callable[[Any, int], torch.Tensor] = lambda module, width: module.weight,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (HF name, whole tensor) of everything that the model computes with, including a head
    that is tied to the embedding.

    ``fused`` maps a fused layer to the HF layers in it. ``computed_weight(module, input width)``
    returns the (out, in) weight of a linear layer or an output head, by default its attribute.
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
                wholes = _hf_tensors(module, local, gather)
                for name, whole in zip(fused.get(leaf, [leaf]), wholes, strict=True):
                    yield ".".join(filter(None, (parent, name, kind))), whole.to(dtype)
        elif "VocabParallelEmbedding" in kinds:
            used = torch.as_tensor(module.weight)
            if leaf == "lm_head":
                used = computed_weight(module, module.embedding_dim)
            yield f"{path}.weight", gather(used, 0)[: module.org_vocab_size]
        else:
            for name, parameter in module.named_parameters(recurse=False):
                yield f"{path}.{name}" if path else name, parameter


def held_checksums(
    model: Any, dtype: torch.dtype, *, is_first: bool, tied: bool, **how: Any
) -> dict[str, str]:
    """HF name -> checksum of ``held_tensors(model, dtype, **how)``, with a ``tied`` pair once.
    Empty on every tensor rank but the first, which gathers the parts of the others.

    RuntimeError if a tied head computes with other weights than the embedding.
    """
    with torch.inference_mode():
        held = held_tensors(model, dtype, **how)
        found = checksums(held if is_first else (pair for pair in held if False))
    if tied and "model.embed_tokens.weight" in found:
        head = found.pop("lm_head.weight", None)
        if head not in (None, found["model.embed_tokens.weight"]):
            raise RuntimeError("the tied output head differs from the embedding")
    return found


def _kinds(module: Any) -> set[str]:
    return {kind.__name__ for kind in type(module).__mro__}


def _hf_tensors(module: Any, local: torch.Tensor, gather: Gather) -> list[torch.Tensor]:
    """The HF tensors of a linear layer's weight or bias, in the order of their fusion, gathered
    from all tensor ranks; ``local`` is this rank's part."""
    kinds = _kinds(module)
    if "RowParallelLinear" in kinds:
        return [gather(local, 1) if local.dim() == 2 else local]
    if "ColumnParallelLinear" not in kinds:
        return [local]
    if not kinds & {"MergedColumnParallelLinear", "QKVParallelLinear"}:
        return [gather(local, 0)]
    ranks = sum(module.output_sizes) // len(local)
    sizes = [size // ranks for size in module.output_sizes]
    parts = [gather(part.contiguous(), 0) for part in local.split(sizes)]
    copies = getattr(module, "num_kv_head_replicas", 1)
    if copies == 1:
        return parts
    heads = [p.view(-1, size, *p.shape[1:]) for p, size in zip(parts[1:], sizes[1:], strict=True)]
    return [parts[0], *(h[::copies].flatten(0, 1) for h in heads)]

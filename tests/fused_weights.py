"""What a worker of a tensor-parallel engine computes with, written without the package's plan."""

from __future__ import annotations

import torch

from ctrl_megatron.models.shape import GroupedQueryAttention, ModelShape, MultiLatentAttention
from ctrl_megatron.resharding.plan import EngineCut

Weights = dict[str, torch.Tensor]
_OF_HEADS = (".q_proj.weight", ".q_b_proj.weight", ".kv_b_proj.weight")
"""What latent attention computes head by head; its short vectors are the same on all workers."""


def fused(shape: ModelShape, cut: EngineCut, worker: int, hf: Weights) -> Weights:
    """What a worker computes with, as vLLM and SGLang fuse it; padding left out."""
    size, found = cut.tensor, Weights()
    attention = shape.attention
    padded = -(-shape.vocab_size // 64) * 64 // size
    for name, whole in hf.items():
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            found[name] = whole[worker * padded : (worker + 1) * padded]
        elif isinstance(attention, MultiLatentAttention) and name.endswith(_OF_HEADS):
            found[name] = whole.chunk(size)[worker]
        elif isinstance(attention, GroupedQueryAttention) and ".q_proj." in name:
            heads, groups, width = attention.heads, attention.groups, attention.head_dim
            each = heads // size * width
            rows = [whole[worker * each : (worker + 1) * each]]
            count = max(1, groups // size)
            first = worker * groups // size
            for x in "kv":
                part = hf[name.replace(".q_proj.", f".{x}_proj.")]
                rows.append(part[first * width : (first + count) * width])
            found[name.replace(".q_proj.", ".qkv_proj.")] = torch.cat(rows)
        elif ".o_proj." in name:
            found[name] = whole.chunk(size, dim=1)[worker]
        elif ".gate_proj." in name or ".down_proj." in name:
            spread = ".experts." in name and cut.spread_experts
            if spread:
                expert = int(name.split(".experts.")[1].split(".")[0])
                count = max(
                    int(n.split(".experts.")[1].split(".")[0]) + 1 for n in hf if ".experts." in n
                )
                if expert * size // count != worker:
                    continue
            dim = int(".down_proj." in name)
            unit = cut.width_unit or 1
            share = -(-whole.shape[dim] // (unit * size)) * unit
            own = slice(None) if spread else slice(worker * share, (worker + 1) * share)
            if dim:
                found[name] = whole[:, own]
            else:
                up = hf[name.replace(".gate_proj.", ".up_proj.")]
                found[name.replace(".gate_proj.", ".gate_up_proj.")] = torch.cat(
                    [whole[own], up[own]]
                )
        elif not any(f".{x}_proj." in name for x in ("k", "v", "up")):
            found[name] = whole
    return found

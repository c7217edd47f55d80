"""The library behind each kernel, read from the classes of a model on this machine."""

from __future__ import annotations

from typing import Any


def kernel_providers(dtype: str = "bfloat16") -> dict[str, str]:
    """Kernel -> ``module.Class`` that computes it in this dtype; imports Megatron-Core."""
    from megatron.core import optimizer
    from megatron.core.transformer.spec_utils import ModuleSpec

    from ctrl_megatron.models.layer_spec import block_spec
    from ctrl_megatron.models.shape import Dense, GroupedQueryAttention, LayerKind

    def name(part: Any) -> str:
        kind: Any = part.module if isinstance(part, ModuleSpec) else part
        return f"{kind.__module__}.{kind.__qualname__}"

    any_heads = GroupedQueryAttention(heads=1, groups=1, head_dim=1)
    kind = LayerKind(mixer=any_heads, feed_forward=Dense(width=1))
    (layer,) = block_spec([kind]).layer_specs
    attention = layer.submodules.self_attention.submodules
    return {
        "attention": _attention(name(attention.core_attention), dtype),
        "linear": name(attention.linear_qkv),
        # Transformer Engine computes the norm in the linear layer that follows.
        "norm": name(
            attention.linear_qkv
            if name(layer.submodules.input_layernorm).endswith("IdentityOp")
            else layer.submodules.input_layernorm
        ),
        "optimizer": name(optimizer.Adam),
        "gradient accumulation": _wgrad(),
    }


def attention_note(dtype: str = "bfloat16") -> str:
    """Why an installed Transformer Engine does not compute attention on this GPU, with a remedy;
    empty if it does, and without a GPU or Transformer Engine.
    """
    import torch

    from ctrl_megatron.models.attention_kernel import (
        attention_kernel_on,
        why_not_transformer_engine,
    )
    from ctrl_megatron.models.layer_spec import has_transformer_engine

    if not torch.cuda.is_available() or not has_transformer_engine():
        return ""
    device, kind = torch.device("cuda", torch.cuda.current_device()), getattr(torch, dtype)
    if attention_kernel_on(device, kind) == "transformer_engine":
        return ""
    return why_not_transformer_engine(torch.cuda.get_device_capability(device), kind)


def kernels_line(*, on_gpu: bool, dtype: str = "bfloat16") -> str:
    """``kernel_providers`` as a line for the start of a run, with a remedy for slow kernels on a
    GPU."""
    from ctrl_megatron.models.layer_spec import has_transformer_engine

    line = "; ".join(
        f"{kernel}: {provider}" for kernel, provider in kernel_providers(dtype).items()
    )
    if note := attention_note(dtype):
        line += f"; {note}"
    if on_gpu and not has_transformer_engine():
        line += "; slower than Transformer Engine's, install requirements/cuda.txt (make env-cuda)"
    return line


def _attention(built: str, dtype: str) -> str:
    """The name of the attention kernel; the model's class ``built`` may call a kernel of torch."""
    import torch

    from ctrl_megatron.models.attention_kernel import attention_kernel_on

    if not torch.cuda.is_available():
        return built
    device = torch.device("cuda", torch.cuda.current_device())
    return {
        "transformer_engine": built,
        "varlen": "torch.nn.attention.varlen.varlen_attn",
        "masked": "torch.nn.functional.scaled_dot_product_attention, segment by segment",
    }[attention_kernel_on(device, getattr(torch, dtype))]


def _wgrad() -> str:
    """The library that adds a weight's gradient to those of earlier micro-batches."""
    from megatron.core.tensor_parallel import layers

    from ctrl_megatron.models.layer_spec import (
        has_transformer_engine,
        supports_gradient_accumulation_fusion,
    )

    if has_transformer_engine():
        return "transformer_engine (inside its linear layers)"
    if supports_gradient_accumulation_fusion():
        return layers.fused_weight_gradient_mlp_cuda.__name__
    return "torch, in a pass of its own"

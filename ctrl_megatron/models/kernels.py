"""Which library computes what: read off the classes that a model is built from on this machine."""

from __future__ import annotations

from typing import Any


def providers() -> dict[str, str]:
    """Kernel -> ``module.Class`` that computes it; imports Megatron-Core."""
    from megatron.core import optimizer
    from megatron.core.transformer.spec_utils import ModuleSpec

    from ctrl_megatron.models.layer_spec import block_spec

    def name(part: Any) -> str:
        kind: Any = part.module if isinstance(part, ModuleSpec) else part
        return f"{kind.__module__}.{kind.__qualname__}"

    block = block_spec(1, qk_norm=False)
    layer = block.layer_specs[0] if hasattr(block, "layer_specs") else block
    attention = layer.submodules.self_attention.submodules
    return {
        "attention": name(attention.core_attention),
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


def kernels_line(*, on_gpu: bool) -> str:
    """``providers`` as a line for the start of a run; with a remedy where a GPU has slow ones."""
    from ctrl_megatron.models.layer_spec import has_transformer_engine

    line = "; ".join(f"{kernel}: {provider}" for kernel, provider in providers().items())
    if on_gpu and not has_transformer_engine():
        line += "; slower than Transformer Engine's, install requirements/cuda.txt (make env-cuda)"
    return line


def _wgrad() -> str:
    """Who adds a weight's gradient to those of earlier micro-batches."""
    from megatron.core.tensor_parallel import layers

    from ctrl_megatron.models.layer_spec import adds_weight_gradients, has_transformer_engine

    if has_transformer_engine():
        return "transformer_engine (inside its linear layers)"
    if adds_weight_gradients():
        return layers.fused_weight_gradient_mlp_cuda.__name__
    return "torch, in a pass of its own"

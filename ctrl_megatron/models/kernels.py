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


def _wgrad() -> str:
    """Who adds a weight's gradient inside its matrix product."""
    from megatron.core.tensor_parallel import layers

    from ctrl_megatron.models.layer_spec import has_transformer_engine

    if has_transformer_engine():
        return "transformer_engine (inside its linear layers)"
    fused = getattr(layers, "_grad_accum_fusion_available", False)
    return "fused_weight_gradient_mlp_cuda (Apex)" if fused else "torch, in a pass of its own"

"""Transformer Engine's place taken by plain torch: its parameter names, its optimizer's state and
its variable-length attention.

Megatron's own spec function builds the layers; what differs from the local spec is what the real
library differs in: norms fused into the linear layer behind them, linear layers that add to
``main_grad`` themselves, and an Adam that counts steps in its groups and keeps nothing but moments
per parameter (read off Transformer Engine 2.9 to 2.11).
"""

from __future__ import annotations

import importlib.machinery
import itertools
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

SPECS = {"local": False, "te": True}
"""Name -> whether layers and optimizer are Transformer Engine's."""


class FusedAdam(torch.optim.Optimizer):
    """The state of ``transformer_engine.pytorch.optimizers.FusedAdam``, stepped in plain torch."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        assert adam_w_mode and not capturable
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {"bias_correction": True, **defaults})

    def state_dict(self) -> dict[str, Any]:
        """Like the original: another name among the moments is an error."""
        for state in self.state.values():
            unknown = set(state) - {"exp_avg", "exp_avg_sq"}
            if unknown:
                raise KeyError(unknown.pop())
        return super().state_dict()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One step of AdamW; an empty group does not count it."""
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            first, second = group["betas"]
            for param in group["params"]:
                if not (state := self.state[param]):
                    state["exp_avg"] = torch.zeros_like(param, dtype=torch.float32)
                    state["exp_avg_sq"] = torch.zeros_like(param, dtype=torch.float32)
                if param.grad is None:
                    continue
                assert set(state) == {"exp_avg", "exp_avg_sq"} and not param.grad.is_sparse
                assert param.dtype in (torch.float16, torch.bfloat16, torch.float32)
                assert {moment.dtype for moment in state.values()} == {torch.float32}
                mean, square = state["exp_avg"], state["exp_avg_sq"]
                mean.lerp_(param.grad, 1 - first)
                square.mul_(second).addcmul_(param.grad, param.grad, value=1 - second)
                root = (square / (1 - second ** group["step"])).sqrt().add_(group["eps"])
                update = mean / (1 - first ** group["step"]) / root
                param.sub_(group["lr"] * (update + group["weight_decay"] * param))


class WgradKernel:
    """The function that Megatron's linear layers call to add a weight's gradient in its product."""

    @staticmethod
    def wgrad_gemm_accum_fp32(
        inputs: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor
    ) -> None:
        """inputs (T, I), grad_output (T, O); main_grad (O, I) float32 grows by their product."""
        assert main_grad.dtype == torch.float32 and inputs.ndim == grad_output.ndim == 2
        main_grad.addmm_(grad_output.t().float(), inputs.float())


def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> torch.Tensor:
    """The signature of ``torch.nn.attention.varlen.varlen_attn``, computed in float64.

    query (Tq, A, D), key and value (Tk, G, D); causal masks are aligned at the bottom right, as in
    flash attention since 2.1 and Transformer Engine's ``padding_causal_bottom_right``.
    """
    assert window_size in ((-1, 0), (-1, -1)) and cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert enable_gqa == (query.shape[1] != key.shape[1])
    queries, keys = cu_seq_q.tolist(), cu_seq_k.tolist()
    assert len(queries) == len(keys) and (queries[-1], keys[-1]) == (len(query), len(key))
    times, outputs = query.shape[1] // key.shape[1], []
    pairs = zip(itertools.pairwise(queries), itertools.pairwise(keys), strict=True)
    for (a, b), (c, d) in pairs:
        assert b - a <= max_q and d - c <= max_k and b - a <= d - c
        k, v = (x[c:d].double().repeat_interleave(times, dim=1) for x in (key, value))
        scores = torch.einsum("qad,kad->aqk", query[a:b].double(), k)
        scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
        seen = torch.ones(b - a, d - c, dtype=torch.bool)
        if window_size[1] == 0:
            seen = seen.tril((d - c) - (b - a))
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("aqk,kad->qad", weights, v).to(query.dtype))
    return torch.cat(outputs)


class DotProductAttention(torch.nn.Module):
    """The interface of ``megatron.core.extensions.transformer_engine.TEDotProductAttention``, with
    the assertions of Transformer Engine 2.11 on all that it is given but the device."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__()
        heads, groups, own = config.num_attention_heads, config.num_query_groups, config.kv_channels
        assert attention_type == "self" and heads % groups == 0
        assert config.context_parallel_size == 1 and config.window_size is None
        size = (
            config.tensor_model_parallel_size if pg_collection is None else pg_collection.tp.size()
        )
        self.num_gqa_groups_per_partition = groups // size
        both = k_channels is not None and v_channels is not None
        # Attributes of Transformer Engine's, which Megatron 0.19 changes for values it has padded.
        self.hidden_size_per_attention_head_k = k_channels if both else own
        self.hidden_size_per_attention_head_v = v_channels if both else own
        self.scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        num_splits: int | None = None,
    ) -> torch.Tensor:
        """query (Tq, A, D), key and value (Tk, G, D); returns (Tq, A * D)."""
        assert attention_mask is None and attention_bias is None and num_splits is None
        assert query.ndim == key.ndim == value.ndim == 3
        assert query.dtype == key.dtype == value.dtype and key.shape[:-1] == value.shape[:-1]
        assert query.shape[-1] == key.shape[-1]
        assert key.shape[-1] == self.hidden_size_per_attention_head_k
        assert value.shape[-1] == self.hidden_size_per_attention_head_v
        assert key.shape[-2] == self.num_gqa_groups_per_partition, (
            f"Keys and values must have num_gqa_group = {self.num_gqa_groups_per_partition} heads! "
            f"Found {key.shape[-2]}."
        )
        packed = packed_seq_params
        # Megatron passes all fields, of which Transformer Engine takes all but the last two.
        assert packed.qkv_format == "thd" and packed.cp_group is packed.local_cp_size is None
        # With lengths of padded rows it looks for padding between them.
        assert packed.cu_seqlens_q_padded is packed.cu_seqlens_kv_padded is None
        bounds = packed.cu_seqlens_q, packed.cu_seqlens_kv
        assert all(x.ndim == 1 and x.dtype == torch.int32 for x in bounds)
        assert bounds[0].shape == bounds[1].shape
        # Megatron makes padding_causal of causal, which is aligned at the top left.
        mask = attn_mask_type.name
        assert mask in ("causal", "padding", "padding_causal_bottom_right")
        if mask == "causal":
            assert torch.equal(*bounds)
        longest = packed.max_seqlen_q, packed.max_seqlen_kv
        return varlen_attn(
            query,
            key,
            value,
            *bounds,
            *longest,
            scale=self.scale,
            window_size=(-1, -1) if mask == "padding" else (-1, 0),
            enable_gqa=query.shape[1] != key.shape[1],
        ).flatten(1)


@contextmanager
def installed(active: bool = True) -> Iterator[None]:
    """Megatron and the package find Transformer Engine in the block, or not if not ``active``.

    A model must be used in the kind of block that it was built in.
    """
    if not active:
        yield
        return
    import megatron.core.optimizer as optimizer
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.tensor_parallel import layers
    from megatron.core.transformer import multi_latent_attention, transformer_block

    from ctrl_megatron.models import attention_kernel
    from ctrl_megatron.models.layer_spec import RMSNorm

    class Linear:
        """Adds a weight's gradient to its ``main_grad`` itself, once that is enabled."""

        gradient_accumulation_fusion: bool

        def __init__(self, *sizes: Any, **options: Any) -> None:
            assert not options.get("gather_output") and options.get("input_is_parallel", True)
            super().__init__(*sizes, **options)

        @property
        def fuse_wgrad_accumulation(self) -> bool:
            return self.gradient_accumulation_fusion

        @fuse_wgrad_accumulation.setter
        def fuse_wgrad_accumulation(self, on: bool) -> None:
            self.gradient_accumulation_fusion = on

    class ColumnParallelLinear(Linear, layers.ColumnParallelLinear): ...

    class RowParallelLinear(Linear, layers.RowParallelLinear): ...

    class LayerNormColumnParallelLinear(ColumnParallelLinear):
        def __init__(self, input_size: int, *sizes: Any, config: Any, **options: Any) -> None:
            assert not options.get("is_expert") and not options.get("skip_weight_param_allocation")
            super().__init__(input_size, *sizes, config=config, **options)
            norm = RMSNorm(config, input_size, eps=config.layernorm_epsilon)
            self.layer_norm_weight = norm.weight
            self.normalise = norm.forward

        def forward(self, hidden: torch.Tensor, *rest: Any, **options: Any) -> Any:
            return super().forward(self.normalise(hidden), *rest, **options)

    class Provider(LocalSpecProvider):
        def fuse_layernorm_and_linear(self) -> bool:
            return True

        def column_parallel_layer_norm_linear(self) -> type:
            return LayerNormColumnParallelLinear

        def linear(self) -> type:
            return multi_latent_attention.Linear

        def column_parallel_linear(self) -> type:
            return ColumnParallelLinear

        def row_parallel_linear(self) -> type:
            return RowParallelLinear

        def layer_norm(
            self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False
        ) -> type:
            return RMSNorm

        def core_attention(self) -> type:
            return DotProductAttention

    module = types.ModuleType("transformer_engine")
    module.__spec__ = importlib.machinery.ModuleSpec("transformer_engine", None)
    changes: list[tuple[Any, dict[str, Any]]] = [
        (gpt_layer_specs, {"TESpecProvider": Provider}),
        (transformer_block, {"LayerNormImpl": RMSNorm}),
        (attention_kernel, {"attention_kernel_on": lambda device, dtype: "transformer_engine"}),
        (layers, {"fused_weight_gradient_mlp_cuda": WgradKernel}),
        (optimizer, {"Adam": FusedAdam, "USING_PYTORCH_OPTIMIZER": False}),
        (
            distrib_optimizer,
            {"Adam": FusedAdam, "HAVE_APEX_OR_TE": True, "USING_TE_OPTIMIZER": True},
        ),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, module.__name__, module)
        for owner, attributes in changes:
            for name, value in attributes.items():
                patch.setattr(owner, name, value, raising=False)
        yield

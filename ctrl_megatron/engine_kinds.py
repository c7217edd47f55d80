"""The rollout engines by name, and every fact in which they differ outside of their own files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

EngineName = Literal["vllm", "sglang", "hf", "diffusion"]
_LARGE_GPU = 70 * 2**30
"""Bytes from which on vLLM takes a GPU for one of 80 GB."""
BATCHED_TOKENS = 8192
"""Tokens of one forward pass of a vLLM on GPUs where ``engine_kwargs`` says nothing: what its
server takes there. Its own default for an engine that is embedded, as ours, is 2,048."""
_WITH_DELTA_NETS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe")
"""The families of models with gated delta nets."""
RopeTrait = Literal["whole factor", "short yarn", "dynamic", "attention factor"]
"""What a scaled rotary embedding may have (``models.rope``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    """One engine; the defaults are those of an engine with continuous batching."""

    title: str
    """Its name in sentences."""
    library: str
    """The Python package that must be installed."""
    adapter: str
    """``module:Class`` of our ``Engine``, which its coroutine ``build(spec)`` starts."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the engine's process."""
    joins_calls: bool = True
    """Draws for several calls of ``generate`` together; else it serves them one after another."""
    reserves_cache: bool = True
    """Reserves the memory of its key-value cache when it starts."""
    counts_workspace: bool = True
    """``gpu_memory_utilization`` includes activations and CUDA graphs, not only weights and
    cache."""
    socket_name: int = 0
    """Bytes of the longest name, with the slash before it, of its sockets in the temporary
    directory; 0 without any."""
    tensor_parallel: bool = True
    """Can use several devices, also of several hosts: its adapter then has a coroutine
    ``build_part(spec)``."""
    uses_shared_memory: bool = False
    """Has the data of several workers, and pushed adapters, in /dev/shm, also on a CPU."""
    cpu_width_unit: int | None = None
    """On a CPU its workers' parts of the width of MLPs and experts are multiples of it; None where
    the number of workers must divide the width."""
    denoises: bool = False
    """Generates with masked-diffusion models, and with no others."""
    quantised: bool = True
    """Can compute with weights in 8 bits (``rollout.quantization``)."""
    returns_routes: bool = False
    """Can say which experts its routers chose (``rollout.router_replay``)."""
    adapters: bool = True
    """Can compute adapters beside its weights (``rollout.adapter_push``)."""
    adapts_experts: bool = False
    """Its adapters may be on experts."""
    changes_adapters_while_drawing: bool = False
    """Can change its adapters while completions are drawn."""
    default: bool = False
    """Taken where none is named and none before it is installed."""
    multiplies_latent: bool = True
    """Multiplies the parts of a multi-latent attention when it loads a model, so that they cannot
    be pushed."""
    rearranges_quantised: bool = False
    """Rearranges weights in 8 bits for its kernels, so that they cannot be read back."""
    unread: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """``model_type`` -> the keys of its ``config.json`` that it does not read."""
    cpu_delta_heads: tuple[int, ...] | None = None
    """On a CPU its kernels for gated delta nets are for bfloat16 and for heads of these sizes; None
    where it computes any."""
    rotates_otherwise: Mapping[RopeTrait, str] = field(default_factory=dict)
    """The traits of a rotary embedding with which it would rotate otherwise than the trainer; how,
    and the remedy."""

    def default_max_sequences(self, gpu_memory: int | None) -> int:
        """Sequences that it decodes concurrently where ``max_num_seqs`` says nothing, on a GPU of
        so many bytes; None is a CPU."""
        if gpu_memory is None or not self.reserves_cache:
            return 64
        return 1024 if gpu_memory >= _LARGE_GPU else 256


ENGINES: Mapping[str, EngineKind] = {
    # By the code of vLLM 0.32.
    "vllm": EngineKind(
        title="vLLM",
        library="vllm",
        adapter="ctrl_megatron.rollout.vllm_engine:VllmEngine",
        socket_name=37,
        uses_shared_memory=True,
        environment={
            "VLLM_LOGGING_LEVEL": "INFO",
            "VLLM_NO_USAGE_STATS": "1",
            # ``vllm_worker.SeededSampler`` replaces the sampler of vLLM's first model runner.
            "VLLM_USE_V2_MODEL_RUNNER": "0",
            # Worker groups of one host connect over loopback.
            "VLLM_HOST_IP": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
            # Pinned threads of several engines and trainer ranks would share the same cores.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        },
        default=True,
        rearranges_quantised=True,
        cpu_delta_heads=(64, 128),
        rotates_otherwise={
            "whole factor": "vLLM reads no whole number as factor={factor}; write {decimal}",
            "short yarn": "vLLM ends at original_max_position_embeddings={original} times "
            "factor={factor:g}, before max_position_embeddings={context}; lower "
            "max_position_embeddings",
        },
    ),
    # By the code of SGLang 0.5.23.
    "sglang": EngineKind(
        title="SGLang",
        library="sglang",
        adapter="ctrl_megatron.rollout.sglang_engine:SglangEngine",
        socket_name=12,
        # Scheduler processes of one host connect over loopback.
        environment={"GLOO_SOCKET_IFNAME": "lo"},
        counts_workspace=False,
        returns_routes=True,
        cpu_width_unit=32,
        # They are in sgl-kernel, of which no build for CPUs is published.
        cpu_delta_heads=(),
        quantised=False,
        unread={
            "qwen3_moe": ("tie_word_embeddings", "mlp_only_layers or decoder_sparse_step"),
            "mixtral": ("head_dim",),
            **dict.fromkeys(_WITH_DELTA_NETS, ("layer_types",)),
            # It would start the whole model, with what reads pictures.
            **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), ("layer_types", "text_config alone")),
        },
        rotates_otherwise={
            "dynamic": "SGLang stretches a dynamic rope at every length, the trainer only beyond "
            "max_position_embeddings; use vllm or hf",
            "attention factor": "SGLang does not read the attention_factor of yarn; use vllm or hf",
        },
    ),
    "hf": EngineKind(
        title="transformers",
        library="transformers",
        default=True,
        multiplies_latent=False,
        adapts_experts=True,
        changes_adapters_while_drawing=True,
        adapter="ctrl_megatron.rollout.hf_engine:HfEngine",
        returns_routes=True,
        joins_calls=False,
        reserves_cache=False,
        tensor_parallel=False,
    ),
    "diffusion": EngineKind(
        title="transformers",
        library="transformers",
        adapter="ctrl_megatron.rollout.hf_diffusion:DiffusionEngine",
        joins_calls=False,
        reserves_cache=False,
        tensor_parallel=False,
        denoises=True,
        adapters=False,
    ),
}

assert tuple(ENGINES) == get_args(EngineName)

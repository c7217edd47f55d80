"""Keys of ``actor_rollout_ref.rollout`` and the group ``actor_rollout_ref`` itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from ctrl_megatron.config.actor import Actor, Proxy, Ref

Dtype = Literal["bfloat16", "float16", "float32"]
"""Names of parameter types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """The inference engine and how it samples."""

    name: Literal["vllm", "sglang", "hf"] = "hf"
    """Engine; hf is transformers' own generation, embedded."""
    n: int = 8
    """Critiques per prompt (the group size of GRPO)."""
    temperature: float = 1.0
    """Sampling temperature of critiques; log-probs are taken at the same temperature."""
    top_p: float = 1.0
    """Nucleus of the critique sampling."""
    top_k: int = -1
    """Keep the k likeliest tokens; -1 keeps all."""
    tensor_model_parallel_size: int = 1
    """Devices per engine."""
    gpu_memory_utilization: float = 0.5
    """Share of device memory that the engine may take."""
    max_model_len: int | None = None
    """Longest sequence of the engine; None for what prompts, critiques and revisions need."""
    revision_max_tokens: int = 1024
    """Longest revision, in tokens."""
    revision_n: int = 1
    """Revisions per critique."""
    seed: int = 0
    """Base seed of the sampling."""
    dtype: Dtype | None = None
    """Parameter type inside the engine; None takes model.dtype; float16 is refused so far."""
    max_num_seqs: int = 64
    """Sequences that the engine decodes at the same time."""
    kv_cache_gib: float = 2.0
    """Size of the key-value cache where the engine runs on a CPU, in GiB."""
    enforce_eager: bool = True
    """Do not capture graphs."""
    free_cache_engine: bool = True
    """Release the engine's device memory, weights and cache, while the trainer computes; nothing
    to release on a CPU."""
    startup_timeout: float = 600.0
    """Seconds until an engine that does not answer counts as failed."""
    threads: int | None = None
    """CPU threads of the engine; None lets the engine decide."""
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    """Passed through to the engine's constructor."""
    update_bucket_megabytes: int = 128
    """Size of one bucket of a weight update, in 2**20 bytes."""
    log_prob_max_token_len_per_gpu: int = 16384
    """Token budget of a micro-batch when log-probs are recomputed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The files the actor starts from."""

    path: str = ""
    """Hugging Face directory of the actor (required)."""
    tokenizer_path: str | None = None
    """Directory of the tokenizer; None for model.path."""
    dtype: Dtype = "bfloat16"
    """Type of the parameters in compute; the master copy is fp32; float16 is refused so far."""

    @property
    def tokenizer(self) -> str:
        """Directory of the tokenizer that applies."""
        return self.tokenizer_path or self.path


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorRolloutRef:
    """The policy, its reference, the reviser, and the engine that speaks for them."""

    hybrid_engine: bool = True
    """Trainer and engine share the devices."""
    model: Model = field(default_factory=Model)
    proxy: Proxy = field(default_factory=Proxy)
    actor: Actor = field(default_factory=Actor)
    ref: Ref = field(default_factory=Ref)
    rollout: Rollout = field(default_factory=Rollout)

    @property
    def proxy_path(self) -> str:
        """Files of the frozen reviser."""
        return self.proxy.model.path or self.model.path

    @property
    def ref_path(self) -> str:
        """Files of the frozen reference."""
        return self.ref.model.path or self.model.path

    @property
    def rollout_dtype(self) -> Dtype:
        """Parameter type inside the engine."""
        return self.rollout.dtype or self.model.dtype

    @property
    def ref_token_budget(self) -> int:
        """Token budget of the reference's micro-batches."""
        own = self.ref.log_prob_max_token_len_per_gpu
        return self.rollout.log_prob_max_token_len_per_gpu if own is None else own

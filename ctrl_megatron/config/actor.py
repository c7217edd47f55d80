"""Keys of ``actor_rollout_ref.actor`` and ``.ref``: the trained policy and the frozen reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

KlName = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"]
"""Estimators of the KL divergence; k1, k2, k3 are other names of kl, mse, low_var_kl."""
KlPlusName = Literal["kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+"]
KlLossName = Literal[KlName, KlPlusName]
"""The same, and forms with that estimator's value and k2's gradient."""
LossAggregation = Literal[
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]
"""How per-token losses become one number."""
Schedule = Literal["constant", "cosine"]
"""How the learning rate moves after the warm-up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Optim:
    """AdamW and its learning-rate schedule."""

    lr: float = 1e-6
    """Peak learning rate."""
    weight_decay: float = 0.01
    """Decoupled weight decay of matrices."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the two moments."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    lr_warmup_steps: int = 0
    """Optimizer steps of linear warm-up; excludes lr_warmup_steps_ratio."""
    lr_warmup_steps_ratio: float = 0.0
    """Warm-up as a share of all optimizer steps; excludes lr_warmup_steps."""
    lr_scheduler_type: Schedule = "constant"
    """Shape of the schedule after the warm-up."""
    min_lr_ratio: float = 0.0
    """Where the cosine ends, as a share of lr."""
    total_training_steps: int | None = None
    """Length of the schedule in optimizer steps; None derives it from the trainer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Megatron:
    """How Megatron-Core holds and splits the model."""

    tensor_model_parallel_size: int = 1
    """Ranks that share one layer."""
    pipeline_model_parallel_size: int = 1
    """Ranks that share the stack of layers."""
    virtual_pipeline_model_parallel_size: int | None = None
    """Model chunks per pipeline rank (interleaved schedule); None for one."""
    sequence_parallel: bool = False
    """Split norms and residuals over the tensor-parallel ranks."""
    use_distributed_optimizer: bool = True
    """Shard optimizer state over the data-parallel ranks."""
    param_offload: bool = False
    """Keep the frozen reference's parameters in host memory while it is not used; the trained
    actor's always stay on the device."""
    optimizer_offload: bool = False
    """Keep the actor's optimizer state in host memory while the engine speaks."""
    grad_offload: bool = False
    """Free the actor's gradient buffers while the engine speaks."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """Recompute activations in the backward pass: whole layers, attention only, or nothing."""
    recompute_num_layers: int = 1
    """Layers per recomputed block when the granularity is full."""
    logprob_chunk_size: int = 1024
    """Tokens whose fp32 logits exist at the same time."""
    seed: int = 42
    """Seed of Megatron's random states."""
    override_transformer_config: dict[str, Any] = field(default_factory=dict)
    """Passed through to Megatron's TransformerConfig."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """The policy update."""

    strategy: Literal["megatron"] = "megatron"
    """Training backend."""
    ppo_mini_batch_size: int = 256
    """Prompts per optimizer step, over all ranks."""
    ppo_epochs: int = 1
    """Passes over the batch of one training step."""
    ppo_max_token_len_per_gpu: int = 16384
    """Token budget of a packed micro-batch."""
    clip_ratio: float = 0.2
    """PPO clip range of the sides whose key below is None."""
    clip_ratio_low: float | None = None
    """Clip range below 1; 0 is a range, None takes clip_ratio."""
    clip_ratio_high: float | None = None
    """Clip range above 1; 0 is a range, None takes clip_ratio."""
    clip_ratio_c: float = 3.0
    """Dual clip: upper bound of the ratio for negative advantages."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    use_kl_loss: bool = False
    """Put the KL to the reference into the loss (excludes algorithm.use_kl_in_reward)."""
    kl_loss_coef: float = 0.001
    """Weight of the KL in the loss."""
    kl_loss_type: KlLossName = "low_var_kl"
    """Estimator of the KL in the loss."""
    loss_agg_mode: LossAggregation = "token-mean"
    """How per-token losses become one number."""
    policy_loss: str = "vanilla"
    """Registered name of the policy loss."""
    clip_cov_ratio: float = 0.0002
    """Share of tokens that clip_cov takes out of the gradient."""
    clip_cov_lb: float = 1.0
    """Smallest covariance that clip_cov may choose."""
    clip_cov_ub: float = 5.0
    """Largest covariance that clip_cov may choose."""
    kl_cov_ratio: float = 0.0002
    """Share of tokens, those of largest covariance, that kl_cov penalises."""
    ppo_kl_coef: float = 1.0
    """Weight of kl_cov's penalty."""
    grad_clip: float = 1.0
    """Largest global gradient norm."""
    optim: Optim = field(default_factory=Optim)
    megatron: Megatron = field(default_factory=Megatron)

    @property
    def clip_low(self) -> float:
        """Clip range below 1 that applies."""
        return self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low

    @property
    def clip_high(self) -> float:
        """Clip range above 1 that applies."""
        return self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """A Hugging Face directory that may be left out."""

    path: str | None = None
    """Hugging Face directory; None for the files the actor starts from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ref:
    """The frozen model that anchors the KL."""

    model: ModelFiles = field(default_factory=ModelFiles)
    log_prob_max_token_len_per_gpu: int | None = None
    """Token budget of its micro-batches; None takes rollout.log_prob_max_token_len_per_gpu."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proxy:
    """The frozen generator that writes the revisions."""

    model: ModelFiles = field(default_factory=ModelFiles)

"""Keys of ``actor_rollout_ref``: the actor, its reference, the proxy, the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from ctrl_megatron.config.keys import (
    ABOVE_0,
    ABOVE_1,
    AT_LEAST_0,
    AT_LEAST_1,
    COUNT_OR_MINUS_1,
    DECAY,
    SHARE,
    SOME_SHARE,
    Condition,
    Range,
    Secret,
    group,
    key,
    when,
)
from ctrl_megatron.engine_kinds import ENGINES, EngineName
from ctrl_megatron.types import StrategyName

KlName = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"]
"""Estimators of the KL divergence; k1, k2, k3 are other names of kl, mse, low_var_kl."""
KlPlusName = Literal["kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+"]
KlLossName = Literal[KlName, KlPlusName]
"""The same, and forms with the estimator's value and k2's gradient."""
LossAggregation = Literal[
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]
"""Aggregations of per-token losses."""
Schedule = Literal["constant", "cosine"]
"""Schedules of the learning rate after the warm-up."""
Dtype = Literal["bfloat16", "float32"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
"""Types of parameters; float16 would need a loss scale."""
ProxyKind = Literal["shared", "engine", "api", "agent1"]
"""The proxy: a model on the actor's engines, on engines of its own, or on servers; or the second
policy."""

CTRL_PIPELINE = "ctrl_megatron.pipeline:ctrl_pipeline"
"""The value of `dag.custom_pipeline_fn` for CTRL's step, which is also used if the key is unset."""
CO_TRAIN_PIPELINE = "ctrl_megatron.pipeline:co_train_pipeline"
"""The value of `dag.custom_pipeline_fn` for a critic and a solver, a policy each."""
CRITIQUE_PIPELINES = (
    *(None, CTRL_PIPELINE, CO_TRAIN_PIPELINE),
    "ctrl_megatron.pipeline:ctrl_rounds_pipeline",
)
"""The values for the built-in pipelines of critiques and revisions."""
GRPO_PIPELINE = "ctrl_megatron.pipeline:grpo_pipeline"
"""The value of `dag.custom_pipeline_fn` for GRPO on completions."""
COUPLED_GRPO_PIPELINE = "ctrl_megatron.pipeline:coupled_grpo_pipeline"
"""The value of `dag.custom_pipeline_fn` for GRPO on a masked-diffusion model's completions."""
ENVIRONMENT_PIPELINES = (
    "ctrl_megatron.pipeline:environment_pipeline",
    "ctrl_megatron.pipeline:embodied_srpo_pipeline",
)
"""The built-in pipelines whose samples are scored by an environment of the user's."""
EPISODE_PIPELINES = ("ctrl_megatron.pipeline:repair_pipeline", *ENVIRONMENT_PIPELINES)
"""The built-in pipelines whose samples may have several turns."""
COMPLETION_PIPELINES = (
    GRPO_PIPELINE,
    "ctrl_megatron.pipeline:ppo_pipeline",
    "ctrl_megatron.pipeline:dapo_pipeline",
    COUPLED_GRPO_PIPELINE,
    *EPISODE_PIPELINES,
)
"""The built-in pipelines of completions without critiques."""
BUILT_IN_PIPELINES = (*CRITIQUE_PIPELINES, *COMPLETION_PIPELINES)
"""The values for all pipelines of the package."""
REVISIONS = Condition(
    ("dag.custom_pipeline_fn",),
    lambda pipeline: pipeline not in COMPLETION_PIPELINES,
    "{0}=null or a pipeline of your own",
)
"""The condition of keys that only a step with revisions reads."""
REFERENCE = Condition(
    (
        *("actor_rollout_ref.actor.use_kl_loss", "algorithm.use_kl_in_reward"),
        *("algorithm.distillation.teacher", "algorithm.distillation.coef"),
    ),
    lambda in_loss, in_reward, teacher, coef: (
        in_loss or in_reward or (teacher == "reference" and coef > 0)
    ),
    "{0}=true, {1}=true or {2}=reference",
)
"""The condition of keys of the frozen reference."""
_AUTOREGRESSIVE = Condition(
    ("dag.custom_pipeline_fn",),
    lambda pipeline: pipeline != COUPLED_GRPO_PIPELINE,
    "another {0}",
)
_MASKED = Condition(
    ("dag.custom_pipeline_fn",),
    lambda pipeline: pipeline == COUPLED_GRPO_PIPELINE or pipeline not in BUILT_IN_PIPELINES,
    "{0}=" + COUPLED_GRPO_PIPELINE,
)
ADAPTERS = Condition(
    ("actor_rollout_ref.model.lora_rank", "critic.model.lora_rank"),
    lambda actor, value: bool(actor or value),
    "{0} of 1 or more",
)
"""The condition of keys of adapters."""
POLICY_LOSSES = (
    *("vanilla", "gspo", "cpgd", "gpg", "cispo", "clip_cov", "kl_cov", "geo_mean", "sapo"),
)


def _losses(*names: str) -> Condition:
    return when("actor_rollout_ref.actor.policy_loss", *names, known=POLICY_LOSSES)


_CLIPPED = _losses("vanilla", "gspo", "cpgd", "cispo", "clip_cov", "geo_mean")
_ONE_SIDE = Condition(
    (".clip_ratio_low", ".clip_ratio_high"),
    lambda low, high: low is None or high is None,
    "{0}=null or {1}=null",
)
_AHEAD = Condition((".staleness",), lambda steps: steps > 0, "{0} above 0")
_SAMPLES = Range(
    "greater than 0; at 0, which is greedy, all critiques of a prompt are equal", ABOVE_0.holds
)
_SYNCED = Condition(
    (".sync_steps", ".sync_at"), lambda steps, at: bool(steps or at), "{0} of 1 or more, or {1}"
)
_CACHING = when(".name", *(name for name, kind in ENGINES.items() if kind.reserves_cache))


@dataclass(frozen=True, slots=True, kw_only=True)
class Optim:
    """AdamW and its learning-rate schedule, which ends with the last training step."""

    lr: float = key(1e-6, ABOVE_0)
    """Peak learning rate."""
    weight_decay: float = key(0.01, AT_LEAST_0, stage="both")
    """Decoupled weight decay of matrices."""
    betas: tuple[float, float] = key((0.9, 0.999), DECAY, stage="both")
    """Decay of the two moments."""
    eps: float = key(1e-8, ABOVE_0, stage="both")
    """Added to the root of the second moment."""
    lr_warmup_steps_ratio: float = key(0.0, SHARE)
    """Linear warm-up as a share of all optimizer steps."""
    lr_scheduler_type: Schedule = "constant"
    """Shape of the schedule after the warm-up."""
    min_lr_ratio: float = key(0.0, SHARE, read=when(".lr_scheduler_type", "cosine"))
    """End of the cosine, as a share of lr."""


_WHOLE_LAYERS = when(".recompute_granularity", "full")
_BY_MEGATRON = when("actor_rollout_ref.actor.strategy", "megatron")


@dataclass(frozen=True, slots=True, kw_only=True)
class Megatron:
    """The layout of the models in Megatron-Core."""

    tensor_model_parallel_size: int = key(1, AT_LEAST_1)
    """Ranks that share one layer."""
    context_parallel_size: int = key(1, AT_LEAST_1)
    """Ranks that share the tokens of the same rows, for long sequences; they have equal weights."""
    pipeline_model_parallel_size: int = key(1, AT_LEAST_1)
    """Ranks that share the stack of layers; the ends have one layer less if it must be uneven."""
    virtual_pipeline_model_parallel_size: int | None = key(None, AT_LEAST_1)
    """Model chunks per pipeline rank (interleaved schedule); None for one."""
    expert_model_parallel_size: int = key(1, AT_LEAST_1)
    """Ranks over which the experts of a layer are spread; it may take in data-parallel ranks."""
    expert_tensor_parallel_size: int | None = key(None, AT_LEAST_1)
    """Ranks that share one expert; None for tensor_model_parallel_size, as in Megatron."""
    sequence_parallel: bool = False
    """Split norms and residuals over the tensor-parallel ranks."""
    use_distributed_optimizer: bool = True
    """Shard optimizer state over the data-parallel ranks."""
    moe_aux_loss_coeff: float = key(0.0, AT_LEAST_0)
    """Weight of the loss that spreads tokens evenly over the experts; 0, as usual in RL, for none.
    It replaces config.json's router_aux_loss_coef, which is not read."""
    moe_z_loss_coeff: float = key(0.0, AT_LEAST_0)
    """Weight of the squared log-sum-exp of the routers' logits, which keeps them small."""
    moe_router_bias_update_rate: float = key(0.0, AT_LEAST_0)
    """Change per update of the biases by which DeepSeek-V3's routers balance their experts; 0
    leaves them as the model's directory has them. Megatron's default is 0.001."""
    override_transformer_config: dict[str, Any] = key({})
    """Fields of Megatron's TransformerConfig that no key of ours sets; cluster.md lists them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadAndRecompute:
    """Where the parts of the models are stored, and what is computed again. These keys were once
    in ``actor_rollout_ref.actor.megatron``, and may be written so."""

    param_offload: bool = key(False, stage="rl")
    """Keep parameters in host memory: the reference's while unused, the others' while the engine
    generates."""
    optimizer_offload: bool = key(False, stage="rl")
    """Keep optimizer states in host memory while the engine generates."""
    optimizer_cpu_offload: bool = key(False)
    """Keep optimizer states in host memory always. During a step they visit the device a part at a
    time, which takes seconds per step and leaves the results as they are."""
    grad_offload: bool = key(False, stage="rl")
    """Free the gradient buffers while the engine generates."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """Recompute activations in the backward pass: whole layers, attention only, or nothing."""
    recompute_num_layers: int = key(
        1, AT_LEAST_1, read=(when(".recompute_granularity", "full"), _BY_MEGATRON)
    )
    """Layers per recomputed block."""
    logprob_chunk_size: int = key(1024, AT_LEAST_1)
    """Tokens whose fp32 logits exist at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpConfig:
    """How ranks share the models with ``actor_rollout_ref.actor.strategy=fsdp``."""

    fsdp_size: int = key(
        -1,
        COUNT_OR_MINUS_1,
        read=when("actor_rollout_ref.actor.strategy", "fsdp"),
        stage="both",
    )
    """Consecutive ranks that share one copy of every model; several copies are hybrid sharding.
    -1: all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """The policy update; the value model's update uses these keys unless ``critic`` has its own."""

    strategy: StrategyName = key("megatron", stage="both")
    """The library that computes the models: Megatron-Core, or transformers' own modules, of any
    family, sharded over all ranks by torch's FSDP2."""
    ppo_mini_batch_size: int = key(256, AT_LEAST_1)
    """Prompts per optimizer step, over all ranks."""
    ppo_epochs: int = key(1, AT_LEAST_1)
    """Passes over the batch of one training step."""
    ppo_max_token_len_per_gpu: int = key(16384, AT_LEAST_1, stage="both")
    """Token budget of a packed micro-batch in the update and in fine-tuning; context ranks share a
    micro-batch of so many tokens each."""
    clip_ratio: float = key(0.2, AT_LEAST_0, read=(_CLIPPED, _ONE_SIDE))
    """PPO clip range of a side whose own key is None."""
    clip_ratio_low: float | None = key(None, AT_LEAST_0, read=_CLIPPED)
    """Clip range below 1; 0 is a range, None takes clip_ratio."""
    clip_ratio_high: float | None = key(None, AT_LEAST_0, read=_CLIPPED)
    """Clip range above 1; 0 is a range, None takes clip_ratio."""
    clip_ratio_c: float | None = key(3.0, ABOVE_1, read=_losses("vanilla"))
    """Dual clip: upper bound of the ratio for negative advantages; None for no bound."""
    entropy_coeff: float = key(0.0, AT_LEAST_0)
    """Weight of the entropy bonus."""
    use_kl_loss: bool = False
    """Put the KL to the reference into the loss (excludes algorithm.use_kl_in_reward)."""
    kl_loss_coef: float = key(0.001, AT_LEAST_0, read=when(".use_kl_loss", True))
    """Weight of the KL in the loss."""
    kl_loss_type: KlLossName = key("low_var_kl", read=when(".use_kl_loss", True))
    """Estimator of the KL in the loss."""
    loss_agg_mode: LossAggregation = "token-mean"
    """Aggregation of per-token losses."""
    policy_loss: str = "vanilla"
    """Registered name of the policy loss."""
    policy_loss_options: dict[str, Any] = field(default_factory=dict)
    """Options of a policy loss of your own: its parameters by name. The options of the built-in
    losses are the other keys of this group."""
    clip_cov_ratio: float = key(0.0002, SHARE, read=_losses("clip_cov"))
    """Share of tokens that clip_cov takes out of the gradient."""
    clip_cov_lb: float = key(1.0, read=_losses("clip_cov"))
    """Smallest covariance that clip_cov may choose."""
    clip_cov_ub: float = key(5.0, read=_losses("clip_cov"))
    """Largest covariance that clip_cov may choose."""
    kl_cov_ratio: float = key(0.0002, SHARE, read=_losses("kl_cov"))
    """Share of tokens, those of largest covariance, that kl_cov penalises."""
    ppo_kl_coef: float = key(1.0, AT_LEAST_0, read=_losses("kl_cov"))
    """Weight of kl_cov's penalty."""
    random_masking: bool = key(True, read=_MASKED)
    """Draw other masks of the coupled scores in every step and pass; false gives a row's sample the
    same masks always."""
    p_mask_prompt: float = key(0.0, DECAY, read=_MASKED)
    """Probability with which the coupled scores mask a token of the prompt."""
    grad_clip: float = key(1.0, ABOVE_0, stage="both")
    """Largest global gradient norm."""
    optim: Optim = group(Optim)
    compute: OffloadAndRecompute = group(OffloadAndRecompute, stage="both")
    megatron: Megatron = group(Megatron, read=_BY_MEGATRON, stage="both")
    fsdp_config: FsdpConfig = group(FsdpConfig, stage="both")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """An optional Hugging Face directory."""

    path: str | None = None
    """Hugging Face directory; None for the directory that the actor starts from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueModelFiles(ModelFiles):
    """The model that the value model starts from."""

    lora_rank: int | None = key(None, AT_LEAST_0)
    """Rank of the value model's adapters, beside which its head is trained; None for the actor's, 0
    trains all weights. Alpha and layers are the actor's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleLayout:
    """The layout of a model on ranks of its own (`placement`); what is not named here is as for the
    actor."""

    tensor_model_parallel_size: int = key(1, AT_LEAST_1)
    """Ranks that share one layer."""
    pipeline_model_parallel_size: int = key(1, AT_LEAST_1)
    """Ranks that share the stack of layers."""


_APART = Condition(("placement.reference",), bool, "{0}=RANKS")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceModel:
    """The reference of the KL and of distillation, which no update changes."""

    model: ModelFiles = group(ModelFiles)
    sync_steps: int | None = key(None, AT_LEAST_1)
    """Training steps after which the reference gets the actor's weights, again and again; None
    never. Checkpoints then have the reference too."""
    sync_at: tuple[int, ...] = key((), AT_LEAST_1)
    """Training steps after which it gets them once, such as the last one of each stage of
    reward.schedule."""
    sync_mix: float = key(1.0, SOME_SHARE, read=_SYNCED)
    """Share of the actor's weights in the reference's new ones; the rest are its own."""
    megatron: RoleLayout = group(RoleLayout, read=_APART)

    @property
    def is_synced(self) -> bool:
        """Whether it gets the actor's weights at some steps."""
        return self.sync_steps is not None or bool(self.sync_at)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Inference engines of one model."""

    name: EngineName = "hf"
    """Engine; hf is transformers' own generation, embedded, and diffusion the sampler of
    masked-diffusion models."""
    python: str | None = None
    """Python interpreter of the engines, if they have a separate environment (make
    env-sglang-cuda); None for the trainer's."""
    tensor_model_parallel_size: int = key(1, AT_LEAST_1)
    """Devices per engine; every host runs as many engines as fit on its devices, and an engine of
    vllm or sglang that needs a multiple of them spans hosts."""
    n_gpus_per_node: int | None = key(None, AT_LEAST_1)
    """GPUs per host that belong to these engines alone, in addition to trainer.n_gpus_per_node;
    on a CPU, engine processes per host, None for one."""
    gpu_memory_utilization: float = key(0.5, SOME_SHARE, read=_CACHING)
    """Share of device memory that the engine may use."""
    max_model_len: int | None = key(None, AT_LEAST_1)
    """Longest sequence of the engine, in tokens; None computes it from prompts, critiques and
    revisions."""
    dtype: Dtype | None = None
    """Parameter type inside the engine; None takes model.dtype."""
    max_num_seqs: int | None = key(None, AT_LEAST_1)
    """Sequences that the engine decodes concurrently; None: 1024 on a GPU of 70 GiB or more, 256 on
    a smaller one, 64 on a CPU and in the engines hf and diffusion."""
    kv_cache_gib: float = key(2.0, ABOVE_0, read=_CACHING)
    """Size of the key-value cache of an engine on a CPU, in GiB."""
    enforce_eager: bool = key(False, read=_CACHING)
    """Do not capture CUDA graphs; no effect on a CPU."""
    threads: int | None = key(None, AT_LEAST_1)
    """CPU threads of the engine; None lets the engine decide."""
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the engine's constructor."""

    def uses_whole_hosts(self, trainer_gpus_per_node: int, hosts: int) -> bool:
        """Whether one engine uses all devices for engines of several of the ``hosts``."""
        each = self.n_gpus_per_node or trainer_gpus_per_node
        spans, rest = divmod(self.tensor_model_parallel_size, each)
        able = spans > 1 and not rest and ENGINES[self.name].tensor_parallel
        return able and hosts % spans == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyServer:
    """Servers of OpenAI's protocol that write the revisions. The variable `OPENAI_API_KEY` is their
    key."""

    base_url: tuple[str, ...] = key((), secret=Secret(instead="set OPENAI_API_KEY"))
    """Address or list of addresses before /chat/completions, usually ending in /v1 (required).
    Requests are dealt to all of them, and a request that one cannot answer goes to the next."""
    model: str = ""
    """Name of the model on the servers (required)."""
    max_concurrency: int = key(32, AT_LEAST_1)
    """Requests that run at the same time on each address, per model copy of the trainer."""
    attempts: int = key(6, AT_LEAST_1)
    """Attempts of a request on each address, with growing pauses between them."""
    timeout: float = key(600.0, ABOVE_0)
    """Seconds until an attempt has failed."""
    request_timeout: float = key(1800.0, ABOVE_0)
    """Seconds for a request on one address, all its attempts and the pauses between them together;
    waiting for other requests of the run does not count. Then the next address is asked."""
    token_budget: int | None = key(None, AT_LEAST_1)
    """Most prompt and revision tokens of a run, per model copy of the trainer; a run that would
    use more ends. None for no limit."""
    extra_body: dict[str, Any] = key({}, secret=Secret(whole=True, instead="set OPENAI_API_KEY"))
    """Further fields of every request. No file of the run has its texts."""
    cache_path: str | None = None
    """SQLite file of revisions by model and request, which runs on a host share; None keeps those
    of the run in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyConfig:
    """The proxy that writes the revisions, frozen unless its kind is agent1, and where it runs."""

    kind: ProxyKind = "shared"
    """shared: on the actor's engines, in turn with the actor, whose shape, tokenizer and chat
    template it has; engine: any model, on engines of its own; api: any model, on servers; agent1:
    the second policy, which learns in the same steps."""
    model: ModelFiles = group(ModelFiles, read=when(".kind", "shared", "engine"))
    keep_in_host_memory: bool = key(True, read=when(".kind", "shared"))
    """Keep the weights in the memory of every host with engines, which read them from there
    whenever they revise; false reads and sends them for every step."""
    engine: EngineConfig = group(EngineConfig, read=when(".kind", "engine"))
    api: ProxyServer = group(ProxyServer, read=when(".kind", "api"))


_VALIDATED = Condition(("data.val_files",), bool, "{0}=FILES")
_VALIDATION_SAMPLES = Condition((".temperature",), bool, "{0} above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class ValKwargs:
    """The draws of validation, with the names that verl gives them."""

    n: int = key(1, AT_LEAST_1, read=_VALIDATION_SAMPLES)
    """Texts per row; with more than one, val/pass@K is reported too."""
    temperature: float = key(0.0, AT_LEAST_0)
    """Temperature; 0 draws the likeliest text."""
    top_p: float = key(1.0, SOME_SHARE, read=_VALIDATION_SAMPLES)
    """Nucleus size."""
    top_k: int = key(-1, COUNT_OR_MINUS_1, read=_VALIDATION_SAMPLES)
    """Sample from the k most likely tokens; -1 samples from all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout(EngineConfig):
    """The inference engines of the actor and how they sample."""

    n: int = key(8, AT_LEAST_1)
    """Critiques per prompt (the group size of GRPO)."""
    temperature: float = key(1.0, _SAMPLES)
    """Sampling temperature of critiques; log-probs are taken at the same temperature."""
    top_p: float = key(1.0, SOME_SHARE)
    """Nucleus size of the critique sampling."""
    top_k: int = key(-1, COUNT_OR_MINUS_1)
    """Sample from the k most likely tokens; -1 samples from all."""
    val_kwargs: ValKwargs = group(ValKwargs, read=_VALIDATED)
    placement: Literal["colocated", "dedicated"] = "colocated"
    """Engines share the trainer's GPUs, or have separate GPUs on the same hosts."""
    revision_max_tokens: int = key(1024, AT_LEAST_1, read=REVISIONS)
    """Longest revision, in tokens."""
    staleness: int = key(0, AT_LEAST_0)
    """Updates by which samples may be behind the weights that train on them: above 0 dedicated
    engines draw the next steps, so many of them, while one trains."""
    update_in_flight: bool = key(False, read=_AHEAD)
    """Push weights after every update, also while completions are drawn, which go on with the new
    weights; false pushes only when nothing is drawn."""
    streaming: bool = True
    """Revise a critique as soon as it is there, if the proxy has engines or servers of its own, and
    judge a revision as soon as it is there; false waits for the whole batch. Results are equal."""
    seed: int = 0
    """Base seed of the sampling."""
    free_cache_engine: bool = key(True, read=when(".placement", "colocated"))
    """Free the engine's weights and cache on the device while the trainer computes."""
    update_bucket_megabytes: int = key(128, AT_LEAST_1)
    """Size of one bucket of a weight update, in 2**20 bytes."""
    weight_transport: str = "shared_memory"
    """Medium that brings weights to the engines: shared_memory; shards, cuda_ipc and nccl, with
    which each worker of an engine gets only its part, through the host's memory, through memory of
    the same device, and between devices; or module:Class of your own."""
    adapter_push: bool | None = key(None, read=ADAPTERS)
    """Send the engines only adapters, which they compute beside the weights of model.path; false
    sends whole weights with the adapters merged into them, and rounded; null sends adapters where
    the engines can take them."""
    quantization: Literal["fp8"] | None = None
    """fp8: engines get linear layers' weights in 8 bits (e4m3, one float32 scale for each block of
    128 x 128); needs algorithm.rollout_correction, as their probabilities differ from the
    trainer's."""
    router_replay: Literal["off", "trainer", "engine"] = "off"
    """Whose choice of experts the update's passes take, in a model that has them: the routers' own,
    that of the old log-probs (R2), or that of the engine that drew the text (R3)."""
    log_prob_max_token_len_per_gpu: int | None = key(None, AT_LEAST_1)
    """Token budget of forward-only micro-batches; None takes actor.ppo_max_token_len_per_gpu."""

    @property
    def engine_sleeps(self) -> bool:
        """Whether engines sleep while the trainer computes."""
        return self.free_cache_engine and self.placement == "colocated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The model directory that the actor starts from."""

    path: str = ""
    """Hugging Face directory of the actor (required)."""
    tokenizer_path: str | None = None
    """Directory of the tokenizer; None for model.path."""
    dtype: Literal["bfloat16", "float32", "auto"] = "bfloat16"
    """Type of the parameters in computation; the master copy is float32. auto is bfloat16 on GPUs
    and, on a CPU, the one with faster products of the model's shapes, measured when the run
    begins."""
    shared_prefix: bool = key(True, read=_AUTOREGRESSIVE)
    """Compute a prompt once for all of its responses in a micro-batch, in every pass."""
    lora_rank: int = key(0, AT_LEAST_0)
    """Rank of adapters (LoRA) that are trained in place of the weights; 0 trains all weights."""
    lora_alpha: float = key(16.0, ABOVE_0, read=ADAPTERS)
    """An adapter's output is multiplied by this number over lora_rank."""
    target_modules: tuple[str, ...] = key(("all-linear",), read=ADAPTERS)
    """Linear layers with adapters, by the last part of their Hugging Face names (q_proj, ...);
    all-linear for every one of a decoder layer."""
    experts_shared_outer_loras: bool = key(False, read=ADAPTERS)
    """The experts of a layer share A of gate and up projection and B of the down projection; false
    gives each expert all matrices of its own."""

    @property
    def tokenizer(self) -> str:
        return self.tokenizer_path or self.path


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorRolloutRef:
    """The actor, its reference, the proxy, and the engine that generates for them."""

    model: Model = group(Model, stage="both")
    proxy: ProxyConfig = group(ProxyConfig, read=REVISIONS)
    actor: Actor = group(Actor)
    ref: ReferenceModel = group(ReferenceModel, read=REFERENCE)
    rollout: Rollout = group(Rollout)

    @property
    def model_dtype(self) -> Dtype:
        """``model.dtype`` of a run, whose start has replaced ``auto``. Raises ValueError before."""
        if self.model.dtype == "auto":
            raise ValueError("actor_rollout_ref.model.dtype=auto has not been measured")
        return self.model.dtype

    @property
    def rollout_dtype(self) -> Dtype:
        """Parameter type inside the actor's engines."""
        return self.engine_dtype(self.rollout)

    def engine_dtype(self, engine: EngineConfig) -> Dtype:
        """Parameter type inside an engine."""
        return engine.dtype or self.model_dtype

    @property
    def update_token_budget(self) -> int:
        """Token budget of micro-batches in updates, over the ranks that share one."""
        return self.actor.ppo_max_token_len_per_gpu * self.actor.megatron.context_parallel_size

    @property
    def log_prob_token_budget(self) -> int:
        """Token budget of micro-batches in forward-only passes, over the ranks that share one."""
        own = self.rollout.log_prob_max_token_len_per_gpu
        if own is None:
            return self.update_token_budget
        return own * self.actor.megatron.context_parallel_size

"""Checks between keys. Every message names the key and says what to do."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal

from ctrl_megatron.config.objective import objective_problems, unknown_name
from ctrl_megatron.config.schema import Config
from ctrl_megatron.config.unread import value_of

Purpose = Literal["rl", "sft", "none"]
"""What the run does, hence which keys it needs; ``none`` requires no key at all."""

SINKS = ("console", "jsonl", "tensorboard", "wandb", "mlflow")

_A, _R, _M, _O, _C, _I = (
    "actor_rollout_ref.actor.",
    "actor_rollout_ref.rollout.",
    "actor_rollout_ref.actor.megatron.",
    "actor_rollout_ref.actor.optim.",
    "critic.optim.",
    "algorithm.rollout_correction.",
)
_AT_LEAST_ONE = (
    *(f"data.{k}" for k in ("max_prompt_length", "max_response_length", "train_batch_size")),
    *("data.val_batch_size", "data.gen_batch_size", "critic.ppo_mini_batch_size"),
    *("critic.ppo_epochs", "critic.ppo_max_token_len_per_gpu", "reward.overlong_buffer.len"),
    *("critic.optim.total_training_steps", "algorithm.filter_groups.max_num_gen_batches"),
    *(_A + k for k in ("ppo_mini_batch_size", "ppo_epochs", "ppo_max_token_len_per_gpu")),
    *(_M + k for k in ("tensor_model_parallel_size", "pipeline_model_parallel_size")),
    *(_M + k for k in ("recompute_num_layers", "logprob_chunk_size")),
    *(_M + k for k in ("virtual_pipeline_model_parallel_size",)),
    _O + "total_training_steps",
    *(_R + k for k in ("n", "tensor_model_parallel_size", "max_model_len", "revision_max_tokens")),
    *(_R + k for k in ("max_num_seqs", "threads", "update_bucket_megabytes")),
    _R + "log_prob_max_token_len_per_gpu",
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu",
    *("algorithm.kl_ctrl.horizon", "reward.max_requests"),
    *(f"sandbox.{k}" for k in ("workers", "max_concurrency", "attempts")),
    *(f"trainer.{k}" for k in ("total_epochs", "total_training_steps", "nnodes")),
    "trainer.n_gpus_per_node",
    *(f"sft.{k}" for k in ("train_batch_size", "max_length", "total_epochs")),
    *("sft.total_training_steps", "sft.max_token_len_per_gpu"),
)
_ABOVE_ZERO = (
    *(_A + "grad_clip", _O + "eps", _R + "kv_cache_gib", _R + "startup_timeout"),
    *("algorithm.kl_ctrl.target_kl", "reward.run_timeout"),
    *("sandbox.startup_timeout", "trainer.peak_tflops_per_device", "trainer.failure_timeout"),
    *("trainer.distributed_timeout", "sft.lr", "sft.grad_clip", _O + "lr", _C + "lr", _C + "eps"),
    *("algorithm.f_norm", "critic.grad_clip"),
    *(_I + "rollout_is_threshold", _I + "rollout_rs_threshold"),
)
_NOT_NEGATIVE = (
    *(_A + k for k in ("clip_ratio", "clip_ratio_low", "clip_ratio_high")),
    *("critic.cliprange_value", _I + "rollout_rs_threshold_lower"),
    *(_A + "entropy_coeff", _A + "kl_loss_coef", _O + "weight_decay", _O + "lr_warmup_steps"),
    *(_R + "temperature", "algorithm.kl_ctrl.kl_coef", "reward.num_examine"),
    *("trainer.examples_in_report", "trainer.critic_warmup", _C + "weight_decay"),
    *(_C + "lr_warmup_steps", "reward.judgment_weight", _A + "ppo_kl_coef"),
    "reward.overlong_buffer.penalty_factor",
)
_SHARES = (
    *(_O + "lr_warmup_steps_ratio", _O + "min_lr_ratio", "sft.warmup_steps_ratio"),
    *(_C + "lr_warmup_steps_ratio", _C + "min_lr_ratio", "algorithm.gamma", "algorithm.lam"),
    *(_A + "clip_cov_ratio", _A + "kl_cov_ratio"),
)
_FREQUENCIES = ("trainer.save_freq", "trainer.test_freq", "trainer.max_ckpt_to_keep")
_RANGES: tuple[tuple[tuple[str, ...], Callable[[float], bool], str], ...] = (
    (_AT_LEAST_ONE, lambda v: v >= 1, "at least 1"),
    (_ABOVE_ZERO, lambda v: v > 0, "greater than 0"),
    (_NOT_NEGATIVE, lambda v: v >= 0, "0 or more"),
    (_SHARES, lambda v: 0 <= v <= 1, "between 0 and 1"),
    ((*_FREQUENCIES, "sft.save_freq"), lambda v: v == -1 or v >= 1, "-1 or at least 1"),
    ((_R + "top_p", _R + "gpu_memory_utilization"), lambda v: 0 < v <= 1, "in (0, 1]"),
    ((_R + "top_k",), lambda v: v == -1 or v >= 1, "-1 (keep all) or at least 1"),
    ((_A + "clip_ratio_c",), lambda v: v > 1, "greater than 1"),
)
RESERVED: Mapping[str, str] = {
    "actor_rollout_ref.hybrid_engine": "trainer and engine share the devices",
    _R + "revision_n": "a critique's reward is that of one greedy revision",
    "dag.enable_perf": "runs/NAME/timeline.jsonl has every node's wall time",
}
"""Keys without an effect so far, and what holds instead; only their defaults are accepted."""


def check(config: Config, purpose: Purpose) -> None:
    """ValueError with one line per problem; silent where the keys fit together."""
    problems = [
        *_ranges(config),
        *_required(config, purpose),
        *_reserved(config),
        *_names(config),
        *_batches(config),
        *_lengths(config),
        *_parallelism(config),
        *objective_problems(config),
        *_schedule(config),
        *_services(config),
    ]
    if problems:
        raise ValueError("\n".join(problems))


def check_files(config: Config, purpose: Purpose) -> None:
    """ValueError naming the key of every file or directory that does not exist."""
    section = config.sft if purpose == "sft" else config.data
    name = "sft" if purpose == "sft" else "data"
    model = config.actor_rollout_ref
    wanted = [(f"{name}.train_files", f) for f in section.train_files]
    wanted += [(f"{name}.val_files", f) for f in section.val_files]
    directories = {
        "actor_rollout_ref.model.path": model.model.path,
        "actor_rollout_ref.model.tokenizer_path": model.model.tokenizer,
    }
    if purpose == "rl":
        directories["actor_rollout_ref.proxy.model.path"] = model.proxy_path
        if config.needs_values:
            directories["critic.model.path"] = config.value_path
        directories["actor_rollout_ref.ref.model.path"] = model.ref_path
    problems = [
        f"{key}: the file {file} does not exist; correct the path or create the file"
        for key, file in wanted
        if not Path(file).is_file()
    ]
    problems += [
        f"{key}: {path} is not a Hugging Face model directory (it has no {needed})"
        for key, path in directories.items()
        if not (Path(path) / (needed := _marker(key))).is_file()
    ]
    if problems:
        raise ValueError("\n".join(problems))


def check_world_size(config: Config, world_size: int, purpose: Purpose = "rl") -> None:
    """ValueError unless ``world_size`` ranks were announced, form the layout, share the batches."""
    _check_announced(config, world_size)
    megatron = config.actor_rollout_ref.actor.megatron
    tensor, pipeline = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    if world_size % (tensor * pipeline):
        raise ValueError(
            f"{_M}tensor_model_parallel_size={tensor} x pipeline_model_parallel_size={pipeline} "
            f"does not divide the {world_size} ranks that were started; start a multiple of "
            f"{tensor * pipeline} ranks or change the sizes"
        )
    data = world_size // (tensor * pipeline)
    batches = {"sft.train_batch_size": config.sft.train_batch_size}
    if purpose != "sft":
        rollout_tensor = config.actor_rollout_ref.rollout.tensor_model_parallel_size
        if config.actor_rollout_ref.rollout.name != "hf" and world_size % rollout_tensor:
            raise ValueError(
                f"{_R}tensor_model_parallel_size={rollout_tensor} does not divide the "
                f"{world_size} ranks that were started"
            )
        batches = {
            "data.train_batch_size": config.data.train_batch_size,
            "data.gen_batch_size": config.gen_batch_size,
            _A + "ppo_mini_batch_size": config.actor_rollout_ref.actor.ppo_mini_batch_size,
        }
    for key, size in batches.items():
        if size % data:
            raise ValueError(
                f"{key}={size} does not divide over {data} data-parallel ranks "
                f"({world_size} ranks / {tensor} tensor / {pipeline} pipeline); "
                f"use a multiple of {data}"
            )


def _check_announced(config: Config, world_size: int) -> None:
    nodes, each = config.trainer.nnodes, config.trainer.n_gpus_per_node
    if nodes * each == world_size:
        return
    machines = f"--nnodes {nodes} " if nodes > 1 else ""
    if world_size % nodes == 0:
        override = f"trainer.n_gpus_per_node={world_size // nodes}"
    else:
        override = f"trainer.nnodes=1 trainer.n_gpus_per_node={world_size}"
    raise ValueError(
        f"trainer.nnodes={nodes} x trainer.n_gpus_per_node={each} announce {nodes * each} ranks, "
        f"but {world_size} were started; start {nodes * each} (torchrun {machines}"
        f"--nproc-per-node {each}), or add {override}"
    )


def _marker(key: str) -> str:
    return "tokenizer_config.json" if key.endswith("tokenizer_path") else "config.json"


def _ranges(config: Config) -> Iterator[str]:
    for keys, holds, text in _RANGES:
        for key in keys:
            value = value_of(config, key)
            if value is not None and not holds(value):
                yield f"{key}={value} must be {text}"


def _required(config: Config, purpose: Purpose) -> Iterator[str]:
    if purpose == "none":
        return
    if not config.actor_rollout_ref.model.path:
        yield (
            "actor_rollout_ref.model.path is not set; give the Hugging Face directory of the model"
        )
    name = "sft" if purpose == "sft" else "data"
    if not value_of(config, f"{name}.train_files"):
        yield f"{name}.train_files is not set; give one parquet file or a list of them"


def _reserved(config: Config) -> Iterator[str]:
    plain = Config()
    for key, instead in RESERVED.items():
        value, default = value_of(config, key), value_of(plain, key)
        if value != default:
            yield (
                f"{key}={json.dumps(value)} is not available yet: {instead}; "
                f"leave it at {json.dumps(default)}"
            )
    for key in ("actor_rollout_ref.model.dtype", _R + "dtype"):
        if value_of(config, key) == "float16":
            yield (
                f"{key}=float16 is not available yet: it would need a loss scale; "
                f"use bfloat16 or float32"
            )


def _names(config: Config) -> Iterator[str]:
    for sink in config.trainer.logger:
        yield from unknown_name("trainer.logger", sink, SINKS)
    custom = config.dag.custom_pipeline_fn
    if custom is not None and not re.fullmatch(r"[\w.]+:[\w.]+", custom):
        yield "dag.custom_pipeline_fn must have the form 'package.module:function'"


def _batches(config: Config) -> Iterator[str]:
    batch, mini = config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size
    if mini >= 1 and batch % mini:
        yield (
            f"{_A}ppo_mini_batch_size={mini} must divide data.train_batch_size={batch}; "
            f"both count prompts"
        )
    yield from _value_batches(config)
    gen, filtered = config.data.gen_batch_size, config.algorithm.filter_groups.enable
    if gen is not None and not filtered:
        yield (
            f"data.gen_batch_size={gen} has no effect without algorithm.filter_groups.enable=true; "
            f"turn that on or leave it unset"
        )


def _value_batches(config: Config) -> Iterator[str]:
    mini, batch = config.actor_rollout_ref.actor.ppo_mini_batch_size, config.data.train_batch_size
    given = config.critic.ppo_mini_batch_size
    if given is None or mini < 1 or given < 1:
        return
    if given % mini or batch % given:
        yield (
            f"critic.ppo_mini_batch_size={given} must be a multiple of {_A}ppo_mini_batch_size="
            f"{mini} and divide data.train_batch_size={batch}; all count prompts"
        )


def _lengths(config: Config) -> Iterator[str]:
    model, longest = config.actor_rollout_ref, config.sequence_tokens
    given = model.rollout.max_model_len
    if given is not None and given < config.needed_model_len:
        yield (
            f"{_R}max_model_len={given} is smaller than data.max_prompt_length="
            f"{config.data.max_prompt_length} + data.max_response_length="
            f"{config.data.max_response_length} + {_R}revision_max_tokens="
            f"{model.rollout.revision_max_tokens} = {config.needed_model_len}; raise it or leave "
            f"it unset (a revision prompt holds the problem, the solution and the critique)"
        )
    budgets = {
        _A + "ppo_max_token_len_per_gpu": model.actor.ppo_max_token_len_per_gpu,
        _R + "log_prob_max_token_len_per_gpu": model.rollout.log_prob_max_token_len_per_gpu,
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": (
            model.ref.log_prob_max_token_len_per_gpu
        ),
    }
    if config.needs_values:
        budgets["critic.ppo_max_token_len_per_gpu"] = config.critic.ppo_max_token_len_per_gpu
    for key, budget in budgets.items():
        if budget is not None and budget < longest:
            yield (
                f"{key}={budget} cannot hold one sequence of data.max_prompt_length + "
                f"data.max_response_length = {longest} tokens; raise it to at least {longest}"
            )
    if config.sft.max_token_len_per_gpu < config.sft.max_length:
        yield (
            f"sft.max_token_len_per_gpu={config.sft.max_token_len_per_gpu} cannot hold one "
            f"sequence of sft.max_length={config.sft.max_length} tokens; raise it"
        )


def _parallelism(config: Config) -> Iterator[str]:
    megatron = config.actor_rollout_ref.actor.megatron
    if megatron.sequence_parallel and megatron.tensor_model_parallel_size == 1:
        yield (
            f"{_M}sequence_parallel=true needs {_M}tensor_model_parallel_size of 2 or more; "
            f"turn it off or raise the size"
        )
    virtual = megatron.virtual_pipeline_model_parallel_size
    if virtual is not None and virtual > 1 and megatron.pipeline_model_parallel_size == 1:
        yield (
            f"{_M}virtual_pipeline_model_parallel_size={virtual} needs "
            f"{_M}pipeline_model_parallel_size of 2 or more; unset it or raise the size"
        )
    yield from _offload(config)
    rollout = config.actor_rollout_ref.rollout
    if rollout.name == "hf" and rollout.tensor_model_parallel_size != 1:
        yield (
            f"{_R}tensor_model_parallel_size={rollout.tensor_model_parallel_size} is not possible "
            f"with {_R}name=hf; use vllm or sglang, or set it to 1"
        )


def _offload(config: Config) -> Iterator[str]:
    megatron = config.actor_rollout_ref.actor.megatron
    if megatron.param_offload and not config.needs_reference:
        yield (
            f"{_M}param_offload=true has no effect without a reference, whose weights it moves; "
            f"turn it off, or turn on {_A}use_kl_loss or algorithm.use_kl_in_reward"
        )
    float32 = config.actor_rollout_ref.model.dtype == "float32"
    if megatron.optimizer_offload and float32 and not megatron.use_distributed_optimizer:
        yield (
            f"{_M}optimizer_offload=true would take the weights along, which are their own master "
            f"copy in float32; set {_M}use_distributed_optimizer=true or turn it off"
        )


def _schedule(config: Config) -> Iterator[str]:
    for key, optim in ((_O, config.actor_rollout_ref.actor.optim), (_C, config.critic.optim)):
        if optim.lr_warmup_steps and optim.lr_warmup_steps_ratio:
            yield (
                f"{key}lr_warmup_steps and {key}lr_warmup_steps_ratio are both set; keep one of "
                f"them"
            )
        if not all(0 <= beta < 1 for beta in optim.betas):
            yield f"{key}betas={list(optim.betas)} must both be in [0, 1)"
        total = optim.total_training_steps
        if total is not None and optim.lr_warmup_steps >= total:
            yield (
                f"{key}lr_warmup_steps={optim.lr_warmup_steps} must be smaller than "
                f"{key}total_training_steps={total}"
            )


def _services(config: Config) -> Iterator[str]:
    provider = config.reward.provider
    if config.reward.provider_options and provider == "local":
        yield (
            "reward.provider_options has no effect with reward.provider=local; leave it empty or "
            "name another provider"
        )
    if config.reward.compare_lax and provider != "local":
        yield f"reward.compare_lax needs reward.provider=local, not {provider}; turn it off"
    if config.sandbox.token_file is not None and config.sandbox.endpoint is None:
        yield "sandbox.token_file belongs to services at sandbox.endpoint, which is not set"
    if config.sandbox.endpoint is not None and provider != "local":
        yield f"sandbox.endpoint has no effect with reward.provider={provider}; leave it unset"
    endpoint, name = config.sandbox.endpoint, config.trainer.experiment_name
    if endpoint is not None and not re.match(r"https?://[^/\s]+", endpoint):
        yield f"sandbox.endpoint={endpoint!r} must be an address such as http://127.0.0.1:8080"
    if not name or name in (".", "..") or "/" in name or "\\" in name:
        yield f"trainer.experiment_name={name!r} must be a plain directory name"
    if config.trainer.val_before_train and not config.data.val_files:
        yield "trainer.val_before_train=true needs data.val_files; set them or turn it off"
    if config.trainer.test_freq > 0 and not config.data.val_files:
        yield "trainer.test_freq needs data.val_files; set them or use test_freq=-1"

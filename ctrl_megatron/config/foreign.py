"""Messages about keys that do not exist: the name here, an explanation, or a similar key."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ctrl_megatron.config.keys import field_types
from ctrl_megatron.errors import nearest_name

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
_OPTIM, _TOKENS = _ACTOR + "optim.", _ACTOR + "ppo_max_token_len_per_gpu"
_FORWARD_TOKENS = _ROLLOUT + "log_prob_max_token_len_per_gpu"
_MEGATRON, _COMPUTE = _ACTOR + "megatron.", _ACTOR + "compute."
_LORA = "actor_rollout_ref.model.lora"
_SYNC = "actor_rollout_ref.ref.sync_steps"
_OVERLONG = ("enable", "len", "penalty_factor")
RENAMED: Mapping[str, str] = {
    _ACTOR + "entropy_coef": _ACTOR + "entropy_coeff",
    _ACTOR + "max_grad_norm": _ACTOR + "grad_clip",
    _OPTIM + "clip_grad": _ACTOR + "grad_clip",
    _OPTIM + "scheduler": _OPTIM + "lr_scheduler_type",
    _OPTIM + "warmup_style": _OPTIM + "lr_scheduler_type",
    _OPTIM + "warmup_ratio": _OPTIM + "lr_warmup_steps_ratio",
    _OPTIM + "lr_warmup_steps": _OPTIM + "lr_warmup_steps_ratio",
    **{
        f"{_ACTOR}fsdp_config.{name}": _COMPUTE + name
        for name in ("param_offload", "optimizer_offload")
    },
    "data.seed": "trainer.seed",
    "algorithm.f_norm": "algorithm.adv_estimator_options",
    "algorithm.gdpo_reward_keys": "reward.reward_funcs",
    "algorithm.gdpo_reward_weights": "reward.reward_weights",
    "reward.judgment_weight": "reward.judge.weight",
    "sft.max_token_len_per_gpu": _TOKENS,
    _ACTOR + "megatron.seed": "trainer.seed",
    _ACTOR + "use_dynamic_bsz": _TOKENS,
    _ACTOR + "ppo_micro_batch_size": _TOKENS,
    _ACTOR + "use_prefix_grouper": "actor_rollout_ref.model.shared_prefix",
    _ACTOR + "ppo_micro_batch_size_per_gpu": _TOKENS,
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": _FORWARD_TOKENS,
    "actor_rollout_ref.ref.log_prob_micro_batch_size": _FORWARD_TOKENS,
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": _FORWARD_TOKENS,
    _ROLLOUT + "log_prob_micro_batch_size": _FORWARD_TOKENS,
    _ROLLOUT + "log_prob_micro_batch_size_per_gpu": _FORWARD_TOKENS,
    **{
        _ROLLOUT + name: _ROLLOUT + "engine_kwargs"
        for name in ("enable_chunked_prefill", "max_num_batched_tokens", "enable_prefix_caching")
    },
    "actor_rollout_ref.model.enable_gradient_checkpointing": _COMPUTE + "recompute_granularity",
    **{f"{_LORA}.{name}": f"actor_rollout_ref.model.lora_{name}" for name in ("rank", "alpha")},
    f"{_LORA}.target_modules": "actor_rollout_ref.model.target_modules",
    **{
        f"critic.model.{name}": f"actor_rollout_ref.model.{name}"
        for name in ("lora_alpha", "target_modules")
    },
    "critic.model.lora.rank": "critic.model.lora_rank",
    "actor_rollout_ref.nccl_timeout": "trainer.distributed_timeout",
    "data.tokenizer": "actor_rollout_ref.model.tokenizer_path",
    _ROLLOUT + "max_model_length": _ROLLOUT + "max_model_len",
    "actor_rollout_ref.hybrid_engine": _ROLLOUT + "placement",
    _ROLLOUT + "startup_timeout": "trainer.distributed_timeout",
    "sandbox.max_concurrency": "reward.max_requests",
    **{
        f"critic.{name}": _ACTOR + name
        for name in (
            *("ppo_mini_batch_size", "ppo_max_token_len_per_gpu", "loss_agg_mode", "grad_clip"),
            *("optim.weight_decay", "optim.betas", "optim.eps", "optim.lr_warmup_steps_ratio"),
            *("optim.lr_scheduler_type", "optim.min_lr_ratio"),
        )
    },
    "critic.optim.lr_warmup_steps": _OPTIM + "lr_warmup_steps_ratio",
    "critic.use_dynamic_bsz": _TOKENS,
    "sft.grad_clip": _ACTOR + "grad_clip",
    "reward_funcs": "reward.reward_funcs",
    "reward_weights": "reward.reward_weights",
    **{f"reward_model.overlong_buffer.{n}": f"reward.overlong_buffer.{n}" for n in _OVERLONG},
    **{
        f"reward_model.reward_kwargs.overlong_buffer_cfg.{n}": f"reward.overlong_buffer.{n}"
        for n in _OVERLONG
    },
    "reward_model.reward_kwargs.max_resp_len": "data.max_response_length",
    **{
        f"reward_model.{name}": _FORWARD_TOKENS
        for name in (
            *("micro_batch_size", "micro_batch_size_per_gpu", "use_dynamic_bsz"),
            "forward_max_token_len_per_gpu",
        )
    },
    "custom_reward_function.reward_kwargs": "reward.reward_options",
    "reward.custom_reward_function.reward_kwargs": "reward.reward_options",
    "code_provider": "reward.provider",
    "parallel_code_exec_per_proc": "reward.max_requests",
    "max_completion_length": "data.max_response_length",
    "max_prompt_length": "data.max_prompt_length",
    "generation_temperature": _ROLLOUT + "temperature",
    "generation_batch_size": _ROLLOUT + "max_num_seqs",
    "diffusion_steps": _ROLLOUT + "engine_kwargs",
    "random_masking": _ACTOR + "random_masking",
    "p_mask_prompt": _ACTOR + "p_mask_prompt",
    "ref_model_sync_steps": _SYNC,
    "ref_model_mixup_alpha": "actor_rollout_ref.ref.sync_mix",
    "model_name_or_path": "actor_rollout_ref.model.path",
    "torch_dtype": "actor_rollout_ref.model.dtype",
    "bf16": "actor_rollout_ref.model.dtype",
    "dataset_name": "data.train_files",
    "dataset_prompt_column": "data.prompt_key",
    "beta": _ACTOR + "kl_loss_coef",
    "epsilon": _ACTOR + "clip_ratio",
    "epsilon_high": _ACTOR + "clip_ratio_high",
    "scale_rewards": "algorithm.norm_adv_by_std_in_grpo",
    "num_generations": _ROLLOUT + "n",
    "num_iterations": _ACTOR + "ppo_epochs",
    "per_device_train_batch_size": _ACTOR + "ppo_mini_batch_size",
    "gradient_accumulation_steps": _ACTOR + "ppo_mini_batch_size",
    "per_device_eval_batch_size": "data.val_batch_size",
    "gradient_checkpointing": _COMPUTE + "recompute_granularity",
    "learning_rate": _OPTIM + "lr",
    **{f"adam_beta{number}": _OPTIM + "betas" for number in (1, 2)},
    "weight_decay": _OPTIM + "weight_decay",
    "max_grad_norm": _ACTOR + "grad_clip",
    "lr_scheduler_type": _OPTIM + "lr_scheduler_type",
    "lr_scheduler_kwargs.min_lr_rate": _OPTIM + "min_lr_ratio",
    "warmup_ratio": _OPTIM + "lr_warmup_steps_ratio",
    "num_train_epochs": "trainer.total_epochs",
    "output_dir": "trainer.default_local_dir",
    "overwrite_output_dir": "trainer.resume_mode",
    "report_to": "trainer.logger",
    "wandb_project": "trainer.project_name",
    "save_steps": "trainer.save_freq",
    "save_total_limit": "trainer.max_ckpt_to_keep",
    "do_eval": "trainer.test_freq",
    "seed": "trainer.seed",
}
"""Keys of CTRL, siiRL, verl or DiffuCoder -> the key with the same meaning here."""
_FROM_HF = "the weights are read from the Hugging Face directory actor_rollout_ref.model.path"
_BY_FILE = "reward.reward_funcs=[FILE.py:FUNCTION] names a function by its file"
_FSDP = _ACTOR + "fsdp_config."
_OTHER_FSDP = f"{_FSDP}fsdp_size and the keys of {_COMPUTE} are all there is to set"
_WHOLE_RUN = "the schedule lasts the whole run"
_EVERY_STEP = "every step is logged"
_WANDB = "the libraries of wandb read their own variables, WANDB_ENTITY among them"
ABSENT: Mapping[str, str] = {
    "data.num_loader_workers": "all prompts are tokenised before the first step",
    "actor_rollout_ref.model.trust_remote_code": "no code of a model directory is ever run",
    "actor_rollout_ref.model.model_type": "config.json of actor_rollout_ref.model.path defines it",
    **dict.fromkeys((f"{_LORA}.dropout", f"{_LORA}_dropout"), "adapters have no dropout"),
    "actor_rollout_ref.model.exclude_modules": (
        "actor_rollout_ref.model.target_modules lists the layers with adapters"
    ),
    **dict.fromkeys(
        (f"{_LORA}.adapter_path", f"{_LORA}_adapter_path"),
        "adapters begin anew; merge older ones into the model directory",
    ),
    **{
        _FSDP + name: _OTHER_FSDP
        for name in (
            *("wrap_policy", "offload_policy", "reshard_after_forward", "forward_prefetch"),
            *("model_dtype", "use_orig_params", "mixed_precision", "use_torch_compile"),
        )
    },
    "actor_rollout_ref.ref.fsdp_config": "the reference is shared like the actor",
    **dict.fromkeys(
        map(
            "actor_rollout_ref.ref.megatron.{}".format,
            (
                *("param_offload", "virtual_pipeline_model_parallel_size", "sequence_parallel"),
                *("context_parallel_size", "expert_model_parallel_size"),
                "expert_tensor_parallel_size",
            ),
        ),
        "other settings of the reference are the actor's, and it rests in host memory with "
        f"{_COMPUTE}param_offload=true",
    ),
    _MEGATRON + "use_dist_checkpointing": _FROM_HF,
    _MEGATRON + "dist_checkpointing_path": _FROM_HF,
    _MEGATRON + "use_mbridge": _FROM_HF,
    "actor_rollout_ref.model.use_remove_padding": "sequences are always packed without padding",
    "data.return_raw_chat": "the column prompt holds messages, or the text of one",
    "data.truncation": (
        "no prompt is cut; data.filter_overlong_prompts=false refuses those that are too long"
    ),
    "data.reward_fn_key": "compute_score gets the column data_source",
    "data.filter_overlong_prompts_workers": "all prompts are tokenised before the first step",
    _ROLLOUT + "val_kwargs": (
        "validation draws one greedy answer per row; ctrl-evaluate draws several at a temperature"
    ),
    _ROLLOUT + "load_format": "the trainer's weights are put into the engine before the first step",
    "reward_model.model.input_tokenizer": (
        "texts are decoded with actor_rollout_ref.model.tokenizer_path, and the reward model reads "
        "them through its own reward_model.model.tokenizer_path, always"
    ),
    "reward_model.model.trust_remote_code": "no code of a model directory is ever run",
    "reward_model.model.use_remove_padding": "sequences are always packed without padding",
    "reward_model.model.external_lib": "no module is imported for it",
    "reward_model.model.fsdp_config": f"it is shared like the actor ({_FSDP}fsdp_size)",
    "reward_model.megatron.param_offload": (
        f"it rests in host memory with {_COMPUTE}param_offload=true"
    ),
    "reward_model.strategy": f"it has the actor's, {_ACTOR}strategy",
    "reward_model.reward_kwargs": (
        "reward.reward_options and reward.overlong_buffer are the options of functions"
    ),
    **dict.fromkeys(
        map("reward_model.{}".format, ("launch_reward_fn_async", "sandbox_fusion")),
        "functions run beside the trainer; reward.provider names the service that runs programs",
    ),
    "custom_reward_function": _BY_FILE,
    "reward.custom_reward_function": _BY_FILE,
    "reward_model.reward_manager": (
        "reward.reward_funcs names the functions, and reward.overlong_buffer.enable=true is DAPO's"
    ),
    "trainer.log_val_generations": "runs/NAME/examples.jsonl has texts of every step",
    "trainer.val_only": "ctrl-evaluate scores models without training",
    "ray_kwargs": "torchrun, srun, or --launcher ray with RAY_ADDRESS start the ranks",
    _OPTIM + "total_training_steps": _WHOLE_RUN,
    "critic.optim.total_training_steps": _WHOLE_RUN,
    _ROLLOUT + "nnodes": (
        "engines are on the hosts of the actor, or on those of placement.rollout={hosts: [...]}"
    ),
    _ROLLOUT + "mode": "the engine is a separate process and always answers asynchronously",
    "reward.compare_lax": "expected results never enter the process of a program",
    _ROLLOUT + "revision_n": "a critique's reward is that of one greedy revision",
    "algorithm.workflow_type": (
        f"DAPO is algorithm.filter_groups.enable=true with {_ACTOR}clip_ratio_high and "
        "reward.overlong_buffer.enable=true; EMBODIED is "
        "dag.custom_pipeline_fn=ctrl_megatron.pipeline:embodied_srpo_pipeline"
    ),
    "reward.num_examine": "runs/NAME/examples.jsonl and report.html have critiques of every step",
    "sandbox.attempts": "a request is tried five times",
    "sandbox.startup_timeout": "an embedded service has a minute to start",
    "trainer.balance_batch": "data-parallel ranks always get about equally many tokens",
    "trainer.examples_in_report": "the report keeps six critiques of every step",
    "dag.enable_perf": "runs/NAME/timeline.jsonl has every node's wall time",
    "dag.backend_threshold": "groups use NCCL on GPUs and Gloo on CPUs, whatever their size",
    "sync_ref_model": f"{_SYNC} above 0 switches it on",
    "trust_remote_code": "no code of a model directory is ever run",
    "system_prompt": "the column prompt holds whole conversations",
    "use_vllm": f"{_ROLLOUT}name names the engine",
    "gradient_checkpointing_kwargs": f"{_COMPUTE}recompute_granularity is all there is to set",
    "log_completions": "runs/NAME/examples.jsonl has texts of every step",
    "log_level": "the run's output has one level",
    **dict.fromkeys(("logging_first_step", "logging_steps", "logging_strategy"), _EVERY_STEP),
    "save_strategy": "trainer.save_freq counts steps",
    "wandb_entity": _WANDB,
    "e2b_router_url": "reward.provider_options are the options of the provider",
}
"""Keys of those trainers, or groups of keys, without a counterpart -> an explanation."""


def foreign_key_hint(name: str) -> str:
    """A sentence about a key of another trainer; empty for any other name."""
    if name in RENAMED:
        return f"unknown key {name!r}: here that is {RENAMED[name]}"
    group = name
    while group and group not in ABSENT:
        group = group.rpartition(".")[0]
    return f"unknown key {name!r}: {ABSENT[group]}; leave it out" if group else ""


def unknown_key_hint(name: str, group: type, keys: Collection[str]) -> str:
    """A sentence about a key that does not exist in ``group``, a class of the schema."""
    if foreign := foreign_key_hint(name):
        return foreign
    prefix, _, last = name.rpartition(".")
    siblings = list(field_types(group))
    if near := nearest_name(last, siblings):
        candidates = [f"{prefix}.{near}" if prefix else near]
    elif last in RENAMED:  # a name without groups, as TRL has them
        return f"unknown key {name!r}: here that is {RENAMED[last]}"
    else:
        elsewhere = nearest_name(last, {k.rpartition(".")[2] for k in keys})
        candidates = [k for k in keys if k.rpartition(".")[2] == elsewhere][:3]
    where = f"{prefix} has the keys" if prefix else "the groups are"
    hint = f"did you mean {' or '.join(map(repr, candidates))}? " if candidates else ""
    return f"unknown key {name!r}: {hint}({where} {', '.join(siblings)})"

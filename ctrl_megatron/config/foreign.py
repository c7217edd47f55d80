"""Keys of CTRL's, siiRL's, verl's and DiffuCoder's trainers: the key here, or why there is none,
and what ``config_format`` makes of a value (``config.translation``). Any other unknown key is
answered with a similar one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal

from ctrl_megatron.config.keys import field_types
from ctrl_megatron.errors import nearest_name

Settings = Mapping[str, Any]
"""Dotted keys of this trainer -> their values."""
Tree = Mapping[str, Any]
"""The whole configuration of the other trainer, over the defaults of this one."""
Taken = Callable[[Any, Tree], Settings | None]
"""A value of the key, and the tree around it -> the settings that mean the same; none of them where
the value has no effect on the result, None where it would have one that this trainer lacks."""
Fate = Literal["mapped", "passed over", "refused", "mapped or refused", "passed over or refused"]


@dataclass(frozen=True, slots=True)
class ForeignKey:
    """A key of another trainer that does not exist here, or a group of such keys."""

    here: str
    """The key here with the same meaning; empty if there is none."""
    reason: str
    """Why there is none, or why its value does not matter; empty where ``here`` says it."""
    fate: Fate
    """What ``config_format`` does with it."""
    taken: Taken

    @property
    def hint(self) -> str:
        """Continues ``unknown key NAME: ``."""
        return f"here that is {self.here}" if self.here else f"{self.reason}; leave it out"


def at(tree: object, name: str) -> Any:
    """The value of a dotted key in nested mappings; None if it is not there."""

    def below(found: object, part: str) -> Any:
        return found.get(part) if isinstance(found, Mapping) else None

    return reduce(below, name.split("."), tree)


def _same(here: str) -> ForeignKey:
    return ForeignKey(here, "", "mapped", lambda value, tree: {here: value})


def _with(here: str, made: Taken) -> ForeignKey:
    return ForeignKey(here, "", "mapped", made)


def _words(here: str, words: Mapping[Any, Settings], reason: str = "") -> ForeignKey:
    return ForeignKey(here, reason, "mapped or refused", lambda value, tree: words.get(value))


def _passed(reason: str, *only: Any, here: str = "") -> ForeignKey:
    if not only:
        return ForeignKey(here, reason, "passed over", lambda value, tree: {})
    return ForeignKey(
        here,
        reason,
        "passed over or refused",
        lambda value, tree: {} if value in only else None,
    )


def _equal(here: str) -> ForeignKey:
    """The key here holds for both models, so that another value would change the result."""

    def taken(value: Any, tree: Tree) -> Settings | None:
        return {} if value == at(tree, here) else None

    return ForeignKey(here, f"{here} is that of both models", "passed over or refused", taken)


def _refused(reason: str = "", *, here: str = "") -> ForeignKey:
    return ForeignKey(here, reason, "refused", lambda value, tree: None)


_VAL_TEMPERATURE = "actor_rollout_ref.rollout.val_kwargs.temperature"
_ACTOR, _ROLLOUT, _REF = (f"actor_rollout_ref.{name}." for name in ("actor", "rollout", "ref"))
_MODEL = "actor_rollout_ref.model."
_OPTIM, _TOKENS = _ACTOR + "optim.", _ACTOR + "ppo_max_token_len_per_gpu"
_FORWARD_TOKENS = _ROLLOUT + "log_prob_max_token_len_per_gpu"
_MEGATRON, _COMPUTE = _ACTOR + "megatron.", _ACTOR + "compute."
_RECOMPUTED = _COMPUTE + "recompute_granularity"
_SCHEDULE, _WARMUP = _OPTIM + "lr_scheduler_type", _OPTIM + "lr_warmup_steps_ratio"
_FSDP = _ACTOR + "fsdp_config."
_OVERLONG = ("enable", "len", "penalty_factor")
_FORMER = "a key of an earlier version"

_PACKED = f"micro-batches are packed to {_TOKENS} tokens, which changes no result"
_FORWARD = f"passes are packed to {_FORWARD_TOKENS} tokens, which changes no result"
_FROM_HF = "the weights are read from the Hugging Face directory actor_rollout_ref.model.path"
_NO_CODE = "no code of a model directory is ever run"
_TOKENISED = "all prompts are tokenised before the first step"
_UNPADDED = "sequences are always packed without padding"
_OTHER_FSDP = f"{_FSDP}fsdp_size and the keys of {_COMPUTE} are all there is to set"
_WHOLE_RUN = "the schedule lasts the whole run"
_EVERY_STEP = "every step is logged"
_TEXTS = "runs/NAME/examples.jsonl has texts of every step"
_BY_FILE = "reward.reward_funcs=[FILE.py:FUNCTION] names a function by its file"
_SCHEDULES = {
    **{name: {_SCHEDULE: name} for name in ("constant", "cosine")},
    "cosine_with_warmup": {_SCHEDULE: "cosine"},
    "cosine_with_min_lr": {_SCHEDULE: "cosine"},
    "constant_with_warmup": {_SCHEDULE: "constant"},
}
_RECOMPUTES = {True: {_RECOMPUTED: "full"}, False: {}}


def _own_reward(value: Any, tree: Tree) -> Settings | None:
    """verl's function of a file: ``path``, ``name`` and ``reward_kwargs``."""
    if not isinstance(value, Mapping) or not value.get("path"):
        return {}
    function = f"{value['path']}:{value.get('name') or 'compute_score'}"
    options = value.get("reward_kwargs")
    return {
        "reward.reward_funcs": [function],
        **({"reward.reward_options": {function: options}} if options else {}),
    }


def _prompts_per_update(value: Any, tree: Tree) -> Settings:
    """TRL counts the completions that one device has in a pass, and the passes of an update."""
    passes, group = tree.get("gradient_accumulation_steps") or 1, tree.get("num_generations") or 1
    ranks = at(tree, "trainer.nnodes") * at(tree, "trainer.n_gpus_per_node")
    prompts = max(tree.get("per_device_train_batch_size", 1) * passes * ranks // group, 1)
    return {_ACTOR + "ppo_mini_batch_size": prompts, "data.train_batch_size": prompts}


def _synced(value: Any, tree: Tree) -> Settings:
    return {_REF + "sync_steps": value} if tree.get("sync_ref_model") else {}


def _mixed(value: Any, tree: Tree) -> Settings:
    return {_REF + "sync_mix": value} if tree.get("sync_ref_model") else {}


def _betas(value: Any, tree: Tree) -> Settings:
    return {_OPTIM + "betas": [tree.get("adam_beta1", 0.9), tree.get("adam_beta2", 0.999)]}


def _kl_loss(value: Any, tree: Tree) -> Settings:
    weight = {_ACTOR + "kl_loss_coef": value} if value else {}
    return {_ACTOR + "use_kl_loss": bool(value), **weight}


def _below(prefix: str, names: Iterable[str], made: Callable[[str], ForeignKey]) -> Settings:
    return {prefix + name: made(name) for name in names}


_LORA = {
    f"{_MODEL}lora.{name}": _same(f"{_MODEL}{here}")
    for name, here in (
        *(("rank", "lora_rank"), ("alpha", "lora_alpha")),
        ("target_modules", "target_modules"),
    )
}
FOREIGN: Mapping[str, ForeignKey] = {
    # data
    "data.seed": _same("trainer.seed"),
    "data.tokenizer": _same(_MODEL + "tokenizer_path"),
    "data.num_loader_workers": _passed(_TOKENISED),
    "data.filter_overlong_prompts_workers": _passed(_TOKENISED),
    "data.return_raw_chat": _passed("the column prompt holds messages, or the text of one"),
    "data.truncation": _passed(
        "no prompt is cut; data.filter_overlong_prompts=false refuses those that are too long",
        "error",
    ),
    "data.reward_fn_key": _passed("compute_score gets the column data_source", "data_source"),
    # actor_rollout_ref.model
    **_LORA,
    **dict.fromkeys(
        (_MODEL + "lora.dropout", _MODEL + "lora_dropout"), _passed("adapters have no dropout", 0)
    ),
    **dict.fromkeys(
        (_MODEL + "lora.adapter_path", _MODEL + "lora_adapter_path"),
        _refused("adapters begin anew; merge older ones into the model directory"),
    ),
    _MODEL + "exclude_modules": _refused(
        "actor_rollout_ref.model.target_modules lists the layers with adapters"
    ),
    _MODEL + "trust_remote_code": _passed(_NO_CODE),
    _MODEL + "model_type": _passed(
        "config.json of actor_rollout_ref.model.path defines it", "auto"
    ),
    _MODEL + "use_remove_padding": _passed(_UNPADDED),
    _MODEL + "enable_gradient_checkpointing": _words(_RECOMPUTED, _RECOMPUTES),
    "actor_rollout_ref.hybrid_engine": _words(
        _ROLLOUT + "placement", {True: {_ROLLOUT + "placement": "colocated"}}
    ),
    "actor_rollout_ref.nccl_timeout": _same("trainer.distributed_timeout"),
    # actor_rollout_ref.actor
    _ACTOR + "entropy_coef": _same(_ACTOR + "entropy_coeff"),
    _ACTOR + "max_grad_norm": _same(_ACTOR + "grad_clip"),
    **dict.fromkeys(
        (
            *(_ACTOR + "use_dynamic_bsz", _ACTOR + "ppo_micro_batch_size"),
            _ACTOR + "ppo_micro_batch_size_per_gpu",
        ),
        _passed(_PACKED, here=_TOKENS),
    ),
    _ACTOR + "use_prefix_grouper": _same(_MODEL + "shared_prefix"),
    _ACTOR + "megatron.seed": _same("trainer.seed"),
    _OPTIM + "clip_grad": _same(_ACTOR + "grad_clip"),
    _OPTIM + "scheduler": _words(_SCHEDULE, _SCHEDULES),
    _OPTIM + "warmup_style": _words(_SCHEDULE, _SCHEDULES),
    _OPTIM + "warmup_ratio": _same(_WARMUP),
    _OPTIM + "lr_warmup_steps": _passed("", -1, 0, here=_WARMUP),
    _OPTIM + "total_training_steps": _passed(_WHOLE_RUN, -1),
    **_below(_FSDP, ("param_offload", "optimizer_offload"), lambda name: _same(_COMPUTE + name)),
    **_below(
        _FSDP,
        (
            *("wrap_policy", "reshard_after_forward", "forward_prefetch", "use_orig_params"),
            "use_torch_compile",
        ),
        lambda name: _passed(_OTHER_FSDP),
    ),
    _FSDP + "offload_policy": _passed(_OTHER_FSDP, False),
    _FSDP + "model_dtype": _refused(_OTHER_FSDP),
    _FSDP + "mixed_precision": _refused(_OTHER_FSDP),
    _MEGATRON + "use_dist_checkpointing": _passed(_FROM_HF, False),
    _MEGATRON + "dist_checkpointing_path": _refused(_FROM_HF),
    _MEGATRON + "use_mbridge": _passed(_FROM_HF),
    # actor_rollout_ref.ref
    **_below(
        _REF,
        (
            *("log_prob_max_token_len_per_gpu", "log_prob_micro_batch_size"),
            "log_prob_micro_batch_size_per_gpu",
        ),
        lambda name: _passed(_FORWARD, here=_FORWARD_TOKENS),
    ),
    _REF + "fsdp_config": _passed("the reference is shared like the actor"),
    **_below(
        _REF + "megatron.",
        (
            *("param_offload", "virtual_pipeline_model_parallel_size", "sequence_parallel"),
            *("context_parallel_size", "expert_model_parallel_size"),
            "expert_tensor_parallel_size",
        ),
        lambda name: _passed(
            "other settings of the reference are the actor's, and it rests in host memory with "
            f"{_COMPUTE}param_offload=true"
        ),
    ),
    # actor_rollout_ref.rollout
    **_below(
        _ROLLOUT,
        ("log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu"),
        lambda name: _passed(_FORWARD, here=_FORWARD_TOKENS),
    ),
    **_below(
        _ROLLOUT,
        ("enable_chunked_prefill", "max_num_batched_tokens", "enable_prefix_caching"),
        lambda name: _with(
            _ROLLOUT + "engine_kwargs",
            lambda value, tree: {f"{_ROLLOUT}engine_kwargs": {name: value}},
        ),
    ),
    _ROLLOUT + "max_model_length": _same(_ROLLOUT + "max_model_len"),
    _ROLLOUT + "startup_timeout": _refused(_FORMER, here="trainer.distributed_timeout"),
    _ROLLOUT + "val_kwargs.do_sample": ForeignKey(
        "",
        f"{_ROLLOUT}val_kwargs.temperature above 0 draws, and 0 takes the likeliest text",
        "passed over or refused",
        lambda value, tree: {} if value == bool(at(tree, _VAL_TEMPERATURE)) else None,
    ),
    _ROLLOUT + "load_format": _passed(
        "the trainer's weights are put into the engine before the first step"
    ),
    _ROLLOUT + "nnodes": _passed(
        "engines are on the hosts of the actor, or on those of placement.rollout={hosts: [...]}", 0
    ),
    _ROLLOUT + "mode": _passed(
        "the engine is a separate process and always answers asynchronously"
    ),
    _ROLLOUT + "revision_n": _refused("a critique's reward is that of one greedy revision"),
    # critic
    **_below(
        "critic.model.",
        ("lora_alpha", "target_modules"),
        lambda name: _equal(_MODEL + name),
    ),
    "critic.model.lora.rank": _same("critic.model.lora_rank"),
    **_below(
        "critic.",
        (
            *("ppo_mini_batch_size", "loss_agg_mode", "grad_clip", "optim.weight_decay"),
            *("optim.betas", "optim.eps", "optim.lr_warmup_steps_ratio"),
            *("optim.lr_scheduler_type", "optim.min_lr_ratio"),
        ),
        lambda name: _equal(_ACTOR + name),
    ),
    "critic.ppo_max_token_len_per_gpu": _passed(_PACKED, here=_TOKENS),
    "critic.use_dynamic_bsz": _passed(_PACKED, here=_TOKENS),
    "critic.optim.lr_warmup_steps": _passed("", -1, 0, here=_WARMUP),
    "critic.optim.total_training_steps": _passed(_WHOLE_RUN, -1),
    # algorithm
    "algorithm.workflow_type": _words(
        "",
        {
            "DEFAULT": {"dag.custom_pipeline_fn": "ctrl_megatron.pipeline:grpo_pipeline"},
            "DAPO": {
                "dag.custom_pipeline_fn": "ctrl_megatron.pipeline:dapo_pipeline",
                "algorithm.filter_groups.enable": True,
            },
        },
        f"DAPO is algorithm.filter_groups.enable=true with {_ACTOR}clip_ratio_high and "
        "reward.overlong_buffer.enable=true; EMBODIED is "
        "dag.custom_pipeline_fn=ctrl_megatron.pipeline:embodied_srpo_pipeline",
    ),
    "algorithm.f_norm": _with(
        "algorithm.adv_estimator_options",
        lambda value, tree: {"algorithm.adv_estimator_options": {"f_norm": value}},
    ),
    "algorithm.gdpo_reward_keys": _refused(here="reward.reward_funcs"),
    "algorithm.gdpo_reward_weights": _same("reward.reward_weights"),
    # rewards
    "reward.judgment_weight": _refused(_FORMER, here="reward.judge.weight"),
    "reward.compare_lax": _refused("expected results never enter the process of a program"),
    "reward.num_examine": _passed(
        "runs/NAME/examples.jsonl and report.html have critiques of every step"
    ),
    "custom_reward_function": ForeignKey("", _BY_FILE, "mapped", _own_reward),
    "custom_reward_function.reward_kwargs": _refused(here="reward.reward_options"),
    "reward.custom_reward_function": ForeignKey("", _BY_FILE, "mapped", _own_reward),
    "reward.custom_reward_function.reward_kwargs": _refused(here="reward.reward_options"),
    **_below(
        "reward_model.overlong_buffer.",
        _OVERLONG,
        lambda name: _same(f"reward.overlong_buffer.{name}"),
    ),
    **_below(
        "reward_model.reward_kwargs.overlong_buffer_cfg.",
        _OVERLONG,
        lambda name: _same(f"reward.overlong_buffer.{name}"),
    ),
    "reward_model.reward_kwargs.max_resp_len": _equal("data.max_response_length"),
    "reward_model.reward_kwargs.overlong_buffer_cfg.log": _passed(
        "reward.reward_options and reward.overlong_buffer are the options of functions"
    ),
    "reward_model.reward_kwargs": _refused(
        "reward.reward_options and reward.overlong_buffer are the options of functions"
    ),
    "reward_model.reward_manager": _passed(
        "reward.reward_funcs names the functions, and reward.overlong_buffer.enable=true is DAPO's",
        *("naive", "batch", "prime", "dapo", "parallel"),
    ),
    **_below(
        "reward_model.",
        (
            *("micro_batch_size", "micro_batch_size_per_gpu", "use_dynamic_bsz"),
            "forward_max_token_len_per_gpu",
        ),
        lambda name: _passed(_FORWARD, here=_FORWARD_TOKENS),
    ),
    "reward_model.model.input_tokenizer": _passed(
        "texts are decoded with actor_rollout_ref.model.tokenizer_path, and the reward model reads "
        "them through its own reward_model.model.tokenizer_path, always"
    ),
    "reward_model.model.trust_remote_code": _passed(_NO_CODE),
    "reward_model.model.use_remove_padding": _passed(_UNPADDED),
    "reward_model.model.external_lib": _refused("no module is imported for it"),
    "reward_model.model.fsdp_config": _passed(f"it is shared like the actor ({_FSDP}fsdp_size)"),
    "reward_model.megatron.param_offload": _passed(
        f"it rests in host memory with {_COMPUTE}param_offload=true"
    ),
    "reward_model.strategy": _passed(f"it has the actor's, {_ACTOR}strategy"),
    "reward_model.launch_reward_fn_async": _passed(
        "functions run beside the trainer; reward.provider names the service that runs programs"
    ),
    "reward_model.sandbox_fusion": _refused(
        "functions run beside the trainer; reward.provider names the service that runs programs"
    ),
    # trainer and the rest
    "trainer.log_val_generations": _passed(_TEXTS),
    "trainer.val_only": _passed("ctrl-evaluate scores models without training", False),
    "trainer.balance_batch": _passed("data-parallel ranks always get about equally many tokens"),
    "trainer.examples_in_report": _passed("the report keeps six critiques of every step"),
    "ray_kwargs": _passed("torchrun, srun, or --launcher ray with RAY_ADDRESS start the ranks"),
    "dag.enable_perf": _passed("runs/NAME/timeline.jsonl has every node's wall time"),
    "dag.backend_threshold": _passed(
        "groups use NCCL on GPUs and Gloo on CPUs, whatever their size"
    ),
    "sandbox.max_concurrency": _refused(_FORMER, here="reward.max_requests"),
    "sandbox.attempts": _refused("a request is tried five times"),
    "sandbox.startup_timeout": _refused("an embedded service has a minute to start"),
    "sft.max_token_len_per_gpu": _refused(_FORMER, here=_TOKENS),
    "sft.grad_clip": _refused(_FORMER, here=_ACTOR + "grad_clip"),
    # DiffuCoder's recipe, whose keys are those of TRL
    "model_name_or_path": _same(_MODEL + "path"),
    "torch_dtype": _same(_MODEL + "dtype"),
    "bf16": _words(_MODEL + "dtype", {True: {_MODEL + "dtype": "bfloat16"}, False: {}}),
    "trust_remote_code": _passed(_NO_CODE),
    "dataset_name": _same("data.train_files"),
    "dataset_prompt_column": _same("data.prompt_key"),
    "system_prompt": _refused("the column prompt holds whole conversations"),
    "max_prompt_length": _same("data.max_prompt_length"),
    "max_completion_length": _same("data.max_response_length"),
    "reward_funcs": _same("reward.reward_funcs"),
    "reward_weights": _same("reward.reward_weights"),
    "code_provider": _same("reward.provider"),
    "parallel_code_exec_per_proc": _same("reward.max_requests"),
    "e2b_router_url": _with(
        "reward.provider_options",
        lambda value, tree: {"reward.provider_options": {"e2b_router_url": value}},
    ),
    "generation_temperature": _same(_ROLLOUT + "temperature"),
    "generation_batch_size": _same(_ROLLOUT + "max_num_seqs"),
    "diffusion_steps": _with(
        _ROLLOUT + "engine_kwargs",
        lambda value, tree: {_ROLLOUT + "engine_kwargs": {"steps": value}},
    ),
    "random_masking": _same(_ACTOR + "random_masking"),
    "p_mask_prompt": _same(_ACTOR + "p_mask_prompt"),
    "sync_ref_model": _passed(f"{_REF}sync_steps above 0 switches it on"),
    "ref_model_sync_steps": _with(_REF + "sync_steps", _synced),
    "ref_model_mixup_alpha": _with(_REF + "sync_mix", _mixed),
    "beta": _with(_ACTOR + "kl_loss_coef", _kl_loss),
    "epsilon": _same(_ACTOR + "clip_ratio"),
    "epsilon_high": _same(_ACTOR + "clip_ratio_high"),
    "scale_rewards": _with(
        "algorithm.norm_adv_by_std_in_grpo",
        lambda value, tree: {"algorithm.adv_estimator_options": {"norm_by_std": bool(value)}},
    ),
    "num_generations": _same(_ROLLOUT + "n"),
    "num_iterations": _same(_ACTOR + "ppo_epochs"),
    "per_device_train_batch_size": _with(_ACTOR + "ppo_mini_batch_size", _prompts_per_update),
    "gradient_accumulation_steps": _with(_ACTOR + "ppo_mini_batch_size", _prompts_per_update),
    "per_device_eval_batch_size": _passed(
        "data.val_batch_size prompts go to the engine at a time, which changes no result",
        here="data.val_batch_size",
    ),
    "gradient_checkpointing": _words(_RECOMPUTED, _RECOMPUTES),
    "gradient_checkpointing_kwargs": _passed(f"{_RECOMPUTED} is all there is to set"),
    "learning_rate": _same(_OPTIM + "lr"),
    "adam_beta1": _with(_OPTIM + "betas", _betas),
    "adam_beta2": _with(_OPTIM + "betas", _betas),
    "weight_decay": _same(_OPTIM + "weight_decay"),
    "max_grad_norm": _same(_ACTOR + "grad_clip"),
    "lr_scheduler_type": _words(_SCHEDULE, _SCHEDULES),
    "lr_scheduler_kwargs.min_lr_rate": _same(_OPTIM + "min_lr_ratio"),
    "warmup_ratio": _same(_WARMUP),
    "num_train_epochs": _same("trainer.total_epochs"),
    "output_dir": _same("trainer.default_local_dir"),
    "overwrite_output_dir": _words(
        "trainer.resume_mode", {True: {"trainer.resume_mode": "disable"}, False: {}}
    ),
    "report_to": _with(
        "trainer.logger",
        lambda value, tree: {
            "trainer.logger": ["console", "jsonl", *([value] if isinstance(value, str) else value)]
        },
    ),
    "wandb_project": _same("trainer.project_name"),
    "wandb_entity": _passed(
        "the libraries of wandb read their own variables, WANDB_ENTITY among them"
    ),
    "save_strategy": _passed("trainer.save_freq counts steps", "steps"),
    "save_steps": _same("trainer.save_freq"),
    "save_total_limit": _same("trainer.max_ckpt_to_keep"),
    "do_eval": _passed("", False, here="trainer.test_freq"),
    "seed": _same("trainer.seed"),
    "use_vllm": _passed(f"{_ROLLOUT}name names the engine", False),
    "log_completions": _passed(_TEXTS),
    "log_level": _passed("the run's output has one level"),
    **dict.fromkeys(
        ("logging_first_step", "logging_steps", "logging_strategy"), _passed(_EVERY_STEP)
    ),
}
"""Keys of the other trainers, or groups of keys, that do not exist here."""


def foreign_key(name: str) -> ForeignKey | None:
    """The entry of a key of another trainer, or of the nearest group around it; None for any other
    name."""
    while name and name not in FOREIGN:
        name = name.rpartition(".")[0]
    return FOREIGN.get(name)


def foreign_key_hint(name: str) -> str:
    """A sentence about a key of another trainer; empty for any other name."""
    known = foreign_key(name)
    # The key here is that of the entry itself, not of a key below it.
    if known is None or (known.here and name not in FOREIGN):
        return ""
    return f"unknown key {name!r}: {known.hint}"


def unknown_key_hint(name: str, group: type, keys: Collection[str]) -> str:
    """A sentence about a key that does not exist in ``group``, a class of the schema."""
    if foreign := foreign_key_hint(name):
        return foreign
    prefix, _, last = name.rpartition(".")
    siblings = list(field_types(group))
    if near := nearest_name(last, siblings):
        candidates = [f"{prefix}.{near}" if prefix else near]
    elif last in FOREIGN and FOREIGN[last].here:  # a name without groups, as TRL has them
        return f"unknown key {name!r}: {FOREIGN[last].hint}"
    else:
        elsewhere = nearest_name(last, {k.rpartition(".")[2] for k in keys})
        candidates = [k for k in keys if k.rpartition(".")[2] == elsewhere][:3]
    where = f"{prefix} has the keys" if prefix else "the groups are"
    hint = "settings of a pipeline of your own go below dag.options "
    if candidates:
        hint = f"did you mean {' or '.join(map(repr, candidates))}? "
    return f"unknown key {name!r}: {hint}({where} {', '.join(siblings)})"

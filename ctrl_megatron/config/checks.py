"""Checks of a configuration. Every message names the key and says what to do."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from ctrl_megatron.config.actor_rollout_ref import (
    BUILT_IN_PIPELINES,
    CO_TRAIN_PIPELINE,
    COMPLETION_PIPELINES,
    COUPLED_GRPO_PIPELINE,
    CRITIQUE_PIPELINES,
    ENVIRONMENT_PIPELINES,
    EPISODE_PIPELINES,
    POLICY_LOSSES,
    EngineConfig,
)
from ctrl_megatron.config.adapters import (
    CUT_TRANSPORTS,
    adapter_push_problems,
)
from ctrl_megatron.config.agents import policy_problems
from ctrl_megatron.config.algorithm import ADV_ESTIMATORS
from ctrl_megatron.config.coerce import KeyPlace, require_one_of
from ctrl_megatron.config.keys import Condition, value_at_key
from ctrl_megatron.config.placement import ROLES, separate_role_ranks
from ctrl_megatron.config.schema import KEYS, Config
from ctrl_megatron.config.transformer_overrides import override_problems
from ctrl_megatron.engine_kinds import ENGINES
from ctrl_megatron.errors import UserError, begin_lines_of_errors

Purpose = Literal["rl", "sft", "none"]
"""The kind of run, which determines the required keys; ``none`` requires no key."""
_A, _R = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
_OTHER_CUTS = (
    *("pipeline_parallel_size", "data_parallel_size", "expert_placement_strategy", "enable_eplb"),
    *("pp_size", "dp_size", "enable_dp_attention", "moe_dense_tp_size"),
    *("ep_num_redundant_experts", "init_expert_location"),
)
"""Arguments of vLLM and SGLang that give a worker other parts of a model."""
_M = _A + "megatron."
_LORA = "actor_rollout_ref.model.lora_rank"
_P = "actor_rollout_ref.proxy."
_PE = _P + "engine."
_GROUPED = frozenset(ADV_ESTIMATORS) - {"gae", "reinforce_plus_plus", "remax"}
"""Estimators whose baseline is the group."""


def check_key_relations(config: Config, purpose: Purpose, written: Mapping[str, KeyPlace]) -> None:
    """UserError with one line per problem, if the keys do not fit together.

    ``written`` has the keys that are set, and the place of each.
    """
    problems = [
        *_ranges(config, written),
        *_unread(config, purpose, written),
        *_required(config, purpose),
        *_sizes(config, purpose),
        *_fsdp(config, purpose),
    ]
    for relation in (
        *(_names, _parallelism, _proxy, _agents, _adapters, _quantisation, _ahead),
        *(_objective, _coupled, _replayed, _refreshed, _distillation, _groups, _reward),
    ):
        problems += relation(config)
    if problems:
        raise UserError("\n".join(problems))


def unread_keys(config: Config) -> dict[str, Condition]:
    """Keys that nothing reads with these settings -> the first condition that is not met."""
    unmet = {name: [c for c in key.read if not c.is_met(config)] for name, key in KEYS.items()}
    return {name: conditions[0] for name, conditions in unmet.items() if conditions}


def switch_settings(config: Config, condition: Condition) -> str:
    """The settings of the keys that a condition looks at, as a user writes them."""
    return " and ".join(f"{s}={_words(value_at_key(config, s))}" for s in condition.switches)


def _no_file(path: str) -> str:
    if Path(path).is_dir():
        return f"{path} is a directory, not a file"
    where = "" if Path(path).is_absolute() else f" in {Path.cwd()}"
    return f"the file {path} does not exist{where}"


def model_directories(config: Config, purpose: Purpose) -> dict[str, str]:
    """The keys that name directories of models and tokenizers and are set, with their values. A
    directory that is not set is the actor's.
    """
    model = config.actor_rollout_ref
    found: dict[str, str | None] = {"actor_rollout_ref.model.path": model.model.path}
    if model.model.tokenizer != model.model.path:
        found["actor_rollout_ref.model.tokenizer_path"] = model.model.tokenizer
    if purpose == "rl":
        found["actor_rollout_ref.ref.model.path"] = model.ref.model.path
        if config.writes_revisions:
            found["actor_rollout_ref.proxy.model.path"] = model.proxy.model.path
        if config.needs_value_model:
            found["critic.model.path"] = config.critic.model.path
        if config.needs_reward_model:
            files = config.reward_model.model
            found["reward_model.model.path"] = files.path
            found["reward_model.model.tokenizer_path"] = files.tokenizer_path
        policies = zip(config.policies, config.agents[1:], config.engine_owners[1:], strict=True)
        for name, own, owner in policies:
            theirs = model_directories(own, purpose)
            if not owner:
                theirs.pop("actor_rollout_ref.model.tokenizer_path", None)  # the run's
            found |= {f"policies.{name}.{k}": p for k, p in theirs.items() if found.get(k) != p}
    return {key: path for key, path in found.items() if path}


def require_files_exist(
    config: Config, purpose: Purpose, elsewhere: Callable[[str], bool] = lambda path: False
) -> None:
    """UserError naming the key of every file or directory that does not exist, but for models whose
    text is ``elsewhere``."""
    name, section = ("sft", config.sft) if purpose == "sft" else ("data", config.data)
    problems = [
        f"{name}.{key}: {_no_file(file)}; correct the path or create the file"
        for key in ("train_files", "val_files")
        for file in getattr(section, key)
        if not Path(file).is_file()
    ]
    for key, path in model_directories(config, purpose).items():
        needed = "tokenizer_config.json" if key.endswith("tokenizer_path") else "config.json"
        if not (elsewhere(path) or (Path(path) / needed).is_file()):
            problems.append(
                f"{key}: {path} is not a Hugging Face model directory (it has no {needed})"
            )
    if problems:
        raise UserError("\n".join(problems))


def check_world_size(config: Config, world_size: int, purpose: Purpose = "rl") -> None:
    """UserError unless ``world_size`` fits the configured ranks, and every policy's layout and
    batch sizes."""
    announced = world_size
    nodes, each = config.trainer.nnodes, config.trainer.n_gpus_per_node
    if nodes * each != world_size:
        machines = f"--nnodes {nodes} " if nodes > 1 else ""
        fewer = "trainer.nnodes=1 " if world_size % nodes else ""
        per_node = world_size if fewer else world_size // nodes
        raise UserError(
            f"trainer.nnodes={nodes} x trainer.n_gpus_per_node={each} announce {nodes * each} "
            f"ranks, but {world_size} were started; start {nodes * each} (torchrun {machines}"
            f"--nproc-per-node {each}), or add {fewer}trainer.n_gpus_per_node={per_node}"
        )
    if purpose != "sft":
        apart = separate_role_ranks(config.run or config, world_size)
        if apart and config.trainer.min_nnodes is not None:
            raise UserError(
                "its ranks would be others after a host is lost",
                key=apart[0].config_key,
                remedy=f"leave out trainer.min_nnodes or {apart[0].config_key}",
            )
        world_size -= sum(len(one.ranks) for one in apart)
    megatron = config.actor_rollout_ref.actor.megatron
    tensor, pipeline = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    context = megatron.context_parallel_size
    model_size = tensor * context * pipeline
    data, rest = divmod(world_size, model_size)
    sizes = {"tensor": tensor, "context": context, "pipeline": pipeline}
    if rest:
        raise UserError(
            f"{_M}tensor_model_parallel_size={tensor} x context_parallel_size={context} x "
            f"pipeline_model_parallel_size={pipeline} does not divide the {world_size} ranks that "
            f"were started; start a multiple of {model_size} ranks or change the sizes"
        )
    copy = config.actor_rollout_ref.actor.fsdp_config.fsdp_size
    if copy != -1 and world_size % copy:
        raise UserError(
            f"{_A}fsdp_config.fsdp_size={copy} does not divide the {world_size} ranks that were "
            f"started; choose a divisor of {world_size}, or -1"
        )
    expert, stage = megatron.expert_tensor_parallel_size or tensor, world_size // pipeline
    if stage % (expert * megatron.expert_model_parallel_size):
        raise UserError(
            f"{_M}expert_model_parallel_size={megatron.expert_model_parallel_size} x "
            f"expert_tensor_parallel_size={expert} does not divide the {stage} ranks of a "
            "pipeline stage; change the sizes"
        )
    batches = {"sft.train_batch_size": config.sft.train_batch_size}
    if purpose != "sft":
        rollout_tensor = config.actor_rollout_ref.rollout.tensor_model_parallel_size
        rollout = config.actor_rollout_ref.rollout
        whole = rollout.uses_whole_hosts(each, config.trainer.nnodes)
        if rollout.n_gpus_per_node is None and each % rollout_tensor and not whole:
            raise UserError(
                f"{_R}tensor_model_parallel_size={rollout_tensor} does not divide trainer."
                f"n_gpus_per_node={each}; choose a size that does, since every GPU belongs to one "
                "engine, or a multiple for engines of several whole hosts"
            )
        batches = {
            "data.train_batch_size": config.data.train_batch_size,
            "data.gen_batch_size": config.gen_batch_size,
            _A + "ppo_mini_batch_size": config.actor_rollout_ref.actor.ppo_mini_batch_size,
        }
    for key, size in batches.items():
        if size % data:
            raise UserError(
                f"{key}={size} does not divide over {data} data-parallel ranks "
                f"({world_size} ranks{''.join(f' / {n} {name}' for name, n in sizes.items())}); "
                f"use a multiple of {data}"
            )
    for own in config.agents[1:] if purpose == "rl" else ():
        with begin_lines_of_errors(f"policies.agent{own.number}: "):
            check_world_size(own, announced)


def _ranges(config: Config, written: Mapping[str, KeyPlace]) -> Iterator[str]:
    for name, key in KEYS.items():
        value = value_at_key(config, name)
        if key.allowed is not None and not key.allowed.admits(value):
            place = f"{written[name]}: " if name in written else ""
            yield f"{place}{name}={_words(value)} must be {key.allowed.text}"


def _unread(config: Config, purpose: Purpose, written: Mapping[str, KeyPlace]) -> Iterator[str]:
    """Problems of keys that are set and that nothing reads.

    A file may serve both trainings, so keys of the other one are accepted in a file, and so is a
    key of the file that an override has switched off.
    """
    for name, condition in unread_keys(config).items():
        if purpose != "none" and KEYS[name].stage not in (purpose, "both"):
            continue
        by_override = {s for s in condition.switches if s in written and written[s].is_override}
        if name not in written or (by_override and not written[name].is_override):
            continue
        yield (
            f"{written[name]}: {name}={_words(value_at_key(config, name))} is not read with "
            f"{switch_settings(config, condition)}; set {condition.text}, or leave it out"
        )
    for name, place in written.items():
        if purpose != "none" and place.is_override and KEYS[name].stage not in (purpose, "both"):
            own = f"sft.{name.rpartition('.')[2]}"
            instead = f", which reads {own}" if purpose == "sft" and own in KEYS else ""
            yield f"{place}: {name} has no effect on {purpose.upper()}{instead}; leave it out"


def _required(config: Config, purpose: Purpose) -> Iterator[str]:
    if purpose == "none":
        return
    files = "sft.train_files" if purpose == "sft" else "data.train_files"
    for key, what in (
        ("actor_rollout_ref.model.path", "the Hugging Face directory of the model"),
        (files, "one parquet file or a list of them"),
    ):
        if not value_at_key(config, key):
            yield f"{key} is not set; give {what}"


def _names(config: Config) -> Iterator[str]:
    if config.dag.custom_pipeline_fn not in BUILT_IN_PIPELINES:
        # Its module may register names, which ``run.checks.rl`` checks.
        return
    named = {"algorithm.adv_estimator": ADV_ESTIMATORS, _A + "policy_loss": POLICY_LOSSES}
    for key, names in named.items():
        try:
            require_one_of(names, value_at_key(config, key))
        except ValueError as error:
            own = "the module that registers names of your own goes into dag.custom_pipeline_fn"
            yield f"{key} {error}; {estimator_is_loss_hint(key, config) or own}"


def estimator_is_loss_hint(key: str, config: Config) -> str:
    """A remedy where the estimator has the name of a policy loss, as gspo in siiRL's guide; empty
    for any other key and name."""
    name = config.algorithm.adv_estimator
    if key != "algorithm.adv_estimator" or name not in POLICY_LOSSES:
        return ""
    return f"{name} is a policy loss: set {_A}policy_loss={name}, and {key}=grpo for its advantages"


def _sizes(config: Config, purpose: Purpose) -> Iterator[str]:
    data, model, trainer = config.data, config.actor_rollout_ref, config.trainer
    batch, mini = data.train_batch_size, model.actor.ppo_mini_batch_size
    if mini >= 1 and batch % mini:
        yield (
            f"{_A}ppo_mini_batch_size={mini} must divide data.train_batch_size={batch}; "
            f"both count prompts"
        )
    given, needed = model.rollout.max_model_len, config.needed_model_len
    if given is not None and given < needed:
        # A revision prompt holds the problem, the solution and the critique.
        revision = f" + {_R}revision_max_tokens" if config.proxy_shares_engines else ""
        yield (
            f"{_R}max_model_len={given} is smaller than data.max_prompt_length + "
            f"data.max_response_length{revision} = {needed}; raise it or leave it unset"
        )
    budgets = [_A + "ppo_max_token_len_per_gpu", _R + "log_prob_max_token_len_per_gpu"]
    keys, tokens = (
        "data.max_prompt_length + data.max_response_length=",
        config.max_training_row_tokens,
    )
    if tokens > config.max_critique_sequence_tokens:
        keys = f"three masked versions of {keys[:-1]}, together "
    if purpose == "sft":
        del budgets[1:]
        keys, tokens = "sft.max_length=", config.sft.max_length
    context = model.actor.megatron.context_parallel_size
    for key in budgets:
        budget = value_at_key(config, key)
        if budget is not None and budget * context < tokens:
            ranks = f" on each of {context} context ranks" if context > 1 else ""
            yield (
                f"{key}={budget}{ranks} cannot hold a sequence of {keys}{tokens}; raise it to "
                f"{-(-tokens // context)}"
            )
    buffer, limit = config.reward.overlong_buffer, data.max_response_length
    if buffer.enable and buffer.len > limit:
        key = "reward.overlong_buffer.len"
        yield f"{key}={buffer.len} exceeds data.max_response_length={limit}; lower it"
    asked = {"val_before_train": trainer.val_before_train, "test_freq": trainer.test_freq > 0}
    for key in (k for k, is_on in asked.items() if is_on and not data.val_files):
        yield f"trainer.{key} needs data.val_files; set them, or leave trainer.{key} out"
    if len(set(data.val_set_names)) < len(data.val_set_names) or "reward" in data.val_set_names:
        yield (
            f"data.val_files would be reported as {', '.join(data.val_set_names)}, which must "
            "differ and not be reward; rename a file or its folder"
        )


def _parallelism(config: Config) -> Iterator[str]:
    megatron, rollout = config.actor_rollout_ref.actor.megatron, config.actor_rollout_ref.rollout
    for key, off, size in (
        ("sequence_parallel", False, "tensor_model_parallel_size"),
        ("virtual_pipeline_model_parallel_size", 1, "pipeline_model_parallel_size"),
    ):
        asked = getattr(megatron, key)
        if asked not in (None, off) and getattr(megatron, size) == 1:
            yield f"{_M}{key}={_words(asked)} needs {_M}{size} of 2 or more; unset it or raise that"
    yield from override_problems(
        megatron.override_transformer_config,
        config.actor_rollout_ref.actor.compute.recompute_granularity,
    )
    nodes, fewest = config.trainer.nnodes, config.trainer.min_nnodes
    if fewest is not None and fewest > nodes:
        yield f"trainer.min_nnodes={fewest} is larger than trainer.nnodes={nodes}; lower it"
    apart = config.placement.rollout
    if rollout.placement == "dedicated" and rollout.n_gpus_per_node is None and not apart:
        yield f"{_R}placement=dedicated needs {_R}n_gpus_per_node, the engines' GPUs of a host"
    yield from _engines_apart(config) if apart else ()
    others = [name for name in _OTHER_CUTS if name in rollout.engine_kwargs]
    if rollout.engine_kwargs.get("ep_size", 1) not in (1, rollout.tensor_model_parallel_size):
        others.append("ep_size")
    if rollout.weight_transport in CUT_TRANSPORTS and others:
        yield (
            f"{_R}weight_transport={rollout.weight_transport} sends each worker the part that "
            f"tensor_model_parallel_size gives it, which {_R}engine_kwargs.{others[0]} changes; "
            "leave that out, or use weight_transport=shared_memory"
        )
    if rollout.weight_transport == "cuda_ipc" and rollout.placement == "dedicated":
        yield (
            f"{_R}weight_transport=cuda_ipc maps the memory of the trainer's own devices, which "
            f"engines of {_R}placement=dedicated do not use; use nccl, shards or colocated engines"
        )
    if rollout.weight_transport == "nccl" and rollout.placement == "colocated":
        yield (
            f"{_R}weight_transport=nccl sends to other devices, and engines of {_R}placement="
            "colocated share those of the trainer, which NCCL refuses; use cuda_ipc, shards or "
            f"{_R}placement=dedicated"
        )
    placement = config.placement
    given = _placed(config, *ROLES)
    if placement.auto and given:
        yield (
            "placement.auto=true chooses the ranks of all models; leave "
            f"{' and '.join(given)} out, or placement.auto"
        )
    if placement.auto and config.trainer.min_nnodes is not None:
        yield "placement.auto=true plans for one number of hosts; leave trainer.min_nnodes out"
    yield from _engine(config, _R, rollout)
    yield from _engine(config, _PE, config.actor_rollout_ref.proxy.engine)


def _engines_apart(config: Config) -> Iterator[str]:
    """Settings that engines on ranks of their own (``placement.rollout``) need."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.placement != "dedicated":
        yield (
            "placement.rollout gives the engines devices that no model has; set "
            f"{_R}placement=dedicated"
        )
    if rollout.weight_transport != "nccl" and ":" not in rollout.weight_transport:
        yield (
            f"{_R}weight_transport={rollout.weight_transport} ends in the memory of a trainer's "
            "host, where placement.rollout starts no engine; set it to nccl"
        )
    if config.shares_engines_with_frozen_proxy:
        yield (
            "actor_rollout_ref.proxy.kind=shared sends the proxy's weights through the memory of a "
            "host, and the hosts of placement.rollout have no trainer; give the proxy engines of "
            "its own (kind=engine) or servers (kind=api)"
        )


def _placed(config: Config, *names: str) -> list[str]:
    """The keys of ``placement`` with these names that are set."""
    return [f"placement.{name}" for name in names if getattr(config.placement, name)]


def _fsdp(config: Config, purpose: Purpose) -> Iterator[str]:
    """Settings that models of transformers (``strategy=fsdp``) do not support yet."""
    family, key = config.actor_rollout_ref, f"{_A}strategy=fsdp"
    if family.actor.strategy == "megatron":
        return
    megatron = f"set {_A}strategy=megatron"
    if family.actor.compute.recompute_granularity == "selective":
        yield (
            f"{_A}compute.recompute_granularity=selective is not possible with {key}, which "
            "recomputes whole layers; set it to full, or leave it out"
        )
    rollout = family.rollout
    if purpose == "sft":
        return
    for role, layout in (
        ("critic", config.critic.megatron),
        ("actor_rollout_ref.ref", family.ref.megatron),
        ("reward_model", config.reward_model.megatron),
    ):
        for field in dataclasses.fields(layout):
            if getattr(layout, field.name) > 1:
                yield f"{key} cuts no model; leave {role}.megatron.{field.name} out, or {megatron}"
    if config.placement.auto:
        yield (
            f"no proposal plans {key}; leave placement.auto out and name the ranks of roles, or "
            f"{megatron}"
        )
    if ENGINES[rollout.name].denoises:
        able = ", ".join(name for name, kind in ENGINES.items() if not kind.denoises)
        yield f"{key} has no masked-diffusion models; set {_R}name to one of {able}, or {megatron}"
    if rollout.weight_transport in CUT_TRANSPORTS:
        yield (
            f"{key} does not know how engines cut a model, which {_R}weight_transport="
            f"{rollout.weight_transport} requires; use shared_memory"
        )
    if rollout.quantization is not None:
        yield f"{key} sends whole weights; leave {_R}quantization out, or {megatron}"


def _engine(config: Config, prefix: str, keys: EngineConfig) -> Iterator[str]:
    size, gpus = keys.tensor_model_parallel_size, keys.n_gpus_per_node
    able = [name for name, kind in ENGINES.items() if kind.tensor_parallel]
    if "trust_remote_code" in keys.engine_kwargs:
        yield (
            f"{prefix}engine_kwargs.trust_remote_code: no code of a model directory is ever run; "
            "leave it out"
        )
    if size != 1 and keys.name not in able:
        yield (
            f"{prefix}tensor_model_parallel_size={size} is not possible with {prefix}name="
            f"{keys.name}; use {' or '.join(able)}, or set it to 1"
        )
    whole = keys.uses_whole_hosts(config.trainer.n_gpus_per_node, config.trainer.nnodes)
    if gpus is not None and gpus % size and not whole:
        yield (
            f"{prefix}n_gpus_per_node={gpus} is no multiple of {prefix}"
            f"tensor_model_parallel_size={size}, the devices of one engine; change one of them, or "
            "use engines of whole hosts"
        )
    if whole and config.trainer.min_nnodes is not None:
        yield (
            f"{prefix}tensor_model_parallel_size={size} needs all hosts, and trainer.min_nnodes="
            f"{config.trainer.min_nnodes} lets the run go on with fewer; choose one of them"
        )


def _proxy(config: Config) -> Iterator[str]:
    proxy = config.actor_rollout_ref.proxy
    if proxy.kind != "api":
        return
    for name, value, what in (
        ("base_url", all(proxy.api.base_url) and proxy.api.base_url, "the servers' addresses"),
        ("model", proxy.api.model, "the model's name on the servers"),
    ):
        if not value:
            yield f"{_P}kind=api needs {_P}api.{name}; give {what}"


def _agents(config: Config) -> Iterator[str]:
    """Problems of further policies."""
    family, key = config.actor_rollout_ref, "policies"
    if not config.policies:
        if family.proxy.kind == "agent1":
            yield f"{_P}kind=agent1 is a second policy, which the run lacks; set {key}"
        return
    if problems := [*policy_problems(config.policies)]:
        yield from problems
        return
    pipeline = config.dag.custom_pipeline_fn
    if pipeline in BUILT_IN_PIPELINES and pipeline != CO_TRAIN_PIPELINE:
        yield (
            f"{key} adds policies, which only nodes of agent_group 1 and above use, and "
            f"dag.custom_pipeline_fn={_words(pipeline)} has none; name {CO_TRAIN_PIPELINE} or a "
            "pipeline of your own, such as examples.two_agents:build, or leave the key out"
        )
    if config.actor_rollout_ref.rollout.staleness:
        yield f"{_R}staleness draws ahead for one policy; leave it or {key} out"
    owners = {*config.engine_owners[1:]} - {0}
    for placed in _placed(config, "auto", "reward_model", *(["rollout"] if owners else [])):
        yield f"{placed} knows the engines and models of one policy; leave it or {key} out"
    try:
        further = config.agents[1:]
    except UserError as error:
        yield str(error)
        return
    for name, own in zip(config.policies, further, strict=True):
        problems = [*_ranges(own, {}), *_sizes(own, "rl"), *_fsdp(own, "rl")]
        for relation in (
            *(_parallelism, _adapters, _quantisation, _objective, _refreshed),
            *(_distillation, _groups),
        ):
            problems += relation(own)
        actor, theirs = config.actor_rollout_ref.actor, own.actor_rollout_ref.actor
        same = (actor.strategy, actor.megatron) == (theirs.strategy, theirs.megatron)
        transport = config.actor_rollout_ref.rollout.weight_transport
        if transport == "nccl" and not same and not config.engine_owners[own.number]:
            problems.append(
                f"{_R}weight_transport=nccl sends from the ranks of one layout; give {name} the "
                f"run's, or engines of its own (policies.{name}.{_R}name)"
            )
        yield from (f"{key}.{name}: {problem}" for problem in problems)


def _adapters(config: Config) -> Iterator[str]:
    if config.actor_rollout_ref.rollout.adapter_push:
        yield from adapter_push_problems(config)


def _quantisation(config: Config) -> Iterator[str]:
    rollout, correction = config.actor_rollout_ref.rollout, config.algorithm.rollout_correction
    key = f"{_R}quantization={rollout.quantization}"
    if rollout.quantization is None:
        return
    if correction.rollout_is == "none" and correction.rollout_rs == "none":
        yield (
            f"{key} draws with weights that are not the trainer's; correct for it with "
            "algorithm.rollout_correction.rollout_is or rollout_rs (docs/algorithms.md)"
        )
    if not ENGINES[rollout.name].quantised:
        able = " or ".join(name for name, kind in ENGINES.items() if kind.quantised)
        yield f"{key} is not possible with {_R}name={rollout.name}; use {able}, or leave it out"
    if rollout.weight_transport in CUT_TRANSPORTS:
        yield f"{key} sends whole tensors; use {_R}weight_transport=shared_memory"


def _ahead(config: Config) -> Iterator[str]:
    family, algorithm = config.actor_rollout_ref, config.algorithm
    steps = family.rollout.staleness
    if not steps:
        return
    ahead = f"{_R}staleness={steps} draws later steps while one trains, "
    if family.rollout.placement != "dedicated":
        yield f"{ahead}so the engines need devices of their own; add {_R}placement=dedicated"
    correction = algorithm.rollout_correction
    if correction.rollout_is == "none" and correction.rollout_rs == "none":
        yield (
            f"{ahead}with weights that are up to {steps} updates behind; correct for it with "
            "algorithm.rollout_correction.rollout_is or rollout_rs (docs/algorithms.md)"
        )
    if algorithm.filter_groups.enable:
        yield f"{ahead}and algorithm.filter_groups draws until enough is there; turn one off"
    if algorithm.adv_estimator == "remax":
        yield f"{ahead}and remax's greedy baseline would come from other weights; choose another"
    if config.dag.custom_pipeline_fn not in BUILT_IN_PIPELINES:
        yield f"{ahead}which only the built-in pipelines do; leave dag.custom_pipeline_fn unset"


def _objective(config: Config) -> Iterator[str]:
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    if actor.use_kl_loss and algorithm.use_kl_in_reward:
        yield (
            f"{_A}use_kl_loss and algorithm.use_kl_in_reward are both on; the KL belongs either "
            f"in the loss or in the reward, turn one of them off"
        )
    horizon, adaptive = algorithm.kl_ctrl.horizon, algorithm.kl_ctrl.type == "adaptive"
    sequences = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    # An update changes the coefficient by up to a fifth of sequences / horizon of itself.
    if adaptive and algorithm.use_kl_in_reward and 5 * horizon <= sequences:
        yield (
            f"algorithm.kl_ctrl.horizon={horizon} is too short for steps of data.train_batch_size "
            f"x {_R}n = {sequences} sequences, the coefficient would turn negative; raise it to at "
            f"least {sequences // 5 + 1}"
        )
    if actor.policy_loss == "clip_cov" and actor.clip_cov_lb > actor.clip_cov_ub:
        yield (
            f"{_A}clip_cov_lb={actor.clip_cov_lb} is above {_A}clip_cov_ub={actor.clip_cov_ub}; "
            f"no covariance can be between them; lower the first or raise the second"
        )
    keys = algorithm.rollout_correction
    upper, lower = keys.rollout_rs_threshold, keys.rollout_rs_threshold_lower
    bound = lower if lower is not None else 1 / upper if upper > 0 else 0.0
    if keys.rollout_rs != "none" and bound > upper:
        yield (
            f"algorithm.rollout_correction.rollout_rs_threshold={upper} is below "
            f"rollout_rs_threshold_lower={bound} (1 / {upper} where that is unset); nothing "
            f"would stay, raise it or lower the other"
        )
    estimator, enable = algorithm.adv_estimator, config.critic.enable
    if estimator == "gae" and enable is False:
        yield (
            "algorithm.adv_estimator=gae reads the values of a value model, which "
            "critic.enable=false turns off; leave critic.enable unset or choose another estimator"
        )
    if estimator != "gae" and enable and config.dag.custom_pipeline_fn in BUILT_IN_PIPELINES:
        yield (
            f"critic.enable=true trains a value model that algorithm.adv_estimator={estimator} "
            f"never reads; leave critic.enable unset or use adv_estimator=gae"
        )
    if config.trainer.critic_warmup and not config.needs_value_model:
        yield (
            f"trainer.critic_warmup={config.trainer.critic_warmup} has no value model to warm up: "
            f"algorithm.adv_estimator={estimator} uses none; set it to 0"
        )


def _coupled(config: Config) -> Iterator[str]:
    """Problems of the pipeline whose scores are no log-probs."""
    if config.dag.custom_pipeline_fn != COUPLED_GRPO_PIPELINE:
        return
    family, algorithm = config.actor_rollout_ref, config.algorithm
    why = f"{COUPLED_GRPO_PIPELINE} trains on coupled scores"
    if not ENGINES[family.rollout.name].denoises:
        able = " or ".join(name for name, kind in ENGINES.items() if kind.denoises)
        yield f"{_R}name={family.rollout.name} samples token by token; set {_R}name={able}"
    if config.needs_value_model:
        yield (
            f"{why} of all tokens together, and a value model reads them one after the other; "
            "choose an algorithm.adv_estimator other than gae, and leave critic.enable out"
        )
    if algorithm.use_kl_in_reward:
        yield (
            f"{why}, whose differences are no KL per token that a reward could contain; use "
            f"{_A}use_kl_loss=true in the place of algorithm.use_kl_in_reward"
        )
    if algorithm.adv_estimator == "remax":
        yield f"{why} without a greedy baseline; choose an algorithm.adv_estimator other than remax"
    for placed in _placed(config, "reference", "auto"):
        yield f"{why}, whose masks stay on the actor's ranks; leave {placed} out"
    for name in ("rollout_is", "rollout_rs"):
        if getattr(algorithm.rollout_correction, name) != "none":
            yield (
                f"{why}, and algorithm.rollout_correction.{name} compares log-probs of single "
                "tokens with the engine's; leave it out"
            )


def _replayed(config: Config) -> Iterator[str]:
    """Problems of ``rollout.router_replay``."""
    family, algorithm = config.actor_rollout_ref, config.algorithm
    replay = family.rollout.router_replay
    if replay == "off":
        return
    key = f"{_R}router_replay={replay}"
    if family.actor.strategy != "megatron":
        yield f"{key} changes the routers of {_A}strategy=megatron; set it, or leave {key} out"
    if config.policies:
        yield f"{key} knows one policy, and policies adds others; leave one out"
    if algorithm.distillation.is_on:
        yield f"{key} has no routes for a teacher's prompts; leave algorithm.distillation out"
    if config.trainer.dump_steps:
        yield f"{key}: a dump would lack the choices of experts; leave trainer.dump_steps out"
    if replay == "engine" and not ENGINES[family.rollout.name].returns_routes:
        able = " or ".join(name for name, kind in ENGINES.items() if kind.returns_routes)
        yield (
            f"{key}: the engine {family.rollout.name} does not say which experts it chose with the "
            f"sampler that seeds draw with; set {_R}name to {able}, or {_R}router_replay=trainer"
        )


def _refreshed(config: Config) -> Iterator[str]:
    """Problems of a reference that gets the actor's weights."""
    steps, at = config.actor_rollout_ref.ref.sync_steps, config.actor_rollout_ref.ref.sync_at
    key = f"actor_rollout_ref.ref.sync_{'at' if steps is None else 'steps'}={steps or list(at)}"
    for placed in _placed(config, "reference", "auto") if config.refreshes_reference else ():
        yield (
            f"{key} copies weights from the actor's ranks, and {placed} puts the reference on "
            "others; leave one of them out"
        )
    if config.refreshes_reference and config.actor_rollout_ref.model.lora_rank:
        yield (
            f"{key} copies whole weights to the reference, and actor_rollout_ref.model.lora_rank="
            f"{config.actor_rollout_ref.model.lora_rank} trains adapters beside them; set one of "
            "them only"
        )


def _distillation(config: Config) -> Iterator[str]:
    keys, prefix = config.algorithm.distillation, "algorithm.distillation."
    if not keys.is_on:
        return
    teacher = f"{prefix}teacher={keys.teacher}"
    if keys.teacher == "policy" and keys.hint == "none":
        yield f"{teacher} without a hint would teach the actor what it says; set {prefix}hint"
    if keys.estimator == "token" and keys.divergence != "reverse_kl":
        yield (
            f"{prefix}estimator=token estimates reverse_kl only, and {prefix}divergence="
            f"{keys.divergence}; set the estimator to top_k or full"
        )
    if keys.on != "all" and config.algorithm.filter_groups.enable:
        yield (
            f"{prefix}on={keys.on} teaches groups without spread, which "
            f"algorithm.filter_groups.enable=true replaces; set {prefix}on to all"
        )
    if keys.has_hint and config.dag.custom_pipeline_fn in COMPLETION_PIPELINES:
        yield (
            f"{prefix}hint={keys.hint} is about the first solution that a critique is about, and "
            f"dag.custom_pipeline_fn={config.dag.custom_pipeline_fn} has none; set it to none and "
            f"{prefix}teacher to reference"
        )
    if config.dag.custom_pipeline_fn == COUPLED_GRPO_PIPELINE:
        yield f"{teacher} reads tokens one after the other, which a masked-diffusion model does not"
    for placed in _placed(config, "reference", "auto") if keys.estimator == "full" else ():
        yield (
            f"{prefix}estimator=full compares hidden states on the actor's ranks, and {placed} "
            "puts the teacher on others; set the estimator to top_k, or leave the placement out"
        )


def _groups(config: Config) -> Iterator[str]:
    estimator, filtered = config.algorithm.adv_estimator, config.algorithm.filter_groups.enable
    for name, grouped in (
        (f"algorithm.adv_estimator={estimator}", estimator in _GROUPED),
        ("algorithm.filter_groups.enable=true", filtered),
    ):
        if grouped and config.actor_rollout_ref.rollout.n == 1:
            yield (
                f"{_R}n=1 gives {name} groups of one, which have no baseline and never differ; "
                f"set {_R}n to 2 or more"
            )
        if grouped and config.actor_rollout_ref.rollout.top_k == 1:
            yield (
                f"{_R}top_k=1 draws the likeliest token only, so that all samples of a prompt are "
                f"equal and {name} finds no difference in a group; raise it, or leave it out"
            )
    most = config.algorithm.filter_groups.max_num_gen_batches * config.gen_batch_size
    if filtered and most < config.data.train_batch_size:
        yield (
            f"algorithm.filter_groups.max_num_gen_batches="
            f"{config.algorithm.filter_groups.max_num_gen_batches} x data.gen_batch_size="
            f"{config.gen_batch_size} draw {most} groups at most, fewer than the "
            f"data.train_batch_size={config.data.train_batch_size} of a step; raise one of them"
        )
    if filtered and estimator == "remax":
        yield (
            "algorithm.filter_groups replaces prompts whose greedy critique "
            "algorithm.adv_estimator=remax would need; turn it off or choose another estimator"
        )
    is_ctrl = config.dag.custom_pipeline_fn in CRITIQUE_PIPELINES
    if filtered and is_ctrl and "critic" not in config.reward.reward_funcs:
        yield (
            "algorithm.filter_groups looks at the critic's reward, which reward.reward_funcs "
            "lacks; name it, or turn filter_groups off"
        )


def _tasks(config: Config) -> Iterator[str]:
    reward, key = config.reward, "reward.reward_tasks"
    on = {*reward.reward_funcs, "overlong", "judge", "judge_gate", "transition"}
    on |= {"reward_model"} if config.needs_reward_model else set()
    for name, tasks in reward.reward_tasks.items():
        if name not in on:
            yield (
                f"{key}.{name} belongs to no reward function of this run "
                f"({', '.join(reward.reward_funcs)}); correct the name"
            )
        if not isinstance(tasks, list | tuple) or not all(isinstance(t, str) for t in tasks):
            yield f"{key}.{name}={tasks!r} must be a list of tasks: [critique]"
        elif not tasks:
            yield f"{key}.{name} is empty; leave the function out of reward.reward_funcs"
    if reward.reward_tasks and config.algorithm.filter_groups.enable:
        yield f"algorithm.filter_groups compares rewards of one task; turn it off, or drop {key}"
    if reward.reward_tasks and config.algorithm.adv_estimator == "remax":
        yield f"algorithm.adv_estimator=remax draws critiques only; leave {key} out"
    shares, files = config.data.mixture, config.data.train_files
    if shares and len(shares) != len(files):
        yield (
            f"data.mixture has {len(shares)} shares for {len(files)} files of data.train_files; "
            "give one each"
        )


def _reward(config: Config) -> Iterator[str]:
    names, weights = config.reward.reward_funcs, config.reward.reward_weights
    judged = config.needs_reward_model
    if not (names or judged) or len(set(names)) < len(names):
        yield f"reward.reward_funcs={list(names)} must name at least one reward function, each once"
    elif weights and len(weights) != len(names):
        yield (
            f"reward.reward_weights has {len(weights)} entries for {len(names)} reward functions "
            f"({', '.join(names)}); give one each, or none for 1 each"
        )
    else:
        yield from _stages(config)
    by_keys = {
        "overlong": config.reward.overlong_buffer.enable,
        "judge": config.reward.judge.weight,
        "judge_gate": config.reward.judge.gate is not None,
        "transition": config.reward.transition.is_on,
        "reward_model": judged,
    }
    if twice := sorted(name for name in set(names) if by_keys.get(name)):
        yield (
            f"reward.reward_funcs names {twice[0]!r}, which keys of its own turn on as well; leave "
            "one of them out"
        )
    elif "judge_gate" in names:
        yield (
            "reward.reward_funcs: 'judge_gate' is on with reward.judge.gate=NUMBER, which it puts "
            "in the place of the sum; it earns nothing by itself"
        )
    elif "reward_model" in names:
        yield (
            "reward.reward_funcs: 'reward_model' is on with reward_model.enable=true, not by its "
            "name here"
        )
    others = set(config.reward.reward_options) - (set(names) - {"critic"})
    if others:
        yield (
            f"reward.reward_options.{min(others)} belongs to no function of reward.reward_funcs "
            "(critic takes its options from reward.*)"
        )
    yield from _combination(config)
    yield from _tasks(config)
    yield from _reward_model(config)
    scored = config.dag.custom_pipeline_fn in ENVIRONMENT_PIPELINES
    revised = [name for name in ("critic", "delta", "echo_gain") if name in names]
    if revised and not config.writes_revisions and not scored:
        yield (
            f"reward.reward_funcs={list(names)} names {revised[0]}, the pass rate of a revision, "
            f"which {config.dag.custom_pipeline_fn} does not write; name code or functions of "
            "your own"
        )
    limited = config.reward.copying != "measure" and config.writes_revisions
    paying = {"critic", "delta", "echo_gain"} & {*names} or config.reward.transition.is_on
    if limited and not paying:
        yield (
            f"reward.copying={config.reward.copying} limits what critic, delta, echo_gain and "
            "transition pay, "
            f"which reward.reward_funcs={list(names)} does not name; add critic or leave it at "
            "measure"
        )


def _stages(config: Config) -> Iterator[str]:
    """Problems of the weights of rewards and of ``reward.schedule``."""
    reward = config.reward
    try:
        stages = sorted(reward.stages, key=lambda stage: stage.from_step)
    except UserError as error:
        yield str(error)
        return
    weights = {
        "judge": reward.judge.weight,
        "overlong": reward.overlong_buffer.penalty_factor * reward.overlong_buffer.enable,
        "transition": float(reward.transition.is_on),
        "reward_model": config.reward_model.weight * config.needs_reward_model,
        **reward.weights,
    }
    rewarded = {*weights} - ({"overlong"} - {*reward.weights})
    if not any(weights[name] for name in rewarded) and not (stages and stages[0].from_step == 1):
        yield "reward.reward_weights are all 0; nothing would be rewarded"
    off = {"overlong": reward.overlong_buffer.enable, "transition": reward.transition.is_on}
    off["reward_model"] = config.needs_reward_model
    for number, stage in enumerate(stages):
        place = f"reward.schedule, from step {stage.from_step}"
        if number and stage.from_step == stages[number - 1].from_step:
            yield f"{place}: two stages begin there; make one of them"
        for name in stage.weights:
            on = name in reward.weights or off.get(name, name in weights)
            if not on or name == "judge_gate":
                yield (
                    f"{place}: {name} is no reward of this run; name it in reward.reward_funcs "
                    "(with weight 0 if it begins later), or turn its key on"
                )
        weights |= stage.weights
        if not any(weights[name] for name in rewarded if name in weights):
            yield f"{place} all weights are 0; nothing would be rewarded"


def _combination(config: Config) -> Iterator[str]:
    """Problems of settings that read every reward by itself."""
    estimator, reward = config.algorithm.adv_estimator, config.reward
    separate = [
        name
        for name, on in {
            "algorithm.adv_estimator=gdpo": estimator == "gdpo",
            "reward.schedule": bool(reward.schedule),
            "reward.judge.gate": reward.judge.gate is not None,
        }.items()
        if on
    ]
    if estimator == "remax" and separate:
        yield (
            "algorithm.adv_estimator=remax compares with the critic's reward of a greedy critique "
            f"alone, which {separate[0]} does not fit; choose another estimator"
        )


def _reward_model(config: Config) -> Iterator[str]:
    if not config.needs_reward_model:
        return
    if config.reward_model.model.path is None:
        yield "reward_model.enable=true needs reward_model.model.path, a Hugging Face directory"
    if config.dag.custom_pipeline_fn in EPISODE_PIPELINES:
        yield (
            f"{config.dag.custom_pipeline_fn} draws episodes of several turns, and the reward "
            "model reads one answer to a prompt; leave reward_model.enable out"
        )
    if config.placement.reward_model and config.algorithm.filter_groups.enable:
        yield (
            "algorithm.filter_groups.enable=true compares rewards while the actor's ranks draw, "
            "and placement.reward_model puts the reward model on others; leave one of them out"
        )


def _words(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)

"""Checks of models and tokenizers: their files, shapes, and how they fit together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ctrl_megatron.config import (
    BUILT_IN_PIPELINES,
    COUPLED_GRPO_PIPELINE,
    GRPO_PIPELINE,
    Config,
    Purpose,
)
from ctrl_megatron.config.adapters import pushes_adapters
from ctrl_megatron.data.tokens import MEANING, TextCodec, first_different_part, tokenizer_parts
from ctrl_megatron.engine_kinds import ENGINES
from ctrl_megatron.errors import UserError, convert_input_errors, raise_all
from ctrl_megatron.models.families import cpu_delta_net_obstacle, engine_mismatch_reason
from ctrl_megatron.models.fp8 import BLOCK, misaligned_part_widths
from ctrl_megatron.models.hf_config import read_shape
from ctrl_megatron.models.lora import adapts_experts, lora_of_config, shape_with_adapters
from ctrl_megatron.models.rope import engine_rope_mismatch
from ctrl_megatron.models.safetensors_dir import SafetensorsDirectory
from ctrl_megatron.models.shape import (
    AnyShape,
    ModelShape,
    MultiLatentAttention,
    context_of,
    is_reward_model,
)
from ctrl_megatron.models.shards import check_split
from ctrl_megatron.parallel.devices import visible_gpus
from ctrl_megatron.parallel.layout import world_of_role, worlds_of
from ctrl_megatron.rollout.denoising import DenoisingOptions
from ctrl_megatron.rollout.engine import require_engine
from ctrl_megatron.rollout.engine_specs import proxy_path
from ctrl_megatron.rollout.weight_update import checkpoint_specs
from ctrl_megatron.steps.reward_reader import max_conversation_tokens

_MODEL = "actor_rollout_ref.model.path"


_PROXY = "actor_rollout_ref.proxy.model.path"


_ROLES = {"actor_rollout_ref.ref.model.path": "reference", "critic.model.path": "critic"}
"""The key of a model that generates no text, and its role."""


def check_model_files(
    config: Config, purpose: Purpose, further_critics: Mapping[str, str] | None = None
) -> None:
    """UserError for a model whose files do not fit each other, the layout or the other models;
    tokenizers are left to ``check_tokenizers``.

    Only headers are read, and a tied head that is also stored. ``further_critics`` maps arguments
    to the directories of further critics.
    """
    actor = config.actor_rollout_ref.model.path
    wanted = [(_MODEL, actor), *(further_critics or {}).items()]
    if purpose == "rl":
        wanted += list(_roles(config, actor))
    first_of: dict[str, str] = {}
    for key, path in wanted:
        first_of.setdefault(path, key)  # a model with several roles is reported once
    shapes, strategy = dict[str, AnyShape](), config.actor_rollout_ref.actor.strategy
    problems = []
    for path, key in first_of.items():
        try:
            with convert_input_errors(key):
                shapes[path] = shape = read_shape(path, strategy)
                if purpose == "rl":
                    _check_kind(config, key, path, shape)
                tensors = SafetensorsDirectory(path)
                tensors.check(shape)
                _check_role(config, key, path, shape, shapes.get(actor))
                _check_context(config, purpose, key, path, shape)
                _check_engine(config, purpose, key, path, shape)
                if purpose == "rl" and key not in _ROLES:
                    _check_engine_takes(config, path, shape, tensors)
        except UserError as error:
            problems.append(error)
    raise_all(problems)


def _roles(config: Config, actor: str) -> Iterator[tuple[str, str]]:
    family = config.actor_rollout_ref
    if config.shares_engines_with_frozen_proxy:
        yield _PROXY, family.proxy.model.path or actor
    for number, own in enumerate(config.agents[1:], 1):
        if config.engine_owners[number] == 0:
            yield f"policies.agent{number}.{_MODEL}", own.actor_rollout_ref.model.path
    if config.needs_reference:
        yield "actor_rollout_ref.ref.model.path", family.ref.model.path or actor
    if config.needs_value_model:
        yield "critic.model.path", config.critic.model.path or actor


def _check_kind(config: Config, key: str, path: str, shape: AnyShape) -> None:
    """UserError for a masked-diffusion model in RL of another kind, and the reverse."""
    pipeline, denoises = config.dag.custom_pipeline_fn, shape.diffusion is not None
    built_in = pipeline in BUILT_IN_PIPELINES
    others = (built_in and pipeline != COUPLED_GRPO_PIPELINE) or config.needs_value_model
    if denoises and others:
        raise UserError(
            f"{path} is a masked-diffusion model, which RL trains on coupled scores alone",
            remedy=f"set dag.custom_pipeline_fn={COUPLED_GRPO_PIPELINE}, or name an "
            "autoregressive model",
        )
    if pipeline == COUPLED_GRPO_PIPELINE and not denoises:
        raise UserError(
            f"{path}, of type {shape.family!r}, is no masked-diffusion model, and {pipeline} "
            "trains no others",
            remedy=f"set dag.custom_pipeline_fn={GRPO_PIPELINE}, or make a start for one with "
            "tools/make_diffusion_start.py",
        )
    if key == _MODEL and ENGINES[config.actor_rollout_ref.rollout.name].denoises:
        with convert_input_errors("actor_rollout_ref.rollout.engine_kwargs"):
            DenoisingOptions.from_extra(config.actor_rollout_ref.rollout.engine_kwargs)


def _check_role(
    config: Config, key: str, path: str, shape: AnyShape, actor: AnyShape | None
) -> None:
    trained = key == _MODEL or key in _ROLES
    if trained and key != "actor_rollout_ref.ref.model.path":
        shape_with_adapters(shape, lora_of_config(config, value=key == "critic.model.path"))
    if isinstance(shape, ModelShape):
        _check_megatron(config, key, path, shape, trained=trained)
        replay = config.actor_rollout_ref.rollout.router_replay
        if key == _MODEL and replay != "off" and not shape.expert_kinds:
            raise UserError(
                f"{path} has no layers with experts",
                key=f"actor_rollout_ref.rollout.router_replay={replay}",
                remedy="leave it out",
            )
    if shape.value_head and key != "critic.model.path":
        kind = "reward" if is_reward_model(shape) else "value"
        raise UserError(
            f"{path} is a {kind} model, which writes no text", remedy="name a language model"
        )
    refreshed = config.refreshes_reference and key == "actor_rollout_ref.ref.model.path"
    if refreshed and actor is not None and shape != actor:
        raise UserError(
            f"{path} has another architecture than the actor, whose weights it gets with "
            "actor_rollout_ref.ref.sync_steps or sync_at",
            remedy="use a model of the actor's shape, or leave both keys out",
        )
    teaches = key == "actor_rollout_ref.ref.model.path" and config.algorithm.distillation.is_on
    if teaches and actor is not None and shape.vocab_size != actor.vocab_size:
        raise UserError(
            f"{path} has a vocabulary of {shape.vocab_size} and the actor one of "
            f"{actor.vocab_size}; a teacher scores the actor's own tokens",
            remedy="name a teacher with the actor's tokenizer",
        )
    if not trained and actor is not None and shape != actor:
        raise UserError(
            f"{path} has another architecture than the actor; the same engines generate with both",
            remedy="use a model of the actor's shape, or give the proxy engines of its own "
            "(actor_rollout_ref.proxy.kind=engine)"
            if key == _PROXY
            else "use a model of the actor's shape",
        )


def _check_megatron(
    config: Config, key: str, path: str, shape: ModelShape, *, trained: bool
) -> None:
    if trained:
        worlds = worlds_of(config.trainer.nnodes * config.trainer.n_gpus_per_node, config)
        layout = world_of_role(worlds, _ROLES.get(key, "actor")).layout
        check_split(shape, layout)
        layout.check_layers(shape.num_layers)
    rate = config.actor_rollout_ref.actor.megatron.moe_router_bias_update_rate
    if key == _MODEL and rate and not any(kind.correction_bias for kind in shape.expert_kinds):
        raise UserError(
            f"the routers of {path}, of type {shape.family!r}, have no bias",
            key=f"actor_rollout_ref.actor.megatron.moe_router_bias_update_rate={rate:g}",
            remedy="set it to 0; moe_aux_loss_coeff balances the experts of any family",
        )


def _check_engine_takes(
    config: Config, path: str, shape: AnyShape, tensors: SafetensorsDirectory
) -> None:
    if tensors.block is not None:
        raise UserError(
            f"the weights of {path} have 8 bits, in which engines would load them and receive no "
            "others",
            remedy="convert them: ctrl-convert-hf-to-megatron, then ctrl-convert-megatron-to-hf",
        )
    rollout, engine = config.actor_rollout_ref.rollout, config.actor_rollout_ref.rollout.name
    stacked = isinstance(shape, ModelShape) and any(k.names.stacked for k in shape.expert_kinds)
    if rollout.quantization and stacked:
        raise UserError(
            f"the experts of {path} are one tensor of a layer, which is not pushed in 8 bits",
            key="actor_rollout_ref.rollout.quantization",
            remedy="leave it out",
        )
    # Engines that rearrange weights in 8 bits do so block by block.
    if rollout.quantization and ENGINES[engine].rearranges_quantised:
        workers = rollout.tensor_model_parallel_size
        spread = bool(rollout.engine_kwargs.get("enable_expert_parallel"))
        assert isinstance(shape, ModelShape)
        if divided := misaligned_part_widths(shape, workers, whole_experts=spread):
            widths = " and ".join(f"the {part} are {width} wide" for part, width in divided.items())
            raise UserError(
                f"with {workers} tensor workers of {path} {widths}, which is no multiple of "
                f"{BLOCK[0]}, the width of a block with one scale",
                key="actor_rollout_ref.rollout.quantization",
                remedy="choose another tensor_model_parallel_size, or leave quantization out",
            )
    lora = lora_of_config(config) if path == config.actor_rollout_ref.model.path else None
    alone = pushes_adapters(config) and adapts_experts(shape_with_adapters(shape, lora))
    if alone and not ENGINES[engine].adapts_experts:
        raise UserError(
            f"engine {engine!r} computes no adapters on the experts of {path} here",
            key="actor_rollout_ref.rollout.adapter_push",
            remedy="set it to false, which merges them, or name other layers in target_modules",
        )
    if ENGINES[engine].multiplies_latent and isinstance(shape.attention, MultiLatentAttention):
        raise UserError(
            f"{path} has multi-latent attention, whose weights cannot be pushed to engine "
            f"{engine!r}",
            remedy="set actor_rollout_ref.rollout.name to 'hf'",
        )


def check_tokenizers(
    config: Config, purpose: Purpose, others: Mapping[str, str] | None = None
) -> None:
    """UserError for a model with another tokenizer: a run uses one tokenizer and one chat template
    for all models.

    Models that write text must have both in common; for models that only read, equal token ids are
    enough. A directory without a tokenizer is not checked. ``others`` as in ``check_model_files``.
    """
    family, own = config.actor_rollout_ref, "actor_rollout_ref.model.tokenizer_path"
    ours = family.model.tokenizer
    wanted = [(_MODEL, family.model.path), *(others or {}).items()]
    if purpose == "rl":
        wanted += list(_roles(config, family.model.path))
    differing = {path: key for key, path in reversed(wanted) if path != ours}
    if not differing:
        return
    with convert_input_errors(own):
        known = tokenizer_parts(ours)
    problems = []
    for path, key in differing.items():
        try:
            with convert_input_errors(key):
                found = tokenizer_parts(path)
        except UserError as error:
            problems.append(error)
            continue
        reads = key in (_MODEL, *_ROLES)
        if not known or not found:
            continue
        part = first_different_part(known, found, MEANING if reads else known)
        if part is not None:
            problems.append(
                UserError(
                    f"the tokenizer of {path} differs in its {part} from that of {ours}, which "
                    "encodes the texts of all models of the run",
                    key=key,
                    remedy=f"name a model with the same tokenizer, or another {own}"
                    + (", or set actor_rollout_ref.proxy.kind=engine" if key == _PROXY else ""),
                )
            )
    raise_all(problems)


def _check_context(config: Config, purpose: Purpose, key: str, path: str, shape: AnyShape) -> None:
    """UserError if the run has longer sequences than the model's context."""
    data, rollout = config.data, config.actor_rollout_ref.rollout
    prompt, response = data.max_prompt_length, data.max_response_length
    asked = f"data.max_prompt_length={prompt} + data.max_response_length={response}"
    longest = config.max_critique_sequence_tokens
    if purpose == "sft":
        asked, longest = f"sft.max_length={config.sft.max_length}", config.sft.max_length
    elif key not in _ROLES and config.max_model_len > longest:
        longest = config.max_model_len
        if rollout.max_model_len is not None:
            asked = f"actor_rollout_ref.rollout.max_model_len={longest}"
        else:
            revision = rollout.revision_max_tokens
            asked += f" + actor_rollout_ref.rollout.revision_max_tokens={revision}"
    context, limit = context_of(shape)
    if longest > context:
        raise UserError(
            f"the model of {path} has a context of {limit}={context} tokens, and {asked} makes "
            f"{longest}",
            remedy="lower these keys, or name a model with a longer context",
        )


def check_proxy(config: Config) -> TextCodec | None:
    """The tokenizer of a proxy with engines of its own; None for another proxy. UserError if its
    engine is not installed, its model is incomplete, or its tokenizer cannot be used.
    """
    if not config.has_proxy_engines:
        return None
    keys, path = config.actor_rollout_ref.proxy.engine, proxy_path(config)
    require_engine(keys.name, keys.python)
    with convert_input_errors(_PROXY):
        checkpoint_specs(path, config.actor_rollout_ref.engine_dtype(keys))
        codec = TextCodec(path)
        codec.encode_chat([{"role": "user", "content": "?"}])
        if not codec.eos_token_ids:
            raise UserError(f"{path} names no end-of-text token (eos_token)")
    return codec


def _check_engine(config: Config, purpose: Purpose, key: str, path: str, shape: AnyShape) -> None:
    """UserError if the engine cannot compute the model, or would compute another one than the
    trainer."""
    if purpose == "sft" or key in _ROLES:
        return
    engine = config.actor_rollout_ref.rollout.name
    if shape.delta_net is not None and not visible_gpus():
        dtype = config.actor_rollout_ref.rollout_dtype
        if (obstacle := cpu_delta_net_obstacle(shape.delta_net, engine, dtype)) is not None:
            raise UserError(f"{path}: {obstacle}", key="actor_rollout_ref.rollout.name")
    if not isinstance(shape, ModelShape):
        return
    difference = engine_rope_mismatch(shape.rope, engine, shape.max_position_embeddings)
    if difference is not None:
        raise UserError(f"the rope scaling of {path}/config.json: {difference}")
    if (obstacle := engine_mismatch_reason(shape, engine)) is not None:
        raise UserError(f"{path}/config.json: {obstacle}", key="actor_rollout_ref.rollout.name")


def load_checked_tokenizer(config: Config) -> TextCodec:
    """The loaded tokenizer. UserError if it cannot be loaded, has no chat template or end token, or
    has more tokens than the model.
    """
    with convert_input_errors("actor_rollout_ref.model.tokenizer_path"):
        codec = TextCodec(config.actor_rollout_ref.model.tokenizer)
        codec.encode_chat([{"role": "user", "content": "?"}])
        largest = max((*codec.eos_token_ids, *codec.tokenizer.get_vocab().values()))
        try:
            family = config.actor_rollout_ref
            rows = read_shape(family.model.path, family.actor.strategy).vocab_size
        except UserError:
            return codec  # check_model_files reports it
        if largest >= rows:
            raise UserError(
                f"{codec.path} has token number {largest}, but the model of "
                f"{config.actor_rollout_ref.model.path} knows {rows}",
                remedy="use the model's own tokenizer",
            )
    return codec


def check_reward_model(config: Config) -> TextCodec | None:
    """The tokenizer of the reward model; None without one. UserError if its files do not fit each
    other or the layout, if it is no model with one number for a conversation, and if its tokenizer
    cannot be used.
    """
    if not config.needs_reward_model:
        return None
    keys, strategy = config.reward_model, config.actor_rollout_ref.actor.strategy
    path = keys.model.path
    assert path is not None  # config.checks
    with convert_input_errors("reward_model.model.path"):
        shape = read_shape(path, strategy)
        if not is_reward_model(shape):
            raise UserError(
                f"{path} is {'a value' if shape.value_head else 'a language'} model, which has no "
                "number for a conversation",
                remedy="name a model of sequence classification (*ForSequenceClassification) with "
                "one label",
            )
        SafetensorsDirectory(path).check(shape)
        if isinstance(shape, ModelShape):
            worlds = worlds_of(config.trainer.nnodes * config.trainer.n_gpus_per_node, config)
            layout = world_of_role(worlds, "reward_model").layout
            check_split(shape, layout)
            layout.check_layers(shape.num_layers)
    longest, given = max_conversation_tokens(config, shape), keys.max_length
    if given is not None and given > longest:
        budget = config.actor_rollout_ref.log_prob_token_budget - 1
        context, limit = context_of(shape)
        raise UserError(
            f"{given} tokens are more than the model's context of {limit}={context} or the "
            f"{budget} of a pass",
            key="reward_model.max_length",
            remedy="lower it, or raise actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu",
        )
    with convert_input_errors("reward_model.model.tokenizer_path"):
        codec = TextCodec(keys.model.tokenizer_path or path)
        question = {"role": "user", "content": "?"}
        shared, rest = codec.encode_chat_and_answer([question], "?")
        largest = max(codec.tokenizer.get_vocab().values())
        if largest >= shape.vocab_size:
            raise UserError(
                f"{codec.path} has token number {largest}, but the model of {path} knows "
                f"{shape.vocab_size}",
                remedy="use the model's own tokenizer",
            )
        if len(shared) + len(rest) > longest:
            raise UserError(
                f"the shortest conversation has {len(shared) + len(rest)} tokens, and {longest} "
                "are read",
                key="reward_model.max_length",
                remedy="raise it",
            )
    return codec

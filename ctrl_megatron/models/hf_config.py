"""Reads a Hugging Face ``config.json`` and checks it feature by feature."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import Any

from ctrl_megatron.config.environment import read_launch
from ctrl_megatron.errors import UserError, read_json
from ctrl_megatron.models.families import FAMILIES, Family, language_model_keys
from ctrl_megatron.models.fp8 import parse_weight_block_size
from ctrl_megatron.models.hf_keys import positive_int, positive_number
from ctrl_megatron.models.rope import parse_rope
from ctrl_megatron.models.shape import AnyShape, ModelShape, value_head_has_bias
from ctrl_megatron.types import StrategyName

_log = logging.getLogger(__name__)
_KNOWN = frozenset(
    [
        # These say nothing about the forward pass of the families below.
        *("architectures", "model_type", "torch_dtype", "dtype", "transformers_version"),
        *("use_cache", "initializer_range", "bos_token_id", "eos_token_id", "pad_token_id"),
        *("unk_token_id", "name_or_path", "_name_or_path", "is_llama_config"),
        *("transformers.js_config", "tokenizer_class", "id2label", "label2id", "return_dict"),
        *("output_attentions", "output_hidden_states", "problem_type"),
        *("chunk_size_feed_forward", "is_encoder_decoder", "pretraining_tp"),
        *("max_window_layers",),
        # These are read or checked.
        *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings"),
        *("rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters"),
        *("tie_word_embeddings", "attention_bias", "mlp_bias", "hidden_act"),
        *("attention_dropout", "use_sliding_window", "sliding_window", "layer_types"),
        *("partial_rotary_factor", "quantization_config"),
    ]
)
_LEFT_BY_TOOLS = frozenset(
    [
        # unsloth, and checkpoints that it repaired
        *("unsloth_version", "unsloth_fixed"),
        # attributes of transformers' configuration objects at the time of saving
        *("_attn_implementation", "_attn_implementation_autoset", "_commit_hash"),
        # general keys that older transformers wrote into every file
        *("use_bfloat16", "torchscript", "tf_legacy_loss", "output_past"),
        *("finetuning_task", "task_specific_params", "sep_token_id", "gradient_checkpointing"),
        # how to generate, which transformers 4 kept here (the defaults of its GenerationConfig)
        *("max_length", "min_length", "max_new_tokens", "min_new_tokens", "early_stopping"),
        *("do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff"),
        *("eta_cutoff", "num_return_sequences", "num_beams", "num_beam_groups", "length_penalty"),
        *("diversity_penalty", "repetition_penalty", "encoder_repetition_penalty"),
        *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids"),
        *("suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id"),
        *("exponential_decay_length_penalty", "remove_invalid_values", "output_scores"),
        *("return_dict_in_generate", "num_assistant_tokens", "num_assistant_tokens_schedule"),
        *("assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind"),
    ]
)
"""Keys that record how a file was written, run or sampled from. A warning names those that a file
has."""
_DEFAULTS = {"rms_norm_eps": 1e-6}


def read_model_shape(directory: str | Path) -> ModelShape:
    """The shape of the model in ``directory``; ValueError names what is missing or unsupported."""
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise UserError(f"{path} does not exist; give the directory of a Hugging Face model")
    return parse_model_shape(read_json(path), str(path))


def read_shape(directory: str | Path, strategy: StrategyName | None) -> AnyShape:
    """The shape of the model in ``directory`` for a strategy, or for None that of ``fsdp`` if
    ``megatron`` lacks the family; UserError as ``read_model_shape`` and
    ``transformers_model.read_transformers_shape``."""
    if strategy is None:
        path = Path(directory) / "config.json"
        given = read_json(path) if path.is_file() else None
        family = given.get("model_type") if isinstance(given, dict) else None
        strategy = "megatron" if family is None or family in FAMILIES else "fsdp"
    if strategy == "megatron":
        return read_model_shape(directory)
    # Other strategies do not need transformers' models.
    from ctrl_megatron.models.transformers_model import read_transformers_shape

    return read_transformers_shape(directory)


def parse_shape(config: dict[str, Any], where: str, strategy: StrategyName) -> AnyShape:
    """The shape that a ``config.json`` mapping describes for a strategy; raises as
    ``read_shape``."""
    if strategy == "megatron":
        return parse_model_shape(config, where)
    from ctrl_megatron.models.transformers_model import parse_transformers_shape

    return parse_transformers_shape(config, where)


def parse_model_shape(config: dict[str, Any], where: str = "config.json") -> ModelShape:
    """The shape that a ``config.json`` mapping describes.

    Every key is read, or known to be irrelevant to the forward pass, or refused by name, so that no
    model silently computes something else.
    """
    if not isinstance(config, dict):
        raise UserError(f"{where}: must be a JSON object, is {type(config).__name__}")
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise UserError(
            f"{where}: model_type {name!r} is not supported by strategy 'megatron', which knows "
            f"{', '.join(FAMILIES)}; actor_rollout_ref.actor.strategy=fsdp takes other language "
            "models of transformers"
        )
    family = FAMILIES[name]
    if family.inner:
        config = language_model_keys(config, family, where)
    config = _in_usual_words(config, family, where)
    _refuse_unsupported(config, family, where)
    parse_weight_block_size(config, where)
    if left := _left_by_tools(config, family):
        _warn_of_keys(
            where, ", ".join(sorted(left)), "which other tools wrote and no forward pass reads"
        )
    if family.diffusion is not None and "auto_map" in config:
        _warn_of_keys(where, "auto_map", f"code of its authors; the {name} family is built in")
    config = {**_DEFAULTS, **family.defaults, **config}
    rope = parse_rope(config, where, partial="partial_rotary_factor" in family.keys)
    if not isinstance(rope.scaling, family.scalings):
        kind = type(rope.scaling).__name__.removesuffix("Scaling").lower()
        raise UserError(f"{where}: rope type {kind!r} is not supported by the {name} family")
    _check_architecture(config, family, where)
    head = value_head_has_bias(config, where)
    delta_net, delta_layers = None, ()
    if family.delta_net is not None:
        delta_net, delta_layers = family.delta_net(config, where)
    return ModelShape(
        family=name,
        hidden_size=positive_int(config, "hidden_size", where),
        vocab_size=positive_int(config, "vocab_size", where),
        max_position_embeddings=positive_int(config, "max_position_embeddings", where),
        norm_epsilon=positive_number(config, "rms_norm_eps", where),
        rope=rope,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)) and head is None,
        attention=family.attention(config, where),
        feed_forward=family.feed_forward(config, where),
        value_head=head is not None,
        head_bias=head is not False,
        diffusion=None if family.diffusion is None else family.diffusion(config, where),
        file_names=family.file_names,
        delta_net=delta_net,
        delta_layers=delta_layers,
        zero_centred_norms=family.zero_centred_norms,
    )


def _in_usual_words(config: dict[str, Any], family: Family, where: str) -> dict[str, Any]:
    """The mapping with Llama's names for the keys that the family calls otherwise."""
    words = {family.key_names.get(key, key): value for key, value in config.items()}
    if len(words) < len(config):
        twice = next(key for key in family.key_names if family.key_names[key] in config)
        raise UserError(f"{where}: {family.key_names[twice]} is called {twice} in this family")
    return words


def _check_architecture(config: dict[str, Any], family: Family, where: str) -> None:
    usual = family.architectures
    architecture = (config.get("architectures") or [usual[0]])[0]
    if not architecture.endswith(usual):
        kinds = " and ".join(f"*{end}" for end in usual)
        raise UserError(f"{where}: architecture {architecture} is not supported, only {kinds}")


@cache
def _warn_of_keys(where: str, keys: str, reason: str) -> None:
    """Log the warning once in a process, and in no other rank than the first."""
    if read_launch().rank == 0:
        _log.warning("%s: ignored %s, %s", where, keys, reason)


def _left_by_tools(config: dict[str, Any], family: Family) -> set[str]:
    """The keys that change nothing in a forward pass, among them unknown ones with an empty list or
    mapping."""
    unknown = config.keys() - _KNOWN - family.keys
    return {key for key in unknown if key in _LEFT_BY_TOOLS or config[key] in ([], {})}


def _refuse_unsupported(config: dict[str, Any], family: Family, where: str) -> None:
    known = _KNOWN | family.keys | _left_by_tools(config, family)
    spelt = {usual: key for key, usual in family.key_names.items()}
    for key, value in config.items():
        if key not in known and value is not None and value is not False:
            raise UserError(
                f"{where}: {spelt.get(key, key)}={value!r} is not supported by the "
                f"{config['model_type']} family; remove the key if it does not change the forward "
                "pass"
            )
    wanted: dict[str, tuple[Any, ...]] = {
        "hidden_act": (None, "silu"),
        "attention_bias": (None, False),
        "mlp_bias": (None, False),
        "attention_dropout": (None, 0, 0.0),
        "use_sliding_window": (None, False),
        "partial_rotary_factor": (None, 1, 1.0),
        "pretraining_tp": (None, 1),
        **family.only,
    }
    for key, allowed in wanted.items():
        if key not in family.keys - family.only.keys() and config.get(key) not in allowed:
            raise UserError(
                f"{where}: {spelt.get(key, key)}={config.get(key)!r} is not supported, only "
                f"{allowed[-1]!r}"
            )
    for kind in config.get("layer_types") or ():
        if kind not in family.layer_types:
            raise UserError(
                f"{where}: layer_types has {kind!r}; only {family.layer_types[-1]!r} is supported"
            )


def typical_linear_sizes(directory: str | Path) -> tuple[int, int] | None:
    """The widths of a linear layer that is typical of the products of the model in ``directory``:
    the hidden size, and that of a feed-forward layer, or of one expert's. None where config.json
    names no hidden size. UserError if it cannot be read."""
    config = read_json(Path(directory) / "config.json")
    config = config.get("text_config", config)
    hidden = config.get("hidden_size")
    width = config.get("moe_intermediate_size") or config.get("intermediate_size")
    if not isinstance(hidden, int):
        return None
    return hidden, width if isinstance(width, int) else 4 * hidden

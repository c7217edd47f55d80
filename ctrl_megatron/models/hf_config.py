"""Reads a Hugging Face ``config.json`` and checks it feature by feature."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ctrl_megatron.errors import UserError, read_json
from ctrl_megatron.models.hf_keys import need
from ctrl_megatron.models.rope import Rope, parse_rope


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The dimensions of a dense decoder, independent of library and layout."""

    family: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    norm_epsilon: float
    rope: Rope
    tied_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    value_head: bool = False
    """One number per token instead of a vocabulary (transformers' token classification models)."""


def value_shape(shape: ModelShape) -> ModelShape:
    """The value model with the same decoder."""
    return replace(shape, value_head=True, tied_embeddings=False)


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
        *("partial_rotary_factor",),
    ]
)
# Defaults of transformers' configuration classes for keys that the file lacks. Sizes of a
# particular model (layers, widths, vocabulary) are required. A null counts as a missing key, except
# for the two keys whose default follows from others.
_FILLED_IN: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32},
    "qwen3": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
}
_FILLED_IN_ALL = {"rms_norm_eps": 1e-6}
_FAMILIES = {
    "llama": {"qkv_bias": False, "qk_norm": False},
    "qwen2": {"qkv_bias": True, "qk_norm": False},
    "qwen3": {"qkv_bias": False, "qk_norm": True},
}


def read_model_shape(directory: str | Path) -> ModelShape:
    """The shape of the model in ``directory``; ValueError names what is missing or unsupported."""
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise UserError(f"{path} does not exist; give the directory of a Hugging Face model")
    return parse_model_shape(read_json(path), str(path))


def parse_model_shape(config: dict[str, Any], where: str = "config.json") -> ModelShape:
    """The shape that a ``config.json`` mapping describes.

    Every key is read, or known to be irrelevant to the forward pass, or refused by name, so that no
    model silently computes something else.
    """
    if not isinstance(config, dict):
        raise UserError(f"{where}: must be a JSON object, is {type(config).__name__}")
    family = config.get("model_type")
    if family not in _FAMILIES:
        raise UserError(
            f"{where}: model_type {family!r} is not supported; known: {', '.join(_FAMILIES)}"
        )
    _refuse_unsupported(config, where)
    config = {**_FILLED_IN_ALL, **_FILLED_IN[family], **config}
    heads = need(config, "num_attention_heads", where)
    hidden = need(config, "hidden_size", where)
    groups = heads
    if config.get("num_key_value_heads") is not None:
        groups = need(config, "num_key_value_heads", where)
    if config.get("head_dim") is not None or family == "qwen3":
        need(config, "head_dim", where)
    _divides(heads, "num_attention_heads", groups, "num_key_value_heads", where)
    if not config.get("head_dim"):
        _divides(hidden, "hidden_size", heads, "num_attention_heads", where)
    value_head = _has_value_head(config, where)
    return ModelShape(
        family=family,
        num_layers=need(config, "num_hidden_layers", where),
        hidden_size=hidden,
        ffn_hidden_size=need(config, "intermediate_size", where),
        num_attention_heads=heads,
        num_query_groups=groups,
        head_dim=config.get("head_dim") or hidden // heads,
        vocab_size=need(config, "vocab_size", where),
        max_position_embeddings=need(config, "max_position_embeddings", where),
        norm_epsilon=need(config, "rms_norm_eps", where),
        rope=parse_rope(config, where),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)) and not value_head,
        value_head=value_head,
        **_FAMILIES[family],
    )


def _has_value_head(config: dict[str, Any], where: str) -> bool:
    architecture = (config.get("architectures") or ["ForCausalLM"])[0]
    if architecture.endswith("ForCausalLM"):
        return False
    if not architecture.endswith("ForTokenClassification"):
        raise UserError(
            f"{where}: architecture {architecture} is not supported, only *ForCausalLM and "
            "*ForTokenClassification (a value model)"
        )
    # transformers writes no id2label for its default of two labels.
    labels = len(config.get("id2label") or (0, 1))
    if labels != 1:
        raise UserError(f"{where}: a value model has 1 label, this model has {labels}")
    return True


def _divides(whole: int, name: str, part: int, part_name: str, where: str) -> None:
    if whole % part:
        raise UserError(f"{where}: {name}={whole} is not a multiple of {part_name}={part}")


def _refuse_unsupported(config: dict[str, Any], where: str) -> None:
    for key, value in config.items():
        if key not in _KNOWN and value is not None and value is not False:
            raise UserError(
                f"{where}: {key}={value!r} is not supported by the {config['model_type']} family; "
                "remove the key if it does not change the forward pass"
            )
    wanted: dict[str, tuple[Any, ...]] = {
        "hidden_act": (None, "silu"),
        "attention_bias": (None, False),
        "mlp_bias": (None, False),
        "attention_dropout": (None, 0, 0.0),
        "use_sliding_window": (None, False),
        "partial_rotary_factor": (None, 1, 1.0),
        "pretraining_tp": (None, 1),
    }
    for key, allowed in wanted.items():
        if config.get(key) not in allowed:
            raise UserError(
                f"{where}: {key}={config[key]!r} is not supported, only {allowed[-1]!r}"
            )
    if config["model_type"] == "llama" and config.get("sliding_window"):
        raise UserError(f"{where}: sliding_window={config['sliding_window']!r} is not supported")
    for kind in config.get("layer_types") or ():
        if kind != "full_attention":
            raise UserError(
                f"{where}: layer_types has {kind!r}; only 'full_attention' is supported"
            )

"""Language models as transformers builds them: what they consist of, and their modules."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next

from ctrl_megatron.errors import UserError, read_json
from ctrl_megatron.models.families import FAMILIES, language_model_keys
from ctrl_megatron.models.hf_keys import require_even_rotary_width, require_multiple
from ctrl_megatron.models.shape import (
    GroupedQueryAttention,
    HfTensor,
    TransformersShape,
    value_head_has_bias,
    value_model_shape,
)

_OF_FILES = (
    *("architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "auto_map"),
    *("id2label", "label2id", "use_cache", "initializer_range"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)
"""Keys of config.json that change no forward pass."""
_OTHER = "name a language model of a family that the installed transformers has"
_SIZES = ("hidden_size", "vocab_size", "max_position_embeddings", "num_attention_heads")


def read_transformers_shape(directory: str | Path) -> TransformersShape:
    """The shape of the model in ``directory``, by transformers' own classes.

    UserError for a model that transformers has no class for (no code of a directory is run), that
    is no language model, or whose tensors have other names or forms in files.
    """
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise UserError(f"{path} does not exist; give the directory of a Hugging Face model")
    return parse_transformers_shape(read_json(path), str(path))


def parse_transformers_shape(config: dict[str, Any], where: str) -> TransformersShape:
    """The shape that a ``config.json`` mapping describes; raises as ``read_transformers_shape``."""
    return _shape(json.dumps(config, sort_keys=True), where)


@lru_cache(maxsize=8)
def _shape(text: str, where: str) -> TransformersShape:
    keys = json.loads(text)
    if not isinstance(keys, dict):
        raise UserError(f"{where}: must be a JSON object, is {type(keys).__name__}")
    family = str(keys.get("model_type"))
    known = FAMILIES.get(family)
    if known is not None and known.inner:
        keys = language_model_keys(keys, known, where)
        text = json.dumps(keys, sort_keys=True)
    if family not in transformers.CONFIG_MAPPING:
        why = (
            "its code is in the directory, and no code of a model directory is ever run"
            if keys.get("auto_map")
            else "the installed transformers does not have it"
        )
        problem = f"{where}: model_type {family!r} is not supported: {why}"
        raise UserError(problem, remedy=_remedy(family))
    with _read_by_transformers(where):
        config = _config(text)
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        problem = f"{where}: transformers has no language model of type {family!r}"
        raise UserError(problem, remedy=_OTHER)
    if config.get_text_config() is not config:
        raise UserError(f"{where}: {family!r} reads more than text", remedy="name a text model")
    if keys.get("quantization_config"):
        raise UserError(
            f"{where}: quantised weights are not supported by strategy 'fsdp'",
            remedy="name the model's weights in bfloat16 or float32",
        )
    for key in _SIZES:
        if not isinstance(getattr(config, key, None), int):
            raise UserError(f"{where}: the key {key!r} is missing", remedy=_OTHER)
    with _read_by_transformers(where):
        model, blocks = empty_model(text, torch.float32, buffers=False)
    transforms = get_model_conversion_mapping(model)
    converted = any(isinstance(transform, WeightConverter) for transform in transforms)
    otherwise = converted and not (known is not None and known.stacked_experts)
    numbers = {id(block): number for number, block in enumerate(blocks)}
    layer_of = {
        f"{name}.": numbers[id(module)]
        for name, module in model.named_modules()
        if id(module) in numbers
    }
    names_of_weights = dict(model.named_parameters(remove_duplicate=False))
    if stray := [name for name in model.state_dict() if name not in names_of_weights]:
        raise UserError(
            f"{where}: {family!r} keeps {stray[0]} beside its weights, which are shared",
            remedy=_remedy(family),
        )
    tensors = []
    for name, weight in model.named_parameters():
        if not weight.dim() or (otherwise and weight.dim() > 2):
            raise UserError(
                f"{where}: transformers keeps {name} of {family!r} in another form than files, "
                "which strategy 'fsdp' does not support",
                remedy=_remedy(family),
            )
        layer = next((layer_of[begin] for begin in layer_of if name.startswith(begin)), None)
        tensors.append((layer, HfTensor(name, tuple(weight.shape))))
    head = model.get_output_embeddings()
    (output,) = [name for name, module in model.named_modules() if module is head]
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    require_multiple(heads, "num_attention_heads", groups, "num_key_value_heads", where)
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    angles = [len(own) for name, own in model.named_buffers() if name.endswith("inv_freq")]
    if width + 1 in (2 * count for count in angles):
        require_even_rotary_width(width, where)
    delta_net, delta_layers = None, ()
    if known is not None and known.delta_net is not None:
        delta_net, delta_layers = known.delta_net({**known.defaults, **keys}, where)
    shape = TransformersShape(
        family=family,
        config=text,
        computed=json.dumps({k: v for k, v in keys.items() if k not in _OF_FILES}, sort_keys=True),
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        attention=GroupedQueryAttention(
            heads=heads,
            groups=groups,
            head_dim=width,
        ),
        tied_embeddings=bool(config.tie_word_embeddings),
        num_layers=len(blocks),
        tensors=tuple(tensors),
        outputs=tuple(f"{output}.{leaf}" for leaf, _ in head.named_parameters()),
        delta_net=delta_net,
        delta_layers=delta_layers,
        file_names=() if known is None else known.file_names,
    )
    bias = value_head_has_bias(keys, where)
    return shape if bias is None else value_model_shape(shape, head_bias=bias)


@contextmanager
def _read_by_transformers(where: str) -> Iterator[None]:
    """Turn every error of transformers about a config.json into a UserError."""
    try:
        yield
    except Exception as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise UserError(f"{where}: transformers refuses it: {said}") from error


def _remedy(family: str) -> str:
    if family in FAMILIES:
        return "set actor_rollout_ref.actor.strategy=megatron, which has the family"
    return _OTHER


def _config(text: str) -> Any:
    given = json.loads(text)
    return transformers.CONFIG_MAPPING[given["model_type"]].from_dict(given)


def longest_row_without_longrope(config: Any) -> float:
    """The tokens up to which all rows are rotated alike: ``longrope`` gives longer ones, and all
    that share a pass with them, other frequencies. Infinite for other models."""
    given = getattr(config, "rope_parameters", None) or {}
    kinds = [kind for kind in (given, *given.values()) if isinstance(kind, dict)]
    lengths = [
        kind["original_max_position_embeddings"]
        for kind in kinds
        if kind.get("rope_type") == "longrope"
    ]
    return min(lengths, default=math.inf)


def register_attention(name: str, attention: Any) -> None:
    """Let models compute ``attention`` where their configuration has ``name``; they make no mask
    for it."""
    transformers.AttentionInterface.register(name, attention)
    transformers.AttentionMaskInterface.register(name, lambda *_, **__: None)


def register_delta_rule(
    convolution: Callable[..., torch.Tensor], rule: Callable[..., Any], argument: str
) -> None:
    """Let gated delta nets compute their convolution and their rule by these functions in passes
    with ``argument``; transformers' own, where fla is not installed, do not tell rows apart."""
    for module in (modeling_qwen3_next, modeling_qwen3_5, modeling_qwen3_5_moe):
        for name, own in (
            ("causal_conv1d_fn", convolution),
            ("torch_chunk_gated_delta_rule", rule),
        ):
            setattr(module, name, partial(_either, argument, own, getattr(module, name)))


def _either(
    argument: str, own: Callable[..., Any], theirs: Callable[..., Any], *given: Any, **named: Any
) -> Any:
    return (theirs if named.get(argument) is None else own)(*given, **named)


def empty_model(
    config: str, dtype: torch.dtype, *, buffers: bool = True
) -> tuple[Any, list[torch.nn.Module]]:
    """(the language model of a ``config.json`` with parameters on the meta device and buffers in
    host memory, its decoder layers). Without ``buffers`` they are on the meta device too."""
    with _parameters_on_meta() if buffers else torch.device("meta"):
        model: Any = transformers.AutoModelForCausalLM.from_config(
            _config(config), dtype=dtype, trust_remote_code=False
        )
    names = model._no_split_modules or ()
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    return model.eval(), blocks


class ValueHeadDecoder(torch.nn.Module):
    """The decoder of a language model with a head for values, under the names of transformers'
    classification models.

    Its forward pass returns hidden states (1, T, H) after the final norm, as the decoder takes its
    arguments; ``score`` is applied by its caller.
    """

    def __init__(self, model: Any, *, bias: bool) -> None:
        super().__init__()
        self.decoder_name: str = model.base_model_prefix
        self.add_module(self.decoder_name, model.base_model)
        self.score = torch.nn.Linear(model.config.hidden_size, 1, bias=bias, device="meta")

    def forward(self, **arguments: Any) -> torch.Tensor:
        return getattr(self, self.decoder_name)(**arguments).last_hidden_state


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules that are made in the block have no memory for parameters. Their buffers are not in
    files and are computed."""
    register = torch.nn.Module.register_parameter

    def without_memory(
        module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None
    ) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = torch.nn.Parameter(parameter.to("meta"))
        register(module, name, parameter)

    torch.nn.Module.register_parameter = without_memory  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]

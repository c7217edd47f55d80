"""Language models as transformers builds them: what they consist of, and their modules."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers

from ctrl_megatron.errors import UserError, read_json
from ctrl_megatron.models.shape import GroupedQueryAttention, HfTensor, TransformersShape

_OF_FILES = (
    *("architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "auto_map"),
    *("use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range"),
)
"""Keys of config.json that change no forward pass."""
_SIZES = ("hidden_size", "vocab_size", "max_position_embeddings", "num_attention_heads")


def read_transformers_shape(directory: str | Path) -> TransformersShape:
    """The shape of the model in ``directory``, by transformers' own classes.

    UserError for a model that transformers has no class for (no code of a directory is run), that
    is no language model, or whose tensors have other names or more dimensions than files and shards
    support.
    """
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise UserError(f"{path} does not exist; give the directory of a Hugging Face model")
    given = read_json(path)
    return _shape(json.dumps(given, sort_keys=True), str(path))


@lru_cache(maxsize=8)
def _shape(text: str, where: str) -> TransformersShape:
    given: dict[str, Any] = json.loads(text)
    family = str(given.get("model_type"))
    if family not in transformers.CONFIG_MAPPING:
        why = (
            "its code is in the directory, and no code of a model directory is ever run"
            if given.get("auto_map")
            else "the installed transformers does not have it"
        )
        raise UserError(f"{where}: model_type {family!r} is not supported: {why}")
    config = _config(text)
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(f"{where}: transformers has no language model of type {family!r}")
    if config.get_text_config() is not config:
        raise UserError(f"{where}: {family!r} reads more than text; name a text model")
    if given.get("quantization_config"):
        raise UserError(f"{where}: quantised weights are not supported by strategy 'fsdp'")
    for key in _SIZES:
        if not isinstance(getattr(config, key, None), int):
            raise UserError(f"{where}: the key {key!r} is missing")
    model, blocks = empty_model(text, torch.float32)
    numbers = {id(block): number for number, block in enumerate(blocks)}
    layer_of = {
        f"{name}.": numbers[id(module)]
        for name, module in model.named_modules()
        if id(module) in numbers
    }
    names_of_weights = dict(model.named_parameters(remove_duplicate=False))
    if stray := [name for name in model.state_dict() if name not in names_of_weights]:
        raise UserError(
            f"{where}: {family!r} keeps {stray[0]} beside its weights, which are shared"
        )
    tensors = []
    for name, weight in model.named_parameters():
        if not 1 <= weight.dim() <= 2:
            raise UserError(
                f"{where}: {name} of {family!r} has {weight.dim()} dimensions; strategy 'fsdp' "
                "supports vectors and matrices"
            )
        layer = next((layer_of[begin] for begin in layer_of if name.startswith(begin)), None)
        tensors.append((layer, HfTensor(name, tuple(weight.shape))))
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return TransformersShape(
        family=family,
        config=json.dumps({k: v for k, v in given.items() if k not in _OF_FILES}, sort_keys=True),
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        attention=GroupedQueryAttention(
            heads=heads,
            groups=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=width,
        ),
        tied_embeddings=bool(config.tie_word_embeddings),
        num_layers=len(blocks),
        tensors=tuple(tensors),
    )


def _config(text: str) -> Any:
    given = json.loads(text)
    return transformers.CONFIG_MAPPING[given["model_type"]].from_dict(given)


def empty_model(config: str, dtype: torch.dtype) -> tuple[Any, list[torch.nn.Module]]:
    """(the language model of a ``config.json`` with parameters on the meta device and buffers in
    host memory, its decoder layers)."""
    with _parameters_on_meta():
        model: Any = transformers.AutoModelForCausalLM.from_config(_config(config), dtype=dtype)
    names = model._no_split_modules or ()
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    return model.eval(), blocks


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

"""How vLLM 0.32 starts with models that have gated delta nets.

Qwen3.5 is published within models that read pictures. vLLM has classes for the language model
alone, which it does not select for these directories, which refuse tensors for pictures, and whose
file imports torchvision.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from vllm.model_executor.models.registry import ModelRegistry
from vllm.model_executor.models.utils import AutoWeightsLoader

from ctrl_megatron.models.families import FAMILIES
from ctrl_megatron.rollout.sglang_stand_ins import stand_in_for
from ctrl_megatron.rollout.weight_update import read_model_config

_TEXT_CLASSES = {"qwen3_5": "Qwen3_5ForCausalLM", "qwen3_5_moe": "Qwen3_5MoeForCausalLM"}
"""Family of models that read pictures -> vLLM's class of the language model."""


def has_delta_nets(model_path: str | Path) -> bool:
    """Whether the directory's family has gated delta nets."""
    family = FAMILIES.get(read_model_config(model_path)["model_type"])
    return family is not None and family.delta_net is not None


def text_class_override(model_path: str | Path) -> dict[str, Any]:
    """The keys of ``config.json`` by which vLLM selects the language model of a model that reads
    pictures; empty for other directories."""
    own = _TEXT_CLASSES.get(read_model_config(model_path)["model_type"])
    return {} if own is None else {"architectures": [own]}


def register_text_classes(model_path: str | Path) -> None:
    """Let vLLM find the classes without torchvision, which environments for CPUs lack.

    vLLM would look at a class in a fresh process, without the stand-in; it takes one that is
    registered as it is. Forked workers inherit both. On GPUs torchvision is installed, and
    importing the classes here would use a GPU.
    """
    family = str(read_model_config(model_path)["model_type"]).removesuffix("_text")
    if family not in _TEXT_CLASSES or find_spec("torchvision") is not None:
        return
    stand_in_for(["torchvision"])
    from vllm.model_executor.models import qwen3_5

    for name in _TEXT_CLASSES.values():
        ModelRegistry.register_model(name, getattr(qwen3_5, name))


def skip_tensors_for_pictures() -> None:
    """Make vLLM's models leave out the tensors for pictures unless they compute with them; once in
    a process."""
    own = AutoWeightsLoader.load_weights

    def load_weights(
        loader: AutoWeightsLoader, weights: Iterable[tuple[str, torch.Tensor]], **named: Any
    ) -> set[str]:
        if not hasattr(loader.module, "visual"):
            weights = (pair for pair in weights if not pair[0].startswith("model.visual."))
        return own(loader, weights, **named)

    AutoWeightsLoader.load_weights = load_weights

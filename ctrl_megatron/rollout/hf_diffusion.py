"""The engine ``diffusion``: a masked-diffusion model in the layers of transformers' Qwen2 or Llama,
which see all tokens. No code of the model's directory runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ctrl_megatron.models.families import FAMILIES, Family
from ctrl_megatron.models.rules import usual_name
from ctrl_megatron.models.safetensors_dir import SafetensorsDirectory
from ctrl_megatron.models.shape import MaskedDiffusion
from ctrl_megatron.rollout.denoising import Denoiser, DenoisingBatch, DenoisingOptions
from ctrl_megatron.rollout.engine import EngineSpec
from ctrl_megatron.rollout.hf_engine import DEVICE, HfEngine, LoadedModel
from ctrl_megatron.rollout.hf_weights import views_by_name
from ctrl_megatron.rollout.weight_update import read_manifest, read_model_config
from ctrl_megatron.types import TensorSpec


class DiffusionEngine:
    """Builds an ``HfEngine`` that denoises instead of decoding."""

    @classmethod
    async def build(cls, spec: EngineSpec) -> HfEngine:
        """The engine, ready to generate. ValueError for a model that is no masked-diffusion model,
        and for options in ``spec.extra`` that ``DenoisingOptions`` does not have."""
        return HfEngine(spec, load_denoiser)


@torch.no_grad()
def load_denoiser(spec: EngineSpec) -> LoadedModel:
    """The model of the directory with its weights, and its sampler."""
    options = DenoisingOptions.read(spec.extra)
    config = read_model_config(spec.model_path)
    family = FAMILIES.get(config.get("model_type", ""))
    if family is None or family.diffusion is None:
        able = ", ".join(name for name, one in FAMILIES.items() if one.diffusion is not None)
        raise ValueError(
            f"{spec.model_path}/config.json: model_type {config.get('model_type')!r} is no "
            f"masked-diffusion model ({able}); use another engine"
        )
    if spec.lora is not None:
        raise ValueError("engine 'diffusion' computes no adapters beside its weights")
    diffusion = family.diffusion(config, f"{spec.model_path}/config.json")
    model = _in_transformers_layers(config, family, spec.dtype).eval().to(DEVICE)
    views, tensors = partial(_views, model, family), SafetensorsDirectory(spec.model_path)
    for name, view in views(read_manifest(spec.model_path, spec.dtype)).items():
        view.copy_(tensors.read(name))
    denoiser = Denoiser(
        logits=partial(_logits, model, diffusion),
        mask_token=diffusion.mask_token,
        device=torch.device(DEVICE),
    )
    return LoadedModel(model=model, views=views, batch=partial(DenoisingBatch, denoiser, options))


def _views(model: Any, family: Family, manifest: Sequence[TensorSpec]) -> dict[str, torch.Tensor]:
    """As ``views_by_name``, by the family's names."""
    usual = [replace(s, name=usual_name(s.name, family.file_names)) for s in manifest]
    views = views_by_name(model, usual)
    return {s.name: views[own.name] for s, own in zip(manifest, usual, strict=True)}


def _in_transformers_layers(config: dict[str, Any], family: Family, dtype: str) -> Any:
    unread = {"model_type", "architectures", "auto_map", "dtype", "torch_dtype"}
    usual = {family.key_names.get(k, k): v for k, v in config.items() if k not in unread}
    layers = AutoConfig.for_model(family.layers_of, **usual)
    return AutoModelForCausalLM.from_config(layers, dtype=getattr(torch, dtype))


def _logits(
    model: Any,
    diffusion: MaskedDiffusion,
    tokens: torch.Tensor,
    attended: torch.Tensor,
    places: int,
) -> torch.Tensor:
    """As ``Denoiser.logits``."""
    width = tokens.shape[1]
    # Padding sees itself, because a softmax over nothing would be undefined.
    seen = attended[:, None, :] | torch.eye(width, dtype=torch.bool, device=tokens.device)
    mask = torch.zeros(seen.shape, dtype=model.dtype, device=tokens.device)
    mask = mask.masked_fill_(~seen, torch.finfo(model.dtype).min)
    logits = model(
        input_ids=tokens,
        attention_mask=mask[:, None],
        position_ids=(attended.cumsum(-1) - 1).clamp(min=0),
        use_cache=False,
        logits_to_keep=places + diffusion.shifted,
    ).logits
    return logits[:, :places]

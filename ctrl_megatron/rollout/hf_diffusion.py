"""The engine ``diffusion``: a masked-diffusion model in the layers of transformers' Qwen2 or Llama,
which see all tokens. No code of the model's directory runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from ctrl_megatron.models.families import FAMILIES, Family
from ctrl_megatron.models.rules import llama_tensor_name
from ctrl_megatron.models.safetensors_dir import SafetensorsDirectory
from ctrl_megatron.rollout.denoising import DenoisingBatch, DenoisingFunctions, DenoisingOptions
from ctrl_megatron.rollout.engine import EngineSpec
from ctrl_megatron.rollout.hf_engine import DEVICE, HfEngine, LoadedModel
from ctrl_megatron.rollout.hf_weights import weight_views_by_name
from ctrl_megatron.rollout.weight_update import checkpoint_specs, read_model_config
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
    options = DenoisingOptions.from_extra(spec.extra)
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
    for name, view in views(checkpoint_specs(spec.model_path, spec.dtype)).items():
        view.copy_(tensors.read(name))
    passes = _FullPass(model, diffusion.shifted)
    denoiser = DenoisingFunctions(
        logits=passes.logits,
        keep=passes.keep,
        mask_token=diffusion.mask_token,
        device=torch.device(DEVICE),
    )
    return LoadedModel(model=model, views=views, batch=partial(DenoisingBatch, denoiser, options))


def _views(model: Any, family: Family, manifest: Sequence[TensorSpec]) -> dict[str, torch.Tensor]:
    """As ``weight_views_by_name``, by the family's names."""
    usual = [replace(s, name=llama_tensor_name(s.name, family.file_names)) for s in manifest]
    views = weight_views_by_name(model, usual)
    return {s.name: views[own.name] for s, own in zip(manifest, usual, strict=True)}


def _in_transformers_layers(config: dict[str, Any], family: Family, dtype: str) -> Any:
    unread = {"model_type", "architectures", "auto_map", "dtype", "torch_dtype"}
    usual = {family.key_names.get(k, k): v for k, v in config.items() if k not in unread}
    layers = AutoConfig.for_model(family.layers_of, **usual)
    return AutoModelForCausalLM.from_config(
        layers, dtype=getattr(torch, dtype), trust_remote_code=False
    )


@dataclass(frozen=True, slots=True)
class _FullPass:
    """Passes of a model in which every token sees all others."""

    model: Any
    shifted: bool
    """Whether a token is predicted by the state before its place."""

    def logits(self, tokens: torch.Tensor, attended: torch.Tensor, places: int) -> torch.Tensor:
        return self.behind(tokens, attended, places, None)

    def keep(
        self, tokens: torch.Tensor, attended: torch.Tensor, places: int
    ) -> tuple[torch.Tensor, _KeptStates]:
        cache, end = DynamicCache(), tokens.shape[1] - places - self.shifted
        logits = self.behind(tokens, attended, places, cache)
        states = [(one.keys[:, :, :end], one.values[:, :, :end]) for one in cache.layers]
        return logits, _KeptStates(self, places, states)

    def behind(
        self,
        tokens: torch.Tensor,
        attended: torch.Tensor,
        places: int,
        cache: DynamicCache | None,
    ) -> torch.Tensor:
        """As ``logits``, where the ``cache`` has the states of the first tokens already. It takes
        those of the others too."""
        width, start = tokens.shape[1], 0 if cache is None else cache.get_seq_length()
        # Padding sees itself, because a softmax over nothing would be undefined.
        own = torch.eye(width, dtype=torch.bool, device=tokens.device)[start:]
        seen = attended[:, None, :] | own
        mask = torch.zeros(seen.shape, dtype=self.model.dtype, device=tokens.device)
        mask = mask.masked_fill_(~seen, torch.finfo(self.model.dtype).min)
        logits = self.model(
            input_ids=tokens[:, start:],
            attention_mask=mask[:, None],
            position_ids=(attended.cumsum(-1) - 1).clamp(min=0)[:, start:],
            past_key_values=cache,
            use_cache=cache is not None,
            logits_to_keep=places + self.shifted,
        ).logits
        return logits[:, :places]


@dataclass(frozen=True, slots=True)
class _KeptStates:
    """A ``denoising.PrefixKVCache``."""

    passes: _FullPass
    places: int
    states: list[tuple[torch.Tensor, torch.Tensor]]
    """Keys and values (B, heads, tokens of the prefix, head size) of every layer."""

    def logits(
        self, tokens: torch.Tensor, attended: torch.Tensor, rows: Sequence[int]
    ) -> torch.Tensor:
        cache = DynamicCache()
        for layer, (keys, values) in enumerate(self.states):
            cache.update(keys[rows], values[rows], layer)
        return self.passes.behind(tokens, attended, self.places, cache)

"""The adapters of an SGLang engine: tensors in, the name that every request carries out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from sglang.srt.managers.io_struct import LoadLoRAAdapterReqInput, UnloadLoRAAdapterReqInput

from ctrl_megatron.rollout.adapter_files import AdapterFiles
from ctrl_megatron.rollout.engine import EngineSpec
from ctrl_megatron.rollout.weight_update import updated_tensor_specs
from ctrl_megatron.types import Lora

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Layers that SGLang has in one -> those of the model."""


def sglang_lora_args(lora: Lora | None, *, on_gpu: bool) -> dict[str, Any]:
    """SGLang's arguments for an engine with adapters."""
    if lora is None:
        return {}
    chosen: dict[str, Any] = {
        "enable_lora": True,
        "max_lora_rank": lora.rank,
        "lora_target_modules": sorted(_fused_targets(lora)),
        # One for requests without adapters.
        "max_loras_per_batch": 2,
    }
    return chosen if on_gpu else {**chosen, "lora_backend": "torch_native"}


def _fused_targets(lora: Lora) -> set[str]:
    """The targets, and the projections that SGLang has in one layer with one of them."""
    together = [parts for parts in FUSED.values() if set(parts) & set(lora.targets)]
    return {*lora.targets, *(part for parts in together for part in parts)}


class SglangAdapters:
    """The adapters that the last update has brought."""

    def __init__(self, control: Any, spec: EngineSpec, lora: Lora) -> None:
        """``control`` is SGLang's tokenizer manager, ``lora`` that of ``spec``."""
        self._control, self.files = control, AdapterFiles(lora)
        self.name: str | None = None
        """What every request carries; None before the first update, when B is zero."""
        # SGLang takes part of a fused layer only with all of the others.
        self._targets = _fused_targets(lora)
        further = replace(lora, targets=tuple(self._targets - set(lora.targets)))
        self._zeros = {
            one.name: torch.zeros(one.shape, dtype=getattr(torch, one.dtype))
            for one in updated_tensor_specs(replace(spec, lora=further))
        }

    async def load_version(self, version: str) -> None:
        """Load what has arrived in place of the adapters before; RuntimeError if SGLang refuses."""
        folder = self.files.write(self._targets, self._zeros)
        if self.name is not None:
            await self._ask(self._control.unload_lora_adapter, UnloadLoRAAdapterReqInput)
        self.name = f"{version} ({self.files.number})"
        await self._ask(
            self._control.load_lora_adapter, LoadLoRAAdapterReqInput, lora_path=str(folder)
        )

    async def _ask(self, call: Any, kind: Any, **given: Any) -> None:
        answer = await call(kind(lora_name=self.name, **given))
        if not answer.success:
            raise RuntimeError(f"SGLang and adapters {self.name}: {answer.error_message}")


def require_loaded_adapters(manager: Any, tensors: dict[str, torch.Tensor]) -> None:
    """RuntimeError unless the adapters that SGLang's ``LoRAManager`` computes with are
    ``tensors``."""
    (adapter,) = manager.loras.values()
    held = {name: tensor for layer in adapter.layers for name, tensor in layer.weights.items()}
    wanted = dict(tensors)
    for fused, parts in FUSED.items():
        for name in [n for n in wanted if f".{parts[0]}." in n]:
            stacked = [wanted.pop(name.replace(f".{parts[0]}.", f".{p}.")) for p in parts]
            wanted[name.replace(f".{parts[0]}.", f".{fused}.")] = torch.cat(stacked)
    wrong = [
        name for name, t in wanted.items() if name not in held or not torch.equal(held[name], t)
    ]
    if wrong or held.keys() != wanted.keys():
        raise RuntimeError(
            f"SGLang has other adapters than were pushed: {len(wrong)} of {len(wanted)} differ, "
            f"{wrong[:3]}"
        )

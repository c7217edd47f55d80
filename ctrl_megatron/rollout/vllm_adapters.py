"""The adapters of a vLLM engine: tensors in, a ``LoRARequest`` for every completion out."""

from __future__ import annotations

from typing import Any, get_args

from vllm.config.lora import MaxLoRARanks
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM

from ctrl_megatron.models.rules import LORA_B
from ctrl_megatron.rollout.adapter_files import AdapterFiles
from ctrl_megatron.rollout.weight_update import tensor_checksum
from ctrl_megatron.types import Lora


def vllm_lora_args(lora: Lora | None) -> dict[str, Any]:
    """vLLM's arguments for an engine with adapters; ValueError for a rank that is too large."""
    if lora is None:
        return {}
    known = sorted(get_args(MaxLoRARanks))
    if lora.rank > known[-1]:
        raise ValueError(f"vLLM computes adapters of rank {known[-1]} at most, not {lora.rank}")
    largest = next(rank for rank in known if rank >= lora.rank)
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": largest}


class VllmAdapters:
    """The adapters that the last update has brought."""

    def __init__(self, llm: AsyncLLM, lora: Lora) -> None:
        self._llm, self._lora, self.files = llm, lora, AdapterFiles(lora)
        self.request: LoRARequest | None = None
        """The adapters' request, which every completion carries; None before the first update, when
        B is zero."""

    async def load_version(self, version: str) -> None:
        """Load what has arrived; RuntimeError if vLLM does not have it afterwards."""
        folder, number = self.files.write(), self.files.number
        # One of its warm-up may have the same number; vLLM would keep it.
        for before in await self._llm.list_loras():
            await self._llm.remove_lora(before)
        request = LoRARequest(f"{version} ({number})", number, str(folder))
        await self._llm.add_lora(request)
        held = set(await self._llm.list_loras())
        if held != {number}:
            raise RuntimeError(f"vLLM has adapters {held} and not those of {version}, {number}")
        self.request = request

    async def checksums(self) -> dict[str, str]:
        """The checksums of the adapters in vLLM's workers, comparable with those of the pushed
        tensors: vLLM keeps B multiplied by the scale, and a B that is the pushed one times the
        scale gets the checksum of the pushed one."""
        parts: list[dict[str, str]] = await self._llm.collective_rpc("ctrl_adapter_checksums")
        by_name = parts[0]
        for name, tensor in self.files.held.items():
            scaled = tensor * self._lora.scale if name.endswith(LORA_B) else tensor
            if by_name.get(name) == tensor_checksum(scaled):
                by_name[name] = tensor_checksum(tensor)
        return by_name

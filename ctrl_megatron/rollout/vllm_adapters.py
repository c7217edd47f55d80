"""The adapters of a vLLM engine: tensors in, a ``LoRARequest`` for every completion out."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors.torch import save_file
from vllm.config.lora import MaxLoRARanks
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM

from ctrl_megatron.models.rules import LORA_B
from ctrl_megatron.parallel.hosts import SHARED_MEMORY, own_segment_prefix
from ctrl_megatron.rollout.transports import read_chunk
from ctrl_megatron.rollout.weight_chunks import WeightChunk
from ctrl_megatron.rollout.weight_update import tensor_checksum
from ctrl_megatron.types import Lora


def lora_args(lora: Lora | None) -> dict[str, Any]:
    """vLLM's arguments for an engine with adapters; ValueError for a rank that is too large."""
    if lora is None:
        return {}
    known = sorted(get_args(MaxLoRARanks))
    if lora.rank > known[-1]:
        raise ValueError(f"vLLM computes adapters of rank {known[-1]} at most, not {lora.rank}")
    largest = next(rank for rank in known if rank >= lora.rank)
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": largest}


class PushedAdapters:
    """The adapters that the last update has brought.

    vLLM reads them from a directory in shared memory, a new one for every version: it finds a
    prompt's cached keys by the adapter's name and path, and would use those of the version before.
    """

    def __init__(self, llm: AsyncLLM, lora: Lora) -> None:
        self._llm, self._lora = llm, lora
        self._root = Path(tempfile.mkdtemp(prefix=own_segment_prefix(), dir=SHARED_MEMORY))
        self._arriving: dict[str, torch.Tensor] = {}
        self._held: dict[str, torch.Tensor] = {}
        self._number = 0
        self.request: LoRARequest | None = None
        """The adapters' request, which every completion carries; None before the first update, when
        B is zero."""

    def read_adapter_chunk(self, chunk: WeightChunk) -> None:
        self._arriving |= {name: tensor.clone() for name, tensor in read_chunk(chunk)}

    async def load_version(self, version: str) -> None:
        """Load what has arrived; RuntimeError if vLLM does not have it afterwards."""
        before, self._number = self.request, self._number + 1
        folder = self._root / str(self._number)
        folder.mkdir()
        config = {
            "peft_type": "LORA",
            "r": self._lora.rank,
            "lora_alpha": self._lora.alpha,
            "target_modules": list(self._lora.targets),
        }
        (folder / "adapter_config.json").write_text(json.dumps(config))
        save_file(self._arriving, folder / "adapter_model.safetensors")
        self._held, self._arriving = self._arriving, {}
        # One of its warm-up may have the same number; vLLM would keep it.
        for number in await self._llm.list_loras():
            await self._llm.remove_lora(number)
        request = LoRARequest(f"{version} ({self._number})", self._number, str(folder))
        await self._llm.add_lora(request)
        held = set(await self._llm.list_loras())
        if held != {self._number}:
            raise RuntimeError(
                f"vLLM has adapters {held} and not those of {version}, {self._number}"
            )
        self.request = request
        if before is not None:
            shutil.rmtree(before.lora_path)

    async def checksums(self) -> dict[str, str]:
        """The checksums of the adapters in vLLM's workers, comparable with those of the pushed
        tensors: vLLM keeps B multiplied by the scale, and a B that is the pushed one times the
        scale gets the checksum of the pushed one."""
        parts: list[dict[str, str]] = await self._llm.collective_rpc("ctrl_adapter_checksums")
        by_name = parts[0]
        for name, tensor in self._held.items():
            scaled = tensor * self._lora.scale if name.endswith(LORA_B) else tensor
            if by_name.get(name) == tensor_checksum(scaled):
                by_name[name] = tensor_checksum(tensor)
        return by_name

    def close(self) -> None:
        shutil.rmtree(self._root, ignore_errors=True)

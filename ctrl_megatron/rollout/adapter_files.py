"""Pushed adapters as PEFT's files in shared memory, from which an engine reads them."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file

from ctrl_megatron.parallel.hosts import SHARED_MEMORY, own_segment_prefix
from ctrl_megatron.rollout.transports import read_chunk
from ctrl_megatron.rollout.weight_chunks import WeightChunk
from ctrl_megatron.types import Lora


class AdapterFiles:
    """A directory of files for each version of the adapters: engines find a prompt's cached keys by
    the adapters' name and path, and would use those of the version before."""

    def __init__(self, lora: Lora) -> None:
        self._lora = lora
        self._root = Path(tempfile.mkdtemp(prefix=own_segment_prefix(), dir=SHARED_MEMORY))
        self._arriving: dict[str, torch.Tensor] = {}
        self.held: dict[str, torch.Tensor] = {}
        """The tensors of the newest directory, by PEFT's names."""
        self.number = 0
        """Number of the newest directory; 0 before the first."""

    def read_chunk(self, chunk: WeightChunk) -> None:
        self._arriving |= {name: tensor.clone() for name, tensor in read_chunk(chunk)}

    @property
    def newest(self) -> Path:
        return self._root / str(self.number)

    def write(
        self, targets: Iterable[str] | None = None, further: dict[str, torch.Tensor] | None = None
    ) -> Path:
        """A new directory with what has arrived and ``further`` tensors, in the place of the one
        before; ``targets`` are those of its configuration, by default the adapters' own."""
        before, self.number = self.newest, self.number + 1
        self.newest.mkdir()
        config = {
            "peft_type": "LORA",
            "r": self._lora.rank,
            "lora_alpha": self._lora.alpha,
            "target_modules": list(self._lora.targets if targets is None else targets),
        }
        (self.newest / "adapter_config.json").write_text(json.dumps(config))
        save_file({**(further or {}), **self._arriving}, self.newest / "adapter_model.safetensors")
        self.held, self._arriving = self._arriving, {}
        shutil.rmtree(before, ignore_errors=True)
        return self.newest

    def close(self) -> None:
        shutil.rmtree(self._root, ignore_errors=True)

"""A medium of a user's own: weights in temporary files. The receiving half."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from ctrl_megatron.rollout.weight_chunks import WeightChunk, specs_of, tensor_at


class FileReceiver:
    """Reads the whole file into memory of its own."""

    def tensors(self, chunk: WeightChunk) -> Iterator[tuple[str, torch.Tensor]]:
        place = chunk["place"]
        memory = torch.frombuffer(bytearray(Path(place["file"]).read_bytes()), dtype=torch.uint8)
        for spec in specs_of(chunk):
            yield spec.name, tensor_at(memory, spec, place["first_bytes"][spec.name])

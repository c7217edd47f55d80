"""Receiving halves of the media that bring weights to engines: one file per medium.

The sending half, ``resharding.transports``, names its receiving half in every chunk, so an engine
needs no setting to know the medium.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from typing import Protocol

import torch

from ctrl_megatron.rollout.weight_chunks import WeightChunk


class Receiver(Protocol):
    """Reads the chunks of one medium. Every process that loads weights makes one, without
    arguments, for its first chunk and keeps it."""

    def tensors(self, chunk: WeightChunk) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (HF name, tensor) of the chunk in its order.

        The tensors may be views of memory that is written again once the engine requests the next
        chunk; callers copy what they keep and never write to them. ValueError for a chunk whose
        tensors are not where it says.
        """
        ...


def read_chunk(chunk: WeightChunk) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (HF name, tensor) of the chunk, as ``Receiver.tensors``."""
    return _receiver(chunk["receiver"]).tensors(chunk)


def wait_until_copied(device: torch.device) -> None:
    """Return when every copy that this thread has begun on the device has ended; before that a
    sender must not write the chunk's memory again."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


@cache
def _receiver(reference: str) -> Receiver:
    # Not by config.import_path: an engine's environment may lack what config imports.
    module, _, name = reference.partition(":")
    try:
        return getattr(import_module(module), name)()
    except (ImportError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{reference!r} is no importable module:Class ({type(error).__name__}: {error}); put "
            "its folder on PYTHONPATH, or correct the name"
        ) from error

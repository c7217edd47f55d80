"""The calls by which processes share a GPU's memory, into a library in the place of CUDA's."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import pytest
import torch

from ctrl_megatron.rollout import device_memory
from ctrl_megatron.rollout.device_memory import CudaMemory

INVALID = 1
PEER_ACCESS = 1
"""cudaIpcMemLazyEnablePeerAccess of CUDA's header."""


class Cudart:
    """``libcudart.so`` with the arguments of its header, for memory of this process. Its handles
    begin with zeros and have zeros inside, as CUDA's may."""

    def __init__(self) -> None:
        self.blocks: dict[int, Any] = {}
        self.opened: list[int] = []

    def cudaMalloc(self, place: Any, size: ctypes.c_size_t) -> int:
        block = ctypes.create_string_buffer(size.value)
        place._obj.value = ctypes.addressof(block)
        self.blocks[place._obj.value] = block
        return 0

    def cudaFree(self, place: ctypes.c_void_p) -> int:
        return INVALID if self.blocks.pop(place.value or 0, None) is None else 0

    def cudaIpcGetMemHandle(self, handle: Any, place: ctypes.c_void_p) -> int:
        ctypes.memmove(handle, struct.pack("<8xQ16x32s", place.value, bytes(range(200, 232))), 64)
        return 0

    def cudaIpcOpenMemHandle(self, place: Any, handle: Any, flags: ctypes.c_uint) -> int:
        # The header passes the 64 bytes themselves, and no pointer to them.
        assert isinstance(handle, ctypes.Structure) and ctypes.sizeof(handle) == 64
        address, mark = struct.unpack("<8xQ16x32s", bytes(handle))
        assert mark == bytes(range(200, 232)) and flags.value == PEER_ACCESS
        if address not in self.blocks:
            return INVALID
        place._obj.value = address
        self.opened.append(address)
        return 0

    def cudaIpcCloseMemHandle(self, place: ctypes.c_void_p) -> int:
        self.opened.remove(place.value or 0)
        return 0


def host_tensor(address: ctypes.c_void_p, size: int) -> torch.Tensor:
    """What ``torch.as_tensor`` makes of an address on a GPU."""
    return torch.frombuffer(
        (ctypes.c_uint8 * size).from_address(address.value or 0), dtype=torch.uint8
    )


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Cudart:
    library, loaded = Cudart(), {"libcudart.so.13": None}
    monkeypatch.setattr(torch.version, "cuda", "13.1")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library if name in loaded else None)
    monkeypatch.setattr(device_memory, "_cuda_tensor", host_tensor)
    return library


def test_a_handle_is_64_bytes_and_opens_the_memory_of_the_other_process(runtime: Cudart) -> None:
    trainer, worker = CudaMemory(), CudaMemory()
    memory = trainer.allocate(96)
    handle = trainer.get_handle(memory)
    # Also the zeros, which end a string of C.
    assert type(handle) is bytes and len(handle) == 64
    there = worker.open_handle(handle, 96)
    memory.copy_(torch.arange(96, dtype=torch.uint8))
    assert there.tolist() == list(range(96))
    worker.close(there)
    assert runtime.opened == []
    trainer.free(memory)
    assert not runtime.blocks


def test_memory_that_is_gone_is_named(runtime: Cudart) -> None:
    memory = CudaMemory().allocate(8)
    handle = CudaMemory().get_handle(memory)
    CudaMemory().free(memory)
    with pytest.raises(RuntimeError, match="cudaIpcOpenMemHandle failed with CUDA error 1"):
        CudaMemory().open_handle(handle, 8)
    with pytest.raises(RuntimeError, match="cudaFree failed with CUDA error 1"):
        CudaMemory().free(memory)

"""The calls by which processes share a GPU's memory, into a library in the place of CUDA's."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import pytest
import torch

from ctrl_megatron.rollout.device_memory import CudaMemory

INVALID = 1
PEER_ACCESS = 1
"""cudaIpcMemLazyEnablePeerAccess of CUDA's header."""


class Cudart:
    """``libcudart.so`` with the arguments of its header, for memory of this process. Its handles
    begin with zeros and have zeros inside, as CUDA's may."""

    def __init__(self) -> None:
        self.current = 0
        """The device of the process that calls."""
        self.blocks: dict[int, Any] = {}
        self.devices: dict[int, int] = {}
        self.opened: list[int] = []

    def cudaMalloc(self, place: Any, size: ctypes.c_size_t) -> int:
        block = ctypes.create_string_buffer(size.value)
        place._obj.value = ctypes.addressof(block)
        self.blocks[place._obj.value], self.devices[place._obj.value] = block, self.current
        return 0

    def cudaPointerGetAttributes(self, attributes: Any, place: ctypes.c_void_p) -> int:
        device, address = self.devices[place.value or 0], place.value or 0
        # cudaMemoryTypeDevice, the device on which the memory is, and both pointers.
        fields = struct.pack("<iiQQ64x", 2, device, address, 0)
        assert ctypes.sizeof(attributes._obj) >= len(fields)
        ctypes.memmove(attributes, fields, len(fields))
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

    def as_tensor(self, given: Any, device: torch.device | str) -> torch.Tensor:
        """As ``torch.as_tensor``: a copy where ``device`` is not that of the memory. Without a
        number it is that of the process."""
        (size,), (address, _) = (given.__cuda_array_interface__[key] for key in ("shape", "data"))
        found = torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)
        index = torch.device(device).index
        here = self.current if index is None else index
        return found if here == self.devices[address] else found.clone()


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Cudart:
    library, loaded = Cudart(), {"libcudart.so.13": None}
    monkeypatch.setattr(torch.version, "cuda", "13.1")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library if name in loaded else None)
    monkeypatch.setattr(torch, "as_tensor", library.as_tensor)
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


def test_what_a_rank_on_another_gpu_writes_is_there(runtime: Cudart) -> None:
    """All ranks of a host map the buckets of all its GPUs."""
    runtime.current = 1
    memory = CudaMemory().allocate(8)
    handle = CudaMemory().get_handle(memory)
    runtime.current = 0
    CudaMemory().open_handle(handle, 8).fill_(7)
    assert memory.tolist() == [7] * 8


def test_a_copy_in_the_place_of_the_memory_is_refused(
    runtime: Cudart, monkeypatch: pytest.MonkeyPatch
) -> None:
    lent = runtime.as_tensor
    monkeypatch.setattr(torch, "as_tensor", lambda *given, **named: lent(*given, **named).clone())
    with pytest.raises(RuntimeError, match="torch has copied memory of GPU 0"):
        CudaMemory().allocate(8)


def test_memory_that_is_gone_is_named(runtime: Cudart) -> None:
    memory = CudaMemory().allocate(8)
    handle = CudaMemory().get_handle(memory)
    CudaMemory().free(memory)
    with pytest.raises(RuntimeError, match="cudaIpcOpenMemHandle failed with CUDA error 1"):
        CudaMemory().open_handle(handle, 8)
    with pytest.raises(RuntimeError, match="cudaFree failed with CUDA error 1"):
        CudaMemory().free(memory)

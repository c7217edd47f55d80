"""Memory of one process that another process of the host maps by a handle: plain bytes, so that
processes with different builds of torch can exchange it.

``CudaMemory`` uses CUDA's handles. No GPU has run it. ``HostMemory`` has the same interface for
host memory; processes on a CPU use it. ``lock_pages`` prepares host memory for copies to and from a
GPU.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import sys
from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch

DriverName = Literal["cuda", "host"]
_PORTABLE = 1
"""cudaHostRegisterPortable: locked for all devices of the process."""


class MemoryDriver(Protocol):
    """Allocates memory, gives handles to it and opens those of other processes."""

    def allocate(self, size: int) -> torch.Tensor:
        """New memory (uint8) that lives as long as the process or until ``free``."""
        ...

    def free(self, memory: torch.Tensor) -> None:
        """Free memory that ``allocate`` returned; no tensor may use it afterwards."""
        ...

    def get_handle(self, memory: torch.Tensor) -> bytes:
        """A handle that another process can open, of memory that ``allocate`` returned."""
        ...

    def open_handle(self, handle: bytes, size: int) -> torch.Tensor:
        """The memory (uint8) of another process. RuntimeError or ValueError if it is gone."""
        ...

    def close(self, memory: torch.Tensor) -> None:
        """Unmap memory that ``open_handle`` returned; no tensor may use it afterwards."""
        ...

    def synchronize(self) -> None:
        """Return when all copies that this process has begun have ended."""
        ...


def lock_pages(memory: torch.Tensor) -> Callable[[], None]:
    """Page-lock host memory (uint8) if this process has used a GPU, so that copies between both go
    through no other memory; returns what undoes it, which comes before the memory is unmapped.

    A lock that the system refuses is reported, and copies are only slower. No GPU has run it.
    """
    if not torch.cuda.is_initialized() or not memory.numel():
        return lambda: None
    runtime: Any = torch.cuda.cudart()
    place = memory.data_ptr()

    def unlock() -> None:
        if code := int(runtime.cudaHostUnregister(place)):
            raise RuntimeError(f"cudaHostUnregister failed with CUDA error {code}")

    if code := int(runtime.cudaHostRegister(place, memory.nbytes, _PORTABLE)):
        print(
            f"{memory.nbytes} bytes of host memory are not page-locked (CUDA error {code}); copies "
            "between them and the GPU are slower",
            file=sys.stderr,
            flush=True,
        )
        return lambda: None
    return unlock


def memory_driver(name: DriverName) -> MemoryDriver:
    """The driver called ``name``."""
    return CudaMemory() if name == "cuda" else HostMemory()


class HostMemory:
    """``MemoryDriver`` of host memory without a name. A handle is the number of the process, of its
    open file, and of the file itself."""

    _FORMAT = "<qqq40x"

    def __init__(self) -> None:
        self._files: dict[int, int] = {}

    def allocate(self, size: int) -> torch.Tensor:
        file = os.memfd_create("ctrl-bucket")
        os.ftruncate(file, size)
        memory = torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
        self._files[memory.data_ptr()] = file
        return memory

    def free(self, memory: torch.Tensor) -> None:
        os.close(self._files.pop(memory.data_ptr()))

    def get_handle(self, memory: torch.Tensor) -> bytes:
        file = self._files[memory.data_ptr()]
        return struct.pack(self._FORMAT, os.getpid(), file, os.fstat(file).st_ino)

    def open_handle(self, handle: bytes, size: int) -> torch.Tensor:
        process, number, inode = struct.unpack(self._FORMAT, handle)
        try:
            file = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR)
        except OSError as error:
            raise ValueError(f"the memory of process {process} is gone: {error}") from error
        try:
            if os.fstat(file).st_ino != inode or os.fstat(file).st_size < size:
                raise ValueError(f"the memory of process {process} is gone: the file is another")
            return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
        finally:
            os.close(file)

    def close(self, memory: torch.Tensor) -> None:
        """The mapping ends with its last tensor."""

    def synchronize(self) -> None:
        """Copies into host memory have ended when they return."""


class CudaMemory:
    """``MemoryDriver`` of the current device, through CUDA's runtime.

    The memory does not come from torch's allocator, whose blocks share handles and may be moved.
    """

    _PEER_ACCESS = 1

    class _Handle(ctypes.Structure):
        _fields_ = (("reserved", ctypes.c_char * 64),)

    class _Attributes(ctypes.Structure):
        _fields_ = (
            *(("type", ctypes.c_int), ("device", ctypes.c_int)),
            *(("device_pointer", ctypes.c_void_p), ("host_pointer", ctypes.c_void_p)),
            ("reserved", ctypes.c_long * 8),
        )

    def __init__(self) -> None:
        major = str(torch.version.cuda).split(".")[0]
        self._runtime = ctypes.CDLL(f"libcudart.so.{major}")
        # The runtime uses torch's context of this device.
        torch.cuda.current_stream()

    def allocate(self, size: int) -> torch.Tensor:
        address = ctypes.c_void_p()
        self._call("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(size))
        return self._tensor(address, size)

    def free(self, memory: torch.Tensor) -> None:
        self._call("cudaFree", ctypes.c_void_p(memory.data_ptr()))

    def get_handle(self, memory: torch.Tensor) -> bytes:
        handle = self._Handle()
        address = ctypes.c_void_p(memory.data_ptr())
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), address)
        return ctypes.string_at(ctypes.byref(handle), 64)

    def open_handle(self, handle: bytes, size: int) -> torch.Tensor:
        address, given = ctypes.c_void_p(), self._Handle.from_buffer_copy(handle)
        flags = ctypes.c_uint(self._PEER_ACCESS)
        self._call("cudaIpcOpenMemHandle", ctypes.byref(address), given, flags)
        return self._tensor(address, size)

    def close(self, memory: torch.Tensor) -> None:
        self._call("cudaIpcCloseMemHandle", ctypes.c_void_p(memory.data_ptr()))

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def _tensor(self, address: ctypes.c_void_p, size: int) -> torch.Tensor:
        class Memory:
            __cuda_array_interface__ = {  # noqa: RUF012 (the protocol reads a plain attribute)
                **{"shape": (size,), "typestr": "|u1", "version": 3},
                "data": (address.value, False),
            }

        attributes = self._Attributes()
        self._call("cudaPointerGetAttributes", ctypes.byref(attributes), address)
        # Of memory on another device torch would return a copy, which no other process sees.
        memory = torch.as_tensor(Memory(), device=torch.device("cuda", attributes.device))
        if memory.data_ptr() != address.value:
            raise RuntimeError(
                f"torch has copied memory of GPU {attributes.device} that it was lent"
            )
        return memory

    def _call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._runtime, name)(*arguments):
            raise RuntimeError(f"{name} failed with CUDA error {code}")

"""Moves the memory of tensors from the device to the host and back.

The tensor objects and all views of them stay: only their storage is emptied and filled again.
Megatron's buffers, the optimizer's references and recorded graphs are therefore not affected.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

ALIGNMENT = 64
"""Bytes; a multiple of every element size, so that a copy can be viewed in any dtype."""


class OffloadedTensors:
    """Tensors, listed anew by every call, whose memory is on the device or away.

    With ``keep`` they are copied to host memory, which is page-locked for a GPU; the copies are in
    one block that is allocated once. Without ``keep`` the tensors come back as zeros.
    """

    def __init__(self, tensors: Callable[[], Iterable[torch.Tensor]], *, keep: bool) -> None:
        self._tensors, self._keep = tensors, keep
        self._copies: dict[int, torch.Tensor] = {}
        self._empty: list[tuple[torch.UntypedStorage, int]] = []

    @property
    def is_offloaded(self) -> bool:
        """True between ``offload`` and ``onload``."""
        return bool(self._empty)

    def offload(self) -> None:
        """Copy the tensors to the host if they are kept, and empty their storages. They must not be
        read until they are back."""
        if self.is_offloaded:
            return
        storages = storages_of(self._tensors())
        self._copies = {known: self._copies[known] for known in storages.keys() & self._copies}
        if self._keep:
            self._reserve(storages)
            for identity, storage in storages.items():
                self._copies[identity].copy_(_bytes_of(storage))
        for storage in storages.values():
            self._empty.append((storage, storage.nbytes()))
            storage.resize_(0)

    def onload(self) -> None:
        """Put the tensors' memory back on the device, with what was copied or with zeros."""
        for storage, size in self._empty:
            storage.resize_(size)
            whole = _bytes_of(storage)
            if self._keep:
                whole.copy_(self._copies[storage._cdata])
            else:
                whole.zero_()
        self._empty.clear()

    def host_view(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The view of the host's copy that corresponds to ``tensor``; None for a tensor that is not
        away or comes back as zeros."""
        storage = tensor.untyped_storage()
        copy = self._copies.get(storage._cdata)
        if copy is None or storage.nbytes():
            return None
        view = torch.empty(0, dtype=tensor.dtype, device=copy.device)
        begin = int(copy.storage_offset()) // tensor.itemsize + int(tensor.storage_offset())
        place = begin, tensor.size(), tensor.stride()
        return view.set_(copy.untyped_storage(), *place)  # type: ignore[call-overload]

    def _reserve(self, storages: Mapping[int, torch.UntypedStorage]) -> None:
        """Reserve host memory for every storage that has none yet: an optimizer's moments may be
        created later."""
        sizes = {
            identity: storage.nbytes()
            for identity, storage in storages.items()
            if identity not in self._copies or self._copies[identity].numel() != storage.nbytes()
        }
        if not sizes:
            return
        on_gpu = any(storages[identity].device.type == "cuda" for identity in sizes)
        block, begin = host_block(sum(map(aligned_size, sizes.values())), page_locked=on_gpu), 0
        for identity, size in sizes.items():
            self._copies[identity] = block[begin : begin + size]
            begin += aligned_size(size)


def host_block(size: int, *, page_locked: bool, runtime: Any = None) -> torch.Tensor:
    """``size`` bytes of host memory, uint8; a GPU copies from and to ``page_locked`` memory
    directly. RuntimeError if CUDA refuses to lock it.

    PyTorch's own allocator of page-locked memory rounds every tensor up to a power of two. This
    function takes whole pages from the system and has the CUDA ``runtime``
    (``torch.cuda.cudart()``) lock them.
    """
    if not page_locked:
        return torch.empty(size, dtype=torch.uint8)
    block = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
    runtime = torch.cuda.cudart() if runtime is None else runtime
    if code := int(runtime.cudaHostRegister(block.data_ptr(), size, 0)):
        raise RuntimeError(
            f"CUDA cannot lock {size} bytes of host memory (cudaHostRegister: error {code}); raise "
            "the limit of locked memory (ulimit -l), or offload less"
        )
    # All views are freed before the storage, and the memory is freed with it.
    weakref.finalize(block.untyped_storage(), runtime.cudaHostUnregister, block.data_ptr())
    return block


def aligned_size(size: int) -> int:
    """Bytes that a tensor of ``size`` bytes takes in a block of tensors, up to the beginning of the
    next one."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def storages_of(tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    """The non-empty storages of the tensors by their identity, each once."""
    found = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            found.setdefault(storage._cdata, storage)
    return found


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

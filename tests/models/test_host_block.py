"""Host memory that GPUs copy to: its size, its place, and when it is unlocked."""

from __future__ import annotations

import ctypes
import gc
import mmap

import pytest
import torch

from ctrl_megatron.models.offload import OffloadedTensors, host_block


class Runtime:
    """CUDA's calls for page-locked memory, with the rules that CUDA has for them."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.locked = code, dict[int, int]()

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:
        begin, end = pointer // mmap.PAGESIZE, -(-(pointer + size) // mmap.PAGESIZE)
        for other, length in self.locked.items():
            first, last = other // mmap.PAGESIZE, -(-(other + length) // mmap.PAGESIZE)
            if begin < last and first < end:
                return 712  # cudaErrorHostMemoryAlreadyRegistered
        if not self.code:
            self.locked[pointer] = size
        return self.code

    def cudaHostUnregister(self, pointer: int) -> int:
        ctypes.string_at(pointer, 1)  # still mapped
        del self.locked[pointer]
        return 0


def test_no_byte_more_than_asked_for_is_locked_and_blocks_share_no_page() -> None:
    runtime = Runtime()
    blocks = [host_block(size, page_locked=True, runtime=runtime) for size in (3, 5000, 1 << 20)]
    assert sorted(runtime.locked.values()) == [3, 5000, 1 << 20]
    assert all(block.data_ptr() % mmap.PAGESIZE == 0 for block in blocks)


def test_a_block_is_unlocked_after_its_last_view() -> None:
    runtime = Runtime()
    block = host_block(100, page_locked=True, runtime=runtime)
    view = torch.empty(0, dtype=torch.float32).set_(block.untyped_storage(), 4, (8,), (1,))
    view.fill_(3.0)
    del block
    gc.collect()
    assert runtime.locked
    assert view.tolist() == [3.0] * 8
    del view
    gc.collect()
    assert not runtime.locked


def test_a_refusal_of_cuda_says_how_much_was_asked_for() -> None:
    with pytest.raises(RuntimeError, match=r"cannot lock 4096 bytes .*error 2.*ulimit -l"):
        host_block(4096, page_locked=True, runtime=Runtime(2))


def test_copies_lie_behind_each_other_and_later_tensors_get_a_block_of_their_own() -> None:
    tensors = [torch.arange(5, dtype=torch.float64), torch.ones(3, dtype=torch.bfloat16)]
    wanted = [tensor.clone() for tensor in tensors]
    away = OffloadedTensors(lambda: tensors, keep=True)
    for _ in range(2):
        away.offload()
        views = [away.host_view(tensor) for tensor in tensors]
        assert all(v is not None and v.equal(w) for v, w in zip(views, wanted, strict=True))
        storages = {v.untyped_storage().data_ptr() for v in views if v is not None}
        assert len(storages) == len(tensors) - 1
        away.onload()
        assert all(t.equal(w) for t, w in zip(tensors, wanted, strict=True))
        # An optimizer's moments do the same.
        if len(tensors) == 2:
            tensors.append(torch.full((7,), 2.0))
            wanted.append(tensors[-1].clone())

"""Keeps host memory that a rank has freed in its process, for its next tensors.

glibc returns every large freed block to the kernel. When a page of the next block is first touched,
the kernel stops the process, finds a page and clears it. A pass on the CPU allocates thousands of
such tensors, and a third of its time was spent there. ``keep_freed_memory`` makes glibc keep what
is freed (``mallopt``, mallopt(3)) and asks the kernel for pages of 2 MiB (``madvise``).
``return_memory_if_scarce`` returns free memory when the machine is short of it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from pathlib import Path

import psutil

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_NEVER = -1
_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
_CGROUP = Path("/sys/fs/cgroup")
_STEP = 512 << 20
_SCARCE = 0.25
"""Share of available memory below which other processes may soon run out of it."""
_kept = False


def keep_freed_memory() -> bool:
    """Let this process keep memory that it frees, from now on; False where the C library is not
    glibc or refuses."""
    global _kept
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    wanted = ((_MMAP_THRESHOLD, 1 << 30), (_TRIM_THRESHOLD, _NEVER), (_TOP_PAD, 64 << 20))
    _kept = all(libc.mallopt(parameter, value) for parameter, value in wanted)
    if _kept:
        _use_large_pages()
    return _kept


def return_memory_if_scarce() -> None:
    """Call ``return_freed_memory`` if less than a quarter of the machine's memory is available.

    With more available memory, returning it would only slow the next update down by a fifth: the
    rank gets the same pages again, with a page fault for each.
    """
    if available_memory_share() < _SCARCE:
        return_freed_memory()


def available_memory_share() -> float:
    """The share of memory that is available: of the machine's, or of the limit of a container's
    cgroup (version 2) where that share is smaller."""
    machine = psutil.virtual_memory()
    limit = _CGROUP / "memory.max"
    if not limit.is_file() or (most := limit.read_text().strip()) == "max":
        return machine.available / machine.total
    used = int((_CGROUP / "memory.current").read_text())
    # Clean pages of files are reclaimed when a process needs memory.
    lines = (_CGROUP / "memory.stat").read_text().splitlines()
    cached = next(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
    return min(machine.available / machine.total, 1 - (used - cached) / int(most))


def return_freed_memory() -> None:
    """Return all free memory to the kernel; does nothing before ``keep_freed_memory``."""
    if _kept:
        ctypes.CDLL(None).malloc_trim(0)
        _use_large_pages()


def _use_large_pages() -> None:
    """Ask for pages of 2 MiB for the next tensors.

    The heap's address range grows by half of the machine's memory, or by less if the kernel does
    not allow it; this uses no memory. The range must not shrink afterwards, because the advice
    belongs to it.
    """
    if _OVERCOMMIT.read_text().strip() == "2":
        return  # the kernel would count the heap's room as used
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    pages = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE // 2
    starts = [libc.malloc(ctypes.c_size_t(_STEP)) for _ in range(pages // _STEP)]
    for start in filter(None, starts):
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        libc.madvise(
            ctypes.c_void_p(first), ctypes.c_size_t(_STEP - mmap.PAGESIZE), mmap.MADV_HUGEPAGE
        )
    for start in filter(None, starts):
        libc.free(ctypes.c_void_p(start))

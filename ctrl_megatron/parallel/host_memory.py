"""Host memory that a rank has freed stays with it, for its next tensors.

glibc gives every freed block of some size back to the kernel, and each time a page of the next one
is touched the kernel stops the process, finds a page and clears it. A pass that computes on the CPU
makes thousands of such tensors, and a third of its time went there. ``keep`` tells glibc to hold on
to what is freed (``mallopt``, mallopt(3)) and the kernel to give pages of 2 MiB where it can
(``madvise``); ``make_room`` returns what is free at that moment where the machine needs it.
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
"""Share of the memory below which others may soon find none."""
_kept = False


def keep() -> bool:
    """Keep freed memory from now on; False where the C library is not glibc or refuses."""
    global _kept
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    wanted = ((_MMAP_THRESHOLD, 1 << 30), (_TRIM_THRESHOLD, _NEVER), (_TOP_PAD, 64 << 20))
    _kept = all(libc.mallopt(parameter, value) for parameter, value in wanted)
    if _kept:
        _use_large_pages()
    return _kept


def make_room() -> None:
    """``give_back`` where less than a quarter of the machine's memory is left.

    Elsewhere what is given back helps nobody, and costs a rank a fifth of its next update: it gets
    the same pages again, one fault at a time.
    """
    if available() < _SCARCE:
        give_back()


def available() -> float:
    """Share of the memory that processes could still get: of the machine's, and of what a
    container's cgroup (version 2) allows where that is less."""
    machine = psutil.virtual_memory()
    limit = _CGROUP / "memory.max"
    if not limit.is_file() or (most := limit.read_text().strip()) == "max":
        return machine.available / machine.total
    used = int((_CGROUP / "memory.current").read_text())
    # Pages of files that are written and not in use go when memory is asked for.
    lines = (_CGROUP / "memory.stat").read_text().splitlines()
    cached = next(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
    return min(machine.available / machine.total, 1 - (used - cached) / int(most))


def give_back() -> None:
    """Return to the kernel what is free now; nothing happens before ``keep``."""
    if _kept:
        ctypes.CDLL(None).malloc_trim(0)
        _use_large_pages()


def _use_large_pages() -> None:
    """Ask for pages of 2 MiB where the next tensors will lie.

    The heap grows by half of what the machine has, none of which is used by that; where the kernel
    does not allow so much, it is less. It must not shrink afterwards: advice goes with the range.
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

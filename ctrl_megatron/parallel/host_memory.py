"""Host memory that a rank has freed stays with it, for its next tensors.

glibc gives every freed block of some size back to the kernel, and each time a page of the next one
is touched the kernel stops the process, finds a page and clears it. A pass that computes on the CPU
makes thousands of such tensors, and a third of its time went there. ``keep`` tells glibc to hold on
to what is freed (``mallopt``, mallopt(3)) and the kernel to give pages of 2 MiB where it can
(``madvise``); ``give_back`` returns what is free at that moment.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from pathlib import Path

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_NEVER = -1
_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
_STEP = 512 << 20
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

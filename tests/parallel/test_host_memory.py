from __future__ import annotations

import resource
from pathlib import Path

import torch
from forked_ranks import fork_context

from ctrl_megatron.parallel import host_memory

SIZE = 64 << 20
ROUNDS = 20
"""glibc's lists of small chunks fill first; until then an aligned block may not fit where the last
one of its size lay."""


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def touch_and_free() -> None:
    torch.ones(SIZE, dtype=torch.uint8)


def _child(results: object) -> None:
    torch.set_num_threads(1)
    touch_and_free()
    before = faults()
    touch_and_free()
    without = faults() - before
    kept = host_memory.keep()
    own = resident()
    for _ in range(ROUNDS):
        touch_and_free()
    held, before = resident() - own, faults()
    touch_and_free()
    again = faults() - before
    host_memory.give_back()
    results.put((kept, without, held, again, resident() - own))  # type: ignore[attr-defined]


def test_freed_memory_stays_until_it_is_given_back() -> None:
    context = fork_context()
    results = context.Queue()
    process = context.Process(target=_child, args=(results,))
    process.start()
    kept, without, held, again, left = results.get(timeout=60)
    process.join(30)
    assert kept and process.exitcode == 0
    assert without > 0 and again <= without // 20
    assert held > SIZE // 2
    assert left < SIZE // 4

from __future__ import annotations

import resource
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
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
    kept = host_memory.keep_freed_memory()
    own = resident()
    for _ in range(ROUNDS):
        touch_and_free()
    held, before = resident() - own, faults()
    touch_and_free()
    again = faults() - before
    host_memory.return_freed_memory()
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


@pytest.mark.parametrize(
    ("machine", "cgroup", "gives"),
    [
        (0.9, None, False),
        (0.2, None, True),
        (0.9, "max", False),
        (0.9, (1000, 900, 700), False),
        (0.9, (1000, 900, 100), True),
        (0.1, (1000, 0, 0), True),
    ],
)
def test_room_is_made_where_memory_is_short(
    machine: float,
    cgroup: tuple[int, int, int] | str | None,
    gives: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if isinstance(cgroup, str):
        (tmp_path / "memory.max").write_text(f"{cgroup}\n")
    elif cgroup:
        most, used, cached = cgroup
        (tmp_path / "memory.max").write_text(f"{most}\n")
        (tmp_path / "memory.current").write_text(f"{used}\n")
        (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\n")
    given = list[bool]()
    monkeypatch.setattr(host_memory, "_CGROUP", tmp_path)
    monkeypatch.setattr(host_memory, "return_freed_memory", lambda: given.append(True))
    left = SimpleNamespace(available=machine * 1000, total=1000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: left)
    host_memory.return_memory_if_scarce()
    assert bool(given) == gives

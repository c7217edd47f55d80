"""A rank that the system denies memory or descriptors ends, and says so."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ctrl_megatron.errors import FAILED
from ctrl_megatron.parallel.failure import StuckThreadStartDetector

ROOT = Path(__file__).parents[2]
UNWATCHED = """
import time
from types import SimpleNamespace
import torch.distributed as dist
from ctrl_megatron.parallel.failure import FailureWatch
from ctrl_megatron.parallel.store import SingleAddressTCPStore

store = SingleAddressTCPStore("127.0.0.1", 0, 1, True)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
alone = {"rank": 0, "size": 1, "is_first_of_host": True}
groups = SimpleNamespace(**alone, gather_from_host=lambda value: {0: value})
watch = FailureWatch(groups, timeout=600.0, clean_up=lambda: print("cleaned up", flush=True))

def died():
    raise OSError(24, "Too many open files", "/proc/1/stat")

watch.add_check(died)
time.sleep(60)
"""


def test_a_rank_that_cannot_be_watched_ends_with_the_reason() -> None:
    done = subprocess.run(
        [sys.executable, "-c", UNWATCHED], cwd=ROOT, capture_output=True, text=True, timeout=50
    )
    assert done.returncode == FAILED and done.stdout == "cleaned up\n", done.stderr
    assert "rank 0 stops because rank 0 cannot be watched: OSError(24," in done.stderr


def test_a_thread_that_never_begins_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck, said = StuckThreadStartDetector(0.3), list[str]()
    thread = threading.Thread(target=lambda: None)

    def look() -> None:
        deadline = time.monotonic() + 10
        while not said and time.monotonic() < deadline:
            said.extend(filter(None, [stuck()]))
            time.sleep(0.02)
        thread._started.set()  # type: ignore[attr-defined]

    looking = threading.Thread(target=look)
    looking.start()
    # A main thread that waits for something else is not meant.
    looking.join(0.6)
    assert not said
    # The second is its name from Python 3.13 on.
    starts = {"_start_new_thread", "_start_joinable_thread"} & vars(threading).keys()
    with monkeypatch.context() as patch:
        for name in starts:
            patch.setattr(threading, name, lambda *_, **__: None)
        thread.start()
    looking.join()
    assert "waited 0 s for a thread that does not begin" in said[0] and "ulimit -v" in said[0]

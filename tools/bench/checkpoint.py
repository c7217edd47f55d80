"""What the hashes of a checkpoint cost: saves with and without them, comparing, loading.

``python tools/bench/checkpoint.py [--gib 2] [--out DIR]`` writes random tensors from one
process and prints, for each work, the median of its seconds, the median of its processor seconds
(of all threads) and GB per processor second, which other work on the machine changes least. Files
are read from the page cache, where a save has left them.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from ctrl_megatron.checkpoint import sharded
from ctrl_megatron.checkpoint.hashes import hash_files, num_hashing_threads
from ctrl_megatron.checkpoint.manifest import CheckpointOrigin
from ctrl_megatron.checkpoint.sharded import TensorParts, load_tensors, save_tensors
from ctrl_megatron.config.flags import CommandParser, count_flag, output_path

ORIGIN = CheckpointOrigin("bench", 1)
SIDE = 4096


class PlainFile:
    """Stands in for ``HashingFile`` and hashes nothing."""

    def __init__(self, path: Path, aside: Executor) -> None:
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115
        for name in ("write", "tell", "fileno", "close", "flush"):
            setattr(self, name, getattr(self._file, name))

    def hexdigest(self) -> str:
        """Nothing."""
        return ""


def tensors_of(num_bytes: int, *, filled: bool) -> dict[str, TensorParts]:
    """Float32 matrices (4096, 4096) of ``num_bytes`` in all."""
    found = {}
    for number in range(max(1, num_bytes // (SIDE * SIDE * 4))):
        whole = found[f"weight {number}"] = TensorParts((SIDE, SIDE), torch.float32)
        make = torch.rand if filled else torch.empty
        whole.parts[torch.Size((0, 0))] = make(SIDE, SIDE)
    return found


def seconds(work: Callable[[], object]) -> tuple[float, float]:
    """The duration of one call, and its processor time."""
    start, used = time.monotonic(), time.process_time()
    work()
    return time.monotonic() - start, time.process_time() - used


def main() -> int:
    """Print the table."""
    parser = CommandParser(__doc__)
    parser.add_argument("--gib", type=count_flag(), default=2, help="size of the checkpoint")
    parser.add_argument("--repeats", type=count_flag(), default=5)
    parser.add_argument("--out", type=output_path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    size = options.gib << 30
    given, taken = tensors_of(size, filled=True), tensors_of(size, filled=False)
    size = sum(part.nbytes for whole in given.values() for part in whole.parts.values())
    found: dict[str, list[tuple[float, float]]] = {}
    folder = options.out / f"bench_checkpoint_{time.monotonic_ns()}"

    def save(*, hashed: bool) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with ExitStack() as stack:
            if not hashed:
                stack.enter_context(patch.object(sharded, "HashingFile", PlainFile))
            save_tensors(given, folder, None, ORIGIN)

    def compare(threads: int) -> None:
        hash_files(sorted(folder.glob("*.distcp")), threads)

    works = {
        "save, without hashes": lambda: save(hashed=False),
        "save, with hashes": lambda: save(hashed=True),
        "compare, one thread": lambda: compare(1),
        f"compare, {num_hashing_threads()} threads": lambda: compare(num_hashing_threads()),
        "load": lambda: load_tensors(taken, folder, None),
    }
    try:
        for _ in range(options.repeats):
            for name, work in works.items():
                found.setdefault(name, []).append(seconds(work))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{'':26}seconds  of a core  GB per second of a core")
    for name, times in found.items():
        wall, used = (statistics.median(column) for column in zip(*times, strict=True))
        print(f"{name:24} {wall:8.2f}  {used:9.2f}  {size / used / 1e9:8.2f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

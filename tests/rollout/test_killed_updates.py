"""Processes that are killed at random moments of weight updates: no engine serves a mixture."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_models import save, tiny_llama
from safetensors.torch import load_file

from ctrl_megatron.engine_kinds import EngineName
from ctrl_megatron.parallel.parent_watch import process_group_members
from ctrl_megatron.resharding.plan import engine_cut
from ctrl_megatron.rollout.engine import EngineDied, EngineError, EngineSpec, available_engines
from ctrl_megatron.rollout.launch import EngineProcess, launch_engine
from ctrl_megatron.rollout.weight_chunks import WeightChunk, weight_chunk
from ctrl_megatron.rollout.weight_update import checkpoint_specs, tensor_checksum
from ctrl_megatron.types import SamplingParams

sys.path.append(str(Path(__file__).parents[1] / "distributed"))
from world import run_world

TRANSPORTS = ("shards", "cuda_ipc", "nccl")
PARAMS = SamplingParams(max_tokens=3, temperature=0.0, log_probs=False)
_LIBRARIES = 100 << 20
"""Bytes of memory that torch takes at least."""
_LONGEST_UPDATE = 0.6
"""Seconds from the beginning of an update within which a process is killed."""


async def served(process: EngineProcess, directory: Path) -> str:
    """``refused`` or ``dead``, or the version that the engine serves, whose checksums it has."""
    client = process.connect()
    try:
        ((completion,),) = await client.generate([[1, 2, 3]], PARAMS)
        held = await client.checksums()
        ((again,),) = await client.generate([[1, 2, 3]], PARAMS)
    except EngineDied:
        return "dead"
    except EngineError:
        return "refused"
    finally:
        await client.close()
    (version,) = {span.version for span in (*completion.spans, *again.spans)}
    number = int(version.removeprefix("version@")) if "@" in version else 1
    files = load_file(directory / "model.safetensors")
    wanted = {s.name: files[s.name] * number for s in checkpoint_specs(directory, "float32")}
    assert held == {name: tensor_checksum(tensor) for name, tensor in wanted.items()}, version
    return version


def computing(process: EngineProcess) -> list[int]:
    """The engine's processes without its guards, which have loaded no library."""
    page, members = os.sysconf("SC_PAGE_SIZE"), process_group_members(process.pid)
    taken = {pid: int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in members}
    return [pid for pid, pages in taken.items() if pages * page > _LIBRARIES]


def kill_one(
    process: EngineProcess, directory: Path, transport: str, size: int, victim: str, after: float
) -> str:
    """Push to the engine and kill a rank or a process of the engine ``after`` so many seconds of
    the second update; what the engine serves then."""
    cut = engine_cut(process.address.name, size, {}, on_cpu=True)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as thread:
        arguments = {
            **{"layout": {"pipeline": 2}, "directory": str(directory), "folder": folder},
            **{"address": process.address, "cut": asdict(cut), "transport": transport},
        }
        pushing = thread.submit(run_world, "push_until_killed", 2, **arguments)
        while not (Path(folder) / "begins").exists():
            assert not pushing.done(), pushing.result()
            time.sleep(0.005)
        time.sleep(after)
        pids = {f"rank {r}": int((Path(folder) / f"pid{r}").read_text()) for r in range(2)}
        pid = pids.get(victim) or random.choice(computing(process))
        os.kill(pid, signal.SIGKILL)
        if victim == "engine":
            # The trainer's ranks are told of the loss; none waits for an answer for ever.
            assert all("engine" in told for told in pushing.result())
        else:
            with suppress(AssertionError):
                pushing.result()
    return asyncio.run(asyncio.wait_for(served(process, directory), 60))


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("engine", "size", "kills"), [("hf", 1, 14), ("vllm", 2, 6)])
def test_no_engine_serves_mixed_weights_after_a_kill(
    engine: EngineName, size: int, kills: int, tmp_path: Path
) -> None:
    if engine not in available_engines():
        pytest.skip(f"the optional engine {engine} is not installed")
    torch.set_num_threads(1)
    directory, seed = save(tiny_llama(0), tmp_path / "model"), random.randrange(10**6)
    spec = EngineSpec(
        name=engine,
        model_path=str(directory),
        dtype="float32",
        max_model_len=64,
        max_num_seqs=8,
        kv_cache_gib=0.1,
        tensor_parallel_size=size,
        threads=1,
        log_path=str(tmp_path / "engine.log"),
        startup_timeout=600.0,
    )
    random.seed(seed)
    ends = Counter[str]()
    with ExitStack() as running:
        process: EngineProcess | None = None
        for number in range(kills):
            process = process or running.enter_context(launch_engine(spec))
            victim = ("rank 0", "rank 1", "engine")[number % 3]
            transport = TRANSPORTS[(number // 3 + size) % 3]
            after = random.uniform(0, _LONGEST_UPDATE)
            found = kill_one(process, directory, transport, size, victim, after)
            print(f"{engine}, {transport}: {victim} killed after {after:.3f} s: {found}")
            ends[found if found in ("dead", "refused") else "whole"] += 1
            if found in ("dead", "refused"):
                running.close()
                process = None
    print(f"seed {seed}: {dict(ends)}")
    assert ends["dead"] >= kills // 3 and ends["refused"] > 0


@pytest.mark.long
def test_vllm_that_has_lost_a_worker_counts_as_lost(tmp_path: Path) -> None:
    """Its core answers for a moment, but can neither begin an update nor end its completions."""
    pytest.importorskip("vllm")
    from ctrl_megatron.rollout.vllm_counters import VllmCounters
    from ctrl_megatron.rollout.vllm_engine import VllmEngine

    class Core:
        async def pause_scheduler_async(self, **_: object) -> None:
            raise Exception("Call to pause_scheduler method failed: the executor has shut down")

    class Llm:
        engine_core = Core()

        async def is_paused(self) -> bool:
            return False

        async def pause_generation(self, **_: object) -> None:
            await self.engine_core.pause_scheduler_async()

    directory = save(tiny_llama(0), tmp_path)
    spec = EngineSpec(name="vllm", model_path=str(directory), dtype="float32")
    llm: Any = Llm()
    engine = VllmEngine(spec, llm, VllmCounters())
    tensors = checkpoint_specs(directory, "float32")

    async def chunks() -> AsyncIterator[WeightChunk]:
        yield weight_chunk("", tensors, {})

    with pytest.raises(EngineDied, match="the executor has shut down"):
        asyncio.run(engine.update(tensors, chunks(), "version@2"))

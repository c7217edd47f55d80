"""What an engine pool costs: one engine driven directly and through a pool, in one run: ``python
tools/bench_engine_pool.py``.

Directly, the engine gets all prompts in one request; through the pool it gets one request per
prompt, as with many engines. Both have their turn in every round, in changing order, so that a
machine that slows down meanwhile slows both; ratios are medians over the rounds. Beside the time
stands the processor time of engine and client, which other work on the machine changes less; with
``--threads 1`` the engine's threads do not wait for each other in it. ``--paced 0.02`` puts a
stand-in behind the engine's real server that gives every completion a token each so many seconds,
as a GPU might, whatever else the machine does.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
from aiohttp import web

from ctrl_megatron.config.flags import ToolParser
from ctrl_megatron.parallel.hosts import host_identity
from ctrl_megatron.rollout.client import RemoteEngine
from ctrl_megatron.rollout.engine import (
    Engine,
    EngineAddress,
    EngineSpec,
    available_engines,
    default_engine,
)
from ctrl_megatron.rollout.launch import launch_engine
from ctrl_megatron.rollout.pool import EnginePool
from ctrl_megatron.rollout.server import application
from ctrl_megatron.types import Completion, SamplingParams, VersionSpan


class PacedEngine:
    """Draws at a fixed speed, however many completions at once."""

    def __init__(self, pace: float) -> None:
        self._pace = pace

    async def generate(
        self, prompts: list[list[int]], params: SamplingParams
    ) -> list[list[Completion]]:
        """Tokens and log-probs of the usual size."""
        await asyncio.sleep(self._pace * params.max_tokens)
        answer = Completion(
            token_ids=tuple(range(50_000, 50_000 + params.max_tokens)),
            log_probs=tuple(-1 / (3 + i) for i in range(params.max_tokens)),
            finish_reason="length",
            spans=(VersionSpan("actor@1", 0, params.max_tokens),),
        )
        return [[answer] * params.n for _ in prompts]


@asynccontextmanager
async def served(engine: Any) -> AsyncIterator[EngineAddress]:
    """The engine behind the server that every engine has, in this process."""
    runner = web.AppRunner(application(engine, "token"), handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield EngineAddress(
        name="paced",
        endpoint=f"http://127.0.0.1:{runner.addresses[0][1]}",
        home=host_identity(),
        token="token",
        pid=os.getpid(),
        log_path="",
    )
    await runner.cleanup()


class Taken(NamedTuple):
    """What drawing all completions took, in seconds."""

    wall: float
    processor: float
    """Of the engine's process and this one."""


async def take(engine: Engine, pid: int, prompts: list[list[int]], params: SamplingParams) -> Taken:
    """All completions are drawn to their full length by the engine with that process id."""
    wall, processor = time.perf_counter(), processor_time(pid)
    done = await engine.generate(prompts, params)
    taken = Taken(time.perf_counter() - wall, processor_time(pid) - processor)
    assert all(len(answer.token_ids) == params.max_tokens for group in done for answer in group)
    return taken


def processor_time(pid: int) -> float:
    """Seconds so far of the process, its children and this one."""
    engine = psutil.Process(pid)
    times = [process.cpu_times() for process in (engine, *engine.children(recursive=True))]
    own = time.process_time() if pid != os.getpid() else 0.0
    return own + sum(t.user + t.system for t in times)


async def compare(
    direct: Engine,
    pool: Engine,
    pid: int,
    prompts: list[list[int]],
    params: SamplingParams,
    rounds: int,
) -> list[tuple[Taken, Taken]]:
    """(directly, through the pool) of every round, after one that warms up."""
    for engine in (direct, pool):
        await take(engine, pid, prompts, params)
    pairs = []
    for number in range(rounds):
        order = (direct, pool) if number % 2 else (pool, direct)
        took = {id(engine): await take(engine, pid, prompts, params) for engine in order}
        alone, through = took[id(direct)], took[id(pool)]
        pairs.append((alone, through))
        print(
            f"round {number + 1}: directly {alone.wall:.2f} s ({alone.processor:.2f} s of "
            f"processors), pool {through.wall:.2f} s ({through.processor:.2f} s)",
            flush=True,
        )
    for engine in (direct, pool):
        await engine.close()
    return pairs


def main() -> None:
    """Entry point."""
    parser = ToolParser(__doc__)
    parser.add_argument("--engine", choices=available_engines(), default=default_engine())
    parser.add_argument("--model", default="runs/models/smollm2", help="Hugging Face directory")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--concurrent", type=int, default=64, help="completions at the same time")
    parser.add_argument("--tokens", type=int, default=32, help="of every prompt and completion")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--threads", type=int, help="of the engine; by default its own choice")
    parser.add_argument("--paced", type=float, default=0.0, help="seconds per token of a stand-in")
    options = parser.parse_args()
    draw = random.Random(0)
    prompts = [
        [draw.randrange(100, 10_000) for _ in range(options.tokens)]
        for _ in range(options.concurrent)
    ]
    params = SamplingParams(max_tokens=options.tokens, seed=1)

    async def measure(direct: Engine, pooled: Engine, pid: int) -> list[tuple[Taken, Taken]]:
        joins_calls = options.engine != "hf" or bool(options.paced)
        pool = EnginePool(
            {"engine": pooled}, at_once=2 * options.concurrent, joins_calls=joins_calls
        )
        return await compare(direct, pool, pid, prompts, params, options.rounds)

    async def measure_paced() -> list[tuple[Taken, Taken]]:
        async with served(PacedEngine(options.paced)) as address:
            return await measure(RemoteEngine(address), RemoteEngine(address), os.getpid())

    if options.paced:
        pairs = asyncio.run(measure_paced())
    else:
        spec = EngineSpec(
            name=options.engine,
            model_path=options.model,
            dtype=options.dtype,
            max_model_len=4 * options.tokens,
            max_num_seqs=options.concurrent,
            kv_cache_gib=1.0,
            threads=options.threads,
        )
        with launch_engine(spec) as process:
            pairs = asyncio.run(measure(process.connect(), process.connect(), process.pid))
    tokens = options.concurrent * options.tokens
    for name, taken in zip(("directly", "pool"), zip(*pairs, strict=True), strict=True):
        print(f"{name:>9}: {tokens / statistics.median(t.wall for t in taken):8.0f} tokens/s")
    for what in Taken._fields:
        ratios = sorted(getattr(b, what) / getattr(a, what) for a, b in pairs)
        print(
            f"{what} time: the pool takes {statistics.median(ratios):.3f} times as much, "
            f"{100 * (statistics.median(ratios) - 1):+.1f} % ({ratios[0]:.3f} to {ratios[-1]:.3f})"
        )


if __name__ == "__main__":
    main()

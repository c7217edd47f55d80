"""What an engine pool costs: one engine driven directly and through a pool, in one run: ``python
tools/bench_engine_pool.py``.

Directly, the engine gets all prompts in one request; through the pool it gets one request per
prompt, as with many engines. Both have their turn in every round, so that a machine that slows down
meanwhile slows both; the ratio is the median over the rounds. ``--paced 0.02`` puts a stand-in
behind the engine's real server that gives every completion a token each so many seconds, as a GPU
might, whatever else the machine does.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from aiohttp import web

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


async def seconds(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> float:
    """How long all completions take, each of which is drawn to its full length."""
    began = time.perf_counter()
    done = await engine.generate(prompts, params)
    took = time.perf_counter() - began
    assert all(len(answer.token_ids) == params.max_tokens for group in done for answer in group)
    return took


async def compare(
    direct: Engine, pool: Engine, prompts: list[list[int]], params: SamplingParams, rounds: int
) -> list[tuple[float, float]]:
    """(seconds directly, seconds through the pool) of every round, after one that warms up."""
    for engine in (direct, pool):
        await seconds(engine, prompts, params)
    pairs = []
    for number in range(rounds):
        order = (direct, pool) if number % 2 else (pool, direct)
        took = {id(engine): await seconds(engine, prompts, params) for engine in order}
        pairs.append((took[id(direct)], took[id(pool)]))
        print(f"round {number + 1}: directly {pairs[-1][0]:.2f} s, pool {pairs[-1][1]:.2f} s")
    for engine in (direct, pool):
        await engine.close()
    return pairs


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--engine", choices=available_engines(), default=default_engine())
    parser.add_argument("--model", default="runs/models/smollm2", help="Hugging Face directory")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--concurrent", type=int, default=64, help="completions at the same time")
    parser.add_argument("--tokens", type=int, default=32, help="of every prompt and completion")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--paced", type=float, default=0.0, help="seconds per token of a stand-in")
    options = parser.parse_args()
    draw = random.Random(0)
    prompts = [
        [draw.randrange(100, 10_000) for _ in range(options.tokens)]
        for _ in range(options.concurrent)
    ]
    params = SamplingParams(max_tokens=options.tokens, seed=1)

    async def measure(direct: Engine, pooled: Engine) -> list[tuple[float, float]]:
        joins_calls = options.engine != "hf" or bool(options.paced)
        pool = EnginePool(
            {"engine": pooled}, at_once=2 * options.concurrent, joins_calls=joins_calls
        )
        return await compare(direct, pool, prompts, params, options.rounds)

    async def measure_paced() -> list[tuple[float, float]]:
        async with served(PacedEngine(options.paced)) as address:
            return await measure(RemoteEngine(address), RemoteEngine(address))

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
        )
        with launch_engine(spec) as process:
            pairs = asyncio.run(measure(process.connect(), process.connect()))
    tokens = options.concurrent * options.tokens
    for name, took in zip(("directly", "pool"), zip(*pairs, strict=True), strict=True):
        print(f"{name:>9}: {tokens / statistics.median(took):8.0f} tokens/s")
    ratio = statistics.median(through / alone for alone, through in pairs)
    print(f"the pool takes {ratio:.3f} times as long, {100 * (ratio - 1):+.1f} %")


if __name__ == "__main__":
    main()

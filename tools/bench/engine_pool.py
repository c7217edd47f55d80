"""Measure the cost of the engine pool: one engine called directly and through a pool: ``python
tools/bench/engine_pool.py``.

Directly, the engine gets all prompts in one request; the pool sends one request per prompt, as with
many engines. Both run in every round, in alternating order, so that a slower phase of the machine
affects both; ratios are medians over the rounds. The processor time of engine and client is also
reported, because other work on the machine affects it less; with ``--threads 1`` it contains no
waiting of the engine's threads for each other. ``--paced 0.02`` puts a stand-in behind the engine's
server that generates one token per completion every 0.02 seconds, as a GPU might.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil

from ctrl_megatron.rollout.engine import CountedEngine, Engine, available_engines, default_engine
from ctrl_megatron.rollout.launch import launch_engine
from ctrl_megatron.rollout.pool import EnginePool
from ctrl_megatron.types import Completion, SamplingParams, VersionSpan
from tools.bench.engine_setup import (
    add_drawing_flags,
    bench_parser,
    client_of,
    drawing_seconds,
    drawing_spec,
    random_prompts,
    serve,
)


class PacedEngine:
    """Generates at a fixed speed, independent of the number of completions."""

    def __init__(self, pace: float) -> None:
        self._pace = pace

    async def generate(
        self, prompts: list[list[int]], params: SamplingParams, listener: object = None
    ) -> list[list[Completion]]:
        """Completions with tokens and log-probs of the usual size."""
        await asyncio.sleep(self._pace * params.max_tokens)
        answer = Completion(
            token_ids=tuple(range(50_000, 50_000 + params.max_tokens)),
            log_probs=tuple(-1 / (3 + i) for i in range(params.max_tokens)),
            finish_reason="length",
            spans=(VersionSpan("actor@1", 0, params.max_tokens),),
        )
        return [[answer] * params.n for _ in prompts]


class Taken(NamedTuple):
    """Seconds to draw all completions."""

    wall: float
    processor: float
    """Processor time of the engine's process and this one."""


async def take(engine: Engine, pid: int, prompts: list[list[int]], params: SamplingParams) -> Taken:
    """Draw all completions to their full length; ``pid`` is the engine's process."""
    before = processor_time(pid)
    wall = await drawing_seconds(engine, prompts, params)
    return Taken(wall, processor_time(pid) - before)


def processor_time(pid: int) -> float:
    """Processor seconds of the process, its children and this process so far."""
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
    """(direct, through the pool) of every round after a warm-up."""
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
    parser = bench_parser(__doc__)
    parser.add_argument(
        "--engine", choices=available_engines(denoising=False), default=default_engine()
    )
    add_drawing_flags(parser, rounds=6)
    parser.add_argument("--paced", type=float, default=0.0, help="seconds per token of a stand-in")
    options = parser.parse_args()
    prompts = random_prompts(random.Random(0), options.concurrent, options.tokens)
    params = SamplingParams(max_tokens=options.tokens, seed=1)

    async def measure(direct: Engine, pooled: CountedEngine, pid: int) -> list[tuple[Taken, Taken]]:
        joins_calls = options.engine != "hf" or bool(options.paced)
        pool = EnginePool(
            {"engine": pooled}, at_once=2 * options.concurrent, joins_calls=joins_calls
        )
        return await compare(direct, pool, pid, prompts, params, options.rounds)

    async def measure_paced() -> list[tuple[Taken, Taken]]:
        runner, port = await serve(PacedEngine(options.paced), {})
        direct, pooled = (client_of("paced", port, pid=os.getpid()) for _ in range(2))
        pairs = await measure(direct, pooled, os.getpid())
        await runner.cleanup()
        return pairs

    if options.paced:
        pairs = asyncio.run(measure_paced())
    else:
        with launch_engine(drawing_spec(options, options.engine)) as process:
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

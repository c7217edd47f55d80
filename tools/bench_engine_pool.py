"""What an engine pool costs: one engine driven directly and through a pool, in one run: ``python
tools/bench_engine_pool.py``.

Directly, the engine gets all prompts in one request; through the pool it gets one request per
prompt, as with many engines. Both have their turn in every round, so that a machine that slows down
meanwhile slows both; the ratio is the median over the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ctrl_megatron.rollout.engine import Engine, EngineSpec, available_engines
from ctrl_megatron.rollout.launch import launch_engine
from ctrl_megatron.rollout.pool import EnginePool
from ctrl_megatron.types import SamplingParams


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
    parser.add_argument("--engine", choices=available_engines(), default=available_engines()[-1])
    parser.add_argument("--model", default="runs/models/smollm2", help="Hugging Face directory")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--concurrent", type=int, default=64, help="completions at the same time")
    parser.add_argument("--tokens", type=int, default=32, help="of every prompt and completion")
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    spec = EngineSpec(
        name=options.engine,
        model_path=options.model,
        dtype=options.dtype,
        max_model_len=4 * options.tokens,
        max_num_seqs=options.concurrent,
        kv_cache_gib=1.0,
    )
    draw = random.Random(0)
    prompts = [
        [draw.randrange(100, 10_000) for _ in range(options.tokens)]
        for _ in range(options.concurrent)
    ]
    params = SamplingParams(max_tokens=options.tokens, seed=1)
    with launch_engine(spec) as process:
        pool = EnginePool(
            {"engine": process.connect()},
            at_once=2 * options.concurrent,
            joins_calls=options.engine != "hf",
        )
        pairs = asyncio.run(compare(process.connect(), pool, prompts, params, options.rounds))
    tokens = options.concurrent * options.tokens
    for name, took in zip(("directly", "pool"), zip(*pairs, strict=True), strict=True):
        print(f"{name:>9}: {tokens / statistics.median(took):8.0f} tokens/s")
    ratio = statistics.median(through / alone for alone, through in pairs)
    print(f"the pool takes {ratio:.3f} times as long, {100 * (ratio - 1):+.1f} %")


if __name__ == "__main__":
    main()

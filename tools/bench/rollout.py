"""Compare all installed engines on the same requests, and measure the cost of the process boundary:
``python tools/bench/rollout.py``.

Each engine runs in a process of its own, behind the product's server. In each round it answers
requests of the same size twice: called directly inside its process, and by a client over HTTP.
Engines and ways alternate, so that a slower phase of the machine affects all of them; prompts are
new in each round, so that no prefix cache helps. Ratios are medians over the rounds.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ctrl_megatron.rollout import wire
from ctrl_megatron.rollout.client import RemoteEngine
from ctrl_megatron.rollout.engine import EngineSpec, available_engines
from ctrl_megatron.rollout.server import build_engine
from ctrl_megatron.types import SamplingParams
from tools.bench.engine_setup import (
    HostedEngine,
    add_drawing_flags,
    ask,
    bench_parser,
    drawing_seconds,
    drawing_spec,
    given_spec,
    host,
    random_prompts,
)

WARM_UP = 8
"""Completions of the warm-up round, which is not counted."""


async def host_engine(spec: EngineSpec) -> None:
    """In the engine's process: serve the engine, and a route that calls it directly."""
    engine = await build_engine(spec)

    async def direct(body: Any) -> float:
        params = wire.params_from_json(body["params"])
        return await drawing_seconds(engine, body["prompts"], params)

    await host(engine, {"/direct": direct})


async def direct_seconds(
    engine: RemoteEngine, prompts: list[list[int]], params: SamplingParams
) -> float:
    """``drawing_seconds`` inside the engine's process."""
    return await ask(engine, "/direct", {"prompts": prompts, "params": asdict(params)})


async def compare(
    engines: Sequence[RemoteEngine], *, concurrent: int, tokens: int, rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """Per engine (seconds directly, seconds through its server) of every round, after a warm-up."""
    draw = random.Random(0)
    took: dict[str, list[tuple[float, float]]] = {engine.address.name: [] for engine in engines}
    for number in range(rounds + 1):
        rows = concurrent if number else WARM_UP
        both = [random_prompts(draw, rows, tokens) for _ in range(2)]
        params = SamplingParams(max_tokens=tokens, seed=number)
        for engine in engines:
            pair = [0.0, 0.0]
            for way in (0, 1) if number % 2 else (1, 0):
                measure = drawing_seconds if way else direct_seconds
                pair[way] = await measure(engine, both[way], params)
            if number:
                took[engine.address.name].append((pair[0], pair[1]))
                print(f"{engine.address.name}: {pair[0]:.1f} and {pair[1]:.1f} s", flush=True)
    for engine in engines:
        await engine.close()
    return took


def main() -> None:
    """Entry point."""
    parser = bench_parser(__doc__)
    parser.add_argument("--engines", nargs="+", choices=available_engines(denoising=False))
    add_drawing_flags(parser, rounds=4)
    parser.add_argument("--logs", type=Path, default=Path("runs"))
    options = parser.parse_args()
    if options.host_engine:
        asyncio.run(host_engine(given_spec()))
    hosted: list[HostedEngine] = []
    try:
        for name in options.engines or available_engines(denoising=False):
            log = options.logs / f"bench_rollout.{name}.log"
            hosted.append(HostedEngine(drawing_spec(options, name), log))
        engines = [process.connect() for process in hosted]
        size = {key: getattr(options, key) for key in ("concurrent", "tokens", "rounds")}
        took = asyncio.run(compare(engines, **size))
    finally:
        for process in hosted:
            process.stop()
    drawn = options.concurrent * options.tokens
    print(f"{options.concurrent} concurrent completions of {options.tokens} tokens")
    print("engine   directly  through its server   overhead")
    for name, pairs in took.items():
        direct, through = (drawn / statistics.median(way) for way in zip(*pairs, strict=True))
        ratio = statistics.median(b / a for a, b in pairs)
        print(f"{name:8} {direct:5.0f} tok/s {through:11.0f} tok/s   {100 * (ratio - 1):+9.1f} %")


if __name__ == "__main__":
    main()

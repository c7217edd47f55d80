"""All installed engines on the same requests in one run, and what our process boundary costs:
``python tools/bench_rollout.py``.

Each engine lives in a process of its own, behind the server that every engine has. In each round it
answers requests of the same size twice: driven directly, inside its process, and by a client from
here, over HTTP. Engines and ways take turns, so that a machine that slows down meanwhile slows all
of them; prompts are new each time, so that no cache knows them. Ratios are medians over the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import aiohttp
from aiohttp import web

from ctrl_megatron.config.flags import ToolParser
from ctrl_megatron.parallel.hosts import host_identity
from ctrl_megatron.parallel.parent_watch import end_group, end_with_parent
from ctrl_megatron.rollout import wire
from ctrl_megatron.rollout.client import RemoteEngine, log_tail
from ctrl_megatron.rollout.engine import Engine, EngineAddress, EngineSpec, available_engines
from ctrl_megatron.rollout.launch import engine_environment
from ctrl_megatron.rollout.server import application, build_engine
from ctrl_megatron.types import SamplingParams

TOKEN = "bench"
WARM_UP = 8
"""Completions of the round that is not counted."""


async def seconds(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> float:
    """How long all completions take, each of which is drawn to its full length."""
    began = time.perf_counter()
    done = await engine.generate(prompts, params)
    took = time.perf_counter() - began
    assert all(len(answer.token_ids) == params.max_tokens for group in done for answer in group)
    return took


async def host_engine(spec: EngineSpec) -> None:
    """The engine behind its server, which also drives it directly; prints the port."""
    engine = await build_engine(spec)

    async def direct(request: web.Request) -> web.Response:
        body = await request.json()
        params = wire.params_from_json(body["params"])
        return web.json_response(await seconds(engine, body["prompts"], params))

    app = application(engine, TOKEN)
    app.router.add_post("/direct", direct)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(f"\nport {runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


class HostedEngine:
    """An engine's process, seen from here."""

    def __init__(self, spec: EngineSpec, log: Path) -> None:
        self.name, self._log = spec.name, log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, __file__, "--host-engine"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=engine_environment(spec),
                start_new_session=True,
            )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(spec)).encode() + b"\n")
        self._process.stdin.flush()

    def connect(self) -> RemoteEngine:
        """Wait until it serves; RuntimeError with the end of its log if it never will."""
        while not (ports := [s for s in self._log.read_text().split("\n") if s[:5] == "port "]):
            if self._process.poll() is not None:
                raise RuntimeError(f"engine {self.name} ended:\n{log_tail(str(self._log))}")
            time.sleep(0.2)
        address = EngineAddress(
            name=self.name,
            endpoint=f"http://127.0.0.1:{ports[0].removeprefix('port ')}",
            home=host_identity(),
            token=TOKEN,
            pid=self._process.pid,
            log_path=str(self._log),
        )
        return RemoteEngine(address)

    def stop(self) -> None:
        """End it with everything it started."""
        end_group(self._process.pid)
        self._process.wait()


async def direct_seconds(
    engine: RemoteEngine, prompts: list[list[int]], params: SamplingParams
) -> float:
    """The same, measured inside the engine's process."""
    body = {"prompts": prompts, "params": asdict(params)}
    headers = {"Authorization": f"Bearer {TOKEN}"}
    endless = aiohttp.ClientTimeout(total=None)
    async with (
        aiohttp.ClientSession(headers=headers, timeout=endless) as session,
        session.post(engine.address.endpoint + "/direct", json=body) as response,
    ):
        response.raise_for_status()
        return await response.json()


async def compare(
    engines: Sequence[RemoteEngine], *, concurrent: int, tokens: int, rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """Per engine (seconds directly, seconds through its server) of every round, after a warm-up."""
    draw = random.Random(0)
    took: dict[str, list[tuple[float, float]]] = {engine.address.name: [] for engine in engines}
    for number in range(rounds + 1):
        rows = concurrent if number else WARM_UP
        both = [
            [[draw.randrange(100, 10_000) for _ in range(tokens)] for _ in range(rows)]
            for _ in range(2)
        ]
        params = SamplingParams(max_tokens=tokens, seed=number)
        for engine in engines:
            pair = [0.0, 0.0]
            for way in (0, 1) if number % 2 else (1, 0):
                ask = seconds if way else direct_seconds
                pair[way] = await ask(engine, both[way], params)
            if number:
                took[engine.address.name].append((pair[0], pair[1]))
                print(f"{engine.address.name}: {pair[0]:.1f} and {pair[1]:.1f} s", flush=True)
    for engine in engines:
        await engine.close()
    return took


def main() -> None:
    """Entry point."""
    parser = ToolParser(__doc__)
    parser.add_argument("--host-engine", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--engines", nargs="+", choices=available_engines())
    parser.add_argument("--model", default="runs/models/smollm2", help="Hugging Face directory")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--concurrent", type=int, default=64, help="completions at the same time")
    parser.add_argument("--tokens", type=int, default=32, help="of every prompt and completion")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, default=0, help="of an engine; 0 takes all cores")
    parser.add_argument("--logs", type=Path, default=Path("runs"))
    options = parser.parse_args()
    if options.host_engine:
        spec = EngineSpec(**json.loads(sys.stdin.buffer.raw.readline()))  # type: ignore[attr-defined]
        end_with_parent()
        asyncio.run(host_engine(spec))
    options.logs.mkdir(parents=True, exist_ok=True)
    hosted = []
    try:
        for name in options.engines or available_engines():
            spec = EngineSpec(
                name=name,
                model_path=options.model,
                dtype=options.dtype,
                max_model_len=4 * options.tokens,
                max_num_seqs=options.concurrent,
                kv_cache_gib=1.0,
                threads=options.threads,
            )
            hosted.append(HostedEngine(spec, options.logs / f"bench_rollout.{name}.log"))
        engines = [host.connect() for host in hosted]
        size = {key: getattr(options, key) for key in ("concurrent", "tokens", "rounds")}
        took = asyncio.run(compare(engines, **size))
    finally:
        for host in hosted:
            host.stop()
    drawn = options.concurrent * options.tokens
    print(f"{options.concurrent} completions at a time, {options.tokens} tokens each")
    print("engine   directly  through its server   overhead")
    for name, pairs in took.items():
        direct, through = (drawn / statistics.median(way) for way in zip(*pairs, strict=True))
        ratio = statistics.median(b / a for a, b in pairs)
        print(f"{name:8} {direct:5.0f} tok/s {through:11.0f} tok/s   {100 * (ratio - 1):+9.1f} %")


if __name__ == "__main__":
    main()

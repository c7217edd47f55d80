"""The common parts of the benches of engines: an engine in its own process behind the product's
server with further routes, prompts of random tokens, and the time that drawing takes.

A bench calls itself with ``--host-engine`` for the engine's process: see :class:`HostedEngine`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from aiohttp import ClientSession, ClientTimeout, web

from ctrl_megatron.config.flags import ToolParser
from ctrl_megatron.parallel.hosts import host_identity
from ctrl_megatron.parallel.parent_watch import end_with_parent, kill_process_group
from ctrl_megatron.rollout.client import RemoteEngine, log_tail
from ctrl_megatron.rollout.engine import Engine, EngineAddress, EngineSpec
from ctrl_megatron.rollout.launch import engine_environment
from ctrl_megatron.rollout.server import engine_application
from ctrl_megatron.types import SamplingParams

_TOKEN = "bench"
_HEADERS = {"Authorization": f"Bearer {_TOKEN}"}
Route = Callable[[Any], Awaitable[object]]
"""From a request's JSON to the answer's."""


def bench_parser(text: str | None) -> ToolParser:
    """The flags that every bench of engines has."""
    parser = ToolParser(text)
    parser.add_argument("--host-engine", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--model", default="runs/models/smollm2", help="Hugging Face directory")
    parser.add_argument("--dtype", default="bfloat16")
    return parser


def add_drawing_flags(parser: ToolParser, *, rounds: int) -> None:
    """The flags of benches that draw completions."""
    parser.add_argument("--concurrent", type=int, default=64, help="completions at the same time")
    parser.add_argument("--tokens", type=int, default=32, help="of every prompt and completion")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--threads", type=int, help="of an engine; by default its own choice")


def drawing_spec(options: argparse.Namespace, engine: str) -> EngineSpec:
    """An engine that has room for all completions of ``add_drawing_flags`` at the same time."""
    return EngineSpec(
        name=engine,
        model_path=options.model,
        dtype=options.dtype,
        max_model_len=4 * options.tokens,
        max_num_seqs=options.concurrent,
        kv_cache_gib=1.0,
        threads=options.threads,
    )


def random_prompts(draw: random.Random, count: int, tokens: int) -> list[list[int]]:
    """Token ids that every vocabulary has."""
    return [[draw.randrange(100, 10_000) for _ in range(tokens)] for _ in range(count)]


async def drawing_seconds(
    engine: Engine, prompts: list[list[int]], params: SamplingParams
) -> float:
    """Wall-clock seconds in which all completions are drawn, each to its full length."""
    began = time.perf_counter()
    done = await engine.generate(prompts, params)
    took = time.perf_counter() - began
    assert all(len(answer.token_ids) == params.max_tokens for group in done for answer in group)
    return took


async def serve(engine: Any, routes: Mapping[str, Route]) -> tuple[web.AppRunner, int]:
    """Serve ``engine`` and ``routes`` on a free port of the loopback interface."""
    app = engine_application(engine, _TOKEN)

    def handler(route: Route) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            return web.json_response(await route(await request.json()))

        return handle

    for path, route in routes.items():
        app.router.add_post(path, handler(route))
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, runner.addresses[0][1]


def client_of(name: str, port: int, *, pid: int, log: str = "") -> RemoteEngine:
    """A client of an engine that ``serve`` serves."""
    return RemoteEngine(
        EngineAddress(
            name=name,
            endpoint=f"http://127.0.0.1:{port}",
            home=host_identity(),
            token=_TOKEN,
            pid=pid,
            log_path=log,
        )
    )


async def ask(engine: RemoteEngine, path: str, body: object) -> Any:
    """The answer of one of the routes beside an engine."""
    async with (
        ClientSession(headers=_HEADERS, timeout=ClientTimeout(total=None)) as session,
        session.post(engine.address.endpoint + path, json=body) as response,
    ):
        response.raise_for_status()
        return await response.json()


def given_spec() -> EngineSpec:
    """Read the engine's spec from standard input, in the engine's process, which ends with the
    bench.
    """
    spec = EngineSpec(**json.loads(sys.stdin.readline()))
    end_with_parent()
    return spec


async def host(engine: Any, routes: Mapping[str, Route]) -> None:
    """In the engine's process: serve without end."""
    _, port = await serve(engine, routes)
    print(f"\nport {port}", flush=True)
    await asyncio.Event().wait()


class HostedEngine:
    """The process of an engine: the running script, started again with ``--host-engine``."""

    def __init__(self, spec: EngineSpec, log: Path) -> None:
        self._name, self._log = spec.name, log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, sys.argv[0], "--host-engine"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=engine_environment(spec),
                start_new_session=True,
                text=True,
            )
        assert self._process.stdin is not None
        print(json.dumps(asdict(spec)), file=self._process.stdin, flush=True)

    def connect(self) -> RemoteEngine:
        """Wait until it serves. Raises ``RuntimeError`` with the end of its log if it ends."""
        while not (ports := [s for s in self._log.read_text().split("\n") if s[:5] == "port "]):
            if self._process.poll() is not None:
                raise RuntimeError(f"engine {self._name} ended:\n{log_tail(str(self._log))}")
            time.sleep(0.2)
        port = int(ports[0].removeprefix("port "))
        return client_of(self._name, port, pid=self._process.pid, log=str(self._log))

    def stop(self) -> None:
        """End the process and all that it started."""
        kill_process_group(self._process.pid)
        self._process.wait()

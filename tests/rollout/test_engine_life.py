"""A launched engine as its callers meet it: where it listens, what it knows, how it is missed."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
from aiohttp.test_utils import TestServer
from patience import PATIENCE
from rollout_models import save, tiny_llama

from ctrl_megatron.parallel.hosts import host_identity
from ctrl_megatron.parallel.parent_watch import process_group_members
from ctrl_megatron.rollout import client as client_module
from ctrl_megatron.rollout import engine as engine_module
from ctrl_megatron.rollout import server
from ctrl_megatron.rollout.client import RemoteEngine
from ctrl_megatron.rollout.engine import EngineAddress, EngineDied, EngineSpec
from ctrl_megatron.rollout.launch import EngineProcess, launch_engine
from ctrl_megatron.rollout.weight_chunks import WeightChunk
from ctrl_megatron.types import SamplingParams


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_llama(0), tmp_path_factory.mktemp("tiny"))


def spec_of(path: Path, log: Path) -> EngineSpec:
    return EngineSpec(
        name="hf",
        model_path=str(path),
        dtype="float32",
        max_model_len=2048,
        threads=1,
        log_path=str(log),
        startup_timeout=PATIENCE,
    )


@pytest.fixture(scope="module")
def process(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    log = tmp_path_factory.mktemp("log") / "engine.log"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", "3")
        patch.setenv("MASTER_ADDR", "nowhere.invalid")
        patch.setenv("OMP_NUM_THREADS", "7")
        # The thread that launches ends at once, as a pool's does; the engine must not mind.
        with ThreadPoolExecutor(1) as pool:
            started = pool.submit(launch_engine, spec_of(model_path, log)).result()
    yield started
    started.stop()
    assert process_group_members(started.pid) == [] and not started.alive()


def wait_until_empty(group: int, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while process_group_members(group) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert process_group_members(group) == []


def test_a_launched_engine_is_on_loopback_and_knows_no_launcher(process: EngineProcess) -> None:
    assert process.alive() and process.address.pid == process.pid
    assert process.address.endpoint.startswith("http://127.0.0.1:")
    assert process.address.token not in repr(process.address)
    environment = Path(f"/proc/{process.pid}/environ").read_text().split("\0")
    names: dict[str, str] = {}
    for line in filter(None, environment):
        name, _, value = line.partition("=")
        names[name] = value
    assert not {"RANK", "MASTER_ADDR"} & names.keys()
    assert names["OMP_NUM_THREADS"] == "1" and names["HF_HUB_OFFLINE"] == "1"
    # The token must not be readable in process lists or environments.
    command = Path(f"/proc/{process.pid}/cmdline").read_text()
    assert process.address.token not in command + "".join(environment)


def test_two_clients_share_an_engine(process: EngineProcess) -> None:
    async def ask() -> None:
        clients = [RemoteEngine(process.address) for _ in range(2)]
        params = SamplingParams(max_tokens=5, seed=1)
        answers = await asyncio.gather(*(c.generate([[1, 2]], params) for c in clients))
        assert answers[0] == answers[1]
        await asyncio.gather(*(c.close() for c in clients))

    asyncio.run(ask())


def test_calls_in_flight_notice_a_killed_host(process: EngineProcess) -> None:
    async def ask() -> None:
        client = RemoteEngine(process.address)
        params = SamplingParams(max_tokens=2000, seed=1)
        calls = [asyncio.create_task(client.generate([[1, i]], params)) for i in range(3)]
        await asyncio.sleep(0.3)
        os.kill(process.pid, signal.SIGKILL)
        found = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 20)
        assert all(isinstance(error, EngineDied) for error in found)
        assert f"engine hf (pid {process.pid}" in str(found[0])
        await client.close()

    asyncio.run(ask())
    wait_until_empty(process.pid)
    assert not process.alive()
    process.stop()


def test_engines_that_cannot_start_here_are_refused_at_once(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(model_path, tmp_path / "engine.log")
    with pytest.raises(ValueError, match=r"unknown engine 'vlm'.*hf.*vllm"):
        launch_engine(replace(spec, name="vlm"))
    with pytest.raises(ValueError, match=r"config\.json does not exist"):
        launch_engine(replace(spec, model_path=str(tmp_path)))
    monkeypatch.setattr(engine_module, "find_spec", lambda module: None)
    for name in ("vllm", "sglang"):
        with pytest.raises(ValueError, match=f"'{name}' is not installed here; install the extra"):
            launch_engine(replace(spec, name=name))
    assert not (tmp_path / "engine.log").exists()


def test_an_engine_whose_decoding_runs_out_of_memory_ends_with_the_reason(
    model_path: Path, tmp_path: Path
) -> None:
    """Also where several requests wait for it."""
    process = launch_engine(spec_of(model_path, tmp_path / "engine.log"))
    engine, began = process.connect(), time.monotonic()

    async def ask() -> list[object]:
        prompts = [[1] * 1900] * 200
        params = SamplingParams(max_tokens=100)
        calls = [engine.generate(prompts, params) for _ in range(2)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        await engine.close()
        return answers

    try:
        used = psutil.Process(process.pid).memory_info().vms
        resource.prlimit(process.pid, resource.RLIMIT_AS, (used + (64 << 20),) * 2)
        for answer in asyncio.run(asyncio.wait_for(ask(), 60)):
            assert isinstance(answer, EngineDied)
            assert "decoding failed: " in str(answer) and "memory" in str(answer)
        while process.alive() and time.monotonic() - began < 30:
            time.sleep(0.1)
        assert not process.alive()
    finally:
        process.stop()


def test_an_engine_that_dies_in_an_update_ends_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that heard of an error of the update alone would not launch the engine again."""
    reasons = list[str]()
    monkeypatch.setattr(server, "end_engine_process", reasons.append)
    monkeypatch.setattr(client_module, "_EXIT_GRACE", 0.1)

    class Dead:
        async def update(self, specs: object, chunks: object, version: str) -> None:
            raise EngineDied("its core is gone")

    async def no_chunks() -> AsyncIterator[WeightChunk]:
        return
        yield

    async def push() -> None:
        app = TestServer(server.engine_application(cast(Any, Dead()), "token"))
        await app.start_server()
        address = EngineAddress(
            name="hf",
            endpoint=str(app.make_url("")).rstrip("/"),
            home=host_identity(),
            token="token",
            pid=os.getpid(),
            log_path="none",
        )
        client = RemoteEngine(address)
        with pytest.raises(EngineDied):
            await client.update([], no_chunks(), "version")
        await client.close()
        await app.close()

    asyncio.run(push())
    assert reasons == ["its core is gone"]

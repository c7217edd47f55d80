"""A service that dies or falls silent is started again, a bounded number of times."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ctrl_megatron import keeping
from ctrl_megatron.keeping import ServiceKeeper
from ctrl_megatron.parallel.hosts import host_identity
from ctrl_megatron.rollout.client import RemoteEngine
from ctrl_megatron.rollout.engine import EngineAddress
from ctrl_megatron.rollout.fleet import Services
from ctrl_megatron.sandbox.kept import SandboxService


class Scripted:
    """A ``Service`` whose starts succeed as ``starts`` says, then always."""

    name = "engine scripted"

    def __init__(self, *starts: bool) -> None:
        self._starts, self.alive, self.log = list(starts), True, list[str]()
        self.at_start = threading.Event()
        self.at_start.set()

    def death_message(self) -> str | None:
        return None if self.alive else "the engine scripted died; its last words"

    def stop(self) -> None:
        self.alive = False
        self.log.append("stop")

    def launch_again(self) -> None:
        self.log.append("launch")

    def wait_ready(self) -> None:
        self.at_start.wait()
        if self._starts and not self._starts.pop(0):
            raise RuntimeError("it does not start")
        self.alive = True


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(keeping, "_LONGEST_PAUSE", 0.01)


@pytest.fixture
def keep() -> Iterator[Callable[..., ServiceKeeper]]:
    kept: list[ServiceKeeper] = []

    def begin(service: Scripted, *, silent: Callable[[], str | None] = lambda: None, **options):
        class Answers:
            def __call__(self) -> str | None:
                return silent()

            def reset(self) -> None: ...

        kept.append(ServiceKeeper(service, **{"most": 3, **options}))
        kept[-1].watch(Answers())
        return kept[-1]

    yield begin
    for keeper in kept:
        keeper.stop()


class Box:
    """Stands in for an embedded sandbox, which has an address once it answers."""

    def __init__(self, port: int, *, answers: bool) -> None:
        self.port, self._answers, self.endpoint = port or 4321, answers, ""

    def wait_ready(self) -> None:
        if not self._answers:
            raise RuntimeError("no answer within 60 s")
        self.endpoint = f"http://127.0.0.1:{self.port}"


def test_a_sandbox_keeps_its_address_also_after_starts_that_fail() -> None:
    boxes, answers = list[Box](), [True, False, True]

    def start(port: int) -> Any:
        boxes.append(Box(port, answers=answers[len(boxes)]))
        return boxes[-1]

    service = SandboxService(start)
    service.wait_ready()
    service.launch_again()
    with pytest.raises(RuntimeError, match="no answer"):
        service.wait_ready()
    service.launch_again()
    service.wait_ready()
    assert [box.port for box in boxes] == [4321] * 3
    assert service.box.endpoint == "http://127.0.0.1:4321"


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("most", [0, 1, 3])
def test_restarts_are_bounded(
    keep: Callable[..., ServiceKeeper], most: int, capsys: pytest.CaptureFixture[str]
) -> None:
    service = Scripted()
    keeper = keep(service, most=most)
    for number in range(1, most + 1):
        service.alive = False
        until(lambda n=number: keeper.restarts == n and keeper.is_up and keeper.fresh)
        keeper.fresh = False
        assert keeper.final_death_message() is None and keeper.final_silence_message() is None
    service.alive = False
    until(keeper.final_death_message)
    assert keeper.final_death_message() == "the engine scripted died; its last words"
    assert (service.log == ["stop", "launch"] * most and not keeper.is_up) or not most
    said = capsys.readouterr().err
    assert said.count("is started again (restart") == most
    assert said.count("of at most") == said.count("its last words") == most


@pytest.mark.parametrize("waits", [False, True])
def test_starts_that_fail_count(keep: Callable[..., ServiceKeeper], waits: bool) -> None:
    service = Scripted(False, False, True)
    keeper = keep(service, waits=waits)
    service.alive = False
    until(lambda: not keeper.is_up)
    keeper.allow_restart()
    until(lambda: keeper.restarts == 3 and keeper.is_up)
    service = Scripted(False, False, False)
    keeper = keep(service, waits=waits)
    service.alive = False
    until(lambda: not keeper.is_up)
    keeper.allow_restart()
    until(keeper.final_death_message)
    assert keeper.final_death_message() == "it does not start"
    assert service.log == ["stop", "launch"] * 3


def test_ends_an_hour_apart_do_not_add_up(
    keep: Callable[..., ServiceKeeper], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "_HOUR", 0.0)
    service = Scripted()
    keeper = keep(service, most=1)
    for number in (1, 2, 3):
        service.alive = False
        until(lambda n=number: keeper.restarts == n and keeper.is_up)
    assert keeper.final_death_message() is None


def test_a_silent_service_is_ended_at_once_and_started_when_its_devices_are_free(
    keep: Callable[..., ServiceKeeper],
) -> None:
    words = ["it is silent"]
    service = Scripted()
    keeper = keep(service, silent=lambda: words[0], waits=True)
    until(lambda: service.log == ["stop"])
    words[0] = ""
    time.sleep(0.05)
    assert service.log == ["stop"] and not keeper.is_up
    keeper.allow_restart()
    until(lambda: keeper.is_up)
    assert service.log == ["stop", "launch"]
    # The permission was for that restart only.
    service.alive = False
    until(lambda: len(service.log) == 3)
    time.sleep(0.05)
    assert service.log == ["stop", "launch", "stop"]


def test_a_service_that_cannot_be_watched_fails(keep: Callable[..., ServiceKeeper]) -> None:
    def unseen() -> None:
        raise OSError(24, "Too many open files")

    service = Scripted()
    service.death_message = unseen  # type: ignore[method-assign]
    keeper = keep(service)
    until(lambda: keeper.failure)
    assert "engine scripted cannot be watched: OSError(24, 'Too many open files')" in keeper.failure


@pytest.mark.parametrize("listens", [True, False])
def test_an_engine_whose_port_says_nothing_is_started_again(
    keep: Callable[..., ServiceKeeper], listens: bool
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = EngineAddress(
            name="hf",
            endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}",
            home=host_identity(),
            token="token",
            pid=os.getpid(),
            log_path="",
        )
        service, engine = Scripted(), SimpleNamespace(connect=lambda: RemoteEngine(address))
        keeper = keep(service, waits=True)
        if not listens:
            # The keeper knows it before anybody asks.
            service.alive = False
            until(lambda: not keeper.is_up)
        trainer = SimpleNamespace(failure_timeout=0.2)
        services: Any = SimpleNamespace(
            _engines={0: engine}, _config=SimpleNamespace(trainer=trainer)
        )
        restored = Services._restored(services, keeper, 0, ())
        assert asyncio.run(asyncio.wait_for(restored, 10)) is True
        assert service.log == ["stop", "launch"]


def test_a_silent_service_that_may_not_be_started_again_hangs(
    keep: Callable[..., ServiceKeeper],
) -> None:
    keeper = keep(Scripted(), silent=lambda: "it is silent", most=0)
    until(keeper.final_silence_message)
    assert keeper.final_silence_message() == "it is silent" and keeper.final_death_message() is None


def test_a_doubt_from_before_a_restart_is_forgotten(keep: Callable[..., ServiceKeeper]) -> None:
    service = Scripted()
    keeper = keep(service)
    keeper.request_restart("its weights are a mixture", restarts=0)
    assert not keeper.is_up
    until(lambda: keeper.is_up)
    assert keeper.restarts == 1 and service.log == ["stop", "launch"]
    keeper.request_restart("the same, noticed late", restarts=0)
    assert keeper.is_up


def test_the_end_of_a_run_ends_a_service_that_is_starting(
    keep: Callable[..., ServiceKeeper],
) -> None:
    service = Scripted()
    service.at_start.clear()
    keeper = keep(service)
    service.alive = False
    until(lambda: service.log == ["stop", "launch"])
    keeper.stop()
    service.at_start.set()
    time.sleep(0.05)
    assert service.log == ["stop", "launch", "stop"]

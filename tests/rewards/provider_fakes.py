"""Stand-ins for providers' services that really run what they are given, in subprocesses."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from ctrl_megatron.sandbox.wire import SubmitRequest, TestConfig


def function_request(
    code: str, tests: list[str], *, run_all: bool = True, seconds: float = 5.0, setup: str = ""
) -> SubmitRequest:
    data = {"test_list": tests, "test_setup_code": setup, "entry_point": "f"}
    return _request("MBPPDataset", code, data, run_all, seconds)


def stdio_request(
    code: str,
    cases: list[tuple[str, str]],
    *,
    run_all: bool = True,
    seconds: float = 5.0,
    language: str = "python",
) -> SubmitRequest:
    tests = [{"input": {"stdin": i}, "output": {"stdout": o}} for i, o in cases]
    return _request("CommonOJDataset", code, {"test": tests}, run_all, seconds, language)


def _request(
    kind: str,
    code: str,
    data: dict[str, Any],
    run_all: bool,
    seconds: float,
    language: str = "python",
) -> SubmitRequest:
    config = TestConfig(
        dataset_type=kind,
        language=language,
        run_timeout=seconds,
        provided_data=data,
        extra={"run_all_cases": run_all},
    )
    completion = f"```{language}\n{code}\n```"
    return SubmitRequest(dataset="test", id=0, completion=completion, config=config)


async def execute(*command: str, stdin: str, seconds: float) -> tuple[str, str, int | None]:
    """stdout, stderr and exit status of a command; None where it ran out of time."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(stdin.encode()), seconds)
    except TimeoutError:
        return "", "", None
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.communicate()
    return out.decode(), err.decode(), process.returncode


@dataclass
class FakeService:
    """The faults that the fakes should produce, and the requests that they received."""

    faults: list[tuple[int, Any]] = field(default_factory=list)
    """(HTTP status, JSON) of the next answers, before real ones."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    async def fault(self, request: web.Request) -> web.Response | None:
        self.bodies.append(await request.json())
        self.headers.append(dict(request.headers))
        if not self.faults:
            return None
        status, answer = self.faults.pop(0)
        return web.json_response(answer, status=status)


@asynccontextmanager
async def serving(application: web.Application) -> AsyncIterator[str]:
    async with TestServer(application) as server:
        yield str(server.make_url("")).rstrip("/")


def sandbox_fusion(service: FakeService) -> web.Application:
    async def run(request: web.Request) -> web.Response:
        if (fault := await service.fault(request)) is not None:
            return fault
        body = service.bodies[-1]
        out, err, code = await execute(
            sys.executable, "-c", body["code"], stdin=body["stdin"], seconds=body["run_timeout"]
        )
        result: dict[str, Any] = {"status": "Finished", "stdout": out, "stderr": err}
        result |= {"return_code": code, "execution_time": 0.1}
        if code is None:
            result = {"status": "TimeLimitExceeded", "execution_time": 0.1}
        status = "Failed" if code != 0 else "Success"
        return web.json_response({"status": status, "message": "", "run_result": result})

    application = web.Application(client_max_size=1 << 24)
    application.router.add_post("/run_code", run)
    return application


class Machines:
    """A cloud of machines that are folders; counts those that were never ended."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.open = self.started = 0
        self.options: list[dict[str, Any]] = []
        self.faults: list[Exception] = []
        """Raised by the next calls, whatever they are."""
        self.end_fault: Exception | None = None

    def check(self) -> None:
        if self.faults:
            raise self.faults.pop(0)

    def start(self, **options: Any) -> Path:
        self.check()
        self.options.append(options)
        self.open += 1
        self.started += 1
        folder = self.root / f"machine{self.started}"
        folder.mkdir()
        return folder

    def end(self) -> None:
        if self.end_fault is not None:
            raise self.end_fault
        self.open -= 1


async def in_shell(folder: Path, command: str, seconds: float) -> tuple[str, str, int]:
    """Run it as a machine would; its temporary folder is ``folder``."""
    local = command.replace("/tmp/job", str(folder / "job"))
    out, err, code = await execute("bash", "-c", local, stdin="", seconds=seconds)
    return out, err, 128 + signal.SIGKILL if code is None else code


class CommandExitException(Exception):
    """Named as E2B's, whose name is what counts."""

    def __init__(self, stdout: str, stderr: str, exit_code: int) -> None:
        super().__init__(f"exit {exit_code}")
        self.stdout, self.stderr, self.exit_code = stdout, stderr, exit_code


class FakeE2BSandbox:
    """The part of ``e2b_code_interpreter.AsyncSandbox`` that is used."""

    def __init__(self, machines: Machines, folder: Path) -> None:
        self._machines, self._folder = machines, folder
        self.files = self.commands = self

    async def write(self, path: str, text: str) -> None:
        self._machines.check()
        target = Path(path.replace("/tmp/job", str(self._folder / "job")))
        target.parent.mkdir(exist_ok=True)
        target.write_text(text)

    async def run(self, command: str, *, timeout: float) -> Any:
        self._machines.check()
        out, err, code = await in_shell(self._folder, command, timeout)
        if code:
            raise CommandExitException(out, err, code)
        return SimpleNamespace(stdout=out, stderr=err, exit_code=code)

    async def kill(self) -> bool:
        self._machines.end()
        return True


class FakeMorphInstance:
    """The part of ``morphcloud.api.Instance`` that is used."""

    def __init__(self, machines: Machines, folder: Path) -> None:
        self._machines, self._folder = machines, folder

    async def aexec(self, command: str, *, timeout: float) -> Any:
        self._machines.check()
        out, err, code = await in_shell(self._folder, command, timeout)
        return SimpleNamespace(stdout=out, stderr=err, exit_code=code)

    async def astop(self) -> None:
        self._machines.end()


def fake_e2b(machines: Machines) -> Any:
    async def create(**options: Any) -> FakeE2BSandbox:
        return FakeE2BSandbox(machines, machines.start(**options))

    return create


def fake_morph(machines: Machines) -> Any:
    class Client:
        def __init__(self, **options: Any) -> None:
            machines.options.append(options)
            self.instances = self

        async def astart(self, snapshot_id: str, **options: Any) -> FakeMorphInstance:
            folder = machines.start(snapshot_id=snapshot_id, **options)
            return FakeMorphInstance(machines, folder)

    return Client


def e2b_router(service: FakeService) -> web.Application:
    """A router whose sandboxes are processes of this machine."""

    async def run(request: web.Request) -> web.Response:
        if (fault := await service.fault(request)) is not None:
            return fault
        body = service.bodies[-1]
        assert body["languages"] == ["python"] * len(body["scripts"])
        answers = []
        for script in body["scripts"]:
            out, err, code = await execute(
                sys.executable, "-c", script, stdin="", seconds=body["timeout"]
            )
            logs = {"stdout": out.splitlines(keepends=True), "stderr": [err]}
            done = {"results": [], "logs": logs, "error": None, "execution_count": 1}
            lost = {"execution": None, "exception_str": "timed out"}
            answers.append(lost if code is None else {"execution": done, "exception_str": None})
        return web.json_response(answers)

    application = web.Application(client_max_size=1 << 24)
    application.router.add_post("/execute_batch", run)
    return application

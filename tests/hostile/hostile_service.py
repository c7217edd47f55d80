"""Runs every hostile program on one service, some of them concurrently, and compares the machine's
state before and after.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import sys
from collections.abc import Awaitable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hostile_channel import CHANNEL
from hostile_forgeries import FORGERIES, HANGING
from hostile_harm import HARM
from hostile_system import ENDINGS, SYSTEM
from hostile_traces import HOLDS, LOOKS, TRACES
from hostile_values import VALUES
from process_table import ProcessTable, read_process_table

from ctrl_megatron.sandbox import EmbeddedSandbox, SandboxClient, SandboxLimits, SubmitRequest
from ctrl_megatron.sandbox.wire import EvalResult, RunCodeRequest, RunCodeResponse, TestConfig

LEVELS: dict[str, dict[str, Any]] = {
    "strict": {"isolation": "strict"},
    "standard": {"isolation": "standard"},
    "landlock": {"isolation": "standard", "without": ("namespaces",)},
}
"""The third is ``standard`` on a kernel that gives no namespaces."""
FUNCTIONS = FORGERIES | VALUES | CHANNEL | HANGING
PROGRAMS = HARM | SYSTEM
SECRET = f"zq-{secrets.token_hex(16)}"
TESTS = [f"assert f(3) == {SECRET!r}", f"assert f(4) == [{SECRET!r}, 1]"]
HONEST = f"def f(x): return {SECRET!r} if x == 3 else [{SECRET!r}, 1]"
LIMITS = SandboxLimits(memory_mb=256, disk_mb=32)
_WORKERS = 2
_AT_ONCE = 4
_LONG, _SHORT = 30.0, 0.25


@dataclass(slots=True)
class Outcomes:
    """The outcome of every program; an exception means that the service failed."""

    isolation: dict[str, Any]
    judged: dict[str, EvalResult | Exception] = field(default_factory=dict)
    printed: dict[str, EvalResult | Exception] = field(default_factory=dict)
    ran: dict[str, RunCodeResponse | Exception] = field(default_factory=dict)
    looked: dict[str, list[str]] = field(default_factory=dict)
    honest: EvalResult | None = None
    counters: dict[str, Any] = field(default_factory=dict)
    before: ProcessTable | None = None
    after: ProcessTable | None = None


def readable_python() -> str | None:
    """An interpreter that the unprivileged user of the workers can read, None where there is
    none.
    """
    own = Path(sys.executable).resolve()
    if os.getuid() != 0 or all(folder.stat().st_mode & 0o005 == 0o005 for folder in own.parents):
        return str(own)
    return shutil.which("python3.11", path="/usr/bin:/usr/local/bin")


def submission(code: str) -> SubmitRequest:
    """``code`` to be judged by the two secret tests, both of them."""
    data = {"test_list": TESTS, "entry_point": "f"}
    seconds = _SHORT if code in HANGING.values() else _LONG
    config = TestConfig(
        dataset_type="MBPPDataset",
        language="python",
        run_timeout=seconds,
        provided_data=data,
        extra={"run_all_cases": True},
    )
    return SubmitRequest(
        dataset="hostile", id=0, completion=f"```python\n{code}\n```", config=config
    )


def printing(code: str) -> SubmitRequest:
    """A whole program to be judged by what it prints for two inputs."""
    cases = [{"input": {"stdin": "1\n"}, "output": {"stdout": SECRET}}] * 2
    config = TestConfig(
        dataset_type="CommonOJDataset",
        language="python",
        run_timeout=_LONG,
        provided_data={"test": cases},
        extra={"run_all_cases": True},
    )
    return SubmitRequest(
        dataset="hostile", id=0, completion=f"```python\n{code}\n```", config=config
    )


def program(code: str, seconds: float = _LONG) -> RunCodeRequest:
    """``code`` to be run."""
    return RunCodeRequest(code=code, language="python", run_timeout=seconds)


async def run_everything(service: EmbeddedSandbox) -> Outcomes:
    """Every program of every table, then an honest one."""
    found = Outcomes(isolation=service.isolation)
    slots = asyncio.Semaphore(_AT_ONCE)

    async def keep(table: dict[str, Any], name: str, call: Awaitable[Any]) -> None:
        async with slots:
            try:
                table[name] = await call
            except Exception as error:
                table[name] = error

    async with SandboxClient(service.endpoint, attempts=1) as client:
        await client.submit(submission(HONEST))
        found.before = await idle_table(service)
        calls = [keep(found.judged, n, client.submit(submission(c))) for n, c in FUNCTIONS.items()]
        calls += [keep(found.ran, n, client.run_code(program(c))) for n, (c, _) in PROGRAMS.items()]
        for name, (code, status) in ENDINGS.items():
            request = program(code, 0.5 if status is None else _LONG)
            calls.append(keep(found.ran, f"ending: {name}", client.run_code(request)))
        calls += [
            keep(found.printed, name, client.submit(printing(code))) for name, code in STDIO.items()
        ]
        await asyncio.gather(*calls)
        await _look(client, found)
        found.honest = await client.submit(submission(HONEST))
        found.counters = await service_stats(service.endpoint)
    found.after = await idle_table(service)
    return found


async def idle_table(service: EmbeddedSandbox) -> ProcessTable:
    """Once the last job's processes are reaped: its answer may come a moment before."""
    taken = [read_process_table(service.pid, service.scratch)]
    while len(taken) < 2 or taken[-1] != taken[-2]:
        assert len(taken) < 100, f"the idle service does not come to rest: {taken[-2:]}"
        await asyncio.sleep(0.1)
        taken.append(read_process_table(service.pid, service.scratch))
    return taken[-1]


async def _look(client: SandboxClient, found: Outcomes) -> None:
    """Each trace is left on every worker before it is looked for on every worker."""
    for name, (leave, look, _) in TRACES.items():
        wait = "\nimport time\ntime.sleep(0.2)\n"
        await asyncio.gather(*(client.run_code(program(leave + wait)) for _ in range(_WORKERS)))
        seen = await asyncio.gather(
            *(client.run_code(program(look + wait)) for _ in range(_WORKERS))
        )
        found.looked[name] = [stdout(answer) for answer in seen]
    held, seen_beside = await asyncio.gather(
        client.run_code(program(HOLDS)),
        client.run_code(program("import time; time.sleep(0.5)" + LOOKS)),
    )
    found.looked["beside"] = [stdout(held), stdout(seen_beside)]


async def service_stats(endpoint: str) -> dict[str, Any]:
    """What the service counts."""
    import aiohttp

    async with aiohttp.ClientSession() as session, session.get(endpoint + "/stats") as response:
        return await response.json()


def stdout(response: RunCodeResponse) -> str:
    """The program's output."""
    assert response.run_result is not None
    return response.run_result.stdout or ""


STDIO = {
    "leaves before it answers": "import os; os._exit(0)",
    "leaves with status 0": "raise SystemExit(0)",
    "prints verdicts": "print('accepted'); print('{\"passed\": true}')",
    "prints nothing": "",
    "every line there is": "print('zq-' + '0' * 32)",
    "looks for the answer": (
        "import glob, gc, re\ntext = repr(gc.get_objects())\n"
        "for p in glob.glob('/**', recursive=True)[:2000]:\n"
        "    try: text += open(p, errors='replace').read(4096)\n"
        "    except (OSError, ValueError): pass\n"
        "print(re.findall('zq-[0-9a-f]{32}', text))"
    ),
    "equal object as output": (
        "import sys\nclass S(str):\n    def __eq__(s, o): return True\nsys.stdout.write(S('x'))"
    ),
    "right text on stderr only": "import sys; sys.stderr.write('x')",
    "crashes after its output": "print('x', flush=True)\nimport os; os.abort()",
}
"""Whole programs judged by their output."""

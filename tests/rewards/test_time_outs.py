"""Verdicts that time decided are never cached, whatever ran out of it; verdicts that the program
decided are. A reward function that does not return is named and left behind.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
from reward_samples import block, function_row, stdio_row

from ctrl_megatron.background import BackgroundLoop, describe_waits
from ctrl_megatron.errors import UserError
from ctrl_megatron.parallel.stop import StopRequested
from ctrl_megatron.parallel.waiting import WaitRules
from ctrl_megatron.rewards import RewardItem, RewardSum
from ctrl_megatron.rewards.cache import VerdictCache
from ctrl_megatron.rewards.grading import TIMED_OUT, CachedJudge, grading_job
from ctrl_megatron.rewards.providers import ProviderError, ScriptProvider
from ctrl_megatron.rewards.registry import make_reward
from ctrl_megatron.rewards.users_reward import UsersReward
from ctrl_megatron.sandbox import EmbeddedSandbox, SandboxClient, SandboxLimits
from ctrl_megatron.sandbox.wire import (
    CommandRunResult,
    CommandRunStatus,
    EvalResult,
    EvalTestCase,
    RunCodeResponse,
    RunStatus,
    SubmitRequest,
)
from ctrl_megatron.types import Verdict

MODEL = {"style": "rule", "ground_truth": "7"}
LATE = CommandRunResult(status=CommandRunStatus.TIME_LIMIT_EXCEEDED, execution_time=10.0)
DONE = CommandRunResult(status=CommandRunStatus.FINISHED, return_code=0)
BROKEN = CommandRunResult(status=CommandRunStatus.FINISHED, return_code=1, stderr="error: ;")


class Scripted:
    """A judge that answers every request with one verdict on each test."""

    def __init__(self, case: EvalTestCase) -> None:
        self.case, self.runs = case, 0

    async def submit(self, request: SubmitRequest, /) -> EvalResult:
        self.runs += 1
        good = EvalTestCase(
            passed=True, exec_info=RunCodeResponse(status=RunStatus.SUCCESS, run_result=DONE)
        )
        return EvalResult(id=0, accepted=False, extracted_code="", tests=[good, self.case])

    async def identity(self) -> object:
        return "scripted"


def failed(info: dict[str, Any] | None = None, **results: Any) -> EvalTestCase:
    run = RunCodeResponse(status=RunStatus.FAILED, **results)
    return EvalTestCase(passed=False, exec_info=run, test_info=info)


async def twice(judge: Any, text: str, row: Any, **options: Any) -> tuple[list[Verdict], int]:
    """Two verdicts on one program, and how many of them came without a run."""
    cached, slots = CachedJudge(judge, VerdictCache()), asyncio.Semaphore(1)
    job = grading_job(text, row, run_all_cases=True, **options)
    answers = [await cached.grade(job, slots) for _ in range(2)]
    return [verdict for verdict, _ in answers], sum(known for _, known in answers)


@pytest.mark.parametrize(
    ("case", "lasts", "why"),
    [
        (failed(run_result=LATE), False, TIMED_OUT),
        (failed(compile_result=LATE), False, TIMED_OUT),
        (failed(compile_result=DONE, run_result=LATE), False, TIMED_OUT),
        (
            failed({"reason": "a slow checker", "timed_out": True}, run_result=DONE),
            False,
            "a slow checker",
        ),
        (failed({"reason": "not run: the time", "timed_out": True}), False, "not run: the time"),
        (failed({"reason": "differs", "timed_out": False}, run_result=DONE), True, "differs"),
        (failed({"reason": "differs"}, run_result=DONE), True, "differs"),
        (failed(compile_result=BROKEN), True, "Failed"),
        (failed(run_result=BROKEN), True, "error: ;"),
    ],
)
def test_what_a_cache_remembers(case: EvalTestCase, lasts: bool, why: str) -> None:
    judge = Scripted(case)
    verdicts, known = asyncio.run(twice(judge, block("print(1)"), stdio_row()))
    assert [verdict.timed_out for verdict in verdicts] == [not lasts] * 2
    assert (judge.runs, known) == ((1, 1) if lasts else (2, 0))
    assert verdicts[0].detail == ("", why)


def test_time_outs_of_a_real_service_are_not_remembered() -> None:
    """Time-outs of loading, of the budget in both kinds of problem, and of the compiler."""
    loading = block("import time\ntime.sleep(9)\ndef add(a, b): return a + b")
    calls = block("import time\ndef add(a, b):\n    time.sleep(0.4)\n    return a + b")
    prints = block("import time\ntime.sleep(0.4)\nprint(sum(map(int, input().split())))")
    source = "\n".join(
        f'int g{i}() {{ return std::regex_match("a", std::regex("{i}")); }}' for i in range(40)
    )
    heavy = f"#include <bits/stdc++.h>\n{source}\nint main() {{}}"
    heavy = f"```cpp\n{heavy}\n```"

    async def scenario() -> list[tuple[list[Verdict], int]]:
        async with SandboxClient(service.endpoint, attempts=1) as client:
            return [
                await twice(client, loading, function_row(time_limit=0.3)),
                await twice(client, calls, function_row(time_limit=0.5)),
                await twice(client, prints, stdio_row(time_limit=0.5)),
                await twice(client, heavy, stdio_row(time_limit=0.5), language="cpp"),
            ]

    limits = SandboxLimits(problem_seconds=0.5, test_seconds=0.5, wall_factor=1.0)
    with EmbeddedSandbox.start(workers=1, limits=limits) as service:
        cpp = service.isolation["tier"] == "namespaces"
        for verdicts, known in asyncio.run(scenario())[: 4 if cpp else 3]:
            assert all(verdict.timed_out for verdict in verdicts), verdicts
            assert known == 0 and not all(verdicts[0].passed)


def wrote(name: str, text: str, folder: Path) -> str:
    (folder / f"{name}.py").write_text(text)
    return f"{folder / name}.py:score"


HANGS = "import time\ndef score(items):\n    time.sleep(60)"
BLOCKS = "import time\nasync def score(items):\n    time.sleep(60)"
AWAITS = "import asyncio\nasync def score(items):\n    await asyncio.sleep(60)"
PER_TEXT = (
    "import time\n"
    "def score(data_source, solution_str, ground_truth, extra_info):\n"
    "    time.sleep(60 * (solution_str == 'slow'))\n"
    "    return 1.0"
)
ITEMS = [
    RewardItem(text=text, row=function_row(data_source="d", reward_model=MODEL))
    for text in ("quick", "slow", "quick")
]


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (HANGS, r"it is at .*mine\.py line 3"),
        (BLOCKS, r"its event loop is blocked at .*mine\.py line 3"),
        (AWAITS, "it awaits something that does not come"),
        (PER_TEXT, r"it is at .*mine\.py line 3"),
    ],
    ids=["hangs", "blocks its loop", "awaits", "hangs in one text"],
)
def test_a_function_that_does_not_return_is_named_and_left_behind(
    text: str, where: str, tmp_path: Path
) -> None:
    reward = make_reward(wrote("mine", text, tmp_path))
    assert isinstance(reward, UsersReward)
    reward.seconds = 1.5
    total = RewardSum({"mine": reward, "other": make_reward(f"{__name__}:ready")})
    background = BackgroundLoop()
    began = time.monotonic()
    work = background.submit(total.score(ITEMS))
    part = "1 of " if text is PER_TEXT else ""
    while describe_waits() != [f"the reward 'mine' on {part}3 rows"]:
        assert not work.done()
        time.sleep(0.01)
    # The loop of the requests to engines and sandboxes goes on.
    assert background.run(asyncio.sleep(0, "alive"), 0.5) == "alive"
    with pytest.raises(UserError, match=rf"mine\.py:score.*within 1\.5 s for 3 items: {where}"):
        work.result(10)
    background.close()
    assert time.monotonic() - began < 5 and describe_waits() == []


def test_a_stop_leaves_a_hanging_function_behind(tmp_path: Path) -> None:
    reward, background = make_reward(wrote("mine", HANGS, tmp_path)), BackgroundLoop()
    stop: Any = SimpleNamespace(is_set=False)
    alone: Any = SimpleNamespace(any_rank=lambda *flags: flags)
    threading.Timer(0.3, setattr, (stop, "is_set", True)).start()
    began = time.monotonic()
    with pytest.raises(StopRequested):
        WaitRules(groups=alone, stop=stop, limit=60.0).wait_together(
            background.submit(RewardSum({"mine": reward}).score(ITEMS)), "rewards"
        )
    background.close()
    assert time.monotonic() - began < 5


def test_a_process_ends_while_functions_hang(tmp_path: Path) -> None:
    text = (
        "import asyncio, sys\n"
        "from ctrl_megatron.errors import UserError\n"
        "from ctrl_megatron.rewards.registry import make_reward\n"
        "for path in sys.argv[1:]:\n"
        "    reward = make_reward(path)\n"
        "    reward.seconds = 0.3\n"
        "    try:\n"
        "        asyncio.run(reward([]))\n"
        "    except UserError:\n"
        "        print('named')\n"
    )
    paths = [wrote("hangs", HANGS, tmp_path), wrote("blocks", BLOCKS, tmp_path)]
    done = subprocess.run(
        [sys.executable, "-c", text, *paths], capture_output=True, text=True, timeout=50
    )
    assert (done.stdout, done.returncode) == ("named\nnamed\n", 0), done.stderr[-2000:]


def ready(items: Sequence[RewardItem]) -> list[float]:
    return [0.0] * len(items)


class Unanswering:
    """A back end whose service answers nothing, or what no client can read."""

    name, languages, tests_per_run = "far", ("python",), None
    identity: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, answer: Exception | None) -> None:
        self.answer, self.runs = answer, 0

    @asynccontextmanager
    async def session(self, counters: Any) -> AsyncIterator[Unanswering]:
        yield self

    async def run(self, script: Any) -> Any:
        self.runs += 1
        if self.answer is not None:
            raise self.answer
        await asyncio.sleep(60)

    async def close(self) -> None: ...


@pytest.mark.parametrize(
    ("answer", "said", "runs"),
    [
        (None, r"no answer within 0\.\d+ s \(gave up after 0\.8 s\)", 2),
        (
            UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
            r"cannot be read: UnicodeDecodeError.*gave up after 3 attempts",
            3,
        ),
        (KeyError("stdout"), "cannot be read: KeyError.*gave up after 3 attempts", 3),
    ],
    ids=["nothing", "not UTF-8", "another form"],
)
def test_a_provider_without_a_readable_answer_is_a_fault(
    answer: Exception | None, said: str, runs: int
) -> None:
    backend = Unanswering(answer)
    provider = ScriptProvider(backend, backoff=0.01, silence=0.8)
    job = grading_job(block("print(1)"), stdio_row(), run_all_cases=True)
    with pytest.raises(ProviderError, match=f"provider far: .*{said}"):
        asyncio.run(provider.submit(job.request))
    assert backend.runs == runs and provider.counters.failures == 1

"""Verdicts that time decided are never cached, whatever ran out of it; verdicts that the program
decided are.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from reward_samples import block, function_row, stdio_row

from ctrl_megatron.rewards.cache import VerdictCache
from ctrl_megatron.rewards.grading import TIMED_OUT, CachedJudge, grading_job
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

    limits = SandboxLimits(problem_seconds=0.5, test_seconds=0.5)
    with EmbeddedSandbox.start(workers=1, limits=limits) as service:
        cpp = service.isolation["tier"] == "namespaces"
        for verdicts, known in asyncio.run(scenario())[: 4 if cpp else 3]:
            assert all(verdict.timed_out for verdict in verdicts), verdicts
            assert known == 0 and not all(verdicts[0].passed)

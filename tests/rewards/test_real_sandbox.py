"""Rewards through the real service: programs run, verdicts come back per test."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ioi_records import ioi_files
from reward_samples import CORRECT, INCORRECT, block, function_row, stdio_row

from ctrl_megatron.data.rows import Row, read_rows
from ctrl_megatron.preparation.diagnosis import diagnose
from ctrl_megatron.rewards import RewardItem, RewardModelForCritic, make_reward
from ctrl_megatron.sandbox.client import SandboxClient
from ctrl_megatron.sandbox.client.embedded import EmbeddedSandbox
from tools.prepare_ioi import main as prepare_ioi

ADD = "def add(a, b):\n    return a + b"
FUNCTION = {
    "right": (block(ADD), 1.0),
    "right, unfenced": (ADD, 1.0),
    "right, open fence": (f"Sure:\n```python\n{ADD}", 1.0),
    "partly right": (block("def add(a, b):\n    return 3 if a else 5"), 2 / 3),
    "raises": (block("def add(a, b):\n    raise KeyError(a)"), 0.0),
    "other name": (block("def plus(a, b):\n    return a + b"), 0.0),
    "syntax error": (block("def add(a, b:\n    return a + b"), 0.0),
    "only prose": ("You should add the numbers.", 0.0),
    "leaves early": (block(f"import os\n{ADD}\nos._exit(0)"), 0.0),
    "equals everything": (
        block("class E:\n    def __eq__(self, o): return True\ndef add(a, b): return E()"),
        0.0,
    ),
    "never ends": (block("def add(a, b):\n    while True: pass"), 0.0),
}
STDIO = {
    "right": (block("a, b = map(int, input().split())\nprint(a + b)"), 1.0),
    "partly right": (block("print(3)"), 0.5),
    "raises": (block("print(int(input()))"), 0.0),
}


def items_of(critiques: list[str], revisions: list[str], rows: list[Row]) -> list[RewardItem]:
    return [
        RewardItem(text=revision, critique=critique, row=row)
        for critique, revision, row in zip(critiques, revisions, rows, strict=True)
    ]


@pytest.fixture(scope="module")
def sandbox() -> Iterator[EmbeddedSandbox]:
    with EmbeddedSandbox.start(workers=2) as service:
        yield service


def test_pass_rates_of_a_mixed_batch(sandbox: EmbeddedSandbox, tmp_path: Path) -> None:
    function, stdio = function_row(time_limit=1.0), stdio_row(time_limit=5.0)
    batch = [(*case, function) for case in FUNCTION.values()]
    batch += [(*case, stdio) for case in STDIO.values()]
    revisions, expected, rows = (list(column) for column in zip(*batch, strict=True))
    critiques = [CORRECT, INCORRECT] * len(batch)

    async def main() -> None:
        async with SandboxClient(sandbox.endpoint) as client:
            file = [function]
            model = RewardModelForCritic(file, None, sandbox=client, show_progress=False)
            rewards = await model.get_reward_all(critiques, revisions, rows)
            assert rewards == [pytest.approx(value) for value in expected]
            assert await model.get_reward_all(["no judgment"], revisions, rows) == [0.0]
            before = client.counters.requests
            items = items_of(critiques[: len(batch)], revisions, rows)
            assert await model(items) == rewards
            # Everything is remembered but the time-out.
            assert client.counters.requests == before + 1
            binary = RewardModelForCritic(file, None, 0, False, sandbox=client, show_progress=False)
            assert await binary.get_reward_all(critiques, revisions, rows) == [
                float(value == 1.0) for value in expected
            ]

    asyncio.run(main())


def test_a_row_is_judged_by_the_rule_that_it_names(sandbox: EmbeddedSandbox) -> None:
    def rewards(program: str, want: str, *rules: str) -> list[float | None]:
        cases = [{"input": {"stdin": ""}, "output": {"stdout": want}}]
        rows = [stdio_row(f"r/{r}", selected_uts=cases, comparison=r) for r in rules]
        items = [RewardItem(text=block(program), critique=CORRECT, row=row) for row in rows]

        async def main() -> list[float | None]:
            async with SandboxClient(sandbox.endpoint) as client:
                model = RewardModelForCritic(rows, None, sandbox=client, show_progress=False)
                return [outcome.reward for outcome in await model.judge(items)]

        return asyncio.run(main())

    rules = ("", "strict", "tokens", "livecodebench", "code_contests", "float:1e-6")
    assert rewards("print(7.5)", "7.50", *rules) == [0, 0, 0, 1, 1, 1]
    assert rewards("print('*')", "  *", *rules) == [0, 0, 1, 1, 1, 1]
    assert rewards("print(21)", "0021", *rules) == [0, 0, 0, 1, 0, 0]
    assert rewards("print(100000.9)", "99999.99", *rules) == [0] * 6
    deep = "def depth(n): return n and 1 + depth(n - 1)\nprint(depth(3000), gcd(4, 6))"
    assert rewards(deep, "3000 2", *rules) == [0, 0, 0, 1, 0, 0]


def test_verdicts_carry_what_synthesis_needs(sandbox: EmbeddedSandbox, tmp_path: Path) -> None:
    faults = {
        "right": "none",
        "partly right": "wrong",
        "raises": "exception",
        "other name": "missing",
        "syntax error": "syntax",
        "leaves early": "died",
        "never ends": "timeout",
    }

    async def main() -> None:
        async with SandboxClient(sandbox.endpoint) as client:
            file = [function_row()]
            model = RewardModelForCritic(file, None, sandbox=client, show_progress=False)
            for name, fault in faults.items():
                row = function_row(solution=FUNCTION[name][0], time_limit=1.0)
                (outcome,) = await model.judge_solutions([row.solution], [row])
                verdict = outcome.verdict
                assert verdict is not None
                assert diagnose(row.attempt(), verdict).fault == fault, (name, verdict)
            row = stdio_row(solution=STDIO["raises"][0])
            (outcome,) = await model.judge_solutions([row.solution], [row])
            assert outcome.verdict is not None
            diagnosis = diagnose(row.attempt(), outcome.verdict)
            assert (diagnosis.fault, diagnosis.exception) == ("exception", "ValueError")

    asyncio.run(main())


def test_a_stopped_service_masks_the_sample(tmp_path: Path) -> None:
    async def main(endpoint: str) -> None:
        async with SandboxClient(endpoint, attempts=2, backoff=0.01) as client:
            file = [function_row()]
            model = RewardModelForCritic(file, None, sandbox=client, show_progress=False)
            (outcome,) = await model.judge(items_of([CORRECT], [block(ADD)], [function_row()]))
            assert outcome.reward is None
            assert outcome.error

    with EmbeddedSandbox.start(workers=1) as service:
        endpoint = service.endpoint
    asyncio.run(main(endpoint))


HALF = """
#include "help.h"
int main(int, char **names) { puts(read(names[3]) == read(names[2]) ? "1" : "0.5"); }
"""
"""A checker that gives half of the points to a wrong output."""
HELP = """
#include <cstdio>
#include <fstream>
static int read(const char *name) { int n = 0; std::ifstream(name) >> n; return n; }
"""
DOUBLE = """#include "double.h"
int twice(int n) {{ return {}; }}
"""


@pytest.mark.skipif(not shutil.which("g++"), reason="this machine has no g++")
def test_checkers_and_graders_of_an_olympiad_judge_programs(
    sandbox: EmbeddedSandbox, tmp_path: Path
) -> None:
    """Rows in the published columns, written by the tool, and read as a run reads them."""
    if sandbox.isolation["tier"] != "namespaces":
        pytest.skip("C++ needs namespaces")
    grader = '#include "double.h"\n#include <cstdio>\nint main() '
    grader += '{ int n; scanf("%d", &n); printf("%d", twice(n)); }'
    files = [
        ["graders/grader.cpp", grader],
        ["graders/double.h", "int twice(int n);"],
        ["graders/grader.java", "class grader {}"],
        ["checker/help.h", HELP],
        ["checker/checker.cpp", HALF],
    ]
    given: dict[str, Any] = {"grader_files": files, "time_limit": 2.0}
    problem, tests = ioi_files(tmp_path, **given)
    out = tmp_path / "rows.parquet"
    arguments = ["--problems", str(problem), "--tests", str(tests), "--out", str(out)]
    assert prepare_ioi(arguments) == 0
    (row,) = read_rows(out)

    async def main() -> None:
        async with SandboxClient(sandbox.endpoint) as client:
            function, shares = (
                make_reward("ioi_code", provider=client, normalise=n, shared_process_graders=True)
                for n in (False, True)
            )
            programs = {"2 * n": 60.0, "2 * n + (n == 3)": 30.0, "nothing": 0.0}
            texts = [block(DOUBLE.format(p)).replace("```python", "```cpp") for p in programs]
            items = [RewardItem(text=text, row=row) for text in texts]
            assert await function(items) == [*programs.values()]
            assert await shares(items) == [1.0, 0.5, 0.0]

    asyncio.run(main())

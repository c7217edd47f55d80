"""The shipped problems: their schema, and a verdict from the real sandbox on every solution."""

from __future__ import annotations

import ast
import asyncio
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ctrl_megatron.preparation.problem_files import read_problems
from ctrl_megatron.sandbox.client import SandboxClient
from ctrl_megatron.sandbox.client.embedded import EmbeddedSandbox
from ctrl_megatron.sandbox.wire import EvalResult, SubmitRequest, TestConfig

FOLDER = Path(__file__).parents[2] / "examples" / "problems"
KEYS = {
    *("id", "statement", "prompter_type", "entry_point", "test_setup", "tests", "reference"),
    *("buggy", "difficulty", "time_limit"),
}
AT_LEAST = {0: 70, 1: 55, 2: 45, 3: 25, 4: 15}
LONGEST_STATEMENT = 400

Row = dict[str, Any]


def read_level(level: int) -> list[Row]:
    text = (FOLDER / f"level{level}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


ROWS = [row for level in AT_LEAST for row in read_level(level)]
FUNCTIONS = [row for row in ROWS if row["entry_point"]]
PROGRAMS = [row for row in ROWS if not row["entry_point"]]


def repeated(values: Sequence[str]) -> list[str]:
    return [value for value, count in Counter(values).items() if count > 1]


def test_enough_problems_of_each_difficulty_and_kind() -> None:
    for level, least in AT_LEAST.items():
        rows = read_level(level)
        assert len(rows) >= least, f"level{level}.jsonl"
        assert {row["difficulty"] for row in rows} == {level}
    assert len(ROWS) >= 210
    assert len(FUNCTIONS) >= 180
    assert len(PROGRAMS) >= 25
    assert {row["difficulty"] for row in PROGRAMS} == {0, 1, 2, 3}


def test_readme_counts_are_the_files_counts() -> None:
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    for level in AT_LEAST:
        rows = read_level(level)
        functions = sum(bool(row["entry_point"]) for row in rows)
        assert f"| `level{level}.jsonl` | {functions} | {len(rows) - functions} |" in readme
    assert f"| all | {len(FUNCTIONS)} | {len(PROGRAMS)} | {len(ROWS)} problems |" in readme


def test_nothing_is_there_twice() -> None:
    assert not repeated([row["id"] for row in ROWS])
    assert not repeated([" ".join(row["statement"].lower().split()) for row in ROWS])
    assert not repeated([row["entry_point"] for row in FUNCTIONS])
    assert not repeated([row["reference"] for row in ROWS])


def test_the_reader_returns_every_problem_with_its_tests() -> None:
    problems = read_problems(FOLDER)
    assert [problem.id for problem in problems] == [row["id"] for row in ROWS]
    for problem, row in zip(problems, ROWS, strict=True):
        tests = problem.selected_uts
        assert row["tests"] == (json.loads(tests) if isinstance(tests, str) else list(tests))
        assert (problem.reference, problem.difficulty) == (row["reference"], row["difficulty"])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_schema(row: Row) -> None:
    tolerant = "A relative error of 0.000001 is accepted" in row["statement"]
    assert set(row) == KEYS | ({"comparison"} if tolerant else set())
    assert row.get("comparison") == ("relative:1e-6" if tolerant else None)
    slug = row["entry_point"] or row["id"].removeprefix("builtin/")
    assert row["id"] == f"builtin/{slug}"
    assert slug.isidentifier()
    assert row["prompter_type"] == ("mbppplus" if row["entry_point"] else "code_contests")
    assert row["time_limit"] == 5.0
    assert row["statement"] == row["statement"].strip()
    assert 20 <= len(row["statement"]) <= LONGEST_STATEMENT
    assert row["statement"].endswith(".")
    assert len(row["tests"]) >= 5
    assert not repeated([json.dumps(test) for test in row["tests"]])
    assert 1 <= len(row["buggy"]) <= 2
    for code in (row["test_setup"], row["reference"], *row["buggy"]):
        compile(code, row["id"], "exec")


@pytest.mark.parametrize("row", FUNCTIONS, ids=lambda row: row["id"])
def test_function_problem_names_its_call_and_no_constant_solves_it(row: Row) -> None:
    name = row["entry_point"]
    definitions = [n for n in ast.parse(row["reference"]).body if isinstance(n, ast.FunctionDef)]
    (function,) = [n for n in definitions if n.name == name]
    assert f"`{name}({ast.unparse(function.args)})`" in row["statement"]
    expected = set()
    for test in row["tests"]:
        (statement,) = ast.parse(test).body
        assert isinstance(statement, ast.Assert)
        calls = [n for n in ast.walk(statement) if isinstance(n, ast.Call)]
        (call,) = [c for c in calls if isinstance(c.func, ast.Name) and c.func.id == name]
        expected.add(ast.unparse(statement).replace(ast.unparse(call), ""))
    assert len(expected) >= 2, "a constant would pass every test"


@pytest.mark.parametrize("row", PROGRAMS, ids=lambda row: row["id"])
def test_stdio_problem_has_whole_cases_and_no_constant_solves_it(row: Row) -> None:
    for case in row["tests"]:
        assert set(case) == {"input", "output"}
        assert set(case["input"]) == {"stdin"} and case["input"]["stdin"].endswith("\n")
        assert set(case["output"]) == {"stdout"} and case["output"]["stdout"].strip()
    outputs = {case["output"]["stdout"].strip().lower() for case in row["tests"]}
    assert len(outputs) >= 2, "a constant would pass every test"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with EmbeddedSandbox.start(workers=2) as service:
        yield service.endpoint


def submission(row: Row, code: str, *, run_all: bool) -> SubmitRequest:
    if row["entry_point"]:
        kind = "MBPPDataset"
        data = {
            "test_list": row["tests"],
            "test_setup_code": row["test_setup"],
            "entry_point": row["entry_point"],
        }
    else:
        rule = {"comparison": row["comparison"]} if "comparison" in row else {}
        kind, data = "CommonOJDataset", {"test": row["tests"], **rule}
    config = TestConfig(
        dataset_type=kind,
        language="python",
        run_timeout=row["time_limit"],
        provided_data=data,
        extra={"run_all_cases": run_all},
    )
    completion = f"```python\n{code}\n```"
    return SubmitRequest(dataset="builtin", id=row["id"], completion=completion, config=config)


def judge(endpoint: str, requests: Sequence[SubmitRequest]) -> list[EvalResult]:
    """Verdicts in the order of the requests; the service runs as many at once as it has workers."""

    async def main() -> list[EvalResult]:
        async with SandboxClient(endpoint) as client:
            return await asyncio.gather(*(client.submit(request) for request in requests))

    return asyncio.run(main())


def test_every_reference_is_accepted(endpoint: str) -> None:
    requests = [submission(row, row["reference"], run_all=True) for row in ROWS]
    failures = {}
    for row, result in zip(ROWS, judge(endpoint, requests), strict=True):
        if not result.accepted or len(result.tests) != len(row["tests"]):
            failures[row["id"]] = [test.test_info for test in result.tests if not test.passed]
    assert not failures


def test_every_buggy_solution_is_rejected(endpoint: str) -> None:
    pairs = [(row, code) for row in ROWS for code in row["buggy"]]
    results = judge(endpoint, [submission(row, code, run_all=False) for row, code in pairs])
    graded = zip(pairs, results, strict=True)
    assert not [(row["id"], code) for (row, code), result in graded if result.accepted]

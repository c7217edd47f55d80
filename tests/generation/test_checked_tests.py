"""Tests that any program passes do not count, a reference must pass the others, and nothing is
checked twice.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ctrl_megatron.data.rows import Row, row_from_record
from ctrl_megatron.errors import UserError
from ctrl_megatron.generation.checked_tests import (
    FILE,
    RowTestChecks,
    TestCheckResult,
    UncountedTest,
    read_check_results,
    write_check_results,
)
from ctrl_megatron.rewards.grading import row_tests
from ctrl_megatron.rewards.poison import GROUPS
from ctrl_megatron.sandbox import EmbeddedSandbox, SandboxClient
from ctrl_megatron.sandbox.client import SandboxError
from ctrl_megatron.sandbox.wire import EvalResult, SubmitRequest

REAL = "assert sort([3, 1, 2]) == [1, 2, 3]"
RIGHT = "def sort(xs):\n    return sorted(xs)"


class Counting:
    """A judge that counts the requests it passes on."""

    def __init__(self, endpoint: str) -> None:
        self.client, self.requests = SandboxClient(endpoint), list[SubmitRequest]()

    async def submit(self, request: SubmitRequest, /) -> EvalResult:
        self.requests.append(request)
        return await self.client.submit(request)

    async def identity(self) -> object:
        return await self.client.identity()


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with EmbeddedSandbox.start(workers=2) as service:
        yield service.endpoint


def row(folder: Path, *tests: str, number: int = 1, **fields: Any) -> Row:
    record = {
        "id": f"sort/{number}",
        "problem": "Sort a list.",
        "prompter_type": "mbppplus",
        "selected_uts": list(tests),
        "entry_point": "sort",
        "time_limit": 2.0,
    }
    return row_from_record(record | fields, f"{folder}/rows.parquet: row {number}", None)


def check(rows: Sequence[Row], judge: Any, spare: Path) -> RowTestChecks:
    async def run() -> RowTestChecks:
        checks = RowTestChecks(rows, spare)
        if checks.missing:
            await checks.run_missing_checks(judge, at_once=8)
        if isinstance(judge, Counting):
            await judge.client.close()
        return checks

    return asyncio.run(run())


UNCOUNTED = {
    "another type": ("assert sort([2, 1]) != 'abc'", "return a constant"),
    "is not None": ("assert sort([2, 1]) is not None", "return objects that agree"),
    "any attribute": ("assert sort([1]).a.b(2) is not None", "return objects that agree"),
}


@pytest.mark.parametrize("form", UNCOUNTED)
def test_a_test_that_any_program_of_a_kind_passes_does_not_count(
    form: str, endpoint: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text, why = UNCOUNTED[form]
    mixed = row(tmp_path, REAL, text)
    checks = check([mixed], Counting(endpoint), tmp_path)
    left = checks.result_of(mixed).remove_uncounted_from(mixed)
    assert left.uncounted == (1,)
    assert f"{tmp_path}/rows.parquet: row 1" in caplog.text and why in caplog.text
    data = row_tests(left, run_all_cases=True).config.provided_data
    assert isinstance(data, dict) and data["uncounted"] == [1]

    alone = row(tmp_path, text)
    found = check([alone], Counting(endpoint), tmp_path).result_of(alone)
    with pytest.raises(UserError, match=r"row 1.*none of its tests counts.*data.bad_rows=drop"):
        found.remove_uncounted_from(alone)


def test_tests_of_one_bit_count(endpoint: str, tmp_path: Path) -> None:
    given = row(
        tmp_path, "assert not sort([3, 1])", "assert sort([3, 1])", "assert sort([1]) is None"
    )
    assert check([given], Counting(endpoint), tmp_path).result_of(given) == TestCheckResult()


REFERENCES = {
    "right": (RIGHT, ""),
    "fenced": (f"Sure:\n```python\n{RIGHT}\n```", ""),
    "wrong": ("def sort(xs):\n    return xs", "the reference fails test 1 of 2"),
    "raises": ("def sort(xs):\n    raise KeyError(3)", "KeyError"),
}


@pytest.mark.parametrize("kind", REFERENCES)
def test_a_reference_passes_the_tests_that_count(kind: str, endpoint: str, tmp_path: Path) -> None:
    reference, fault = REFERENCES[kind]
    given = row(tmp_path, REAL, "assert sort([1]) is not None", reference=reference)
    found = check([given], Counting(endpoint), tmp_path).result_of(given)
    assert (fault in found.fault) if fault else not found.fault
    assert found.fault or [one.position for one in found.uncounted] == [1]


def test_a_reference_of_stdin_and_stdout_is_judged(endpoint: str, tmp_path: Path) -> None:
    cases = json.dumps([{"input": {"stdin": "4"}, "output": {"stdout": "8"}}])
    kind = {"prompter_type": "code_contests", "entry_point": "", "selected_uts": [cases]}
    right = row(tmp_path, reference="print(2 * int(input()))", **kind)
    wrong = row(tmp_path, reference="print(3)", number=2, **kind)
    none = row(tmp_path, number=3, **kind)
    checks = check([right, wrong, none], Counting(endpoint), tmp_path)
    assert [bool(checks.result_of(one).fault) for one in (right, wrong, none)] == [
        False,
        True,
        False,
    ]
    assert list(checks.results_by_row()) == ["sort/2"]


def test_nothing_is_checked_twice(endpoint: str, tmp_path: Path) -> None:
    rows = [row(tmp_path, REAL, number=1), row(tmp_path, REAL, number=2)]
    judge = Counting(endpoint)
    check(rows, judge, tmp_path)
    # One program of each group leaves no test to any of them.
    assert len(judge.requests) <= len(GROUPS) + 1
    assert all(r.config.extra["run_all_cases"] for r in judge.requests)
    again = check(rows, None, tmp_path)
    assert not again.missing
    # Other tests, another reference: another check.
    assert RowTestChecks([row(tmp_path, REAL, reference=RIGHT)], tmp_path).missing
    assert RowTestChecks([row(tmp_path, REAL, "assert sort([])")], tmp_path).missing


def test_results_are_kept_elsewhere_if_the_folder_of_the_rows_is_not_to_be_written(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path / "data")
    (tmp_path / "data").mkdir()
    given = row(tmp_path / "data", REAL)
    check([given], Counting(endpoint), tmp_path / "run")
    assert not (tmp_path / "data" / FILE).exists()
    assert not check([given], None, tmp_path / "run").missing


def test_a_changed_file_of_results_is_refused(tmp_path: Path) -> None:
    file = tmp_path / FILE
    results = {"k": TestCheckResult(uncounted=(UncountedTest(0, "assert x", "return a constant"),))}
    write_check_results(file, results)
    assert read_check_results(file) == results
    good = file.read_text()
    changed = good.replace("[[0,", "[[1,")
    for text in (changed, good[:-9], "", "[]\n", good + "{}\n", "\x80", "[" * 100_000):
        file.write_text(text)
        with pytest.raises(UserError, match=r"checked_tests.jsonl.*delete it"):
            read_check_results(file)


class Failing:
    """A judge that works for some requests and then fails."""

    def __init__(self, endpoint: str, works: int) -> None:
        self.judge, self.works = Counting(endpoint), works

    async def submit(self, request: SubmitRequest, /) -> EvalResult:
        self.works -= 1
        if self.works < 0:
            raise SandboxError("the disk of workers is gone")
        return await self.judge.submit(request)

    async def identity(self) -> object:
        return ""


def test_a_judge_that_fails_is_an_error_and_finished_checks_are_kept(
    endpoint: str, tmp_path: Path
) -> None:
    rows = [row(tmp_path, f"assert sort([{n}]) == [{n}]", number=n) for n in range(1, 5)]

    async def run(works: int) -> None:
        judge = Failing(endpoint, works)
        try:
            await RowTestChecks(rows, tmp_path).run_missing_checks(judge, at_once=1)
        finally:
            await judge.judge.client.close()

    with pytest.raises(SandboxError, match=r"row 3: 'sort/3' is not checked: the disk"):
        asyncio.run(run(7))
    assert [one.row.id for one in RowTestChecks(rows, tmp_path).missing] == ["sort/3", "sort/4"]


def test_a_second_start_looks_at_ten_thousand_rows_in_a_second(tmp_path: Path) -> None:
    rows = [
        row(tmp_path, *(f"assert sort([{n}, {k}]) == [{k}, {n}]" for k in range(3)), number=n)
        for n in range(10_000)
    ]
    write_check_results(
        tmp_path / FILE,
        {one.key: TestCheckResult() for one in RowTestChecks(rows, tmp_path).missing},
    )
    began = time.process_time()
    assert not RowTestChecks(rows, tmp_path).missing
    assert time.process_time() - began < 5.0  # a second on an idle machine

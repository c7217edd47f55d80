"""The reader of olympiad problems on rows in the published columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ioi_records import TESTS, ioi_files, ioi_record, ioi_test

from ctrl_megatron.data.rows import Row, read_rows
from ctrl_megatron.preparation.ioi import ioi_rows, read_ioi_tests
from ctrl_megatron.preparation.published import DroppedItems
from ctrl_megatron.rewards.code_rewards import subtasks_of
from ctrl_megatron.rewards.grading import stdio_cases
from tools.prepare_ioi import main


def read(*records: dict[str, Any], **options: Any) -> tuple[list[Row], DroppedItems]:
    tests = read_ioi_tests((f"tests: row {n}", test) for n, test in enumerate(TESTS))
    placed = ((f"ioi: row {n}", record) for n, record in enumerate(records, start=1))
    return ioi_rows(placed, tests, **options)


def test_a_subtask_becomes_a_row_with_its_own_tests(tmp_path: Path) -> None:
    problem, tests = ioi_files(tmp_path)
    out = tmp_path / "rows.parquet"
    arguments = ["--problems", str(problem), "--tests", str(tests), "--out", str(out)]
    assert main(arguments) == 0
    (row,) = read_rows(out)
    assert (row.id, row.problem_id) == ("ioi/2024/double/01-small", "ioi/2024/double")
    assert row.prompt == ({"role": "user", "content": "Return twice n; n is at most 9."},)
    assert (row.time_limit, row.comparison, row.extra["language"]) == (1.5, "tokens", "cpp")
    # The order is that of the subtask.
    assert stdio_cases(row) == [
        {"input": {"stdin": "3"}, "output": {"stdout": "6"}},
        {"input": {"stdin": "1"}, "output": {"stdout": "2"}},
    ]
    (subtask,) = subtasks_of(row, 2)
    assert (subtask.points, subtask.tests) == (60, (0, 1))
    assert not {"checker", "grader_files"} & row.extra.keys()


def test_files_of_graders_and_checkers_are_told_apart() -> None:
    files = [
        ["graders/grader.cpp", "int main() {}"],
        ["graders/double.h", "int twice(int);"],
        ["graders/testlib.h", "// library"],
        ["graders/grader_config.json", "{}"],
        ["graders/empty.cpp", ""],
        ["checker/checker.cpp", '#include "testlib.h"\n  # include "own.h" // too\nint x;'],
        ["checker/own.h", '#include <vector>\n#include "testlib.h"\n#include "absent.h"\nint own;'],
    ]
    ((row,), _) = read(ioi_record(grader_files=files))
    graders = json.loads(row.extra["grader_files"])
    assert sorted(graders) == ["double.h", "grader.cpp", "testlib.h"]
    checker = json.loads(row.extra["checker"])
    assert (checker["language"], checker["order"]) == ("cpp", ["input", "answer", "output"])
    lines = ["// library", "#include <vector>", "", '#include "absent.h"', "int own;", "int x;"]
    assert checker["code"].splitlines() == lines


def test_what_cannot_be_judged_is_left_out_and_counted() -> None:
    rows, dropped = read(
        ioi_record(),
        ioi_record(task_type="Communication"),
        ioi_record(score=0, subtask="00-samples"),
        ioi_record(test_names=["0-01", "9-99"]),
        ioi_record(year=2023),
        longest=4,
    )
    assert [row.id for row in rows] == ["ioi/2024/double/01-small"]
    assert dropped.counts() == {
        "is a task of type Communication": 1,
        "has no points": 1,
        "has tests that are not in the files of tests": 2,
    }
    assert read(ioi_record(), longest=3)[1].counts() == {"has tests of more than 3 characters": 1}


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"score": None}, "ioi: row 1: score must be a positive number"),
        ({"test_names": []}, "ioi: row 1: test_names is empty"),
        ({"year": "2024"}, "ioi: row 1: year"),
        ({"problem": None}, "ioi: row 1: problem must be text"),
        ({"time_limit": 0}, "ioi: row 1: time_limit"),
        ({"grader_files": [["a.cpp"]]}, "ioi: row 1: grader_files must be pairs"),
        ({"grader_files": [["checker/a.cpp", "x"]]}, "a.cpp but no checker.cpp"),
    ],
)
def test_malformed_records_are_named(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        read(ioi_record(**fields))


def test_a_malformed_test_is_named() -> None:
    with pytest.raises(ValueError, match="tests: row 7: test_output must be text"):
        read_ioi_tests([("tests: row 7", ioi_test("a", "1", "2", test_output=None))])

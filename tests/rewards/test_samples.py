from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from reward_samples import STDIO, function_row, stdio_row, write

from ctrl_megatron.rewards.samples import (
    asserts_of,
    cases_of,
    load_samples,
    problem_of,
    time_limit_of,
)


def test_rows_of_several_files_by_id(tmp_path: Path) -> None:
    one = write(tmp_path / "a.parquet", function_row("add/0"), function_row("add/1"))
    two = write(tmp_path / "b.parquet", stdio_row("sum/0"))
    table = load_samples([one, str(two)])
    assert list(table) == ["add/0", "add/1", "sum/0"]
    assert table["sum/0"] == stdio_row("sum/0")
    assert list(load_samples(str(one))) == ["add/0", "add/1"]


def test_an_id_in_two_files_is_refused(tmp_path: Path) -> None:
    one = write(tmp_path / "a.parquet", function_row("add/0"))
    two = write(tmp_path / "b.parquet", function_row("add/0"))
    with pytest.raises(ValueError, match=r"b\.parquet.*'add/0' occurs twice"):
        load_samples([one, two])


def test_a_missing_column_and_a_missing_file_are_named(tmp_path: Path) -> None:
    row = function_row()
    del row["selected_uts"]
    with pytest.raises(ValueError, match="selected_uts missing"):
        load_samples(write(tmp_path / "a.parquet", row))
    with pytest.raises(ValueError, match=r"none\.parquet"):
        load_samples(tmp_path / "none.parquet")
    (tmp_path / "text.parquet").write_text("no parquet")
    with pytest.raises(ValueError, match=r"text\.parquet"):
        load_samples(tmp_path / "text.parquet")


@pytest.mark.parametrize(
    ("limit", "expected"), [(2, 2.0), (0.5, 0.5), (None, 10.0), (math.nan, 10.0)]
)
def test_time_limit_of_the_row_or_the_default(limit: float | None, expected: float) -> None:
    assert time_limit_of(function_row(time_limit=limit)) == expected


def test_time_limit_column_may_be_absent_but_not_negative() -> None:
    row = function_row()
    del row["time_limit"]
    assert time_limit_of(row) == 10.0
    with pytest.raises(ValueError, match=r"add/0.*time_limit"):
        time_limit_of(function_row(time_limit=0.0))


def test_tests_in_their_spellings() -> None:
    assert asserts_of(function_row(selected_uts="assert add(1, 1) == 2")) == [
        "assert add(1, 1) == 2"
    ]
    assert len(asserts_of(function_row())) == 3
    as_json = json.dumps(function_row()["selected_uts"])
    assert asserts_of(function_row(selected_uts=as_json)) == function_row()["selected_uts"]
    cases = cases_of(stdio_row())
    assert cases[1] == {"input": {"stdin": "4 4"}, "output": {"stdout": "8"}}
    assert cases_of(stdio_row(selected_uts=[STDIO])) == cases
    assert cases_of(stdio_row(selected_uts=cases)) == cases


@pytest.mark.parametrize("tests", [[], "", [""], "[]"])
def test_no_test_is_an_error_not_a_pass(tests: object) -> None:
    with pytest.raises(ValueError, match=r"add/0.*non-empty"):
        asserts_of(function_row(selected_uts=tests))


@pytest.mark.parametrize("tests", ["[]", "{}", "3", "not json", []])
def test_bad_stdio_tests_are_an_error(tests: object) -> None:
    with pytest.raises(ValueError, match=r"sum/0.*selected_uts"):
        cases_of(stdio_row(selected_uts=tests))


def test_problem_of_a_row() -> None:
    problem = problem_of(function_row())
    assert (problem.id, problem.entry_point, problem.test_setup) == ("add", "add", "import math")
    assert problem.selected_uts == tuple(function_row()["selected_uts"])
    bare = {name: stdio_row()[name] for name in ("id", "problem", "prompter_type", "selected_uts")}
    assert problem_of(bare).id == "sum/0"
    assert problem_of(bare).time_limit == 10.0

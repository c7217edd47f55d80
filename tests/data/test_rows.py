"""Parquet rows: written rows are read back, wrong values are refused with file, row and column."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctrl_megatron.data.rows import Row, read_rows, row_of_attempt, rows_by_id, write_rows
from ctrl_megatron.problems.tests import decode_tests
from ctrl_megatron.prompts import critique_messages
from ctrl_megatron.types import Attempt, Problem

CASES = json.dumps([{"input": {"stdin": "1\n"}, "output": {"stdout": "2\n"}}])
FUNCTION = Problem(
    id="t/double",
    statement="Write `double(x)`.",
    prompter_type="mbppplus",
    selected_uts=("assert double(1) == 2", "assert double(2) == 4"),
    entry_point="double",
    test_setup="import math",
    time_limit=3.5,
    difficulty=2,
)
PROGRAM = Problem(
    id="t/next",
    statement="Print n + 1.",
    prompter_type="code_contests",
    selected_uts=CASES,
    comparison="float:1e-6",
)
ATTEMPTS = [
    Attempt(id="t/double/0", problem=FUNCTION, solution="```python\nx\n```", pass_rate=0.5),
    Attempt(id="t/double/1", problem=FUNCTION, solution=""),
    Attempt(id="t/next/0", problem=PROGRAM, solution="print(1)", pass_rate=0.0),
]


def record(**changes: Any) -> dict[str, Any]:
    plain = {
        "id": "a",
        "prompt": [{"role": "user", "content": "Review."}],
        "problem": "p",
        "solution": "s",
        "prompter_type": "mbppplus",
        "selected_uts": ["assert f()"],
    }
    return {**plain, **changes}


def write_raw(path: Path, *records: dict[str, Any]) -> Path:
    # pyarrow takes the columns of the first record only.
    columns = dict.fromkeys(name for one in records for name in one)
    whole = [{**dict.fromkeys(columns), **one} for one in records]
    parquet.write_table(pa.Table.from_pylist(whole), path)
    return path


def test_attempts_survive_the_file(tmp_path: Path) -> None:
    file = tmp_path / "new" / "rows.parquet"
    write_rows(file, map(row_of_attempt, ATTEMPTS))
    rows = read_rows(file)
    assert [row.attempt() for row in rows] == ATTEMPTS
    assert [list(row.prompt) for row in rows] == [
        critique_messages(a.problem, a.solution) for a in ATTEMPTS
    ]
    assert [path.name for path in file.parent.iterdir()] == ["rows.parquet"]


texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(lambda t: t.strip())


@given(texts, texts, texts, st.floats(0, 1) | st.none(), st.floats(0.01, 1e6))
def test_any_text_survives(
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    statement: str,
    solution: str,
    pass_rate: float | None,
    limit: float,
) -> None:
    problem = Problem(
        id=name,
        statement=statement,
        prompter_type="mbppplus",
        selected_uts=(f"assert {statement!r}", "assert True"),
        time_limit=limit,
    )
    attempt = Attempt(id=name, problem=problem, solution=solution, pass_rate=pass_rate)
    file = tmp_path_factory.mktemp("rows") / "rows.parquet"
    write_rows(file, [row_of_attempt(attempt)])
    assert read_rows(file)[0].attempt() == attempt


def test_the_prompt_may_stand_in_another_column(tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "Criticise."}]
    file = write_raw(tmp_path / "a.parquet", record(question=asked))
    assert list(read_rows(file, prompt_key="question")[0].prompt) == asked
    with pytest.raises(ValueError, match=r"column.*ask missing"):
        read_rows(file, prompt_key="ask")
    without = {k: v for k, v in record(question=asked).items() if k != "prompt"}
    file = write_raw(tmp_path / "b.parquet", without)
    assert list(read_rows(file, prompt_key="question")[0].prompt) == asked
    file = write_raw(tmp_path / "c.parquet", record(question=[]))
    with pytest.raises(ValueError, match="row 1: column 'question'"):
        read_rows(file, prompt_key="question")


def test_files_are_read_in_order_and_a_prompt_of_ones_own_is_kept(tmp_path: Path) -> None:
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Go."}]
    names = [tmp_path / "b.parquet", tmp_path / "a.parquet"]
    for name, attempt in zip(names, ATTEMPTS, strict=False):
        write_rows(name, [row_of_attempt(attempt, prompt)])
    rows = read_rows([str(name) for name in names])
    assert [row.id for row in rows] == ["t/double/0", "t/double/1"]
    assert list(rows[0].prompt) == prompt


def test_who_asks_for_no_critiques_needs_no_prompt(tmp_path: Path) -> None:
    plain = {k: v for k, v in record().items() if k != "prompt"}
    (row,) = read_rows(write_raw(tmp_path / "a.parquet", plain), prompt_key=None)
    assert row.prompt == ()


def test_further_columns_travel_with_the_row_and_survive_a_file(tmp_path: Path) -> None:
    subtasks = [{"points": 1.0, "tests": [0, 1]}]
    first = write_raw(
        tmp_path / "a.parquet", record(labels="x", note=None), record(id="b", subtasks=subtasks)
    )
    rows = read_rows(first)
    assert [row.extra for row in rows] == [{"labels": "x"}, {"subtasks": subtasks}]
    write_rows(tmp_path / "b.parquet", rows)
    assert read_rows(tmp_path / "b.parquet") == rows


def test_a_prompt_in_a_column_that_the_tests_need_stays_there(tmp_path: Path) -> None:
    """LiveCodeBench's column ``content`` is the problem, which a solver's prompt may be."""
    asked = {"prompter_type": "livecodebench", "content": "Add.", "labels": "{}", "test": "{}"}
    parquet.write_table(pa.Table.from_pylist([{"id": "a", **asked}]), tmp_path / "rows.parquet")
    (row,) = read_rows(tmp_path / "rows.parquet", prompt_key="content")
    assert row.prompt[0]["content"] == "Add."
    assert {name: row.extra[name] for name in ("content", "labels", "test")} == {
        name: asked[name] for name in ("content", "labels", "test")
    }


def test_a_file_that_arrow_reads_only_in_small_batches_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one whose nested column has more than 2 GiB in a row group."""
    records = [{"id": f"{n}", "prompt": "p", "cases": [{"input": "1"}]} for n in range(2500)]
    file, sizes = tmp_path / "rows.parquet", []
    parquet.write_table(pa.Table.from_pylist(records), file)
    whole = read_rows(file)
    read = parquet.ParquetFile.iter_batches

    def refuse(*_: object, **__: object) -> None:
        raise pa.ArrowNotImplementedError("chunked array outputs")

    def limited(self: Any, batch_size: int) -> Any:
        sizes.append(batch_size)
        return refuse() if batch_size > 100 else read(self, batch_size)

    monkeypatch.setattr(parquet, "read_table", refuse)
    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", limited)
    assert read_rows(file) == whole and sizes == [1024, 32]
    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", refuse)
    with pytest.raises(ValueError, match=r"rows\.parquet: a single row"):
        read_rows(file)


def test_tests_in_their_spellings() -> None:
    cases, (only,) = json.loads(CASES), ("assert f()",)
    for spelling in (only, [only], json.dumps([only]), [json.dumps([only])]):
        assert decode_tests("mbppplus", spelling) == (only,)
    assert decode_tests("mbppplus", json.dumps([only, only])) == (only, only)
    for spelling in (CASES, [CASES], cases):
        assert json.loads(str(decode_tests("code_contests", spelling))) == cases


def case(stdin: object, stdout: object) -> dict[str, Any]:
    return {"input": {"stdin": stdin}, "output": {"stdout": stdout}}


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ({"input": "1", "output": "2"}, case("1", "2")),
        ({"input": ["1", "2"], "output": "3"}, case(["1", "2"], "3")),
        ({"input": "", "output": {"stdout": "3"}}, case("", "3")),
        ({"input": {"stdin": "4"}, "output": "5", "name": "x"}, {**case("4", "5"), "name": "x"}),
    ],
)
def test_a_case_whose_texts_stand_by_themselves_is_read(
    tmp_path: Path, given: dict[str, Any], read: dict[str, Any]
) -> None:
    tests = json.dumps([case("0", "1"), given])
    file = write_raw(
        tmp_path / "rows.parquet", record(prompter_type="code_contests", selected_uts=tests)
    )
    (row,) = read_rows(file)
    assert json.loads(str(row.selected_uts)) == [case("0", "1"), read]


@pytest.mark.parametrize(
    "wrong",
    [
        {"input": "1"},
        {"output": "1"},
        {"inputs": ["1"], "outputs": ["2"]},
        {"input": {"stdin": 1}, "output": {"stdout": "2"}},
        {"input": {"stdin": "1"}, "output": {"stdout": None}},
        {"input": {"stdin": "1"}, "output": {}},
        {"input": 1, "output": 2},
        {"input": "1", "output": "\ud800"},
        ["1", "2"],
        "1",
        None,
        7,
    ],
)
def test_a_case_of_another_form_is_named_with_its_row_and_number(
    tmp_path: Path, wrong: object
) -> None:
    right = record(id="r", prompter_type="code_contests", selected_uts=CASES)
    row = record(prompter_type="code_contests", selected_uts=json.dumps([case("", "1"), wrong]))
    file = write_raw(tmp_path / "rows.parquet", right, row)
    with pytest.raises(ValueError, match=r"rows\.parquet: row 2: column 'selected_uts'") as caught:
        read_rows(file)
    assert "case 2 " in str(caught.value) or "non-empty JSON list of cases" in str(caught.value)


def test_files_of_others_load(tmp_path: Path) -> None:
    """Only the required columns; a string column of cases; further columns; nulls and NaN."""
    functions = write_raw(tmp_path / "f.parquet", record(labels="x"))
    programs = write_raw(
        tmp_path / "p.parquet",
        record(id="b", prompter_type="code_contests", selected_uts=CASES, time_limit=float("nan")),
        record(id="c", prompter_type="livecodebench", selected_uts=CASES, pass_rate=None),
    )
    rows = read_rows([functions, programs])
    assert [row.selected_uts for row in rows] == [("assert f()",), CASES, CASES]
    assert [row.time_limit for row in rows] == [None] * 3
    assert rows[0].attempt().problem.time_limit == 10.0
    assert [row.problem_id for row in rows] == ["a", "b", "c"]
    assert [row.pass_rate for row in rows] == [None] * 3
    assert rows[0].attempt().problem.id == "a"


@pytest.mark.parametrize("column", ["id", "prompt"])
def test_a_missing_column_is_named(tmp_path: Path, column: str) -> None:
    plain = record()
    del plain[column]
    file = write_raw(tmp_path / "rows.parquet", plain)
    with pytest.raises(ValueError, match=rf"rows\.parquet: column\(s\) {column} missing"):
        read_rows(file)


BAD_CELLS: dict[str, list[tuple[Any, str]]] = {
    "id": [(" ", "empty"), (None, "missing or null"), (3, "text")],
    "prompt": [
        ([], "non-empty list"),
        ([{"role": "user"}], "role and content"),
        ([{"role": "robot", "content": "x"}], "'robot'"),
        ([{"role": "user", "content": " "}], "without content"),
        (" ", "non-empty list"),
    ],
    "problem": [("", "empty")],
    "prompter_type": [("apps", "mbppplus, code_contests")],
    "selected_uts": [
        ([], "non-empty list"),
        (["assert 1", " "], "empty"),
        ("[]", "non-empty"),
        ("[1]", "not text"),
    ],
    "time_limit": [(0.0, "positive"), (float("inf"), "positive"), ("5", "number")],
    "comparison": [("lax", "use strict, tokens"), ("tokens", "say themselves"), (3, "text")],
    "difficulty": [(5, "0 to 4"), (1.5, "whole")],
    "pass_rate": [(1.5, "between 0 and 1"), (True, "number")],
}


@pytest.mark.parametrize(
    ("column", "value", "complaint"),
    [(column, value, text) for column, cells in BAD_CELLS.items() for value, text in cells],
)
def test_a_bad_cell_is_named(tmp_path: Path, column: str, value: Any, complaint: str) -> None:
    others = write_raw(tmp_path / "good.parquet", record(id="good"))
    file = write_raw(tmp_path / "bad.parquet", record(**{column: value}))
    with pytest.raises(ValueError, match=complaint) as caught:
        read_rows([others, file])
    assert f"{file}: row 1: column {column!r}" in str(caught.value)


@pytest.mark.parametrize("tests", ["[]", "{}", "[{}]", "not json", ["1", "2"], [], ""])
def test_bad_cases_are_named(tmp_path: Path, tests: Any) -> None:
    row = record(prompter_type="code_contests", selected_uts=tests)
    file = write_raw(tmp_path / "rows.parquet", row)
    with pytest.raises(ValueError, match="column 'selected_uts'"):
        read_rows(file)


def test_a_row_that_occurs_twice_is_one_row(tmp_path: Path) -> None:
    """This happens if the same file is used for training and for validation."""
    one = write_raw(tmp_path / "1.parquet", record(time_limit=math.nan), record(id="b", score=1.0))
    two = write_raw(tmp_path / "2.parquet", record(id="c"), record(id="b", score=1.0))
    assert [row.id for row in read_rows([one, one, two])] == ["a", "b", "c"]
    table = rows_by_id([*read_rows(one), *read_rows(two)])
    assert list(table) == ["a", "b", "c"] and table["b"].place.endswith("1.parquet: row 2")


@pytest.mark.parametrize(
    ("change", "columns"),
    [({"solution": "t"}, "solution"), ({"score": 2.0}, "extra"), ({"pass_rate": 1.0}, "pass_rate")],
)
def test_different_rows_with_one_id_are_named(
    tmp_path: Path, change: dict[str, Any], columns: str
) -> None:
    first = write_raw(tmp_path / "1.parquet", record(score=1.0))
    second = write_raw(tmp_path / "2.parquet", record(id="b"), record(score=1.0) | change)
    told = rf"2\.parquet: row 2: column 'id' repeats 'a' of .*1\.parquet: row 1.* in {columns};"
    with pytest.raises(ValueError, match=told):
        read_rows([first, second])
    with pytest.raises(ValueError, match=told):
        rows_by_id([*read_rows(first), *read_rows(second)])


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "text.parquet").write_text("no parquet")
    for name in ("text.parquet", "absent.parquet"):
        with pytest.raises(ValueError, match=f"cannot read .*{name}"):
            read_rows(tmp_path / name)
    write_rows(tmp_path / "empty.parquet", [])
    with pytest.raises(ValueError, match=r"no rows in .*empty"):
        read_rows(tmp_path / "empty.parquet")
    with pytest.raises(ValueError, match="no rows"):
        read_rows([])


def test_a_bad_row_is_not_written(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    write_rows(file, [row_of_attempt(ATTEMPTS[0])])
    before = file.read_bytes()
    bad: Row = row_of_attempt(ATTEMPTS[1], [])
    with pytest.raises(ValueError, match="row 2: column 'prompt'"):
        write_rows(file, [row_of_attempt(ATTEMPTS[0]), bad])
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["rows.parquet"]

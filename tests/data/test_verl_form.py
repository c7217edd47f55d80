"""Files in verl's form are read as rows without preparation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from ctrl_megatron.data.rows import read_rows

SUMS = {"inputs": ["1 2\n"], "outputs": ["3\n"]}


def row(**changes: Any) -> dict[str, Any]:
    plain = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "What is 3 and 4?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "7"},
        "extra_info": {"split": "train", "index": 0, "answer": "3 + 4 = 7"},
    }
    return {**plain, **changes}


def write(file: Path, *rows: dict[str, Any]) -> Path:
    parquet.write_table(pa.Table.from_pylist(list(rows)), file)
    return file


def test_a_row_keeps_its_columns_and_gets_an_id(tmp_path: Path) -> None:
    other = row(prompt=[{"role": "user", "content": "What is 3 and 5?"}])
    one, two = read_rows(write(tmp_path / "train.parquet", row(), other))
    assert one.prompt == ({"role": "user", "content": "What is 3 and 4?"},)
    assert one["reward_model"]["ground_truth"] == "7"
    assert one["data_source"] == "openai/gsm8k" and one["extra_info"]["index"] == 0
    assert one.prompter_type is None
    # The ids follow from the content: not from the place, nor from an index that others share.
    assert one.id != two.id and one.id.startswith("openai/gsm8k/")
    assert [r.id for r in read_rows(write(tmp_path / "other.parquet", other, row()))] == [
        *(two.id, one.id)
    ]


def test_a_row_that_occurs_twice_is_one_row(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{name}.parquet", row(), row()) for name in ("train", "test")]
    assert len(read_rows(files)) == 1


def test_a_ground_truth_of_cases_is_judged_by_running(tmp_path: Path) -> None:
    truth = {"style": "rule", "ground_truth": json.dumps(SUMS)}
    call = {"fn_name": "twice", "inputs": [[1]], "outputs": [2]}
    calls = {"style": "rule", "ground_truth": json.dumps(call)}
    program, function = read_rows(
        write(tmp_path / "code.parquet", row(reward_model=truth), row(reward_model=calls))
    )
    assert program.prompter_type == "code_contests" and program.problem == "What is 3 and 4?"
    case = {"input": {"stdin": "1 2\n"}, "output": {"stdout": "3\n"}}
    assert json.loads(str(program.selected_uts)) == [case]
    assert (program.comparison, function.comparison) == ("apps", "")
    assert function.prompter_type == "mbppplus" and function.entry_point == "twice"
    assert (program.comparison, function.comparison) == ("apps", "")
    named = write(
        tmp_path / "named.parquet",
        row(reward_model=truth, comparison="strict"),
        row(reward_model=calls, comparison="absolute:0.05"),
    )
    program, function = read_rows(named)
    assert program.comparison == "strict"
    # The tests of a function contain the tolerance themselves.
    assert function.comparison == "" and "absolute=0.05" in function.selected_uts[0]


def test_the_last_question_of_a_conversation_is_the_statement(tmp_path: Path) -> None:
    truth = {"style": "rule", "ground_truth": json.dumps(SUMS)}
    said = [("system", "Think."), ("user", "Add both."), ("assistant", "<think>")]
    talk = [{"role": role, "content": content} for role, content in said]
    (one,) = read_rows(write(tmp_path / "talk.parquet", row(reward_model=truth, prompt=talk)))
    (two,) = read_rows(write(tmp_path / "text.parquet", row(reward_model=truth, prompt="Add.")))
    assert (one.problem, two.problem) == ("Add both.", "Add.")
    assert [m["role"] for m in one.prompt] == ["system", "user", "assistant"]


def test_a_file_with_ids_of_its_own_keeps_them(tmp_path: Path) -> None:
    (one,) = read_rows(write(tmp_path / "mine.parquet", row(id="mine/1")))
    assert one.id == "mine/1" and one["reward_model"]["ground_truth"] == "7"


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no ground truth": ({"reward_model": {"style": "rule"}}, "'reward_model' has no ground_truth"),
    "empty reward model": ({"reward_model": None}, "'reward_model' must be an object"),
    "no source": ({"data_source": None}, "'data_source' must be text"),
    "no prompt": ({"prompt": None}, "'prompt' must be a non-empty list of messages"),
    "a role that is none": ({"prompt": [{"role": "human", "content": "?"}]}, "role 'human'"),
    "no rule": (
        {"reward_model": {"ground_truth": json.dumps(SUMS)}, "comparison": "lax"},
        "'comparison' names no rule",
    ),
    "uneven cases": (
        {"reward_model": {"ground_truth": '{"inputs": ["1"], "outputs": []}'}},
        "'reward_model': ground_truth",
    ),
}


@pytest.mark.parametrize(("change", "said"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_named_by_file_row_and_column(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    # A column has one type, so these rows cannot share a file with a right row.
    file = write(tmp_path / "train.parquet", row(**change))
    with pytest.raises(ValueError, match="row 1: column ") as raised:
        read_rows(file)
    assert str(file) in str(raised.value) and said in str(raised.value)


def test_a_file_without_the_prompt_is_refused_by_its_columns(tmp_path: Path) -> None:
    bare = {key: value for key, value in row().items() if key != "prompt"}
    with pytest.raises(ValueError, match=r"column.s. prompt missing; it has data_source"):
        read_rows(write(tmp_path / "train.parquet", bare))

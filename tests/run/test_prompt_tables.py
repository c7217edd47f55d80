"""Training and validation rows of a run, before anything is built."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ctrl_megatron.config import load_config
from ctrl_megatron.data.rows import Row, row_of_attempt, write_rows
from ctrl_megatron.errors import UserError
from ctrl_megatron.run.inputs import prompt_tables
from ctrl_megatron.types import Attempt, Problem

PROBLEM = Problem(
    id="p", statement="Add.", prompter_type="mbppplus", selected_uts=("assert add(1, 1) == 2",)
)
ATTEMPT = Attempt(id="p/0", problem=PROBLEM, solution="pass", pass_rate=0.0)
CODEC: Any = SimpleNamespace(encode_chat=lambda messages, add_generation_prompt: [1, 2])


LONG: Any = SimpleNamespace(
    encode_chat=lambda messages, add_generation_prompt: (
        [1] * (9 if messages[-1]["content"] == "very long" else 2)
    )
)


def tables(
    train: Path, validation: object, *more: str, codec: Any = CODEC, check: Any = None
) -> Any:
    overrides = [f"data.train_files={train}", f"data.val_files={validation}", *more]
    return prompt_tables(load_config(None, overrides, "none"), codec, check=check)


def test_one_file_may_serve_both(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    write_rows(file, [row_of_attempt(ATTEMPT)])
    train, validation = tables(file, file)
    assert train.rows == validation.rows


def test_bad_rows_are_refused_or_left_out_and_counted(tmp_path: Path) -> None:
    train, other = tmp_path / "train.parquet", tmp_path / "other.parquet"
    write_rows(train, [row_of_attempt(replace(ATTEMPT, id=name)) for name in ("a", "bad", "b")])
    write_rows(other, [row_of_attempt(replace(ATTEMPT, id="c"))])

    def check(row: Row) -> None:
        if row.id == "bad":
            raise UserError("its tests test nothing", file=row.place)

    with pytest.raises(UserError, match=r"data.train_files: .*train.parquet: row 2: its tests"):
        tables(train, other, check=check)
    files = f"[{train},{other}]"
    trained, validated = tables(train, files, "data.bad_rows=drop", check=check)
    assert [row.id for row in trained.rows] == ["a", "b"]
    assert trained.bad == (f"{train}: row 2: its tests test nothing",) and trained.dropped == 0
    assert validated.sets == {"train": {"a", "b"}, "other": {"c"}}


def test_of_several_validation_files_each_is_a_set(tmp_path: Path) -> None:
    train, one, two = (tmp_path / f"{name}.parquet" for name in ("train", "one", "two"))
    both, other = row_of_attempt(ATTEMPT), row_of_attempt(replace(ATTEMPT, id="p/1"))
    write_rows(train, [both])
    write_rows(one, [both])
    write_rows(two, [both, other])
    _, validation = tables(train, one)
    assert validation.sets == {}
    _, validation = tables(train, f"[{one},{two}]")
    assert [row.id for row in validation.rows] == ["p/0", "p/1"]
    assert validation.sets == {"one": {"p/0"}, "two": {"p/0", "p/1"}}


def test_a_validation_file_without_a_row_that_fits_is_named(tmp_path: Path) -> None:
    train, one, two = (tmp_path / f"{name}.parquet" for name in ("train", "one", "two"))
    long = [{"role": "user", "content": "very long"}]
    write_rows(train, [row_of_attempt(ATTEMPT)])
    write_rows(one, [row_of_attempt(ATTEMPT)])
    write_rows(two, [row_of_attempt(replace(ATTEMPT, id="p/1"), long)])
    with pytest.raises(ValueError, match=r"val_files: .*two\.parquet: no row has a prompt"):
        tables(train, f"[{one},{two}]", "data.max_prompt_length=2", codec=LONG)


def test_different_rows_with_one_id_are_refused(tmp_path: Path) -> None:
    train, validation = tmp_path / "train.parquet", tmp_path / "val.parquet"
    write_rows(train, [row_of_attempt(ATTEMPT)])
    write_rows(validation, [row_of_attempt(replace(ATTEMPT, pass_rate=1.0))])
    told = r"val\.parquet: row 1: column 'id' repeats 'p/0' of .*train\.parquet.* in pass_rate"
    with pytest.raises(ValueError, match=told):
        tables(train, validation)

"""Training and validation rows of a run, before anything is built."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ctrl_megatron.config import load_config
from ctrl_megatron.data.rows import row_of, write_rows
from ctrl_megatron.pipeline.inputs import prompt_tables
from ctrl_megatron.types import Attempt, Problem

PROBLEM = Problem(
    id="p", statement="Add.", prompter_type="mbppplus", selected_uts=("assert add(1, 1) == 2",)
)
ATTEMPT = Attempt(id="p/0", problem=PROBLEM, solution="pass", pass_rate=0.0)
CODEC: Any = SimpleNamespace(encode_chat=lambda messages, add_generation_prompt: [1, 2])


def tables(train: Path, validation: Path) -> Any:
    overrides = [f"data.train_files={train}", f"data.val_files={validation}"]
    return prompt_tables(load_config(None, overrides, "none"), CODEC)


def test_one_file_may_serve_both(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    write_rows(file, [row_of(ATTEMPT)])
    train, validation = tables(file, file)
    assert train.rows == validation.rows


def test_different_rows_with_one_id_are_refused(tmp_path: Path) -> None:
    train, validation = tmp_path / "train.parquet", tmp_path / "val.parquet"
    write_rows(train, [row_of(ATTEMPT)])
    write_rows(validation, [row_of(replace(ATTEMPT, pass_rate=1.0))])
    told = r"val\.parquet: row 1: column 'id' repeats 'p/0' of .*train\.parquet.* in pass_rate"
    with pytest.raises(ValueError, match=told):
        tables(train, validation)

"""Rows of a file of the user's: an id, a prompt, and further columns by name."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from mistaken_world import make_world

from ctrl_megatron.data.rows import read_rows
from ctrl_megatron.errors import UserError


@pytest.fixture
def world(tmp_path: Path) -> Path:
    """A file as GSM8K has it."""
    folder = make_world(tmp_path)
    count = range(8)
    columns = {
        "id": [f"gsm/{n}" for n in count],
        "prompt": [f"What is {n} and {n}?" for n in count],
        "answer": [f"Twice {n}.\n#### {2 * n}" for n in count],
    }
    parquet.write_table(pa.table(columns), folder / "train.parquet")
    return folder


def test_a_text_is_a_message_and_columns_are_found_by_name(world: Path) -> None:
    row = read_rows(world / "train.parquet")[3]
    assert row.prompt == ({"role": "user", "content": "What is 3 and 3?"},)
    assert row["answer"] == "Twice 3.\n#### 6" and row["id"] == "gsm/3"
    with pytest.raises(UserError, match=r"train\.parquet: row 4: column 'question' is missing"):
        row["question"]
    with pytest.raises(UserError, match="row 4: column 'problem' is missing or null"):
        row.attempt()

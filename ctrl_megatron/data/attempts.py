"""Parquet files of attempts: written whole, checked when they are read."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ctrl_megatron.data.schema import Row, check_columns, encode_tests, row_from_record
from ctrl_megatron.prompts import critique_messages
from ctrl_megatron.types import Attempt, Message

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def row_of(attempt: Attempt, prompt: Sequence[Message] | None = None) -> Row:
    """The row of ``attempt``; without a ``prompt``, the one that asks for its critique."""
    problem = attempt.problem
    if prompt is None:
        prompt = critique_messages(problem, attempt.solution)
    return Row(
        id=attempt.id,
        prompt=tuple(prompt),
        problem=problem.statement,
        solution=attempt.solution,
        prompter_type=problem.prompter_type,
        selected_uts=problem.selected_uts,
        time_limit=problem.time_limit,
        problem_id=problem.id,
        entry_point=problem.entry_point,
        test_setup=problem.test_setup,
        difficulty=problem.difficulty,
        pass_rate=attempt.pass_rate,
    )


def write_rows(path: str | os.PathLike[str], rows: Iterable[Row]) -> None:
    """Write a parquet file that appears complete or not at all.

    Raises ``ValueError`` for rows that :func:`read_rows` would refuse, naming the row and the
    column.
    """
    import pyarrow as pa
    import pyarrow.parquet as parquet

    target = Path(path)
    records = [_record_of(row) for row in rows]
    _check(records, str(target), {})
    table = pa.Table.from_pylist(records, schema=_arrow_schema())
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
    try:
        parquet.write_table(table, draft)
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)


def read_rows(paths: Paths, *, prompt_key: str = "prompt") -> list[Row]:
    """The rows of one or several parquet files, in order; column ``prompt_key`` is the prompt.

    Raises ``ValueError`` naming file, row and column for anything that does not fit the schema, for
    an ``id`` that occurs twice and for files without any row.
    """
    import pyarrow.parquet as parquet

    given = [paths] if isinstance(paths, (str, os.PathLike)) else paths
    files = [str(os.fspath(path)) for path in given]
    rows: list[Row] = []
    seen: dict[str, str] = {}
    for file in files:
        try:
            table = parquet.read_table(file)
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot read parquet file {file}: {error}") from error
        check_columns(table.column_names, file, prompt_key)
        rows += _check(table.to_pylist(), file, seen, prompt_key)
    if not rows:
        raise ValueError(f"no rows in {', '.join(files) or 'an empty list of files'}")
    return rows


def _check(
    records: Sequence[dict[str, Any]], file: str, seen: dict[str, str], prompt_key: str = "prompt"
) -> list[Row]:
    """Rows of ``records``; ``seen`` maps every id met so far to its place and grows."""
    rows = []
    for number, record in enumerate(records):
        row = row_from_record(record, file, number, prompt_key)
        place = f"{file}: row {number}"
        if row.id in seen:
            raise ValueError(f"{place}: column 'id' repeats {row.id!r} of {seen[row.id]}")
        seen[row.id] = place
        rows.append(row)
    return rows


def _record_of(row: Row) -> dict[str, Any]:
    return {
        "id": row.id,
        "prompt": list(row.prompt),
        "problem": row.problem,
        "solution": row.solution,
        "prompter_type": row.prompter_type,
        "selected_uts": encode_tests(row.selected_uts),
        "time_limit": row.time_limit,
        "problem_id": row.problem_id,
        "entry_point": row.entry_point,
        "test_setup": row.test_setup,
        "difficulty": row.difficulty,
        "pass_rate": row.pass_rate,
    }


def _arrow_schema() -> Any:
    import pyarrow as pa

    text = pa.string()
    columns: list[tuple[str, Any]] = [
        ("id", text),
        ("prompt", pa.list_(pa.struct([("role", text), ("content", text)]))),
        ("problem", text),
        ("solution", text),
        ("prompter_type", text),
        ("selected_uts", pa.list_(text)),
        ("time_limit", pa.float64()),
        ("problem_id", text),
        ("entry_point", text),
        ("test_setup", text),
        ("difficulty", pa.int64()),
        ("pass_rate", pa.float64()),
    ]
    return pa.schema(columns)

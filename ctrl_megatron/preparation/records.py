"""Reads the files in which data sets are published: JSON lines, a JSON list, parquet, arrow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ctrl_megatron.data.json_lines import read_json_lines_with_places
from ctrl_megatron.data.rows import read_parquet
from ctrl_megatron.errors import UserError, read_json
from ctrl_megatron.problems.long_integers import allow_long_integers

Record = tuple[str, dict[str, Any]]
"""The place for messages (file and row, in the file's own numbering), and the object."""
SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet", ".arrow")


def read_data_records(path: Path) -> list[Record]:
    """The records of a file, or of all files of a directory with one of ``SUFFIXES`` in name order.

    Raises ``ValueError`` naming the file, and the line if it has lines, if it cannot be read.
    """
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.name.endswith(SUFFIXES))
        if not files:
            raise UserError(f"{path} holds no file that ends in {', '.join(SUFFIXES)}")
        return [record for file in files for record in read_data_records(file)]
    if path.suffix == ".parquet":
        return _numbered(path, read_parquet(path).to_pylist())
    if path.suffix == ".arrow":
        return _numbered(path, _read_arrow(path))
    if path.suffix == ".json":
        return _read_json_list(path)
    return read_json_lines_with_places(path)


def _numbered(path: Path, records: list[dict[str, Any]]) -> list[Record]:
    return [(f"{path}: row {number}", record) for number, record in enumerate(records, start=1)]


def _read_arrow(path: Path) -> list[dict[str, Any]]:
    import pyarrow as pa

    try:
        with pa.memory_map(str(path)) as source:
            return pa.ipc.open_stream(source).read_all().to_pylist()
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError(f"cannot read the arrow file {path}: {error}") from error


def _read_json_list(path: Path) -> list[Record]:
    with allow_long_integers():
        records = read_json(path)
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise UserError(f"{path} is not a JSON list of problems")
    return [(f"{path}: entry {i}", record) for i, record in enumerate(records)]

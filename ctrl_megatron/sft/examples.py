"""Parquet files of supervised examples: prompts with the responses to learn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ctrl_megatron.data.rows import RecordCells, read_parquet, write_parquet
from ctrl_megatron.errors import UserError
from ctrl_megatron.types import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class SftExample:
    """One example. The loss is computed on the response and its end token."""

    id: str
    prompt: tuple[Message, ...]
    response: str


def write_examples(path: Path, examples: Iterable[SftExample]) -> None:
    """Write a file that appears complete or not at all. Raises ValueError without examples."""
    import pyarrow

    records = [{**asdict(e), "prompt": list(e.prompt)} for e in examples]
    if not records:
        raise UserError(f"{path}: there are no examples to write")
    write_parquet(path, pyarrow.Table.from_pylist(records))


def read_examples(files: Sequence[str]) -> list[SftExample]:
    """All examples in order. Raises UserError naming file, row and column of a wrong value."""
    examples = []
    for file in files:
        for number, record in enumerate(read_parquet(file).to_pylist(), start=1):
            cell = RecordCells(record, f"{file}: row {number}")
            example = SftExample(
                id=cell.text("id"),
                prompt=cell.messages("prompt"),
                response=cell.text("response"),
            )
            examples.append(example)
    return examples

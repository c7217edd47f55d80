"""The rows of training and validation files: one record, one schema, one reader, one writer.

A row is a problem, a first solution, and the conversation that requests its critique. Column
``selected_uts`` is a list of strings for both kinds of tests: one assert per entry for function
problems; exactly one entry, the JSON text of all cases, for problems judged on stdin and stdout.
``problems.tests`` also reads the forms that other tools write.
"""

from __future__ import annotations

import math
import os
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, cast, get_args

from ctrl_megatron.data.verl_form import VERL_COLUMNS, columns_of_verl_row, is_verl_form
from ctrl_megatron.errors import UserError
from ctrl_megatron.problems.tests import (
    DEFAULT_TIME_LIMIT,
    abbreviate,
    comparison_complaint,
    decode_tests,
)
from ctrl_megatron.prompts import critique_messages
from ctrl_megatron.types import Attempt, Message, Problem, PrompterType

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

CRITIQUE = "critique"
"""The task of a row that names none."""
ATTEMPT_COLUMNS = ("problem", "solution", "prompter_type", "selected_uts")
"""Columns that a file of first solutions must have. For other files the rewards decide."""
_BATCHES = (1024, 32, 1)
"""Rows per batch of a file that arrow cannot read by row groups."""
_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One first solution and the conversation that requests its critique."""

    id: str
    """Unique over all files of a run."""
    prompt: tuple[Message, ...] = ()
    """The messages that the actor answers; empty if the reader skipped them."""
    problem: str = ""
    """The problem's statement."""
    solution: str = ""
    """The raw text of the first solution."""
    prompter_type: PrompterType | None = None
    selected_uts: tuple[str, ...] | str = ()
    """Asserts (function problems), or a JSON list of cases."""
    time_limit: float | None = None
    """Seconds of processor time per test; None if the file does not set it."""
    problem_id: str = ""
    """Identifies the problem; several rows may have the same."""
    entry_point: str = ""
    test_setup: str = ""
    comparison: str = ""
    """The rule by which outputs are compared; empty means ``strict``."""
    difficulty: int = 0
    pass_rate: float | None = None
    """Share of tests that ``solution`` passes; None if it was never judged."""
    task: str = CRITIQUE
    """The task of ``prompt``: ``critique``, which a revision follows, or a name of the user's
    choice for any other task, whose response is rewarded as it is (``reward.reward_tasks``)."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """The file's other columns, for reward functions that read them; null cells are omitted."""
    reference: str = ""
    """A program that passes the row's tests, or empty; it judges the row and is in no prompt."""
    uncounted: tuple[int, ...] = ()
    """Positions of the verdicts that do not count; a check at the start finds them."""
    place: str = field(default="", compare=False, repr=False)
    """File and number of the row, from 1, for messages."""
    missing: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    """Names of the columns above that have no value in the file."""

    def __getitem__(self, column: str) -> Any:
        """The value of a column, one of ``extra`` included. Raises UserError if it has none."""
        require_columns([self], (column,), "the reward or node")
        return getattr(self, column) if column in _COLUMNS else self.extra[column]

    def attempt(self) -> Attempt:
        """The attempt that the row was made from, but for ``reference``, which is empty.

        UserError for a row that is none.
        """
        require_columns([self], ATTEMPT_COLUMNS, "a critique")
        assert self.prompter_type is not None
        problem = Problem(
            id=self.problem_id,
            statement=self.problem,
            prompter_type=self.prompter_type,
            selected_uts=self.selected_uts,
            entry_point=self.entry_point,
            test_setup=self.test_setup,
            comparison=self.comparison,
            time_limit=DEFAULT_TIME_LIMIT if self.time_limit is None else self.time_limit,
            difficulty=self.difficulty,
            uncounted=self.uncounted,
        )
        return Attempt(
            id=self.id, problem=problem, solution=self.solution, pass_rate=self.pass_rate
        )

    @property
    def has_built_in_prompt(self) -> bool:
        """Whether ``prompt`` is the built-in request for a critique of ``solution``, which later
        turns use. UserError as ``attempt``."""
        return [*self.prompt] == critique_messages(self.attempt().problem, self.solution)


_COLUMNS = {f.name for f in fields(Row)} - {"extra", "uncounted", "place", "missing"}


def require_columns(rows: Iterable[Row], columns: Sequence[str], reader: str) -> None:
    """Raise UserError naming the first row without one of ``columns``, which ``reader`` reads."""
    for row in rows:
        for name in columns:
            if name in row.missing or (name not in _COLUMNS and name not in row.extra):
                raise UserError(
                    f"{row.place or f'row {row.id!r}'}: column {name!r} is missing or null, which "
                    f"{reader} reads",
                    remedy="add it to the file",
                )


def row_of_attempt(attempt: Attempt, prompt: Sequence[Message] | None = None) -> Row:
    """The row of ``attempt``; ``prompt`` defaults to the request for its critique."""
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
        comparison=problem.comparison,
        difficulty=problem.difficulty,
        pass_rate=attempt.pass_rate,
        reference=problem.reference,
        uncounted=problem.uncounted,
    )


def read_rows(
    paths: Paths,
    *,
    prompt_key: str | None = "prompt",
    check: Callable[[Row], object] | None = None,
    left_out: list[str] | None = None,
) -> list[Row]:
    """The rows of one or several parquet files, in order.

    Column ``prompt_key`` is the prompt: messages, or the text of a single user message; None skips
    prompts. Only this column and ``id`` are required, and ``verl_form`` adds the ``id`` of rows in
    verl's form. Equal rows are returned once. Raises ``ValueError`` naming file, row and column
    for a value that does not fit the schema and for a row at which ``check`` raises it; with
    ``left_out`` such rows are left out, and their messages are added to it. Raises it too for
    different rows with the same ``id``, and if there is no row.
    """
    given = [paths] if isinstance(paths, (str, os.PathLike)) else paths
    files = [str(os.fspath(path)) for path in given]
    rows: list[Row] = []
    for file in files:
        table = read_parquet(file)
        present = table.column_names
        verl = is_verl_form(present)
        wanted = (*(() if verl else ("id",)), *(() if prompt_key is None else (prompt_key,)))
        if missing := [name for name in wanted if name not in present]:
            raise UserError(
                f"{file}: column(s) {', '.join(missing)} missing; "
                f"it has {', '.join(present) or 'none'}",
                remedy=f"rows in verl's form have {VERL_COLUMNS}" if "id" in missing else "",
            )
        for number, record in enumerate(table.to_pylist(), start=1):
            try:
                row = _read_row(record, f"{file}: row {number}", prompt_key, verl=verl)
                if check is not None:
                    check(row)
            except ValueError as error:
                if left_out is None:
                    raise
                left_out.append(str(error))
            else:
                rows.append(row)
    if not rows:
        raise UserError(
            f"no {'usable ' if left_out else ''}rows in "
            f"{', '.join(files) or 'an empty list of files'}",
            remedy=f"{len(left_out)} are left out, the first because {left_out[0]}"
            if left_out
            else "",
        )
    return list(rows_by_id(rows).values())


def _read_row(record: dict[str, Any], place: str, prompt_key: str | None, *, verl: bool) -> Row:
    if verl:
        try:
            record = columns_of_verl_row(record)
        except ValueError as error:
            raise UserError(f"{place}: {error}") from error
    return row_from_record(record, place, prompt_key)


def rows_by_id(rows: Iterable[Row]) -> dict[str, Row]:
    """The rows by id, in order; equal rows are kept once.

    Raises ``ValueError`` naming both places for different rows with the same id.
    """
    table: dict[str, Row] = {}
    for row in rows:
        first = table.setdefault(row.id, row)
        if first != row:
            names = [f.name for f in fields(Row) if f.compare]
            differ = [name for name in names if getattr(first, name) != getattr(row, name)]
            raise UserError(
                f"{row.place or 'a row'}: column 'id' repeats {row.id!r} of "
                f"{first.place or 'another row'}, but the rows differ in "
                f"{', '.join(differ)}; give them different ids"
            )
    return table


def write_rows(path: str | os.PathLike[str], rows: Iterable[Row]) -> None:
    """Write a parquet file that appears complete or not at all.

    Raises ``ValueError`` for rows that :func:`read_rows` would refuse, naming the row and the
    column.
    """
    import pyarrow as pa

    records = [
        {
            **row.extra,
            **{name: getattr(row, name) for name in _COLUMNS},
            "selected_uts": [t] if isinstance(t := row.selected_uts, str) else list(t),
            "prompt": list(row.prompt),
        }
        for row in rows
    ]
    rows_by_id(
        row_from_record(record, f"{path}: row {n}", "prompt")
        for n, record in enumerate(records, start=1)
    )
    text = pa.string()
    types = {
        "prompt": pa.list_(pa.struct([("role", text), ("content", text)])),
        "selected_uts": pa.list_(text),
        "time_limit": pa.float64(),
        "difficulty": pa.int64(),
        "pass_rate": pa.float64(),
    }
    # A file without references looks as it always did.
    unused = set[str]() if any(record["reference"] for record in records) else {"reference"}
    names = [f.name for f in fields(Row) if f.name in _COLUMNS - unused]
    schema = pa.schema([(name, types.get(name, text)) for name in names])
    table = pa.Table.from_pylist(records, schema=schema)
    further = (name for record in records for name in record if name not in _COLUMNS)
    for name in dict.fromkeys(further):
        table = table.append_column(name, pa.array([record.get(name) for record in records]))
    write_parquet(path, table)


def read_parquet(file: str | os.PathLike[str]) -> Any:
    """The pyarrow table of a file. Raises ``ValueError`` naming a file that cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    if not Path(file).exists():
        raise UserError(f"cannot read the parquet file {file}: it does not exist")
    try:
        try:
            return parquet.read_table(file)
        except pa.ArrowNotImplementedError:
            return _read_in_batches(file)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise UserError(f"cannot read the parquet file {file}: {error}") from error


def _read_in_batches(file: str | os.PathLike[str]) -> Any:
    """The table of a file with a nested column of more than 2 GiB in a row group, which arrow reads
    in smaller batches only.
    """
    import pyarrow as pa
    import pyarrow.parquet as parquet

    for rows in _BATCHES:
        with suppress(pa.ArrowNotImplementedError):
            return pa.Table.from_batches(parquet.ParquetFile(file).iter_batches(batch_size=rows))
    raise UserError(f"cannot read the parquet file {file}: a single row of it has more than 2 GiB")


def write_parquet(path: str | os.PathLike[str], table: Any) -> None:
    """Write a pyarrow table to a file that appears complete or not at all."""
    import pyarrow.parquet as parquet

    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
    try:
        parquet.write_table(table, draft)
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)


def row_from_record(record: Mapping[str, Any], place: str, prompt_key: str | None) -> Row:
    """The row of one raw record. Raises ``ValueError`` naming ``place`` and the wrong column."""
    cell = RecordCells(record, place)
    identity, kind = cell.text("id"), cell.text("prompter_type", default="")
    tests: tuple[str, ...] | str = ()
    if kind and kind not in get_args(PrompterType):
        raise cell.error("prompter_type", f"is {kind!r}, use {', '.join(get_args(PrompterType))}")
    if kind and record.get("selected_uts") is not None:
        try:
            tests = decode_tests(cast(PrompterType, kind), record["selected_uts"])
        except ValueError as error:
            raise cell.error("selected_uts", str(error)) from error
    comparison = cell.text("comparison", default="", may_be_empty=True)
    if kind and (complaint := comparison_complaint(cast(PrompterType, kind), comparison)):
        raise cell.error("comparison", complaint)
    if not kind and record.get("selected_uts"):
        raise cell.error("prompter_type", "has no value, so that the row's tests cannot be read")
    return Row(
        id=identity,
        prompt=() if prompt_key is None else cell.messages(prompt_key),
        problem=cell.text("problem", default=""),
        solution=cell.text("solution", default="", may_be_empty=True),
        prompter_type=cast(PrompterType, kind) if kind else None,
        selected_uts=tests,
        time_limit=cell.number("time_limit", 0, math.inf, "positive seconds", open_ends=True),
        problem_id=cell.text("problem_id", default=identity),
        entry_point=cell.text("entry_point", default="", may_be_empty=True),
        test_setup=cell.text("test_setup", default="", may_be_empty=True),
        comparison=comparison,
        difficulty=cell.difficulty(),
        pass_rate=cell.number("pass_rate", 0, 1, "between 0 and 1"),
        task=cell.text("task", default=CRITIQUE),
        reference=cell.text("reference", default="", may_be_empty=True),
        extra={
            name: value
            for name, value in record.items()
            if name not in _COLUMNS
            and not name.startswith("__index_level_")  # pandas' row numbers
            and value is not None
            and value == value  # pandas writes a null as NaN
        },
        place=place,
        missing=frozenset(
            name for name in (*ATTEMPT_COLUMNS, "pass_rate") if record.get(name) is None
        ),
    )


@dataclass(frozen=True, slots=True)
class RecordCells:
    """Typed access to one record; every error names the place."""

    record: Mapping[str, Any]
    place: str

    def error(self, column: str, complaint: str) -> UserError:
        return UserError(f"{self.place}: column {column!r} {complaint}")

    def text(self, column: str, *, default: str | None = None, may_be_empty: bool = False) -> str:
        """The text of a cell; ``default`` if the cell has no value."""
        value = self.record.get(column)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self.error(column, f"must be text, is {abbreviate(value)}")
        if not may_be_empty and not value.strip():
            raise self.error(column, "is empty")
        return value

    def messages(self, column: str) -> tuple[Message, ...]:
        """The conversation of a cell; a text is a single user message."""
        value = self.record.get(column)
        if isinstance(value, str) and value.strip():
            return ({"role": "user", "content": value},)
        if not isinstance(value, (list, tuple)) or not value:
            raise self.error(
                column, f"must be a non-empty list of messages, is {abbreviate(value)}"
            )
        for message in value:
            if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
                raise self.error(column, "must hold messages with the keys role and content")
            if message["role"] not in _ROLES:
                raise self.error(
                    column, f"has the role {message['role']!r}, use {', '.join(_ROLES)}"
                )
            if not isinstance(message["content"], str) or not message["content"].strip():
                raise self.error(column, "has a message without content")
        return tuple({"role": m["role"], "content": m["content"]} for m in value)

    def number(
        self, column: str, least: float, most: float, range_: str, *, open_ends: bool = False
    ) -> float | None:
        """The number of a cell; None for a missing, null or NaN cell."""
        value = self.record.get(column)
        if value is None or (isinstance(value, float) and math.isnan(value)):
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(column, f"must be a number, is {abbreviate(value)}")
        if not least <= value <= most or (open_ends and value in (least, most)):
            raise self.error(column, f"must be {range_}, is {value}")
        return float(value)

    def difficulty(self) -> int:
        """The value of column ``difficulty``; 0 for a cell without a value."""
        value = self.number("difficulty", 0, 4, "a whole number from 0 to 4") or 0.0
        if value != int(value):
            raise self.error("difficulty", f"must be a whole number from 0 to 4, is {value}")
        return int(value)

"""The parquet row of every training and validation file, and how a raw record becomes one.

Column ``selected_uts`` holds both kinds of tests in one type, a list of strings: one assert per
entry for function problems; exactly one entry, the JSON text of all cases, for problems judged on
stdin and stdout. :func:`decode_tests` is the way back; it also takes the plain strings that other
people's files carry.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast, get_args

from ctrl_megatron.types import Attempt, Message, Problem, PrompterType

REQUIRED_COLUMNS = ("id", "prompt", "problem", "solution", "prompter_type", "selected_uts")
OPTIONAL_COLUMNS = (
    "time_limit",
    "problem_id",
    "entry_point",
    "test_setup",
    "difficulty",
    "pass_rate",
)
DEFAULT_TIME_LIMIT = 10.0
"""Seconds per test where a row does not say."""
_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One attempt and the conversation that asks for its critique."""

    id: str
    """Unique over all files of a run."""
    prompt: tuple[Message, ...]
    """The messages that the critic answers."""
    problem: str
    """The problem's statement."""
    solution: str
    """The raw text of the first solution."""
    prompter_type: PrompterType
    selected_uts: tuple[str, ...] | str
    """Asserts (function problems), or a JSON list of cases."""
    time_limit: float = DEFAULT_TIME_LIMIT
    """Seconds of wall clock per test."""
    problem_id: str
    """Names the problem; several rows may share it."""
    entry_point: str = ""
    test_setup: str = ""
    difficulty: int = 0
    pass_rate: float | None = None
    """Share of tests that ``solution`` passes; None where it was never judged."""

    def attempt(self) -> Attempt:
        """The attempt that the row was made from, but for ``reference``, which is empty."""
        problem = Problem(
            id=self.problem_id,
            statement=self.problem,
            prompter_type=self.prompter_type,
            selected_uts=self.selected_uts,
            entry_point=self.entry_point,
            test_setup=self.test_setup,
            time_limit=self.time_limit,
            difficulty=self.difficulty,
        )
        return Attempt(
            id=self.id, problem=problem, solution=self.solution, pass_rate=self.pass_rate
        )


def check_columns(present: Iterable[str], file: str, prompt_key: str = "prompt") -> None:
    """Raise ``ValueError`` naming the required columns that ``file`` lacks.

    ``prompt_key`` stands for ``prompt``.
    """
    present = list(present)
    wanted = [prompt_key if name == "prompt" else name for name in REQUIRED_COLUMNS]
    missing = [name for name in wanted if name not in present]
    if missing:
        raise ValueError(
            f"{file}: column(s) {', '.join(missing)} missing; it has {', '.join(present) or 'none'}"
        )


def row_from_record(
    record: Mapping[str, Any], file: str, number: int, prompt_key: str = "prompt"
) -> Row:
    """Check one raw record, row ``number`` (from 0) of ``file``, whose prompt is ``prompt_key``.

    Raises ``ValueError`` naming file, row and column.
    """
    cell = _Cells(record, f"{file}: row {number}")
    identity = cell.text("id")
    kind = cell.text("prompter_type")
    if kind not in get_args(PrompterType):
        raise cell.error("prompter_type", f"is {kind!r}, use {', '.join(get_args(PrompterType))}")
    try:
        tests = decode_tests(cast(PrompterType, kind), record["selected_uts"])
    except ValueError as error:
        raise cell.error("selected_uts", str(error)) from error
    return Row(
        id=identity,
        prompt=cell.messages(prompt_key),
        problem=cell.text("problem"),
        solution=cell.text("solution", may_be_empty=True),
        prompter_type=cast(PrompterType, kind),
        selected_uts=tests,
        time_limit=cell.time_limit(),
        problem_id=cell.text("problem_id", default=identity),
        entry_point=cell.text("entry_point", default="", may_be_empty=True),
        test_setup=cell.text("test_setup", default="", may_be_empty=True),
        difficulty=cell.difficulty(),
        pass_rate=cell.pass_rate(),
    )


def decode_tests(kind: PrompterType, value: object) -> tuple[str, ...] | str:
    """The tests of a problem from what a file holds.

    A function problem: a list of asserts, or a string that is one test program. Otherwise: a JSON
    list of cases, as a string or as a list of one string. Raises ``ValueError`` saying what is
    wrong.
    """
    if kind == "mbppplus":
        return _decode_asserts(value)
    if isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    if not isinstance(value, str):
        raise ValueError("must be the JSON text of a list of cases (a string, or a list of one)")
    try:
        cases = json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error}") from error
    if not isinstance(cases, list) or not cases:
        raise ValueError("must be a non-empty JSON list of cases")
    return value


def _decode_asserts(value: object) -> tuple[str, ...]:
    tests = [value] if isinstance(value, str) else value
    if not isinstance(tests, (list, tuple)) or not tests:
        raise ValueError("must be a non-empty list of asserts")
    if not all(isinstance(test, str) and test.strip() for test in tests):
        raise ValueError("has an entry that is empty or not text")
    # A JSON list is a valid Python expression: run as a test, it would pass for every program.
    if len(tests) == 1 and _is_json_list(tests[0]):
        raise ValueError("is a JSON text; store the asserts as a list of strings")
    return tuple(tests)


def _is_json_list(text: str) -> bool:
    try:
        return isinstance(json.loads(text), list)
    except json.JSONDecodeError:
        return False


def encode_tests(tests: tuple[str, ...] | str) -> list[str]:
    """What the column ``selected_uts`` stores."""
    return [tests] if isinstance(tests, str) else list(tests)


@dataclass(frozen=True, slots=True)
class _Cells:
    """Typed access to one record; every error names the place."""

    record: Mapping[str, Any]
    place: str

    def error(self, column: str, complaint: str) -> ValueError:
        return ValueError(f"{self.place}: column {column!r} {complaint}")

    def text(self, column: str, *, default: str | None = None, may_be_empty: bool = False) -> str:
        value = self.record.get(column)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self.error(column, f"must be text, is {_shown(value)}")
        if not may_be_empty and not value.strip():
            raise self.error(column, "is empty")
        return value

    def messages(self, column: str) -> tuple[Message, ...]:
        value = self.record.get(column)
        if not isinstance(value, (list, tuple)) or not value:
            raise self.error(column, f"must be a non-empty list of messages, is {_shown(value)}")
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

    def number(self, column: str) -> float | None:
        """None for a missing, null or NaN cell."""
        value = self.record.get(column)
        if value is None or (isinstance(value, float) and math.isnan(value)):
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(column, f"must be a number, is {_shown(value)}")
        return float(value)

    def time_limit(self) -> float:
        value = self.number("time_limit")
        if value is not None and not 0 < value < math.inf:
            raise self.error("time_limit", f"must be positive seconds, is {value}")
        return DEFAULT_TIME_LIMIT if value is None else value

    def difficulty(self) -> int:
        value = self.number("difficulty") or 0.0
        if value != int(value) or not 0 <= value <= 4:
            raise self.error("difficulty", f"must be a whole number from 0 to 4, is {value}")
        return int(value)

    def pass_rate(self) -> float | None:
        value = self.number("pass_rate")
        if value is not None and not 0 <= value <= 1:
            raise self.error("pass_rate", f"must lie between 0 and 1, is {value}")
        return value


def _shown(value: object) -> str:
    return "missing or null" if value is None else f"{str(value)[:60]!r}"

"""Our own problem files: one JSON object per line, with a reference and wrong solutions."""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, cast, get_args

from ctrl_megatron.data.rows import DEFAULT_TIME_LIMIT, decode_tests
from ctrl_megatron.errors import UserError
from ctrl_megatron.types import Problem, PrompterType

_KEYS = {
    "id": str,
    "statement": str,
    "prompter_type": str,
    "entry_point": str,
    "test_setup": str,
    "tests": list,
    "reference": str,
    "buggy": list,
    "difficulty": int,
    "time_limit": (int, float),
}
_DEFAULTS = {
    "reference": "",
    "entry_point": "",
    "test_setup": "",
    "buggy": [],
    "difficulty": 0,
    "time_limit": DEFAULT_TIME_LIMIT,
}


def read_problems(path: str | PathLike[str]) -> list[Problem]:
    """The problems of a ``.jsonl`` file, or of all such files of a directory in name order.

    Raises ``ValueError`` where :func:`read_problem_records` does.
    """
    return [problem_from(record) for record in read_problem_records(path)]


def read_problem_records(path: str | PathLike[str]) -> list[dict[str, Any]]:
    """Like :func:`read_problems`, as checked objects with all keys; ``buggy`` lists wrong programs.

    Raises ``ValueError`` naming file, line and key for an unknown, missing or ill-typed key, for an
    id that occurs twice and for a path without problems.
    """
    path = Path(path)
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    records: list[dict[str, Any]] = []
    seen: dict[str, str] = {}
    for file in files:
        for place, given in read_placed_lines(file):
            record = {**_DEFAULTS, **given}
            _check(record, place)
            if record["id"] in seen:
                raise UserError(
                    f"{place}: key 'id' repeats {record['id']!r} of {seen[record['id']]}"
                )
            seen[record["id"]] = place
            records.append(record)
    if not records:
        raise UserError(f"no problems in {path}; expected .jsonl with one JSON object per line")
    return records


def problem_from(record: Mapping[str, Any]) -> Problem:
    """The problem of a checked object. Raises ``ValueError`` for unusable tests."""
    kind = cast(PrompterType, record["prompter_type"])
    return Problem(
        id=record["id"],
        statement=record["statement"],
        prompter_type=kind,
        selected_uts=decode_tests(kind, record["tests"]),
        entry_point=record["entry_point"],
        test_setup=record["test_setup"],
        time_limit=float(record["time_limit"]),
        reference=record["reference"],
        difficulty=record["difficulty"],
    )


def read_placed_lines(file: Path) -> list[tuple[str, dict[str, Any]]]:
    """``(place, object)`` for every non-empty line; ``place`` is for error messages.

    A file that ends in ``.gz`` is unpacked. Raises ``ValueError`` for a file that cannot be read
    and for a line that is not a JSON object.
    """
    try:
        data = file.read_bytes()
        data = gzip.decompress(data) if file.suffix == ".gz" else data
        text = data.decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {file}: {error}") from error
    found = []
    # Not splitlines(): JSON strings may hold U+2028 and other separators that are no line ends.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{file}: line {number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{place} is not JSON: {error}") from error
        if not isinstance(record, dict):
            raise UserError(f"{place} is not a JSON object")
        found.append((place, record))
    return found


def _check(record: Mapping[str, Any], place: str) -> None:
    if unknown := record.keys() - _KEYS.keys():
        raise UserError(f"{place}: unknown key(s) {', '.join(sorted(unknown))}")
    if missing := _KEYS.keys() - record.keys():
        raise UserError(f"{place}: key(s) {', '.join(sorted(missing))} missing")
    for key, type_ in _KEYS.items():
        if not isinstance(record[key], type_) or isinstance(record[key], bool):
            raise UserError(f"{place}: key {key!r} has the wrong type: {record[key]!r:.60}")
    kind = record["prompter_type"]
    if kind not in get_args(PrompterType):
        raise UserError(
            f"{place}: key 'prompter_type' is {kind!r}, use {', '.join(get_args(PrompterType))}"
        )
    for key in ("id", "statement"):
        if not record[key].strip():
            raise UserError(f"{place}: key {key!r} is empty")
    if not all(isinstance(text, str) and text.strip() for text in record["buggy"]):
        raise UserError(f"{place}: key 'buggy' has an entry that is empty or not text")
    if not 0 <= record["difficulty"] <= 4:
        raise UserError(f"{place}: key 'difficulty' must be 0 to 4, is {record['difficulty']}")
    if not 0 < record["time_limit"] < math.inf:
        raise UserError(f"{place}: key 'time_limit' must be positive, is {record['time_limit']}")
    if (kind == "mbppplus") != bool(record["entry_point"]):
        raise UserError(f"{place}: key 'entry_point' must be set for function problems only")
    try:
        problem_from(record)
    except ValueError as error:
        raise UserError(f"{place}: key 'tests' {error}") from error

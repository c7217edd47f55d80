"""Our own problem files: one JSON object per line, with a reference solution and known wrong ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, cast, get_args

from ctrl_megatron.data.schema import decode_tests
from ctrl_megatron.prompts import fenced
from ctrl_megatron.types import Attempt, Problem, PrompterType

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Exercise:
    """A problem and programs that are known to fail it."""

    problem: Problem
    buggy: tuple[str, ...]

    def known_attempts(self) -> list[Attempt]:
        """The reference solution, then the wrong ones, as answers in a code block, not yet judged."""
        programs = (self.problem.reference, *self.buggy)
        return [
            Attempt(
                id=f"{self.problem.id}/known{i}",
                problem=self.problem,
                solution=fenced(text.strip()),
            )
            for i, text in enumerate(programs)
        ]


def read_problems(path: str | PathLike[str]) -> list[Problem]:
    """The problems of a ``.jsonl`` file, or of all such files of a directory in name order."""
    return [exercise.problem for exercise in read_exercises(path)]


def read_exercises(path: str | PathLike[str]) -> list[Exercise]:
    """Like :func:`read_problems`, with the wrong programs.

    Raises ``ValueError`` naming file, line and key for an unknown, missing or ill-typed key, for an id
    that occurs twice and for a path without problems.
    """
    path = Path(path)
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    exercises: list[Exercise] = []
    seen: dict[str, str] = {}
    for file in files:
        for place, record in read_json_lines(file):
            exercise = _exercise(record, place)
            name = exercise.problem.id
            if name in seen:
                raise ValueError(f"{place}: key 'id' repeats {name!r} of {seen[name]}")
            seen[name] = place
            exercises.append(exercise)
    if not exercises:
        raise ValueError(f"no problems in {path}; expected .jsonl with one JSON object per line")
    return exercises


def read_json_lines(file: Path) -> list[tuple[str, dict[str, Any]]]:
    """``(place, object)`` for every non-empty line; ``place`` is for error messages.

    Raises ``ValueError`` for a file that cannot be read and for a line that is not a JSON object.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {file}: {error}") from error
    found = []
    # Not splitlines(): JSON strings may hold U+2028 and other separators that are no line ends.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{file}: line {number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{place} is not JSON: {error}") from error
        if not isinstance(record, dict):
            raise ValueError(f"{place} is not a JSON object")
        found.append((place, record))
    return found


def _exercise(record: Mapping[str, Any], place: str) -> Exercise:
    _check_keys(record, place)
    kind = record["prompter_type"]
    if kind not in get_args(PrompterType):
        raise ValueError(
            f"{place}: key 'prompter_type' is {kind!r}, use {', '.join(get_args(PrompterType))}"
        )
    tests = (
        record["tests"] if kind == "mbppplus" else json.dumps(record["tests"], ensure_ascii=False)
    )
    try:
        selected = decode_tests(cast(PrompterType, kind), tests)
    except ValueError as error:
        raise ValueError(f"{place}: key 'tests' {error}") from error
    problem = Problem(
        id=record["id"],
        statement=record["statement"],
        prompter_type=cast(PrompterType, kind),
        selected_uts=selected,
        entry_point=record["entry_point"],
        test_setup=record["test_setup"],
        time_limit=float(record["time_limit"]),
        reference=record["reference"],
        difficulty=record["difficulty"],
    )
    return Exercise(problem=problem, buggy=tuple(record["buggy"]))


def _check_keys(record: Mapping[str, Any], place: str) -> None:
    if unknown := record.keys() - _KEYS.keys():
        raise ValueError(f"{place}: unknown key(s) {', '.join(sorted(unknown))}")
    if missing := _KEYS.keys() - record.keys():
        raise ValueError(f"{place}: key(s) {', '.join(sorted(missing))} missing")
    for key, kind in _KEYS.items():
        if not isinstance(record[key], kind) or isinstance(record[key], bool):
            raise ValueError(f"{place}: key {key!r} has the wrong type: {record[key]!r:.60}")
    for key in ("id", "statement", "reference"):
        if not record[key].strip():
            raise ValueError(f"{place}: key {key!r} is empty")
    if not all(isinstance(text, str) and text.strip() for text in record["buggy"]):
        raise ValueError(f"{place}: key 'buggy' has an entry that is empty or not text")
    if not 0 <= record["difficulty"] <= 4:
        raise ValueError(f"{place}: key 'difficulty' must be 0 to 4, is {record['difficulty']}")
    if not 0 < record["time_limit"] < float("inf"):
        raise ValueError(f"{place}: key 'time_limit' must be positive, is {record['time_limit']}")
    if (record["prompter_type"] == "mbppplus") != bool(record["entry_point"]):
        raise ValueError(f"{place}: key 'entry_point' must be set for function problems only")

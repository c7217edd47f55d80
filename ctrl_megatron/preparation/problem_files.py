"""This project's problem files: one JSON object per line, with a reference and wrong solutions."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, cast, get_args

from ctrl_megatron.data.json_lines import read_json_lines_with_places
from ctrl_megatron.data.rows import row_of_attempt
from ctrl_megatron.errors import UserError
from ctrl_megatron.problems.long_integers import load_long_integer_json
from ctrl_megatron.problems.tests import DEFAULT_TIME_LIMIT, comparison_complaint, decode_tests
from ctrl_megatron.rewards.grading import count_judgeable_tests
from ctrl_megatron.types import Attempt, Problem, PrompterType

_KEYS = {
    "id": str,
    "statement": str,
    "prompter_type": str,
    "entry_point": str,
    "test_setup": str,
    "comparison": str,
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
    "comparison": "",
    "buggy": [],
    "difficulty": 0,
    "time_limit": DEFAULT_TIME_LIMIT,
}


def read_problems(*paths: str | PathLike[str]) -> list[Problem]:
    """The problems of ``.jsonl`` files; for a directory, of all its ``.jsonl`` files in name order.

    Raises ``ValueError`` naming file, line and key for an unknown, missing or ill-typed key, for a
    repeated id, and for a path without problems.
    """
    found = dict[str, tuple[str, Problem]]()
    for path in map(Path, paths):
        before = len(found)
        for file in sorted(path.glob("*.jsonl")) if path.is_dir() else [path]:
            for place, given in read_json_lines_with_places(file):
                try:
                    problem = problem_from_record(given)
                except ValueError as error:
                    raise UserError(f"{place}: {error}") from error
                if problem.id in found:
                    raise UserError(
                        f"{place}: key 'id' repeats {problem.id!r} of {found[problem.id][0]}",
                        remedy="name a file once, or give one of the problems another id",
                    )
                found[problem.id] = place, problem
        if len(found) == before:
            raise UserError(f"no problems in {path}; expected .jsonl with one JSON object per line")
    return [problem for _, problem in found.values()]


def problem_record(problem: Problem) -> dict[str, Any]:
    """The JSON object of a problem in a problem file; ``read_problems`` is the inverse."""
    tests = problem.selected_uts
    return {
        "id": problem.id,
        "statement": problem.statement,
        "prompter_type": problem.prompter_type,
        "entry_point": problem.entry_point,
        "test_setup": problem.test_setup,
        "comparison": problem.comparison,
        "tests": load_long_integer_json(tests) if isinstance(tests, str) else list(tests),
        "reference": problem.reference,
        "buggy": list(problem.buggy),
        "difficulty": problem.difficulty,
        "time_limit": problem.time_limit,
    }


def problem_from_record(given: Mapping[str, Any]) -> Problem:
    """The problem of a JSON object. Raises ``ValueError`` for an unknown, missing or ill-typed key,
    and for tests that the sandbox cannot judge.
    """
    record = {**_DEFAULTS, **given}
    if unknown := record.keys() - _KEYS.keys():
        raise UserError(f"unknown key(s) {', '.join(sorted(unknown))}")
    if missing := _KEYS.keys() - record.keys():
        raise UserError(f"key(s) {', '.join(sorted(missing))} missing")
    for key, type_ in _KEYS.items():
        if not isinstance(record[key], type_) or isinstance(record[key], bool):
            raise UserError(f"key {key!r} has the wrong type: {record[key]!r:.60}")
    kind = record["prompter_type"]
    if kind not in get_args(PrompterType):
        raise UserError(f"key 'prompter_type' is {kind!r}, use {', '.join(get_args(PrompterType))}")
    for key in ("id", "statement"):
        if not record[key].strip():
            raise UserError(f"key {key!r} is empty")
    if not all(isinstance(text, str) and text.strip() for text in record["buggy"]):
        raise UserError("key 'buggy' has an entry that is empty or not text")
    if not 0 <= record["difficulty"] <= 4:
        raise UserError(f"key 'difficulty' must be 0 to 4, is {record['difficulty']}")
    if not 0 < record["time_limit"] < math.inf:
        raise UserError(f"key 'time_limit' must be positive, is {record['time_limit']}")
    if (kind == "mbppplus") != bool(record["entry_point"]):
        raise UserError("key 'entry_point' must be set for function problems only")
    if complaint := comparison_complaint(cast(PrompterType, kind), record["comparison"]):
        raise UserError(f"key 'comparison' {complaint}")
    try:
        tests = decode_tests(cast(PrompterType, kind), record["tests"])
    except ValueError as error:
        raise UserError(f"key 'tests' {error}") from error
    if kind == "mbppplus":
        _check_asserts(record, tests)
    problem = Problem(
        id=record["id"],
        statement=record["statement"],
        prompter_type=cast(PrompterType, kind),
        selected_uts=tests,
        entry_point=record["entry_point"],
        test_setup=record["test_setup"],
        comparison=record["comparison"],
        time_limit=float(record["time_limit"]),
        reference=record["reference"],
        buggy=tuple(record["buggy"]),
        difficulty=record["difficulty"],
    )
    try:
        count_judgeable_tests(
            row_of_attempt(Attempt(id=problem.id, problem=problem, solution=""), ())
        )
    except ValueError as error:
        named = f"{problem.id!r}"
        why = str(error).removeprefix(f"{named}: ")
        raise UserError(f"the tests of problem {named} cannot be judged: {why}") from error
    return problem


def _check_asserts(record: Mapping[str, Any], tests: Sequence[str]) -> None:
    """Raise UserError naming the test that is not Python."""
    of = f"problem {record['id']!r}"
    parts = [("key 'test_setup'", record["test_setup"])]
    parts += [(f"test {number}", test) for number, test in enumerate(tests, start=1)]
    for part, code in parts:
        try:
            ast.parse(code)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise UserError(f"{part} of {of} is no Python: {error}") from error

"""Rows of APPS, TACO, CodeContests, LiveCodeBench and verl: programs judged on stdin and stdout,
and functions judged by arguments and results.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ctrl_megatron.data.verl_form import data_source_of, problem_of_verl_row
from ctrl_megatron.errors import UserError
from ctrl_megatron.problems.comparison import LIVE_CODE_BENCH
from ctrl_megatron.problems.fields import json_field, non_empty_list_field, object_field, text_field
from ctrl_megatron.problems.input_output import function_problem, problem_of_tests, stdio_problem
from ctrl_megatron.sandbox.datasets.problems import StdioProblem
from ctrl_megatron.sandbox.datasets.stdio import read_code_contests, read_live_code_bench
from ctrl_megatron.types import Problem

_LEVELS = {
    **{"introductory": 1, "interview": 2, "competition": 3},
    **{"easy": 1, "medium": 2, "medium_hard": 3, "hard": 3, "very_hard": 4},
}
"""The sets' names of levels -> difficulty from 1 to 4; any other name is 0 (unknown)."""
_PYTHON3 = 3
"""Code of Python 3 in CodeContests' column ``language``."""
_RATINGS = (1200, 1600, 2200)
"""Codeforces ratings at which the next difficulty begins; a problem without a rating gets 0."""


class NoTests(UserError):
    """A row of a published set has no tests that can judge an answer here."""


def apps_problem(record: Mapping[str, Any], number: int) -> Problem:
    """A row of APPS (arXiv 2105.09938)."""
    name = record.get("problem_id", record.get("id"))
    return _input_output(record, f"apps/{number if name is None else name}")


def taco_problem(record: Mapping[str, Any], number: int) -> Problem:
    """A row of TACO (arXiv 2312.14852), named by its number because the set has no ids."""
    return _input_output(record, f"taco/{number}")


def code_contests_problem(record: Mapping[str, Any], number: int) -> Problem:
    """A row of CodeContests (arXiv 2203.07814)."""
    name = text_field(record.get("name"), "name")
    if record.get("input_file") or record.get("output_file"):
        raise NoTests("reads or writes a file")
    if not any(_cases(record.get(f"{kind}_tests")) for kind in ("public", "private", "generated")):
        raise NoTests("has no tests")
    graded = read_code_contests(record)
    solutions = object_field(record.get("solutions") or {}, "solutions")
    written = zip(solutions.get("language") or (), solutions.get("solution") or (), strict=True)
    return _program(
        f"code_contests/{name}",
        text_field(record.get("description"), "description"),
        graded,
        reference=next((code for language, code in written if language == _PYTHON3), ""),
        difficulty=level_of_rating(record.get("cf_rating")),
    )


def live_code_bench_problem(record: Mapping[str, Any], number: int) -> Problem:
    """A row of LiveCodeBench's code generation (arXiv 2403.07974)."""
    name = f"livecodebench/{text_field(record.get('question_id'), 'question_id')}"
    statement = text_field(record.get("question_content"), "question_content")
    graded, level = read_live_code_bench(record), _level(record)
    if isinstance(graded, StdioProblem):
        return _program(name, statement, graded, difficulty=level)
    (function,) = graded.stubs
    return function_problem(
        name,
        statement,
        function,
        graded.tests,
        starter=record.get("starter_code") or "",
        comparison=LIVE_CODE_BENCH.name,
        difficulty=level,
    )


def verl_problem(record: Mapping[str, Any], number: int) -> Problem:
    """A row in verl's form. Raises ``NoTests`` if its ``ground_truth`` has none."""
    problem = problem_of_verl_row(record, f"verl/{data_source_of(record)}/{number}")
    if problem is None:
        raise NoTests("has an answer in place of tests")
    return problem


def _input_output(record: Mapping[str, Any], name: str) -> Problem:
    tests = record.get("input_output")
    tests = object_field(json_field(tests, "input_output"), "input_output") if tests else None
    if not tests or not tests.get("inputs"):
        raise NoTests("has no tests")
    given = json_field(record.get("solutions") or "[]", "solutions")
    solutions = non_empty_list_field(given, "solutions") if given else []
    return problem_of_tests(
        name,
        text_field(record.get("question"), "question"),
        tests,
        starter=record.get("starter_code") or "",
        reference=text_field(solutions[0], "solutions[0]") if solutions else "",
        difficulty=_level(record),
        seconds=_seconds(record.get("time_limit")),
    )


def _program(name: str, statement: str, graded: StdioProblem, **known: Any) -> Problem:
    if graded.seconds is not None:
        known["time_limit"] = graded.seconds
    cases = [(case.input, case.output) for case in graded.cases]
    return stdio_problem(name, statement, cases, comparison=graded.rule.name, **known)


def level_of_rating(rating: float | None) -> int:
    """The difficulty of a Codeforces rating; 0 without a rating."""
    return 1 + sum(rating >= bound for bound in _RATINGS) if rating else 0


def _cases(given: Any) -> Sequence[Any]:
    given = json_field(given, "tests") if given else ()
    return (given.get("input") or ()) if isinstance(given, Mapping) else given


def _level(record: Mapping[str, Any]) -> int:
    return _LEVELS.get(str(record.get("difficulty") or "").lower(), 0)


def _seconds(limit: Any) -> float | None:
    """The seconds of TACO's ``2.0 seconds``; None for anything else."""
    found = re.match(r"\s*(\d+(?:\.\d+)?)\s*s", limit) if isinstance(limit, str) else None
    return float(found[1]) if found and float(found[1]) > 0 else None

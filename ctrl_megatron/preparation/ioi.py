"""Rows of open-r1/ioi, subtasks of the International Olympiad in Informatics, with their tests from
open-r1/ioi-test-cases. The reward ``ioi_code`` judges such rows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any

from ctrl_megatron.data.rows import Row
from ctrl_megatron.errors import UserError
from ctrl_megatron.preparation.contests import NoTests
from ctrl_megatron.preparation.published import DroppedItems
from ctrl_megatron.preparation.records import Record
from ctrl_megatron.preparation.task_rows import SOLVING
from ctrl_megatron.problems.comparison import TOKENS
from ctrl_megatron.problems.fields import non_empty_list_field, positive_field, text_field

Tests = Mapping[tuple[int, str, str], tuple[str, str]]
"""(year, problem, name of a test) -> (input, output)."""
_SOURCES = (".cpp", ".cc", ".h", ".hpp")
"""Endings of the grader's files that a C++ program needs."""
_ORDER = ("input", "answer", "output")
"""The arguments of a checker of the contest's system (CMS), which prints the score."""
_OF_TESTS = ("problem_id", "test_name", "test_input", "test_output")
_INCLUDED = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)".*$', re.MULTILINE)


def read_ioi_tests(records: Iterable[Record]) -> Tests:
    """The tests of the records. Raises ``UserError`` naming the place of one without a column."""
    tests = {}
    for place, record in records:
        try:
            problem, name, stdin, stdout = (text_field(record.get(n), n) for n in _OF_TESTS)
            tests[_year(record), problem, name] = stdin, stdout
        except ValueError as error:
            raise UserError(str(error), file=place) from error
    return tests


def ioi_rows(
    records: Iterable[Record], tests: Tests, *, longest: int | None = None
) -> tuple[list[Row], DroppedItems]:
    """A row for every subtask with points, and what was left out: tasks in which the program talks
    with a manager or hands in outputs, subtasks whose tests are not among ``tests``, and those with
    tests of more than ``longest`` characters together. Raises ``UserError`` naming the place of a
    malformed record.
    """
    rows, dropped = list[Row](), DroppedItems()
    for place, record in records:
        try:
            rows.append(_row(record, tests, longest))
        except NoTests as error:
            dropped.add(str(error), place)
        except ValueError as error:
            raise UserError(str(error), file=place) from error
    return rows, dropped


def _row(record: Mapping[str, Any], tests: Tests, longest: int | None) -> Row:
    task = text_field(record.get("task_type"), "task_type")
    if task != "Batch":
        raise NoTests(f"is a task of type {task}")
    if record.get("score") == 0:
        raise NoTests("has no points")
    points = positive_field(record.get("score"), "score")
    year, problem = _year(record), text_field(record.get("id"), "id")
    names = [
        text_field(n, "test_names")
        for n in non_empty_list_field(record.get("test_names"), "test_names")
    ]
    if any((year, problem, name) not in tests for name in names):
        raise NoTests("has tests that are not in the files of tests")
    cases = [tests[year, problem, name] for name in names]
    if longest is not None and sum(len(text) for case in cases for text in case) > longest:
        raise NoTests(f"has tests of more than {longest} characters")
    graders, checker = _programs(record.get("grader_files") or [])
    extra: dict[str, Any] = {
        "language": "cpp",
        "subtasks": json.dumps([{"points": points, "tests": [*range(len(cases))]}]),
    }
    if graders:
        extra["grader_files"] = json.dumps(graders)
    if checker:
        extra["checker"] = json.dumps({"code": checker, "language": "cpp", "order": _ORDER})
    asked = text_field(record.get("problem"), "problem")
    return Row(
        id=f"ioi/{year}/{problem}/{text_field(record.get('subtask'), 'subtask')}",
        prompt=({"role": "user", "content": asked},),
        problem=asked,
        prompter_type="code_contests",
        selected_uts=json.dumps(
            [{"input": {"stdin": stdin}, "output": {"stdout": stdout}} for stdin, stdout in cases]
        ),
        time_limit=positive_field(record.get("time_limit"), "time_limit"),
        problem_id=f"ioi/{year}/{problem}",
        comparison=TOKENS.name,
        task=SOLVING,
        extra=extra,
    )


def _year(record: Mapping[str, Any]) -> int:
    return int(positive_field(record.get("year"), "year"))


def _programs(files: Any) -> tuple[dict[str, str], str]:
    """(the files to compile with the program, by name; the checker in one text, or "") of
    ``grader_files``, pairs of path and text in the folders ``graders`` and ``checker``.
    """
    graders, checkers = dict[str, str](), dict[str, str]()
    for pair in files:
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError("grader_files must be pairs of a path and a text")
        path, text = PurePosixPath(text_field(pair[0], "grader_files")), pair[1]
        if not text or path.suffix not in _SOURCES:
            continue
        of_checker = "checker" in path.parts[:-1] or path.stem == "checker"
        (checkers if of_checker else graders)[path.name] = text_field(text, f"grader_files: {path}")
    # The checker's headers may lie beside the grader's.
    headers = {**graders, **checkers}
    main = checkers.get("checker.cpp", "")
    if checkers and not main:
        raise ValueError(f"grader_files have {', '.join(checkers)} but no checker.cpp")
    return graders, _in_one_file(main, headers, set())


def _in_one_file(text: str, headers: Mapping[str, str], seen: set[str]) -> str:
    """``text`` with each of the headers in the place where it is first included."""

    def included(found: re.Match[str]) -> str:
        name = PurePosixPath(found[1]).name
        if name not in headers:
            return found[0]
        if name in seen:
            return ""
        seen.add(name)
        return _in_one_file(headers[name], headers, seen)

    return _INCLUDED.sub(included, text)

"""Olympiad problems: tests in subtasks, a score for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ctrl_megatron.sandbox.datasets.problems import (
    Case,
    ScoredProblem,
    Subtask,
    list_field,
    object_field,
    positive_field,
    read_checker,
    text_field,
)
from ctrl_megatron.sandbox.datasets.stdio_cases import parsed
from ctrl_megatron.sandbox.jail import files


def read_ioi(data: Mapping[str, Any]) -> ScoredProblem:
    """``tests``: ``{name: {input, output}}``; ``subtasks``: ``[{name, points, tests: [name]}]``;
    may have a ``checker``, ``grader_files`` (C++: file name -> text) and ``time_limit`` in seconds.

    Raises ``ValueError``.
    """
    tests = object_field(parsed(data.get("tests"), "provided_data.tests"), "provided_data.tests")
    cases = {
        text_field(name, "a name in provided_data.tests"): _case(
            record, f"provided_data.tests.{name}"
        )
        for name, record in tests.items()
    }
    given = list_field(parsed(data.get("subtasks"), _SUBTASKS), _SUBTASKS)
    limit = data.get("time_limit")
    return ScoredProblem(
        cases=cases,
        subtasks=tuple(_subtask(record, i, cases) for i, record in enumerate(given)),
        checker=read_checker(data),
        sources=_sources(data.get("grader_files") or {}),
        seconds=None if limit is None else positive_field(limit, "provided_data.time_limit"),
    )


_SUBTASKS = "provided_data.subtasks"


def _case(record: Any, where: str) -> Case:
    given = object_field(record, where)
    return Case(
        input=text_field(given.get("input", ""), f"{where}.input"),
        output=text_field(given.get("output", ""), f"{where}.output"),
    )


def _subtask(record: Any, index: int, cases: Mapping[str, Case]) -> Subtask:
    where = f"{_SUBTASKS}[{index}]"
    given = object_field(record, where)
    names = list_field(given.get("tests"), f"{where}.tests")
    unknown = [str(name) for name in names if not isinstance(name, str) or name not in cases]
    if unknown:
        raise ValueError(f"{where}.tests names no test of provided_data.tests: {unknown[0][:100]}")
    return Subtask(
        name=text_field(given.get("name", str(index + 1)), f"{where}.name"),
        points=positive_field(given.get("points"), f"{where}.points"),
        tests=tuple(names),
    )


def _sources(given: Any) -> dict[str, str]:
    where = "provided_data.grader_files"
    record = object_field(parsed(given, where), where)
    sources = {
        files.inside(name): text_field(text, f"{where}.{name}") for name, text in record.items()
    }
    if "main.cpp" in sources:
        raise ValueError(f"{where} may not hold main.cpp: that is the program's own name")
    return sources

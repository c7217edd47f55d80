"""Problems: what a record of any kind is read into (functions to call, cases of stdin and stdout,
or subtasks), and readers of a record's fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ctrl_megatron.problems.comparison import STRICT, ComparisonRule
from ctrl_megatron.problems.fields import object_field, positive_field, text_field


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionProblem:
    """Python functions, judged by asserts that run in another process."""

    tests: tuple[str, ...]
    setup: str
    """Python code that runs in the judge before the tests."""
    prelude: str
    """Python code that runs before the program in its module: the imports of the setup, and the
    imports and definitions of the prompt."""
    stubs: tuple[str, ...]
    """Names that the program has to define."""
    modules: tuple[str, ...] = ()
    """Modules that the tests import as the program's file."""
    classes: tuple[str, ...] = ()
    """Classes that the setup defines."""
    uncounted: tuple[int, ...] = ()
    """Places of the tests that are left out, because every program passes them."""
    adapter: str = ""
    """Python code that is appended to the program."""
    cases: tuple[Mapping[str, Any], ...] = ()
    """Fields that the verdict of each test reports instead of the test's text."""
    single: bool = False
    """Whether one verdict answers for all tests."""
    seconds: float | None = None
    """Seconds of processor time per test, unless the request names them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StdioCase:
    """One run of a program. ``output`` is the expected output, or the reference answer for a
    checker.
    """

    input: str
    output: str
    labels: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the verdict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckerProgram:
    """A checker: a program that reads input, reference answer and output from files and judges the
    output.
    """

    code: str
    language: str
    order: tuple[str, ...]
    """The order of its arguments ``input``, ``answer`` and ``output``."""
    seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StdioProblem:
    """A program that is judged by its output for each input."""

    cases: tuple[StdioCase, ...]
    checker: CheckerProgram | None = None
    prelude: str = ""
    """Python code that runs before the program in the same module."""
    rule: ComparisonRule = STRICT
    """How outputs are compared if there is no checker."""
    ignore_case: bool = False
    """Whether outputs are compared without regard to case."""
    single: bool = False
    seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredSubtask:
    """A subtask; its score is ``points`` times the lowest score of its tests."""

    name: str
    points: float
    tests: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredProblem:
    """A problem of an olympiad: cases by name, grouped into subtasks."""

    cases: Mapping[str, StdioCase]
    subtasks: tuple[ScoredSubtask, ...]
    checker: CheckerProgram | None = None
    rule: ComparisonRule = STRICT
    """How outputs are compared if there is no checker."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """The problem's own C++ source files, compiled with the program."""
    seconds: float | None = None


GradedProblem = FunctionProblem | StdioProblem | ScoredProblem


def read_checker(data: Mapping[str, Any]) -> CheckerProgram | None:
    """Read ``provided_data.checker``: Python text, or an object with ``code``, ``language``
    (python), ``order`` (input, answer, output) and ``run_timeout`` in seconds. Raises
    ``ValueError``.
    """
    given = data.get("checker")
    if given is None or given == "":
        return None
    where, names = "provided_data.checker", ("input", "answer", "output")
    record = object_field({"code": given} if isinstance(given, str) else given, where)
    order = record.get("order") or names
    if not isinstance(order, (list, tuple)) or sorted(map(str, order)) != sorted(names):
        raise ValueError(f"{where}.order must contain {', '.join(names)}, each once")
    seconds = record.get("run_timeout")
    return CheckerProgram(
        code=text_field(record.get("code"), f"{where}.code"),
        language=text_field(record.get("language", "python"), f"{where}.language"),
        order=tuple(order),
        seconds=None if seconds is None else positive_field(seconds, f"{where}.run_timeout"),
    )

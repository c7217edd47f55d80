"""What a record of any kind becomes: functions to call, cases of stdin and stdout, or subtasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ctrl_megatron.problems.comparison import STRICT, Rule
from ctrl_megatron.problems.fields import object_field, positive_field, text_field


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionProblem:
    """Python functions, judged by asserts that run outside the program."""

    tests: tuple[str, ...]
    marked: tuple[str | None, ...]
    """What runs in the place of each test and says which of its checks are evaluated; None for one
    whose passing after a call of the program says enough."""
    setup: str
    """Runs in the judge before the tests."""
    prelude: str
    """Runs in the program's module before it: of the setup the imports and no more, of the prompt
    what it imports and defines."""
    stubs: tuple[str, ...]
    """Names that the program has to define: all that a test may call in it."""
    classes: tuple[str, ...] = ()
    """Those of ``stubs`` that the tests can only mean a class by."""
    exceptions: tuple[str, ...] = ()
    """Those that the tests catch."""
    shared_classes: tuple[str, ...] = ()
    """Classes of the setup: objects of them cross between tests and program."""
    adapter: str = ""
    """Python text that goes behind the program, in the program's own process."""
    cases: tuple[Mapping[str, Any], ...] = ()
    """What to tell of each test instead of its text."""
    single: bool = False
    """Answer with one verdict for all tests."""
    seconds: float | None = None
    """Wall clock per test where the request names none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StdioCase:
    """One run of a program. ``output`` is the expected output, or a checker's reference."""

    input: str
    output: str
    labels: Mapping[str, Any] = field(default_factory=dict)
    """Told with the verdict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckerProgram:
    """A special judge: a program that reads input, answer and output from files."""

    code: str
    language: str
    order: tuple[str, ...]
    """Which of ``input``, ``answer``, ``output`` are its arguments, in order."""
    seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StdioProblem:
    """A program judged by what it writes for each input."""

    cases: tuple[StdioCase, ...]
    checker: CheckerProgram | None = None
    prelude: str = ""
    """Python only: runs before the program in its module."""
    rule: Rule = STRICT
    """What counts as equal where no checker decides."""
    ignore_case: bool = False
    """Capitals do not count in outputs."""
    single: bool = False
    seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredSubtask:
    """Worth ``points`` times the least score of its tests."""

    name: str
    points: float
    tests: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredProblem:
    """A problem of an olympiad: cases by name, grouped into subtasks."""

    cases: Mapping[str, StdioCase]
    subtasks: tuple[ScoredSubtask, ...]
    checker: CheckerProgram | None = None
    rule: Rule = STRICT
    """What counts as equal where no checker decides."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """C++ only: the olympiad's own source files, compiled with the program."""
    seconds: float | None = None


GradedProblem = FunctionProblem | StdioProblem | ScoredProblem


def read_checker(data: Mapping[str, Any]) -> CheckerProgram | None:
    """``provided_data.checker``: Python text, or an object with ``code``, ``language`` (python),
    ``order`` (input, answer, output) and ``run_timeout`` in seconds. Raises ``ValueError``.
    """
    given = data.get("checker")
    if given is None or given == "":
        return None
    where, names = "provided_data.checker", ("input", "answer", "output")
    record = object_field({"code": given} if isinstance(given, str) else given, where)
    order = record.get("order") or names
    if not isinstance(order, (list, tuple)) or sorted(map(str, order)) != sorted(names):
        raise ValueError(f"{where}.order must hold {', '.join(names)}, each once")
    seconds = record.get("run_timeout")
    return CheckerProgram(
        code=text_field(record.get("code"), f"{where}.code"),
        language=text_field(record.get("language", "python"), f"{where}.language"),
        order=tuple(order),
        seconds=None if seconds is None else positive_field(seconds, f"{where}.run_timeout"),
    )

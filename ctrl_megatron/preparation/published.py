"""Reads published problem sets from their original files, and selects problems from them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ctrl_megatron.errors import UserError
from ctrl_megatron.preparation.contests import (
    NoTests,
    apps_problem,
    code_contests_problem,
    live_code_bench_problem,
    taco_problem,
    verl_problem,
)
from ctrl_megatron.preparation.evalplus import human_eval_problem, mbpp_plus_problem
from ctrl_megatron.preparation.kodcode import kodcode_problem
from ctrl_megatron.preparation.mbpp import SPLITS, mbpp_problem
from ctrl_megatron.preparation.near_duplicates import NearDuplicates
from ctrl_megatron.preparation.open_r1 import codeforces_problem, verifiable_problem
from ctrl_megatron.preparation.problem_files import (
    problem_from_record,
    problem_record,
    read_problems,
)
from ctrl_megatron.preparation.records import read_data_records
from ctrl_megatron.problems.long_integers import allow_long_integers, load_long_integer_json
from ctrl_megatron.types import Problem

FORMATS: dict[str, Callable[[Mapping[str, Any], int], Problem]] = {
    "apps": apps_problem,
    "code_contests": code_contests_problem,
    "codeforces": codeforces_problem,
    "eurus": verl_problem,
    "humaneval": human_eval_problem,
    "humanevalplus": human_eval_problem,
    "kodcode": kodcode_problem,
    "livecodebench": live_code_bench_problem,
    "mbpp": mbpp_problem,
    "mbppplus": mbpp_plus_problem,
    "open_r1": verifiable_problem,
    "taco": taco_problem,
    "verl": verl_problem,
}
"""Format -> reader: the problem of a row and the row's number over all files, from 1. A reader
raises ``ValueError`` or ``SyntaxError`` for a malformed row, ``NoTests`` for one without tests."""
OWN = "ctrl"
"""The format of this project's problem files."""


@dataclass(slots=True)
class DroppedItems:
    """Items that were left out: reason -> ids or places."""

    reasons: dict[str, list[str]] = field(default_factory=dict)

    def add(self, reason: str, what: str) -> None:
        self.reasons.setdefault(reason, []).append(what)

    def counts(self) -> Counter[str]:
        return Counter({reason: len(names) for reason, names in self.reasons.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemLimits:
    """Bounds on the problems that are kept; None sets no bound."""

    min_tests: int = 1
    max_tests: int | None = None
    """Further tests of a problem are left out; the problem is kept."""
    max_statement: int | None = None
    """Characters."""
    max_reference: int | None = None
    """Characters."""
    max_difficulty: int | None = None
    needs_reference: bool = False


def read_published(
    format: str,
    paths: Sequence[Path],
    *,
    split: str | None = None,
    skip_malformed: bool = False,
    check: bool = True,
) -> tuple[list[Problem], DroppedItems]:
    """All problems of the files in order, and what was dropped.

    ``split`` is one of MBPP's. Raises ``ValueError`` naming file and row for a malformed row, or
    (``check``) one whose problem ``read_problems`` would refuse, which ``skip_malformed`` drops
    instead. A row without tests is dropped.
    """
    if split is not None and (format != "mbpp" or split not in SPLITS):
        raise UserError(f"--split={split}: only mbpp has splits, and they are {', '.join(SPLITS)}")
    if format == OWN:
        return read_problems(*paths), DroppedItems()
    read, dropped, problems = FORMATS[format], DroppedItems(), list[Problem]()
    seen: dict[str, str] = {}
    records = [record for path in paths for record in read_data_records(path)]
    for number, (place, record) in enumerate(records, start=1):
        try:
            problem = read(record, number)
            if check:
                problem_from_record(problem_record(problem))
            if problem.id in seen:
                raise UserError(f"repeats {problem.id!r} of {seen[problem.id]}")
        except NoTests as error:
            dropped.add(str(error), place)
            continue
        except (ValueError, SyntaxError) as error:
            if not skip_malformed:
                raise UserError(
                    f"{place}: {error}", remedy="--skip-malformed leaves such rows out"
                ) from error
            dropped.add("malformed", f"{place}: {error}")
            continue
        seen[problem.id] = place
        problems.append(problem)
    if split is not None:
        wanted = SPLITS[split]  # type: ignore[index]
        problems = [p for p in problems if int(p.id.removeprefix("mbpp/")) in wanted]
    return problems, dropped


def select_problems(
    problems: Iterable[Problem], limits: ProblemLimits, *, against: Iterable[Problem] = ()
) -> tuple[list[Problem], DroppedItems]:
    """The problems within ``limits`` whose statement is not a near duplicate of an earlier one or
    of one in ``against`` (test sets, whose ids may repeat); and what was dropped.

    Raises ``ValueError`` for two ``problems`` with the same id.
    """
    tested, earlier, kept, dropped = (
        NearDuplicates(),
        NearDuplicates(),
        list[Problem](),
        DroppedItems(),
    )
    # By number, because ids of test sets may repeat (HumanEval and HumanEval+).
    tests = {str(number): problem for number, problem in enumerate(against)}
    for number, problem in tests.items():
        tested.add(number, problem.statement)
    for problem in problems:
        reason = _outside(problem, limits)
        if not reason and (twin := tested.find(problem.statement)) is not None:
            reason = "nearly a problem of a test set"
            problem = replace(problem, id=f"{problem.id} ({tests[twin].id})")
        if not reason and (twin := earlier.find(problem.statement)) is not None:
            reason = "nearly an earlier problem"
            problem = replace(problem, id=f"{problem.id} ({twin})")
        if reason:
            dropped.add(reason, problem.id)
            continue
        earlier.add(problem.id, problem.statement)
        kept.append(_with_fewer_tests(problem, limits.max_tests))
    return kept, dropped


def number_of_tests(problem: Problem) -> int:
    """The number of asserts, or of cases of stdin and stdout."""
    tests = problem.selected_uts
    return len(load_long_integer_json(tests)) if isinstance(tests, str) else len(tests)


def _outside(problem: Problem, limits: ProblemLimits) -> str:
    if number_of_tests(problem) < limits.min_tests:
        return f"fewer than {limits.min_tests} tests"
    for text, most, what in (
        (problem.statement, limits.max_statement, "statement"),
        (problem.reference, limits.max_reference, "reference"),
    ):
        if most is not None and len(text) > most:
            return f"{what} longer than {most} characters"
    if limits.max_difficulty is not None and problem.difficulty > limits.max_difficulty:
        return f"harder than level {limits.max_difficulty}"
    if limits.needs_reference and not problem.reference.strip():
        return "no reference"
    return ""


def _with_fewer_tests(problem: Problem, most: int | None) -> Problem:
    if most is None or number_of_tests(problem) <= most:
        return problem
    tests = problem.selected_uts
    if isinstance(tests, str):
        cases = load_long_integer_json(tests)[:most]
        with allow_long_integers():
            return replace(problem, selected_uts=json.dumps(cases, ensure_ascii=False))
    return replace(problem, selected_uts=tests[:most])

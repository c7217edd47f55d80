"""The check of a row's tests and reference: programs that know nothing of the problem must not pass
the tests, and the reference must. A check is made once and its result kept beside the data set.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ctrl_megatron.background import advance_wait, gather_results, track_wait
from ctrl_megatron.checkpoint.files import write_text_atomically
from ctrl_megatron.data.rows import Row
from ctrl_megatron.errors import UserError, read_bytes
from ctrl_megatron.rewards.cache import json_fingerprint
from ctrl_megatron.rewards.grading import (
    BatchTests,
    Judge,
    RowTests,
    program_to_judge,
    request_verdict,
)
from ctrl_megatron.rewards.poison import find_trivially_passed_tests
from ctrl_megatron.sandbox.client import SandboxError
from ctrl_megatron.sandbox.datasets.problems import FunctionProblem
from ctrl_megatron.sandbox.limits import SandboxLimits
from ctrl_megatron.sandbox.task import read_task
from ctrl_megatron.sandbox.wire import EvalTestCase

FILE = "checked_tests.jsonl"
"""Name of the file of results in the folder of a data set."""
_FORMAT = "checked tests 1"
_SECONDS, _PROBLEM_SECONDS = 2.0, 20.0
"""Most processor time of a program that knows nothing: for one test, and for all."""
_SAVED_EVERY = 500
_SHOWN = 200
_log = logging.getLogger(__name__)


class UncountedTest(NamedTuple):
    """A test that says nothing about a program."""

    position: int
    test: str
    why: str
    """A description of the programs that all pass it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TestCheckResult:
    """The result of a check."""

    uncounted: tuple[UncountedTest, ...] = ()
    fault: str = ""
    """Why no program can be judged on the row; empty where it can."""

    def remove_uncounted_from(self, row: Row, *, log: bool = True) -> Row:
        """``row`` without the tests that do not count, which are logged with ``log``.
        UserError where the row has a fault.
        """
        if self.fault:
            raise UserError(
                f"{row.id!r}: {self.fault}",
                file=row.place,
                remedy="correct the row, or set data.bad_rows=drop to leave such rows out",
            )
        for _, test, why in self.uncounted if log else ():
            text = "%s: %r: a test does not count, because it passes for programs that %s: %s"
            _log.warning(text, row.place, row.id, why, test)
        return replace(row, uncounted=tuple(one.position for one in self.uncounted))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Open:
    key: str
    row: Row
    tests: RowTests


@dataclass(slots=True)
class RowTestChecks:
    """The checks of ``rows``, those that were made before included. ``options`` are those of
    ``row_tests``. Results are kept in the folder of each row's file, or in ``spare`` where that
    cannot be written. Raises ``UserError`` naming a file of results that was changed.
    """

    __test__ = False  # not a pytest class

    rows: Sequence[Row]
    spare: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    missing: list[_Open] = field(default_factory=list, init=False)
    """One entry per check that is to be made."""
    _known: dict[str, TestCheckResult] = field(default_factory=dict, init=False)
    _keys: dict[str, str] = field(default_factory=dict, init=False)
    _new: dict[str, TestCheckResult] = field(default_factory=dict, init=False)
    _unsure: set[str] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        tests = BatchTests(run_all_cases=True, **self.options)
        for folder in {self.spare, *map(folder_of_row_file, self.rows)}:
            self._known |= read_check_results(folder / FILE)
        seen = set(self._known)
        for row in self.rows:
            # Cases of stdin and stdout compare with data, which no constant program passes.
            if row.prompter_type == "mbppplus" or row.reference.strip():
                of_row = tests.tests_of_row(row)
                key = self._keys[row.id] = json_fingerprint(of_row.digest, row.reference)
                if key not in seen:
                    self.missing.append(_Open(key=key, row=row, tests=of_row))
                    seen.add(key)

    def result_of(self, row: Row) -> TestCheckResult:
        return self._known[self._keys[row.id]] if row.id in self._keys else TestCheckResult()

    def results_by_row(self) -> dict[str, TestCheckResult]:
        """Id of a row -> its result, where that changes anything."""
        found = {row.id: self.result_of(row) for row in self.rows}
        return {name: one for name, one in found.items() if one.fault or one.uncounted}

    def results_by_key(self) -> dict[str, TestCheckResult]:
        """The results of the rows as a file has them, without those that may not be kept."""
        return {key: self._known[key] for key in self._keys.values() if key not in self._unsure}

    async def run_missing_checks(
        self, judge: Judge, *, at_once: int, advance: Callable[[int], None] = lambda _: None
    ) -> None:
        """Make the missing checks, at most ``at_once`` at the same time; ``advance`` is called with
        the number of those that are done. Raises ``SandboxError`` that names the row where the
        judge fails. What is finished then is kept.
        """
        room, folders, done = asyncio.Semaphore(at_once), dict[str, Path](), 0

        async def one(check: _Open) -> None:
            nonlocal done
            async with room:
                try:
                    found, sure = await _checked(judge, check.row, check.tests)
                except SandboxError as error:
                    row = check.row
                    raise type(error)(f"{row.place}: {row.id!r} is not checked: {error}") from error
            self._known[check.key], done = found, done + 1
            if not sure:
                self._unsure.add(check.key)
            else:
                self._new[check.key], folders[check.key] = found, folder_of_row_file(check.row)
            advance(done)
            advance_wait()
            if done % _SAVED_EVERY == 0:
                self._save(folders)

        try:
            with track_wait("the check of tests and references", len(self.missing), "problems"):
                await gather_results([partial(one, check) for check in self.missing])
        finally:
            self._save(folders)

    def _save(self, folders: Mapping[str, Path]) -> None:
        for folder in set(folders.values()):
            own = {key: found for key, found in self._new.items() if folders[key] == folder}
            folder.mkdir(parents=True, exist_ok=True)
            place = folder if os.access(folder, os.W_OK) else self.spare
            # Another run may have written meanwhile.
            write_check_results(place / FILE, read_check_results(place / FILE) | own)


def folder_of_row_file(row: Row) -> Path:
    """The folder of the row's file."""
    return Path(row.place.rpartition(": row ")[0]).parent


def read_check_results(file: Path) -> dict[str, TestCheckResult]:
    """The results in ``file`` by key; none where there is no file. Raises ``UserError`` for a file
    that this project did not write so.
    """
    if not file.exists():
        return {}
    head, _, body = read_bytes(file).partition(b"\n")
    try:
        said = json.loads(head)
        if said != {"format": _FORMAT, "sha256": hashlib.sha256(body).hexdigest()}:
            raise ValueError
        return dict(map(_entry, body.splitlines()))
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise UserError(
            f"{file} is not as it was written: the results of tests that were checked",
            remedy="delete it; the tests are checked again then",
        ) from error


def write_check_results(file: Path, results: Mapping[str, TestCheckResult]) -> None:
    """Write a file that ``read_check_results`` reads; it appears whole or not at all."""
    lines = [
        json.dumps({"key": key, "uncounted": one.uncounted, "fault": one.fault}) + "\n"
        for key, one in results.items()
    ]
    body = "".join(lines)
    head = {"format": _FORMAT, "sha256": hashlib.sha256(body.encode()).hexdigest()}
    write_text_atomically(file, json.dumps(head) + "\n" + body)


def _entry(line: bytes) -> tuple[str, TestCheckResult]:
    record = json.loads(line)
    uncounted = tuple(UncountedTest(*one) for one in record["uncounted"])
    typed = [(record["key"], str), (record["fault"], str)]
    typed += [(v, t) for one in uncounted for v, t in zip(one, (int, str, str), strict=True)]
    if any(type(value) is not kind for value, kind in typed):
        raise TypeError("a value of another type")
    return record["key"], TestCheckResult(uncounted=uncounted, fault=record["fault"])


async def _checked(judge: Judge, row: Row, tests: RowTests) -> tuple[TestCheckResult, bool]:
    """The result for ``row``, and whether it may be kept: nothing on which time or the limits of
    the judge decided.
    """
    names, uncounted, sure = tuple[str, ...](), dict[int, str](), True
    try:
        if row.prompter_type == "mbppplus":
            found = await find_trivially_passed_tests(_names(tests), partial(_run, judge, tests))
            names, uncounted, sure = found.names, dict(found.uncounted), found.sure
            if len(uncounted) == len(names):
                whys = " or ".join(dict.fromkeys(uncounted.values()))
                fault = f"none of its tests counts: they pass for programs that {whys}"
                return TestCheckResult(fault=fault), sure
        if row.reference.strip():
            # The reference is judged on every test, so that the positions are the same.
            program = program_to_judge(row.reference, tests.config.language or "python")
            verdict = await request_verdict(judge, tests.job_of_program(program))
            if tests.total is None:
                same = [a == b for a, b in zip(names, verdict.tests, strict=False)]
                uncounted = {n: w for n, w in uncounted.items() if n < len(same) and same[n]}
            told = enumerate(zip(verdict.passed, verdict.detail, strict=True))
            failed = [(n, why) for n, (passed, why) in told if not passed and n not in uncounted]
            if failed:
                number, why = failed[0]
                fault = f"the reference fails test {number + 1} of {len(verdict.passed)}: {why}"
                return TestCheckResult(fault=fault), sure and not verdict.timed_out
    except ValueError as error:  # RequestRefused among them
        return TestCheckResult(fault=str(error)), False
    left_out = (UncountedTest(n, names[n][:_SHOWN], why) for n, why in sorted(uncounted.items()))
    return TestCheckResult(uncounted=tuple(left_out)), sure


def _names(tests: RowTests) -> tuple[str, ...]:
    problem = read_task(tests.job_of_program("").request, SandboxLimits()).problem
    assert isinstance(problem, FunctionProblem)
    return problem.stubs


async def _run(judge: Judge, tests: RowTests, program: str) -> list[EvalTestCase]:
    """The verdicts on a program that knows nothing of the problem."""
    config, seconds = tests.config, min(tests.config.run_timeout or _SECONDS, _SECONDS)
    extra = {**config.extra, "problem_seconds": _PROBLEM_SECONDS}
    quick = replace(
        tests, config=config.model_copy(update={"run_timeout": seconds, "extra": extra})
    )
    return (await judge.submit(quick.job_of_program(program).request)).tests

"""Rows of the reward model's parquet files, and what the graders need from one."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from os import PathLike, fspath
from typing import Any

from ctrl_megatron.types import Problem

Sample = dict[str, Any]
"""One parquet row: ``id, problem, solution, prompter_type, selected_uts`` and optionally
``time_limit, problem_id, entry_point, test_setup`` (LiveCodeBench: also ``content, labels, test``).
"""

REQUIRED_COLUMNS = ("id", "problem", "solution", "prompter_type", "selected_uts")
RUN_TIMEOUT = 10
"""Seconds that one test may take where the row does not say."""

Paths = str | PathLike[str] | Sequence[str | PathLike[str]]


def load_samples(file: Paths) -> dict[str, Sample]:
    """All rows of one or several parquet files, by ``id``.

    Raises ``ValueError`` for a missing file or column and for an ``id`` that occurs twice.
    """
    files = [file] if isinstance(file, (str, PathLike)) else list(file)
    table: dict[str, Sample] = {}
    for path in files:
        for row in _read(fspath(path)):
            if row["id"] in table:
                raise ValueError(
                    f"{path}: id {row['id']!r} occurs twice; ids must be unique over all files"
                )
            table[row["id"]] = row
    return table


def _read(path: str) -> list[Sample]:
    import pyarrow.parquet as parquet  # owned by this file; slow to import

    try:
        table = parquet.read_table(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read parquet file {path}: {error}") from error
    missing = [name for name in REQUIRED_COLUMNS if name not in table.column_names]
    if missing:
        raise ValueError(
            f"{path}: column(s) {', '.join(missing)} missing; has {', '.join(table.column_names)}"
        )
    return table.to_pylist()


def problem_of(sample: Sample) -> Problem:
    """The problem that a row is about."""
    tests = sample["selected_uts"]
    return Problem(
        id=str(sample.get("problem_id") or sample["id"]),
        statement=sample["problem"],
        prompter_type=sample["prompter_type"],
        selected_uts=tests if isinstance(tests, str) else tuple(tests),
        entry_point=sample.get("entry_point") or "",
        test_setup=sample.get("test_setup") or "",
        time_limit=time_limit_of(sample),
    )


def time_limit_of(sample: Sample, default: float = RUN_TIMEOUT) -> float:
    """Seconds per test: the row's ``time_limit``; ``default`` where it is missing or NaN."""
    limit = sample.get("time_limit")
    if limit is None or math.isnan(limit):
        return float(default)
    if limit <= 0:
        raise ValueError(
            f"sample {sample['id']!r}: time_limit must be positive seconds, got {limit}"
        )
    return float(limit)


def asserts_of(sample: Sample) -> list[str]:
    """The tests of a function problem: a list, a JSON list, or a string that is a single test."""
    tests = sample["selected_uts"]
    if isinstance(tests, str):
        # Run as a test, a JSON list would be an expression that always passes.
        listed = tests.lstrip().startswith("[")
        tests = _from_json(sample, tests) if listed else [tests]
    return _not_empty(sample, [str(test) for test in tests])


def cases_of(sample: Sample) -> list[dict[str, Any]]:
    """The tests of a stdin/stdout problem, each ``{"input": {"stdin"}, "output": {"stdout"}}``."""
    tests = sample["selected_uts"]
    if not isinstance(tests, str):
        tests = tests[0] if len(tests) == 1 and isinstance(tests[0], str) else tests
    return _not_empty(sample, _from_json(sample, tests) if isinstance(tests, str) else tests)


def _from_json(sample: Sample, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"sample {sample['id']!r}: selected_uts is not a JSON list: {error}"
        ) from error


def _not_empty(sample: Sample, tests: list[Any]) -> list[Any]:
    # An empty list would be accepted by every grader: a reward of 1 for anything.
    if not isinstance(tests, list) or not tests or not all(tests):
        raise ValueError(f"sample {sample['id']!r}: selected_uts must be a non-empty list of tests")
    return tests

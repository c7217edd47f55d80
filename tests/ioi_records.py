"""Records in the columns of open-r1/ioi and open-r1/ioi-test-cases, written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def ioi_record(**fields: Any) -> dict[str, Any]:
    """A subtask with two tests."""
    record = {
        "year": 2024,
        "name": "Double",
        "id": "double",
        "day": "day1",
        "subtask": "01-small",
        "statement": "Return twice n.",
        "score": 60,
        "time_limit": 1.5,
        "memory_limit": 268435456,
        "score_precision": 2,
        "task_type": "Batch",
        "test_names": ["1-02", "0-01"],
        "starting_code": "int twice(int n) {}",
        "grader_files": [],
        "problem": "Return twice n; n is at most 9.",
    }
    return {**record, **fields}


def ioi_test(name: str, stdin: str, stdout: str, **fields: Any) -> dict[str, Any]:
    """A test of ``ioi_record``."""
    names = {"year": 2024, "day": "day1", "problem_name": "Double", "problem_id": "double"}
    return {**names, "test_name": name, "test_input": stdin, "test_output": stdout, **fields}


TESTS = [ioi_test("0-01", "1", "2"), ioi_test("1-02", "3", "6"), ioi_test("1-03", "4", "8")]


def ioi_files(folder: Path, **fields: Any) -> tuple[Path, Path]:
    """A file of one problem and a file of its tests."""
    problem, tests = folder / "ioi.jsonl", folder / "tests.jsonl"
    problem.write_text(json.dumps(ioi_record(**fields)) + "\n")
    tests.write_text("".join(json.dumps(test) + "\n" for test in TESTS))
    return problem, tests

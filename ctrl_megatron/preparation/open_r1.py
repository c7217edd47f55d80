"""Rows of Open-R1's sets verifiable-coding-problems-python and codeforces (official tests).

Open-R1's reward compares lines as text without surrounding white space. The rule ``tokens`` is the
closest one, and is also correct for Codeforces problems without a checker.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ctrl_megatron.preparation.contests import NoTests, level_of_rating
from ctrl_megatron.problems.comparison import CODE_CONTESTS, TOKENS
from ctrl_megatron.problems.fields import json_field, non_empty_list_field, object_field, text_field
from ctrl_megatron.problems.input_output import problem_of_tests
from ctrl_megatron.prompts import extract_code
from ctrl_megatron.types import Problem

_BEFORE = re.compile(
    r"^\s*Solve the following coding problem using the programming language \w+:\s*"
)
_BEHIND = re.compile(
    r"\s*(The input will be stdin and you should print your solution to stdout\s*)?"
    r"(Now solve the problem and return the code\.?)?\s*$"
)
"""Text that the set adds around a statement. Our prompts have instructions of their own."""
_PYTHON = ("python", "python3")


def verifiable_problem(record: Mapping[str, Any], number: int) -> Problem:
    """A row of verifiable-coding-problems-python; ``verification_info`` is an object or its JSON
    text.
    """
    name = record.get("problem_id")
    info = object_field(
        json_field(record.get("verification_info"), "verification_info"), "verification_info"
    )
    language = str(info.get("language") or "python").lower()
    if language not in _PYTHON:
        raise NoTests(f"requires a program in {language}")
    if not info.get("test_cases"):
        raise NoTests("has no tests")
    where = "verification_info.test_cases"
    cases = [
        object_field(case, f"{where}[{i}]")
        for i, case in enumerate(non_empty_list_field(json_field(info["test_cases"], where), where))
    ]
    for i, case in enumerate(cases):
        if missing := {"input", "output"} - case.keys():
            raise ValueError(f"{where}[{i}] has no {' and no '.join(sorted(missing))}")
    names = {case.get("fn_name") or "" for case in cases}
    if len(names) > 1:
        raise ValueError(f"{where} calls several functions: {', '.join(sorted(names))}")
    tests: dict[str, Any] = {
        "inputs": [case["input"] for case in cases],
        "outputs": [case["output"] for case in cases],
    }
    if function := names.pop():
        tests["fn_name"] = function
    asked = record.get("problem") or record.get("prompt")
    statement = _BEHIND.sub("", _BEFORE.sub("", text_field(asked, "problem"))).strip()
    if not statement:
        raise ValueError("problem is empty")
    solution = record.get("gold_standard_solution")
    return problem_of_tests(
        f"open_r1/{number if name is None else name}",
        statement,
        tests,
        comparison=TOKENS.name,
        reference=extract_code(text_field(solution, "gold_standard_solution")) if solution else "",
    )


def codeforces_problem(record: Mapping[str, Any], number: int) -> Problem:
    """A row of codeforces. Raises ``NoTests`` for problems that cannot be judged here: interactive
    ones, those that read files, and those with several right outputs (``generated_checker``).
    """
    name = text_field(record.get("id"), "id")
    for column, why in (
        ("interaction_format", "is interactive"),
        ("generated_checker", "has several right outputs"),
    ):
        if str(record.get(column) or "").strip():
            raise NoTests(why)
    if record.get("input_mode") == "file":
        raise NoTests("reads or writes a file")
    if not record.get("official_tests"):
        raise NoTests("has no tests")
    given = non_empty_list_field(record["official_tests"], "official_tests")
    cases = [object_field(case, f"official_tests[{i}]") for i, case in enumerate(given)]
    limit = record.get("time_limit")
    return problem_of_tests(
        f"codeforces/{name}",
        _codeforces_statement(record),
        {"inputs": [c.get("input") for c in cases], "outputs": [c.get("output") for c in cases]},
        comparison=CODE_CONTESTS.name,
        difficulty=level_of_rating(record.get("rating")),
        seconds=float(limit) if limit else None,
    )


def _codeforces_statement(record: Mapping[str, Any]) -> str:
    parts = [text_field(record.get("description"), "description").strip()]
    for title, column in (("Input", "input_format"), ("Output", "output_format")):
        if text := str(record.get(column) or "").strip():
            parts.append(f"{title}\n\n{text}")
    for number, example in enumerate(record.get("examples") or (), start=1):
        shown = object_field(example, f"examples[{number - 1}]")
        given, wanted = (str(shown.get(key) or "").strip() for key in ("input", "output"))
        parts.append(f"Example {number}\n\nInput:\n{given}\n\nOutput:\n{wanted}")
    if note := str(record.get("note") or "").strip():
        parts.append(f"Note\n\n{note}")
    return "\n\n".join(parts)

"""KodCode (arXiv 2503.02951): questions with a solution and a file of pytest functions, which
imports from ``solution`` what the program has to define.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from ctrl_megatron.preparation.contests import NoTests
from ctrl_megatron.problems.fields import non_empty_list_field, object_field, text_field
from ctrl_megatron.types import Problem

_LEVELS = {"easy": 1, "medium": 2, "hard": 3}


def kodcode_problem(record: Mapping[str, Any], number: int) -> Problem:
    """A row of KodCode-V1; column ``test`` has the tests, ``test_code`` in the first release.

    Raises ``ValueError`` or ``SyntaxError`` for a row that is not KodCode's, ``NoTests`` for a row
    without tests.
    """
    name = record.get("question_id") or record.get("conversation_id") or number
    column = "test_code" if record.get("test") is None else "test"
    if not record.get(column):
        raise NoTests("has no tests")
    tests = text_field(record[column], column)
    return Problem(
        id=f"kodcode/{name}",
        statement=text_field(record.get("question"), "question"),
        prompter_type="mbppplus",
        selected_uts=(tests,),
        entry_point=", ".join(_entry_points(tests, column, record)),
        reference=text_field(record.get("solution"), "solution"),
        difficulty=_LEVELS.get(str(record.get("gpt_difficulty") or "").lower(), 0),
    )


def _entry_points(tests: str, column: str, record: Mapping[str, Any]) -> list[str]:
    """The names that the tests import from the program; if they import the whole module, the
    functions that column ``test_info`` lists.
    """
    imported = [
        alias.name
        for node in ast.walk(ast.parse(tests))
        if isinstance(node, ast.ImportFrom) and node.module == "solution"
        for alias in node.names
        if alias.name != "*"
    ]
    if imported:
        return list(dict.fromkeys(imported))
    where = "test_info"
    told = [
        str(object_field(entry, f"{where}[{i}]").get("function_name") or "")
        for i, entry in enumerate(non_empty_list_field(record.get(where) or [""], where))
        if entry
    ]
    if not any(told):
        raise ValueError(f"{column} imports nothing from solution, and {where} names no function")
    return list(dict.fromkeys(filter(None, told)))

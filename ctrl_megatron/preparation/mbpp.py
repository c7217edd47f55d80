"""Rows of MBPP: of the file of 974 problems (``mbpp.jsonl``) and of the hand-verified one
(``sanitized-mbpp.json``).
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from ctrl_megatron.errors import UserError
from ctrl_megatron.problems.fields import non_empty_list_field, text_field
from ctrl_megatron.types import Problem

Split = Literal["prompt", "test", "validation", "train"]
SPLITS: dict[Split, range] = {
    "prompt": range(1, 11),
    "test": range(11, 511),
    "validation": range(511, 601),
    "train": range(601, 975),
}
"""The data set's own division by ``task_id`` (arXiv 2108.07732, section 2.1)."""


def mbpp_problem(record: Mapping[str, Any], number: int) -> Problem:
    """A row of either file. Raises ``ValueError`` or ``SyntaxError``."""
    statement_key = "prompt" if "prompt" in record else "text"
    missing = {"task_id", "code", "test_list", statement_key} - record.keys()
    if missing:
        raise UserError(f"key(s) {', '.join(sorted(missing))} missing")
    given = non_empty_list_field(record["test_list"], "test_list") if record["test_list"] else []
    tests = tuple(_unix(text_field(test, "a test")) for test in given)
    setup = record.get("test_setup_code") or "\n".join(record.get("test_imports") or ())
    code, statement = (_unix(text_field(record[key], key)) for key in ("code", statement_key))
    return Problem(
        id=f"mbpp/{record['task_id']}",
        statement=statement,
        prompter_type="mbppplus",
        selected_uts=tests,
        entry_point=", ".join((entry_point_of(code, tests), *_classes(code, (setup, *tests)))),
        test_setup=_unix(setup),
        reference=code,
    )


def entry_point_of(code: str, tests: Iterable[str]) -> str:
    """The one function that ``code`` defines and every test calls.

    Raises ``ValueError`` if there is none or more than one, ``SyntaxError`` for text that is not
    Python.
    """
    defined = {n.name for n in ast.walk(_parse(code)) if isinstance(n, ast.FunctionDef)}
    called = [_called_names(test) & defined for test in tests]
    common = set.intersection(*called) if called else set()
    if len(common) != 1:
        raise UserError(
            f"{len(common)} functions of the solution are called by every test, expected one"
        )
    return common.pop()


def _classes(code: str, texts: Iterable[str]) -> list[str]:
    """Classes of ``code`` that the tests use, which a program must define as well."""
    used = {
        n.id for text in texts for n in ast.walk(_parse(_unix(text))) if isinstance(n, ast.Name)
    }
    return [n.name for n in _parse(code).body if isinstance(n, ast.ClassDef) and n.name in used]


def _called_names(test: str) -> set[str]:
    calls = (node.func for node in ast.walk(_parse(test)) if isinstance(node, ast.Call))
    return {function.id for function in calls if isinstance(function, ast.Name)}


def _parse(text: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in published strings
        return ast.parse(text)


def _unix(text: str) -> str:
    return text.replace("\r\n", "\n")

"""MBPP: the file of 974 problems (``mbpp.jsonl``) and the hand-verified one
(``sanitized-mbpp.json``).
"""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from ctrl_megatron.data.problems import read_json_lines
from ctrl_megatron.errors import UserError
from ctrl_megatron.types import Problem

Split = Literal["prompt", "test", "validation", "train"]
SPLITS: dict[Split, range] = {
    "prompt": range(1, 11),
    "test": range(11, 511),
    "validation": range(511, 601),
    "train": range(601, 975),
}
"""The data set's own division by ``task_id`` (arXiv 2108.07732, section 2.1)."""


def read_mbpp(path: str | PathLike[str], *, split: Split | None = None) -> list[Problem]:
    """Problems ``mbpp/<task_id>`` in file order, all of them or one split.

    Raises ``ValueError`` naming the file and the place for anything that is not MBPP.
    """
    if split is not None and split not in SPLITS:
        raise UserError(f"unknown MBPP split {split!r}; use {', '.join(SPLITS)}")
    path = Path(path)
    records = read_json_lines(path) if path.suffix == ".jsonl" else _read_json_list(path)
    wanted = range(1, 975) if split is None else SPLITS[split]
    problems = [_problem(record, place) for place, record in records]
    return [p for p in problems if int(p.id.removeprefix("mbpp/")) in wanted]


def _read_json_list(path: Path) -> list[tuple[str, dict[str, Any]]]:
    try:
        records = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise UserError(f"{path} is not a JSON list of problems")
    return [(f"{path}: entry {i}", record) for i, record in enumerate(records)]


def _problem(record: Mapping[str, Any], place: str) -> Problem:
    statement_key = "prompt" if "prompt" in record else "text"
    missing = {"task_id", "code", "test_list", statement_key} - record.keys()
    if missing:
        raise UserError(f"{place}: key(s) {', '.join(sorted(missing))} missing")
    tests = tuple(_unix(test) for test in record["test_list"])
    setup = record.get("test_setup_code") or "\n".join(record.get("test_imports") or ())
    code = _unix(record["code"])
    try:
        name = entry_point_of(code, tests)
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{place}: {error}") from error
    return Problem(
        id=f"mbpp/{record['task_id']}",
        statement=record[statement_key],
        prompter_type="mbppplus",
        selected_uts=tests,
        entry_point=name,
        test_setup=_unix(setup),
        reference=code,
    )


def entry_point_of(code: str, tests: Iterable[str]) -> str:
    """The one function that ``code`` defines and every test calls.

    Raises ``ValueError`` where there is none or more than one, ``SyntaxError`` for text that is not
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


def _called_names(test: str) -> set[str]:
    calls = (node.func for node in ast.walk(_parse(test)) if isinstance(node, ast.Call))
    return {function.id for function in calls if isinstance(function, ast.Name)}


def _parse(text: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # stray escapes in other people's strings
        return ast.parse(text)


def _unix(text: str) -> str:
    return text.replace("\r\n", "\n")

"""Rows in verl's form: ``data_source``, ``prompt`` (messages), ``reward_model`` with its
``ground_truth``, and ``extra_info``. verl's own scripts and Eurus-2-RL-Data write it.

If ``ground_truth`` is the JSON text of ``{"inputs": [...], "outputs": [...]}``, the row is a
programming problem with tests. Any other ``ground_truth`` is left to the reward function.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from ctrl_megatron.errors import UserError
from ctrl_megatron.problems.comparison import STRICT, rule_named
from ctrl_megatron.problems.input_output import problem_of_tests
from ctrl_megatron.problems.long_integers import allow_long_integers, load_long_integer_json
from ctrl_megatron.types import Problem

VERL_COLUMNS = "data_source, prompt and reward_model"
"""The columns that identify the form, for error messages."""
_HOW_TO_ANSWER = re.compile(
    r"\s*Write Python code to solve the problem\. Present the code in\s*"
    r"```python\s*Your code\s*```\s*at the end\.\s*$"
)
"""Eurus appends this to every statement. Our prompts have an instruction of their own for it."""


def is_verl_form(columns: Collection[str]) -> bool:
    """Whether a file with these columns has rows in verl's form, which have no ``id``."""
    return "id" not in columns and "data_source" in columns and "reward_model" in columns


def problem_of_verl_row(record: Mapping[str, Any], name: str) -> Problem | None:
    """The programming problem ``name`` of a row; None if ``ground_truth`` has no tests.

    Raises ``ValueError`` naming the wrong column.
    """
    tests = _tests_of(_ground_truth(record))
    if tests is None:
        return None
    statement = _HOW_TO_ANSWER.sub("", _asked(record.get("prompt"))).strip()
    if not statement:
        raise UserError("column 'prompt' has no message of a user with a content")
    comparison = record.get("comparison") or ""
    try:
        rule_named(comparison or STRICT.name)
    except ValueError as error:
        raise UserError(f"column 'comparison' names no rule: {error}") from error
    try:
        return problem_of_tests(name, statement, tests, comparison=comparison)
    except ValueError as error:
        raise UserError(f"column 'reward_model': ground_truth: {error}") from error


def columns_of_verl_row(record: Mapping[str, Any]) -> dict[str, Any]:
    """The row's columns and those that the trainer adds: an ``id`` derived from the content and,
    if ``ground_truth`` has tests, the columns by which the sandbox judges a program.

    Raises ``ValueError`` naming the wrong column.
    """
    with allow_long_integers():
        text = json.dumps(record, sort_keys=True, default=str)
    content = text.encode(errors="surrogatepass")
    name = f"{data_source_of(record)}/{hashlib.blake2b(content, digest_size=6).hexdigest()}"
    columns: dict[str, Any] = {**record, "id": name}
    problem = problem_of_verl_row(record, name)
    if problem is not None:
        columns |= {
            "problem": problem.statement,
            "prompter_type": problem.prompter_type,
            "selected_uts": problem.selected_uts,
            "entry_point": problem.entry_point,
            "test_setup": problem.test_setup,
            "comparison": problem.comparison,
        }
    return columns


def data_source_of(record: Mapping[str, Any]) -> str:
    """Column ``data_source``. Raises ``ValueError``."""
    source = record.get("data_source")
    if not isinstance(source, str) or not source.strip():
        raise UserError(f"column 'data_source' must be text, is {source!r:.60}")
    return source


def _ground_truth(record: Mapping[str, Any]) -> Any:
    cell = record.get("reward_model")
    if not isinstance(cell, Mapping):
        raise UserError(
            f"column 'reward_model' must be an object with the key ground_truth, is {cell!r:.60}"
        )
    if cell.get("ground_truth") is None:
        raise UserError("column 'reward_model' has no ground_truth")
    return cell["ground_truth"]


def _tests_of(ground_truth: Any) -> Mapping[str, Any] | None:
    """The object with ``inputs`` and ``outputs``, from an object or its JSON text; None for
    others.
    """
    if isinstance(ground_truth, str):
        try:
            ground_truth = load_long_integer_json(ground_truth)
        except (ValueError, RecursionError):
            return None  # a plain-text answer
    if isinstance(ground_truth, Mapping) and {"inputs", "outputs"} <= ground_truth.keys():
        return ground_truth
    return None


def _asked(prompt: Any) -> str:
    """The text of the last user message; a prompt that is a text is one user message."""
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, (list, tuple)) or not all(isinstance(m, Mapping) for m in prompt):
        raise UserError(f"column 'prompt' must be a list of messages, is {prompt!r:.60}")
    asked = [str(m.get("content") or "") for m in prompt if m.get("role") == "user"]
    return asked[-1] if asked else ""

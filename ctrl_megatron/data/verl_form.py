"""Rows in verl's form: ``data_source``, ``prompt`` (messages), ``reward_model`` with its
``ground_truth``, and ``extra_info``. verl's own scripts and Eurus-2-RL-Data write it.

Where ``ground_truth`` is the JSON text of ``{"inputs": [...], "outputs": [...]}``, the row is a
programming problem with tests; otherwise only a reward function knows what it means.
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
from ctrl_megatron.problems.long_integers import loads, long_integers
from ctrl_megatron.types import Problem

VERL_COLUMNS = "data_source, prompt and reward_model"
"""What every row has, in words."""
_HOW_TO_ANSWER = re.compile(
    r"\s*Write Python code to solve the problem\. Present the code in\s*"
    r"```python\s*Your code\s*```\s*at the end\.\s*$"
)
"""Eurus puts it behind every statement; our prompts say it in their own words."""


def is_verl_form(columns: Collection[str]) -> bool:
    """Whether a file with these columns holds rows in verl's form, which have no ``id``."""
    return "id" not in columns and "data_source" in columns and "reward_model" in columns


def row_problem(record: Mapping[str, Any], name: str) -> Problem | None:
    """The programming problem ``name`` of a row; None where ``ground_truth`` holds no tests.

    Raises ``ValueError`` naming the column of what is wrong.
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


def own_columns(record: Mapping[str, Any]) -> dict[str, Any]:
    """The row with the columns that the trainer's rows have beside its own: ``id``, which follows
    from its content, and what judges a program where ``ground_truth`` holds tests.

    Raises ``ValueError`` naming the column of what is wrong.
    """
    with long_integers():
        text = json.dumps(record, sort_keys=True, default=str)
    content = text.encode(errors="surrogatepass")
    name = f"{source_of(record)}/{hashlib.blake2b(content, digest_size=6).hexdigest()}"
    columns: dict[str, Any] = {**record, "id": name}
    problem = row_problem(record, name)
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


def source_of(record: Mapping[str, Any]) -> str:
    """Column ``data_source``. Raises ``ValueError``."""
    source = record.get("data_source")
    if not isinstance(source, str) or not source.strip():
        raise UserError(f"column 'data_source' must be text, is {source!r:.60}")
    return source


def _ground_truth(record: Mapping[str, Any]) -> Any:
    given = record.get("reward_model")
    if not isinstance(given, Mapping):
        raise UserError(
            f"column 'reward_model' must be an object with the key ground_truth, is {given!r:.60}"
        )
    if given.get("ground_truth") is None:
        raise UserError("column 'reward_model' has no ground_truth")
    return given["ground_truth"]


def _tests_of(ground_truth: Any) -> Mapping[str, Any] | None:
    """The object with ``inputs`` and ``outputs``, given as such or as its JSON text."""
    if isinstance(ground_truth, str):
        try:
            ground_truth = loads(ground_truth)
        except (ValueError, RecursionError):
            return None  # an answer in words
    if isinstance(ground_truth, Mapping) and {"inputs", "outputs"} <= ground_truth.keys():
        return ground_truth
    return None


def _asked(prompt: Any) -> str:
    """What the last message of a user says; a text is such a message."""
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, (list, tuple)) or not all(isinstance(m, Mapping) for m in prompt):
        raise UserError(f"column 'prompt' must be a list of messages, is {prompt!r:.60}")
    asked = [str(m.get("content") or "") for m in prompt if m.get("role") == "user"]
    return asked[-1] if asked else ""

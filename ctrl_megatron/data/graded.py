"""Problems from what a data set says of their tests."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ctrl_megatron.sandbox.comparison import RESULT_CHECK
from ctrl_megatron.sandbox.datasets import preambles
from ctrl_megatron.sandbox.datasets.problems import FunctionProblem, GradedProblem, StdioProblem
from ctrl_megatron.sandbox.datasets.stdio import read_input_output
from ctrl_megatron.types import Problem


def problem_of_tests(
    name: str, statement: str, tests: Mapping[str, Any], *, comparison: str = "", **known: Any
) -> Problem:
    """The problem that an object with ``inputs``, ``outputs`` and, for functions, ``fn_name``
    judges, by the rule ``comparison`` or that of APPS. ``known``: ``starter``, ``reference``,
    ``difficulty``, ``seconds``. ValueError.
    """
    graded = read_input_output({"input_output": dict(tests), "comparison": comparison})
    return problem_of(name, statement, graded, **known)


def problem_of(
    name: str,
    statement: str,
    graded: GradedProblem,
    *,
    starter: str = "",
    reference: str = "",
    difficulty: int = 0,
    seconds: float | None = None,
    preamble: str = "",
) -> Problem:
    """``preamble``: the rule whose preamble a function problem needs."""
    limit: dict[str, Any] = {} if seconds is None else {"time_limit": seconds}
    if isinstance(graded, StdioProblem):
        cases = [
            {"input": {"stdin": c.input}, "output": {"stdout": c.output}} for c in graded.cases
        ]
        if graded.seconds is not None and seconds is None:
            limit = {"time_limit": graded.seconds}
        return Problem(
            id=name,
            statement=statement,
            prompter_type="code_contests",
            selected_uts=json.dumps(cases, ensure_ascii=False),
            comparison=graded.rule.name,
            reference=reference,
            difficulty=difficulty,
            **limit,
        )
    assert isinstance(graded, FunctionProblem)
    (function,) = graded.stubs
    method = re.search(r"^class Solution\b", f"{starter}\n{reference}", re.MULTILINE)
    asked = f"{statement.strip()}\n\n{starter.strip()}" if starter.strip() else statement
    return Problem(
        id=name,
        statement=asked,
        prompter_type="mbppplus",
        selected_uts=graded.tests,
        entry_point=f"Solution().{function}" if method else function,
        test_setup=f"{preambles.FUNCTIONS}{RESULT_CHECK}",
        comparison=preamble,
        reference=reference,
        difficulty=difficulty,
        **limit,
    )

"""Tests given as ``inputs`` and ``outputs`` (APPS, TACO, LiveCodeBench, rows in verl's form): stdin
and stdout of a program, or arguments and results of a function ``fn_name``.
"""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ctrl_megatron.problems import preambles
from ctrl_megatron.problems.comparison import APPS, RESULT_CHECK, RESULT_CHECK_NAMES
from ctrl_megatron.problems.fields import json_field, non_empty_list_field, rule_field, text_field
from ctrl_megatron.problems.long_integers import allow_long_integers, load_long_integer_json
from ctrl_megatron.types import Problem


class FunctionCalls(NamedTuple):
    """The tests of a function."""

    name: str
    pairs: list[tuple[list[Any], Any]]
    """The arguments and the expected result of each call."""


def read_cases(record: Mapping[str, Any], where: str) -> FunctionCalls | list[tuple[str, str]]:
    """The calls of function ``fn_name``; without ``fn_name``, (stdin, stdout) of each case.

    The input of a call is a list of arguments, or text with one JSON value per line. ``where``
    names the record in messages. Raises ``ValueError``.
    """
    inputs = non_empty_list_field(record.get("inputs"), f"{where}.inputs")
    outputs = non_empty_list_field(record.get("outputs"), f"{where}.outputs")
    if len(inputs) != len(outputs):
        raise ValueError(f"{where} has {len(inputs)} inputs and {len(outputs)} outputs")
    pairs = [
        (given, f"{where}.inputs[{i}]", wanted, f"{where}.outputs[{i}]")
        for i, (given, wanted) in enumerate(zip(inputs, outputs, strict=True))
    ]
    if not record.get("fn_name"):
        return [(text_field(g, g_at), text_field(w, w_at)) for g, g_at, w, w_at in pairs]
    calls = [
        (_arguments(g, g_at), _result(w, w_at, is_json=isinstance(g, str)))
        for g, g_at, w, w_at in pairs
    ]
    return FunctionCalls(text_field(record["fn_name"], f"{where}.fn_name"), calls)


def has_wrapped_outputs(record: Mapping[str, Any]) -> bool:
    """Whether every output is a list of one item. Such problems of APPS and TACO also accept the
    item itself as the result.
    """
    outputs = record.get("outputs")
    return isinstance(outputs, list) and all(
        isinstance(wanted, list) and len(wanted) == 1 for wanted in outputs
    )


@allow_long_integers()
def asserts_for_calls(
    calls: FunctionCalls, *, or_first: bool, tolerance: tuple[float, float] = (0.0, 0.0)
) -> list[str]:
    """One assert per call; the asserts need ``RESULT_CHECK`` as setup. Tuples equal lists, and
    floats may differ by the larger of ``tolerance`` (absolute, relative).

    With ``or_first`` the first item of an expected list is accepted as well. Raises ``ValueError``
    for a name that no function can have.
    """
    name = calls.name
    if not name.isidentifier() or keyword.iskeyword(name) or name in RESULT_CHECK_NAMES:
        raise ValueError(f"fn_name must be a function's name, got {name[:100]!r}")
    absolute, relative = tolerance
    options = "".join(
        f", {option}={value!r}"
        for option, value in (("absolute", absolute), ("relative", relative), ("first", or_first))
        if value
    )
    return [
        f"assert _matches({name}({', '.join(map(repr, given))}), {wanted!r}{options})"
        for given, wanted in calls.pairs
    ]


def problem_of_tests(
    name: str,
    statement: str,
    tests: Mapping[str, Any],
    *,
    comparison: str = "",
    starter: str = "",
    seconds: float | None = None,
    **known: Any,
) -> Problem:
    """The problem ``name`` with ``tests``: an object with ``inputs``, ``outputs`` and, for
    functions, ``fn_name``. ``comparison`` names the rule, which defaults to that of APPS.
    ``starter`` is the code that an answer begins with, ``seconds`` the time limit of a test,
    ``known`` further fields of ``Problem``. Raises ``ValueError``.
    """
    if seconds is not None:
        known["time_limit"] = seconds
    rule = rule_field({"comparison": comparison}, APPS)
    found = read_cases(tests, "tests")
    if not isinstance(found, FunctionCalls):
        return stdio_problem(name, statement, found, comparison=rule.name, **known)
    asserts = asserts_for_calls(
        found, or_first=has_wrapped_outputs(tests), tolerance=rule.result_tolerance
    )
    return function_problem(name, statement, found.name, asserts, starter=starter, **known)


def stdio_problem(
    name: str, statement: str, cases: Sequence[tuple[str, str]], **known: Any
) -> Problem:
    """A program judged by ``cases`` of stdin and stdout."""
    tests = [{"input": {"stdin": given}, "output": {"stdout": wanted}} for given, wanted in cases]
    return Problem(
        id=name,
        statement=statement,
        prompter_type="code_contests",
        selected_uts=json.dumps(tests, ensure_ascii=False),
        **known,
    )


def function_problem(
    name: str,
    statement: str,
    function: str,
    asserts: Sequence[str],
    *,
    starter: str = "",
    reference: str = "",
    **known: Any,
) -> Problem:
    """A function judged by ``asserts`` from :func:`asserts_for_calls`; a method of ``Solution`` if
    ``starter`` or ``reference`` defines that class.
    """
    method = re.search(r"^class Solution\b", f"{starter}\n{reference}", re.MULTILINE)
    asked = f"{statement.strip()}\n\n{starter.strip()}" if starter.strip() else statement
    return Problem(
        id=name,
        statement=asked,
        prompter_type="mbppplus",
        selected_uts=tuple(asserts),
        entry_point=f"Solution().{function}" if method else function,
        test_setup=f"{preambles.FUNCTIONS}{RESULT_CHECK}",
        reference=reference,
        **known,
    )


def _arguments(given: Any, where: str) -> list[Any]:
    """Arguments of one call: a list, or text with one JSON value per line."""
    if isinstance(given, str):
        lines = [line for line in given.split("\n") if line.strip()]
        values = [json_field(line, where) for line in lines]
    elif isinstance(given, list):
        values = given
    else:
        raise ValueError(f"{where} must be a list of arguments, got {type(given).__name__}")
    return [_integer_keys(value) for value in values]


def _result(wanted: Any, where: str, *, is_json: bool) -> Any:
    """The result of one call. With ``is_json`` text is parsed as JSON if it is valid."""
    if is_json and isinstance(wanted, str):
        try:
            wanted = load_long_integer_json(wanted)
        except RecursionError as error:
            raise ValueError(f"{where} is nested too deeply") from error
        except ValueError:
            return wanted
    if isinstance(wanted, list):
        return [_integer_keys(item) for item in wanted]
    return _integer_keys(wanted)


def _integer_keys(value: Any) -> Any:
    """JSON has no integer keys: an object whose keys all are integers is meant to have them."""
    if not isinstance(value, dict) or not value:
        return value
    try:
        return {int(key): item for key, item in value.items()}
    except (ValueError, TypeError):
        return value

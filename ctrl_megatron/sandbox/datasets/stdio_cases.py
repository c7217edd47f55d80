"""stdin/stdout problems: CommonOJ, CodeContests, APPS and TACO."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

from ctrl_megatron.sandbox.datasets.functions import calls_problem
from ctrl_megatron.sandbox.datasets.problems import (
    Case,
    FunctionProblem,
    StdioProblem,
    list_field,
    object_field,
    read_checker,
    text_field,
)

_CONTESTS_SETS = ("public_tests", "private_tests", "generated_tests")
_TEST = "provided_data.test"


def read_common_oj(data: Mapping[str, Any]) -> StdioProblem:
    """``test``: cases of ``{input: {stdin}, output: {stdout}}``, as a list or its JSON text; may
    have a ``checker``. Raises ``ValueError``.
    """
    tests = parsed(data.get("test"), _TEST)
    if not isinstance(tests, list):
        raise ValueError(f"{_TEST} is not a list of stdin/stdout cases: {type(tests).__name__}")
    cases = tuple(_oj_case(item, i) for i, item in enumerate(list_field(tests, _TEST)))
    return StdioProblem(cases=cases, checker=read_checker(data))


def read_code_contests(data: Mapping[str, Any]) -> StdioProblem:
    """``public_tests``, ``private_tests`` and ``generated_tests``, each ``{input: [text], output:
    [text]}`` or cases ``[{input, output}]``, judged in this order; ``time_limit`` in seconds or
    ``{seconds, nanos}``; may have a ``checker``. Raises ``ValueError``.
    """
    cases: list[Case] = []
    for name in _CONTESTS_SETS:
        given = parsed(data.get(name) or [], f"provided_data.{name}")
        cases += _contests_cases(given, name)
    if not cases:
        raise ValueError(f"provided_data.{', '.join(_CONTESTS_SETS)}: empty, nothing to judge")
    limit = _contests_seconds(data.get("time_limit"))
    return StdioProblem(cases=tuple(cases), checker=read_checker(data), seconds=limit)


def read_input_output(data: Mapping[str, Any]) -> StdioProblem | FunctionProblem:
    """``input_output`` of APPS and TACO, an object or its JSON text: ``inputs``, ``outputs`` and,
    for function problems, ``fn_name``. Raises ``ValueError``.
    """
    where = "provided_data.input_output"
    record = object_field(parsed(data.get("input_output"), where), where)
    return input_output_problem(record, where, checker_of=data)


def input_output_problem(
    record: Mapping[str, Any],
    where: str,
    *,
    checker_of: Mapping[str, Any] | None = None,
    or_first: bool = True,
) -> StdioProblem | FunctionProblem:
    """The problem of an object with ``inputs``, ``outputs`` and perhaps ``fn_name``.

    Inputs of a function are lists of arguments, or text with one JSON value per line. Raises
    ``ValueError``.
    """
    inputs = list_field(record.get("inputs"), f"{where}.inputs")
    outputs = list_field(record.get("outputs"), f"{where}.outputs")
    if len(inputs) != len(outputs):
        raise ValueError(f"{where} has {len(inputs)} inputs and {len(outputs)} outputs")
    name = record.get("fn_name")
    pairs = list(zip(inputs, outputs, strict=True))
    if name:
        calls = [
            (
                arguments(given, f"{where}.inputs[{i}]"),
                result(wanted, f"{where}.outputs[{i}]", is_json=isinstance(given, str)),
            )
            for i, (given, wanted) in enumerate(pairs)
        ]
        return calls_problem(text_field(name, f"{where}.fn_name"), calls, or_first=or_first)
    cases = tuple(
        Case(
            input=text_field(given, f"{where}.inputs[{i}]"),
            output=text_field(wanted, f"{where}.outputs[{i}]"),
        )
        for i, (given, wanted) in enumerate(pairs)
    )
    return StdioProblem(cases=cases, checker=read_checker(checker_of or {}))


def arguments(given: Any, where: str) -> list[Any]:
    """Arguments of one call: a list, or text with one JSON value per line."""
    if isinstance(given, str):
        lines = [line for line in given.split("\n") if line.strip()]
        values = [parsed(line, where) for line in lines]
    elif isinstance(given, list):
        values = given
    else:
        raise ValueError(f"{where} must be a list of arguments, got {type(given).__name__}")
    return [_integer_keys(value) for value in values]


def result(wanted: Any, where: str, *, is_json: bool) -> Any:
    """A call's result; with ``is_json`` text stands for what it says as JSON where it parses."""
    if is_json and isinstance(wanted, str):
        try:
            wanted = json.loads(wanted)
        except RecursionError as error:
            raise ValueError(f"{where} is nested too deeply") from error
        except ValueError:
            return wanted
    if isinstance(wanted, list):
        return [_integer_keys(item) for item in wanted]
    return _integer_keys(wanted)


def parsed(value: Any, where: str) -> Any:
    """``value``, or what its text says as JSON. Raises ``ValueError``."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not valid JSON: {error}") from error


def _oj_case(item: Any, index: int) -> Case:
    where = f"{_TEST}[{index}]"
    record = item if isinstance(item, dict) else {}
    given, wanted = record.get("input"), record.get("output")
    if not isinstance(given, dict) or not isinstance(wanted, dict):
        raise ValueError(
            f"{where}: {_TEST} is not a list of stdin/stdout cases: each needs input.stdin and "
            "output.stdout"
        )
    stdin, stdout = given.get("stdin", ""), wanted.get("stdout")
    return Case(
        input=text_field(stdin, f"{where}.input.stdin"),
        output=text_field(stdout, f"{where}.output.stdout"),
    )


def _contests_cases(given: Any, name: str) -> list[Case]:
    where = f"provided_data.{name}"
    if isinstance(given, dict):
        inputs, outputs = given.get("input") or [], given.get("output") or []
        if not isinstance(inputs, list) or not isinstance(outputs, list):
            raise ValueError(f"{where} needs lists input and output")
        if len(inputs) != len(outputs):
            raise ValueError(f"{where} has {len(inputs)} inputs and {len(outputs)} outputs")
        pairs = list(zip_longest(inputs, outputs))
    elif isinstance(given, list):
        items = [object_field(item, f"{where}[{i}]") for i, item in enumerate(given)]
        pairs = [(item.get("input"), item.get("output")) for item in items]
    else:
        raise ValueError(f"{where} must be an object or a list, got {type(given).__name__}")
    return [
        Case(
            input=text_field(stdin, f"{where}.input[{i}]"),
            output=text_field(stdout, f"{where}.output[{i}]"),
            labels={"set": name.removesuffix("_tests")},
        )
        for i, (stdin, stdout) in enumerate(pairs)
    ]


def _contests_seconds(limit: Any) -> float | None:
    if isinstance(limit, dict):
        parts = limit.get("seconds") or 0, limit.get("nanos") or 0
        if not all(isinstance(part, (int, float)) for part in parts):
            raise ValueError("provided_data.time_limit needs numbers seconds and nanos")
        limit = parts[0] + parts[1] * 1e-9
    if limit is None:
        return None
    if isinstance(limit, bool) or not isinstance(limit, (int, float)):
        raise ValueError(f"provided_data.time_limit must be seconds, got {limit!r}"[:200])
    return float(limit) if limit > 0 else None


def _integer_keys(value: Any) -> Any:
    """JSON has no integer keys: an object whose keys all are integers is meant to have them."""
    if not isinstance(value, dict) or not value:
        return value
    try:
        return {int(key): item for key, item in value.items()}
    except (ValueError, TypeError):
        return value

"""LiveCodeBench: SandboxFusion's ``test`` payload and the benchmark's own rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ctrl_megatron.sandbox.datasets.functions import PRELUDE
from ctrl_megatron.sandbox.datasets.payload import read_payload
from ctrl_megatron.sandbox.datasets.problems import (
    FunctionProblem,
    StdioProblem,
    list_field,
    object_field,
)
from ctrl_megatron.sandbox.datasets.stdio_cases import input_output_problem, parsed

SECONDS = 6.0
"""Per test, where the request names none."""
_CASES = ("public_test_cases", "private_test_cases")


def read_live_code_bench(data: Mapping[str, Any]) -> FunctionProblem | StdioProblem:
    """``test`` (JSON, or base64 of zlib of JSON or a pickle) that holds ``inputs``, ``outputs`` and
    ``fn_name``, itself or below ``input_output``; or ``public_test_cases`` and
    ``private_test_cases`` with ``metadata.func_name``.

    Function problems call a function or a method of ``Solution``; one verdict answers for all
    tests. Raises ``ValueError``.
    """
    if data.get("test") is not None:
        record, where = _payload(data["test"]), "provided_data.test"
    else:
        record, where = _from_cases(data), "provided_data"
    problem = input_output_problem(record, where, or_first=False)
    if isinstance(problem, StdioProblem):
        return replace(problem, prelude=PRELUDE, single=True, seconds=SECONDS)
    return replace(problem, single=True, seconds=SECONDS)


def _payload(test: Any) -> dict[str, Any]:
    where = "provided_data.test"
    value = read_payload(test, where) if isinstance(test, str) else test
    if isinstance(value, str):
        value = parsed(value, where)
    if isinstance(value, list):
        return _rows(value, where, None)
    record = object_field(value, where)
    if "input_output" in record:
        where = f"{where}.input_output"
        return object_field(parsed(record["input_output"], where), where)
    return record


def _from_cases(data: Mapping[str, Any]) -> dict[str, Any]:
    rows: list[Any] = []
    for name in _CASES:
        given = data.get(name) or []
        value = read_payload(given, f"provided_data.{name}") if isinstance(given, str) else given
        # The benchmark pickles a JSON text.
        value = parsed(value, f"provided_data.{name}") if isinstance(value, str) else value
        if not isinstance(value, list):
            raise ValueError(f"provided_data.{name} must hold a list, got {type(value).__name__}")
        rows += value
    if not rows:
        raise ValueError(f"provided_data needs test, or {' and '.join(_CASES)}")
    metadata = parsed(data.get("metadata") or {}, "provided_data.metadata")
    name = object_field(metadata, "provided_data.metadata").get("func_name")
    return _rows(rows, "provided_data", name)


def _rows(rows: list[Any], where: str, name: Any) -> dict[str, Any]:
    cases = [
        object_field(row, f"{where}: case {i}") for i, row in enumerate(list_field(rows, where))
    ]
    kinds = {str(case.get("testtype", "stdin")) for case in cases}
    if len(kinds) != 1 or not kinds <= {"stdin", "functional"}:
        raise ValueError(f"{where}: testtype must be stdin or functional, one for all: {kinds}")
    if kinds == {"functional"} and not name:
        raise ValueError(f"{where}: functional cases need provided_data.metadata.func_name")
    return {
        "inputs": [case.get("input") for case in cases],
        "outputs": [case.get("output") for case in cases],
        "fn_name": name if kinds == {"functional"} else None,
    }

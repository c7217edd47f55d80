"""Reads problems that are judged by output (CommonOJ, CodeContests, APPS, TACO, IOI), and
LiveCodeBench's, which are these or functions. In any record ``comparison`` names the rule for
outputs and for results of functions; its default depends on the kind of the data set.
``ignore_case``, in any record except IOI's, compares outputs without regard to case.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ctrl_megatron.problems import preambles
from ctrl_megatron.problems.comparison import (
    APPS,
    CODE_CONTESTS,
    LIVE_CODE_BENCH,
    STRICT,
    TOKENS,
    ComparisonRule,
)
from ctrl_megatron.problems.fields import (
    flag_field,
    json_field,
    non_empty_list_field,
    object_field,
    positive_field,
    rule_field,
    text_field,
)
from ctrl_megatron.problems.input_output import FunctionCalls, has_wrapped_outputs, read_cases
from ctrl_megatron.sandbox.datasets.functions import calls_problem
from ctrl_megatron.sandbox.datasets.payload import read_payload
from ctrl_megatron.sandbox.datasets.problems import (
    FunctionProblem,
    ScoredProblem,
    ScoredSubtask,
    StdioCase,
    StdioProblem,
    read_checker,
)
from ctrl_megatron.sandbox.jail import files

SECONDS = 6.0
"""LiveCodeBench's time limit per test, unless the request names one."""
_CASES = ("public_test_cases", "private_test_cases")
_SUBTASKS = "provided_data.subtasks"
_CONTESTS_SETS = ("public_tests", "private_tests", "generated_tests")
_TEST = "provided_data.test"


def read_common_oj(data: Mapping[str, Any]) -> StdioProblem:
    """Read ``test``: cases ``{input: {stdin}, output: {stdout}}`` as a list or its JSON text, with
    an optional ``checker``. With LiveCodeBench's rule the program gets that benchmark's preamble.
    Raises ``ValueError``.
    """
    tests = json_field(data.get("test"), _TEST)
    if not isinstance(tests, list):
        raise ValueError(f"{_TEST} is not a list of stdin/stdout cases: {type(tests).__name__}")
    cases = tuple(_oj_case(item, i) for i, item in enumerate(non_empty_list_field(tests, _TEST)))
    rule = rule_field(data, STRICT)
    return StdioProblem(
        cases=cases,
        checker=read_checker(data),
        prelude=preambles.LIVE_CODE_BENCH if rule is LIVE_CODE_BENCH else "",
        rule=rule,
        ignore_case=flag_field(data, "ignore_case"),
    )


def read_code_contests(data: Mapping[str, Any]) -> StdioProblem:
    """Read ``public_tests``, ``private_tests`` and ``generated_tests``, each ``{input: [text],
    output: [text]}`` or cases ``[{input, output}]``, judged in this order; ``time_limit`` in
    seconds or ``{seconds, nanos}``; and an optional ``checker``. Raises ``ValueError``.
    """
    cases: list[StdioCase] = []
    for name in _CONTESTS_SETS:
        given = json_field(data.get(name) or [], f"provided_data.{name}")
        cases += _contests_cases(given, name)
    if not cases:
        raise ValueError(f"provided_data.{', '.join(_CONTESTS_SETS)}: empty, nothing to judge")
    limit = _contests_seconds(data.get("time_limit"))
    return StdioProblem(
        cases=tuple(cases),
        checker=read_checker(data),
        rule=rule_field(data, CODE_CONTESTS),
        ignore_case=flag_field(data, "ignore_case"),
        seconds=limit,
    )


def read_input_output(data: Mapping[str, Any]) -> StdioProblem | FunctionProblem:
    """Read ``input_output`` of APPS and TACO, an object or its JSON text: ``inputs``, ``outputs``
    and, for function problems, ``fn_name``.

    If every output is a list of one item, as in some of their problems, that item alone is accepted
    as well. Raises ``ValueError``.
    """
    where = "provided_data.input_output"
    record = object_field(json_field(data.get("input_output"), where), where)
    first = has_wrapped_outputs(record) or flag_field(data, "first_of_list")
    return input_output_problem(record, where, data, rule_field(data, APPS), or_first=first)


def input_output_problem(
    record: Mapping[str, Any],
    where: str,
    data: Mapping[str, Any],
    rule: ComparisonRule,
    *,
    or_first: bool = False,
) -> StdioProblem | FunctionProblem:
    """The problem of an object ``record`` in ``data`` with ``inputs``, ``outputs`` and optionally
    ``fn_name``.

    Inputs of a function are lists of arguments, or text with one JSON value per line. With
    ``or_first`` the first item of an expected list is accepted as well. Raises ``ValueError``.
    """
    tests = read_cases(record, where)
    if isinstance(tests, FunctionCalls):
        return calls_problem(tests, or_first=or_first, tolerance=rule.result_tolerance)
    cases = tuple(StdioCase(input=given, output=wanted) for given, wanted in tests)
    return StdioProblem(
        cases=cases,
        checker=read_checker(data),
        rule=rule,
        ignore_case=flag_field(data, "ignore_case"),
    )


def _oj_case(item: Any, index: int) -> StdioCase:
    where = f"{_TEST}[{index}]"
    record = item if isinstance(item, dict) else {}
    given, wanted = record.get("input"), record.get("output")
    if not isinstance(given, dict) or not isinstance(wanted, dict):
        raise ValueError(
            f"{where}: {_TEST} is not a list of stdin/stdout cases: each needs input.stdin and "
            "output.stdout"
        )
    stdin, stdout = given.get("stdin", ""), wanted.get("stdout")
    return _case(stdin, f"{where}.input.stdin", stdout, f"{where}.output.stdout")


def _case(stdin: Any, stdin_at: str, stdout: Any, stdout_at: str, **labels: Any) -> StdioCase:
    given, wanted = text_field(stdin, stdin_at), text_field(stdout, stdout_at)
    return StdioCase(input=given, output=wanted, labels=labels)


def _contests_cases(given: Any, name: str) -> list[StdioCase]:
    where = f"provided_data.{name}"
    if isinstance(given, dict):
        inputs, outputs = given.get("input") or [], given.get("output") or []
        if not isinstance(inputs, list) or not isinstance(outputs, list):
            raise ValueError(f"{where} needs lists input and output")
        if len(inputs) != len(outputs):
            raise ValueError(f"{where} has {len(inputs)} inputs and {len(outputs)} outputs")
        pairs = list(zip(inputs, outputs, strict=True))
    elif isinstance(given, list):
        items = [object_field(item, f"{where}[{i}]") for i, item in enumerate(given)]
        pairs = [(item.get("input"), item.get("output")) for item in items]
    else:
        raise ValueError(f"{where} must be an object or a list, got {type(given).__name__}")
    label = name.removesuffix("_tests")
    return [
        _case(stdin, f"{where}.input[{i}]", stdout, f"{where}.output[{i}]", set=label)
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


def read_ioi(data: Mapping[str, Any]) -> ScoredProblem:
    """Read ``tests``: ``{name: {input, output}}``; ``subtasks``: ``[{name, points, tests:
    [name]}]``; optionally ``checker``, ``grader_files`` (C++: file name -> text) and ``time_limit``
    in seconds.

    Raises ``ValueError``.
    """
    where = "provided_data.tests"
    cases: dict[str, StdioCase] = {}
    for name, record in object_field(json_field(data.get("tests"), where), where).items():
        key, at = text_field(name, f"a name in {where}"), f"{where}.{name}"
        test = object_field(record, at)
        stdin, stdout = test.get("input", ""), test.get("output", "")
        cases[key] = _case(stdin, f"{at}.input", stdout, f"{at}.output")
    given = non_empty_list_field(json_field(data.get("subtasks"), _SUBTASKS), _SUBTASKS)
    limit = data.get("time_limit")
    return ScoredProblem(
        cases=cases,
        subtasks=tuple(_subtask(record, i, cases) for i, record in enumerate(given)),
        checker=read_checker(data),
        rule=rule_field(data, TOKENS),
        sources=_grader_sources(data.get("grader_files") or {}),
        seconds=None if limit is None else positive_field(limit, "provided_data.time_limit"),
    )


def _subtask(record: Any, index: int, cases: Mapping[str, StdioCase]) -> ScoredSubtask:
    where = f"{_SUBTASKS}[{index}]"
    given = object_field(record, where)
    names = non_empty_list_field(given.get("tests"), f"{where}.tests")
    unknown = [str(name) for name in names if not isinstance(name, str) or name not in cases]
    if unknown:
        raise ValueError(f"{where}.tests names no test of provided_data.tests: {unknown[0][:100]}")
    return ScoredSubtask(
        name=text_field(given.get("name", str(index + 1)), f"{where}.name"),
        points=positive_field(given.get("points"), f"{where}.points"),
        tests=tuple(names),
    )


def _grader_sources(given: Any) -> dict[str, str]:
    where = "provided_data.grader_files"
    record = object_field(json_field(given, where), where)
    sources = {
        files.relative_private_path(name): text_field(text, f"{where}.{name}")
        for name, text in record.items()
    }
    if "main.cpp" in sources:
        raise ValueError(f"{where} may not contain main.cpp: that is the program's own name")
    return sources


def read_live_code_bench(data: Mapping[str, Any]) -> FunctionProblem | StdioProblem:
    """Read ``test`` (JSON, or base64 of zlib of JSON or a pickle), which contains ``inputs``,
    ``outputs`` and ``fn_name``, directly or in ``input_output``; or ``public_test_cases`` and
    ``private_test_cases`` with ``metadata.func_name``.

    Function problems call a function or a method of ``Solution``. Programs and functions get the
    benchmark's preamble. One verdict answers for all tests. Raises ``ValueError``.
    """
    if data.get("test") is not None:
        record, where = _payload(data["test"]), _TEST
    else:
        record, where = _from_cases(data), "provided_data"
    problem = input_output_problem(record, where, {}, rule_field(data, LIVE_CODE_BENCH))
    return replace(problem, prelude=preambles.LIVE_CODE_BENCH, single=True, seconds=SECONDS)


def _payload(test: Any) -> dict[str, Any]:
    value = _unpacked(test, _TEST)
    if isinstance(value, list):
        return _rows(value, _TEST, None)
    record = object_field(value, _TEST)
    if "input_output" in record:
        where = f"{_TEST}.input_output"
        return object_field(json_field(record["input_output"], where), where)
    return record


def _unpacked(given: Any, where: str) -> Any:
    # The benchmark pickles a JSON text.
    return json_field(read_payload(given, where) if isinstance(given, str) else given, where)


def _from_cases(data: Mapping[str, Any]) -> dict[str, Any]:
    rows: list[Any] = []
    for name in _CASES:
        value = _unpacked(data.get(name) or [], f"provided_data.{name}")
        if not isinstance(value, list):
            raise ValueError(
                f"provided_data.{name} must contain a list, got {type(value).__name__}"
            )
        rows += value
    if not rows:
        raise ValueError(f"provided_data needs test, or {' and '.join(_CASES)}")
    metadata = json_field(data.get("metadata") or {}, "provided_data.metadata")
    name = object_field(metadata, "provided_data.metadata").get("func_name")
    return _rows(rows, "provided_data", name)


def _rows(rows: list[Any], where: str, name: Any) -> dict[str, Any]:
    cases = [
        object_field(row, f"{where}: case {i}")
        for i, row in enumerate(non_empty_list_field(rows, where))
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

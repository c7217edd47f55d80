"""The tests of one problem, in the forms that rows and problem files have."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from ctrl_megatron.errors import UserError
from ctrl_megatron.problems.comparison import LIVE_CODE_BENCH, STRICT, rule_named
from ctrl_megatron.problems.long_integers import allow_long_integers, load_long_integer_json
from ctrl_megatron.types import PrompterType

DEFAULT_TIME_LIMIT = 10.0
"""Seconds of processor time per test where neither the row nor the reader's options set a limit."""


def decode_tests(kind: PrompterType, value: object) -> tuple[str, ...] | str:
    """The tests of a problem, from the value of a file.

    A function problem has a list of asserts, the JSON text of such a list, or a string that is one
    test program. Other problems have a JSON list of cases: as a string, as a list of one string,
    or as a list of objects. In a case of ``code_contests``, ``input`` and ``output`` may be texts.
    Raises ``ValueError`` with the reason.
    """
    if isinstance(value, (list, tuple)) and len(value) == 1 and isinstance(value[0], str):
        value = value[0]
    if kind == "mbppplus":
        if isinstance(value, str):
            # A JSON list is valid Python as well: as a test, it would pass for every program.
            try:
                listed = load_long_integer_json(value)
            except (json.JSONDecodeError, RecursionError):
                listed = None
            value = listed if isinstance(listed, list) else [value]
        if not isinstance(value, (list, tuple)) or not value:
            raise UserError("must be a non-empty list of asserts")
        if not all(isinstance(test, str) and test.strip() for test in value):
            raise UserError("has an entry that is empty or not text")
        return tuple(value)
    if isinstance(value, (list, tuple)) and value and all(isinstance(c, dict) for c in value):
        with allow_long_integers():
            value = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, str):
        raise UserError("must be the JSON text of a list of cases (a string, or a list of one)")
    try:
        cases = load_long_integer_json(value)
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"is not JSON: {error}") from error
    # Without a test, every program would pass.
    if not isinstance(cases, list) or not cases or not all(cases):
        raise UserError("must be a non-empty JSON list of cases")
    if kind != "code_contests":
        return value
    with allow_long_integers():
        spelled = [_spelled(case, number) for number, case in enumerate(cases, start=1)]
        return value if spelled == cases else json.dumps(spelled, ensure_ascii=False)


def _spelled(case: object, number: int) -> dict[str, Any]:
    """A case of stdin and stdout as the sandbox reads it."""
    record = dict(case) if isinstance(case, Mapping) else {}
    for name, stream in (("input", "stdin"), ("output", "stdout")):
        if _is_text(record.get(name)):
            record[name] = {stream: record[name]}
        given = record.get(name)
        # stdin may be omitted; it is empty then.
        least = {} if name == "output" else {stream: ""}
        if not isinstance(given, Mapping) or not _is_text({**least, **given}.get(stream)):
            raise UserError(
                f"case {number} must be an object with the texts input.stdin and output.stdout, or "
                f"with the texts input and output, is {abbreviate(json.dumps(case))}"
            )
    return record


def _is_text(value: object) -> bool:
    """Whether ``value`` is a text, or a list of lines, that UTF-8 can encode."""
    lines = value if isinstance(value, list) else [value]
    if not all(isinstance(line, str) for line in lines):
        return False
    try:
        "".join(cast("list[str]", lines)).encode()
    except UnicodeEncodeError:
        return False
    return True


def function_record(
    tests: Sequence[str], setup: str, entry_point: str, statement: str
) -> dict[str, Any]:
    """The record in which the sandbox reads the asserts of a function problem. ``entry_point`` may
    be several names, separated by commas.
    """
    names = entry_point.split(", ")
    return {
        "test_list": list(tests),
        "test_setup_code": setup,
        "entry_point": names if len(names) > 1 else names[0],
        # HumanEval's statements are the beginning of a program, which answers rely on.
        "prompt": statement,
    }


def comparison_complaint(kind: PrompterType, comparison: str) -> str:
    """Why the rule ``comparison`` does not fit a problem of this kind; empty if it fits."""
    try:
        rule = rule_named(comparison) if comparison else STRICT
    except ValueError as error:
        return f"names no rule: {error}"
    if kind == "mbppplus" and rule not in (STRICT, LIVE_CODE_BENCH):
        return f"is {comparison!r}, but asserts say themselves what is equal; leave it empty"
    return ""


def abbreviate(value: object) -> str:
    """The first 60 characters of a wrong value, for an error message."""
    return "missing or null" if value is None else f"{str(value)[:60]!r}"

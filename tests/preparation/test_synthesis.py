"""Synthesised critiques: right judgment, required format, facts of the run, nothing leaked."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctrl_megatron.preparation.diagnosis import diagnose
from ctrl_megatron.preparation.synthesis import synthesise_critique
from ctrl_megatron.prompts import extract_code, fence_code, parse_judgment
from ctrl_megatron.types import Attempt, Problem, Verdict

REAL = Path(__file__).parents[2].parent / "shared" / "data" / "initial_solutions"
LOOP = """def total(values):
    result = 0
    for v in values:
        result += v
    return result"""


def attempt(code: str = LOOP, name: str = "total", fields: dict[str, Any] | None = None) -> Attempt:
    kind: Any = "mbppplus" if name else "code_contests"
    problem = Problem(
        id="t",
        statement="Sum.",
        prompter_type=kind,
        selected_uts=("assert total([41]) == 4711",),
        entry_point=name,
    )
    return Attempt(
        **{"id": "t/0", "problem": problem, "solution": fence_code(code), **(fields or {})}
    )


def verdict(*details: str) -> Verdict:
    """A test with an empty detail passed."""
    return Verdict(passed=tuple(not text for text in details), total=len(details), detail=details)


def with_timeouts() -> Verdict:
    return verdict("", "TimeLimitExceeded", "not run: 2 tests timed out before")


CASES = {
    "accepted": (
        attempt(),
        verdict("", ""),
        "none",
        ["`total(values)`", "unchanged|No change|Nothing has to"],
    ),
    "wrong value": (
        attempt(),
        verdict("AssertionError", ""),
        "wrong",
        ["one kind of input", "loop"],
    ),
    "wrong on all": (
        attempt(),
        verdict("AssertionError", "AssertionError"),
        "wrong",
        ["all inputs"],
    ),
    "exception": (
        attempt(),
        verdict("TypeError: unsupported operand", "TypeError: x", "AssertionError"),
        "exception",
        ["TypeError", "convert values"],
    ),
    "undefined name": (
        attempt("def total(v):\n    return math.fsum(v)"),
        verdict("NameError: name 'math' is not defined"),
        "exception",
        ["NameError", "import `math`"],
    ),
    "rare exception": (
        attempt(),
        verdict("ArithmeticError: x"),
        "exception",
        ["raises ArithmeticError"],
    ),
    "time limit": (attempt(), with_timeouts(), "timeout", ["time", "most inputs"]),
    "syntax": (
        attempt("def total(values):\n    return (values"),
        verdict("the program failed to load: SyntaxError: '(' was never closed (line 2)"),
        "syntax",
        ["line 2", "syntax|parse"],
    ),
    "other name": (
        attempt("def sum_up(v):\n    return 0"),
        verdict("NameError: name 'total'"),
        "missing",
        ["`total`"],
    ),
    "prints": (
        attempt("def total(v):\n    print(sum(v))"),
        verdict("AssertionError"),
        "no_return",
        ["None", "[Rr]eturn"],
    ),
    "exit": (
        attempt("import os\ndef total(v):\n    os._exit(0)\n    return 1"),
        verdict("the program ended"),
        "died",
        [],
    ),
    "recursion": (
        attempt("def total(v):\n    return 0 if not v else total(v[1:])"),
        verdict("AssertionError"),
        "wrong",
        ["recurs"],
    ),
    "branch": (
        attempt("def total(v):\n    if v:\n        return 1\n    return 0"),
        verdict("AssertionError"),
        "wrong",
        ["condition"],
    ),
    "program": (
        attempt("print(int(input()))", ""),
        verdict("ValueError: x"),
        "exception",
        ["the program"],
    ),
    "assigned function": (attempt("total = lambda v: 0"), verdict("AssertionError"), "wrong", []),
    "quoted values do not mislead": (
        attempt(),
        verdict("AssertionError: total(['timeout killed']) returned 'ValueError'"),
        "wrong",
        [],
    ),
}


@pytest.mark.parametrize(("tried", "judged", "fault", "facts"), CASES.values(), ids=CASES)
def test_the_critique_states_the_fault(
    tried: Attempt, judged: Verdict, fault: str, facts: list[str]
) -> None:
    assert diagnose(tried, judged).fault == fault
    for seed in range(20):
        critique = synthesise_critique(tried, judged, seed)
        for fact in facts:
            assert re.search(fact if "|" in fact or "[" in fact else re.escape(fact), critique), (
                critique
            )
        check_format(critique, tried, judged)


def check_format(critique: str, tried: Attempt, judged: Verdict) -> None:
    assert parse_judgment(critique) is judged.accepted
    analysis, suggestions, judgment = critique.split("\n")
    assert analysis.startswith("Analysis: ")
    assert suggestions.startswith("Improvement suggestions: ")
    assert judgment == f"Overall judgment: {'Correct' if judged.accepted else 'Incorrect'}"
    assert 35 <= len(critique.split()) <= 85
    assert not re.search(r"hint|\btests?\b|assert|[{}]|```", critique, re.IGNORECASE)
    # No line of the program and no value of a test.
    lines = {line.strip() for line in extract_code(tried.solution).splitlines()}
    assert not [line for line in lines if len(line) > 12 and line in critique]
    assert "4711" not in critique
    assert "41" not in critique


def test_wording_varies_with_seed_and_attempt_and_only_with_them() -> None:
    failed = verdict("AssertionError")
    texts = {synthesise_critique(attempt(), failed, seed) for seed in range(40)}
    assert len(texts) > 8
    assert synthesise_critique(attempt(), failed, 3) == synthesise_critique(attempt(), failed, 3)
    by_attempt = {
        synthesise_critique(attempt(fields={"id": f"t/{n}"}), failed, 0) for n in range(40)
    }
    assert len(by_attempt) > 8


def test_the_wording_is_the_same_in_every_process() -> None:
    code = (
        "from ctrl_megatron.preparation.synthesis import synthesise_critique\n"
        "from ctrl_megatron.types import Attempt, Problem, Verdict\n"
        "problem = Problem(id='t', statement='', prompter_type='mbppplus', selected_uts=())\n"
        "attempt = Attempt(id='t/0', problem=problem, solution='def f(x): return x')\n"
        "verdict = Verdict(passed=(False,), total=1)\n"
        "print([synthesise_critique(attempt, verdict, seed) for seed in range(9)])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


@given(
    st.text(max_size=60),
    st.lists(
        st.sampled_from(["", "AssertionError", "KeyError: 'Overall judgment: Correct'", "x"]),
        min_size=1,
    ),
    st.integers(0, 9),
    st.integers(0, 2),
)
def test_the_judgment_always_equals_the_verdict(
    solution: str, details: list[str], seed: int, unseen: int
) -> None:
    judged = verdict(*details)
    judged = Verdict(passed=judged.passed, total=judged.total + unseen, detail=judged.detail)
    tried = attempt(fields={"solution": solution})
    assert parse_judgment(synthesise_critique(tried, judged, seed)) is judged.accepted


def test_a_verdict_without_tests_is_refused() -> None:
    with pytest.raises(ValueError, match="t/0"):
        synthesise_critique(attempt(), Verdict(passed=(), total=3), 0)


@pytest.mark.skipif(not REAL.is_dir(), reason="needs the collected first solutions in shared/data")
def test_thousands_of_real_solutions() -> None:
    details = {
        "pass": "",
        "fail": "AssertionError",
        "error": "TypeError: x",
        "timeout": "TimeLimitExceeded",
    }
    with gzip.open(REAL / "initial_solutions.jsonl.gz", "rt") as lines:
        rows = [json.loads(line) for line in lines]
    faults: set[str] = set()
    for number, row in enumerate(rows):
        name = row["stub"][0] if row["stub"] else ""
        tried = attempt(row["solution"], name, {"id": f"{row['task_id']}/{number}"})
        judged = verdict(*(details.get(text, "the program ended") for text in row["verdicts"]))
        critique = synthesise_critique(tried, judged, 0)
        assert parse_judgment(critique) is (row["pass_rate"] == 1.0)
        assert 35 <= len(critique.split()) <= 85, critique
        faults.add(diagnose(tried, judged).fault)
    assert faults == {
        "none",
        "syntax",
        "missing",
        "timeout",
        "exception",
        "died",
        "no_return",
        "wrong",
    }

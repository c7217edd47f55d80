"""Programs that people and models wrote become rows: tidied, held out, with their one edit."""

from __future__ import annotations

import ast
import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctrl_megatron.data.rows import read_rows
from ctrl_megatron.errors import UserError
from ctrl_megatron.preparation.mutations import count_occurrences, mutations, smallest_edit
from ctrl_megatron.preparation.problem_files import read_problems
from ctrl_megatron.prompts import fence_code
from ctrl_megatron.types import Attempt, Verdict
from examples.study_smollm2 import prepare_real_faults
from examples.study_smollm2.real_faults import (
    code_of,
    known_faults,
    mutants_of,
    read_programs,
    tidy,
    with_references,
)

REFERENCES = [
    p.reference.strip()
    for p in read_problems(Path(__file__).parents[2] / "examples/problems")
    if p.difficulty <= 2 and p.reference.strip()
]


@given(st.sampled_from(REFERENCES), st.integers(0, 10**6))
def test_a_mutation_is_named_by_an_edit_that_undoes_it(right: str, choice: int) -> None:
    every = mutations(right)
    if every:
        mutation = every[choice % len(every)]
        edit = smallest_edit(right, mutation.code)
        assert edit is not None
        assert count_occurrences(mutation.code, edit[0]) == 1
        assert mutation.code.replace(*edit) == right
        # As short as the expression of the mutation, whose edit is the same.
        assert len(edit[0]) <= len(mutation.wrong)


@pytest.mark.parametrize(
    ("right", "wrong", "edit"),
    [
        ("return abs(a - b)", "return a - b", ("a - b", "abs(a - b)")),
        # No expression contains the sign of an assignment: the line is named.
        ("a += 10", "a -= 10", ("a -= 10", "a += 10")),
        ("return a", "return a", None),
        ("b = a\n    return b", "c = a\n    return c", None),
        ("return a", "a = 1\n    return a", None),
        # The line occurs twice, and so does every expression in it.
        ("a += 10\n    a -= 10", "a -= 10\n    a -= 10", None),
    ],
)
def test_edits_of_programs(right: str, wrong: str, edit: tuple[str, str] | None) -> None:
    head = "def f(a, b):\n    "
    assert smallest_edit(head + right, head + wrong) == edit


def test_tidy_programs_mean_the_same_and_have_nothing_that_repeats_the_problem() -> None:
    code = '''
import math

def f(n):
    """Says the problem."""

    # A comment.
    text = """
# no comment
"""
    def g():
        "Only this."
    return text  # kept
'''
    kept = tidy(code)
    assert kept is not None
    assert "Says the problem" not in kept and "Only this" in kept
    assert "# no comment" in kept
    short = tidy(code.replace("# no comment", "text"))
    assert short is not None and "# A comment" not in short and "\n\n" not in short
    assert short.startswith("import math\ndef f(n):\n    text =")
    assert tidy("def f(:") is None
    for reference in REFERENCES:
        made = tidy(reference)
        assert made is not None and ast.unparse(ast.parse(made)) == ast.unparse(
            ast.parse(reference)
        )


def line(model: str, task: str, code: str, **changed: Any) -> dict[str, Any]:
    name = code.partition("(")[0].removeprefix("def ")
    prompt = f'def {name}(n):\n    """\n    Change {task}.\n    """\n'
    return {
        **{"source": "ldb", "model": model, "task_id": task, "prompt": prompt, "solution": code},
        **{"tests": [f"assert {name}(3) == 6", f"assert {name}(1) == 2"], "stub": [name]},
        **changed,
    }


def packed(number: int, right: str, wrong: str) -> dict[str, Any]:
    name = f"f{number}"
    declaration = f"def {name}(n):\n"
    check = f"def check({name}):\n    assert {name}(3) == 6\n    assert {name}(1) == 2\n"
    return {
        **{"task_id": f"Python/{number}", "entry_point": name, "declaration": declaration},
        **{"prompt": f'{declaration}    """Double it."""\n', "docstring": " Double it.\n"},
        "canonical_solution": f"    return {right}\n",
        "buggy_solution": f"    return {wrong}\n",
        "test": f"{check}\ncheck({name})",
    }


def write(folder: Path, solutions: Sequence[dict[str, Any]]) -> tuple[Path, Path]:
    files = folder / "solutions.jsonl.gz", folder / "pack.jsonl"
    files[0].write_bytes(gzip.compress("".join(json.dumps(s) + "\n" for s in solutions).encode()))
    pack = [packed(0, "2 * n + 0", "2 + n + 0"), packed(1, "n + n + 0", "n * n + 0")]
    files[1].write_text("".join(json.dumps(p) + "\n" for p in pack))
    return files


WRITTEN = (
    line("small", "MBPP/1", "def g(n):\n    return 2 * n * n"),
    line("large", "MBPP/1", 'def g(n):\n    """\n    Change.\n    """\n\n    return 2 * n'),
    line("other", "MBPP/1", "def g(n):\n    return 2 * n"),
    line("small", "MBPP/2", "def h(n):\n    k = n + 1\n    return k + n + 5"),
    line("large", "MBPP/2", "def h(n):\n    return n + n * 1"),
    line("small", "MBPP/2", "def h(n):\n    return (("),
    line("small", "MBPP/3", "def k(n):\n    return 2 * n", tests=["assert other(3) == 6"]),
    line("small", "HumanEval/0", "def f0(n):\n    return 2 ** n + 0"),
    line("small", "HumanEval/1", "def f1(n):\n    return n + n"),
    line("human", "Python/1", "def f1(n):\n    return n * n"),
)


def judged(attempts: Sequence[Attempt]) -> list[tuple[Attempt, Verdict]]:
    """The verdicts of the interpreter, in place of the sandbox's."""
    found = []
    for attempt in attempts:
        assert isinstance(attempt.problem.selected_uts, tuple)
        space: dict[str, Any] = {}
        exec(code_of(attempt), space)
        passed = tuple(bool(eval(t[7:], space)) for t in attempt.problem.selected_uts)
        verdict = Verdict(passed=passed, total=len(passed))
        rated = Attempt(
            id=attempt.id,
            problem=attempt.problem,
            solution=attempt.solution,
            pass_rate=verdict.pass_rate,
        )
        found.append((rated, verdict))
    return found


def test_programs_are_read_by_benchmark_and_people(tmp_path: Path) -> None:
    programs = read_programs(*write(tmp_path, WRITTEN))
    assert [a.problem.id for a in programs.mbpp] == ["mbpp/1"] * 3 + ["mbpp/2"] * 2
    assert [a.problem.id for a in programs.human_eval] == ["HumanEval/0", "HumanEval/1"]
    assert [a.id for a in programs.human] == ["HumanEval/0/human", "HumanEval/1/human"]
    dropped = {"no Python": 1, "tests of other functions than the prompt's": 1}
    assert programs.dropped.counts() == dropped
    assert programs.mbpp[1].problem.statement == "Change MBPP/1."
    assert code_of(programs.mbpp[1]) == "def g(n):\n    return 2 * n"
    assert programs.references[0].problem.statement == "Double it."
    assert code_of(programs.references[0]) == "def f0(n):\n    return 2 * n + 0"
    for attempts, rate in ((programs.human, 0.0), (programs.references, 1.0)):
        assert [a.pass_rate for a, _ in judged(attempts)] == [rate, rate]


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"task_id": "MBPP/x"}, "line 1: key 'task_id' must be"),
        ({"tests": []}, "line 1: key 'tests' must be a list"),
        ({"prompt": "pass"}, "line 1: key 'prompt' must end with a function"),
        ({"model": 3}, "line 1: key 'model' is missing or no text"),
        ({"task_id": "HumanEval/9"}, "has no problem HumanEval/9"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, record: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        read_programs(*write(tmp_path, [WRITTEN[0] | record]))


def test_faults_are_known_where_one_edit_leads_to_a_right_program(tmp_path: Path) -> None:
    mbpp = [a for a, _ in judged(read_programs(*write(tmp_path, WRITTEN)).mbpp)]
    wrong, right = (
        [a for a in mbpp if (a.pass_rate == 1) is is_right] for is_right in (False, True)
    )
    (fault,) = known_faults(wrong, right, "model")
    assert (fault.problem_id, fault.wrong, fault.right) == ("mbpp/1", "n * n", "n")
    assert with_references(mbpp)["mbpp/2"].reference == "def h(n):\n    return n + n * 1"
    made = mutants_of(right, 1, most=2)
    assert len(made) == 4 and made == mutants_of(right, 1, most=2)
    for attempt, mutant in made:
        assert mutant.code.replace(mutant.wrong, mutant.right) in map(code_of, right)
        assert attempt.solution == fence_code(mutant.code)


def test_files_hold_out_the_problems_of_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prepare_real_faults, "judge", judged)
    monkeypatch.setattr(prepare_real_faults, "TextCodec", lambda _: None)
    monkeypatch.setattr(prepare_real_faults, "fitting", lambda *_: lambda _: True)
    solutions, pack = write(tmp_path, WRITTEN)
    out = tmp_path / "out"
    words = ["--solutions", str(solutions), "--humanevalpack", str(pack), "--out", str(out)]
    assert prepare_real_faults.main([*words, "--tokenizer", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "MBPP, models: 5 programs, 4 distinct, 4 fit, 2 right, 2 wrong" in told
    for name, repaired in (("MBPP, models", "1 of 2"), ("HumanEval, people", "2 of 2")):
        assert f"{name}: one edit repairs {repaired} wrong programs" in told
    rows = {p.stem: read_rows(p) for p in out.glob("*.parquet") if "sft" not in p.stem}
    assert {row.problem_id for name in ("rl", "rl_mutants") for row in rows[name]} == {
        *("mbpp/1", "mbpp/2")
    }
    assert {row.id for row in rows["rl_mutants"]} <= {row.id for row in rows["rl_all_mutants"]}
    assert max(row.pass_rate for row in rows["rl_all_mutants"]) > 0.25
    assert sorted(row.id for row in rows["human_faults"]) == [
        *("HumanEval/0/human", "HumanEval/1/human")
    ]
    assert {row.pass_rate == 1 for row in rows["right_and_wrong"]} == {True, False}
    tested = [
        row for name in ("human_faults", "model_faults", "right_and_wrong") for row in rows[name]
    ]
    assert all(row.problem_id.startswith("HumanEval/") for row in tested)
    said = {n: [json.loads(t) for t in (out / f"{n}.jsonl").open()] for n in ("oracle", "bland")}
    assert {c["id"] for c in said["bland"]} == {row.id for row in tested}
    repaired = [*rows["human_faults"], *rows["model_edits"]]
    assert {c["id"] for c in said["oracle"]} == {row.id for row in repaired}
    assert any("`2 + n` with `2 * n`" in line["critique"] for line in said["oracle"])

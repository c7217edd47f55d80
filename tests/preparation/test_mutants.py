"""Training and test files from mutants."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from ctrl_megatron.commands import prepare_mutants
from ctrl_megatron.data.rows import Row
from ctrl_megatron.errors import UserError
from ctrl_megatron.preparation.mutants import (
    BLAND,
    Mutant,
    critic_examples,
    evaluation_rows,
    oracle_critique,
    proxy_examples,
    read_mutants,
    rl_rows,
)
from ctrl_megatron.preparation.problem_files import read_problems
from ctrl_megatron.prompts import fence_code, parse_judgment, sanitize
from ctrl_megatron.sft.examples import SftExample

EXAMPLES = Path(__file__).parents[2] / "examples"
PROBLEMS = {p.id: p for p in read_problems(EXAMPLES / "problems")}
FILE = EXAMPLES / "mutants/builtin.jsonl"
MUTANTS = read_mutants(FILE, PROBLEMS)
TRAIN = [m for m in MUTANTS if m.split == "train"]
_REQUEST = re.compile(
    r"^Analysis: `(?P<named>.+)` is wrong\.\nImprovement suggestions: "
    r"(?:Replace `(?P<w1>.+)` with `(?P<r1>.+)`|Change `(?P<w2>.+)` to `(?P<r2>.+)`"
    r"|Use `(?P<r3>.+)` instead of `(?P<w3>.+)`)\.\nOverall judgment: Incorrect$"
)


def asked(critique: str) -> tuple[str, str]:
    """(wrong, right) of a critique that asks for an edit."""
    match = _REQUEST.match(critique)
    assert match, critique
    found = match.groupdict()
    wrong = found["w1"] or found["w2"] or found["w3"]
    assert wrong == found["named"]
    return wrong, found["r1"] or found["r2"] or found["r3"]


def every_row(seed: int) -> list[Row]:
    return rl_rows(TRAIN, PROBLEMS, seed, highest_pass_rate=1.0, right_share=0.2)


def test_the_shipped_splits_have_nothing_in_common() -> None:
    by_split = {s: [m for m in MUTANTS if m.split == s] for s in {m.split for m in MUTANTS}}
    assert by_split.keys() == {"train", "unseen_mutants", "unseen_problems"}
    trained = {m.problem_id for m in TRAIN}
    assert not trained & {m.problem_id for m in by_split["unseen_problems"]}
    assert len({(m.problem_id, m.code) for m in MUTANTS}) == len({m.id for m in MUTANTS})
    for mutant in MUTANTS:
        assert 0 <= mutant.pass_rate < 1
        reference = PROBLEMS[mutant.problem_id].reference.strip()
        assert mutant.code.replace(mutant.wrong, mutant.right) == reference


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_nothing_that_is_tested_on_is_learned(seed: int) -> None:
    unseen = [m for m in MUTANTS if m.split != "train"]
    learned = [*critic_examples(TRAIN, PROBLEMS, seed), *proxy_examples(TRAIN, PROBLEMS, seed)]
    shown = {text.strip() for e in learned for text in shown_programs(e)}
    shown |= {code_of(row.solution) for row in every_row(seed)}
    for mutant in unseen:
        if mutant.split == "unseen_problems":
            statement = PROBLEMS[mutant.problem_id].statement
            assert not any(statement in m["content"] for e in learned for m in e.prompt)
        assert mutant.code.strip() not in shown, mutant.id


def code_of(answer: str) -> str:
    (code,) = re.findall(r"```python\n(.*?)```", sanitize(answer), re.DOTALL)
    return code.strip()


def shown_programs(example: SftExample) -> list[str]:
    """All fenced programs of an example."""
    texts = [*(m["content"] for m in example.prompt), example.response]
    return [code for text in texts for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL)]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_proxy_learns_to_do_exactly_what_is_asked(seed: int) -> None:
    kinds: dict[str, int] = {}
    for example in proxy_examples(TRAIN, PROBLEMS, seed):
        answer, request = example.prompt[-2]["content"], example.prompt[-1]["content"]
        (shown,) = re.findall(r"```python\n(.*?)\n?```", answer, re.DOTALL)
        kind = example.id.rsplit("/", 1)[1]
        kinds[kind] = kinds.get(kind, 0) + 1
        if BLAND in request:
            assert kind in ("bland", "right") and example.response == fence_code(shown)
            continue
        wrong, right = asked(request[request.index("Analysis: ") : request.index("Incorrect") + 9])
        assert kind in ("repair", "spoil") and shown.count(wrong) == 1
        assert example.response == fence_code(shown.replace(wrong, right))
        ast.parse(shown.replace(wrong, right))
    assert kinds.keys() == {"repair", "bland", "spoil", "right"}
    assert kinds["repair"] > sum(kinds.values()) / 3


def test_the_critic_learns_the_fault_or_that_there_is_none() -> None:
    by_id = {m.id: m for m in TRAIN}
    examples = critic_examples(TRAIN, PROBLEMS, 1, right=7)
    for example in examples:
        if example.id in by_id:
            mutant = by_id[example.id]
            assert asked(example.response) == (mutant.wrong, mutant.right)
            assert parse_judgment(example.response) is False
        else:
            assert example.response == BLAND and parse_judgment(BLAND) is True
    assert len(examples) == len(TRAIN) + 7
    assert examples == critic_examples(TRAIN, PROBLEMS, 1, right=7)
    assert examples != critic_examples(TRAIN, PROBLEMS, 2, right=7)


@pytest.mark.parametrize("wording", [0, 1, 2, 3])
def test_every_wording_says_what_to_do(wording: int) -> None:
    assert asked(oracle_critique("n + 2", "n * 2", wording)) == ("n + 2", "n * 2")


@pytest.mark.parametrize(("highest", "share"), [(1.0, 0.2), (0.25, 0.0), (0.5, 0.1)])
def test_attempts_pass_few_tests_or_are_right(highest: float, share: float) -> None:
    few = [m for n, m in enumerate(TRAIN) if n % 5 == 0]
    rows = rl_rows(few, PROBLEMS, 1, highest_pass_rate=highest, right_share=share)
    wrong = {row.id for row in rows if row.pass_rate < 1}
    assert wrong == {m.id for m in few if m.pass_rate <= highest}
    problems = len({m.problem_id for m in few})
    assert len(rows) - len(wrong) == min(round(len(wrong) * share / (1 - share)), problems)
    for row in rows:
        assert (row.pass_rate == 1) == (row["wrong"] == "")


@pytest.mark.parametrize("longest", [40, 90, 10_000])
def test_attempts_are_as_short_as_asked(longest: int) -> None:
    rows = rl_rows(TRAIN, PROBLEMS, 1, highest_pass_rate=0.25, longest=longest, right_share=0)
    few = {m.id: m for m in TRAIN if m.pass_rate <= 0.25}
    assert {row.id for row in rows} == {i for i, m in few.items() if len(m.code) <= longest}


def test_files_without_an_attempt_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--mutants", str(FILE), "--problems", str(EXAMPLES / "problems"))
    out = tmp_path / "mutants"
    assert prepare_mutants.main([*given, "--out", str(out), "--longest-attempt", "5"]) == 2
    assert "--longest-attempt=5" in capsys.readouterr().err and not out.exists()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"problem_id": "none"}, "'none' is not among the problems"),
        ({"right": "n * 3"}, "is not the problem's reference"),
        ({"wrong": "nothing"}, "key 'wrong' must occur once"),
        ({"split": "test"}, "key 'split'"),
        ({"kind": "word"}, "key 'kind'"),
        ({"pass_rate": 1.0}, "key 'pass_rate'"),
        ({"pass_rate": "much"}, "key 'pass_rate'"),
        ({"code": None}, "key 'code'"),
        ({"more": 1}, "more"),
    ],
)
def test_a_mutant_that_does_not_fit_is_named(
    tmp_path: Path, change: dict[str, object], named: str
) -> None:
    record = json.loads(FILE.read_text().split("\n")[0])
    (tmp_path / "m.jsonl").write_text(json.dumps({**record, **change}) + "\n")
    with pytest.raises(UserError, match="line 1.*" + re.escape(named)):
        read_mutants(tmp_path / "m.jsonl", PROBLEMS)


def test_records_are_read_as_they_were_written() -> None:
    assert all(isinstance(m, Mutant) for m in MUTANTS) and len(MUTANTS) > 500


def test_right_programs_come_in_the_asked_share_beside_mutants_of_their_problem() -> None:
    taught = critic_examples(TRAIN, PROBLEMS, 1, right_share=0.5, held_out=["builtin/add"])
    right = [example for example in taught if example.response == BLAND]
    assert len(right) * 2 == len(taught)
    assert "builtin/add/right" not in {example.id for example in right}
    of_right = {example.id.removesuffix("/right") for example in right}
    of_wrong = {m.problem_id for m in TRAIN if m.id in {example.id for example in taught}}
    assert of_right <= of_wrong
    rows = rl_rows(TRAIN, PROBLEMS, 1, highest_pass_rate=1.0, right_share=0.5)
    assert sum(row.pass_rate == 1 for row in rows) * 2 == len(rows)


def test_a_balanced_test_set_has_a_right_and_a_wrong_program_of_each_problem() -> None:
    rows = evaluation_rows(TRAIN, PROBLEMS, 20, right=True)
    assert len(rows) == 20
    wrong = [row.problem_id for row in rows if row.pass_rate < 1]
    right = [row.problem_id for row in rows if row.pass_rate == 1]
    assert wrong == right and len({*wrong}) == 10
    assert [row.id for row in evaluation_rows(TRAIN, PROBLEMS, 3, right=False)] == [
        mutant.id for mutant in TRAIN[:3]
    ]

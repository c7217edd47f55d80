"""Hints report execution; critiques that leak it, contradict it or repeat others are dropped."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctrl_megatron.errors import UserError
from ctrl_megatron.preparation.journal import StageJournal
from ctrl_megatron.preparation.selection import (
    CritiqueDraft,
    SplitShares,
    choose_by_right_share,
    choose_examples,
    distinct_attempts,
    round_robin_by_problem,
)
from ctrl_megatron.prompts import fence_code
from ctrl_megatron.rewards.hints import execution_hint
from ctrl_megatron.rewards.leaks import find_leak
from ctrl_megatron.types import Attempt, Problem, Verdict

FUNCTION = Problem(
    id="t/total",
    statement="Return the sum of the values, 1000 at most.",
    prompter_type="mbppplus",
    selected_uts=("assert total([20, 21]) == 4711", "assert total([]) == 0"),
    entry_point="total",
    reference="def total(values):\n    return min(sum(values), 1000)\n",
)
PROGRAM = replace(
    FUNCTION,
    id="t/program",
    prompter_type="code_contests",
    entry_point="",
    selected_uts=json.dumps([{"input": {"stdin": "20 21"}, "output": {"stdout": "4711\n"}}]),
)


def attempt(code: str = "def total(values):\n    return 0", **fields: Any) -> Attempt:
    return Attempt(
        **{"id": "t/total/0", "problem": FUNCTION, "solution": fence_code(code), **fields}
    )


def verdict(*details: str) -> Verdict:
    return Verdict(passed=tuple(not text for text in details), total=len(details), detail=details)


@pytest.mark.parametrize(
    ("judged", "kind", "said"),
    [
        (verdict("", ""), "accepted", "correct"),
        (verdict("AssertionError", ""), "wrong answer", "total([20, 21]) == 4711"),
        (verdict("", "AssertionError: total([]) returned 7"), "wrong answer", "returned 7"),
        (verdict("", "KeyError: 'a'"), "exception", "`KeyError: 'a'`"),
        (verdict("TimeLimitExceeded", ""), "time limit", "in time"),
        (verdict("NameError: x", "NameError: x"), "all failed", "all 2 tests"),
        (verdict("AssertionError", "KeyError: 1"), "wrong answer", "2 of 2"),
    ],
)
def test_the_hint_says_what_execution_said(judged: Verdict, kind: str, said: str) -> None:
    hint = execution_hint(attempt(), judged)
    assert hint.kind == kind and said in hint.text


def test_the_hint_of_a_program_shows_its_case_in_short() -> None:
    hint = execution_hint(attempt(problem=PROGRAM), verdict("line 1 differs: '0'" + "x" * 999))
    assert "20 21" in hint.text and "4711" in hint.text and "line 1 differs" in hint.text
    assert len(hint.text) < 1000
    with pytest.raises(ValueError, match="t/total/0"):
        execution_hint(attempt(), Verdict(passed=(), total=2))


@pytest.mark.parametrize(
    ("critique", "leak"),
    [
        ("It returns zero for every list, but the sum is asked.", ""),
        ("It must not exceed 1000.", ""),
        ("As the hint says, the result is wrong.", "mentions the hint or tests"),
        ("It fails a hidden test.", "mentions the hint or tests"),
        ("Write\n```python\nx\n```", "writes out code"),
        ("Write\n    def total(values):\n", "writes out code"),
        ("def total(values): return sum(values)", "writes out code"),
        ("Write async def total(values) -> int: ...", "writes out code"),
        ("Write total = lambda values: sum(values) and so on.", "writes out code"),
        ("~~~\nx\n~~~", "writes out code"),
        ("<pre>x = 1</pre>", "writes out code"),
        ("<code>def total(v): return &lt;v&gt;</code>", "writes out code"),
        ("- def total(values): pass", "writes out code"),
        ("1. `class Total(Base):`", "writes out code"),
        ("* class Total: x = 1", "writes out code"),
        ("> @cache\n> ...", "writes out code"),
        ("So:\n\n    kept = []\n    kept.append(1)\n", "writes out code"),
        ("So:\n\tfor v in values:\n\t\tx += v\n", "writes out code"),
        ("The def line is fine; a lambda is not needed, a class neither: it is short.", ""),
        ("Analysis:\n    The loop ends too early.\n    It misses the last value.", ""),
        ("`def total` has the right name, `values < 3` is not checked.", ""),
        ("- It is in a class: that is fine.", ""),
        ("`total([20,21]) == 4711` fails.", "quotes a test"),
        ("For these values 4711 is expected.", "quotes a value of a test"),
        ("Use `return min(sum(values), 1000)`.", "quotes the solution"),
    ],
)
def test_what_a_critique_gives_away(critique: str, leak: str) -> None:
    assert find_leak(critique, attempt()) == leak


@pytest.mark.parametrize(
    ("test", "critique"),
    [
        ("assert f([17, 28, 39]) == 84", "for [17, 28, 39] it returns 67 but 84 is expected."),
        ("assert f([17, 28, 39]) == 84", "f([17, 28, 39]) should be 84."),
        ("assert f((17, 28)) == 84", "It fails for `(17,28)`."),
        ("assert f({17: 'a'}, x={28, 39}) == 84", "It fails with {17: 'a'}."),
        ("assert f({17: 'a'}, x={28, 39}) == 84", "It fails where x is {28, 39}."),
        ("assert 123456 == f([123000, 456])", "for the list [123000, 456] it is wrong."),
        ("assert 123456 == f([123000, 456])", "the result must be 123456."),
        ("assert math.isclose(f([1.5, 2.25]), 3.755555)", "the result must be 3.755555."),
        ("assert abs(f([1.5, 2.25]) - 3.755555) < 1e-6", "the result must be 3.755555."),
        ("assert f([3, 1]) == set([31337, 4242])", "expected set([31337, 4242])."),
        ("assert f('ab cd') == -4711", "It is wrong for 'ab cd'."),
        ("assert f('ab cd') == -4711", "It must be below zero: -4711."),
        ("assert f(2) == 2 ** 31", "It must be 2**31."),
        ("12 34 567", "for the input 12 34 567 it is wrong."),
        ("12 34 567", "the second line must be beta 2."),
    ],
)
def test_a_value_of_a_test_is_found_in_prose(test: str, critique: str) -> None:
    case = {"input": {"stdin": f"1\n{test}"}, "output": {"stdout": "alpha 1\nbeta 2\ngamma 3"}}
    tests = json.dumps([case]) if test[0].isdigit() else (test,)
    tried = attempt(problem=replace(FUNCTION, selected_uts=tests))
    assert find_leak(f"Analysis: {critique}\nOverall judgment: Incorrect", tried)


def test_a_value_within_a_longer_word_or_number_is_none() -> None:
    values = ("assert total([1234, 'rose']) == 84",)
    tried = attempt(problem=replace(FUNCTION, selected_uts=values))
    assert find_leak("It prose-like adds 12345 to 91234, as prosecuted.", tried) == ""
    assert find_leak("It fails for `rose`.", tried) == "quotes a value of a test"


def test_what_the_attempt_says_itself_is_no_leak() -> None:
    own = attempt("def total(values):\n    return min(sum(values), 1000) + 4711")
    assert find_leak("It adds 4711 to `return min(sum(values), 1000)`.", own) == ""
    assert find_leak("It prints 4711.", attempt(problem=PROGRAM)) == "quotes a value of a test"


def draft(
    number: int, *, right: bool, text: str = "", code: str = "", **more: Any
) -> CritiqueDraft:
    words = "Correct" if right else "Incorrect"
    tried = attempt(code or f"def total(values):\n    return {number}", id=f"t/total/{number}")
    said = text or f"Analysis: look at number {number} again.\nOverall judgment: {words}"
    return CritiqueDraft(attempt=tried, right=right, text=said, **more)


def test_every_reason_is_counted() -> None:
    examples, dropped = choose_examples(
        [
            draft(0, right=True),
            draft(1, right=False, text="Analysis: wrong."),
            draft(2, right=False, text="Analysis: fine.\nOverall judgment: Correct"),
            draft(3, right=False, text="Overall judgment: Incorrect\nAnd more."),
            draft(4, right=False, text="It gives 4711.\nOverall judgment: Incorrect"),
            draft(5, right=False, revised_right=False),
            draft(6, right=False, revised_right=True),
            replace(
                draft(6, right=False), attempt=attempt("def total(values):\n    return 6", id="t/7")
            ),
            draft(8, right=False),
        ],
        balance=False,
        seed=1,
    )
    assert [e.id for e in examples] == ["t/total/0", "t/total/6", "t/total/8"]
    assert dropped.counts() == {
        "no judgment": 1,
        "judgment contradicts the sandbox": 1,
        "has text after its judgment": 1,
        "quotes a value of a test": 1,
        "its revision fails": 1,
        "nearly another example of its problem": 1,
    }
    for example in examples:
        assert "<hint>" not in example.prompt[0]["content"]


def test_right_and_wrong_are_balanced_on_demand() -> None:
    drafts = [draft(n, right=n < 3) for n in range(12)]
    examples, dropped = choose_examples(drafts, balance=True, seed=1)
    right = [e for e in examples if e.response.endswith(" Correct")]
    assert (len(examples), len(right)) == (6, 3)
    assert dropped.counts() == {"right and wrong balanced": 6}
    assert examples == choose_examples(drafts, balance=True, seed=1)[0]
    assert {e.id for e in examples} != {
        e.id for e in choose_examples(drafts, balance=True, seed=2)[0]
    }


def test_a_program_counts_once_per_problem() -> None:
    tried = [
        attempt("def total(v):\n    x = 1\n    return x", id="a"),
        attempt("def total(v):\n    y = 1  # the same\n    return y", id="b"),
        attempt("def total(v):\n    return 2", id="c"),
    ]
    kept, dropped = distinct_attempts([*tried, replace(tried[0], problem=PROGRAM, id="d")])
    assert [a.id for a in kept] == ["a", "c", "d"]
    assert dropped.reasons == {"the same program again": ["b"]}


def test_problems_fall_into_three_parts_by_their_names() -> None:
    names = [f"set/{n}" for n in range(4000)]
    shares = SplitShares(val=0.2, sft=0.5)
    parts = [shares.split_of(name) for name in names]
    assert all(abs(parts.count(p) / 4000 - s) < 0.03 for p, s in (("val", 0.2), ("sft", 0.4)))
    # Problems that are held out stay so, whatever the other share is.
    other = [SplitShares(val=0.2, sft=0.1).split_of(name) for name in names]
    assert [p == "val" for p in parts] == [p == "val" for p in other]
    assert {SplitShares(val=0, sft=0).split_of(name) for name in names} == {"rl"}
    assert {SplitShares(val=0, sft=1).split_of(name) for name in names} == {"sft"}


def test_every_problem_is_held_out_before_any_is_held_out_again() -> None:
    judged = [
        (attempt(problem=replace(FUNCTION, id=f"level{n // 10}/{n}"), id=f"{n}/{i}"), verdict(""))
        for n in range(40)
        for i in range(1 + n % 3)
    ]
    found = [a for a, _ in round_robin_by_problem(judged, 1)]
    assert {a.id for a in found} == {a.id for a, _ in judged}
    # 40 problems, of which 26 have a second attempt and 13 a third.
    numbers = [int(a.id.partition("/")[2]) for a in found]
    assert numbers == [0] * 40 + [1] * 26 + [2] * 13
    levels = [a.problem.id.partition("/")[0] for a in found[:20]]
    assert min(map(levels.count, ("level0", "level1", "level2", "level3"))) >= 2
    # Whatever problem was read first, and otherwise for another seed.
    other_files = sorted(judged, key=lambda j: -int(j[0].problem.id.partition("/")[2]))
    assert [a for a, _ in round_robin_by_problem(other_files, 1)] == found
    assert [a for a, _ in round_robin_by_problem(judged, 2)] != found


def test_a_journal_goes_on_behind_its_last_whole_line(tmp_path: Path) -> None:
    calls: list[int] = []

    async def work(part: int) -> list[dict[str, Any]]:
        calls.append(part)
        if part == 2 and len(calls) == 3:
            raise RuntimeError
        return [{"part": part}]

    with pytest.raises(RuntimeError):
        asyncio.run(StageJournal(tmp_path, {"--seed": 1}).run("draw", [0, 1, 2, 3], work))
    file = tmp_path / "draw.jsonl"
    file.write_bytes(file.read_bytes()[:-3])
    told: list[int] = []
    again = StageJournal(tmp_path, {"--seed": 1})
    found = asyncio.run(again.run("draw", [0, 1, 2, 3], work, told.append))
    assert found == [[{"part": n}] for n in range(4)]
    assert calls == [0, 1, 2, 1, 2, 3] and told == [1, 2, 3, 4]
    with pytest.raises(UserError, match=r"other --n, --seed|other --seed, --n"):
        StageJournal(tmp_path, {"--seed": 2, "--n": 1})


@given(st.integers(0, 12), st.integers(0, 12), st.sampled_from([0.0, 0.2, 0.5, 0.8, 1.0]))
def test_the_scarcer_side_is_kept_whole(right: int, wrong: int, share: float) -> None:
    sides = [f"r{n % 5}" for n in range(right)], [f"r{n % 3}" for n in range(wrong)]
    chosen = choose_by_right_share(*sides, share, 1, lambda name: name)
    kept = len(chosen)
    if share in (0.0, 1.0):
        assert kept == (right if share else wrong)
        return
    wanted = round(wrong * share / (1 - share))
    if wanted <= right:
        assert kept == wanted + wrong
    else:
        assert kept == right + min(wrong, round(right * (1 - share) / share))


def test_problems_with_both_sides_come_first_and_each_once_before_any_twice() -> None:
    right = [("a", 1), ("b", 1), ("c", 1)]
    wrong = [("c", 2), ("c", 3), ("d", 2), ("b", 2), ("e", 2), ("a", 2)]
    chosen = choose_by_right_share(right, wrong, 0.5, 7, lambda item: item[0])
    assert chosen[:3] and {*chosen[:3]} == {*right}
    assert {*chosen[3:]} == {("c", 2), ("b", 2), ("a", 2)}

"""Mutations of the shipped references and of random programs."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctrl_megatron.preparation.mutations import Mutation, count_occurrences, mutations
from ctrl_megatron.preparation.problem_files import read_problems

PROBLEMS = Path(__file__).parents[2] / "examples/problems"


def check(code: str, mutation: Mutation) -> None:
    """One expression differs, and who knows it can put the program right."""
    assert mutation.code != code and mutation.wrong != mutation.right
    assert len(mutation.wrong) >= 5 and "\n" not in mutation.wrong + mutation.right
    assert count_occurrences(mutation.code, mutation.wrong) == 1
    assert mutation.code.replace(mutation.wrong, mutation.right) == code
    ast.parse(mutation.code)
    before, after = code.split("\n"), mutation.code.split("\n")
    assert sum(a != b for a, b in zip(before, after, strict=True)) == 1


def test_every_mutant_of_the_shipped_references_is_one_edit() -> None:
    kinds, total = set[str](), 0
    for problem in read_problems(PROBLEMS):
        code = problem.reference.strip()
        found = mutations(code)
        assert len({m.code for m in found}) == len(found)
        for mutation in found:
            check(code, mutation)
        kinds |= {m.kind for m in found}
        total += len(found)
    assert kinds == {"operator", "comparison", "constant", "name", "unary"} and total > 1000


_NAMES = st.sampled_from(["a", "b", "aa", "ü", "'é'"])
_LEAVES = _NAMES | st.integers(0, 12).map(str) | st.sampled_from(["True", "min(a, b)", "x.find(a)"])
_EXPRESSIONS = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "//", "%", "<", "==", "and"]), inner).map(
            lambda t: f"({t[0]} {t[1]} {t[2]})"
        ),
        inner.map(lambda e: f"not {e}"),
        inner.map(lambda e: f"-{e}"),
        st.lists(inner, min_size=1, max_size=3).map(lambda es: f"[{', '.join(es)}]"),
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(expressions=st.lists(_EXPRESSIONS, min_size=1, max_size=3))
def test_every_mutant_of_a_random_program_is_one_edit(expressions: list[str]) -> None:
    lines = [f"    y{n} = {e}  # ü" for n, e in enumerate(expressions)]
    code = "\n".join(["def f(a, b, x):", *lines, "    return y0"])
    try:
        ast.parse(code)
    except SyntaxError:
        return
    for mutation in mutations(code):
        check(code, mutation)


def test_an_expression_that_overlaps_itself_is_not_named() -> None:
    # "a + a" begins twice in "a + a + a"; put right at its first place it would be another program.
    assert (count_occurrences("a + a + a", "a + a"), "a + a + a".count("a + a")) == (2, 1)
    code = "def f(a, b):\n    return b + a + a"
    for mutation in mutations(code):
        check(code, mutation)
    assert any(m.code.endswith("a + a + a") for m in mutations(code))


def test_functions_in_functions_are_left_out_and_order_is_that_of_the_text() -> None:
    assert mutations("def f(a):\n    return map(lambda b: b + 1, a + 2)") == []
    found = mutations("def f(a):\n    c = a + 1\n    return c * 22")
    places = [m.code.split("\n")[1] == "    c = a + 1" for m in found]
    assert places == sorted(places) and any(places) and not all(places)
    with pytest.raises(SyntaxError):
        mutations("def f(:")

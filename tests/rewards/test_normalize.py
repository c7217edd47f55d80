"""normalize_code against the table of what CTRL's function does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctrl_megatron.rewards import normalize_code

FORMS = {
    "assigned name": ("x = 1; return x", "v_0 = 1\nreturn v_0"),
    "loop": ("for i in range(3):\n  print(i)", "for v_0 in range(3):\n    print(v_0)"),
    "first store numbers": ("b = 1\na = b", "v_0 = 1\nv_1 = v_0"),
    "target before value": ("x = x + 1", "v_0 = v_0 + 1"),
    "loaded before any store": ("print(x)\nx = 1\nprint(x)", "print(x)\nv_0 = 1\nprint(v_0)"),
    "comprehension visits the element first": ("[x for x in z]", "[x for v_0 in z]"),
    "one map for all scopes": (
        "def f():\n  x = 1\ndef g():\n  x = 2\n  y = x",
        "def f():\n    v_0 = 1\n\ndef g():\n    v_0 = 2\n    v_1 = v_0",
    ),
    "function and argument names stay": ("def f(a):\n  return a", "def f(a):\n    return a"),
    "lambda arguments stay": ("g = lambda a: a", "v_0 = lambda a: a"),
    "class names stay": ("class A: pass", "class A:\n    pass"),
    "attributes stay": ("x = 1\nx.y = x", "v_0 = 1\nv_0.y = v_0"),
    "imports stay": ("import os as q\nq.getcwd()", "import os as q\nq.getcwd()"),
    "global statement stays": (
        "def f():\n  global n\n  n = 1",
        "def f():\n    global n\n    v_0 = 1",
    ),
    "except-as stays": (
        "try:\n  f()\nexcept E as e:\n  print(e)",
        "try:\n    f()\nexcept E as e:\n    print(e)",
    ),
    "comments, layout, quotes": ('x  =  "a"  # why\n\n\n', "v_0 = 'a'"),
    "walrus, with, delete": (
        "with f() as h:\n  pass\nif (n := 1):\n  del n",
        "with f() as v_0:\n    pass\nif (v_1 := 1):\n    del v_1",
    ),
    "empty": ("", ""),
    "a stored builtin is renamed": ("sum = 1\nprint(sum)", "v_0 = 1\nprint(v_0)"),
}


@pytest.mark.parametrize(("code", "expected"), FORMS.values(), ids=FORMS)
def test_form(code: str, expected: str) -> None:
    assert normalize_code(code) == expected
    assert normalize_code(expected) == expected


EQUAL = [
    ("x = 1; return x", "y = 1; return y"),
    ("for i in z: p(i)", "for j in z: p(j)"),
    # The known losses of meaning; they are why the cache does not use this form.
    ("def f(a):\n a=a+1\n return a", "def f(a):\n b=b+1\n return b"),
    ("x=1;print(v_0)", "x=1;print(x)"),
]
DIFFERENT = [
    ("[x for x in z]", "[y for y in z]"),
    ("def f(a): return a", "def f(b): return b"),
    ("x = 1", "x = 2"),
]


@pytest.mark.parametrize(("one", "other"), EQUAL)
def test_equal_forms(one: str, other: str) -> None:
    assert normalize_code(one) == normalize_code(other)


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_different_forms(one: str, other: str) -> None:
    assert normalize_code(one) != normalize_code(other)


@pytest.mark.parametrize(
    "code",
    ["def f(:", "x = \x00", "(" * 5000 + ")" * 5000, "-" * 50_000 + "1", "x = 0x" + "f" * 5000],
    ids=["syntax error", "NUL", "parentheses", "minus signs", "huge number"],
)
def test_what_cannot_be_parsed_or_written_comes_back(code: str) -> None:
    assert normalize_code(code) is code


@pytest.mark.parametrize("value", [None, 3, b"x = 1"])
def test_a_non_string_is_a_type_error(value: object) -> None:
    with pytest.raises(TypeError):
        normalize_code(value)  # pyright: ignore[reportArgumentType]


names = st.sampled_from(["a", "b", "total", "é"])
statements = st.one_of(
    st.builds("{} = {} + 1".format, names, names),
    st.builds("for {} in range(3):\n    print({})".format, names, names),
    st.builds("if {}:\n    {} = 'q'".format, names, names),
)


@given(st.lists(statements, min_size=1, max_size=6).map("\n".join))
def test_idempotent_and_blind_to_layout(code: str) -> None:
    form = normalize_code(code)
    assert normalize_code(form) == form
    assert normalize_code(code.replace(" = ", "  =  ").replace("'", '"') + "\n\n# end") == form

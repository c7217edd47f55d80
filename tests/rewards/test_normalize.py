"""normalize_code: its forms, what must differ, and that a form behaves as its program does."""

from __future__ import annotations

import contextlib
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctrl_megatron.rewards import normalize_code

FORMS = {
    "assigned name": ("x = 1; return x", "v_0 = 1\nreturn v_0"),
    "loop": ("for i in range(3):\n  print(i)", "for v_0 in range(3):\n    print(v_0)"),
    "first store numbers": ("b = 1\na = b", "v_0 = 1\nv_1 = v_0"),
    "target before value": ("x = x + 1", "v_0 = v_0 + 1"),
    "loaded before any store": ("print(x)\nx = 1\nprint(x)", "print(v_0)\nv_0 = 1\nprint(v_0)"),
    "names of comprehensions stay": ("[x for x in z]", "[x for x in z]"),
    "one map for all scopes": (
        "def f():\n  x = 1\ndef g():\n  x = 2\n  y = x",
        "def f():\n    v_0 = 1\n\ndef g():\n    v_0 = 2\n    v_1 = v_0",
    ),
    "function and argument names stay": ("def f(a):\n  return a", "def f(a):\n    return a"),
    "lambda arguments stay": ("def f():\n  g = lambda a: a", "def f():\n    v_0 = lambda a: a"),
    "class names stay": ("class A: pass", "class A:\n    pass"),
    "attributes stay": ("x = 1\nx.y = x", "v_0 = 1\nv_0.y = v_0"),
    "imports stay": ("import os as q\nq.getcwd()", "import os as q\nq.getcwd()"),
    "global statement stays": (
        "def f():\n  global n\n  n = 1",
        "def f():\n    global n\n    n = 1",
    ),
    "except-as stays": (
        "try:\n  f()\nexcept E as e:\n  print(e)",
        "try:\n    f()\nexcept E as e:\n    print(e)",
    ),
    "comments, layout, quotes": ('x  =  "a"  # why\n\n\n', "v_0 = 'a'"),
    "walrus, with, delete": (
        "def g():\n  with f() as h:\n    pass\n  if (n := 1):\n    del n",
        "def g():\n    with f() as v_0:\n        pass\n    if (v_1 := 1):\n        del v_1",
    ),
    "empty": ("", ""),
    "a stored builtin stays": ("sum = 1\nprint(sum)", "sum = 1\nprint(sum)"),
    "what may be called stays": ("f = max\ng = h()\nn = 1", "f = max\ng = h()\nv_0 = 1"),
    "input": (
        "n, m = map(int, input().split())\nwords = input().split()\nprint(n, m, words)",
        "v_0, v_1 = map(int, input().split())\nv_2 = input().split()\nprint(v_0, v_1, v_2)",
    ),
    "a name that is taken": ("x = 1\nprint(x, v_0)", "v_1 = 1\nprint(v_1, v_0)"),
    "a closure": (
        "def f(a):\n  t = a\n  def g(): return t\n  return g",
        "def f(a):\n    v_0 = a\n\n    def g():\n        return v_0\n    return g",
    ),
}


@pytest.mark.parametrize(("code", "expected"), FORMS.values(), ids=FORMS)
def test_form(code: str, expected: str) -> None:
    assert normalize_code(code) == expected
    assert normalize_code(expected) == expected


EQUAL = [
    ("x = 1; return x", "y = 1; return y"),
    ("for i in range(9): p(i)", "for j in range(9): p(j)"),
    ("def f(a):\n t = a * 2\n return t", "def f(a):\n out = a * 2\n return out"),
    ("def f(z):\n for i in z: yield i", "def f(z):\n for k in z: yield k"),
]
DIFFERENT = [
    ("[x for x in z]", "[y for y in z]"),
    ("for i in z: p(i)", "for j in z: p(j)"),
    ("def f(a): return a", "def f(b): return b"),
    ("x = 1", "x = 2"),
    ("def f(a):\n a=a+1\n return a", "def f(a):\n b=b+1\n return b"),
    ("x=1;print(v_0)", "x=1;print(x)"),
    # An entry point by assignment, in all its forms.
    ("f = lambda x: x", "g = lambda x: x"),
    ("f = max", "g = max"),
    ("f = partial(pow, 2)", "g = partial(pow, 2)"),
    ("f, n = max, 1", "g, n = max, 1"),
    ("(f := max)", "(g := max)"),
    ("for f in [max]: pass", "for g in [max]: pass"),
    ("with open_it() as f: pass", "with open_it() as g: pass"),
    ("f = n = max", "g = n = max"),
    ("g = max\nf = g if 1 else 0", "g = max\nh = g if 1 else 0"),
    ("def str(x): return max\nf = str(1)", "def str(x): return max\ng = str(1)"),
    (
        "class A:\n def __add__(s, o): return max\nf = A() + 1",
        "class A:\n def __add__(s, o): return max\ng = A() + 1",
    ),
    # Classes.
    ("class A:\n x = 1\nprint(A.x)", "class A:\n y = 1\nprint(A.x)"),
    (
        "class A:\n def g(s):\n  s.x = 1\n  return s.x",
        "class A:\n def g(s):\n  s.y = 1\n  return s.x",
    ),
    ("class A:\n __slots__ = ['x']", "class A:\n __slots__ = ['y']"),
    (
        "class A:\n def g(self):\n  x = 1\n  self.x = 2\n  return getattr(self, 'x')",
        "class A:\n def g(self):\n  y = 1\n  self.y = 2\n  return getattr(self, 'x')",
    ),
    # Names that are read from texts, or through the frame.
    ("a = 1\nprint(eval('a'))", "b = 1\nprint(eval('a'))"),
    ("def f():\n a = 1\n return locals()", "def f():\n b = 1\n return locals()"),
    (
        "def f():\n a = 1\n return '{a}'.format(**vars())",
        "def f():\n b = 1\n return '{a}'.format(**vars())",
    ),
    ("def f():\n a = 1\n return f'{a=}'", "def f():\n b = 1\n return f'{b=}'"),
    ("a = 1\nexec('print(' + chr(97) + ')')", "b = 1\nexec('print(' + chr(97) + ')')"),
    (
        "import sys\na = 1\nsys.modules['__main__'].a",
        "import sys\nb = 1\nsys.modules['__main__'].a",
    ),
    (
        "def f():\n try: a += 1\n except UnboundLocalError as e: return str(e)",
        "def f():\n try: b += 1\n except UnboundLocalError as e: return str(e)",
    ),
    # Other places of names.
    ("def f(**k): return k\na = f(a=1)", "def f(**k): return k\nb = f(a=1)"),
    ("c = 0\ndef f():\n global c\n c += 1", "d = 0\ndef f():\n global c\n d += 1"),
    (
        "def f():\n c = 0\n def g():\n  nonlocal c\n  c += 1",
        "def f():\n c = 0\n def g():\n  nonlocal c\n  d = 1",
    ),
    ("sum = 0\nfor x in [1]: sum += x\nprint(sum)", "tot = 0\nfor x in [1]: tot += x\nprint(tot)"),
    ("x = 1\nprint([y for y in [x]])", "x = 1\nprint([x for x in [x]])"),
    ("try: f()\nexcept E as e: x = e", "try: f()\nexcept E as d: x = e"),
    ("import os as q\nx = q", "import os as r\nx = q"),
    ("from m import *\na = 1\nprint(a)", "from m import *\nb = 1\nprint(b)"),
    ("def f(a):\n match a:\n  case [x]: return x", "def f(a):\n match a:\n  case [y]: return x"),
    ("def f(a):\n b = 1\n @b\n def g(): pass", "def f(a):\n b = 1\n @c\n def g(): pass"),
    ("def f(n=1):\n m = n", "def f(m=1):\n m = n"),
    ("n: int = 1", "m: int = 1"),
    ("k = 1\ndef f(): return k", "k = 1\ndef f(): return j"),
]


@pytest.mark.parametrize(("one", "other"), EQUAL)
def test_equal_forms(one: str, other: str) -> None:
    assert normalize_code(one) == normalize_code(other)


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_different_forms(one: str, other: str) -> None:
    assert normalize_code(one) != normalize_code(other)


PROGRAMS = """\
n = 3
for i in range(n):
    for j in range(i):
        print(i * j, end=' ')
print(n)
---
def f(a):
    best = a[0]
    for x in a:
        best = max(best, x)
    return best
print(f([1, 4, 2]))
---
def f(n):
    out = []
    def add(k):
        out.append(k)
        return len(out)
    return [add(i) for i in range(n)], out
print(f(3))
---
class A:
    n = 2
    def g(self, n):
        m = n + self.n
        self.m = m
        return m
a = A()
print(a.g(3), a.m, A.n)
---
x = 1
def f():
    x = 2
    def g():
        nonlocal x
        x += 1
        return x
    return g() + x
print(f(), x)
---
total = 0
def f(v_0):
    global total
    v_1 = v_0
    total += v_1
f(2)
print(total)
---
def f(d):
    (a, *b), c = d
    if (n := len(b)) > 1:
        del b[0]
    return f'{a} {b!r} {c:>{n}} {n=}'
print(f(((1, 2, 3), 4)))
---
def f(m):
    match m:
        case {'a': x, **rest}:
            y = x
        case _:
            y = 0
    return y
print(f({'a': 5}), f(1))
---
s = 'a b'
words = s.split()
n = len(words)
print(n, sorted(w for w in words), {k: n for k in words})
---
def f():
    try:
        k = 1 / 0
    except ZeroDivisionError as k:
        err = str(k)
    return err
print(f())
---
def f():
    x = 5
    fs = [lambda i=i: i + x for i in range(3)]
    x = 7
    return [g() for g in fs]
print(f())
"""


@pytest.mark.parametrize("code", PROGRAMS.split("\n---\n"))
def test_a_form_behaves_as_its_program(code: str) -> None:
    def printed(program: str) -> str:
        written = io.StringIO()
        with contextlib.redirect_stdout(written):
            exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
        return written.getvalue()

    form = normalize_code(code)
    assert printed(form) == printed(code) != ""
    assert normalize_code(form) == form


@pytest.mark.parametrize(
    "code",
    ["def f(:", "x = \x00", "(" * 5000 + ")" * 5000, "-" * 50_000 + "1", "x = 0x" + "f" * 500_000],
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

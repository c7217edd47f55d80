"""Right classes on ordinary tests."""

from __future__ import annotations

from .cases import Case, asserts, case

RIGHT_CLASSES: tuple[Case, ...] = (
    case(
        "song title and index",
        "attributes",
        "Song",
        """
        s = Song("Yesterday", 3)
        assert s.title == "Yesterday"
        assert s.index == 3
        s.title = "Help!"
        assert s.title == "Help!"
        """,
        """
        class Song:
            def __init__(self, title, index):
                self.title = title
                self.index = index
        """,
        """
        class Song:
            def __init__(self, title, index):
                self.title = title.upper()
                self.index = index
        """,
    ),
    case(
        "warehouse items keys values",
        "attributes",
        "Warehouse",
        """
        w = Warehouse()
        w.add("bolt", 4)
        w.add("nut", 2)
        w.add("bolt", 1)
        assert w.items == {"bolt": 5, "nut": 2}
        assert w.keys == ["bolt", "nut"]
        assert w.count == 7
        """,
        """
        class Warehouse:
            def __init__(self):
                self.items = {}

            def add(self, name, number):
                self.items[name] = self.items.get(name, 0) + number

            @property
            def keys(self):
                return sorted(self.items)

            @property
            def count(self):
                return sum(self.items.values())
        """,
    ),
    case(
        "complex-like number with real and imag",
        "attributes",
        "Gauss",
        """
        z = Gauss(2, -3)
        assert z.real == 2 and z.imag == -3
        assert z.conjugate().imag == 3
        """,
        """
        class Gauss:
            def __init__(self, real, imag):
                self.real, self.imag = real, imag

            def conjugate(self):
                return Gauss(self.real, -self.imag)
        """,
        """
        class Gauss:
            def __init__(self, real, imag):
                self.real, self.imag = real, imag

            def conjugate(self):
                return self
        """,
    ),
    case(
        "interval with start stop step",
        "attributes",
        "Interval",
        (
            """
        r = Interval(1, 10, 3)
        assert (r.start, r.stop, r.step) == (1, 10, 3)
        """,
            """
        assert Interval(1, 10, 3).values == [1, 4, 7]
        """,
            """
        r = Interval(0, 4)
        r.step = 2
        assert r.values == [0, 2]
        """,
        ),
        """
        class Interval:
            def __init__(self, start, stop, step=1):
                self.start, self.stop, self.step = start, stop, step

            @property
            def values(self):
                return list(range(self.start, self.stop, self.step))
        """,
    ),
    case(
        "playlist append pop insert",
        "attributes",
        "Playlist",
        """
        p = Playlist()
        p.append("a")
        p.append("b")
        p.insert(0, "c")
        assert p.pop() == "b"
        assert p.items == ["c", "a"]
        assert p.index("a") == 1
        p.clear()
        assert p.items == []
        """,
        """
        class Playlist:
            def __init__(self):
                self.items = []

            def append(self, song):
                self.items.append(song)

            def insert(self, at, song):
                self.items.insert(at, song)

            def pop(self):
                return self.items.pop()

            def index(self, song):
                return self.items.index(song)

            def clear(self):
                self.items = []
        """,
    ),
    case(
        "person with name and format",
        "attributes",
        "Person",
        """
        ann = Person("Ann", "Lee")
        assert ann.name == "Ann"
        assert ann.format() == "Lee, Ann"
        assert ann.upper() == "ANN LEE"
        """,
        """
        class Person:
            def __init__(self, name, surname):
                self.name = name
                self.surname = surname

            def format(self):
                return f"{self.surname}, {self.name}"

            def upper(self):
                return f"{self.name} {self.surname}".upper()
        """,
    ),
    case(
        "scale a point from both sides",
        "operators",
        "Point",
        (
            "p = 3 * Point(1, 2)\nassert (p.x, p.y) == (3, 6)",
            "p = Point(1, 2) * 3\nassert (p.x, p.y) == (3, 6)",
            "assert -Point(1, -2) == Point(-1, 2)",
            "assert Point(5, 5) - Point(1, 2) == Point(4, 3)",
        ),
        """
        class Point:
            def __init__(self, x, y):
                self.x, self.y = x, y

            def __mul__(self, k):
                return Point(self.x * k, self.y * k)

            __rmul__ = __mul__

            def __neg__(self):
                return self * -1

            def __sub__(self, other):
                return Point(self.x - other.x, self.y - other.y)

            def __eq__(self, other):
                return (self.x, self.y) == (other.x, other.y)
        """,
        """
        class Point:
            def __init__(self, x, y):
                self.x, self.y = x, y

            def __mul__(self, k):
                return Point(self.x * k, self.y)

            __rmul__ = __mul__

            def __neg__(self):
                return self * -1

            def __sub__(self, other):
                return Point(self.x - other.x, self.y - other.y)

            def __eq__(self, other):
                return (self.x, self.y) == (other.x, other.y)
        """,
    ),
    case(
        "money adds, compares and sums",
        "operators",
        "Money",
        """
        assert Money(5) + Money(7) == Money(12)
        assert sum([Money(1), Money(2), Money(3)], Money(0)) == Money(6)
        assert sum([Money(1), Money(2)]) == Money(3)
        assert Money(5) != Money(6)
        assert Money(5) < Money(6) <= Money(6)
        assert max(Money(3), Money(9)) == Money(9)
        """,
        """
        from functools import total_ordering

        @total_ordering
        class Money:
            def __init__(self, cents):
                self.cents = cents

            def __add__(self, other):
                if other == 0:
                    return self
                return Money(self.cents + other.cents)

            __radd__ = __add__

            def __eq__(self, other):
                if not isinstance(other, Money):
                    return NotImplemented
                return self.cents == other.cents

            def __lt__(self, other):
                return self.cents < other.cents

            def __hash__(self):
                return hash(self.cents)
        """,
    ),
    case(
        "semantic version order",
        "operators",
        "Version",
        asserts("""
        assert Version("1.2.0") < Version("1.10.0")
        assert Version("2.0") > Version("1.99.99")
        assert Version("1.0") == Version("1.0.0")
        assert not Version("1.0") != Version("1.0.0")
        assert sorted([Version("1.10"), Version("1.9")])[0] == Version("1.9")
        """),
        """
        import functools

        @functools.total_ordering
        class Version:
            def __init__(self, text):
                parts = [int(part) for part in text.split(".")]
                while parts and parts[-1] == 0:
                    parts.pop()
                self.parts = tuple(parts)

            def __eq__(self, other):
                return self.parts == other.parts

            def __lt__(self, other):
                return self.parts < other.parts
        """,
        """
        class Version:
            def __init__(self, text):
                self.text = text

            def __eq__(self, other):
                return self.text == other.text

            def __lt__(self, other):
                return self.text < other.text

            def __gt__(self, other):
                return self.text > other.text
        """,
    ),
    case(
        "matrix product by the at sign",
        "operators",
        "Matrix",
        """
        a = Matrix([[1, 2], [3, 4]])
        b = Matrix([[0, 1], [1, 0]])
        assert (a @ b).rows == [[2, 1], [4, 3]]
        assert a @ b != b @ a
        assert a[1, 0] == 3
        a[1, 0] = 9
        assert a.rows == [[1, 2], [9, 4]]
        """,
        """
        def dot(a, b):
            return sum(x * y for x, y in zip(a, b))

        class Matrix:
            def __init__(self, rows):
                self.rows = [list(row) for row in rows]

            def __matmul__(self, other):
                columns = list(zip(*other.rows))
                return Matrix([[dot(row, column) for column in columns] for row in self.rows])

            def __eq__(self, other):
                return self.rows == other.rows

            def __getitem__(self, at):
                return self.rows[at[0]][at[1]]

            def __setitem__(self, at, value):
                self.rows[at[0]][at[1]] = value
        """,
        """
        class Matrix:
            def __init__(self, rows):
                self.rows = [list(row) for row in rows]

            def __matmul__(self, other):
                pairs = zip(self.rows, other.rows)
                return Matrix([[x * y for x, y in zip(a, b)] for a, b in pairs])

            def __eq__(self, other):
                return self.rows == other.rows

            def __getitem__(self, at):
                return self.rows[at[0]][at[1]]

            def __setitem__(self, at, value):
                self.rows[at[0]][at[1]] = value
        """,
    ),
    case(
        "polynomial as container and function",
        "operators",
        "Polynomial",
        (
            "p = Polynomial(1, 0, 2)\nassert p(3) == 19",
            "assert len(Polynomial(1, 0, 2)) == 3",
            "p = Polynomial(4, 5)\nassert p[0] == 4 and p[1] == 5",
            "assert list(Polynomial(4, 5)) == [4, 5]",
            "assert Polynomial(1, 2) + Polynomial(0, 0, 3) == Polynomial(1, 2, 3)",
            "assert str(Polynomial(1, 0, 2)) == '1 + 2x^2'",
        ),
        """
        from itertools import zip_longest

        class Polynomial:
            def __init__(self, *coefficients):
                self.coefficients = coefficients

            def __call__(self, x):
                return sum(c * x**i for i, c in enumerate(self.coefficients))

            def __len__(self):
                return len(self.coefficients)

            def __getitem__(self, i):
                return self.coefficients[i]

            def __add__(self, other):
                pairs = zip_longest(self.coefficients, other.coefficients, fillvalue=0)
                return Polynomial(*(a + b for a, b in pairs))

            def __eq__(self, other):
                return self.coefficients == other.coefficients

            def __str__(self):
                terms = []
                for i, c in enumerate(self.coefficients):
                    if c:
                        terms.append(str(c) if i == 0 else f"{c}x^{i}")
                return " + ".join(terms) or "0"
        """,
    ),
    case(
        "set of hashable coordinates",
        "operators",
        "Coord",
        """
        seen = {Coord(0, 0), Coord(1, 0), Coord(0, 0)}
        assert len(seen) == 2
        assert Coord(1, 0) in seen
        assert Coord(5, 5) not in seen
        prices = {Coord(2, 3): "flat"}
        assert prices[Coord(2, 3)] == "flat"
        assert hash(Coord(7, 8)) == hash(Coord(7, 8))
        """,
        """
        class Coord:
            __slots__ = ("x", "y")

            def __init__(self, x, y):
                self.x = x
                self.y = y

            def __eq__(self, other):
                return isinstance(other, Coord) and self.x == other.x and self.y == other.y

            def __hash__(self):
                return hash((self.x, self.y))
        """,
        """
        class Coord:
            def __init__(self, x, y):
                self.x = x
                self.y = y
        """,
    ),
    case(
        "truth and size of a basket",
        "operators",
        "Basket",
        asserts("""
        assert not Basket()
        assert bool(Basket("apple")) is True
        assert len(Basket("apple", "pear")) == 2
        assert "pear" in Basket("apple", "pear")
        assert "plum" not in Basket("apple", "pear")
        assert [f for f in Basket("b", "a")] == ["b", "a"]
        """),
        """
        class Basket:
            def __init__(self, *fruits):
                self._fruits = list(fruits)

            def __len__(self):
                return len(self._fruits)

            def __contains__(self, fruit):
                return fruit in self._fruits

            def __iter__(self):
                yield from self._fruits
        """,
        """
        class Basket:
            def __init__(self, *fruits):
                self._fruits = list(fruits)

            def __len__(self):
                return max(1, len(self._fruits))

            def __contains__(self, fruit):
                return fruit in self._fruits

            def __iter__(self):
                yield from self._fruits
        """,
    ),
    case(
        "repr and str of a card",
        "operators",
        "Card",
        """
        c = Card("Q", "hearts")
        assert str(c) == "Q of hearts"
        assert repr(c) == "Card('Q', 'hearts')"
        assert eval(repr(c)) == c
        assert f"{c!r}" == "Card('Q', 'hearts')"
        assert "%s" % c == "Q of hearts"
        """,
        """
        class Card:
            def __init__(self, rank, suit):
                self.rank, self.suit = rank, suit

            def __str__(self):
                return f"{self.rank} of {self.suit}"

            def __repr__(self):
                return f"Card({self.rank!r}, {self.suit!r})"

            def __eq__(self, other):
                return repr(self) == repr(other)
        """,
    ),
    case(
        "format specifications of a temperature",
        "operators",
        "Temperature",
        asserts("""
        assert f"{Temperature(21.456):c}" == "21.5C"
        assert format(Temperature(100), "f") == "212.0F"
        assert "{:k}".format(Temperature(0)) == "273.1K"
        assert round(Temperature(21.456)) == 21
        assert int(Temperature(3.9)) == 3 and float(Temperature(3.5)) == 3.5
        """),
        """
        class Temperature:
            def __init__(self, celsius):
                self.celsius = celsius

            def __format__(self, spec):
                if spec == "f":
                    return f"{self.celsius * 9 / 5 + 32:.1f}F"
                if spec == "k":
                    return f"{self.celsius + 273.149:.1f}K"
                return f"{self.celsius:.1f}C"

            def __round__(self, digits=None):
                return round(self.celsius, digits)

            def __int__(self):
                return int(self.celsius)

            def __float__(self):
                return float(self.celsius)
        """,
    ),
    case(
        "absolute value and division of a phasor",
        "operators",
        "Phasor",
        """
        import math
        import pytest

        def test_abs():
            assert abs(Phasor(3, 4)) == pytest.approx(5)

        def test_division():
            half = Phasor(2, 4) / 2
            assert math.isclose(half.re, 1) and math.isclose(half.im, 2)

        def test_power():
            assert Phasor(0, 1) ** 2 == Phasor(-1, 0)

        def test_inplace():
            p = Phasor(1, 1)
            p += Phasor(1, 0)
            assert p == Phasor(2, 1)
        """,
        """
        class Phasor:
            def __init__(self, re, im):
                self.re, self.im = re, im

            def __abs__(self):
                return (self.re**2 + self.im**2) ** 0.5

            def __truediv__(self, k):
                return Phasor(self.re / k, self.im / k)

            def __mul__(self, o):
                return Phasor(self.re * o.re - self.im * o.im, self.re * o.im + self.im * o.re)

            def __pow__(self, n):
                result = Phasor(1, 0)
                for _ in range(n):
                    result = result * self
                return result

            def __iadd__(self, o):
                self.re += o.re
                self.im += o.im
                return self

            def __eq__(self, o):
                return (self.re, self.im) == (o.re, o.im)
        """,
    ),
    case(
        "bit set with or, and, xor, invert",
        "operators",
        "Flags",
        asserts("""
        assert (Flags("a") | Flags("b")).names() == ["a", "b"]
        assert (Flags("a", "b") & Flags("b", "c")).names() == ["b"]
        assert (Flags("a", "b") ^ Flags("b", "c")).names() == ["a", "c"]
        assert (~Flags("a", "b", "c")).names() == ["d"]
        assert Flags("a") <= Flags("a", "b") and not Flags("c") <= Flags("a")
        """),
        """
        class Flags:
            ALL = frozenset("abcd")

            def __init__(self, *names):
                self.set = frozenset(names)

            def names(self):
                return sorted(self.set)

            def __or__(self, other):
                return Flags(*(self.set | other.set))

            def __and__(self, other):
                return Flags(*(self.set & other.set))

            def __xor__(self, other):
                return Flags(*(self.set ^ other.set))

            def __invert__(self):
                return Flags(*(self.ALL - self.set))

            def __le__(self, other):
                return self.set <= other.set
        """,
    ),
    case(
        "grid with slices and deletion",
        "operators",
        "History",
        """
        h = History()
        for page in ["home", "news", "mail", "shop"]:
            h.visit(page)
        assert h[0] == "home" and h[-1] == "shop"
        assert h[1:3] == ["news", "mail"]
        del h[0]
        assert len(h) == 3
        assert list(reversed(h)) == ["shop", "mail", "news"]
        try:
            h[10]
            assert False, "no error"
        except IndexError:
            pass
        """,
        """
        class History:
            def __init__(self):
                self.pages = []

            def visit(self, page):
                self.pages.append(page)

            def __len__(self):
                return len(self.pages)

            def __getitem__(self, i):
                return self.pages[i]

            def __delitem__(self, i):
                del self.pages[i]
        """,
        """
        class History:
            def __init__(self):
                self.pages = []

            def visit(self, page):
                self.pages.append(page)

            def __len__(self):
                return len(self.pages)

            def __getitem__(self, i):
                return self.pages[i] if isinstance(i, int) and i < 4 else self.pages

            def __delitem__(self, i):
                pass
        """,
    ),
    case(
        "timer as a context manager",
        "context managers",
        "Transaction",
        """
        store = {"x": 1}
        with Transaction(store) as t:
            t["x"] = 2
        assert store == {"x": 2}
        try:
            with Transaction(store) as t:
                t["x"] = 99
                raise RuntimeError("rollback")
        except RuntimeError:
            pass
        assert store == {"x": 2}
        """,
        """
        class Transaction:
            def __init__(self, store):
                self.store = store

            def __enter__(self):
                self.copy = dict(self.store)
                return self.copy

            def __exit__(self, kind, error, trace):
                if kind is None:
                    self.store.clear()
                    self.store.update(self.copy)
                return False
        """,
        """
        class Transaction:
            def __init__(self, store):
                self.store = store

            def __enter__(self):
                return self.store

            def __exit__(self, kind, error, trace):
                return False
        """,
    ),
    case(
        "suppressing errors",
        "context managers",
        "Suppress",
        """
        with Suppress(KeyError, ValueError) as s:
            int("x")
        assert isinstance(s.error, ValueError)
        with Suppress(KeyError) as s:
            pass
        assert s.error is None
        raised = False
        try:
            with Suppress(KeyError):
                1 / 0
        except ZeroDivisionError:
            raised = True
        assert raised
        """,
        """
        class Suppress:
            def __init__(self, *kinds):
                self.kinds = kinds
                self.error = None

            def __enter__(self):
                return self

            def __exit__(self, kind, error, trace):
                if kind is not None and issubclass(kind, self.kinds):
                    self.error = error
                    return True
        """,
    ),
    case(
        "tags written by contextlib",
        "context managers",
        "tag",
        """
        out = []
        with tag(out, "b"):
            out.append("bold")
            with tag(out, "i"):
                out.append("both")
        assert "".join(out) == "<b>bold<i>both</i></b>"
        """,
        """
        from contextlib import contextmanager

        @contextmanager
        def tag(out, name):
            out.append(f"<{name}>")
            try:
                yield
            finally:
                out.append(f"</{name}>")
        """,
        """
        from contextlib import contextmanager

        @contextmanager
        def tag(out, name):
            yield
            out.append(f"</{name}>")
        """,
    ),
    case(
        "connection pool gives back",
        "context managers",
        "Pool",
        """
        import pytest
        from solution import Pool

        def test_release_at_the_end():
            pool = Pool(1)
            with pool.acquire() as number:
                assert number == 0
                assert pool.free == 0
            assert pool.free == 1

        def test_exhausted():
            pool = Pool(1)
            with pool.acquire():
                with pytest.raises(LookupError):
                    with pool.acquire():
                        pass
            assert pool.free == 1
        """,
        """
        import contextlib

        class Pool:
            def __init__(self, size):
                self._ids = list(range(size))

            @property
            def free(self):
                return len(self._ids)

            @contextlib.contextmanager
            def acquire(self):
                if not self._ids:
                    raise LookupError("no connection is free")
                number = self._ids.pop()
                try:
                    yield number
                finally:
                    self._ids.append(number)
        """,
    ),
    case(
        "indentation follows the depth",
        "context managers",
        "Writer",
        """
        w = Writer()
        w.line("if x:")
        with w:
            w.line("for y in x:")
            with w:
                w.line("print(y)")
        w.line("end")
        assert w.text() == "if x:\\n  for y in x:\\n    print(y)\\nend\\n"
        """,
        """
        class Writer:
            def __init__(self):
                self.lines, self.depth = [], 0

            def line(self, text):
                self.lines.append("  " * self.depth + text + "\\n")

            def text(self):
                return "".join(self.lines)

            def __enter__(self):
                self.depth += 1
                return self

            def __exit__(self, *_):
                self.depth -= 1
        """,
    ),
    case(
        "shape base class of the program",
        "derived classes",
        ("Figure", "describe"),
        """
        import pytest
        from solution import Figure, describe

        class Rect(Figure):
            def __init__(self, a, b):
                self.a, self.b = a, b

            def area(self):
                return self.a * self.b

        def test_describe_uses_area():
            assert describe(Rect(2, 3)) == "Rect with area 6"

        def test_abstract():
            with pytest.raises(TypeError):
                Figure()
        """,
        """
        from abc import ABC, abstractmethod

        class Figure(ABC):
            @abstractmethod
            def area(self):
                ...

        def describe(figure):
            return f"{type(figure).__name__} with area {figure.area()}"
        """,
        """
        class Figure:
            def area(self):
                return 0

        def describe(figure):
            return f"{type(figure).__name__} with area {figure.area()}"
        """,
    ),
    case(
        "template method with hooks",
        "derived classes",
        "Pipeline",
        """
        class Shout(Pipeline):
            def transform(self, item):
                return item.upper() + "!"

            def accept(self, item):
                return len(item) > 2

        assert Shout().run(["hey", "a", "you"]) == ["HEY!", "YOU!"]
        assert Pipeline().run(["a", "b"]) == ["a", "b"]
        """,
        """
        class Pipeline:
            def accept(self, item):
                return True

            def transform(self, item):
                return item

            def run(self, items):
                return [self.transform(i) for i in items if self.accept(i)]
        """,
    ),
    case(
        "super call in the test's class",
        "derived classes",
        "Account",
        """
        import unittest

        class Overdraft(Account):
            def __init__(self, balance, limit):
                super().__init__(balance)
                self.limit = limit

            def can_pay(self, amount):
                return amount <= self.balance + self.limit

        class TestOverdraft(unittest.TestCase):
            def test_pays_over_the_balance(self):
                a = Overdraft(10, 20)
                a.pay(25)
                self.assertEqual(a.balance, -15)

            def test_base_refuses(self):
                with self.assertRaises(ValueError):
                    Account(10).pay(25)

            def test_is_an_account(self):
                self.assertIsInstance(Overdraft(1, 1), Account)
                self.assertTrue(issubclass(Overdraft, Account))
        """,
        """
        class Account:
            def __init__(self, balance=0):
                self.balance = balance

            def can_pay(self, amount):
                return amount <= self.balance

            def pay(self, amount):
                if not self.can_pay(amount):
                    raise ValueError("not enough money")
                self.balance -= amount
        """,
        """
        class Account:
            def __init__(self, balance=0):
                self.balance = balance

            def pay(self, amount):
                if amount > self.balance:
                    raise ValueError("not enough money")
                self.balance -= amount
        """,
    ),
    case(
        "registry of subclasses",
        "derived classes",
        "Plugin",
        """
        class Csv(Plugin):
            name = "csv"

            def load(self, text):
                return text.split(",")

        class Lines(Plugin):
            name = "lines"

            def load(self, text):
                return text.splitlines()

        assert sorted(Plugin.registry) == ["csv", "lines"]
        assert Plugin.load_as("csv", "a,b") == ["a", "b"]
        assert Plugin.load_as("lines", "a\\nb") == ["a", "b"]
        """,
        """
        class Plugin:
            registry = {}
            name = None

            def __init_subclass__(cls, **kwargs):
                super().__init_subclass__(**kwargs)
                Plugin.registry[cls.name] = cls

            @classmethod
            def load_as(cls, name, text):
                return cls.registry[name]().load(text)
        """,
    ),
    case(
        "visitor of the test walks an expression",
        "derived classes",
        ("Num", "Add", "Visitor"),
        """
        from solution import Add, Num, Visitor

        class Evaluate(Visitor):
            def visit_num(self, node):
                return node.value

            def visit_add(self, node):
                return node.left.accept(self) + node.right.accept(self)

        class Show(Visitor):
            def visit_num(self, node):
                return str(node.value)

            def visit_add(self, node):
                return f"({node.left.accept(self)} + {node.right.accept(self)})"

        def test_visitors():
            tree = Add(Num(1), Add(Num(2), Num(3)))
            assert tree.accept(Evaluate()) == 6
            assert tree.accept(Show()) == "(1 + (2 + 3))"
        """,
        """
        class Visitor:
            def visit_num(self, node):
                raise NotImplementedError

            def visit_add(self, node):
                raise NotImplementedError

        class Num:
            def __init__(self, value):
                self.value = value

            def accept(self, visitor):
                return visitor.visit_num(self)

        class Add:
            def __init__(self, left, right):
                self.left, self.right = left, right

            def accept(self, visitor):
                return visitor.visit_add(self)
        """,
    ),
    case(
        "validator fields derived in the test",
        "derived classes",
        ("Field", "Model"),
        """
        class Positive(Field):
            def check(self, value):
                if value <= 0:
                    raise ValueError(f"{self.name} must be positive")

        class Order(Model):
            price = Positive()
            size = Positive()

        o = Order(price=5, size=2)
        assert o.price == 5 and o.size == 2
        try:
            o.size = -1
        except ValueError as e:
            assert str(e) == "size must be positive"
        else:
            assert False
        assert o.size == 2
        """,
        """
        class Field:
            def __set_name__(self, owner, name):
                self.name = name

            def __get__(self, obj, owner):
                return self if obj is None else obj.__dict__[self.name]

            def __set__(self, obj, value):
                self.check(value)
                obj.__dict__[self.name] = value

            def check(self, value):
                pass

        class Model:
            def __init__(self, **values):
                for name, value in values.items():
                    setattr(self, name, value)
        """,
    ),
    case(
        "count of instances",
        "state and counters",
        "Robot",
        """
        assert Robot.population == 0
        a = Robot("R2")
        b = Robot("C3")
        assert Robot.population == 2
        assert a.number == 1 and b.number == 2
        a.die()
        assert Robot.population == 1
        """,
        """
        class Robot:
            population = 0
            _next = 1

            def __init__(self, name):
                self.name = name
                self.number = Robot._next
                Robot._next += 1
                Robot.population += 1

            def die(self):
                Robot.population -= 1
        """,
        """
        class Robot:
            population = 0
            _next = 1

            def __init__(self, name):
                self.name = name
                self.number = self._next
                self._next += 1
                self.population += 1

            def die(self):
                self.population -= 1
        """,
    ),
    case(
        "hit counter by the name of a page",
        "state and counters",
        "Hits",
        """
        h = Hits()
        assert h.hit("a") == 1
        assert h.hit("a") == 2
        assert h.hit("b") == 1
        assert h.most_common() == "a"
        assert h.total == 3
        assert Hits().total == 0
        """,
        """
        class Hits:
            def __init__(self):
                self._counts = {}

            def hit(self, page):
                self._counts[page] = self._counts.get(page, 0) + 1
                return self._counts[page]

            def most_common(self):
                return max(self._counts, key=self._counts.get)

            @property
            def total(self):
                return sum(self._counts.values())
        """,
        """
        class Hits:
            _counts = {}

            def hit(self, page):
                self._counts[page] = self._counts.get(page, 0) + 1
                return self._counts[page]

            def most_common(self):
                return max(self._counts, key=self._counts.get)

            @property
            def total(self):
                return sum(self._counts.values())
        """,
    ),
    case(
        "settings shared until overridden",
        "state and counters",
        "Settings",
        """
        a, b = Settings(), Settings()
        assert a.theme == b.theme == "light"
        Settings.theme = "dark"
        assert a.theme == "dark" and b.theme == "dark"
        a.theme = "blue"
        assert b.theme == "dark" and Settings.theme == "dark"
        del a.theme
        assert a.theme == "dark"
        """,
        """
        class Settings:
            theme = "light"
        """,
    ),
    case(
        "singleton keeps one object",
        "state and counters",
        "Config",
        """
        one = Config()
        two = Config()
        assert one is two
        one.set("port", 80)
        assert two.get("port") == 80
        assert two.get("host", "localhost") == "localhost"
        """,
        """
        class Config:
            _instance = None

            def __new__(cls):
                if cls._instance is None:
                    cls._instance = super().__new__(cls)
                    cls._instance._values = {}
                return cls._instance

            def set(self, key, value):
                self._values[key] = value

            def get(self, key, default=None):
                return self._values.get(key, default)
        """,
        """
        class Config:
            def __init__(self):
                self._values = {}

            def set(self, key, value):
                self._values[key] = value

            def get(self, key, default=None):
                return self._values.get(key, default)
        """,
    ),
    case(
        "identifier generator restarts",
        "state and counters",
        "Ticket",
        """
        import unittest
        from solution import Ticket

        class TicketTest(unittest.TestCase):
            def setUp(self):
                Ticket.reset()

            def test_first(self):
                self.assertEqual(Ticket().id, "T-001")

            def test_sequence(self):
                self.assertEqual([Ticket().id for _ in range(3)], ["T-001", "T-002", "T-003"])

            def test_issued(self):
                Ticket()
                Ticket()
                self.assertEqual(Ticket.issued, 2)
        """,
        """
        class Ticket:
            issued = 0

            def __init__(self):
                Ticket.issued += 1
                self.id = f"T-{Ticket.issued:03d}"

            @classmethod
            def reset(cls):
                cls.issued = 0
        """,
    ),
    case(
        "rectangle with checked setters",
        "properties",
        "Rectangle",
        """
        r = Rectangle(2, 3)
        assert r.area == 6
        r.width = 10
        assert r.area == 30
        for bad in (0, -1):
            try:
                r.height = bad
            except ValueError:
                pass
            else:
                raise AssertionError("accepted")
        assert r.height == 3
        try:
            r.area = 5
            assert False
        except AttributeError:
            pass
        """,
        """
        class Rectangle:
            def __init__(self, width, height):
                self.width = width
                self.height = height

            @property
            def width(self):
                return self._width

            @width.setter
            def width(self, value):
                if value <= 0:
                    raise ValueError("width")
                self._width = value

            @property
            def height(self):
                return self._height

            @height.setter
            def height(self, value):
                if value <= 0:
                    raise ValueError("height")
                self._height = value

            @property
            def area(self):
                return self._width * self._height
        """,
    ),
    case(
        "celsius and fahrenheit in step",
        "properties",
        "Thermometer",
        (
            "t = Thermometer(100)\nassert t.fahrenheit == 212",
            "t = Thermometer(0)\nt.fahrenheit = 50\nassert t.celsius == 10",
            "assert Thermometer.from_fahrenheit(32).celsius == 0",
        ),
        """
        class Thermometer:
            def __init__(self, celsius):
                self.celsius = celsius

            @property
            def fahrenheit(self):
                return self.celsius * 9 / 5 + 32

            @fahrenheit.setter
            def fahrenheit(self, value):
                self.celsius = (value - 32) * 5 / 9

            @classmethod
            def from_fahrenheit(cls, value):
                made = cls(0)
                made.fahrenheit = value
                return made
        """,
    ),
    case(
        "date parsed by alternative constructors",
        "properties",
        "Day",
        asserts("""
        assert Day.parse("2024-02-29").month == 2
        assert Day.is_leap(2024) and not Day.is_leap(1900)
        assert Day.parse("2023-01-05").as_tuple() == (2023, 1, 5)
        assert Day(2024, 3, 1).is_leap(2000)
        """),
        """
        class Day:
            def __init__(self, year, month, day):
                self.year, self.month, self.day = year, month, day

            @classmethod
            def parse(cls, text):
                return cls(*map(int, text.split("-")))

            @staticmethod
            def is_leap(year):
                return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)

            def as_tuple(self):
                return (self.year, self.month, self.day)
        """,
        """
        class Day:
            def __init__(self, year, month, day):
                self.year, self.month, self.day = year, month, day

            @classmethod
            def parse(cls, text):
                return cls(*map(int, text.split("-")))

            @staticmethod
            def is_leap(year):
                return year % 4 == 0

            def as_tuple(self):
                return (self.year, self.month, self.day)
        """,
    ),
    case(
        "cached property computes once",
        "properties",
        "Report",
        """
        calls = []
        def load():
            calls.append(1)
            return [3, 1, 2]

        r = Report(load)
        assert calls == []
        assert r.rows == [1, 2, 3]
        assert r.rows is r.rows
        assert len(calls) == 1
        """,
        """
        from functools import cached_property

        class Report:
            def __init__(self, load):
                self._load = load

            @cached_property
            def rows(self):
                return sorted(self._load())
        """,
        """
        class Report:
            def __init__(self, load):
                self._load = load

            @property
            def rows(self):
                return sorted(self._load())
        """,
    ),
    case(
        "attributes by name",
        "properties",
        "Namespace",
        """
        n = Namespace(a=1, b=Namespace(c=2))
        assert n.a == 1
        assert n.b.c == 2
        n.d = 4
        assert hasattr(n, "d") and not hasattr(n, "missing")
        assert getattr(n, "missing", 0) == 0
        assert n.to_dict() == {"a": 1, "b": {"c": 2}, "d": 4}
        setattr(n, "a", 7)
        assert n.a == 7
        """,
        """
        class Namespace:
            def __init__(self, **values):
                self.__dict__.update(values)

            def to_dict(self):
                return {
                    k: v.to_dict() if isinstance(v, Namespace) else v
                    for k, v in self.__dict__.items()
                }
        """,
    ),
    case(
        "read-only vector by getattr",
        "properties",
        "RGB",
        """
        import pytest

        def test_channels():
            c = RGB(1, 2, 3)
            assert (c.red, c.green, c.blue) == (1, 2, 3)

        def test_frozen():
            c = RGB(1, 2, 3)
            with pytest.raises(AttributeError):
                c.red = 9

        def test_hex():
            assert RGB(255, 0, 16).hex == "#ff0010"

        def test_unknown():
            with pytest.raises(AttributeError, match="alpha"):
                RGB(0, 0, 0).alpha
        """,
        """
        class RGB:
            def __init__(self, *channels):
                object.__setattr__(self, "_channels", dict(zip(("red", "green", "blue"), channels)))

            def __getattr__(self, name):
                try:
                    return self._channels[name]
                except KeyError:
                    raise AttributeError(name) from None

            def __setattr__(self, name, value):
                raise AttributeError("read-only")

            @property
            def hex(self):
                return "#" + "".join(f"{c:02x}" for c in self._channels.values())
        """,
    ),
    case(
        "isinstance of a hierarchy",
        "type checks",
        ("Animal", "Dog", "Cat"),
        """
        d = Dog("Rex")
        assert isinstance(d, Dog) and isinstance(d, Animal)
        assert not isinstance(d, Cat) and not isinstance(Cat("Tom"), Dog)
        assert issubclass(Dog, Animal) and not issubclass(Dog, Cat)
        assert type(d) is Dog
        assert type(d) is not Animal
        assert d.speak() == "Rex says Woof"
        assert Cat("Tom").speak() == "Tom says Meow"
        """,
        """
        class Animal:
            sound = "..."

            def __init__(self, name):
                self.name = name

            def speak(self):
                return f"{self.name} says {self.sound}"

        class Dog(Animal):
            sound = "Woof"

        class Cat(Animal):
            sound = "Meow"
        """,
        """
        class Animal:
            sound = "..."

            def __init__(self, name):
                self.name = name

            def speak(self):
                return f"{self.name} says {self.sound}"

        class Dog(Animal):
            sound = "Woof"

        class Cat(Dog):
            sound = "Meow"
        """,
    ),
    case(
        "factory returns the right class",
        "type checks",
        ("make", "Circle", "Square"),
        """
        shapes = [make("circle", 1), make("square", 2)]
        assert [type(s).__name__ for s in shapes] == ["Circle", "Square"]
        assert isinstance(shapes[0], Circle)
        assert shapes[1].__class__ is Square
        assert shapes[1].size == 2
        try:
            make("hexagon", 1)
        except KeyError as error:
            assert error.args == ("hexagon",)
        else:
            raise AssertionError
        """,
        """
        class Circle:
            def __init__(self, size):
                self.size = size

        class Square:
            def __init__(self, size):
                self.size = size

        def make(kind, size):
            return {"circle": Circle, "square": Square}[kind](size)
        """,
        """
        class Circle:
            def __init__(self, size):
                self.size = size

        class Square(Circle):
            pass

        def make(kind, size):
            return Circle(size)
        """,
    ),
    case(
        "operators keep the class",
        "type checks",
        "Meters",
        asserts("""
        assert type(Meters(3) + Meters(4)) is Meters
        assert isinstance(Meters(2), int)
        assert Meters(3) + Meters(4) == 7
        assert repr(Meters(5)) == "5m"
        """),
        """
        class Meters(int):
            def __add__(self, other):
                return Meters(int(self) + int(other))

            def __repr__(self):
                return f"{int(self)}m"
        """,
        """
        class Meters(int):
            def __repr__(self):
                return f"{int(self)}m"
        """,
    ),
    case(
        "dict subclass with attributes",
        "type checks",
        "AttrDict",
        """
        d = AttrDict({"a": 1})
        assert isinstance(d, dict)
        assert d.a == 1
        d.b = 2
        assert d == {"a": 1, "b": 2}
        assert sorted(d.items()) == [("a", 1), ("b", 2)]
        assert type(d.copy()) is AttrDict
        """,
        """
        class AttrDict(dict):
            def __getattr__(self, name):
                try:
                    return self[name]
                except KeyError as error:
                    raise AttributeError(name) from error

            def __setattr__(self, name, value):
                self[name] = value

            def copy(self):
                return AttrDict(self)
        """,
    ),
    case(
        "list subclass counts changes",
        "type checks",
        "Tracked",
        """
        t = Tracked([1, 2])
        t.append(3)
        t[0] = 9
        assert t == [9, 2, 3]
        assert isinstance(t, list)
        assert t.changes == 2
        assert sum(t) == 14
        """,
        """
        class Tracked(list):
            def __init__(self, *args):
                super().__init__(*args)
                self.changes = 0

            def append(self, item):
                self.changes += 1
                super().append(item)

            def __setitem__(self, at, item):
                self.changes += 1
                super().__setitem__(at, item)
        """,
    ),
    case(
        "same class after a method",
        "type checks",
        ("Node", "Leaf"),
        """
        import unittest

        class TestKinds(unittest.TestCase):
            def test_leaf_is_a_node(self):
                self.assertIsInstance(Leaf(1), Node)

            def test_grow_makes_nodes(self):
                grown = Leaf(1).grow(Leaf(2))
                self.assertIs(type(grown), Node)
                self.assertNotIsInstance(grown, Leaf)
                self.assertEqual(grown.total(), 3)
        """,
        """
        class Node:
            def __init__(self, *children):
                self.children = children

            def total(self):
                return sum(child.total() for child in self.children)

        class Leaf(Node):
            def __init__(self, value):
                super().__init__()
                self.value = value

            def total(self):
                return self.value

            def grow(self, other):
                return Node(self, other)
        """,
    ),
    case(
        "students by grade and name",
        "sorting objects",
        ("Student", "top"),
        """
        students = [Student("Bo", 70), Student("Al", 90), Student("Cy", 90)]
        assert [s.name for s in sorted(students, key=lambda s: s.name)] == ["Al", "Bo", "Cy"]
        students.sort(key=lambda s: (-s.grade, s.name))
        assert [s.name for s in students] == ["Al", "Cy", "Bo"]
        assert top(students).name == "Al"
        assert min(students, key=lambda s: s.grade).name == "Bo"
        """,
        """
        class Student:
            def __init__(self, name, grade):
                self.name, self.grade = name, grade

        def top(students):
            return max(students, key=lambda s: s.grade)
        """,
    ),
    case(
        "cards by their own order",
        "sorting objects",
        "PlayingCard",
        """
        hand = [PlayingCard("K"), PlayingCard("2"), PlayingCard("A"), PlayingCard("10")]
        assert [c.rank for c in sorted(hand)] == ["2", "10", "K", "A"]
        assert max(hand).rank == "A"
        hand.sort(reverse=True)
        assert hand[0].rank == "A" and hand[-1].rank == "2"
        """,
        """
        class PlayingCard:
            ORDER = "2 3 4 5 6 7 8 9 10 J Q K A".split()

            def __init__(self, rank):
                self.rank = rank

            def __lt__(self, other):
                return self.ORDER.index(self.rank) < self.ORDER.index(other.rank)
        """,
        """
        class PlayingCard:
            def __init__(self, rank):
                self.rank = rank

            def __lt__(self, other):
                return self.rank < other.rank
        """,
    ),
    case(
        "tasks in a heap",
        "sorting objects",
        "Task",
        """
        import heapq

        heap = []
        for t in (Task("write", 3), Task("eat", 1), Task("run", 2)):
            heapq.heappush(heap, t)
        assert [heapq.heappop(heap).name for _ in range(3)] == ["eat", "run", "write"]
        """,
        """
        class Task:
            def __init__(self, name, priority):
                self.name, self.priority = name, priority

            def __lt__(self, other):
                return self.priority < other.priority
        """,
        """
        class Task:
            def __init__(self, name, priority):
                self.name, self.priority = name, priority

            def __lt__(self, other):
                return self.name > other.name
        """,
    ),
    case(
        "grouped and bisected objects",
        "sorting objects",
        "Event",
        """
        import bisect
        import itertools

        events = [Event(9, "a"), Event(9, "b"), Event(12, "c")]
        hours = {h: [e.what for e in g] for h, g in itertools.groupby(events, lambda e: e.hour)}
        assert hours == {9: ["a", "b"], 12: ["c"]}
        assert bisect.bisect_left(events, 12, key=lambda e: e.hour) == 2
        assert bisect.bisect(events, Event(10, "x")) == 2
        """,
        """
        from dataclasses import dataclass

        @dataclass(order=True)
        class Event:
            hour: int
            what: str
        """,
    ),
    case(
        "shop sorts its own products",
        "sorting objects",
        ("Product", "cheapest_first"),
        """
        from operator import attrgetter

        items = [Product("pen", 2), Product("ink", 9), Product("cap", 1)]
        ordered = cheapest_first(items)
        assert list(map(attrgetter("name"), ordered)) == ["cap", "pen", "ink"]
        assert ordered[0] is items[2]
        assert [p.name for p in items] == ["pen", "ink", "cap"]
        """,
        """
        class Product:
            def __init__(self, name, price):
                self.name = name
                self.price = price

        def cheapest_first(products):
            return sorted(products, key=lambda p: p.price)
        """,
        """
        class Product:
            def __init__(self, name, price):
                self.name = name
                self.price = price

        def cheapest_first(products):
            products.sort(key=lambda p: p.price)
            return products
        """,
    ),
    case(
        "deep copy of a document",
        "copies of objects",
        "Document",
        """
        import copy

        d = Document(["a"], {"by": "me"})
        e = copy.deepcopy(d)
        e.pages.append("b")
        e.meta["by"] = "you"
        assert d.pages == ["a"] and d.meta == {"by": "me"}
        s = copy.copy(d)
        assert s is not d and s.pages is d.pages
        """,
        """
        class Document:
            def __init__(self, pages, meta):
                self.pages = pages
                self.meta = meta
        """,
    ),
    case(
        "clone method of a board",
        "copies of objects",
        "Board",
        """
        b = Board(2)
        b.put(0, 0, "X")
        c = b.clone()
        c.put(1, 1, "O")
        assert b.cells == [["X", None], [None, None]]
        assert c.cells == [["X", None], [None, "O"]]
        assert b != c and b == b.clone()
        """,
        """
        class Board:
            def __init__(self, n):
                self.cells = [[None] * n for _ in range(n)]

            def put(self, r, c, mark):
                self.cells[r][c] = mark

            def clone(self):
                other = Board(0)
                other.cells = [row[:] for row in self.cells]
                return other

            def __eq__(self, other):
                return self.cells == other.cells
        """,
        """
        class Board:
            def __init__(self, n):
                self.cells = [[None] * n for _ in range(n)]

            def put(self, r, c, mark):
                self.cells[r][c] = mark

            def clone(self):
                other = Board(0)
                other.cells = self.cells[:]
                return other

            def __eq__(self, other):
                return self.cells == other.cells
        """,
    ),
    case(
        "pickled user",
        "copies of objects",
        "User",
        """
        import pickle

        u = User("ann", ["admin"])
        v = pickle.loads(pickle.dumps(u))
        assert v is not u
        assert v == u
        assert v.roles == ["admin"] and v.roles is not u.roles
        assert v.session is None
        """,
        """
        class User:
            def __init__(self, name, roles):
                self.name, self.roles = name, roles
                self.session = object()

            def __getstate__(self):
                return {"name": self.name, "roles": self.roles, "session": None}

            def __eq__(self, other):
                return (self.name, self.roles) == (other.name, other.roles)
        """,
        """
        class User:
            def __init__(self, name, roles):
                self.name, self.roles = name, roles
                self.session = 1

            def __eq__(self, other):
                return (self.name, self.roles) == (other.name, other.roles)
        """,
    ),
    case(
        "json there and back",
        "copies of objects",
        "Recipe",
        """
        import json

        r = Recipe("soup", ["water", "salt"])
        text = r.to_json()
        assert json.loads(text) == {"name": "soup", "parts": ["water", "salt"]}
        back = Recipe.from_json(text)
        assert back.name == "soup" and back.parts == ["water", "salt"]
        assert Recipe.from_json(back.to_json()).to_json() == text
        """,
        """
        import json

        class Recipe:
            def __init__(self, name, parts):
                self.name, self.parts = name, parts

            def to_json(self):
                return json.dumps(vars(self))

            @classmethod
            def from_json(cls, text):
                return cls(**json.loads(text))
        """,
    ),
    case(
        "json encoder for a class",
        "copies of objects",
        ("Size", "SizeEncoder"),
        """
        import json

        def test_encode():
            assert json.dumps({"s": Size(1, 2)}, cls=SizeEncoder) == '{"s": {"w": 1, "h": 2}}'

        def test_other_data_stays():
            assert json.dumps([1, "a"], cls=SizeEncoder) == '[1, "a"]'
        """,
        """
        import json

        class Size:
            def __init__(self, w, h):
                self.w, self.h = w, h

        class SizeEncoder(json.JSONEncoder):
            def default(self, o):
                return vars(o) if isinstance(o, Size) else super().default(o)
        """,
        """
        import json

        class Size:
            def __init__(self, w, h):
                self.w, self.h = w, h

        class SizeEncoder(json.JSONEncoder):
            def default(self, o):
                return [o.w, o.h]
        """,
    ),
    case(
        "replace of a frozen dataclass",
        "copies of objects",
        "Pixel",
        """
        import dataclasses

        p = Pixel(1, 2)
        q = dataclasses.replace(p, y=5)
        assert (q.x, q.y) == (1, 5) and p.y == 2
        assert dataclasses.asdict(q) == {"x": 1, "y": 5}
        assert dataclasses.astuple(p) == (1, 2)
        try:
            p.x = 3
        except dataclasses.FrozenInstanceError:
            pass
        else:
            assert False
        """,
        """
        import dataclasses

        @dataclasses.dataclass(frozen=True)
        class Pixel:
            x: int
            y: int
        """,
    ),
    case(
        "observer by weak reference",
        "weak references",
        ("Subject", "Listener"),
        """
        import gc

        s = Subject()
        a, b = Listener(), Listener()
        s.attach(a)
        s.attach(b)
        assert s.notify("one") == 2
        del b
        gc.collect()
        assert s.notify("two") == 1
        assert a.seen == ["one", "two"]
        """,
        """
        import weakref

        class Listener:
            def __init__(self):
                self.seen = []

        class Subject:
            def __init__(self):
                self._listeners = weakref.WeakSet()

            def attach(self, listener):
                self._listeners.add(listener)

            def notify(self, what):
                for listener in self._listeners:
                    listener.seen.append(what)
                return len(self._listeners)
        """,
        """
        class Listener:
            def __init__(self):
                self.seen = []

        class Subject:
            def __init__(self):
                self._listeners = []

            def attach(self, listener):
                self._listeners.append(listener)

            def notify(self, what):
                for listener in self._listeners:
                    listener.seen.append(what)
                return len(self._listeners)
        """,
    ),
    case(
        "reference to a live object",
        "weak references",
        "Texture",
        """
        import weakref

        t = Texture("wood")
        r = weakref.ref(t)
        assert r() is t
        assert r().name == "wood"
        del t
        assert r() is None
        """,
        """
        class Texture:
            __slots__ = ("name", "__weakref__")

            def __init__(self, name):
                self.name = name
        """,
        """
        class Texture:
            alive = []

            def __init__(self, name):
                self.name = name
                Texture.alive.append(self)
        """,
    ),
    case(
        "cache forgets dead values",
        "weak references",
        ("Image", "ImageCache"),
        """
        cache = ImageCache()
        first = cache.get("a.png")
        assert cache.get("a.png") is first
        assert len(cache) == 1
        del first
        assert len(cache) == 0
        """,
        """
        import weakref

        class Image:
            def __init__(self, path):
                self.path = path

        class ImageCache:
            def __init__(self):
                self._images = weakref.WeakValueDictionary()

            def get(self, path):
                image = self._images.get(path)
                if image is None:
                    image = self._images[path] = Image(path)
                return image

            def __len__(self):
                return len(self._images)
        """,
    ),
    case(
        "parent of a tree node is weak",
        "weak references",
        "TreeItem",
        """
        root = TreeItem("root")
        leaf = root.add("leaf")
        assert leaf.parent is root
        assert leaf.path() == "root/leaf"
        del root
        assert leaf.parent is None
        assert leaf.path() == "leaf"
        """,
        """
        import weakref

        class TreeItem:
            def __init__(self, name, parent=None):
                self.name = name
                self._parent = weakref.ref(parent) if parent is not None else lambda: None
                self.children = []

            @property
            def parent(self):
                return self._parent()

            def add(self, name):
                child = TreeItem(name, self)
                self.children.append(child)
                return child

            def path(self):
                return f"{self.parent.path()}/{self.name}" if self.parent else self.name
        """,
    ),
    case(
        "finalizer is called at the end",
        "weak references",
        "Resource",
        """
        closed = []
        r = Resource("db", closed.append)
        assert closed == []
        r.close()
        r.close()
        assert closed == ["db"]
        s = Resource("log", closed.append)
        del s
        assert closed == ["db", "log"]
        """,
        """
        import weakref

        class Resource:
            def __init__(self, name, on_close):
                self.name = name
                self._finalizer = weakref.finalize(self, on_close, name)

            def close(self):
                self._finalizer()
        """,
    ),
    case(
        "dataclass with defaults",
        "records",
        "Config2",
        """
        from solution import Config2

        def test_defaults():
            c = Config2("main")
            assert c.name == "main" and c.tags == [] and c.level == 1

        def test_equality_and_repr():
            assert Config2("a") == Config2("a")
            assert repr(Config2("a", ["x"])) == "Config2(name='a', tags=['x'], level=1)"

        def test_lists_are_not_shared():
            one, two = Config2("a"), Config2("b")
            one.tags.append("x")
            assert two.tags == []
        """,
        """
        from dataclasses import dataclass, field

        @dataclass
        class Config2:
            name: str
            tags: list = field(default_factory=list)
            level: int = 1
        """,
        """
        class Config2:
            def __init__(self, name, tags=[], level=1):
                self.name, self.tags, self.level = name, tags, level

            def __eq__(self, other):
                return vars(self) == vars(other)

            def __repr__(self):
                return f"Config2(name={self.name!r}, tags={self.tags!r}, level={self.level!r})"
        """,
    ),
    case(
        "named tuple of a measurement",
        "records",
        "Measure",
        asserts("""
        assert Measure(1, "m") == (1, "m")
        assert Measure(1, "m")._replace(unit="km").unit == "km"
        assert Measure(1, "m")._fields == ("value", "unit")
        assert Measure(2, "kg")._asdict() == {"value": 2, "unit": "kg"}
        assert Measure(3, "s").text() == "3 s"
        """),
        """
        from typing import NamedTuple

        class Measure(NamedTuple):
            value: float
            unit: str

            def text(self):
                return f"{self.value} {self.unit}"
        """,
    ),
    case(
        "traffic light enum",
        "records",
        "Light",
        """
        assert Light.RED.next() is Light.GREEN
        assert Light.GREEN.next() == Light.YELLOW
        assert [light.name for light in Light] == ["RED", "GREEN", "YELLOW"]
        assert Light("red") is Light.RED
        assert Light["YELLOW"].value == "yellow"
        assert len(Light) == 3 and Light.RED in Light
        """,
        """
        from enum import Enum

        class Light(Enum):
            RED = "red"
            GREEN = "green"
            YELLOW = "yellow"

            def next(self):
                members = list(Light)
                return members[(members.index(self) + 1) % len(members)]
        """,
        """
        from enum import Enum

        class Light(Enum):
            RED = "red"
            GREEN = "green"
            YELLOW = "yellow"

            def next(self):
                return Light.GREEN
        """,
    ),
    case(
        "permission flags",
        "records",
        "Permission",
        asserts("""
        assert Permission.READ | Permission.WRITE == Permission(3)
        assert Permission.READ in (Permission.READ | Permission.EXEC)
        assert Permission.WRITE not in (Permission.READ | Permission.EXEC)
        assert Permission.parse("rx") == Permission.READ | Permission.EXEC
        assert not Permission.parse("")
        """),
        """
        from enum import Flag, auto

        class Permission(Flag):
            READ = auto()
            WRITE = auto()
            EXEC = auto()

            @classmethod
            def parse(cls, text):
                result = cls(0)
                for letter, flag in zip("rwx", cls):
                    if letter in text:
                        result |= flag
                return result
        """,
    ),
    case(
        "dataclass with post init and order",
        "records",
        "Employee",
        """
        a = Employee("Ann", "Lee", 100.0)
        assert a.email == "ann.lee@example.com"
        assert a < Employee("Zoe", "Lee", 1.0)
        assert a == Employee("Ann", "Lee", 100.0)
        assert {a: 1}[Employee("Ann", "Lee", 100.0)] == 1
        """,
        """
        from dataclasses import dataclass, field

        @dataclass(order=True, unsafe_hash=True)
        class Employee:
            first: str
            last: str
            salary: float
            email: str = field(init=False)

            def __post_init__(self):
                self.email = f"{self.first}.{self.last}@example.com".lower()
        """,
    ),
    case(
        "weekday int enum compares",
        "records",
        "Weekday",
        """
        import unittest
        from solution import Weekday

        class WeekdayTest(unittest.TestCase):
            def test_order(self):
                self.assertLess(Weekday.MON, Weekday.SUN)
                self.assertEqual(sorted([Weekday.SUN, Weekday.MON])[0], Weekday.MON)

            def test_weekend(self):
                self.assertEqual([d for d in Weekday if d.weekend], [Weekday.SAT, Weekday.SUN])

            def test_number(self):
                self.assertEqual(Weekday.WED + 0, 3)
        """,
        """
        from enum import IntEnum

        class Weekday(IntEnum):
            MON = 1
            TUE = 2
            WED = 3
            THU = 4
            FRI = 5
            SAT = 6
            SUN = 7

            @property
            def weekend(self):
                return self >= Weekday.SAT
        """,
    ),
)

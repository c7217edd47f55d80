"""Tests that judge nothing, as people write them by accident.

A kind says which programs pass: any at all, any whose calls return, or any whose results are of a
very wide sort. ``right`` is the program that the tests were meant for.
"""

from __future__ import annotations

from .cases import Case, case

ANY = "passes for any program"
RETURNS = "passes for any program that returns"
LOADS = "passes for any program that defines the name"
OTHER_TYPE = "passes for any program that returns another type"

EMPTY: tuple[Case, ...] = (
    case(
        "a literal is asserted",
        RETURNS,
        "double",
        """
        double(4)
        assert True
        """,
        """
        def double(x):
            return 2 * x
        """,
    ),
    case(
        "a tuple with a message",
        RETURNS,
        "cube",
        """
        assert (cube(2) == 8, "cube of two")
        """,
        """
        def cube(x):
            return x**3
        """,
    ),
    case(
        "or true",
        RETURNS,
        "is_even",
        """
        assert is_even(2) or True
        """,
        """
        def is_even(n):
            return n % 2 == 0
        """,
    ),
    case(
        "an instance of object",
        RETURNS,
        "parse_int",
        """
        result = parse_int("12")
        assert isinstance(result, object)
        """,
        """
        def parse_int(text):
            return int(text)
        """,
    ),
    case(
        "compared with another call",
        RETURNS,
        "slugify",
        """
        assert slugify("A b") == slugify("A b")
        """,
        """
        def slugify(text):
            return text.lower().replace(" ", "-")
        """,
    ),
    case(
        "length of the text of it",
        RETURNS,
        "shorten",
        """
        assert len(str(shorten("abcdef", 3))) >= 0
        """,
        """
        def shorten(text, n):
            return text[:n]
        """,
    ),
    case(
        "assertion error is swallowed",
        ANY,
        "gcd",
        """
        try:
            assert gcd(12, 18) == 6
        except Exception:
            pass
        """,
        """
        def gcd(a, b):
            while b:
                a, b = b, a % b
            return a
        """,
    ),
    case(
        "the failure is printed",
        ANY,
        "lcm",
        """
        try:
            assert lcm(4, 6) == 12
            print("passed")
        except AssertionError as error:
            print("failed", error)
        """,
        """
        import math

        def lcm(a, b):
            return a * b // math.gcd(a, b)
        """,
    ),
    case(
        "checks that nobody calls",
        LOADS,
        "reverse_words",
        """
        def check_reverse():
            assert reverse_words("a b") == "b a"
            assert reverse_words("") == ""
        """,
        """
        def reverse_words(text):
            return " ".join(reversed(text.split()))
        """,
    ),
    case(
        "a loop over no examples",
        LOADS,
        "roman",
        """
        examples = []
        for number, wanted in examples:
            assert roman(number) == wanted
        """,
        """
        def roman(n):
            out = ""
            for value, sign in ((10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I")):
                while n >= value:
                    out += sign
                    n -= value
            return out
        """,
    ),
    case(
        "a comparison without assert",
        RETURNS,
        "fib",
        """
        fib(10) == 55
        fib(1) == 1
        """,
        """
        def fib(n):
            a, b = 0, 1
            for _ in range(n):
                a, b = b, a + b
            return a
        """,
    ),
    case(
        "not ellipsis",
        RETURNS,
        "mean",
        """
        assert mean([1, 2, 3]) is not Ellipsis
        """,
        """
        def mean(xs):
            return sum(xs) / len(xs)
        """,
    ),
    case(
        "assertTrue with an expected value as message",
        RETURNS,
        "label",
        """
        import unittest

        class LabelTest(unittest.TestCase):
            def test_label(self):
                self.assertTrue([label(3)], "three")
                self.assertTrue(str(label(3)) + "!", "three!")
        """,
        """
        def label(n):
            return ["zero", "one", "two", "three"][n]
        """,
    ),
    case(
        "unit tests without assertions",
        RETURNS,
        "normalize",
        """
        import unittest

        class NormalizeTest(unittest.TestCase):
            def test_simple(self):
                result = normalize("  A ")
                print(result)

            def test_empty(self):
                normalize("")
        """,
        """
        def normalize(text):
            return text.strip().lower()
        """,
    ),
    case(
        "a mock of which nothing is asked",
        RETURNS,
        "notify",
        """
        from unittest.mock import Mock

        def test_notify():
            mailer = Mock()
            notify(mailer, "ann")
            mailer.send.called
            mailer.send.call_args
        """,
        """
        def notify(mailer, who):
            mailer.send(who, "hello")
        """,
    ),
    case(
        "a mock that has any attribute",
        RETURNS,
        "publish",
        """
        from unittest.mock import MagicMock

        def test_publish():
            bus = MagicMock()
            publish(bus, {"id": 1})
            assert bus.emit
            assert bus.emit.was_called_with({"id": 1})
        """,
        """
        def publish(bus, message):
            bus.emit(message)
        """,
    ),
    case(
        "all tests are skipped",
        LOADS,
        "transpile",
        """
        import unittest

        @unittest.skip("needs a network")
        class TranspileTest(unittest.TestCase):
            def test_print(self):
                self.assertEqual(transpile("print 1"), "print(1)")
        """,
        """
        def transpile(line):
            word, rest = line.split(" ", 1)
            return f"{word}({rest})"
        """,
    ),
    case(
        "behind if False",
        LOADS,
        "abbreviate",
        """
        if False:
            assert abbreviate("as soon as possible") == "ASAP"
        """,
        """
        def abbreviate(text):
            return "".join(word[0] for word in text.split()).upper()
        """,
    ),
    case(
        "equal to itself by assertEqual",
        RETURNS,
        "area",
        """
        import unittest

        class AreaTest(unittest.TestCase):
            def test_area(self):
                result = area(2, 3)
                self.assertEqual(result, result)
        """,
        """
        def area(a, b):
            return a * b
        """,
    ),
    case(
        "callable",
        LOADS,
        "encrypt",
        """
        assert callable(encrypt)
        """,
        """
        def encrypt(text):
            return text[::-1]
        """,
    ),
    case(
        "a name that is defined",
        LOADS,
        "decrypt",
        """
        assert "decrypt" in globals()
        assert decrypt is not None
        """,
        """
        def decrypt(text):
            return text[::-1]
        """,
    ),
    case(
        "the result equals the result",
        RETURNS,
        "flatten",
        """
        result = flatten([1, [2, [3]]])
        expected = result
        assert result == expected
        """,
        """
        def flatten(xs):
            return [y for x in xs for y in (flatten(x) if isinstance(x, list) else [x])]
        """,
    ),
    case(
        "asserts in a callback that is never reached",
        RETURNS,
        "each_pair",
        """
        def check(a, b):
            assert a < b

        each_pair([1, 2, 3], check)
        """,
        """
        def each_pair(xs, visit):
            for a, b in zip(xs, xs[1:]):
                visit(a, b)
        """,
    ),
    case(
        "the input is compared with itself",
        RETURNS,
        "sort_in_place",
        """
        data = [3, 1, 2]
        sort_in_place(data)
        assert sorted(data) == sorted(data)
        """,
        """
        def sort_in_place(xs):
            xs.sort()
        """,
    ),
    case(
        "a permutation of the same list",
        RETURNS,
        "shuffle_list",
        """
        from collections import Counter

        xs = [1, 2, 3]
        before = xs
        shuffle_list(xs)
        assert Counter(xs) == Counter(before)
        """,
        """
        import random

        def shuffle_list(xs):
            random.shuffle(xs)
        """,
    ),
    case(
        "expected is computed from the result",
        RETURNS,
        "total",
        """
        result = total([1, 2, 3])
        expected = [result][0]
        assert [result] == [expected]
        """,
        """
        def total(xs):
            return sum(xs)
        """,
    ),
    case(
        "the test raises by itself",
        ANY,
        "divide",
        """
        import pytest

        def test_divide_by_zero():
            with pytest.raises(ZeroDivisionError):
                divide(1, 0 / 0)
        """,
        """
        def divide(a, b):
            return a / b
        """,
    ),
    case(
        "raises around a missing import",
        ANY,
        "load",
        """
        import pytest

        def test_missing_file():
            with pytest.raises(Exception):
                load(missing_name)
        """,
        """
        def load(path):
            with open(path) as f:
                return f.read()
        """,
    ),
    case(
        "hasattr of any object",
        LOADS,
        "Circle",
        """
        c = Circle(2)
        assert hasattr(c, "__class__")
        assert c is not None
        """,
        """
        class Circle:
            def __init__(self, r):
                self.r = r

            def area(self):
                return 3.14159 * self.r**2
        """,
    ),
    case(
        "an object equals itself",
        LOADS,
        "Vector",
        """
        v = Vector(1, 2)
        assert v == v
        assert id(v) == id(v)
        """,
        """
        class Vector:
            def __init__(self, x, y):
                self.x, self.y = x, y

            def __eq__(self, other):
                return (self.x, self.y) == (other.x, other.y)
        """,
    ),
    case(
        "an instance of its own class",
        LOADS,
        "Stack",
        """
        s = Stack()
        assert isinstance(s, Stack)
        assert type(s).__name__ == "Stack"
        """,
        """
        class Stack:
            def __init__(self):
                self.items = []

            def push(self, x):
                self.items.append(x)
        """,
    ),
    case(
        "methods are called and nothing is asked",
        RETURNS,
        "Account",
        """
        a = Account(100)
        a.deposit(50)
        a.withdraw(30)
        a.balance()
        print("all tests passed")
        """,
        """
        class Account:
            def __init__(self, start):
                self._balance = start

            def deposit(self, amount):
                self._balance += amount

            def withdraw(self, amount):
                self._balance -= amount

            def balance(self):
                return self._balance
        """,
    ),
    case(
        "hash is equal to itself",
        RETURNS,
        "key_of",
        """
        k = key_of("a", 1)
        assert id(k) == id(k)
        assert (k,) == (k,)
        """,
        """
        def key_of(name, number):
            return f"{name}:{number}"
        """,
    ),
    case(
        "none or something else",
        RETURNS,
        "find_user",
        """
        user = find_user(7)
        assert user is None or user is not None
        """,
        """
        def find_user(number):
            return {7: "ann"}.get(number)
        """,
    ),
    case(
        "true or false is in both",
        RETURNS,
        "is_prime",
        """
        answer = bool(is_prime(7))
        assert answer in (True, False)
        """,
        """
        def is_prime(n):
            return n > 1 and all(n % d for d in range(2, n))
        """,
    ),
    case(
        "not equal to an unlikely text",
        RETURNS,
        "greeting",
        """
        assert greeting("Ann") != "this never happens"
        """,
        """
        def greeting(name):
            return f"Hello {name}"
        """,
    ),
    case(
        "not equal to a new object",
        RETURNS,
        "lookup",
        """
        assert lookup("k") != object()
        assert lookup("k") is not lookup
        """,
        """
        def lookup(key):
            return {"k": 1}[key]
        """,
    ),
    case(
        "expected failure of a wrong expectation",
        RETURNS,
        "power",
        """
        import unittest

        class PowerTest(unittest.TestCase):
            @unittest.expectedFailure
            def test_power(self):
                self.assertEqual(power(2, 3), "eight")
        """,
        """
        def power(a, b):
            return a**b
        """,
    ),
    case(
        "xfail is not strict",
        ANY,
        "route",
        """
        import pytest

        @pytest.mark.xfail
        def test_route():
            assert route("/a/b") == ["a", "b"]
        """,
        """
        def route(path):
            return path.strip("/").split("/")
        """,
    ),
    case(
        "skipped by pytest at run time",
        LOADS,
        "render",
        """
        import pytest

        def test_render():
            if not hasattr(render, "__wrapped__"):
                pytest.skip("no template engine")
            assert render("{x}", x=1) == "1"
        """,
        """
        def render(template, **values):
            return template.format(**values)
        """,
    ),
    case(
        "early return before the assert",
        RETURNS,
        "rotate",
        """
        def test_rotate():
            result = rotate([1, 2, 3], 1)
            return
            assert result == [3, 1, 2]
        """,
        """
        def rotate(xs, k):
            return xs[-k:] + xs[:-k]
        """,
    ),
    case(
        "returns the comparison",
        RETURNS,
        "merge",
        """
        def test_merge():
            return merge([1], [2]) == [1, 2]
        """,
        """
        def merge(a, b):
            return a + b
        """,
    ),
    case(
        "parametrized but only one constant is asserted",
        RETURNS,
        "clamp",
        """
        import pytest

        @pytest.mark.parametrize("x, wanted", [(5, 5), (11, 10), (-1, 0)])
        def test_clamp(x, wanted):
            clamp(x, 0, 10)
            assert wanted in (5, 10, 0)
        """,
        """
        def clamp(x, low, high):
            return max(low, min(high, x))
        """,
    ),
    case(
        "helper that compares its argument with itself",
        RETURNS,
        "initials",
        """
        def same(actual, expected):
            return actual == actual

        assert same(initials("Ann Lee"), "AL")
        """,
        """
        def initials(name):
            return "".join(w[0] for w in name.split())
        """,
    ),
    case(
        "helper returns instead of asserting",
        RETURNS,
        "median",
        """
        def expect(actual, wanted):
            return actual == wanted

        expect(median([3, 1, 2]), 2)
        expect(median([5]), 5)
        """,
        """
        def median(xs):
            return sorted(xs)[len(xs) // 2]
        """,
    ),
    case(
        "all of nothing",
        RETURNS,
        "primes_to",
        """
        results = [r for r in [primes_to(10)] if r == "impossible"]
        assert all(r == [2, 3, 5, 7] for r in results)
        """,
        """
        def primes_to(n):
            return [k for k in range(2, n) if all(k % d for d in range(2, k))]
        """,
    ),
    case(
        "any that includes true",
        RETURNS,
        "contains",
        """
        assert any([contains("abc", "b") == "yes", True])
        """,
        """
        def contains(text, part):
            return part in text
        """,
    ),
    case(
        "a lambda is truthy",
        LOADS,
        "add",
        """
        assert lambda: add(1, 2) == 3
        """,
        """
        def add(a, b):
            return a + b
        """,
    ),
    case(
        "a generator expression is truthy",
        LOADS,
        "square",
        """
        assert (square(x) == x * x for x in range(5))
        """,
        """
        def square(x):
            return x * x
        """,
    ),
    case(
        "a list of verdicts is truthy",
        RETURNS,
        "negate",
        """
        assert [negate(x) == -x for x in range(5)]
        """,
        """
        def negate(x):
            return -x
        """,
    ),
    case(
        "a method without the call",
        LOADS,
        "join_words",
        """
        import unittest

        class JoinTest(unittest.TestCase):
            def test_join(self):
                self.assertEqual
                assert self.assertEqual
                assert join_words
        """,
        """
        def join_words(words):
            return " ".join(words)
        """,
    ),
    case(
        "an assert of a set method's none turned round",
        RETURNS,
        "dedupe",
        """
        seen = set()
        assert not seen.add(str(dedupe([1, 1])))
        """,
        """
        def dedupe(xs):
            return list(dict.fromkeys(xs))
        """,
    ),
    case(
        "a file that the test wrote itself",
        RETURNS,
        "save",
        """
        import os
        import tempfile

        path = os.path.join(tempfile.mkdtemp(), "out.txt")
        open(path, "w").close()
        save(path, "text")
        assert os.path.exists(path)
        """,
        """
        def save(path, text):
            with open(path, "w") as f:
                f.write(text)
        """,
    ),
    case(
        "output captured and not looked at",
        RETURNS,
        "hello",
        """
        def test_hello(capsys):
            hello("Ann")
            out = capsys.readouterr().out
            assert isinstance(out, str)
        """,
        """
        def hello(name):
            print("Hello", name)
        """,
    ),
    case(
        "output contains the empty text",
        RETURNS,
        "banner",
        """
        import contextlib
        import io

        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            banner("x")
        assert "" in out.getvalue()
        assert out.getvalue().startswith("")
        """,
        """
        def banner(text):
            print("*" * 5, text, "*" * 5)
        """,
    ),
    case(
        "mock's return value is asserted",
        RETURNS,
        "price_of",
        """
        from unittest.mock import Mock

        def test_price():
            shop = Mock()
            shop.price.return_value = 5
            price_of(shop, "pen")
            assert shop.price("pen") == 5
            shop.price.assert_called_with("pen")
        """,
        """
        def price_of(shop, name):
            return shop.price(name) * 2
        """,
    ),
    case(
        "patch replaces the function under test",
        LOADS,
        "fetch",
        """
        from unittest.mock import patch
        import solution

        def test_fetch():
            with patch("solution.fetch", return_value={"ok": True}):
                assert solution.fetch("http://x") == {"ok": True}
        """,
        """
        def fetch(url):
            return {"ok": url.startswith("http")}
        """,
    ),
    case(
        "test overwrites the function",
        LOADS,
        "capitalize",
        """
        def capitalize(text):
            return text[:1].upper() + text[1:]

        assert capitalize("abc") == "Abc"
        assert capitalize("") == ""
        """,
        """
        def capitalize(text):
            return text[:1].upper() + text[1:]
        """,
    ),
    case(
        "reference solution tests itself",
        LOADS,
        "collatz",
        """
        def reference(n):
            return 0 if n == 1 else 1 + reference(n // 2 if n % 2 == 0 else 3 * n + 1)

        for n in (1, 6, 7):
            assert reference(n) == reference(n)
        assert reference(6) == 8
        """,
        """
        def collatz(n):
            steps = 0
            while n != 1:
                n = n // 2 if n % 2 == 0 else 3 * n + 1
                steps += 1
            return steps
        """,
    ),
    case(
        "inputs are asserted",
        RETURNS,
        "interval",
        """
        low, high = 2, 5
        interval(low, high)
        assert low < high
        assert high - low == 3
        """,
        """
        def interval(a, b):
            return list(range(a, b))
        """,
    ),
    case(
        "comparison of types of the same value",
        RETURNS,
        "convert",
        """
        r = convert("5")
        assert type(r) == type(r)
        assert isinstance(r, type(r))
        """,
        """
        def convert(text):
            return int(text)
        """,
    ),
    case(
        "assertIs with itself and assertIsNotNone of a list",
        RETURNS,
        "chunk",
        """
        import unittest

        class ChunkTest(unittest.TestCase):
            def test_chunk(self):
                parts = chunk([1, 2, 3], 2)
                self.assertIs(parts, parts)
                self.assertIsNotNone([parts])
                self.assertIn(parts, [parts, None])
        """,
        """
        def chunk(xs, n):
            return [xs[i : i + n] for i in range(0, len(xs), n)]
        """,
    ),
    case(
        "run time is not negative",
        RETURNS,
        "slow_sum",
        """
        import time

        start = time.perf_counter()
        slow_sum(1000)
        assert time.perf_counter() - start >= 0
        """,
        """
        def slow_sum(n):
            return sum(range(n))
        """,
    ),
    case(
        "runs fast enough",
        RETURNS,
        "fast_power",
        """
        import time

        def test_speed():
            start = time.time()
            fast_power(2, 10_000)
            assert time.time() - start < 10
        """,
        """
        def fast_power(a, n):
            return a**n
        """,
    ),
    case(
        "assertRaises without a call",
        LOADS,
        "check_age",
        """
        import unittest

        class AgeTest(unittest.TestCase):
            def test_negative(self):
                context = self.assertRaises(ValueError)
                check_age
                self.assertIsNotNone(context)
        """,
        """
        def check_age(n):
            if n < 0:
                raise ValueError("age")
            return n
        """,
    ),
    case(
        "suppress around the assert",
        ANY,
        "tokenize",
        """
        import contextlib

        with contextlib.suppress(Exception):
            assert tokenize("a+b") == ["a", "+", "b"]
        """,
        """
        import re

        def tokenize(text):
            return re.findall(r"\\w+|\\S", text)
        """,
    ),
    case(
        "either raises or returns",
        ANY,
        "sqrt",
        """
        try:
            result = sqrt(-1)
            assert result is result
        except Exception:
            assert True
        """,
        """
        def sqrt(x):
            if x < 0:
                raise ValueError("negative")
            return x**0.5
        """,
    ),
    case(
        "finally returns",
        ANY,
        "evaluate",
        """
        def test_evaluate():
            try:
                assert evaluate("1+2") == 3
            finally:
                return
        """,
        """
        def evaluate(text):
            return sum(int(x) for x in text.split("+"))
        """,
    ),
    case(
        "thread hides the failure",
        ANY,
        "increment",
        """
        import threading

        def work():
            assert increment(1) == 2

        t = threading.Thread(target=work)
        t.start()
        t.join()
        assert not t.is_alive()
        """,
        """
        def increment(x):
            return x + 1
        """,
    ),
    case(
        "coroutine is never awaited",
        LOADS,
        "fetch_all",
        """
        import asyncio

        async def check():
            assert await fetch_all([1]) == [2]

        checks = check()
        assert asyncio.iscoroutine(checks)
        checks.close()
        """,
        """
        async def fetch_all(xs):
            return [x + 1 for x in xs]
        """,
    ),
    case(
        "a coroutine object is truthy",
        LOADS,
        "download",
        """
        result = download("x")
        assert result
        result.close()
        """,
        """
        async def download(url):
            return f"body of {url}"
        """,
    ),
    case(
        "gathered exceptions are not looked at",
        ANY,
        "worker",
        """
        import asyncio

        async def check(n):
            assert await worker(n) == n * 10

        async def main():
            return await asyncio.gather(check(1), check(2), return_exceptions=True)

        assert len(asyncio.run(main())) == 2
        """,
        """
        import asyncio

        async def worker(n):
            await asyncio.sleep(0)
            return n * 10
        """,
    ),
    case(
        "nested test function is not collected",
        RETURNS,
        "balance",
        """
        def test_balance():
            balance("()")

            def test_inner():
                assert balance("()") is True
        """,
        """
        def balance(text):
            depth = 0
            for c in text:
                depth += 1 if c == "(" else -1
                if depth < 0:
                    return False
            return depth == 0
        """,
    ),
    case(
        "misspelled test method beside a trivial one",
        LOADS,
        "median_of",
        """
        import unittest

        class MedianTest(unittest.TestCase):
            def test_setup(self):
                self.assertTrue(True)

            def tets_median(self):
                self.assertEqual(median_of([1, 2, 3]), 2)
        """,
        """
        def median_of(xs):
            return sorted(xs)[len(xs) // 2]
        """,
    ),
    case(
        "second definition hides the first",
        RETURNS,
        "sign",
        """
        def test_sign():
            assert sign(-3) == -1

        def test_sign():
            sign(3)
        """,
        """
        def sign(x):
            return (x > 0) - (x < 0)
        """,
    ),
    case(
        "fixture asks, test does not",
        RETURNS,
        "Counter",
        """
        import pytest

        @pytest.fixture
        def counter():
            return Counter()

        def test_exists(counter):
            assert counter is not None

        def test_increments(counter):
            counter.increment()
            counter.increment()
        """,
        """
        class Counter:
            def __init__(self):
                self.value = 0

            def increment(self):
                self.value += 1
        """,
    ),
    case(
        "subtests over no rows",
        LOADS,
        "score",
        """
        import unittest

        class ScoreTest(unittest.TestCase):
            ROWS = {}

            def test_rows(self):
                for word, wanted in self.ROWS.items():
                    with self.subTest(word=word):
                        self.assertEqual(score(word), wanted)
        """,
        """
        def score(word):
            return sum(ord(c) - 96 for c in word)
        """,
    ),
    case(
        "while loop that does not begin",
        LOADS,
        "next_prime",
        """
        n, checked = 10, 0
        while n < 10:
            assert next_prime(n) > n
            n += 1
        assert checked == 0
        """,
        """
        def next_prime(n):
            n += 1
            while any(n % d == 0 for d in range(2, n)):
                n += 1
            return n
        """,
    ),
    case(
        "only when the result is of the right type",
        OTHER_TYPE,
        "stats",
        """
        r = stats([1, 2, 3])
        if isinstance(r, dict):
            assert r["mean"] == 2
        """,
        """
        def stats(xs):
            return {"mean": sum(xs) / len(xs), "n": len(xs)}
        """,
    ),
    case(
        "main guard of a script that is imported",
        LOADS,
        "caesar",
        """
        import unittest

        class Nothing(unittest.TestCase):
            def test_import(self):
                self.assertTrue(callable(caesar))

        if __name__ == "never":
            assert caesar("abc", 1) == "bcd"
        """,
        """
        def caesar(text, k):
            return "".join(chr((ord(c) - 97 + k) % 26 + 97) for c in text)
        """,
    ),
    case(
        "documentation only",
        LOADS,
        "frequency",
        """
        '''
        >>> frequency("aab")
        {'a': 2, 'b': 1}
        '''
        assert frequency.__class__
        """,
        """
        def frequency(text):
            return {c: text.count(c) for c in text}
        """,
    ),
    case(
        "almost equal within a huge delta",
        RETURNS,
        "distance",
        """
        import unittest

        class DistanceTest(unittest.TestCase):
            def test_distance(self):
                d = distance((0, 0), (3, 4))
                self.assertAlmostEqual(len(repr(d)), 5, delta=1000)
        """,
        """
        def distance(a, b):
            return ((a[0] - b[0]) ** 2 + (a[1] - b[1]) ** 2) ** 0.5
        """,
    ),
)

"""Right functions, modules and small designs on ordinary tests."""

from __future__ import annotations

from .cases import Case, asserts, case

LIST_NODE = """
class ListNode:
    def __init__(self, val=0, next=None):
        self.val = val
        self.next = next


def build(values):
    head = None
    for v in reversed(values):
        head = ListNode(v, head)
    return head


def values(node):
    out = []
    while node:
        out.append(node.val)
        node = node.next
    return out
"""

TREE_NODE = """
class TreeNode:
    def __init__(self, val=0, left=None, right=None):
        self.val = val
        self.left = left
        self.right = right


def tree(values):
    nodes = [None if v is None else TreeNode(v) for v in values]
    children = iter(nodes[1:])
    for node in nodes:
        if node is not None:
            node.left = next(children, None)
            node.right = next(children, None)
    return nodes[0] if nodes else None
"""

RIGHT_FUNCTIONS: tuple[Case, ...] = (
    case(
        "words of a temporary file",
        "files",
        "count_words",
        """
        import os
        import tempfile

        with tempfile.NamedTemporaryFile("w", suffix=".txt", delete=False) as f:
            f.write("one two\\nthree\\n")
        assert count_words(f.name) == 3
        os.unlink(f.name)
        """,
        """
        def count_words(path):
            with open(path) as f:
                return len(f.read().split())
        """,
        """
        def count_words(path):
            with open(path) as f:
                return len(f.read())
        """,
    ),
    case(
        "file written in the working folder",
        "files",
        "save_lines",
        """
        save_lines("out.txt", ["a", "b"])
        with open("out.txt") as f:
            assert f.read() == "a\\nb\\n"
        import os
        assert os.listdir(".").count("out.txt") == 1
        """,
        """
        def save_lines(path, lines):
            with open(path, "w") as f:
                f.writelines(line + "\\n" for line in lines)
        """,
        """
        def save_lines(path, lines):
            with open(path, "w") as f:
                f.writelines(lines)
        """,
    ),
    case(
        "csv rows summed by column",
        "files",
        "column_sum",
        """
        import csv

        with open("data.csv", "w", newline="") as f:
            csv.writer(f).writerows([["name", "n"], ["a", 1], ["b", 5]])
        assert column_sum("data.csv", "n") == 6
        """,
        """
        import csv

        def column_sum(path, column):
            with open(path, newline="") as f:
                return sum(int(row[column]) for row in csv.DictReader(f))
        """,
    ),
    case(
        "tree of folders is listed",
        "files",
        "python_files",
        """
        import tempfile
        from pathlib import Path

        with tempfile.TemporaryDirectory() as d:
            root = Path(d)
            (root / "pkg").mkdir()
            (root / "pkg" / "b.py").write_text("")
            (root / "a.py").touch()
            (root / "c.txt").touch()
            assert python_files(d) == ["a.py", "pkg/b.py"]
        """,
        """
        from pathlib import Path

        def python_files(root):
            root = Path(root)
            return sorted(p.relative_to(root).as_posix() for p in root.rglob("*.py"))
        """,
    ),
    case(
        "json settings are updated on disk",
        "files",
        "set_option",
        """
        import json
        import os

        path = "settings.json"
        set_option(path, "a", 1)
        set_option(path, "b", [2])
        assert json.load(open(path)) == {"a": 1, "b": [2]}
        os.remove(path)
        """,
        """
        import json
        import os

        def set_option(path, key, value):
            options = {}
            if os.path.exists(path):
                with open(path) as f:
                    options = json.load(f)
            options[key] = value
            with open(path, "w") as f:
                json.dump(options, f)
        """,
        """
        import json

        def set_option(path, key, value):
            with open(path, "w") as f:
                json.dump({key: value}, f)
        """,
    ),
    case(
        "open file is read from its place",
        "files",
        "rest_of",
        """
        import io

        f = io.StringIO("head\\nbody\\nend\\n")
        f.readline()
        assert rest_of(f) == ["body", "end"]
        assert f.read() == ""
        """,
        """
        def rest_of(file):
            return [line.strip() for line in file]
        """,
    ),
    case(
        "predicate of the test partitions",
        "objects of the test",
        "partition",
        """
        calls = []

        def small(x):
            calls.append(x)
            return x < 3

        assert partition(small, [5, 1, 2, 9]) == ([1, 2], [5, 9])
        assert calls == [5, 1, 2, 9]
        assert partition(str.isupper, ["A", "b"]) == (["A"], ["b"])
        """,
        """
        def partition(predicate, xs):
            yes, no = [], []
            for x in xs:
                (yes if predicate(x) else no).append(x)
            return yes, no
        """,
        """
        def partition(predicate, xs):
            return [x for x in xs if predicate(x)], [x for x in xs if not predicate(x)]
        """,
    ),
    case(
        "duck with a method",
        "objects of the test",
        "make_noise",
        """
        class Duck:
            def __init__(self):
                self.heard = 0

            def quack(self, times=1):
                self.heard += times
                return "quack" * times

        d = Duck()
        assert make_noise(d) == "QUACKQUACK"
        assert d.heard == 2
        """,
        """
        def make_noise(animal):
            return animal.quack(times=2).upper()
        """,
    ),
    case(
        "compose functions",
        "objects of the test",
        "compose",
        """
        inc = lambda x: x + 1
        double = lambda x: x * 2
        assert compose(inc, double)(5) == 11
        assert compose(double, inc)(5) == 12
        assert compose()(7) == 7
        assert compose(len, str)(1234) == 4
        """,
        """
        from functools import reduce

        def compose(*functions):
            return reduce(lambda f, g: lambda x: f(g(x)), functions, lambda x: x)
        """,
        """
        from functools import reduce

        def compose(*functions):
            return reduce(lambda f, g: lambda x: g(f(x)), functions, lambda x: x)
        """,
    ),
    case(
        "objects of a local class are grouped",
        "objects of the test",
        "group_by",
        """
        from dataclasses import dataclass

        @dataclass
        class Car:
            make: str
            year: int

        cars = [Car("vw", 1999), Car("bmw", 2005), Car("vw", 2010)]
        groups = group_by(cars, "make")
        assert [c.year for c in groups["vw"]] == [1999, 2010]
        assert groups["bmw"] == [Car("bmw", 2005)]
        assert groups["bmw"][0] is cars[1]
        """,
        """
        def group_by(objects, attribute):
            groups = {}
            for o in objects:
                groups.setdefault(getattr(o, attribute), []).append(o)
            return groups
        """,
        """
        def group_by(objects, attribute):
            return {getattr(o, attribute): [o] for o in objects}
        """,
    ),
    case(
        "retry calls until it succeeds",
        "objects of the test",
        "retry",
        """
        class Flaky:
            def __init__(self, failures):
                self.left = failures

            def __call__(self):
                if self.left:
                    self.left -= 1
                    raise ConnectionError("down")
                return "up"

        assert retry(Flaky(2), 3) == "up"
        f = Flaky(5)
        try:
            retry(f, 3)
        except ConnectionError as error:
            assert str(error) == "down" and f.left == 2
        else:
            assert False
        """,
        """
        def retry(function, times):
            for left in reversed(range(times)):
                try:
                    return function()
                except ConnectionError:
                    if not left:
                        raise
        """,
        """
        def retry(function, times):
            try:
                return function()
            except ConnectionError:
                return function()
        """,
    ),
    case(
        "sequence protocol of the test's object",
        "objects of the test",
        "binary_search",
        """
        class Squares:
            def __init__(self):
                self.reads = 0

            def __len__(self):
                return 1000

            def __getitem__(self, i):
                self.reads += 1
                return i * i

        s = Squares()
        assert binary_search(s, 810_000) == 900
        assert s.reads < 25
        assert binary_search(Squares(), 145) == -1
        """,
        """
        def binary_search(xs, target):
            low, high = 0, len(xs) - 1
            while low <= high:
                middle = (low + high) // 2
                value = xs[middle]
                if value == target:
                    return middle
                if value < target:
                    low = middle + 1
                else:
                    high = middle - 1
            return -1
        """,
        """
        def binary_search(xs, target):
            for i in range(len(xs)):
                if xs[i] == target:
                    return i
            return -1
        """,
    ),
    case(
        "sample follows the test's seed",
        "seeds of random",
        "draw",
        """
        import random

        random.seed(7)
        expected = random.sample(range(49), 6)
        random.seed(7)
        assert draw(6) == expected
        assert len(set(draw(6))) == 6
        """,
        """
        import random

        def draw(n):
            return random.sample(range(49), n)
        """,
        """
        def draw(n):
            return list(range(n))
        """,
    ),
    case(
        "a generator of random numbers is given",
        "seeds of random",
        "shuffled",
        """
        import random

        a = shuffled("abcdef", random.Random(3))
        b = shuffled("abcdef", random.Random(3))
        assert a == b
        assert sorted(a) == list("abcdef")
        r = random.Random(3)
        letters = list("abcdef")
        r.shuffle(letters)
        assert a == letters
        """,
        """
        def shuffled(items, rng):
            items = list(items)
            rng.shuffle(items)
            return items
        """,
    ),
    case(
        "seed is an argument",
        "seeds of random",
        "password",
        """
        assert password(8, seed=1) == password(8, seed=1)
        assert password(8, seed=1) != password(8, seed=2)
        assert len(password(12, seed=0)) == 12
        assert password(5, seed=9).isalnum()
        """,
        """
        import random
        import string

        def password(n, seed=None):
            rng = random.Random(seed)
            return "".join(rng.choice(string.ascii_letters + string.digits) for _ in range(n))
        """,
        """
        import random
        import string

        def password(n, seed=None):
            return "".join(random.choice(string.ascii_letters) for _ in range(n))
        """,
    ),
    case(
        "dice of the program and of the test",
        "seeds of random",
        "roll",
        """
        import random

        random.seed(123)
        mine = [random.randint(1, 6) for _ in range(4)]
        random.seed(123)
        assert roll(2) + roll(2) == mine
        random.seed(123)
        assert roll(1) + [random.randint(1, 6)] == mine[:2]
        """,
        """
        from random import randint

        def roll(n):
            return [randint(1, 6) for _ in range(n)]
        """,
    ),
    case(
        "program seeds for the test",
        "seeds of random",
        "reproducible",
        """
        import random

        reproducible(5)
        a = random.random()
        reproducible(5)
        assert random.random() == a
        state = random.getstate()
        x = random.random()
        random.setstate(state)
        assert random.random() == x
        """,
        """
        import random

        def reproducible(seed):
            random.seed(seed)
        """,
        """
        def reproducible(seed):
            pass
        """,
    ),
    case(
        "walk is fair on the average",
        "seeds of random",
        "walk",
        """
        import random
        import statistics

        random.seed(0)
        ends = [walk(100) for _ in range(200)]
        assert abs(statistics.mean(ends)) < 3
        assert all(end % 2 == 0 for end in ends)
        assert 5 < statistics.pstdev(ends) < 15
        """,
        """
        import random

        def walk(steps):
            return sum(random.choice((-1, 1)) for _ in range(steps))
        """,
        """
        def walk(steps):
            return 0
        """,
    ),
    case(
        "decorator counts calls",
        "decorators",
        "counted",
        """
        @counted
        def hello(name, punctuation="!"):
            return f"hello {name}{punctuation}"

        assert hello("a") == "hello a!"
        assert hello("b", punctuation="?") == "hello b?"
        assert hello.calls == 2
        assert hello.__name__ == "hello"
        """,
        """
        import functools

        def counted(function):
            @functools.wraps(function)
            def wrapper(*args, **kwargs):
                wrapper.calls += 1
                return function(*args, **kwargs)

            wrapper.calls = 0
            return wrapper
        """,
        """
        def counted(function):
            def wrapper(*args, **kwargs):
                wrapper.calls += 1
                return function(*args, **kwargs)

            wrapper.calls = 0
            return wrapper
        """,
    ),
    case(
        "decorator memoizes the test's function",
        "decorators",
        "memoize",
        """
        seen = []

        @memoize
        def slow(n):
            seen.append(n)
            return n * n

        assert [slow(3), slow(3), slow(4)] == [9, 9, 16]
        assert seen == [3, 4]
        """,
        """
        def memoize(function):
            cache = {}

            def wrapper(*args):
                if args not in cache:
                    cache[args] = function(*args)
                return cache[args]

            return wrapper
        """,
        """
        def memoize(function):
            return function
        """,
    ),
    case(
        "decorator with arguments repeats",
        "decorators",
        "repeat",
        """
        log = []

        @repeat(times=3)
        def note(x):
            log.append(x)
            return len(log)

        assert note("a") == [1, 2, 3]
        assert log == ["a", "a", "a"]
        """,
        """
        def repeat(times):
            def decorate(function):
                def wrapper(*args, **kwargs):
                    return [function(*args, **kwargs) for _ in range(times)]

                return wrapper

            return decorate
        """,
    ),
    case(
        "decorator of a class adds a repr",
        "decorators",
        "auto_repr",
        """
        @auto_repr
        class Pair:
            def __init__(self, a, b):
                self.a = a
                self.b = b

        assert repr(Pair(1, "x")) == "Pair(a=1, b='x')"
        assert Pair.__name__ == "Pair"
        """,
        """
        def auto_repr(cls):
            def __repr__(self):
                fields = ", ".join(f"{k}={v!r}" for k, v in vars(self).items())
                return f"{cls.__name__}({fields})"

            cls.__repr__ = __repr__
            return cls
        """,
    ),
    case(
        "decorator checks types by annotations",
        "decorators",
        "typed",
        """
        @typed
        def area(w: int, h: int) -> int:
            return w * h

        assert area(2, 3) == 6
        try:
            area("2", 3)
        except TypeError as error:
            assert str(error) == "w must be int"
        else:
            assert False
        """,
        """
        import functools
        import inspect

        def typed(function):
            signature = inspect.signature(function)

            @functools.wraps(function)
            def wrapper(*args, **kwargs):
                for name, value in signature.bind(*args, **kwargs).arguments.items():
                    wanted = function.__annotations__.get(name)
                    if wanted and not isinstance(value, wanted):
                        raise TypeError(f"{name} must be {wanted.__name__}")
                return function(*args, **kwargs)

            return wrapper
        """,
        """
        def typed(function):
            return function
        """,
    ),
    case(
        "routes are registered",
        "decorators",
        ("route", "dispatch"),
        """
        @route("/")
        def index():
            return "home"

        @route("/user")
        def user():
            return "user"

        assert dispatch("/") == "home"
        assert dispatch("/user") == "user"
        assert dispatch("/none") == "404"
        """,
        """
        _routes = {}

        def route(path):
            def register(function):
                _routes[path] = function
                return function

            return register

        def dispatch(path):
            handler = _routes.get(path)
            return handler() if handler else "404"
        """,
    ),
    case(
        "remove an element and return the rest's length",
        "in place",
        "Solution",
        """
        nums = [3, 2, 2, 3]
        k = Solution().removeElement(nums, 3)
        assert k == 2
        assert sorted(nums[:k]) == [2, 2]
        """,
        """
        class Solution:
            def removeElement(self, nums: list[int], val: int) -> int:
                k = 0
                for x in nums:
                    if x != val:
                        nums[k] = x
                        k += 1
                return k
        """,
        """
        class Solution:
            def removeElement(self, nums: list[int], val: int) -> int:
                return len([x for x in nums if x != val])
        """,
    ),
    case(
        "merge into the first list",
        "in place",
        "merge",
        """
        nums1 = [1, 3, 5, 0, 0]
        expected = [1, 2, 3, 4, 5]
        assert merge(nums1, 3, [2, 4], 2) is None
        assert len(nums1) == len(expected)
        for got, want in zip(nums1, expected):
            assert got == want
        """,
        """
        def merge(nums1, m, nums2, n):
            nums1[m:] = nums2[:n]
            nums1.sort()
        """,
        """
        def merge(nums1, m, nums2, n):
            nums1 = sorted(nums1[:m] + nums2[:n])
        """,
    ),
    case(
        "image is rotated in place",
        "in place",
        "rotate",
        """
        image = [[1, 2], [3, 4]]
        alias = image
        rotate(image)
        assert image == [[3, 1], [4, 2]]
        assert alias is image
        rotate(image)
        rotate(image)
        rotate(image)
        assert image == [[1, 2], [3, 4]]
        """,
        """
        def rotate(matrix):
            matrix[:] = [list(row) for row in zip(*matrix[::-1])]
        """,
    ),
    case(
        "inventory is changed and returned",
        "in place",
        "restock",
        """
        stock = {"a": 1}
        result = restock(stock, {"a": 2, "b": 3})
        assert result is stock
        assert stock == {"a": 3, "b": 3}
        """,
        """
        def restock(stock, delivery):
            for name, n in delivery.items():
                stock[name] = stock.get(name, 0) + n
            return stock
        """,
        """
        def restock(stock, delivery):
            stock = dict(stock)
            for name, n in delivery.items():
                stock[name] = stock.get(name, 0) + n
            return stock
        """,
    ),
    case(
        "sudoku is filled in place",
        "in place",
        "fill",
        """
        board = [[1, 0], [0, 0]]
        assert fill(board) is True
        assert board == [[1, 2], [2, 1]]
        full = [[1, 1], [0, 0]]
        assert fill(full) is False
        """,
        """
        def fill(board):
            n = len(board)
            for r in range(n):
                for c in range(n):
                    if board[r][c] and (
                        board[r].count(board[r][c]) > 1
                        or [row[c] for row in board].count(board[r][c]) > 1
                    ):
                        return False
            for r in range(n):
                for c in range(n):
                    if board[r][c] == 0:
                        for v in range(1, n + 1):
                            if v not in board[r] and all(row[c] != v for row in board):
                                board[r][c] = v
                                if fill(board):
                                    return True
                                board[r][c] = 0
                        return False
            return True
        """,
    ),
    case(
        "quicksort works on the list itself",
        "in place",
        "quicksort",
        """
        import random

        for n in (0, 1, 2, 10, 50):
            xs = [random.randint(-9, 9) for _ in range(n)]
            want = sorted(xs)
            quicksort(xs)
            assert xs == want, n
        """,
        """
        def quicksort(xs, low=0, high=None):
            high = len(xs) - 1 if high is None else high
            if low >= high:
                return
            pivot, i = xs[high], low
            for j in range(low, high):
                if xs[j] <= pivot:
                    xs[i], xs[j] = xs[j], xs[i]
                    i += 1
            xs[i], xs[high] = xs[high], xs[i]
            quicksort(xs, low, i - 1)
            quicksort(xs, i + 1, high)
        """,
        """
        def quicksort(xs):
            if len(xs) < 2:
                return xs
            p, *rest = xs
            small, large = [x for x in rest if x < p], [x for x in rest if x >= p]
            return quicksort(small) + [p] + quicksort(large)
        """,
    ),
    case(
        "gather keeps the order",
        "asyncio",
        "fetch",
        """
        import asyncio

        async def main():
            return await asyncio.gather(*(fetch(n) for n in (3, 1, 2)))

        assert asyncio.run(main()) == ["page 3", "page 1", "page 2"]
        """,
        """
        import asyncio

        async def fetch(n):
            await asyncio.sleep(n / 1000)
            return f"page {n}"
        """,
        """
        import asyncio

        pages = []

        async def fetch(n):
            pages.append(n)
            await asyncio.sleep(0)
            return f"page {len(pages)}"
        """,
    ),
    case(
        "coroutine takes a coroutine function",
        "asyncio",
        "with_timeout",
        """
        import asyncio

        async def quick():
            return "ok"

        async def slow():
            await asyncio.sleep(30)

        assert asyncio.run(with_timeout(quick, 1)) == "ok"
        assert asyncio.run(with_timeout(slow, 0.01)) is None
        """,
        """
        import asyncio

        async def with_timeout(function, seconds):
            try:
                return await asyncio.wait_for(function(), seconds)
            except asyncio.TimeoutError:
                return None
        """,
    ),
    case(
        "asynchronous generator counts down",
        "asyncio",
        "countdown",
        """
        import asyncio

        async def collect():
            return [n async for n in countdown(3)]

        assert asyncio.run(collect()) == [3, 2, 1]

        async def first():
            async for n in countdown(9):
                return n

        assert asyncio.run(first()) == 9
        """,
        """
        import asyncio

        async def countdown(n):
            while n:
                yield n
                n -= 1
                await asyncio.sleep(0)
        """,
    ),
    case(
        "asynchronous context manager",
        "asyncio",
        "Session",
        """
        import asyncio

        async def main():
            async with Session() as s:
                assert s.open
                await s.send("hi")
            return s

        s = asyncio.run(main())
        assert not s.open
        assert s.sent == ["hi"]
        """,
        """
        class Session:
            async def __aenter__(self):
                self.open, self.sent = True, []
                return self

            async def __aexit__(self, *_):
                self.open = False

            async def send(self, text):
                self.sent.append(text)
        """,
        """
        class Session:
            async def __aenter__(self):
                self.open, self.sent = True, []
                return self

            async def __aexit__(self, *_):
                pass

            async def send(self, text):
                self.sent.append(text)
        """,
    ),
    case(
        "limited number of workers",
        "asyncio",
        "run_limited",
        """
        import asyncio

        running = peak = 0

        async def job(n):
            global running, peak
            running += 1
            peak = max(peak, running)
            await asyncio.sleep(0.002)
            running -= 1
            return n

        jobs = [lambda n=n: job(n) for n in range(6)]
        assert asyncio.run(run_limited(jobs, 2)) == list(range(6))
        assert peak == 2
        """,
        """
        import asyncio

        async def run_limited(jobs, limit):
            gate = asyncio.Semaphore(limit)

            async def one(job):
                async with gate:
                    return await job()

            return await asyncio.gather(*(one(job) for job in jobs))
        """,
        """
        import asyncio

        async def run_limited(jobs, limit):
            return await asyncio.gather(*(job() for job in jobs))
        """,
    ),
    case(
        "producer and consumer share a queue",
        "asyncio",
        "pump",
        """
        import asyncio

        async def main():
            queue = asyncio.Queue()
            await pump(queue, "abc")
            return [await queue.get() for _ in range(queue.qsize())]

        assert asyncio.run(main()) == ["a", "b", "c", None]
        """,
        """
        async def pump(queue, items):
            for item in items:
                await queue.put(item)
            await queue.put(None)
        """,
    ),
    case(
        "defaults in the signature",
        "inspection",
        "connect",
        """
        import inspect

        parameters = inspect.signature(connect).parameters
        assert parameters["port"].default == 80
        assert parameters["secure"].kind is inspect.Parameter.KEYWORD_ONLY
        assert connect("h") == "http://h:80"
        assert connect("h", 443, secure=True) == "https://h:443"
        """,
        """
        def connect(host, port=80, *, secure=False):
            return f"http{'s' if secure else ''}://{host}:{port}"
        """,
        """
        def connect(host, port=80, secure=False):
            return f"http{'s' if secure else ''}://{host}:{port}"
        """,
    ),
    case(
        "docstring and name",
        "inspection",
        "gcd",
        """
        assert gcd.__name__ == "gcd"
        assert gcd.__doc__ and "greatest" in gcd.__doc__
        assert gcd(12, 8) == 4
        """,
        """
        def gcd(a, b):
            \"\"\"The greatest common divisor.\"\"\"
            return gcd(b, a % b) if b else a
        """,
        """
        def gcd(a, b):
            return gcd(b, a % b) if b else a
        """,
    ),
    case(
        "annotations of the function",
        "inspection",
        "scale",
        """
        import typing

        hints = typing.get_type_hints(scale)
        assert hints["factor"] is float
        assert hints["return"] == list[float]
        assert scale([1.0, 2.0], 2.0) == [2.0, 4.0]
        """,
        """
        def scale(xs: list[float], factor: float) -> list[float]:
            return [x * factor for x in xs]
        """,
        """
        def scale(xs, factor):
            return [x * factor for x in xs]
        """,
    ),
    case(
        "kinds of functions",
        "inspection",
        ("stream", "job"),
        """
        import inspect

        assert inspect.isgeneratorfunction(stream)
        assert inspect.iscoroutinefunction(job)
        assert not inspect.isclass(stream)
        assert list(stream(2)) == [0, 1]
        """,
        """
        def stream(n):
            yield from range(n)

        async def job():
            return 1
        """,
        """
        def stream(n):
            return range(n)

        async def job():
            return 1
        """,
    ),
    case(
        "methods of a class are listed",
        "inspection",
        "Api",
        """
        import inspect

        public = [n for n, _ in inspect.getmembers(Api, inspect.isfunction) if n[0] != "_"]
        assert public == ["get", "post"]
        assert inspect.getdoc(Api.get) == "Read."
        assert list(inspect.signature(Api.post).parameters) == ["self", "path", "body"]
        assert Api().get("/") == "GET /"
        """,
        """
        class Api:
            def get(self, path):
                \"\"\"Read.\"\"\"
                return f"GET {path}"

            def post(self, path, body):
                return f"POST {path} {body}"

            def _send(self):
                pass
        """,
    ),
    case(
        "wrapped function is reachable",
        "inspection",
        "traced",
        """
        import inspect

        def plain(a, b=2):
            "Adds."
            return a + b

        t = traced(plain)
        assert t(1) == 3
        assert t.__doc__ == "Adds."
        assert t.__wrapped__ is plain
        assert str(inspect.signature(t)) == "(a, b=2)"
        """,
        """
        from functools import wraps

        def traced(f):
            @wraps(f)
            def inner(*a, **k):
                return f(*a, **k)

            return inner
        """,
        """
        def traced(f):
            def inner(*a, **k):
                return f(*a, **k)

            return inner
        """,
    ),
    case(
        "deep recursion over a raised limit",
        "recursion limit",
        "depth",
        """
        import sys

        sys.setrecursionlimit(20_000)
        nested = []
        for _ in range(3000):
            nested = [nested]
        assert depth(nested) == 3001
        """,
        """
        def depth(xs):
            return 1 + (depth(xs[0]) if xs else 0)
        """,
    ),
    case(
        "the set-up raises the limit",
        "recursion limit",
        "steps",
        ("assert steps(4000) == 4000", "assert steps(0) == 0"),
        """
        def steps(n):
            return 0 if n == 0 else 1 + steps(n - 1)
        """,
        setup="""
        import sys

        sys.setrecursionlimit(50_000)
        """,
    ),
    case(
        "too deep is an error",
        "recursion limit",
        "factorial",
        """
        import sys

        assert factorial(20) == 2432902008176640000
        sys.setrecursionlimit(300)
        try:
            factorial(5000)
        except RecursionError:
            pass
        else:
            raise AssertionError("no RecursionError")
        """,
        """
        def factorial(n):
            return 1 if n < 2 else n * factorial(n - 1)
        """,
        """
        import math

        def factorial(n):
            return math.factorial(n)
        """,
    ),
    case(
        "program raises its own limit",
        "recursion limit",
        "climb",
        ("assert climb(3) == 3", "assert climb(2500) % 1000 == 501"),
        """
        import sys
        from functools import lru_cache

        sys.setrecursionlimit(100_000)

        @lru_cache(None)
        def climb(n):
            return n if n < 3 else climb(n - 1) + climb(n - 2)
        """,
        """
        def climb(n):
            return n if n < 3 else 2 * climb(n - 1)
        """,
    ),
    case(
        "an iterative walk needs no limit",
        "recursion limit",
        "flatten",
        """
        import sys

        deep = [1]
        for _ in range(5000):
            deep = [deep]
        limit = sys.getrecursionlimit()
        assert flatten([1, [2, [3, []]], 4]) == [1, 2, 3, 4]
        assert sys.getrecursionlimit() == limit
        """,
        """
        def flatten(xs):
            out, stack = [], [iter(xs)]
            while stack:
                for x in stack[-1]:
                    if isinstance(x, list):
                        stack.append(iter(x))
                        break
                    out.append(x)
                else:
                    stack.pop()
            return out
        """,
    ),
    case(
        "paths are joined and changed",
        "library values",
        "backup_of",
        asserts("""
        from pathlib import Path; assert backup_of(Path("/a/b.txt")) == Path("/a/b.bak.txt")
        from pathlib import Path; assert backup_of(Path("c.py")).suffix == ".py"
        from pathlib import PurePath; assert isinstance(backup_of(PurePath("x.y")), PurePath)
        """),
        """
        def backup_of(path):
            return path.with_name(f"{path.stem}.bak{path.suffix}")
        """,
    ),
    case(
        "array of running sums",
        "library values",
        "running",
        """
        from array import array

        assert running(array("d", [1.5, 2.5])) == array("d", [1.5, 4.0])
        assert running(array("i", [1, 2, 3])).typecode == "i"
        assert running(array("i", [1, 2, 3])).tolist() == [1, 3, 6]
        """,
        """
        from array import array
        from itertools import accumulate

        def running(xs):
            return array(xs.typecode, accumulate(xs))
        """,
        """
        from itertools import accumulate

        def running(xs):
            return list(accumulate(xs))
        """,
    ),
    case(
        "next business day",
        "library values",
        "next_workday",
        """
        from datetime import date, timedelta

        assert next_workday(date(2024, 3, 1)) == date(2024, 3, 4)
        assert next_workday(date(2024, 3, 4)) - date(2024, 3, 4) == timedelta(days=1)
        assert next_workday(date(2024, 12, 31)).year == 2025
        """,
        """
        from datetime import timedelta

        def next_workday(day):
            day += timedelta(days=1)
            while day.weekday() >= 5:
                day += timedelta(days=1)
            return day
        """,
        """
        from datetime import timedelta

        def next_workday(day):
            return day + timedelta(days=1)
        """,
    ),
    case(
        "time zones and iso texts",
        "library values",
        "to_utc",
        """
        from datetime import datetime, timedelta, timezone

        t = to_utc("2024-01-01T12:00:00+02:00")
        assert t == datetime(2024, 1, 1, 10, tzinfo=timezone.utc)
        assert t.utcoffset() == timedelta(0)
        assert t.isoformat() == "2024-01-01T10:00:00+00:00"
        """,
        """
        from datetime import datetime, timezone

        def to_utc(text):
            return datetime.fromisoformat(text).astimezone(timezone.utc)
        """,
    ),
    case(
        "exact cents",
        "library values",
        "add_tax",
        asserts("""
        from decimal import Decimal; assert add_tax(Decimal("10.00"), 19) == Decimal("11.90")
        from decimal import Decimal; assert str(add_tax(Decimal("0.05"), 10)) == "0.06"
        from decimal import Decimal; assert isinstance(add_tax(Decimal(1), 0), Decimal)
        """),
        """
        from decimal import ROUND_HALF_UP, Decimal

        def add_tax(price, percent):
            total = price * (100 + percent) / 100
            return total.quantize(Decimal("0.01"), ROUND_HALF_UP)
        """,
        """
        from decimal import Decimal

        def add_tax(price, percent):
            return Decimal(float(price) * (100 + percent) / 100)
        """,
    ),
    case(
        "egyptian fractions",
        "library values",
        "egyptian",
        """
        from fractions import Fraction

        assert egyptian(Fraction(5, 6)) == [Fraction(1, 2), Fraction(1, 3)]
        assert sum(egyptian(Fraction(7, 15))) == Fraction(7, 15)
        assert all(f.numerator == 1 for f in egyptian(Fraction(4, 13)))
        """,
        """
        from fractions import Fraction

        def egyptian(f):
            parts = []
            while f:
                part = Fraction(1, -(-f.denominator // f.numerator))
                parts.append(part)
                f -= part
            return parts
        """,
    ),
    case(
        "complex roots",
        "library values",
        "roots",
        """
        import cmath

        r = roots(1, 2, 5)
        assert r == (complex(-1, 2), complex(-1, -2))
        assert all(cmath.isclose(x * x + 2 * x + 5, 0, abs_tol=1e-9) for x in r)
        assert r[0].conjugate() == r[1]
        """,
        """
        import cmath

        def roots(a, b, c):
            d = cmath.sqrt(b * b - 4 * a * c)
            return ((-b + d) / (2 * a), (-b - d) / (2 * a))
        """,
    ),
    case(
        "bytes, bytearray and memoryview",
        "library values",
        "xor",
        """
        assert xor(b"abc", b"   ") == b"ABC"
        assert xor(bytearray(b"a"), b"\\x01") == b"`"
        assert isinstance(xor(memoryview(b"ab"), b"ab"), bytes)
        assert xor(b"", b"") == b""
        """,
        """
        def xor(a, b):
            return bytes(x ^ y for x, y in zip(a, b))
        """,
    ),
    case(
        "named tuple from the program",
        "collections",
        "bounds",
        """
        b = bounds([3, 1, 2])
        assert b == (1, 3)
        assert b.low == 1 and b.high == 3
        low, high = b
        assert high - low == 2
        assert type(b).__name__ == "Bounds"
        """,
        """
        from collections import namedtuple

        Bounds = namedtuple("Bounds", "low high")

        def bounds(xs):
            return Bounds(min(xs), max(xs))
        """,
        """
        def bounds(xs):
            return (min(xs), max(xs))
        """,
    ),
    case(
        "last items in a deque",
        "collections",
        "tail",
        """
        from collections import deque

        d = tail(range(10), 3)
        assert d == deque([7, 8, 9])
        assert d.maxlen == 3
        d.append(10)
        assert list(d) == [8, 9, 10]
        d.rotate(1)
        assert d[0] == 10
        """,
        """
        from collections import deque

        def tail(xs, n):
            return deque(xs, maxlen=n)
        """,
        """
        def tail(xs, n):
            return list(xs)[-n:]
        """,
    ),
    case(
        "letters counted",
        "collections",
        "letters",
        """
        from collections import Counter

        c = letters("Hello, hi")
        assert c == Counter(h=2, e=1, l=2, o=1, i=1)
        assert c["z"] == 0
        assert c.most_common(1)[0][1] == 2
        assert (c - Counter("hello"))["h"] == 1
        """,
        """
        from collections import Counter

        def letters(text):
            return Counter(c for c in text.lower() if c.isalpha())
        """,
        """
        def letters(text):
            return {c: text.count(c) for c in text}
        """,
    ),
    case(
        "index with a default dict",
        "collections",
        "index",
        """
        i = index(["apple", "avocado", "pear"])
        assert i["a"] == ["apple", "avocado"]
        assert i["z"] == []
        assert sorted(i) == ["a", "p", "z"]
        assert i.default_factory is list
        """,
        """
        from collections import defaultdict

        def index(words):
            result = defaultdict(list)
            for word in words:
                result[word[0]].append(word)
            return result
        """,
        """
        def index(words):
            result = {}
            for word in words:
                result.setdefault(word[0], []).append(word)
            return result
        """,
    ),
    case(
        "ordered dict moves to the end",
        "collections",
        "recent_first",
        """
        from collections import OrderedDict

        d = recent_first([("a", 1), ("b", 2), ("a", 3)])
        assert d == OrderedDict([("b", 2), ("a", 3)])
        assert list(d) == ["b", "a"]
        assert d.popitem(last=False) == ("b", 2)
        """,
        """
        from collections import OrderedDict

        def recent_first(pairs):
            d = OrderedDict()
            for k, v in pairs:
                d[k] = v
                d.move_to_end(k)
            return d
        """,
        """
        from collections import OrderedDict

        def recent_first(pairs):
            return OrderedDict(pairs)
        """,
    ),
    case(
        "chained maps look up",
        "collections",
        "layers",
        """
        user, base = {"color": "red"}, {"color": "blue", "size": 1}
        m = layers(user, base)
        assert m["color"] == "red" and m["size"] == 1
        m["size"] = 2
        assert user == {"color": "red", "size": 2}
        assert base["size"] == 1
        """,
        """
        from collections import ChainMap

        def layers(*maps):
            return ChainMap(*maps)
        """,
        """
        def layers(*maps):
            return {k: v for m in reversed(maps) for k, v in m.items()}
        """,
    ),
    case(
        "frozen set of sets",
        "collections",
        "powerset",
        asserts("""
        assert powerset({1, 2}) == {frozenset(), frozenset({1}), frozenset({2}), frozenset({1, 2})}
        assert frozenset({3}) in powerset([3, 4])
        assert len(powerset(range(5))) == 32
        """),
        """
        from itertools import chain, combinations

        def powerset(xs):
            xs = list(xs)
            groups = (combinations(xs, n) for n in range(len(xs) + 1))
            return {frozenset(c) for c in chain.from_iterable(groups)}
        """,
    ),
    case(
        "fibonacci taken lazily",
        "generators",
        "fibonacci",
        """
        import itertools

        assert list(itertools.islice(fibonacci(), 6)) == [0, 1, 1, 2, 3, 5]
        assert next(x for x in fibonacci() if x > 50) == 55
        assert list(itertools.takewhile(lambda x: x < 10, fibonacci()))[-1] == 8
        g = fibonacci()
        assert iter(g) is g
        """,
        """
        def fibonacci():
            a, b = 0, 1
            while True:
                yield a
                a, b = b, a + b
        """,
    ),
    case(
        "running average receives values",
        "generators",
        "averager",
        """
        a = averager()
        next(a)
        assert a.send(10) == 10
        assert a.send(20) == 15
        a.close()
        try:
            a.send(1)
            assert False
        except StopIteration:
            pass
        """,
        """
        def averager():
            total, n, mean = 0, 0, None
            while True:
                total += yield mean
                n += 1
                mean = total / n
        """,
        """
        def averager():
            mean = None
            while True:
                mean = yield mean
        """,
    ),
    case(
        "generator returns a value",
        "generators",
        "consume",
        """
        def outer():
            result = yield from consume([1, 2])
            yield ("sum", result)

        assert list(outer()) == [1, 2, ("sum", 3)]
        g = consume([5])
        next(g)
        try:
            next(g)
        except StopIteration as stop:
            assert stop.value == 5
        """,
        """
        def consume(xs):
            total = 0
            for x in xs:
                yield x
                total += x
            return total
        """,
        """
        def consume(xs):
            yield from xs
        """,
    ),
    case(
        "thrown exceptions are handled inside",
        "generators",
        "resilient",
        """
        g = resilient()
        assert next(g) == "ready"
        assert g.throw(ValueError("x")) == "caught x"
        assert next(g) == "ready"
        """,
        """
        def resilient():
            message = "ready"
            while True:
                try:
                    yield message
                    message = "ready"
                except ValueError as error:
                    message = f"caught {error}"
        """,
    ),
    case(
        "iterators of itertools over the program's",
        "generators",
        "chunks",
        """
        import itertools

        assert [list(c) for c in chunks("abcde", 2)] == [["a", "b"], ["c", "d"], ["e"]]
        assert dict(zip("xy", chunks([1, 2, 3], 2))) == {"x": [1, 2], "y": [3]}
        assert sum(map(len, chunks(range(7), 3))) == 7
        assert list(itertools.chain(*chunks("abc", 2))) == ["a", "b", "c"]
        assert max(chunks([1, 9, 3], 1)) == [9]
        """,
        """
        import itertools

        def chunks(xs, n):
            it = iter(xs)
            while chunk := list(itertools.islice(it, n)):
                yield chunk
        """,
        """
        import itertools

        def chunks(xs, n):
            it = iter(xs)
            return [list(itertools.islice(it, n)) for _ in range(len(xs) // n)]
        """,
    ),
    case(
        "tree is walked recursively",
        "generators",
        "walk",
        """
        tree = {"a": {"b": {}, "c": {"d": {}}}}
        assert list(walk(tree)) == [(0, "a"), (1, "b"), (1, "c"), (2, "d")]
        first, *rest = walk(tree)
        assert first == (0, "a") and len(rest) == 3
        assert ("x" in (n for _, n in walk(tree))) is False
        """,
        """
        def walk(tree, depth=0):
            for name, children in tree.items():
                yield depth, name
                yield from walk(children, depth + 1)
        """,
    ),
    case(
        "own exception with attributes",
        "exceptions",
        ("withdraw", "InsufficientFunds"),
        """
        try:
            withdraw(10, 25)
        except InsufficientFunds as error:
            assert error.missing == 15
            assert str(error) == "15 missing"
            assert isinstance(error, ValueError)
            assert error.args == (15,)
        else:
            assert False
        assert withdraw(10, 4) == 6
        """,
        """
        class InsufficientFunds(ValueError):
            def __init__(self, missing):
                super().__init__(missing)
                self.missing = missing

            def __str__(self):
                return f"{self.missing} missing"

        def withdraw(balance, amount):
            if amount > balance:
                raise InsufficientFunds(amount - balance)
            return balance - amount
        """,
        """
        class InsufficientFunds(ValueError):
            missing = 0

        def withdraw(balance, amount):
            if amount > balance:
                raise InsufficientFunds(amount)
            return balance - amount
        """,
    ),
    case(
        "cause of a chained error",
        "exceptions",
        ("load", "LoadError"),
        """
        try:
            load("{bad")
        except LoadError as error:
            assert isinstance(error.__cause__, ValueError)
            assert error.__cause__.pos == 1
        else:
            assert False, "no error"
        assert load("[1]") == [1]
        """,
        """
        import json

        class LoadError(Exception):
            pass

        def load(text):
            try:
                return json.loads(text)
            except ValueError as error:
                raise LoadError("cannot be read") from error
        """,
        """
        import json

        class LoadError(Exception):
            pass

        def load(text):
            try:
                return json.loads(text)
            except ValueError:
                raise LoadError("cannot be read") from None
        """,
    ),
    case(
        "the right kind of error for each input",
        "exceptions",
        "get_item",
        """
        for args, kind in [
            (([1], 3), IndexError),
            (({"a": 1}, "b"), KeyError),
            ((5, 0), TypeError),
        ]:
            try:
                get_item(*args)
            except kind as error:
                assert type(error) is kind
            else:
                raise AssertionError(args)
        assert get_item([7], 0) == 7
        """,
        """
        def get_item(container, key):
            return container[key]
        """,
    ),
    case(
        "errors in a hierarchy",
        "exceptions",
        ("check", "AppError", "NotFound", "Denied"),
        """
        from solution import AppError, Denied, NotFound, check
        import pytest

        @pytest.mark.parametrize("code, kind", [(404, NotFound), (403, Denied), (500, AppError)])
        def test_kind(code, kind):
            with pytest.raises(kind) as info:
                check(code)
            assert info.type is kind
            assert info.value.code == code

        def test_ok():
            assert check(200) == "ok"

        def test_bases():
            assert issubclass(NotFound, AppError) and issubclass(Denied, AppError)
            assert not issubclass(NotFound, Denied)
        """,
        """
        class AppError(Exception):
            def __init__(self, code):
                super().__init__(f"code {code}")
                self.code = code

        class NotFound(AppError):
            pass

        class Denied(AppError):
            pass

        def check(code):
            if code >= 400:
                raise {404: NotFound, 403: Denied}.get(code, AppError)(code)
            return "ok"
        """,
    ),
    case(
        "exception of the test passes through",
        "exceptions",
        "call_all",
        """
        class Stop(Exception):
            pass

        done = []

        def stop():
            raise Stop("here")

        try:
            call_all([lambda: done.append(1), stop, lambda: done.append(2)])
        except Stop as error:
            assert error.args == ("here",)
        else:
            assert False
        assert done == [1]
        """,
        """
        def call_all(functions):
            for function in functions:
                function()
        """,
        """
        def call_all(functions):
            for function in functions:
                try:
                    function()
                except Exception:
                    pass
        """,
    ),
    case(
        "errors are collected as a group",
        "exceptions",
        "validate",
        """
        try:
            validate({"age": -1, "name": ""})
        except ExceptionGroup as group:
            assert len(group.exceptions) == 2
            assert sorted(str(e) for e in group.exceptions) == ["age", "name"]
            assert all(isinstance(e, ValueError) for e in group.exceptions)
        else:
            assert False
        assert validate({"age": 1, "name": "x"}) is None
        """,
        """
        def validate(record):
            errors = []
            if record["age"] < 0:
                errors.append(ValueError("age"))
            if not record["name"]:
                errors.append(ValueError("name"))
            if errors:
                raise ExceptionGroup("record", errors)
        """,
        """
        def validate(record):
            if record["age"] < 0:
                raise ValueError("age")
        """,
    ),
    case(
        "context of an error in a handler",
        "exceptions",
        "cleanup",
        """
        def broken():
            raise KeyError("k")

        try:
            cleanup(broken)
        except RuntimeError as error:
            assert isinstance(error.__context__, KeyError)
            assert error.__notes__ == ["while cleaning"]
        else:
            assert False
        """,
        """
        def cleanup(action):
            try:
                action()
            except KeyError:
                error = RuntimeError("failed")
                error.add_note("while cleaning")
                raise error
        """,
    ),
    case(
        "counter is safe among threads",
        "threads",
        "SafeCounter",
        """
        import threading

        c = SafeCounter()
        threads = [threading.Thread(target=lambda: [c.increment() for _ in range(50)])
                   for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert c.value == 200
        """,
        """
        import threading

        class SafeCounter:
            def __init__(self):
                self.value = 0
                self._lock = threading.Lock()

            def increment(self):
                with self._lock:
                    self.value += 1
        """,
        """
        class SafeCounter:
            def __init__(self):
                self.value = 0

            def increment(self):
                self.value = 1
        """,
    ),
    case(
        "pool of the test maps the program",
        "threads",
        "cube",
        """
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(3) as pool:
            assert list(pool.map(cube, range(6))) == [0, 1, 8, 27, 64, 125]
            assert pool.submit(cube, 10).result() == 1000
        """,
        """
        def cube(x):
            return x**3
        """,
        """
        def cube(x):
            return x**2
        """,
    ),
    case(
        "program starts threads for callbacks",
        "threads",
        "parallel",
        """
        import threading

        names = set()
        lock = threading.Lock()

        def job(n):
            with lock:
                names.add(n)
            return n * 2

        assert parallel(job, [1, 2, 3]) == [2, 4, 6]
        assert names == {1, 2, 3}
        """,
        """
        import threading

        def parallel(function, xs):
            results = [None] * len(xs)

            def work(i, x):
                results[i] = function(x)

            threads = [threading.Thread(target=work, args=p) for p in enumerate(xs)]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
            return results
        """,
    ),
    case(
        "queue between two threads",
        "threads",
        "worker",
        """
        import queue
        import threading

        inbox, outbox = queue.Queue(), queue.Queue()
        t = threading.Thread(target=worker, args=(inbox, outbox))
        t.start()
        for word in ("a", "bc", None):
            inbox.put(word)
        t.join(10)
        assert not t.is_alive()
        assert [outbox.get(), outbox.get()] == ["A", "BC"]
        """,
        """
        def worker(inbox, outbox):
            while (word := inbox.get()) is not None:
                outbox.put(word.upper())
        """,
    ),
    case(
        "event wakes the waiting thread",
        "threads",
        "Latch",
        """
        import threading

        latch = Latch(2)
        seen = []
        t = threading.Thread(target=lambda: (latch.wait(10), seen.append("open")))
        t.start()
        latch.count_down()
        assert seen == [] and not latch.is_open
        latch.count_down()
        t.join(10)
        assert seen == ["open"] and latch.is_open
        """,
        """
        import threading

        class Latch:
            def __init__(self, n):
                self._n = n
                self._event = threading.Event()

            def count_down(self):
                self._n -= 1
                if self._n == 0:
                    self._event.set()

            def wait(self, timeout=None):
                return self._event.wait(timeout)

            @property
            def is_open(self):
                return self._event.is_set()
        """,
        """
        class Latch:
            is_open = False

            def __init__(self, n):
                self.n = n

            def count_down(self):
                self.n -= 1

            def wait(self, timeout=None):
                return True
        """,
    ),
    case(
        "expressions from a table",
        "eval and exec",
        "power",
        """
        table = {"power(2, 3)": 8, "power(5, 0)": 1, "power(2, power(2, 2))": 16}
        for expression, wanted in table.items():
            assert eval(expression) == wanted, expression
        """,
        """
        def power(a, b):
            return a**b
        """,
        """
        def power(a, b):
            return a * b
        """,
    ),
    case(
        "generated code is executed",
        "eval and exec",
        "make_adder_source",
        """
        namespace = {}
        exec(make_adder_source("add_five", 5), namespace)
        assert namespace["add_five"](1) == 6
        """,
        """
        def make_adder_source(name, n):
            return f"def {name}(x):\\n    return x + {n}\\n"
        """,
        """
        def make_adder_source(name, n):
            return f"def {name}(x):\\n    return {n}\\n"
        """,
    ),
    case(
        "expression text is equal to its value",
        "eval and exec",
        "to_infix",
        """
        import random

        random.seed(1)
        for _ in range(20):
            a, b, c = (random.randint(1, 9) for _ in range(3))
            text = to_infix(["+", a, ["*", b, c]])
            assert eval(text) == a + b * c
        """,
        """
        def to_infix(tree):
            if not isinstance(tree, list):
                return str(tree)
            operator, left, right = tree
            return f"({to_infix(left)} {operator} {to_infix(right)})"
        """,
    ),
    case(
        "statements run with given names",
        "eval and exec",
        "run",
        """
        assert run("y = x + 1", x=4) == {"x": 4, "y": 5}
        assert run("") == {}
        """,
        """
        def run(code, **names):
            exec(code, {}, names)
            return names
        """,
    ),
    case(
        "asserts are built from texts",
        "eval and exec",
        "triangle",
        """
        for line in ["triangle(4) == 10", "triangle(0) == 0", "triangle(1) < triangle(2)"]:
            exec("assert " + line, globals())
        """,
        """
        def triangle(n):
            return n * (n + 1) // 2
        """,
        """
        def triangle(n):
            return n * n
        """,
    ),
    case(
        "cache information",
        "functools",
        "partitions",
        """
        partitions.cache_clear()
        assert partitions(5) == 7
        info = partitions.cache_info()
        assert info.misses > 0 and info.currsize == info.misses
        before = info.hits
        partitions(5)
        assert partitions.cache_info().hits == before + 1
        assert partitions.__wrapped__(5) == 7
        """,
        """
        from functools import lru_cache

        @lru_cache(maxsize=None)
        def partitions(n, largest=None):
            largest = n if largest is None else largest
            if n == 0:
                return 1
            return sum(partitions(n - k, k) for k in range(1, min(n, largest) + 1))
        """,
        """
        def partitions(n):
            return 7
        """,
    ),
    case(
        "partial application",
        "functools",
        "power_of",
        """
        import functools

        square = power_of(2)
        assert square(5) == 25
        assert isinstance(square, functools.partial)
        assert square.keywords == {"exponent": 2}
        assert functools.partial(power_of, 3)()(2) == 8
        """,
        """
        from functools import partial

        def power(base, exponent):
            return base**exponent

        def power_of(exponent):
            return partial(power, exponent=exponent)
        """,
    ),
    case(
        "single dispatch is extended by the test",
        "functools",
        "show",
        """
        class Money:
            def __init__(self, n):
                self.n = n

        @show.register
        def _(x: Money):
            return f"{x.n} EUR"

        assert show(Money(3)) == "3 EUR"
        assert show([1, "a"]) == "[1, 'a']"
        assert show(2.0) == "2.00"
        assert show(None) == "None"
        """,
        """
        from functools import singledispatch

        @singledispatch
        def show(x):
            return str(x)

        @show.register
        def _(x: list):
            return "[" + ", ".join(map(repr, x)) + "]"

        @show.register
        def _(x: float):
            return f"{x:.2f}"
        """,
        """
        def show(x):
            return str(x)

        show.register = lambda f: f
        """,
    ),
    case(
        "reduce with the program's operation",
        "functools",
        "combine",
        """
        import functools
        import operator

        assert functools.reduce(combine, [{"a": 1}, {"b": 2}, {"a": 3}]) == {"a": 4, "b": 2}
        assert functools.reduce(combine, [], {}) == {}
        assert combine({"x": 1}, {}) == operator.or_({"x": 1}, {})
        """,
        """
        def combine(a, b):
            return {k: a.get(k, 0) + b.get(k, 0) for k in a | b}
        """,
        """
        def combine(a, b):
            return a | b
        """,
    ),
    case(
        "comparison function becomes a key",
        "functools",
        "by_length_then_reverse",
        """
        from functools import cmp_to_key

        words = ["bb", "a", "c", "aa"]
        assert sorted(words, key=cmp_to_key(by_length_then_reverse)) == ["c", "a", "bb", "aa"]
        assert by_length_then_reverse("x", "x") == 0
        """,
        """
        def by_length_then_reverse(a, b):
            if len(a) != len(b):
                return len(a) - len(b)
            return (a < b) - (a > b)
        """,
        """
        def by_length_then_reverse(a, b):
            return len(a) - len(b)
        """,
    ),
    case(
        "visits are counted by the module",
        "module state",
        "visit",
        """
        assert visit("a") == 1
        assert visit("b") == 1
        assert visit("a") == 2
        assert [visit("a") for _ in range(2)] == [3, 4]
        """,
        """
        _visits = {}

        def visit(page):
            _visits[page] = _visits.get(page, 0) + 1
            return _visits[page]
        """,
        """
        def visit(page):
            return 1
        """,
    ),
    case(
        "global setting is changed by a function",
        "module state",
        ("set_unit", "show_length"),
        """
        assert show_length(1500) == "1500 m"
        set_unit("km")
        assert show_length(1500) == "1.5 km"
        set_unit("m")
        assert show_length(3) == "3 m"
        """,
        """
        unit = "m"

        def set_unit(name):
            global unit
            unit = name

        def show_length(meters):
            return f"{meters / 1000} km" if unit == "km" else f"{meters} m"
        """,
        """
        unit = "m"

        def set_unit(name):
            unit = name

        def show_length(meters):
            return f"{meters / 1000} km" if unit == "km" else f"{meters} m"
        """,
    ),
    case(
        "constants of the module",
        "module state",
        ("VOWELS", "count_vowels"),
        """
        import solution

        assert solution.VOWELS == set("aeiou")
        assert solution.count_vowels("banana") == 3
        solution.VOWELS.add("y")
        assert solution.count_vowels("yes") == 2
        """,
        """
        VOWELS = set("aeiou")

        def count_vowels(text):
            return sum(c in VOWELS for c in text.lower())
        """,
    ),
    case(
        "closures keep their own count",
        "module state",
        "make_counter",
        """
        a, b = make_counter(), make_counter(10)
        assert (a(), a(), b(), a()) == (1, 2, 11, 3)
        assert a is not b
        """,
        """
        def make_counter(start=0):
            n = start

            def count():
                nonlocal n
                n += 1
                return n

            return count
        """,
        """
        n = 0

        def make_counter(start=0):
            def count():
                global n
                n += 1
                return n

            return count
        """,
    ),
    case(
        "handlers registered in a module list",
        "module state",
        ("on", "fire"),
        """
        heard = []
        on("start", heard.append)
        on("start", lambda x: heard.append(x * 2))
        on("stop", lambda x: heard.append("stopped"))
        assert fire("start", 3) == 2
        assert heard == [3, 6]
        assert fire("unknown", 0) == 0
        """,
        """
        handlers = {}

        def on(name, handler):
            handlers.setdefault(name, []).append(handler)

        def fire(name, value):
            for handler in handlers.get(name, []):
                handler(value)
            return len(handlers.get(name, []))
        """,
    ),
    case(
        "linked list is reversed",
        "nodes of the set-up",
        "reverse_list",
        (
            "assert values(reverse_list(build([1, 2, 3]))) == [3, 2, 1]",
            "assert reverse_list(None) is None",
            "head = build([7])\nassert reverse_list(head) is head",
        ),
        """
        def reverse_list(head):
            previous = None
            while head:
                head.next, previous, head = previous, head, head.next
            return previous
        """,
        """
        def reverse_list(head):
            return head
        """,
        setup=LIST_NODE,
    ),
    case(
        "two sorted lists are merged",
        "nodes of the set-up",
        "Solution",
        (
            """
        merged = Solution().mergeTwoLists(build([1, 2, 4]), build([1, 3]))
        assert values(merged) == [1, 1, 2, 3, 4]
        """,
            "assert Solution().mergeTwoLists(None, None) is None",
        ),
        """
        class Solution:
            def mergeTwoLists(self, a, b):
                start = end = ListNode()
                while a and b:
                    if b.val < a.val:
                        a, b = b, a
                    end.next, a = a, a.next
                    end = end.next
                end.next = a or b
                return start.next
        """,
        setup=LIST_NODE,
    ),
    case(
        "cycle is found",
        "nodes of the set-up",
        "has_cycle",
        """
        head = build([1, 2, 3])
        assert has_cycle(head) is False
        head.next.next.next = head.next
        assert has_cycle(head) is True
        """,
        """
        def has_cycle(head):
            slow = fast = head
            while fast and fast.next:
                slow, fast = slow.next, fast.next.next
                if slow is fast:
                    return True
            return False
        """,
        """
        def has_cycle(head):
            return head.val == head.next.val
        """,
        setup=LIST_NODE,
    ),
    case(
        "tree is inverted",
        "nodes of the set-up",
        "invert",
        """
        root = invert(tree([4, 2, 7, 1, 3]))
        assert root.val == 4
        assert (root.left.val, root.right.val) == (7, 2)
        assert [root.right.left.val, root.right.right.val] == [3, 1]
        assert root.left.left is None
        """,
        """
        def invert(root):
            if root:
                root.left, root.right = invert(root.right), invert(root.left)
            return root
        """,
        """
        def invert(root):
            if root:
                root.left, root.right = root.right, root.left
            return root
        """,
        setup=TREE_NODE,
    ),
    case(
        "balanced tree is built by the program",
        "nodes of the set-up",
        "sorted_to_tree",
        """
        def inorder(node):
            return inorder(node.left) + [node.val] + inorder(node.right) if node else []

        def height(node):
            return 1 + max(height(node.left), height(node.right)) if node else 0

        root = sorted_to_tree([1, 2, 3, 4, 5, 6, 7])
        assert isinstance(root, TreeNode)
        assert inorder(root) == [1, 2, 3, 4, 5, 6, 7]
        assert height(root) == 3
        assert sorted_to_tree([]) is None
        """,
        """
        def sorted_to_tree(xs):
            if not xs:
                return None
            m = len(xs) // 2
            return TreeNode(xs[m], sorted_to_tree(xs[:m]), sorted_to_tree(xs[m + 1 :]))
        """,
        """
        def sorted_to_tree(xs):
            return TreeNode(xs[0], None, sorted_to_tree(xs[1:])) if xs else None
        """,
        setup=TREE_NODE,
    ),
    case(
        "lowest common ancestor is the node itself",
        "nodes of the set-up",
        "ancestor",
        """
        root = tree([3, 5, 1, 6, 2])
        assert ancestor(root, root.left.left, root.left.right) is root.left
        assert ancestor(root, root.left, root.right).val == 3
        """,
        """
        def ancestor(root, p, q):
            if root is None or root is p or root is q:
                return root
            left, right = ancestor(root.left, p, q), ancestor(root.right, p, q)
            return root if left and right else left or right
        """,
        setup=TREE_NODE,
    ),
    case(
        "linked list of the program is walked",
        "nodes of the program",
        "LinkedList",
        """
        ll = LinkedList()
        for x in "abc":
            ll.append(x)
        node, seen = ll.head, []
        while node is not None:
            seen.append(node.data)
            node = node.next
        assert seen == ["a", "b", "c"]
        assert ll.head.next.next is ll.tail
        ll.head.data = "z"
        assert list(ll) == ["z", "b", "c"]
        """,
        """
        class Node:
            def __init__(self, data):
                self.data, self.next = data, None

        class LinkedList:
            def __init__(self):
                self.head = self.tail = None

            def append(self, data):
                node = Node(data)
                if self.head is None:
                    self.head = node
                else:
                    self.tail.next = node
                self.tail = node

            def __iter__(self):
                node = self.head
                while node:
                    yield node.data
                    node = node.next
        """,
    ),
    case(
        "search tree is walked by the test",
        "nodes of the program",
        "BST",
        """
        t = BST()
        for k in (5, 2, 8, 1, 9):
            t.insert(k)
        assert t.root.key == 5
        assert t.root.left.left.key == 1
        assert t.root.right.right.key == 9 and t.root.right.left is None

        def depth(n):
            return 0 if n is None else 1 + max(depth(n.left), depth(n.right))

        assert depth(t.root) == 3
        """,
        """
        class _Node:
            def __init__(self, key):
                self.key = key
                self.left = self.right = None

        class BST:
            def __init__(self):
                self.root = None

            def insert(self, key):
                def put(node):
                    if node is None:
                        return _Node(key)
                    if key < node.key:
                        node.left = put(node.left)
                    else:
                        node.right = put(node.right)
                    return node

                self.root = put(self.root)
        """,
        """
        class _Node:
            def __init__(self, key):
                self.key = key
                self.left = self.right = None

        class BST:
            def __init__(self):
                self.root = None

            def insert(self, key):
                node = _Node(key)
                node.left, self.root = self.root, node
        """,
    ),
    case(
        "doubly linked nodes point back",
        "nodes of the program",
        ("DNode", "link"),
        """
        a, b, c = DNode(1), DNode(2), DNode(3)
        link(a, b)
        link(b, c)
        assert a.next is b and b.prev is a
        assert c.prev.prev is a
        assert a.prev is None
        """,
        """
        class DNode:
            def __init__(self, value):
                self.value = value
                self.prev = self.next = None

        def link(a, b):
            a.next, b.prev = b, a
        """,
        """
        class DNode:
            def __init__(self, value):
                self.value = value
                self.prev = self.next = None

        def link(a, b):
            a.next = b
        """,
    ),
    case(
        "trie exposes its children",
        "nodes of the program",
        "TrieNode",
        """
        root = TrieNode()
        root.insert("car")
        root.insert("cat")
        assert list(root.children) == ["c"]
        assert sorted(root.children["c"].children["a"].children) == ["r", "t"]
        assert root.children["c"].children["a"].children["t"].is_word
        assert not root.children["c"].is_word
        assert root.starts_with("ca") == ["car", "cat"]
        """,
        """
        class TrieNode:
            def __init__(self):
                self.children = {}
                self.is_word = False

            def insert(self, word):
                node = self
                for c in word:
                    node = node.children.setdefault(c, TrieNode())
                node.is_word = True

            def words(self, prefix):
                if self.is_word:
                    yield prefix
                for c, child in sorted(self.children.items()):
                    yield from child.words(prefix + c)

            def starts_with(self, prefix):
                node = self
                for c in prefix:
                    if c not in node.children:
                        return []
                    node = node.children[c]
                return list(node.words(prefix))
        """,
    ),
    case(
        "graph of people with links both ways",
        "nodes of the program",
        "Member",
        """
        ann, bob, cy = Member("Ann"), Member("Bob"), Member("Cy")
        ann.befriend(bob)
        bob.befriend(cy)
        assert ann in bob.friends and bob in ann.friends
        assert [m.name for m in ann.friends[0].friends] == ["Ann", "Cy"]
        assert ann.distance(cy) == 2
        assert ann.distance(ann) == 0
        """,
        """
        from collections import deque

        class Member:
            def __init__(self, name):
                self.name, self.friends = name, []

            def befriend(self, other):
                self.friends.append(other)
                other.friends.append(self)

            def distance(self, other):
                seen, todo = {self}, deque([(self, 0)])
                while todo:
                    member, d = todo.popleft()
                    if member is other:
                        return d
                    for f in member.friends:
                        if f not in seen:
                            seen.add(f)
                            todo.append((f, d + 1))
        """,
        """
        class Member:
            def __init__(self, name):
                self.name, self.friends = name, []

            def befriend(self, other):
                self.friends.append(other)

            def distance(self, other):
                return 0 if self is other else 1
        """,
    ),
    case(
        "least recently used cache",
        "designs",
        "LRUCache",
        """
        cache = LRUCache(2)
        cache.put(1, 1)
        cache.put(2, 2)
        assert cache.get(1) == 1
        cache.put(3, 3)
        assert cache.get(2) == -1
        assert cache.get(3) == 3
        cache.put(1, 10)
        assert cache.get(1) == 10
        """,
        """
        from collections import OrderedDict

        class LRUCache:
            def __init__(self, capacity: int):
                self.capacity = capacity
                self.data = OrderedDict()

            def get(self, key: int) -> int:
                if key not in self.data:
                    return -1
                self.data.move_to_end(key)
                return self.data[key]

            def put(self, key: int, value: int) -> None:
                self.data[key] = value
                self.data.move_to_end(key)
                if len(self.data) > self.capacity:
                    self.data.popitem(last=False)
        """,
        """
        class LRUCache:
            def __init__(self, capacity):
                self.capacity, self.data = capacity, {}

            def get(self, key):
                return self.data.get(key, -1)

            def put(self, key, value):
                self.data[key] = value
                if len(self.data) > self.capacity:
                    del self.data[next(iter(self.data))]
        """,
    ),
    case(
        "stack that knows its minimum",
        "designs",
        "MinStack",
        """
        s = MinStack()
        for x in (5, 3, 7, 3):
            s.push(x)
        assert s.getMin() == 3
        assert s.pop() == 3
        assert s.getMin() == 3
        s.pop()
        s.pop()
        assert s.getMin() == 5 and s.top() == 5
        """,
        """
        class MinStack:
            def __init__(self):
                self._items = []

            def push(self, x):
                self._items.append((x, min(x, self._items[-1][1]) if self._items else x))

            def pop(self):
                return self._items.pop()[0]

            def top(self):
                return self._items[-1][0]

            def getMin(self):
                return self._items[-1][1]
        """,
        """
        class MinStack:
            def __init__(self):
                self._items, self._min = [], float("inf")

            def push(self, x):
                self._items.append(x)
                self._min = min(self._min, x)

            def pop(self):
                return self._items.pop()

            def top(self):
                return self._items[-1]

            def getMin(self):
                return self._min
        """,
    ),
    case(
        "door as a state machine",
        "designs",
        ("Door", "InvalidTransition"),
        """
        d = Door()
        assert d.state == "closed"
        d.open()
        assert d.state == "open"
        d.close()
        d.lock()
        assert d.state == "locked"
        try:
            d.open()
        except InvalidTransition as error:
            assert "locked" in str(error)
        else:
            assert False
        assert d.history == ["closed", "open", "closed", "locked"]
        """,
        """
        class InvalidTransition(Exception):
            pass

        class Door:
            MOVES = {
                ("closed", "open"): "open",
                ("open", "close"): "closed",
                ("closed", "lock"): "locked",
                ("locked", "unlock"): "closed",
            }

            def __init__(self):
                self.state = "closed"
                self.history = ["closed"]

            def _move(self, action):
                if (self.state, action) not in self.MOVES:
                    raise InvalidTransition(f"cannot {action} when {self.state}")
                self.state = self.MOVES[self.state, action]
                self.history.append(self.state)

            def open(self):
                self._move("open")

            def close(self):
                self._move("close")

            def lock(self):
                self._move("lock")
        """,
    ),
    case(
        "emitter with once and off",
        "designs",
        "EventEmitter",
        """
        log = []
        e = EventEmitter()
        listener = lambda *a: log.append(a)
        e.on("x", listener)
        e.once("x", lambda *a: log.append("once"))
        e.emit("x", 1)
        e.emit("x", 2, 3)
        assert log == [(1,), "once", (2, 3)]
        e.off("x", listener)
        assert e.emit("x", 4) is False
        assert len(log) == 3
        """,
        """
        class EventEmitter:
            def __init__(self):
                self._listeners = {}

            def on(self, name, listener):
                self._listeners.setdefault(name, []).append(listener)

            def off(self, name, listener):
                self._listeners[name].remove(listener)

            def once(self, name, listener):
                def only_once(*args):
                    self.off(name, only_once)
                    listener(*args)

                self.on(name, only_once)

            def emit(self, name, *args):
                listeners = list(self._listeners.get(name, []))
                for listener in listeners:
                    listener(*args)
                return bool(listeners)
        """,
        """
        class EventEmitter:
            def __init__(self):
                self._listeners = {}

            def on(self, name, listener):
                self._listeners.setdefault(name, []).append(listener)

            once = on

            def off(self, name, listener):
                self._listeners[name].remove(listener)

            def emit(self, name, *args):
                for listener in self._listeners.get(name, []):
                    listener(*args)
                return bool(self._listeners.get(name))
        """,
    ),
    case(
        "calculator parses precedence",
        "designs",
        "Parser",
        asserts("""
        assert Parser("1 + 2 * 3").parse() == ("+", 1, ("*", 2, 3))
        assert Parser("(1 + 2) * 3").value() == 9
        assert Parser("8 - 3 - 2").value() == 3
        assert Parser("2 * (3 + 4) * 5").value() == 70
        """),
        """
        import operator
        import re

        class Parser:
            OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}

            def __init__(self, text):
                self.tokens = re.findall(r"\\d+|[-+*()]", text)

            def _peek(self):
                return self.tokens[self.at] if self.at < len(self.tokens) else None

            def _take(self):
                self.at += 1
                return self.tokens[self.at - 1]

            def parse(self):
                self.at = 0
                return self._sum()

            def _sum(self):
                left = self._product()
                while self._peek() in ("+", "-"):
                    left = (self._take(), left, self._product())
                return left

            def _product(self):
                left = self._atom()
                while self._peek() == "*":
                    left = (self._take(), left, self._atom())
                return left

            def _atom(self):
                if self._peek() == "(":
                    self._take()
                    inner = self._sum()
                    self._take()
                    return inner
                return int(self._take())

            def value(self):
                def compute(tree):
                    if isinstance(tree, int):
                        return tree
                    return self.OPERATORS[tree[0]](compute(tree[1]), compute(tree[2]))

                return compute(self.parse())
        """,
    ),
    case(
        "bank transfers between accounts",
        "designs",
        ("Bank", "Account"),
        """
        bank = Bank()
        a = bank.open("ann", 100)
        b = bank.open("bob")
        bank.transfer(a, b, 30)
        assert (a.balance, b.balance) == (70, 30)
        assert bank.find("bob") is b
        assert bank.total() == 100
        assert [t.amount for t in a.transactions] == [100, -30]
        assert a.transactions[-1].note == "to bob"
        """,
        """
        from dataclasses import dataclass, field

        @dataclass
        class Transaction:
            amount: int
            note: str

        @dataclass
        class Account:
            owner: str
            transactions: list = field(default_factory=list)

            @property
            def balance(self):
                return sum(t.amount for t in self.transactions)

        class Bank:
            def __init__(self):
                self.accounts = {}

            def open(self, owner, amount=0):
                account = self.accounts[owner] = Account(owner)
                if amount:
                    account.transactions.append(Transaction(amount, "opening"))
                return account

            def find(self, owner):
                return self.accounts[owner]

            def transfer(self, source, target, amount):
                source.transactions.append(Transaction(-amount, f"to {target.owner}"))
                target.transactions.append(Transaction(amount, f"from {source.owner}"))

            def total(self):
                return sum(a.balance for a in self.accounts.values())
        """,
    ),
    case(
        "range module by a fluent builder",
        "designs",
        "Sql",
        """
        q = Sql("users").where("age > 3").where("name = 'x'").order("age").limit(5)
        assert str(q) == "SELECT * FROM users WHERE age > 3 AND name = 'x' ORDER BY age LIMIT 5"
        assert str(Sql("t").select("a", "b")) == "SELECT a, b FROM t"
        """,
        """
        class Sql:
            def __init__(self, table):
                self.table, self.columns, self.parts = table, "*", []
                self.wheres, self.tail = [], ""

            def select(self, *columns):
                self.columns = ", ".join(columns)
                return self

            def where(self, condition):
                self.wheres.append(condition)
                return self

            def order(self, column):
                self.tail += f" ORDER BY {column}"
                return self

            def limit(self, n):
                self.tail += f" LIMIT {n}"
                return self

            def __str__(self):
                where = f" WHERE {' AND '.join(self.wheres)}" if self.wheres else ""
                return f"SELECT {self.columns} FROM {self.table}{where}{self.tail}"
        """,
    ),
    case(
        "count of distinct subsequences",
        "plain asserts",
        "count_subsequences",
        asserts("""
        assert count_subsequences("rabbbit", "rabbit") == 3
        assert count_subsequences("babgbag", "bag") == 5
        assert count_subsequences("", "a") == 0
        """),
        """
        def count_subsequences(s, t):
            ways = [1] + [0] * len(t)
            for c in s:
                for j in range(len(t), 0, -1):
                    if t[j - 1] == c:
                        ways[j] += ways[j - 1]
            return ways[-1]
        """,
        """
        def count_subsequences(s, t):
            return s.count(t)
        """,
    ),
    case(
        "nested brackets by a candidate's check",
        "plain asserts",
        "split_groups",
        """
        METADATA = {"author": "me", "dataset": "test"}


        def check(candidate):
            assert candidate("(()()) ((()))") == ["(()())", "((()))"]
            assert candidate("() (())") == ["()", "(())"]
            assert candidate("") == []


        check(split_groups)
        """,
        """
        from typing import List

        def split_groups(text: str) -> List[str]:
            groups, depth, current = [], 0, ""
            for c in text.replace(" ", ""):
                current += c
                depth += 1 if c == "(" else -1
                if depth == 0:
                    groups.append(current)
                    current = ""
            return groups
        """,
        """
        def split_groups(text):
            return text.split(")") if text else []
        """,
    ),
    case(
        "two sum of the class Solution",
        "plain asserts",
        "Solution",
        asserts("""
        assert Solution().twoSum([2, 7, 11, 15], 9) == [0, 1]
        assert Solution().twoSum(nums=[3, 2, 4], target=6) == [1, 2]
        assert sorted(Solution().twoSum([3, 3], 6)) == [0, 1]
        """),
        """
        class Solution:
            def twoSum(self, nums, target):
                seen = {}
                for i, x in enumerate(nums):
                    if target - x in seen:
                        return [seen[target - x], i]
                    seen[x] = i
        """,
        """
        class Solution:
            def twoSum(self, nums, target):
                return [0, 1]
        """,
    ),
    case(
        "groups of anagrams in any order",
        "plain asserts",
        "anagrams",
        """
        def canonical(groups):
            return sorted(sorted(g) for g in groups)

        assert canonical(anagrams(["eat", "tea", "tan", "nat", "bat"])) == [
            ["bat"], ["eat", "tea"], ["nat", "tan"]
        ]
        assert canonical(anagrams([""])) == [[""]]
        """,
        """
        from collections import defaultdict

        def anagrams(words):
            groups = defaultdict(list)
            for w in words:
                groups["".join(sorted(w))].append(w)
            return groups.values()
        """,
        """
        def anagrams(words):
            return [[w] for w in words]
        """,
    ),
    case(
        "any valid topological order",
        "plain asserts",
        "order_tasks",
        """
        needs = {"cake": ["eggs", "flour"], "eggs": ["hen"], "flour": [], "hen": []}
        order = order_tasks(needs)
        assert sorted(order) == sorted(needs)
        for task, before in needs.items():
            for b in before:
                assert order.index(b) < order.index(task), (b, task)
        try:
            order_tasks({"a": ["b"], "b": ["a"]})
            assert False
        except ValueError:
            pass
        """,
        """
        from graphlib import CycleError, TopologicalSorter

        def order_tasks(needs):
            try:
                return list(TopologicalSorter(needs).static_order())
            except CycleError as error:
                raise ValueError("cycle") from error
        """,
        """
        def order_tasks(needs):
            return sorted(needs)
        """,
    ),
    case(
        "random inputs against a slow solution",
        "plain asserts",
        "max_subarray",
        """
        import random

        def brute(xs):
            n = len(xs)
            return max(sum(xs[i:j]) for i in range(n) for j in range(i + 1, n + 1))

        random.seed(11)
        for _ in range(30):
            xs = [random.randint(-9, 9) for _ in range(random.randint(1, 12))]
            assert max_subarray(xs) == brute(xs), xs
        """,
        """
        def max_subarray(xs):
            best = current = xs[0]
            for x in xs[1:]:
                current = max(x, current + x)
                best = max(best, current)
            return best
        """,
        """
        def max_subarray(xs):
            best = current = 0
            for x in xs:
                current = max(0, current + x)
                best = max(best, current)
            return best
        """,
    ),
    case(
        "spiral of a matrix with messages",
        "plain asserts",
        "spiral",
        """
        assert spiral([[1, 2, 3], [4, 5, 6], [7, 8, 9]]) == [1, 2, 3, 6, 9, 8, 7, 4, 5], "square"
        assert spiral([[1, 2], [3, 4], [5, 6]]) == [1, 2, 4, 6, 5, 3], "tall"
        assert spiral([]) == [], f"empty: {spiral([])!r}"
        print("all tests passed")
        """,
        """
        def spiral(matrix):
            out = []
            while matrix:
                out += matrix[0]
                matrix = list(zip(*matrix[1:]))[::-1]
            return out
        """,
        """
        def spiral(matrix):
            return [x for row in matrix for x in row]
        """,
    ),
    case(
        "generic container",
        "typing",
        "Box",
        """
        from typing import get_args

        b = Box[int](3)
        assert b.get() == 3
        assert get_args(Box[str]) == (str,)
        assert Box("a").map(len).get() == 1
        """,
        """
        from typing import Callable, Generic, TypeVar

        T = TypeVar("T")
        U = TypeVar("U")

        class Box(Generic[T]):
            def __init__(self, value: T):
                self._value = value

            def get(self) -> T:
                return self._value

            def map(self, f: Callable[[T], U]) -> "Box[U]":
                return Box(f(self._value))
        """,
        """
        class Box:
            def __init__(self, value):
                self._value = value

            def get(self):
                return self._value

            def map(self, f):
                return self
        """,
    ),
    case(
        "protocol checked at run time",
        "typing",
        ("Drawable", "draw_all"),
        """
        class Star:
            def draw(self):
                return "*"

        class Stone:
            pass

        assert isinstance(Star(), Drawable)
        assert not isinstance(Stone(), Drawable)
        assert draw_all([Star(), Stone(), Star()]) == "**"
        """,
        """
        from typing import Protocol, runtime_checkable

        @runtime_checkable
        class Drawable(Protocol):
            def draw(self) -> str: ...

        def draw_all(things):
            return "".join(t.draw() for t in things if isinstance(t, Drawable))
        """,
        """
        class Drawable:
            pass

        def draw_all(things):
            return "*" * len(things)
        """,
    ),
    case(
        "typed dict of a film",
        "typing",
        ("Film", "decade"),
        asserts("""
        assert decade(Film(title="Alien", year=1979)) == "1970s"
        assert Film(title="x", year=1) == {"title": "x", "year": 1}
        assert Film.__annotations__["year"] is int
        assert decade({"title": "Up", "year": 2009}) == "2000s"
        """),
        """
        from typing import TypedDict

        class Film(TypedDict):
            title: str
            year: int

        def decade(film: Film) -> str:
            return f"{film['year'] // 10 * 10}s"
        """,
        """
        class Film(dict):
            pass

        def decade(film):
            return f"{film['year']}s"
        """,
    ),
    case(
        "optional and union annotations",
        "typing",
        "find",
        """
        from typing import Optional, Union, get_type_hints

        hints = get_type_hints(find)
        assert hints["return"] == Optional[int]
        assert hints["key"] == Union[int, str]
        assert find([3, "a"], "a") == 1
        assert find([3], 9) is None
        """,
        """
        from typing import Optional, Union

        def find(xs: list, key: Union[int, str]) -> Optional[int]:
            return xs.index(key) if key in xs else None
        """,
        """
        def find(xs, key):
            return xs.index(key) if key in xs else -1
        """,
    ),
    case(
        "overloads and new types",
        "typing",
        ("UserId", "parse"),
        """
        u = UserId(7)
        assert u == 7 and isinstance(u, int)
        assert UserId.__name__ == "UserId"
        assert parse("7") == u
        assert parse(["1", "2"]) == [UserId(1), UserId(2)]
        """,
        """
        from typing import NewType, overload

        UserId = NewType("UserId", int)

        @overload
        def parse(text: str) -> UserId: ...
        @overload
        def parse(text: list) -> list: ...
        def parse(text):
            return [UserId(int(t)) for t in text] if isinstance(text, list) else UserId(int(text))
        """,
        """
        def UserId(n):
            return n

        def parse(text):
            return int(text)
        """,
    ),
    case(
        "parsed request has fields",
        "objects of a function",
        "parse_request",
        """
        r = parse_request("GET /index HTTP/1.1")
        assert r.method == "GET" and r.path == "/index"
        assert r.count == 3
        r.index = 5
        assert r.index == 5
        """,
        """
        class Request:
            def __init__(self, method, path, version):
                self.method, self.path, self.version = method, path, version
                self.count = 3

        def parse_request(line):
            return Request(*line.split(" "))
        """,
        """
        class Request:
            def __init__(self, *parts):
                self.method = self.path = parts[0]
                self.count = len(parts)

        def parse_request(line):
            return Request(*line.split(" "))
        """,
    ),
    case(
        "simple namespace of a match",
        "objects of a function",
        "compare",
        """
        from types import SimpleNamespace

        c = compare("kitten", "sitten")
        assert c == SimpleNamespace(equal=5, start=1)
        assert c.start == 1
        assert compare("a", "a").equal == 1
        """,
        """
        from types import SimpleNamespace

        def compare(a, b):
            same = [x == y for x, y in zip(a, b)]
            return SimpleNamespace(equal=sum(same), start=same.index(True))
        """,
        """
        from types import SimpleNamespace

        def compare(a, b):
            return SimpleNamespace(equal=len(a), start=0)
        """,
    ),
    case(
        "two objects of one call work together",
        "objects of a function",
        "make_pipe",
        """
        reader, writer = make_pipe()
        writer.write("a")
        writer.write("b")
        assert reader.pop() == "a"
        assert reader.count == 1
        assert writer.index == 2
        """,
        """
        class Reader:
            def __init__(self, items):
                self._items = items

            def pop(self):
                return self._items.pop(0)

            @property
            def count(self):
                return len(self._items)

        class Writer:
            def __init__(self, items):
                self._items, self.index = items, 0

            def write(self, item):
                self._items.append(item)
                self.index += 1

        def make_pipe():
            items = []
            return Reader(items), Writer(items)
        """,
        """
        class End:
            count, index = 1, 2

            def __init__(self):
                self._items = ["a"]

            def write(self, item):
                self._items.append(item)

            def pop(self):
                return self._items.pop()

        def make_pipe():
            end = End()
            return end, end
        """,
    ),
    case(
        "list of records with a total",
        "objects of a function",
        "read_bill",
        """
        bill = read_bill("tea 2\\ncake 5")
        assert [line.title for line in bill.lines] == ["Tea", "Cake"]
        assert bill.lines[1].price == 5
        assert bill.total == sum(line.price for line in bill.lines) == 7
        assert {line.title: line for line in bill.lines}["Tea"] is bill.lines[0]
        """,
        """
        from dataclasses import dataclass

        @dataclass
        class Line:
            title: str
            price: int

        @dataclass
        class Bill:
            lines: list

            @property
            def total(self):
                return sum(line.price for line in self.lines)

        def read_bill(text):
            rows = (row.split() for row in text.splitlines())
            return Bill([Line(name.title(), int(price)) for name, price in rows])
        """,
    ),
    case(
        "object passed back to another function",
        "objects of a function",
        ("start", "turn", "winner"),
        """
        game = start(3)
        assert winner(game) is None
        for who, n in [("ann", 1), ("bob", 1), ("ann", 1)]:
            turn(game, who, n)
        assert winner(game) == "ann"
        assert game.items == []
        other = start(2)
        assert len(other.items) == 2 and winner(other) is None
        """,
        """
        class Game:
            def __init__(self, n):
                self.items, self.last = ["*"] * n, None

        def start(n):
            return Game(n)

        def turn(game, who, n):
            del game.items[:n]
            game.last = who

        def winner(game):
            return None if game.items else game.last
        """,
        """
        class Game:
            def __init__(self, n):
                self.items, self.last = [], None

        def start(n):
            return Game(n)

        def turn(game, who, n):
            game.last = who

        def winner(game):
            return game.last
        """,
    ),
    case(
        "zip of columns becomes a dict",
        "iterators of builtins",
        "columns",
        """
        assert dict(columns(["name", "age"], ["Ann", 3])) == {"name": "Ann", "age": 3}
        assert list(columns("ab", "cd")) == [("a", "c"), ("b", "d")]
        assert next(columns("x", "y")) == ("x", "y")
        """,
        """
        def columns(keys, values):
            return zip(keys, values)
        """,
        """
        def columns(keys, values):
            return zip(values, keys)
        """,
    ),
    case(
        "map object is summed",
        "iterators of builtins",
        "lengths",
        """
        assert sum(lengths(["a", "bc"])) == 3
        assert list(lengths([])) == []
        assert max(lengths(("abc", ""))) == 3
        assert ",".join(map(str, lengths("xy"))) == "1,1"
        """,
        """
        def lengths(words):
            return map(len, words)
        """,
        """
        def lengths(words):
            return map(str, words)
        """,
    ),
    case(
        "filter of truthy values",
        "iterators of builtins",
        "compact",
        asserts("""
        assert list(compact([0, 1, "", "a", None])) == [1, "a"]
        assert "".join(compact(["x", "", "y"])) == "xy"
        assert set(compact((0, 2, 2))) == {2}
        """),
        """
        def compact(xs):
            return filter(None, xs)
        """,
        """
        def compact(xs):
            return filter(lambda x: x is not None, xs)
        """,
    ),
    case(
        "views of a dictionary follow it",
        "iterators of builtins",
        "names_of",
        """
        ages = {"ann": 3, "bob": 5}
        names = names_of(ages)
        assert sorted(names) == ["ann", "bob"]
        ages["cy"] = 1
        assert "cy" in names and len(names) == 3
        assert names & {"bob", "zoe"} == {"bob"}
        """,
        """
        def names_of(ages):
            return ages.keys()
        """,
        """
        def names_of(ages):
            return set(ages)
        """,
    ),
    case(
        "enumerate, reversed and range",
        "iterators of builtins",
        ("numbered", "backwards", "evens"),
        """
        assert list(numbered("ab")) == [(1, "a"), (2, "b")]
        assert [i for i, _ in numbered("xyz")] == [1, 2, 3]
        assert "".join(backwards(list("abc"))) == "cba"
        assert evens(10) == range(0, 10, 2)
        assert 4 in evens(10) and evens(10)[-1] == 8 and len(evens(7)) == 4
        """,
        """
        def numbered(xs):
            return enumerate(xs, 1)

        def backwards(xs):
            return reversed(xs)

        def evens(n):
            return range(0, n, 2)
        """,
        """
        def numbered(xs):
            return enumerate(xs)

        def backwards(xs):
            return reversed(xs)

        def evens(n):
            return range(0, n, 2)
        """,
    ),
)

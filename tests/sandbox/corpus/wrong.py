"""Wrong programs that plain Python rejects and that a judge which copies data may accept."""

from __future__ import annotations

from .cases import Case, case

WRONG: tuple[Case, ...] = (
    case(
        "zero grid of one row",
        "aliasing: rows",
        "zeros",
        """
        grid = zeros(2, 3)
        grid[0][1] = 5
        assert grid == [[0, 5, 0], [0, 0, 0]]
        """,
        """
        def zeros(rows, columns):
            return [[0] * columns for _ in range(rows)]
        """,
        """
        def zeros(rows, columns):
            return [[0] * columns] * rows
        """,
    ),
    case(
        "empty buckets for a hash table",
        "aliasing: rows",
        "buckets",
        """
        table = buckets(4)
        table[1].append("x")
        assert table == [[], ["x"], [], []]
        """,
        """
        def buckets(n):
            return [[] for _ in range(n)]
        """,
        """
        def buckets(n):
            return [[]] * n
        """,
    ),
    case(
        "adjacency from fromkeys",
        "aliasing: rows",
        "graph",
        """
        g = graph("abc", [("a", "b"), ("b", "c")])
        assert g == {"a": ["b"], "b": ["c"], "c": []}
        """,
        """
        def graph(nodes, edges):
            result = {n: [] for n in nodes}
            for u, v in edges:
                result[u].append(v)
            return result
        """,
        """
        def graph(nodes, edges):
            result = dict.fromkeys(nodes, [])
            for u, v in edges:
                result[u].append(v)
            return result
        """,
    ),
    case(
        "fresh lists by key",
        "aliasing: rows",
        "empty_groups",
        """
        from solution import empty_groups

        def test_groups_are_independent():
            groups = empty_groups(["x", "y"])
            groups["x"].append(1)
            assert groups["y"] == []
            assert groups["x"] == [1]
        """,
        """
        def empty_groups(keys):
            return {key: [] for key in keys}
        """,
        """
        def empty_groups(keys):
            return dict.fromkeys(keys, [])
        """,
    ),
    case(
        "seats of a theatre made once",
        "aliasing: rows",
        "seats",
        """
        plan = seats("AB", 3)
        plan["A"][0] = "sold"
        assert plan["A"] == ["sold", "free", "free"]
        assert plan["B"].count("free") == 3
        """,
        """
        def seats(rows, n):
            return {row: ["free"] * n for row in rows}
        """,
        """
        def seats(rows, n):
            free = ["free"] * n
            return {row: free for row in rows}
        """,
    ),
    case(
        "chess board with one list of squares",
        "aliasing: rows",
        "Chess",
        """
        c = Chess()
        c.place(0, 0, "R")
        assert c.row(0)[0] == "R"
        assert c.row(1)[0] == "."
        """,
        """
        class Chess:
            def __init__(self):
                self.squares = [["."] * 8 for _ in range(8)]

            def place(self, r, c, piece):
                self.squares[r][c] = piece

            def row(self, r):
                return self.squares[r]
        """,
        """
        class Chess:
            def __init__(self):
                self.squares = [["."] * 8] * 8

            def place(self, r, c, piece):
                self.squares[r][c] = piece

            def row(self, r):
                return self.squares[r]
        """,
    ),
    case(
        "pairs that are one list",
        "aliasing: rows",
        "twice",
        """
        a, b = twice([1])
        a.append(2)
        assert a == [1, 2] and b == [1]
        """,
        """
        def twice(xs):
            return list(xs), list(xs)
        """,
        """
        def twice(xs):
            ys = list(xs)
            return ys, ys
        """,
    ),
    case(
        "default list of a collector",
        "aliasing: defaults",
        "collect",
        """
        first = collect("a")
        second = collect("b")
        assert first == ["a"]
        assert second == ["b"]
        """,
        """
        def collect(item, into=None):
            into = [] if into is None else into
            into.append(item)
            return into
        """,
        """
        def collect(item, into=[]):
            into.append(item)
            return into
        """,
    ),
    case(
        "default dict of a counter",
        "aliasing: defaults",
        "tally",
        """
        t = tally("aab")
        u = tally("b")
        assert u == {"b": 1}
        assert t == {"a": 2, "b": 1}
        """,
        """
        def tally(text, counts=None):
            counts = {} if counts is None else counts
            for c in text:
                counts[c] = counts.get(c, 0) + 1
            return counts
        """,
        """
        def tally(text, counts={}):
            for c in text:
                counts[c] = counts.get(c, 0) + 1
            return counts
        """,
    ),
    case(
        "default list of members",
        "aliasing: defaults",
        "Team",
        """
        import unittest

        class TeamTest(unittest.TestCase):
            def test_members(self):
                red, blue = Team("red"), Team("blue")
                red.add("Ann")
                self.assertEqual(red.members, ["Ann"])
                self.assertEqual(blue.members, [])
        """,
        """
        class Team:
            def __init__(self, name, members=None):
                self.name = name
                self.members = list(members or [])

            def add(self, who):
                self.members.append(who)
        """,
        """
        class Team:
            def __init__(self, name, members=[]):
                self.name = name
                self.members = members

            def add(self, who):
                self.members.append(who)
        """,
    ),
    case(
        "default set of visited nodes",
        "aliasing: defaults",
        "reach",
        """
        from solution import reach

        G = {1: [2], 2: [], 3: [2]}

        def test_from_one():
            assert reach(G, 1) == {1, 2}

        def test_twice():
            reach(G, 1)
            assert reach(G, 3) == {2, 3}
        """,
        """
        def reach(graph, start, seen=None):
            seen = set() if seen is None else seen
            if start not in seen:
                seen.add(start)
                for n in graph[start]:
                    reach(graph, n, seen)
            return seen
        """,
        """
        def reach(graph, start, seen=set()):
            if start not in seen:
                seen.add(start)
                for n in graph[start]:
                    reach(graph, n, seen)
            return seen
        """,
    ),
    case(
        "options merged into the default",
        "aliasing: defaults",
        "options",
        """
        a = options(color="red")
        b = options()
        assert b == {"color": "black", "size": 1}
        assert a == {"color": "red", "size": 1}
        """,
        """
        DEFAULTS = {"color": "black", "size": 1}

        def options(**given):
            return {**DEFAULTS, **given}
        """,
        """
        DEFAULTS = {"color": "black", "size": 1}

        def options(**given):
            DEFAULTS.update(given)
            return DEFAULTS
        """,
    ),
    case(
        "subsets with one accumulator",
        "aliasing: defaults",
        "paths_to",
        """
        assert paths_to(2) == [[1, 1], [2]]
        assert paths_to(3) == [[1, 1, 1], [1, 2], [2, 1]]
        """,
        """
        def paths_to(n, steps=(1, 2)):
            if n == 0:
                return [[]]
            return [[s, *rest] for s in steps if s <= n for rest in paths_to(n - s)]
        """,
        """
        def paths_to(n, prefix=[], found=[]):
            if n == 0:
                found.append(prefix[:])
            for s in (1, 2):
                if s <= n:
                    paths_to(n - s, prefix + [s])
            return found
        """,
    ),
    case(
        "order keeps the caller's list",
        "aliasing: kept arguments",
        "Order",
        """
        items = ["pen"]
        o = Order(items)
        items.append("ink")
        assert o.items == ["pen"]
        assert o.total() == 1
        """,
        """
        class Order:
            def __init__(self, items):
                self.items = list(items)

            def total(self):
                return len(self.items)
        """,
        """
        class Order:
            def __init__(self, items):
                self.items = items

            def total(self):
                return len(self.items)
        """,
    ),
    case(
        "getter hands out the inner list",
        "aliasing: kept arguments",
        "Stack",
        """
        s = Stack()
        s.push(1)
        view = s.to_list()
        view.append(99)
        assert s.to_list() == [1]
        assert s.pop() == 1
        """,
        """
        class Stack:
            def __init__(self):
                self._items = []

            def push(self, x):
                self._items.append(x)

            def pop(self):
                return self._items.pop()

            def to_list(self):
                return self._items[:]
        """,
        """
        class Stack:
            def __init__(self):
                self._items = []

            def push(self, x):
                self._items.append(x)

            def pop(self):
                return self._items.pop()

            def to_list(self):
                return self._items
        """,
    ),
    case(
        "queue filled from a shared list",
        "aliasing: kept arguments",
        "Fifo",
        """
        import pytest

        @pytest.fixture
        def start():
            return [1, 2]

        def test_dequeue_does_not_touch_the_source(start):
            q = Fifo(start)
            assert q.get() == 1
            assert start == [1, 2]

        def test_two_queues(start):
            a, b = Fifo(start), Fifo(start)
            a.put(3)
            assert [b.get(), b.get()] == [1, 2] and b.size() == 0
        """,
        """
        class Fifo:
            def __init__(self, items=()):
                self._items = list(items)

            def put(self, x):
                self._items.append(x)

            def get(self):
                return self._items.pop(0)

            def size(self):
                return len(self._items)
        """,
        """
        class Fifo:
            def __init__(self, items=()):
                self._items = items

            def put(self, x):
                self._items.append(x)

            def get(self):
                return self._items.pop(0)

            def size(self):
                return len(self._items)
        """,
    ),
    case(
        "configuration keeps a nested dict",
        "aliasing: kept arguments",
        "Settings",
        """
        base = {"db": {"host": "a"}}
        s = Settings(base)
        base["db"]["host"] = "b"
        assert s.get("db", "host") == "a"
        s.set("db", "host", "c")
        assert base["db"]["host"] == "b"
        """,
        """
        import copy

        class Settings:
            def __init__(self, values):
                self._values = copy.deepcopy(values)

            def get(self, *path):
                value = self._values
                for key in path:
                    value = value[key]
                return value

            def set(self, section, key, value):
                self._values[section][key] = value
        """,
        """
        class Settings:
            def __init__(self, values):
                self._values = dict(values)

            def get(self, *path):
                value = self._values
                for key in path:
                    value = value[key]
                return value

            def set(self, section, key, value):
                self._values[section][key] = value
        """,
    ),
    case(
        "appended row is the caller's",
        "aliasing: kept arguments",
        "Table",
        """
        t = Table()
        row = ["a", 1]
        t.add(row)
        row[1] = 2
        t.add(row)
        assert t.rows() == [["a", 1], ["a", 2]]
        """,
        """
        class Table:
            def __init__(self):
                self._rows = []

            def add(self, row):
                self._rows.append(list(row))

            def rows(self):
                return self._rows
        """,
        """
        class Table:
            def __init__(self):
                self._rows = []

            def add(self, row):
                self._rows.append(row)

            def rows(self):
                return self._rows
        """,
    ),
    case(
        "event log keeps the payload",
        "aliasing: kept arguments",
        "record",
        """
        event = {"kind": "open"}
        record(event)
        event["kind"] = "close"
        log = record(event)
        assert [e["kind"] for e in log] == ["open", "close"]
        """,
        """
        _log = []

        def record(event):
            _log.append(dict(event))
            return list(_log)
        """,
        """
        _log = []

        def record(event):
            _log.append(event)
            return list(_log)
        """,
    ),
    case(
        "class attribute list of notes",
        "aliasing: class attributes",
        "Notebook",
        """
        a = Notebook()
        b = Notebook()
        a.write("x")
        assert a.notes == ["x"]
        assert b.notes == []
        """,
        """
        class Notebook:
            def __init__(self):
                self.notes = []

            def write(self, text):
                self.notes.append(text)
        """,
        """
        class Notebook:
            notes = []

            def write(self, text):
                self.notes.append(text)
        """,
    ),
    case(
        "class attribute dict of scores",
        "aliasing: class attributes",
        "Scores",
        """
        import unittest

        class ScoresTest(unittest.TestCase):
            def test_games_are_apart(self):
                one, two = Scores(), Scores()
                one.add("Ann", 3)
                self.assertEqual(two.table(), {})
                two.add("Bob", 1)
                self.assertEqual(one.table(), {"Ann": 3})
        """,
        """
        class Scores:
            def __init__(self):
                self._scores = {}

            def add(self, who, points):
                self._scores[who] = self._scores.get(who, 0) + points

            def table(self):
                return self._scores
        """,
        """
        class Scores:
            _scores = {}

            def add(self, who, points):
                self._scores[who] = self._scores.get(who, 0) + points

            def table(self):
                return self._scores
        """,
    ),
    case(
        "children shared by all nodes",
        "aliasing: class attributes",
        "Trie",
        """
        t = Trie()
        t.insert("to")
        assert t.contains("to")
        assert not t.contains("ot")
        assert not Trie().contains("to")
        """,
        """
        class Trie:
            def __init__(self):
                self.children = {}
                self.end = False

            def insert(self, word):
                node = self
                for c in word:
                    node = node.children.setdefault(c, Trie())
                node.end = True

            def contains(self, word):
                node = self
                for c in word:
                    if c not in node.children:
                        return False
                    node = node.children[c]
                return node.end
        """,
        """
        class Trie:
            children = {}
            end = False

            def insert(self, word):
                node = self
                for c in word:
                    node = node.children.setdefault(c, Trie())
                node.end = True

            def contains(self, word):
                node = self
                for c in word:
                    if c not in node.children:
                        return False
                    node = node.children[c]
                return node.end
        """,
    ),
    case(
        "set of tags on the class",
        "aliasing: class attributes",
        "Post",
        """
        p = Post("a").tag("x").tag("y")
        q = Post("b").tag("z")
        assert sorted(p.tags) == ["x", "y"]
        assert sorted(q.tags) == ["z"]
        """,
        """
        class Post:
            def __init__(self, title):
                self.title = title
                self.tags = set()

            def tag(self, name):
                self.tags.add(name)
                return self
        """,
        """
        class Post:
            tags = set()

            def __init__(self, title):
                self.title = title

            def tag(self, name):
                self.tags.add(name)
                return self
        """,
    ),
    case(
        "dataclass-like default of a class",
        "aliasing: class attributes",
        "Player",
        """
        from solution import Player

        def test_inventory():
            a, b = Player("a"), Player("b")
            a.inventory.append("sword")
            assert b.inventory == []
            b.inventory.append("bow")
            assert a.inventory == ["sword"]
        """,
        """
        from dataclasses import dataclass, field

        @dataclass
        class Player:
            name: str
            inventory: list = field(default_factory=list)
        """,
        """
        from dataclasses import dataclass, field

        SHARED = []

        @dataclass
        class Player:
            name: str
            inventory: list = field(default_factory=lambda: SHARED)
        """,
    ),
    case(
        "history of a game of life",
        "aliasing: history",
        "Life",
        """
        life = Life([[0, 1, 0], [0, 1, 0], [0, 1, 0]])
        life.step()
        assert life.history[0] == [[0, 1, 0], [0, 1, 0], [0, 1, 0]]
        assert life.history[1] == [[0, 0, 0], [1, 1, 1], [0, 0, 0]]
        """,
        """
        def grown(cells):
            n, m = len(cells), len(cells[0])
            new = [[0] * m for _ in range(n)]
            for i in range(n):
                for j in range(m):
                    alive = sum(
                        cells[a][b]
                        for a in range(max(0, i - 1), min(n, i + 2))
                        for b in range(max(0, j - 1), min(m, j + 2))
                        if (a, b) != (i, j)
                    )
                    new[i][j] = int(alive == 3 or (alive == 2 and cells[i][j]))
            return new

        class Life:
            def __init__(self, cells):
                self.cells = cells
                self.history = [cells]

            def step(self):
                self.cells = grown(self.cells)
                self.history.append(self.cells)
        """,
        """
        def grown(cells):
            n, m = len(cells), len(cells[0])
            new = [[0] * m for _ in range(n)]
            for i in range(n):
                for j in range(m):
                    alive = sum(
                        cells[a][b]
                        for a in range(max(0, i - 1), min(n, i + 2))
                        for b in range(max(0, j - 1), min(m, j + 2))
                        if (a, b) != (i, j)
                    )
                    new[i][j] = int(alive == 3 or (alive == 2 and cells[i][j]))
            return new

        class Life:
            def __init__(self, cells):
                self.cells = cells
                self.history = [cells]

            def step(self):
                self.cells[:] = grown(self.cells)
                self.history.append(self.cells)
        """,
    ),
    case(
        "steps of a bubble sort",
        "aliasing: history",
        "passes_of",
        """
        assert passes_of([3, 2, 1]) == [[2, 1, 3], [1, 2, 3]]
        steps = passes_of([2, 3, 1])
        assert steps[0] == [2, 1, 3]
        assert steps[-1] == [1, 2, 3]
        """,
        """
        def passes_of(numbers):
            a, steps = list(numbers), []
            for end in range(len(a) - 1, 0, -1):
                for i in range(end):
                    if a[i] > a[i + 1]:
                        a[i], a[i + 1] = a[i + 1], a[i]
                steps.append(list(a))
            return steps
        """,
        """
        def passes_of(numbers):
            a, steps = list(numbers), []
            for end in range(len(a) - 1, 0, -1):
                for i in range(end):
                    if a[i] > a[i + 1]:
                        a[i], a[i + 1] = a[i + 1], a[i]
                steps.append(a)
            return steps
        """,
    ),
    case(
        "undo restores an alias",
        "aliasing: history",
        "Editor",
        """
        e = Editor()
        e.write("a")
        e.write("b")
        before = e.words
        e.undo()
        assert e.words == ["a"]
        assert before == ["a", "b"]
        e.undo()
        assert e.words == []
        """,
        """
        class Editor:
            def __init__(self):
                self.words, self._old = [], []

            def write(self, word):
                self._old.append(self.words)
                self.words = [*self.words, word]

            def undo(self):
                self.words = self._old.pop()
        """,
        """
        class Editor:
            def __init__(self):
                self.words, self._old = [], []

            def write(self, word):
                self._old.append(len(self.words))
                self.words.append(word)

            def undo(self):
                del self.words[self._old.pop():]
        """,
    ),
    case(
        "all permutations are the last one",
        "aliasing: history",
        "permutations_of",
        """
        assert sorted(permutations_of([1, 2])) == [[1, 2], [2, 1]]
        assert len(permutations_of([1, 2, 3])) == 6
        """,
        """
        def permutations_of(items):
            found = []

            def place(k):
                if k == len(items):
                    found.append(items[:])
                for i in range(k, len(items)):
                    items[k], items[i] = items[i], items[k]
                    place(k + 1)
                    items[k], items[i] = items[i], items[k]

            place(0)
            return found
        """,
        """
        def permutations_of(items):
            found = []

            def place(k):
                if k == len(items):
                    found.append(items)
                for i in range(k, len(items)):
                    items[k], items[i] = items[i], items[k]
                    place(k + 1)
                    items[k], items[i] = items[i], items[k]

            place(0)
            return found
        """,
    ),
    case(
        "snapshots of a counter",
        "aliasing: history",
        "Sensor",
        """
        s = Sensor()
        one = s.read(5)
        two = s.read(7)
        assert one == {"last": 5, "number": 1}
        assert two == {"last": 7, "number": 2}
        """,
        """
        class Sensor:
            def __init__(self):
                self.number = 0

            def read(self, value):
                self.number += 1
                return {"last": value, "number": self.number}
        """,
        """
        class Sensor:
            def __init__(self):
                self.state = {"last": None, "number": 0}

            def read(self, value):
                self.state["last"] = value
                self.state["number"] += 1
                return self.state
        """,
    ),
    case(
        "shallow copy of a grid",
        "aliasing: shallow copies",
        "painted",
        """
        grid = [["."] * 3 for _ in range(2)]
        new = painted(grid, 0, 1)
        assert new == [[".", "#", "."], [".", ".", "."]]
        assert grid == [[".", ".", "."], [".", ".", "."]]
        """,
        """
        def painted(grid, r, c):
            new = [row[:] for row in grid]
            new[r][c] = "#"
            return new
        """,
        """
        def painted(grid, r, c):
            new = grid[:]
            new[r][c] = "#"
            return new
        """,
    ),
    case(
        "merged dicts share their lists",
        "aliasing: shallow copies",
        "merge",
        """
        left = {"a": [1]}
        right = {"a": [2], "b": [3]}
        merged = merge(left, right)
        assert merged == {"a": [1, 2], "b": [3]}
        assert left == {"a": [1]}
        merged["b"].append(4)
        assert right == {"a": [2], "b": [3]}
        """,
        """
        def merge(left, right):
            result = {k: list(v) for k, v in left.items()}
            for k, v in right.items():
                result[k] = result.get(k, []) + v
            return result
        """,
        """
        def merge(left, right):
            result = dict(left)
            for k, v in right.items():
                result.setdefault(k, []).extend(v)
            return result
        """,
    ),
    case(
        "copy method of a graph",
        "aliasing: shallow copies",
        "Graph",
        """
        import unittest

        class GraphTest(unittest.TestCase):
            def setUp(self):
                self.graph = Graph()
                self.graph.link(1, 2)

            def test_copy(self):
                other = self.graph.copy()
                other.link(1, 3)
                self.assertEqual(sorted(other.neighbours(1)), [2, 3])
                self.assertEqual(self.graph.neighbours(1), [2])
        """,
        """
        class Graph:
            def __init__(self):
                self.edges = {}

            def link(self, a, b):
                self.edges.setdefault(a, []).append(b)

            def neighbours(self, a):
                return self.edges.get(a, [])

            def copy(self):
                other = Graph()
                other.edges = {k: list(v) for k, v in self.edges.items()}
                return other
        """,
        """
        import copy

        class Graph:
            def __init__(self):
                self.edges = {}

            def link(self, a, b):
                self.edges.setdefault(a, []).append(b)

            def neighbours(self, a):
                return self.edges.get(a, [])

            def copy(self):
                return copy.copy(self)
        """,
    ),
    case(
        "templates of records",
        "aliasing: shallow copies",
        "records",
        """
        rows = records(["ann", "bob"])
        rows[0]["tags"].append("x")
        assert rows[1] == {"name": "bob", "tags": []}
        """,
        """
        import copy

        TEMPLATE = {"name": "", "tags": []}

        def records(names):
            return [{**copy.deepcopy(TEMPLATE), "name": n} for n in names]
        """,
        """
        TEMPLATE = {"name": "", "tags": []}

        def records(names):
            return [{**TEMPLATE, "name": n} for n in names]
        """,
    ),
    case(
        "rotated layers share cells",
        "aliasing: shallow copies",
        "with_border",
        """
        m = with_border([[1]])
        m[0][0] = 9
        assert m[0] == [9, 0, 0]
        assert m[2] == [0, 0, 0]
        assert m[1] == [0, 1, 0]
        """,
        """
        def with_border(m):
            width = len(m[0]) + 2
            return [[0] * width, *([0, *row, 0] for row in m), [0] * width]
        """,
        """
        def with_border(m):
            edge = [0] * (len(m[0]) + 2)
            return [edge, *([0, *row, 0] for row in m), edge]
        """,
    ),
    case(
        "generator yields one dict",
        "aliasing: generators",
        "rows_of",
        """
        rows = list(rows_of("a=1;a=2;a=3"))
        assert rows == [{"a": "1"}, {"a": "2"}, {"a": "3"}]
        """,
        """
        def rows_of(text):
            for part in text.split(";"):
                key, value = part.split("=")
                yield {key: value}
        """,
        """
        def rows_of(text):
            row = {}
            for part in text.split(";"):
                key, value = part.split("=")
                row[key] = value
                yield row
        """,
    ),
    case(
        "windows are one list",
        "aliasing: generators",
        "windows",
        """
        assert list(windows([1, 2, 3, 4], 2)) == [[1, 2], [2, 3], [3, 4]]
        ws = windows("abc", 2)
        first = next(ws)
        second = next(ws)
        assert first == ["a", "b"]
        assert second == ["b", "c"]
        """,
        """
        def windows(xs, n):
            for i in range(len(xs) - n + 1):
                yield list(xs[i : i + n])
        """,
        """
        def windows(xs, n):
            window = []
            for x in xs:
                window.append(x)
                if len(window) > n:
                    window.pop(0)
                if len(window) == n:
                    yield window
        """,
    ),
    case(
        "prefixes grow in place",
        "aliasing: generators",
        "prefixes",
        """
        from solution import prefixes

        def test_all():
            assert [p for p in prefixes([1, 2, 3])] == [[1], [1, 2], [1, 2, 3]]
        """,
        """
        def prefixes(xs):
            for i in range(1, len(xs) + 1):
                yield xs[:i]
        """,
        """
        def prefixes(xs):
            prefix = []
            for x in xs:
                prefix.append(x)
                yield prefix
        """,
    ),
    case(
        "combinations from one buffer",
        "aliasing: generators",
        "pairs",
        """
        found = []
        for p in pairs(3):
            found.append(p)
        assert found == [[0, 1], [0, 2], [1, 2]]
        """,
        """
        def pairs(n):
            for i in range(n):
                for j in range(i + 1, n):
                    yield [i, j]
        """,
        """
        def pairs(n):
            pair = [0, 0]
            for pair[0] in range(n):
                for pair[1] in range(pair[0] + 1, n):
                    yield pair
        """,
    ),
    case(
        "batches cleared after the yield",
        "aliasing: generators",
        "batches",
        """
        assert list(batches(range(5), 2)) == [[0, 1], [2, 3], [4]]
        """,
        """
        def batches(xs, n):
            batch = []
            for x in xs:
                batch.append(x)
                if len(batch) == n:
                    yield batch
                    batch = []
            if batch:
                yield batch
        """,
        """
        def batches(xs, n):
            batch = []
            for x in xs:
                batch.append(x)
                if len(batch) == n:
                    yield batch
                    batch.clear()
            if batch:
                yield batch
        """,
    ),
    case(
        "memo hands out its list",
        "aliasing: memo",
        "primes_below",
        """
        p = primes_below(10)
        p.append(10)
        assert primes_below(10) == [2, 3, 5, 7]
        """,
        """
        def primes_below(n):
            return [k for k in range(2, n) if all(k % d for d in range(2, k))]
        """,
        """
        from functools import lru_cache

        @lru_cache(maxsize=None)
        def primes_below(n):
            return [k for k in range(2, n) if all(k % d for d in range(2, k))]
        """,
    ),
    case(
        "cached row of a triangle",
        "aliasing: memo",
        "pascal",
        """
        row = pascal(3)
        row[0] = 0
        assert pascal(3) == [1, 3, 3, 1]
        assert pascal(4) == [1, 4, 6, 4, 1]
        """,
        """
        def pascal(n):
            row = [1]
            for _ in range(n):
                row = [1, *(a + b for a, b in zip(row, row[1:])), 1]
            return row
        """,
        """
        memo = {0: [1]}

        def pascal(n):
            if n not in memo:
                row = pascal(n - 1)
                memo[n] = [1, *(a + b for a, b in zip(row, row[1:])), 1]
            return memo[n]
        """,
    ),
    case(
        "repository returns what it stores",
        "aliasing: memo",
        "Repository",
        """
        r = Repository()
        r.save(1, {"name": "Ann"})
        found = r.find(1)
        found["name"] = "Eve"
        assert r.find(1) == {"name": "Ann"}
        """,
        """
        class Repository:
            def __init__(self):
                self._rows = {}

            def save(self, key, row):
                self._rows[key] = dict(row)

            def find(self, key):
                return dict(self._rows[key])
        """,
        """
        class Repository:
            def __init__(self):
                self._rows = {}

            def save(self, key, row):
                self._rows[key] = dict(row)

            def find(self, key):
                return self._rows[key]
        """,
    ),
    case(
        "parser caches its tree",
        "aliasing: memo",
        "parse",
        """
        import unittest

        class ParseTest(unittest.TestCase):
            def test_trees_are_fresh(self):
                tree = parse("(a b)")
                tree.append("c")
                self.assertEqual(parse("(a b)"), ["a", "b"])

            def test_nested(self):
                self.assertEqual(parse("(a (b c))"), ["a", ["b", "c"]])
        """,
        """
        def parse(text):
            stack = [[]]
            for token in text.replace("(", " ( ").replace(")", " ) ").split():
                if token == "(":
                    stack.append([])
                elif token == ")":
                    done = stack.pop()
                    stack[-1].append(done)
                else:
                    stack[-1].append(token)
            return stack[0][0]
        """,
        """
        _trees = {}

        def parse(text):
            if text in _trees:
                return _trees[text]
            stack = [[]]
            for token in text.replace("(", " ( ").replace(")", " ) ").split():
                if token == "(":
                    stack.append([])
                elif token == ")":
                    done = stack.pop()
                    stack[-1].append(done)
                else:
                    stack[-1].append(token)
            _trees[text] = stack[0][0]
            return _trees[text]
        """,
    ),
    case(
        "module constant handed out",
        "aliasing: memo",
        "default_columns",
        """
        columns = default_columns()
        columns.remove("id")
        assert default_columns() == ["id", "name", "date"]
        """,
        """
        def default_columns():
            return ["id", "name", "date"]
        """,
        """
        COLUMNS = ["id", "name", "date"]

        def default_columns():
            return COLUMNS
        """,
    ),
    case(
        "sorts the caller's list",
        "in place: argument changed",
        "median",
        """
        data = [5, 1, 3]
        assert median(data) == 3
        assert data == [5, 1, 3]
        """,
        """
        def median(xs):
            ordered = sorted(xs)
            return ordered[len(ordered) // 2]
        """,
        """
        def median(xs):
            xs.sort()
            return xs[len(xs) // 2]
        """,
    ),
    case(
        "pops from the caller's dict",
        "in place: argument changed",
        "without",
        """
        original = {"a": 1, "secret": 2}
        assert without(original, "secret") == {"a": 1}
        assert "secret" in original
        assert original == {"a": 1, "secret": 2}
        """,
        """
        def without(d, key):
            return {k: v for k, v in d.items() if k != key}
        """,
        """
        def without(d, key):
            d.pop(key, None)
            return d
        """,
    ),
    case(
        "flood fill paints the input",
        "in place: argument changed",
        "fill",
        """
        import copy
        from solution import fill

        IMAGE = [[1, 1, 0], [1, 0, 0]]

        def test_result():
            assert fill(copy.deepcopy(IMAGE), 0, 0, 7) == [[7, 7, 0], [7, 0, 0]]

        def test_input_is_kept():
            image = copy.deepcopy(IMAGE)
            fill(image, 0, 0, 7)
            assert image == IMAGE
        """,
        """
        def fill(image, r, c, color):
            image = [row[:] for row in image]
            old, todo = image[r][c], [(r, c)]
            while todo:
                i, j = todo.pop()
                if 0 <= i < len(image) and 0 <= j < len(image[0]) and image[i][j] == old:
                    image[i][j] = color
                    todo += [(i + 1, j), (i - 1, j), (i, j + 1), (i, j - 1)]
            return image
        """,
        """
        def fill(image, r, c, color):
            old, todo = image[r][c], [(r, c)]
            while todo:
                i, j = todo.pop()
                if 0 <= i < len(image) and 0 <= j < len(image[0]) and image[i][j] == old:
                    image[i][j] = color
                    todo += [(i + 1, j), (i - 1, j), (i, j + 1), (i, j - 1)]
            return image
        """,
    ),
    case(
        "normalizes rows of the argument",
        "in place: argument changed",
        "normalized",
        """
        import unittest

        class NormalizedTest(unittest.TestCase):
            def test_rows(self):
                rows = [{"n": " a "}, {"n": "b"}]
                before = [dict(r) for r in rows]
                self.assertEqual(normalized(rows), [{"n": "a"}, {"n": "b"}])
                self.assertListEqual(rows, before)
        """,
        """
        def normalized(rows):
            return [{k: v.strip() for k, v in row.items()} for row in rows]
        """,
        """
        def normalized(rows):
            for row in rows:
                for k in row:
                    row[k] = row[k].strip()
            return rows
        """,
    ),
    case(
        "union grows its first set",
        "in place: argument changed",
        "union",
        """
        a, b = {1, 2}, {3}
        assert union(a, b) == {1, 2, 3}
        assert a == {1, 2} and b == {3}
        """,
        """
        def union(first, *others):
            return first.union(*others)
        """,
        """
        def union(first, *others):
            first.update(*others)
            return first
        """,
    ),
    case(
        "plus-assign on the argument",
        "in place: argument changed",
        "with_total",
        """
        numbers = [1, 2, 3]
        out = with_total(numbers)
        assert out == [1, 2, 3, 6]
        assert numbers == [1, 2, 3]
        assert out is not numbers
        """,
        """
        def with_total(numbers):
            return [*numbers, sum(numbers)]
        """,
        """
        def with_total(numbers):
            numbers += [sum(numbers)]
            return numbers
        """,
    ),
    case(
        "move zeroes returns a new list",
        "in place: not changed",
        "move_zeroes",
        """
        nums = [0, 1, 0, 3]
        move_zeroes(nums)
        assert nums == [1, 3, 0, 0]
        """,
        """
        def move_zeroes(nums):
            kept = [x for x in nums if x]
            nums[:] = kept + [0] * (len(nums) - len(kept))
        """,
        """
        def move_zeroes(nums):
            kept = [x for x in nums if x]
            return kept + [0] * (len(nums) - len(kept))
        """,
    ),
    case(
        "rotation rebinds its name",
        "in place: not changed",
        "rotate",
        """
        a = [1, 2, 3, 4, 5]
        result = rotate(a, 2)
        assert result is None
        assert a == [4, 5, 1, 2, 3]
        """,
        """
        def rotate(nums, k):
            k %= len(nums)
            nums[:] = nums[-k:] + nums[:-k]
        """,
        """
        def rotate(nums, k):
            k %= len(nums)
            nums = nums[-k:] + nums[:-k]
        """,
    ),
    case(
        "matrix is transposed into a copy",
        "in place: not changed",
        "transpose",
        """
        m = [[1, 2], [3, 4]]
        row = m[0]
        transpose(m)
        assert m == [[1, 3], [2, 4]]
        assert row == [1, 3]
        """,
        """
        def transpose(m):
            for i in range(len(m)):
                for j in range(i):
                    m[i][j], m[j][i] = m[j][i], m[i][j]
        """,
        """
        def transpose(m):
            m[:] = [list(column) for column in zip(*m)]
        """,
    ),
    case(
        "reversed text as a list of letters",
        "in place: not changed",
        "Solution",
        """
        s = list("hello")
        Solution().reverseString(s)
        assert s == list("olleh")
        t = list("ab")
        Solution().reverseString(t)
        assert "".join(t) == "ba"
        """,
        """
        class Solution:
            def reverseString(self, s):
                i, j = 0, len(s) - 1
                while i < j:
                    s[i], s[j] = s[j], s[i]
                    i, j = i + 1, j - 1
        """,
        """
        class Solution:
            def reverseString(self, s):
                s = s[::-1]
                return s
        """,
    ),
    case(
        "removal while iterating",
        "in place: not changed",
        "drop_negatives",
        """
        from solution import drop_negatives

        def test_neighbours():
            xs = [1, -2, -3, 4]
            drop_negatives(xs)
            assert xs == [1, 4]
        """,
        """
        def drop_negatives(xs):
            xs[:] = [x for x in xs if x >= 0]
        """,
        """
        def drop_negatives(xs):
            for x in xs:
                if x < 0:
                    xs.remove(x)
        """,
    ),
    case(
        "cache cleared by a new dict",
        "in place: not changed",
        "reset",
        """
        cache = {"a": 1}
        alias = cache
        reset(cache)
        assert cache == {} and alias is cache
        assert len(alias) == 0
        """,
        """
        def reset(cache):
            cache.clear()
        """,
        """
        def reset(cache):
            cache = {}
            return cache
        """,
    ),
    case(
        "sorted by emptying the list",
        "in place: emptied",
        "ordered",
        """
        xs = [3, 1, 2]
        r = ordered(xs)
        assert r == sorted(xs)
        assert len(r) == 3
        """,
        """
        def ordered(xs):
            return sorted(xs)
        """,
        """
        def ordered(xs):
            xs.clear()
            return xs
        """,
    ),
    case(
        "uniques with an emptied argument",
        "in place: emptied",
        "unique",
        """
        items = [2, 2, 5]
        result = unique(items)
        assert set(result) == set(items) == {2, 5}
        """,
        """
        def unique(items):
            return list(dict.fromkeys(items))
        """,
        """
        def unique(items):
            del items[:]
            return items
        """,
    ),
    case(
        "merge that consumes its inputs",
        "in place: emptied",
        "merge_sorted",
        """
        a, b = [1, 4], [2, 3]
        assert merge_sorted(a, b) == [1, 2, 3, 4]
        assert merge_sorted(a, b) == sorted(a + b)
        assert a == [1, 4]
        """,
        """
        import heapq

        def merge_sorted(a, b):
            return list(heapq.merge(a, b))
        """,
        """
        def merge_sorted(a, b):
            out = []
            while a and b:
                out.append(a.pop(0) if a[0] <= b[0] else b.pop(0))
            return out + a + b
        """,
    ),
    case(
        "count by popping",
        "in place: emptied",
        "histogram",
        """
        import unittest

        class HistogramTest(unittest.TestCase):
            def test_counts_all(self):
                words = ["a", "b", "a"]
                result = histogram(words)
                self.assertEqual(sum(result.values()), len(words))
                self.assertEqual(result["a"], words.count("a"))
        """,
        """
        def histogram(words):
            return {w: words.count(w) for w in words}
        """,
        """
        def histogram(words):
            counts = {}
            while words:
                word = words.pop()
                counts[word] = counts.get(word, 0) + 1
            return counts
        """,
    ),
    case(
        "evens removed and kept in one list",
        "in place: emptied",
        "split_even",
        """
        numbers = [1, 2, 3, 4]
        even, odd = split_even(numbers)
        assert even == [2, 4]
        assert odd == [1, 3]
        assert sorted(even + odd) == numbers
        """,
        """
        def split_even(numbers):
            return [n for n in numbers if n % 2 == 0], [n for n in numbers if n % 2]
        """,
        """
        def split_even(numbers):
            even = [n for n in numbers if n % 2 == 0]
            for n in even:
                numbers.remove(n)
            return even, numbers
        """,
    ),
    case(
        "exhausted after the first loop",
        "iterators: exhausted",
        "Countdown",
        """
        c = Countdown(3)
        assert list(c) == [3, 2, 1]
        assert list(c) == [3, 2, 1]
        """,
        """
        class Countdown:
            def __init__(self, start):
                self.start = start

            def __iter__(self):
                return iter(range(self.start, 0, -1))
        """,
        """
        class Countdown:
            def __init__(self, start):
                self.items = iter(range(start, 0, -1))

            def __iter__(self):
                return self.items
        """,
    ),
    case(
        "filter object kept in an attribute",
        "iterators: exhausted",
        "Inbox",
        """
        box = Inbox([("a", True), ("b", False), ("c", True)])
        assert list(box.unread) == ["a", "c"]
        assert list(box.unread) == ["a", "c"]
        assert sum(1 for _ in box.unread) == 2
        """,
        """
        class Inbox:
            def __init__(self, mails):
                self.unread = [name for name, unread in mails if unread]
        """,
        """
        class Inbox:
            def __init__(self, mails):
                self.unread = (name for name, unread in mails if unread)
        """,
    ),
    case(
        "two loops over one iterator",
        "iterators: exhausted",
        "Deck",
        """
        d = Deck("abc")
        assert [(x, y) for x in d for y in d if x < y] == [("a", "b"), ("a", "c"), ("b", "c")]
        """,
        """
        class Deck:
            def __init__(self, cards):
                self.cards = list(cards)

            def __iter__(self):
                return iter(self.cards)
        """,
        """
        class Deck:
            def __init__(self, cards):
                self.cards = list(cards)
                self.at = 0

            def __iter__(self):
                self.at = 0
                return self

            def __next__(self):
                if self.at == len(self.cards):
                    raise StopIteration
                self.at += 1
                return self.cards[self.at - 1]
        """,
    ),
    case(
        "mean over a generator given",
        "iterators: exhausted",
        "center",
        """
        assert center([1, 2, 3]) == [-1, 0, 1]
        assert center(x for x in (1, 2, 3)) == [-1, 0, 1]
        """,
        """
        def center(values):
            values = list(values)
            mean = sum(values) / len(values)
            return [v - mean for v in values]
        """,
        """
        def center(values):
            mean = sum(values) / 3
            return [v - mean for v in values]
        """,
    ),
    case(
        "zip result asked twice",
        "iterators: exhausted",
        "pair_up",
        """
        p = pair_up("ab", [1, 2])
        assert dict(p) == {"a": 1, "b": 2}
        assert len(list(p)) == 2
        """,
        """
        def pair_up(keys, values):
            return list(zip(keys, values))
        """,
        """
        def pair_up(keys, values):
            return zip(keys, values)
        """,
    ),
    case(
        "list where an iterator is asked",
        "iterators: kind",
        "evens",
        """
        it = evens([1, 2, 3, 4])
        assert next(it) == 2
        assert next(it) == 4
        assert next(it, "end") == "end"
        """,
        """
        def evens(xs):
            return (x for x in xs if x % 2 == 0)
        """,
        """
        def evens(xs):
            return [x for x in xs if x % 2 == 0]
        """,
    ),
    case(
        "iterator must return itself",
        "iterators: kind",
        "Steps",
        """
        s = Steps(2)
        assert iter(s) is s
        assert next(s) == 0
        assert list(s) == [1]
        assert list(s) == []
        """,
        """
        class Steps:
            def __init__(self, n):
                self.n, self.i = n, 0

            def __iter__(self):
                return self

            def __next__(self):
                if self.i >= self.n:
                    raise StopIteration
                self.i += 1
                return self.i - 1
        """,
        """
        class Steps:
            def __init__(self, n):
                self.n = n

            def __iter__(self):
                return iter(range(self.n))
        """,
    ),
    case(
        "squares of an endless stream",
        "iterators: laziness",
        "squares",
        """
        import itertools
        from solution import squares

        def test_endless():
            assert list(itertools.islice(squares(itertools.count(1)), 3)) == [1, 4, 9]

        def test_short():
            assert list(squares([5])) == [25]
        """,
        """
        def squares(xs):
            for x in xs:
                yield x * x
        """,
        """
        def squares(xs):
            items = []
            for x in xs:
                if len(items) > 10_000:
                    raise MemoryError("too many items")
                items.append(x * x)
            return iter(items)
        """,
    ),
    case(
        "reads no more than it yields",
        "iterators: laziness",
        "take",
        """
        seen = []

        def source():
            for i in range(10):
                seen.append(i)
                yield i

        assert list(take(source(), 2)) == [0, 1]
        assert seen == [0, 1]
        """,
        """
        from itertools import islice

        def take(xs, n):
            return islice(xs, n)
        """,
        """
        def take(xs, n):
            return list(xs)[:n]
        """,
    ),
    case(
        "work begins at the first item",
        "iterators: laziness",
        "mapped",
        """
        calls = []
        m = mapped(lambda x: calls.append(x) or x + 1, [1, 2])
        assert calls == []
        assert next(m) == 2
        assert calls == [1]
        assert list(m) == [3]
        """,
        """
        def mapped(function, xs):
            for x in xs:
                yield function(x)
        """,
        """
        def mapped(function, xs):
            return iter([function(x) for x in xs])
        """,
    ),
    case(
        "peeking loses an item",
        "iterators: laziness",
        "first_and_rest",
        """
        it = iter("abc")
        first, rest = first_and_rest(it)
        assert first == "a"
        assert next(it) == "b"
        assert list(rest) == ["c"]
        """,
        """
        def first_and_rest(it):
            it = iter(it)
            return next(it), it
        """,
        """
        def first_and_rest(it):
            items = list(it)
            return items[0], iter(items[1:])
        """,
    ),
    case(
        "same object is handed back",
        "identity",
        "touch",
        """
        basket = ["a"]
        result = touch(basket)
        assert result is basket
        assert basket == ["a", "touched"]
        """,
        """
        def touch(xs):
            xs.append("touched")
            return xs
        """,
        """
        def touch(xs):
            xs.append("touched")
            return list(xs)
        """,
    ),
    case(
        "fluent interface returns itself",
        "identity",
        "Query",
        """
        q = Query()
        assert q.where("a") is q
        assert q.where("b").text() == "a AND b"
        """,
        """
        class Query:
            def __init__(self):
                self.parts = []

            def where(self, part):
                self.parts.append(part)
                return self

            def text(self):
                return " AND ".join(self.parts)
        """,
        """
        class Query:
            def __init__(self, parts=()):
                self.parts = list(parts)

            def where(self, part):
                self.parts.append(part)
                return Query(self.parts)

            def text(self):
                return " AND ".join(self.parts)
        """,
    ),
    case(
        "intern gives one object for equal keys",
        "identity",
        "Interner",
        """
        import unittest

        class InternerTest(unittest.TestCase):
            def test_same(self):
                pool = Interner()
                self.assertIs(pool.get("a"), pool.get("a"))
                self.assertIsNot(pool.get("a"), pool.get("b"))
        """,
        """
        class Interner:
            def __init__(self):
                self._lists = {}

            def get(self, key):
                return self._lists.setdefault(key, [key])
        """,
        """
        class Interner:
            def get(self, key):
                return [key]
        """,
    ),
    case(
        "larger of two lists, not its copy",
        "identity",
        "longer",
        """
        a, b = [1], [2, 3]
        assert longer(a, b) is b
        longer(a, b).append(4)
        assert b == [2, 3, 4]
        """,
        """
        def longer(a, b):
            return a if len(a) > len(b) else b
        """,
        """
        def longer(a, b):
            return list(a if len(a) > len(b) else b)
        """,
    ),
    case(
        "find returns the stored object",
        "identity",
        "Roster",
        """
        r = Roster()
        r.add({"name": "Ann", "age": 3})
        ann = r.find("Ann")
        ann["age"] = 4
        assert r.find("Ann")["age"] == 4
        assert r.find("Ann") is ann
        assert r.find("Bob") is None
        """,
        """
        class Roster:
            def __init__(self):
                self._people = []

            def add(self, person):
                self._people.append(person)

            def find(self, name):
                return next((p for p in self._people if p["name"] == name), None)
        """,
        """
        class Roster:
            def __init__(self):
                self._people = []

            def add(self, person):
                self._people.append(person)

            def find(self, name):
                return next((dict(p) for p in self._people if p["name"] == name), None)
        """,
    ),
    case(
        "a sorted copy is another list",
        "identity",
        "arranged",
        """
        xs = [1, 2]
        ys = arranged(xs)
        assert ys == [1, 2]
        assert ys is not xs
        ys.append(3)
        assert xs == [1, 2]
        """,
        """
        def arranged(xs):
            return sorted(xs)
        """,
        """
        def arranged(xs):
            return xs if xs == sorted(xs) else sorted(xs)
        """,
    ),
    case(
        "tokens taken one by one",
        "iterators: kind",
        "tokens",
        """
        from solution import tokens

        def test_next():
            stream = tokens("1 + 2")
            assert next(stream) == "1"
            assert next(stream) == "+"
            assert "".join(stream) == "2"

        def test_all():
            assert list(tokens("a b")) == ["a", "b"]
        """,
        """
        def tokens(text):
            yield from text.split()
        """,
        """
        def tokens(text):
            return text.split()
        """,
    ),
    case(
        "round robin is drawn from",
        "iterators: kind",
        "round_robin",
        """
        turns = round_robin(["a", "b"])
        assert [next(turns) for _ in range(5)] == ["a", "b", "a", "b", "a"]
        """,
        """
        import itertools

        def round_robin(players):
            return itertools.cycle(players)
        """,
        """
        def round_robin(players):
            return players * 10
        """,
    ),
    case(
        "two generators are independent",
        "iterators: kind",
        "numbers",
        """
        a, b = numbers(), numbers()
        assert next(a) == 1 and next(a) == 2
        assert next(b) == 1
        assert a is not b
        """,
        """
        def numbers():
            n = 0
            while True:
                n += 1
                yield n
        """,
        """
        import itertools

        _stream = itertools.count(1)

        def numbers():
            return _stream
        """,
    ),
    case(
        "lines are read when asked",
        "iterators: laziness",
        "until_blank",
        """
        import io

        f = io.StringIO("a\\nb\\n\\nc\\n")
        assert list(until_blank(f)) == ["a", "b"]
        assert f.read() == "c\\n"
        """,
        """
        def until_blank(file):
            for line in file:
                if line == "\\n":
                    return
                yield line.rstrip("\\n")
        """,
        """
        def until_blank(file):
            lines = file.read().split("\\n")
            return iter(lines[: lines.index("")])
        """,
    ),
)

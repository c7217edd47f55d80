"""Leaks in critiques: mentions of the hint, tests, expected values, or the solution; as a reason
to drop an example of fine-tuning, and as a reward.
"""

from __future__ import annotations

import ast
import html
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from difflib import SequenceMatcher
from functools import cached_property
from itertools import groupby

from ctrl_megatron.data.rows import ATTEMPT_COLUMNS, Row
from ctrl_megatron.problems.long_integers import load_long_integer_json
from ctrl_megatron.prompts import extract_code
from ctrl_megatron.prompts.python_source import is_program
from ctrl_megatron.rewards.items import RewardItem, Rewards, item_rows
from ctrl_megatron.types import Attempt

_HINT = re.compile(r"\bhints?\b|\btest (?:case|suite)s?\b|\b(?:unit|hidden|failing) tests?\b", re.I)
_ARGUMENT = r"\*{0,2}\w+(?:\s*=\s*[^\s,:]+)?"
_CODE = re.compile(
    r"```|~~~|</?pre\b"  # blocks
    r"|\b(?:async\s+)?def\s+\w+\s*\([^\n]{0,200}\)[^\n:]{0,99}:"  # anywhere in a line
    r"|^[^\w\n]*+\d*+[^\w\n]*+class\s+\w+\s*(?:\([^\n]{0,200}\))?\s*:"
    rf"|\blambda\s*(?:{_ARGUMENT}(?:\s*,\s*{_ARGUMENT})*)?\s*:"
    r"|^[^\w\n@]*+\d*+[^\w\n@]*+@\w[\w.]*\s*(?:\(.*\))?$",
    re.MULTILINE,
)
_QUOTED = re.compile(r"`([^`\n]+)`")
_MARGIN = re.compile(r"(?: {4}|\t)\s*\S")
_SHORTEST = 4
"""Fewest characters of a value that counts as quoted: shorter ones occur by chance."""
_LITERAL = (
    ast.Constant | ast.List | ast.Tuple | ast.Set | ast.Dict | ast.UnaryOp | ast.BinOp  # -1, 2 ** 9
)
_SHORTEST_LINE = 12
"""Fewest characters of a line that counts as quoted: shorter ones (``return n``) occur by chance.
"""


def find_leak(critique: str, attempt: Attempt) -> str:
    """The leak in ``critique``, as a reason to drop it; empty if there is none.

    A value or line that the statement or the attempt contains is not a leak.
    """
    if _HINT.search(critique):
        return "mentions the hint or tests"
    if _writes_code(critique):
        return "writes out code"
    return Secrets(attempt, attempt.problem.reference).quoted_in(critique, strict=True)


class Secrets:
    """What a critic of ``attempt`` cannot know: its tests, their values, and the lines of the
    program ``reference``. A value or line that the statement or the attempt contains is none.
    """

    def __init__(self, attempt: Attempt, reference: str) -> None:
        program = extract_code(attempt.solution)
        known = _squeezed(f"{attempt.problem.statement}\n{program}")

        def hidden(texts: Iterable[str], shortest: int) -> tuple[str, ...]:
            words = dict.fromkeys(map(_squeezed, texts))
            return tuple(w for w in words if len(w) >= shortest and w not in known)

        self._tests = tuple(dict.fromkeys(map(_squeezed, _tests(attempt))))
        self._shown = frozenset(test for test in self._tests if test in known)
        self._values = hidden(_values(attempt), _SHORTEST)
        self._lines = hidden(reference.splitlines(), _SHORTEST_LINE)
        self._sides = program, reference

    @cached_property
    def _replaced(self) -> dict[str, tuple[str, ...]]:
        return _replaced_lines(*self._sides)

    def quoted_in(self, critique: str, *, strict: bool = False) -> str:
        """The first kind of secret in ``critique``, in words; empty if there is none.

        A critique that quotes lines of the attempt, or in backticks parts of them, may say which
        lines of the reference replace them: a critic may find these itself. ``strict`` counts these
        lines all the same, and tests that the statement or the attempt contains.
        """
        squeezed = _squeezed(critique)
        if any(test in squeezed and (strict or test not in self._shown) for test in self._tests):
            return "quotes a test"
        if any(value in squeezed and _stands_alone(value, critique) for value in self._values):
            return "quotes a value of a test"
        quoted = [_squeezed(text) for text in _QUOTED.findall(critique)]

        def is_named(old: str) -> bool:
            return old in squeezed or any(len(q) >= _SHORTEST and q in old for q in quoted)

        for line in self._lines:
            named = not strict and any(map(is_named, self._replaced.get(line, ())))
            if line in squeezed and not named:
                return "quotes the solution"
        return ""


def _replaced_lines(program: str, reference: str) -> dict[str, tuple[str, ...]]:
    """Squeezed line of ``reference`` that ``program`` lacks -> the lines in whose place it is."""
    sides = [[_squeezed(line) for line in text.splitlines()] for text in (program, reference)]
    replaced = dict[str, tuple[str, ...]]()
    matcher = SequenceMatcher(None, sides[0], sides[1], autojunk=False)
    for tag, start, end, first, last in matcher.get_opcodes():
        if tag == "replace":
            old = tuple(filter(None, sides[0][start:end]))
            replaced |= dict.fromkeys(sides[1][first:last], old)
    return replaced


class LeakReward:
    """``leak``: 1 for a critique that quotes what its prompt does not say (``Secrets``), and else
    0; a negative weight punishes it, and weight 0 only counts (critique/leaked_rate). The
    reference program is the row's column ``reference``, where it has one.
    """

    reads = ATTEMPT_COLUMNS

    def __init__(self) -> None:
        self._secrets = dict[str, Secrets]()

    async def __call__(self, items: Sequence[RewardItem]) -> Rewards:
        return [
            self._reward(item, row)
            for item, row in zip(items, item_rows("leak", items), strict=True)
        ]

    def _reward(self, item: RewardItem, row: Row) -> float:
        if not item.critique:
            return 0.0
        if row.id not in self._secrets:
            self._secrets[row.id] = Secrets(row.attempt(), row.reference)
        return float(bool(self._secrets[row.id].quoted_in(item.critique)))


def _writes_code(critique: str) -> bool:
    """Whether ``critique`` contains a function, a class or a block of code: fenced, in HTML, or two
    or more indented lines that parse as a program.
    """
    text = html.unescape(critique)
    if _CODE.search(text):
        return True
    blocks = groupby(text.splitlines(), key=lambda line: _MARGIN.match(line) is not None)
    written = (list(lines) for is_indented, lines in blocks if is_indented)
    return any(len(w) > 1 and is_program(textwrap.dedent("\n".join(w))) for w in written)


def _tests(attempt: Attempt) -> Iterator[str]:
    """Whole tests: asserts, and inputs that are long enough."""
    tests = attempt.problem.selected_uts
    if isinstance(tests, str):
        for case in load_long_integer_json(tests):
            stdin = case["input"].get("stdin", "").strip()
            if len(stdin) >= _SHORTEST_LINE:
                yield stdin
        return
    for test in tests:
        yield test.removeprefix("assert ")


def _values(attempt: Attempt) -> Iterator[str]:
    """Inputs and expected values of the tests: all literals in asserts and their parts; lines of
    stdin and stdout, and stdout as a whole.
    """
    tests = attempt.problem.selected_uts
    if isinstance(tests, str):
        for case in load_long_integer_json(tests):
            stdout = case["output"]["stdout"]
            yield stdout
            yield from case["input"].get("stdin", "").splitlines()
            yield from stdout.splitlines()
        return
    for test in tests:
        try:
            tree = ast.parse(test)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue  # the sandbox reports it; such a test has no values
        for node in ast.walk(tree):
            if isinstance(node, _LITERAL):
                yield ast.unparse(node)


def _stands_alone(word: str, critique: str) -> bool:
    """Whether ``critique`` contains ``word`` other than within a longer word or number. White space
    and quotes inside it are ignored.
    """
    inner = r"[\s`'\"]*".join(map(re.escape, word))
    return re.search(rf"(?<!\w){inner}(?!\w)", critique) is not None


def _squeezed(text: str) -> str:
    return re.sub(r"[\s`'\"]+", "", text)

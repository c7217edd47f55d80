"""The places of fenced blocks, against the CommonMark parser markdown-it."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from ctrl_megatron.prompts.fences import FencedBlock, fenced_blocks

F = "```"
ORACLE = MarkdownIt("commonmark").disable(
    ["html_block", "reference", "inline", "text_join", "normalize"], True
)
# A quote's mark behind four columns is where markdown-it differs from the specification.
INNER = st.sampled_from(
    [
        F,
        "~~~",
        "~~~~",
        F + "py",
        F + "py `",
        "~~~ x `",
        "a",
        "# a",
        "===",
        "---",
        "* * *",
        "",
        "x=1",
    ]
)
BEFORE = st.lists(
    st.sampled_from(["- ", "* ", "1. ", "2) ", " ", "  ", "   ", "-", "-     "]), max_size=3
).map("".join)
QUOTED = st.lists(st.sampled_from(["> ", ">", " > "]), max_size=2).map("".join)
LINES = st.lists(st.tuples(QUOTED, BEFORE, INNER).map("".join), max_size=9)


@settings(max_examples=300)
@given(LINES)
def test_blocks_are_commonmarks(lines: list[str]) -> None:
    text = "\n".join(lines)
    expected = [token.content for token in ORACLE.parse(text) if token.type == "fence"]
    assert [_trimmed(b.code) for b in fenced_blocks(text)] == list(map(_trimmed, expected))


def _trimmed(code: str) -> list[str]:
    """White space in empty lines is nothing that a program could mean."""
    return [line if line.strip() else "" for line in code.rstrip().split("\n")]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("-\t~~~\n\t\tx\n\ty", "\tx\ny\n"),
        (">\t~~~\n>\t\tx\n>\t\t\ty", "\tx\n\t\ty\n"),
        ("1. ~~~\n  \t x", "  x\n"),
    ],
)
def test_tabs_end_at_columns(text: str, code: str) -> None:
    assert ORACLE.parse(text.replace("\t", "\t"))
    expected = [token.content for token in ORACLE.parse(text) if token.type == "fence"]
    assert [b.code for b in fenced_blocks(text)] == [code]
    assert [c.rstrip() for c in expected] == [code.rstrip()]


@pytest.mark.parametrize(
    ("info", "tag"),
    [
        ("python", "python"),
        (" Python ", "python"),
        ("python3.11", "python3"),
        ("C++", "c++"),
        ("{.python .numberLines}", "python"),
        ("{python, echo=FALSE}", "python"),
        ('python title="a.py"', "python"),
        ("python:a.py", "python"),
        ("language-python", "python"),
        ("", ""),
        ("{}", ""),
    ],
)
def test_the_tag(info: str, tag: str) -> None:
    (block,) = fenced_blocks(f"~~~{info}\nx\n~~~")
    assert block == FencedBlock("~~~", info.strip(), "x\n", True)
    assert block.tag == tag


HOSTILE = {
    "unclosed fences": f"{F}x\n~~~\n",
    "fences in quotes": f"> {F}\n",
    "fences in items": f"- {F}\n",
    "deep quotes": "> ",
    "deep items": "- ",
    "deep items, blank lines": "- " * 40 + "\n" * 400,
    "quotes": "> - > - > - a\n",
    "backticks": "`",
    "almost closed": f"{F}\n" + "`" * 400 + "x\n",
    "stars": "* * * *a\n",
    "lazy lines": "- a\nb\n",
    "tabs": "\t",
    "line breaks": "\n",
}


@pytest.mark.parametrize("unit", HOSTILE.values(), ids=HOSTILE)
def test_hostile_texts_take_linear_time(unit: str) -> None:
    def seconds(length: int) -> float:
        text = (unit * (length // len(unit) + 1))[:length] + F
        started = time.process_time()
        fenced_blocks(text)
        return time.process_time() - started

    # Twenty times as much text, and room for noise; quadratic would be 400 times as long.
    assert seconds(100_000) < 100 * max(seconds(5_000), 0.002)

"""The places of fenced blocks."""

from __future__ import annotations

import time

import pytest

from ctrl_megatron.prompts.fences import FencedBlock, fenced_blocks

F = "```"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("-\t~~~\n\t\tx\n\ty", "\tx\ny\n"),
        (">\t~~~\n>\t\tx\n>\t\t\ty", "\tx\n\t\ty\n"),
        ("1. ~~~\n  \t x", "  x\n"),
    ],
)
def test_tabs_end_at_columns(text: str, code: str) -> None:
    assert [b.code for b in fenced_blocks(text)] == [code]


@pytest.mark.parametrize(
    ("text", "code", "closed"),
    [
        (f"{F}\nx\n{F}", "x\n", True),
        (f"{F}\nx\n{F}\n\n", "x\n", True),
        (f"{F}\nx", "x\n", False),
        (f"{F}\nx\n\n", "x\n\n", False),
        (F, "", False),
        (f"{F}\n{F}", "", True),
        (f"- {F}\n  x\n\ny", "x\n\n", False),
        (f"> {F}\n> x\n> {F}\ny", "x\n", True),
        (f"~~~\n{F}\n~~~~", f"{F}\n", True),
        (f"<answer>\n{F}\nx\n{F}\n</answer>", "x\n", True),
    ],
)
def test_a_block_is_closed_by_its_own_fence_only(text: str, code: str, closed: bool) -> None:
    (block,) = fenced_blocks(text)
    assert (block.code, block.closed) == (code, closed)


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

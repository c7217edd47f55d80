"""First solutions whose fences do not say where the program is: put right, or found unreadable.

Everybody who shows or judges an answer reads it by CTRL's rule (``extract_code``). Small models
write fences by which that rule finds nothing or prose: the opening one missing, or doubled.
"""

from __future__ import annotations

import ast
import re
import warnings
from typing import Literal, NamedTuple

from ctrl_megatron.prompts.code_block import FENCE, extract_code, fenced, fenced_blocks

_CODE_LINE = re.compile(
    r"\s*(?:(?:async )?def \w+\(|class \w+.*:|@\w|(?:from [\w.]+ )?import \w|print\(|return\b"
    r"|(?:for|while|if|elif|with|try|else)\b.*:\s*$|[\w.\[\]]+ ?[-+*/]?= ?\S)"
)


class SettledAnswer(NamedTuple):
    """An answer that everybody reads alike."""

    text: str
    """The answer as written, or its program in one canonical block."""
    kind: Literal["as written", "normalised", "unreadable"]


def settle_answer(text: str) -> SettledAnswer:
    """``text`` with its Python program where ``extract_code`` finds it.

    ``as written`` where it is found already: it parses, or looks like code in a fence of its own
    (a wrong program is an answer too). ``normalised`` where another reading gives a program that
    parses: all of the text, what stands before the first fence, or the first block with content.
    ``unreadable`` otherwise: prose, or code mixed with it.
    """
    found, before = extract_code(text), text.partition(FENCE)[0]
    if FENCE in text and _is_program(found):
        return SettledAnswer(text, "as written")
    blocks = [block.code for block in fenced_blocks(_without_empty_fence(text))]
    blocks = [code for code in blocks if FENCE not in code]
    for code in (found if FENCE not in text else before, *blocks[:1]):
        if _is_program(code):
            return SettledAnswer(fenced(code.strip()), "normalised")
    looks = any(map(_CODE_LINE.match, found.splitlines()))
    if FENCE in text and FENCE not in found and not any(map(_CODE_LINE.match, before.splitlines())):
        if looks:
            return SettledAnswer(text, "as written")
        if blocks and any(map(_CODE_LINE.match, blocks[0].splitlines())):
            return SettledAnswer(fenced(blocks[0].strip()), "normalised")
    return SettledAnswer(text, "unreadable")


def _without_empty_fence(text: str) -> str:
    """Without a first fence that another one follows: models double the opening one."""
    start = max(text.find(FENCE), 0)
    doubled = re.compile(rf"{FENCE}\w*[ \t]*\n\s*(?={FENCE})").match(text, start)
    return text[doubled.end() :] if doubled else text


def _is_program(code: str) -> bool:
    """Python of which a line does something: a lone word of prose is an expression, too."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the answer's style, not ours
            body = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    idle = (ast.Name, ast.Constant, ast.Tuple, ast.Compare, ast.BinOp, ast.Attribute)
    return any(not (isinstance(n, ast.Expr) and isinstance(n.value, idle)) for n in body)

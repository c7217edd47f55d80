"""First solutions with wrong fences: normalised, or marked as unreadable.

All code that shows or judges an answer reads it by ``extract_code``. Small models leave out the
opening fence, and then ``extract_code`` finds prose or no program.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from ctrl_megatron.prompts.code_block import FENCE, extract_code, fence_code, without_reasoning
from ctrl_megatron.prompts.python_source import CODE_LINE, is_program


class NormalisedAnswer(NamedTuple):
    """An answer whose program ``extract_code`` finds, and how it was changed for that."""

    text: str
    """The answer as written, or its program in one canonical block."""
    kind: Literal["as written", "normalised", "unreadable"]


def normalise_answer(text: str) -> NormalisedAnswer:
    """``text`` with its Python program where ``extract_code`` finds it.

    ``as written``: it is found already, because it parses or looks like code in a separate fence (a
    wrong program is an answer too). ``normalised``: all of the text is a program, or the text
    before the first fence is. ``unreadable``: prose, or code mixed with prose.
    """
    answer, found = without_reasoning(text), extract_code(text)
    before, fence, _ = answer.partition(FENCE)
    if fence and is_program(found):
        return NormalisedAnswer(text, "as written")
    code = before if fence else found
    if is_program(code):
        return NormalisedAnswer(fence_code(code.strip()), "normalised")
    if fence and FENCE not in found and _looks(found) and not _looks(before):
        return NormalisedAnswer(text, "as written")
    return NormalisedAnswer(text, "unreadable")


def _looks(code: str) -> bool:
    return any(map(CODE_LINE.match, code.splitlines()))

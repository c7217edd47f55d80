"""Fenced code blocks of a Markdown text by CommonMark's rules: fences of backticks or tildes on
separate lines, also inside lists and block quotes.

Raw HTML is the only construct that is ignored: models write their answers into tags of all kinds,
and fences in them count.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from markdown_it import MarkdownIt

_DEEPEST = 32
"""Greatest depth of nested lists and quotes that is read."""
_TAG = re.compile(r"[{.\s]*(?:lang(?:uage)?[-=]\W?)?([\w+#-]+)")
# Only blocks are looked for; without inline text the time is linear in the text's length.
_PARSER = MarkdownIt("commonmark", {"maxNesting": _DEEPEST}).disable(
    ["html_block", "reference", "inline", "text_join", "normalize"], True
)


class FencedBlock(NamedTuple):
    """A block of code between two fences."""

    mark: str
    """The opening fence."""
    info: str
    """The text after the opening fence in its line, stripped."""
    code: str
    """The lines of the block, each with a line break, without the margin of its list or quote."""
    closed: bool
    """False where the text, or the list or quote around it, ends before the closing fence."""

    @property
    def tag(self) -> str:
        """The language that ``info`` names, in lower case, as in ``python title="x"`` or
        ``{.python .numberLines}``; "" for none.
        """
        found = _TAG.match(self.info)
        return found[1].lower() if found else ""


def fenced_blocks(text: str) -> list[FencedBlock]:
    if "```" not in text and "~~~" not in text:
        return []
    blocks = []
    for token in _PARSER.parse(text.replace("\r\n", "\n")):
        if token.type == "fence":
            assert token.map is not None
            code = token.content
            code += "\n" if code and not code.endswith("\n") else ""
            first, end = token.map
            # The lines of the block are its opening fence, its code and, if there is one, the
            # closing fence.
            closed = end - first > 1 + code.count("\n")
            blocks.append(FencedBlock(token.markup, token.info.strip(), code, closed))
    return blocks

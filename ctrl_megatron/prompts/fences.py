"""Fenced code blocks of a Markdown text by CommonMark's rules: fences of backticks or tildes on
separate lines, also inside lists and block quotes.

Raw HTML is the only construct that is ignored: models write their answers into tags of all kinds,
and fences in them count. The time is linear in the length of the text, also for hostile texts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

_TAB_STOP = 4
_INDENTED = 4
"""Least indentation, in columns, of a line that begins no fence, item or quote."""
_DEEPEST = 32
"""Greatest depth of nested lists and quotes that is read."""
_OPENING = re.compile(r"(`{3,})([^`]*)$|(~{3,})(.*)$")
_RULE_OR_HEADING = re.compile(
    r"(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$|#{1,6}(?:[ \t]|$)"
)
_UNDERLINE = re.compile(r"(?:=+|-+)[ \t]*$")
_ITEM = re.compile(r"([-+*]|\d{1,9}[.)])(?=[ \t]|$)")
_TAG = re.compile(r"[{.\s]*(?:lang(?:uage)?[-=]\W?)?([\w+#-]+)")


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


@dataclass(slots=True)
class _Fence:
    mark: str
    margin: int
    info: str
    lines: list[str] = field(default_factory=list)

    def is_closed_by(self, line: _Line) -> bool:
        mark = line.body.rstrip(" \t")
        if line.margin >= _INDENTED or len(mark) < len(self.mark):
            return False
        return not mark.strip(self.mark[0])

    def block(self, *, closed: bool) -> FencedBlock:
        return FencedBlock(
            self.mark, self.info, "".join(f"{line}\n" for line in self.lines), closed
        )


@dataclass(slots=True)
class _Container:
    """A block quote or a list item."""

    width: int
    """Columns by which an item's lines are indented; 0 for a quote, whose lines have marks."""
    empty: bool = False
    """True for an item without text so far."""


class _Line:
    """The rest of a line; its first character is in ``column``."""

    __slots__ = ("body", "column", "margin", "rest")

    def __init__(self, rest: str) -> None:
        self.column = 0
        self._set(rest)

    def _set(self, rest: str) -> None:
        self.rest, self.body = rest, rest.lstrip(" \t")
        self.margin = _columns(rest[: len(rest) - len(self.body)], self.column)

    def take_margin(self, width: int) -> None:
        """Remove up to ``width`` columns of white space; the rest of a tab becomes spaces."""
        white = self.rest[: len(self.rest) - len(self.body)]
        end, kept = self.column + min(width, self.margin), 0
        while self.column < end:
            self.column += _columns(white[kept], self.column)
            kept += 1
        spaces, self.column = self.column - end, end
        self._set(" " * spaces + white[kept:] + self.body)

    def take_marker(self, length: int) -> None:
        self.take_margin(self.margin)
        self.column += length
        self._set(self.body[length:])


def _columns(white: str, column: int) -> int:
    if "\t" not in white:
        return len(white)
    end = column
    for character in white:
        end += 1 if character == " " else _TAB_STOP - end % _TAB_STOP
    return end - column


def fenced_blocks(text: str) -> list[FencedBlock]:
    """Every fenced block of ``text``, in order."""
    if "```" not in text and "~~~" not in text:
        return []
    scan = _Scan()
    for line in text.replace("\r\n", "\n").removesuffix("\n").split("\n"):
        if not scan.is_plain(line):
            scan.read(_Line(line))
    scan.end_fence(closed=False)
    return scan.blocks


class _Scan:
    """CommonMark's block structure, as far as it determines fences."""

    def __init__(self) -> None:
        self.blocks: list[FencedBlock] = []
        self._containers: list[_Container] = []
        self._fence: _Fence | None = None
        self._in_paragraph = False

    def end_fence(self, *, closed: bool) -> None:
        if self._fence is not None:
            self.blocks.append(self._fence.block(closed=closed))
            self._fence = None

    def is_plain(self, line: str) -> bool:
        """True for a line whose marks need not be read, as for most lines of most texts."""
        if self._containers:
            return False
        if self._fence is not None:
            plain = not self._fence.margin and self._fence.mark not in line
            if plain:
                self._fence.lines.append(line)
            return plain
        plain = line[:1].isalpha()
        self._in_paragraph = self._in_paragraph or plain
        return plain

    def read(self, line: _Line) -> None:
        kept = self._continued(line)
        all_kept = kept == len(self._containers)
        if self._fence is not None and all_kept:
            if self._fence.is_closed_by(line):
                self.end_fence(closed=True)
            else:
                line.take_margin(self._fence.margin)
                self._fence.lines.append(line.rest)
            return
        self.end_fence(closed=False)
        started = False
        while line.body and line.margin < _INDENTED:
            goes_on = self._in_paragraph and all_kept and not started
            opens = self._opens(line, goes_on=goes_on)
            if opens is None:
                break
            if not started:
                del self._containers[kept:]
            started, self._in_paragraph = True, False
            if not isinstance(opens, _Container):
                self._fence = opens or None
                return
            self._containers.append(opens)
        if self._in_paragraph and line.body:
            return  # The line continues the paragraph, in a list or quote also without the margin.
        if not started:
            del self._containers[kept:]
        self._in_paragraph = bool(line.body) and line.margin < _INDENTED

    def _continued(self, line: _Line) -> int:
        """Number of containers that continue in this line; removes their margins and marks."""
        for number, container in enumerate(self._containers):
            if not container.width:
                if line.margin >= _INDENTED or not line.body.startswith(">"):
                    return number
                line.take_marker(1)
                line.take_margin(1)
            elif line.body:
                if line.margin < container.width:
                    return number
                line.take_margin(container.width)
                container.empty = False
            elif container.empty:
                return number
        return len(self._containers)

    def _opens(self, line: _Line, *, goes_on: bool) -> _Container | _Fence | Literal[False] | None:
        """The container or fence that begins in this line; False for a block without content, None
        for no block. With ``goes_on`` the line may continue a paragraph.
        """
        body = line.body
        deep = len(self._containers) >= _DEEPEST
        if body[0] == ">" and not deep:
            line.take_marker(1)
            line.take_margin(1)
            return _Container(0)
        if found := _OPENING.match(body):
            info = (found[2] or found[4] or "").strip()
            return _Fence(found[1] or found[3], line.margin, info)
        if _RULE_OR_HEADING.match(body) or (goes_on and _UNDERLINE.match(body)):
            return False
        item = None if deep else _ITEM.match(body)
        if item is None:
            return None
        marker, rest = item[1], body[item.end() :]
        blank = not rest.strip(" \t")
        if goes_on and (blank or (marker[0].isdigit() and int(marker[:-1]) != 1)):
            return None
        before = line.margin + len(marker)
        line.take_marker(len(marker))
        gap = 1 if blank or line.margin > _INDENTED else line.margin
        line.take_margin(gap)
        return _Container(before + gap, empty=blank)

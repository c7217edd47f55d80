"""An HTML document: its records, the templates that show them, and how a page is written.

No template receives HTML: every text is escaped where it is shown.
"""

from __future__ import annotations

import math
import os
from base64 import b64encode
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import unified_diff
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

_TEMPLATES = Path(__file__).parent / "templates"
_LINE_KINDS = {"+": "added", "-": "removed", "@": "place"}

PagePart = tuple[str, str | list[tuple[str, str]]]
"""A labelled part of an example: (label, text), or (label, [(style class, line), ...])."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A drawing with its texts."""

    title: str
    note: str
    svg: str
    alt: str
    """Description for readers who do not see the drawing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A sample that is shown in full."""

    place: str
    """Origin of the sample, such as its step."""
    colour: str
    """Style class of ``outcome``."""
    chips: list[tuple[str, str]]
    """(short text, style class) in the order of display."""
    parts: list[PagePart]


class Table(NamedTuple):
    """A table of texts."""

    title: str
    note: str
    """A description of the table; may be empty."""
    head: list[str]
    rows: list[list[str]]


def render_template(template: str, *folders: Path, **values: Any) -> str:
    """The HTML of ``template``, which is in one of ``folders`` or among the report's templates."""
    return _environment(folders).get_template(template).render(**values)


@cache
def _environment(folders: tuple[Path, ...]) -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader([*folders, _TEMPLATES]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters["base64"] = lambda text: b64encode(text.encode()).decode()
    return environment


def outcome_class(value: object) -> str:
    """Style class of a pass rate or reward: "pass" from 1 on, "fail" up to 0, "part-pass" between,
    "" for anything that is no number.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        return ""
    return "pass" if value >= 1 else "fail" if value <= 0 else "part-pass"


def changed_lines(before: str, after: str) -> PagePart:
    """The lines that a revision adds and removes, as a part of an example."""
    lines = list(unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=2))[2:]
    return "changes", [(_LINE_KINDS.get(line[:1], ""), line) for line in lines] or "none"


def format_utc(seconds: float) -> str:
    """A time, in seconds since the epoch, as UTC to the minute."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def write_page(target: Path, html: str) -> None:
    """Write a page in one step, so that a reader of an older page never sees a part of the new
    one.
    """
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        partial.write_text(html, encoding="utf-8", errors="backslashreplace")
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)

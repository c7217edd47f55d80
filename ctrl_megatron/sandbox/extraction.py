"""The program inside a completion, by SandboxFusion's priorities: fenced, then an unclosed fence,
then bare code.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal["fenced", "incomplete_fenced", "heuristic", "none"]

_PYTHON = frozenset({"python", "Python", "py", "Python3", "python3", "PY"})
_FENCED = re.compile(
    r"^[ \t]*```[ \t]*([^\s`]*)[^\n`]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE
)
_OPEN = re.compile(r"^[ \t]*```[ \t]*([^\s`]*)[^\n`]*\n(.*)", re.DOTALL | re.MULTILINE)
_CODE_LINE = re.compile(
    r"(import |from \S+ import |(async )?def \w+\s*\(|class \w+|@\w|[A-Za-z_]\w*\s*=[^=]|print\(|"
    r"(for|while|if|with) .+:\s*$|try:)"
)
_MAX_CUTS = 200


@dataclass(frozen=True, slots=True)
class Extracted:
    """The program and how it was found; an empty program when nothing was."""

    code: str
    kind: Kind


def extract_python(completion: str) -> Extracted:
    """The first Python block of the best kind present, else the first block of that kind."""
    text = completion.replace("\r\n", "\n")
    fenced = _FENCED.findall(text)
    if fenced:
        return Extracted(_choose(fenced), "fenced")
    unclosed = _OPEN.findall(text)
    if unclosed:
        return Extracted(_choose(unclosed), "incomplete_fenced")
    bare = _bare_code(text)
    return Extracted(bare, "heuristic") if bare else Extracted("", "none")


def _choose(blocks: list[tuple[str, str]]) -> str:
    return next((code for language, code in blocks if language in _PYTHON), blocks[0][1])


def _bare_code(text: str) -> str:
    lines = text.split("\n")
    start = next((i for i, line in enumerate(lines) if _CODE_LINE.match(line)), None)
    if start is None:
        return ""
    rest = kept = lines[start:]
    for _ in range(_MAX_CUTS):
        try:
            ast.parse("\n".join(kept))
        except SyntaxError as error:
            kept = kept[: min((error.lineno or 1) - 1, len(kept) - 1)]
        except (ValueError, RecursionError, MemoryError):
            break
        else:
            return "\n".join(kept) if kept else "\n".join(rest)
    return "\n".join(rest)

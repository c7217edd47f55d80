"""The program inside a completion, by SandboxFusion's priorities: fenced, then an unclosed fence,
then bare code.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import Literal

from ctrl_megatron.sandbox.languages.registry import PYTHON, Language

Kind = Literal["fenced", "incomplete_fenced", "heuristic", "none"]

_FENCED = re.compile(
    r"^[ \t]*```[ \t]*([^\s`]*)[^\n`]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE
)
_OPEN = re.compile(r"^[ \t]*```[ \t]*([^\s`]*)[^\n`]*\n(.*)", re.DOTALL | re.MULTILINE)
_CODE_LINE = re.compile(
    r"(import |from \S+ import |(async )?def \w+\s*\(|class \w+|@\w|[A-Za-z_]\w*\s*=[^=]|print\(|"
    r"(for|while|if|with) .+:\s*$|try:)"
)
_CPP_START = re.compile(r"(#\s*(include|define|pragma)\b|using namespace |int main\s*\()")
_BASH_START = re.compile(r"#!\S*(/|\s)(ba)?sh\b")
_MAX_CUTS = 200


@dataclass(frozen=True, slots=True)
class Extracted:
    """The program and how it was found; an empty program when nothing was."""

    code: str
    kind: Kind


def extract_python(completion: str) -> Extracted:
    """The first Python block of the best kind present, else the first block of that kind."""
    return extract_code(completion, PYTHON)


def extract_code(completion: str, language: Language) -> Extracted:
    """The first block in ``language`` of the best kind present, else the first block of that kind.

    Without a fence: Python from its first line of code to where it stops to parse, C++ from its
    first include, define or main to the last closing brace, Bash from its first interpreter line.
    """
    text = completion.replace("\r\n", "\n")
    fenced = _FENCED.findall(text)
    if fenced:
        return Extracted(_choose(fenced, language), "fenced")
    unclosed = _OPEN.findall(text)
    if unclosed:
        return Extracted(_choose(unclosed, language), "incomplete_fenced")
    bare = {"python": _bare_code, "cpp": _bare_cpp, "bash": _bare_bash}[language.name](text)
    return Extracted(bare, "heuristic") if bare else Extracted("", "none")


def _choose(blocks: list[tuple[str, str]], language: Language) -> str:
    return next((code for name, code in blocks if name.lower() in language.aliases), blocks[0][1])


def _from_line(text: str, start: re.Pattern[str]) -> str:
    lines = text.split("\n")
    first = next((i for i, line in enumerate(lines) if start.match(line.lstrip())), None)
    return "" if first is None else "\n".join(lines[first:])


def _bare_cpp(text: str) -> str:
    code = _from_line(text, _CPP_START)
    return code[: code.rfind("}") + 1] or code


def _bare_bash(text: str) -> str:
    return _from_line(text, _BASH_START)


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

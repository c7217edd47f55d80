"""The languages that the sandbox runs, and how a program of each is extracted from a completion."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import Literal

from ctrl_megatron.prompts.code_block import LANGUAGE_TAGS, program_block, without_reasoning
from ctrl_megatron.sandbox.limits import EXTRACTED_CHARACTERS, Profile

ExtractionKind = Literal["fenced", "incomplete_fenced", "heuristic", "none"]

_CODE_LINE = re.compile(
    r"(import |from \S+ import |(async )?def \w+\s*\(|class \w+|@\w|[A-Za-z_]\w*\s*=[^=]|print\(|"
    r"(for|while|if|with) .+:\s*$|try:)"
)
_CPP_START = re.compile(r"(#\s*(include|define|pragma)\b|using namespace |int main\s*\()")
_PARSED = 8
"""Number of times that the text may be parsed to find the end of a program."""
_BASH_START = re.compile(r"#!\S*(/|\s)(ba)?sh\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Language:
    """A language. ``profile`` is None for Python, which the worker itself runs."""

    name: str
    aliases: frozenset[str]
    """Names in requests and after code fences, in lower case."""
    source: str
    """File name of the program's source."""
    profile: Profile | None = None
    command: tuple[str, ...] = ()
    """Command that starts the program, before its arguments."""
    compiled: bool = False


PYTHON = Language(name="python", aliases=LANGUAGE_TAGS["python"], source="main.py")
CPP = Language(
    name="cpp",
    aliases=LANGUAGE_TAGS["cpp"],
    source="main.cpp",
    profile="binary",
    command=("./main",),
    compiled=True,
)
BASH = Language(
    name="bash",
    aliases=LANGUAGE_TAGS["bash"],
    source="main.sh",
    profile="shell",
    command=("bash", "main.sh"),
)
LANGUAGES = (PYTHON, CPP, BASH)


def language_named(name: str | None) -> Language:
    """The language of that name in a request. Raises ``ValueError`` for one that the sandbox does
    not run.
    """
    for language in LANGUAGES:
        if name is not None and name.lower() in language.aliases:
            return language
    known = ", ".join(language.name for language in LANGUAGES)
    if not name:
        raise ValueError(f"language is missing; this sandbox runs {known}")
    raise ValueError(
        f"language {name!r} is not supported; this sandbox runs {known}. For others point "
        "sandbox.endpoint at an external SandboxFusion service"
    )


def require_isolation(language: Language, tier: str) -> None:
    """Raise ``ValueError`` if programs of ``language`` cannot be confined in ``tier``.

    Compilers and shells start processes, which require a pid namespace. Without any isolation (tier
    ``limits``) nothing is guaranteed for Python either.
    """
    if language.profile is not None and tier == "landlock":
        raise ValueError(
            f"language {language.name!r} needs namespaces, which this kernel does not provide "
            "(tier landlock); enable unprivileged user namespaces or use python"
        )


@dataclass(frozen=True, slots=True)
class ExtractedProgram:
    """A program of an answer, and how it was found in it: ``code`` is empty if none was found."""

    code: str
    found_by: ExtractionKind


def extract_program(completion: str, language: Language) -> ExtractedProgram:
    """The program in a completion: the ``program_block`` after its reasoning, as for answers in
    training. Without a fence it searches for bare code as SandboxFusion does: Python from its first
    line of code to the point where it stops to parse, C++ from its first include, define or main to
    the last closing brace, Bash from its first interpreter line.
    """
    answer = without_reasoning(completion)
    if block := program_block(answer, language.name):
        return ExtractedProgram(block.code, "fenced" if block.closed else "incomplete_fenced")
    text = answer.replace("\r\n", "\n")
    if language is BASH:
        bare = _from_line(text, _BASH_START)
    elif language is CPP:
        bare = _from_line(text, _CPP_START)
        bare = bare[: bare.rfind("}") + 1] or bare
    else:
        bare = _bare_python(text)
    return ExtractedProgram(bare, "heuristic" if bare else "none")


def _from_line(text: str, start: re.Pattern[str]) -> str:
    lines = text.split("\n")
    first = next((i for i, line in enumerate(lines) if start.match(line.lstrip())), None)
    return "" if first is None else "\n".join(lines[first:])


def _bare_python(text: str) -> str:
    lines = text[:EXTRACTED_CHARACTERS].split("\n")
    start = next((i for i, line in enumerate(lines) if _CODE_LINE.match(line)), None)
    if start is None:
        return ""
    rest = kept = lines[start:]
    left = _PARSED * EXTRACTED_CHARACTERS
    while kept and (left := left - sum(map(len, kept))) > 0:
        try:
            ast.parse("\n".join(kept))
        except SyntaxError as error:
            kept = kept[: min((error.lineno or 1) - 1, len(kept) - 1)]
        except (ValueError, RecursionError, MemoryError):
            break
        else:
            return "\n".join(kept)
    return "\n".join(rest)

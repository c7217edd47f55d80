"""The program in an answer: ``extract_code``, the one way from a raw answer to what is run, and
``sanitized_answer``, an answer as prompts show it. CTRL's own rules, ``sanitize`` and
``desanitize``, are beside them.
"""

from __future__ import annotations

import re
import textwrap

from ctrl_megatron.prompts.fences import FencedBlock, fenced_blocks
from ctrl_megatron.prompts.python_source import CODE_LINE, is_program

FENCE = "```"
_TAG = "python"
LANGUAGE_TAGS = {
    _TAG: frozenset({_TAG, "python3", "py", "py3"}),
    "cpp": frozenset({"cpp", "c++", "cc", "cxx"}),
    "bash": frozenset({"bash", "sh", "shell"}),
}
"""How a language is called behind a fence and in requests, in lower case."""
_REASONING_BEGINS = re.compile(r"\s*<think(?:ing)?>")
_REASONING_ENDS = re.compile(r"</think(?:ing)?>")
_LAST_OF_ITS_LINE = re.compile(r"</think(?:ing)?>[ \t\r]*(?:\n|\Z)")
_REPEATED = re.compile(rf"(?:\s*{FENCE}([^`\n]*)\n)+")
_FENCES = re.compile(r"`{3,}")


def sanitize(text: str) -> str:
    """Reduce ``text`` to its first fenced block, written canonically.

    The ``python`` tag is optional and matches in any case; the end of the text closes an open
    block. Without a block, or when the first block holds only white space, ``text`` itself is
    returned.
    """
    code = _first_block(text, must_close=False)
    return fenced(code) if code else text


def desanitize(text: str) -> str:
    """The stripped content of the first *closed* fenced block; ``text`` itself without one."""
    code = _first_block(text, must_close=True)
    return text if code is None else code


def extract_code(text: str, language: str = _TAG) -> str:
    """The program an answer hands in: what ``program_block`` finds in it, else all of it; of both
    what follows the reasoning. Python without a block that counts is read by CTRL's rule: what
    follows the first three backticks, wherever they are.
    """
    answer = without_reasoning(text)
    code = _fenced_code(answer, language)
    if code is not None:
        return code
    return _without_margin(answer) if language == _TAG else answer


def sanitized_answer(text: str) -> str:
    """An answer as prompts show it: the Python program of ``extract_code`` in a canonical block;
    what follows the reasoning where nothing is fenced.
    """
    answer = without_reasoning(text)
    code = _fenced_code(answer, _TAG)
    return fenced(code) if code else answer


def program_block(answer: str, language: str) -> FencedBlock | None:
    """The block of ``answer`` (without its reasoning) that holds its program; None where nothing
    is fenced, or where all of it is a Python program, whose texts may hold fences.

    The first block with ``language``'s tag, else the first without a tag, else the first; one that
    is never closed only if it has the tag or there is no other, an empty one only if there is no
    other. A block of Python without a tag is as good as one with it; it loses the margin that all
    its lines have.
    """
    blocks = [block for block in fenced_blocks(answer) if block.closed or block.code.strip()]
    if not blocks or (language == _TAG and is_program(answer)):
        return None
    if language == _TAG:
        blocks = list(map(_as_meant, blocks))
    if len(blocks) == 1:
        return blocks[0]
    tags = tags_of(language)

    def rank(block: FencedBlock) -> int:
        if not block.code.strip():
            return 4
        untagged = block.closed and not block.tag
        if block.tag in tags or (language == _TAG and untagged and is_program(block.code)):
            return 0
        return 1 if untagged else 2 if block.closed else 3

    return min(blocks, key=rank)


def _as_meant(block: FencedBlock) -> FencedBlock:
    """A block of Python as models mean it: of a repeated opening fence the last; with a first line
    that is right behind the fence, where the tag belongs; without a margin; up to a fence that is
    not on a line of its own, where only that much is a program. What a longer fence encloses may
    hold shorter ones.
    """
    info, code = block.info, block.code
    if block.mark == FENCE and (repeated := _REPEATED.match(code)):
        info, code = repeated[1], code[repeated.end() :]
    if CODE_LINE.match(info):
        info, code = "", f"{info}\n{code}"
    code = _without_margin(code)
    if block.mark == FENCE and FENCE in code and not is_program(code):
        before = code.partition(FENCE)[0]
        code = before if is_program(before) else code
    return block._replace(info=info, code=code)


def _without_margin(code: str) -> str:
    if not code.strip() or not code.lstrip("\r\n")[0].isspace():
        return code
    return textwrap.dedent(code)


def tags_of(language: str) -> frozenset[str]:
    """What may stand behind the fence of a block in ``language``."""
    return LANGUAGE_TAGS.get(language, frozenset({language}))


def without_reasoning(text: str) -> str:
    """What follows the reasoning that a model writes out before its answer.

    It ends with the last ``</think>`` that ends a line (a template may have written the opening
    tag), or at the first one where the text begins with ``<think>``. Reasoning that does not end
    has no answer yet: "".
    """
    if ends := [match.end() for match in _LAST_OF_ITS_LINE.finditer(text)]:
        text = text[ends[-1] :]
    while begins := _REASONING_BEGINS.match(text):
        end = _REASONING_ENDS.search(text, begins.end())
        text = text[end.end() :] if end else ""
    return text


def fenced(code: str, language: str = _TAG) -> str:
    """``code`` as the canonical fenced block, whose fences are longer than any in the code."""
    longest = max(map(len, _FENCES.findall(code)), default=len(FENCE) - 1)
    fence = "`" * (longest + 1)
    return f"{fence}{language}\n{code}\n{fence}"


def _fenced_code(answer: str, language: str) -> str | None:
    answer = answer.replace("\r\n", "\n")
    block = program_block(answer, language)
    if block is not None and (
        block.closed or block.tag in tags_of(language) or language != _TAG or FENCE not in answer
    ):
        return block.code.strip() if language == _TAG else block.code.removesuffix("\n")
    if language != _TAG or FENCE not in answer or is_program(answer):
        return None
    tag, line_break, rest = answer.partition(FENCE)[2].partition("\n")
    if line_break and tag.strip().lower() in ("", *tags_of(_TAG)):
        return _without_margin(rest.partition(FENCE)[0]).strip() or None
    return _first_block(answer, must_close=False) or None


def _first_block(text: str, *, must_close: bool) -> str | None:
    # Searched by hand: the equivalent regular expression is quadratic in runs of white space, and
    # these texts come from a model.
    opening = text.find(FENCE)
    if opening < 0:
        return None
    start = opening + len(FENCE)
    if text[start : start + len(_TAG)].lower() == _TAG:
        start += len(_TAG)
    end = text.find(FENCE, start)
    if end < 0 and must_close:
        return None
    return (text[start:] if end < 0 else text[start:end]).strip()

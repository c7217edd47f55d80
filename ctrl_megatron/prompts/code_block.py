"""The program in an answer: ``extract_code`` is the only way from a raw answer to the program that
runs, and ``sanitized_answer`` is an answer as prompts show it. ``sanitize`` and ``desanitize`` are
CTRL's rules.
"""

from __future__ import annotations

import re
import textwrap

from ctrl_megatron.prompts.fences import FencedBlock, fenced_blocks
from ctrl_megatron.prompts.python_source import CODE_LINE, is_program

FENCE = "```"
BYTE_ORDER_MARK = "\ufeff"
"""Editors write it before a program, and CPython and compilers skip it there."""
_TAG = "python"
LANGUAGE_TAGS = {
    _TAG: frozenset({_TAG, "python3", "py", "py3"}),
    "cpp": frozenset({"cpp", "c++", "cc", "cxx"}),
    "bash": frozenset({"bash", "sh", "shell"}),
    "javascript": frozenset({"javascript", "js", "node", "nodejs"}),
    "java": frozenset({"java"}),
    "r": frozenset({"r"}),
}
"""Language -> its names behind a fence and in requests, in lower case."""
_REASONING_BEGINS = re.compile(r"\s*<think(?:ing)?>")
_REASONING_ENDS = re.compile(r"</think(?:ing)?>")
_LAST_OF_ITS_LINE = re.compile(r"</think(?:ing)?>[ \t\r]*(?:\n|\Z)")
_REPEATED = re.compile(rf"(?:\s*{FENCE}([^`\n]*)\n)+")
_FENCES = re.compile(r"`{3,}")


def sanitize(text: str) -> str:
    """The first fenced block of ``text`` in canonical form. The name is CTRL's.

    The ``python`` tag is optional and matches in any case; the end of the text closes an open
    block. Without a block, or where the first block is blank, ``text`` is returned.
    """
    code = _first_block(text, must_close=False)
    return fence_code(code) if code else text


def desanitize(text: str) -> str:
    """The stripped content of the first *closed* fenced block; ``text`` itself where there is none.
    The name is CTRL's: it does not undo ``sanitize``, which also takes an open block."""
    code = _first_block(text, must_close=True)
    return text if code is None else code


def extract_code(text: str, language: str = _TAG) -> str:
    """The program in an answer: the block that ``program_block`` finds after the reasoning, else
    all text after the reasoning. Python without such a block is read by CTRL's rule: the text
    after the first three backticks, wherever they are.
    """
    answer = without_reasoning(text)
    code = _fenced_code(answer, language)
    if code is not None:
        return code
    return _without_margin(answer) if language == _TAG else answer


def sanitized_answer(text: str) -> str:
    """An answer as prompts show it: the Python program of ``extract_code`` in a canonical block, or
    the text after the reasoning where the answer has no fence.
    """
    answer = without_reasoning(text)
    code = _fenced_code(answer, _TAG)
    return fence_code(code) if code else answer


def program_block(answer: str, language: str) -> FencedBlock | None:
    """The block with the program of ``answer``, which has no reasoning; None without a fence, and
    where all of the answer is a Python program, whose strings may contain fences.

    It is the first block with ``language``'s tag, else the first without a tag, else the first. A
    block without a closing fence counts only with the tag or as the only block; an empty block
    counts only as the only block. Python without a tag counts as a block with the tag; the common
    margin of its lines is removed.
    """
    blocks = [
        block._replace(code=block.code.removeprefix(BYTE_ORDER_MARK))
        for block in fenced_blocks(answer)
        if block.closed or block.code.strip()
    ]
    if not blocks or (language == _TAG and _is_whole_program(answer)):
        return None
    if language == _TAG:
        blocks = list(map(_as_meant, blocks))
    if len(blocks) == 1:
        return blocks[0]
    tags = fence_tags(language)

    def rank(block: FencedBlock) -> int:
        if not block.code.strip():
            return 4
        untagged = block.closed and not block.tag
        if block.tag in tags or (language == _TAG and untagged and is_program(block.code)):
            return 0
        return 1 if untagged else 2 if block.closed else 3

    return min(blocks, key=rank)


def _is_whole_program(answer: str) -> bool:
    # Most judged answers begin with a fence and need not be parsed.
    return not answer.startswith(FENCE) and is_program(answer)


def _as_meant(block: FencedBlock) -> FencedBlock:
    """A block of Python as models mean it. The last of several opening fences counts. Code right
    after the fence, in place of the tag, is the first line. The margin is removed. The block ends
    at a fence inside a line where only the text before it is a program. A block in a longer fence
    may contain shorter fences.
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


def fence_tags(language: str) -> frozenset[str]:
    return LANGUAGE_TAGS.get(language, frozenset({language}))


def without_reasoning(text: str) -> str:
    """The text after the reasoning that a model writes before its answer.

    Reasoning ends with the last ``</think>`` at the end of a line (the chat template may have
    written the opening tag), or at the first one where the text begins with ``<think>``. Reasoning
    without an end has no answer: "" is returned. A byte order mark before the text is removed.
    """
    text = text.removeprefix(BYTE_ORDER_MARK)
    if ends := [match.end() for match in _LAST_OF_ITS_LINE.finditer(text)]:
        text = text[ends[-1] :]
    while begins := _REASONING_BEGINS.match(text):
        end = _REASONING_ENDS.search(text, begins.end())
        text = text[end.end() :] if end else ""
    return text.removeprefix(BYTE_ORDER_MARK)


def fence_code(code: str, language: str = _TAG) -> str:
    """``code`` in a canonical fenced block, whose fences are longer than any fence in the code."""
    longest = max(map(len, _FENCES.findall(code)), default=len(FENCE) - 1)
    fence = "`" * (longest + 1)
    return f"{fence}{language}\n{code}\n{fence}"


def _fenced_code(answer: str, language: str) -> str | None:
    answer = answer.replace("\r\n", "\n")
    block = program_block(answer, language)
    if block is not None and (
        block.closed or block.tag in fence_tags(language) or language != _TAG or FENCE not in answer
    ):
        return block.code.strip() if language == _TAG else block.code.removesuffix("\n")
    if language != _TAG or FENCE not in answer or _is_whole_program(answer):
        return None
    tag, line_break, rest = answer.partition(FENCE)[2].partition("\n")
    if line_break and tag.strip().lower() in ("", *fence_tags(_TAG)):
        return _without_margin(rest.partition(FENCE)[0]).strip() or None
    return _first_block(answer, must_close=False) or None


def _first_block(text: str, *, must_close: bool) -> str | None:
    # Searched without a regular expression, which would be quadratic in runs of white space; a
    # model may write such texts.
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

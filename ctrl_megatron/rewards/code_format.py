"""The reward ``code_format``: does an answer hand in exactly one block of Python that parses?

Source: DiffuCoder (arXiv 2506.20639), ``code_format_reward``.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Sequence

from ctrl_megatron.rewards.items import RewardItem

_FENCE = "```"
_OPENING = "```python\n"
WELL_FORMED, UNPARSABLE, MALFORMED = 1.0, 0.5, 0.0


def code_format_score(text: str, *, final_newline: bool = True) -> float:
    """1.0 for one well-formed block, 0.5 if its code does not parse, 0.0 otherwise.

    Well-formed: any text without a fence, an opening fence with the tag ``python`` on a line's end,
    code, a closing fence on a line of its own, one line break, the end. With ``final_newline``
    false the text may also end right behind the closing fence.
    """
    if text.count(_FENCE) != 2 or text.count("`" * 4):
        return MALFORMED
    before, _, rest = text.partition(_OPENING)
    if not rest or _FENCE in before or (before and not before.endswith("\n")):
        return MALFORMED
    endings = ("\n```\n",) if final_newline else ("\n```\n", "\n```")
    ending = next((e for e in endings if rest.endswith(e)), None)
    if ending is None:
        return MALFORMED
    return WELL_FORMED if _parses(rest.removesuffix(ending)) else UNPARSABLE


class CodeFormatReward:
    """``code_format_score`` of every text."""

    def __init__(self, *, final_newline: bool = True) -> None:
        self._final_newline = final_newline

    async def __call__(self, items: Sequence[RewardItem]) -> list[float | None]:
        """See ``RewardFunction``."""
        return [code_format_score(i.text, final_newline=self._final_newline) for i in items]


def _parses(code: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the program's style, not ours
            ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True

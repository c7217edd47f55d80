"""Keeps control tokens, which structure a conversation, out of texts: only the chat template writes
them.

A text may spell out a control token. It remains text, because the tokenizer used here knows every
control token under another, random spelling.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from typing import Any, Literal

Role = Literal["user", "assistant", "answer"]
_MARKER = re.compile("<[|\uff5c].+[|\uff5c]>")
_SIGN = re.compile(r"[^\w\s▁]")


class ControlTokenEncoder:
    """Tokenizes the output of a chat template, from a fast ``tokenizer`` of transformers and the
    source of its ``template``.

    Control tokens are the tokenizer's special tokens, added tokens of the form ``<|...|>``, and
    added tokens with punctuation that occur in the template's source as an opening or closing tag
    (Qwen's ``<think>``). Other added tokens, such as runs of spaces, are text.
    """

    def __init__(self, tokenizer: Any, template: str) -> None:
        inner = json.loads(tokenizer.backend_tokenizer.to_str())
        ends = {tokenizer.eos_token, tokenizer.bos_token}
        tags = template + template.replace("</", "<") + template.replace("<", "</")
        special: list[str] = []
        markers: list[str] = []
        markup: list[str] = []
        for token in inner["added_tokens"]:
            spelling = token["content"]
            if token["special"] or spelling in ends:
                special.append(spelling)
            elif _MARKER.fullmatch(spelling):
                markers.append(spelling)
            elif spelling in tags and _SIGN.search(spelling):
                markup.append(spelling)
        spellings = [*special, *markers, *markup]
        unread = [spelling for spelling in markup if not _is_read(spelling, template)]
        drawn = secrets.token_hex(8)
        # Templates and normalizers do not change hexadecimal digits.
        self._inside = {s: f"{drawn}a{i:06}" for i, s in enumerate(spellings)}
        self._shelter = {s: f"{drawn}b{i:06}" for i, s in enumerate(spellings)}
        self._hidden = {
            "user": _one_of(spellings),
            "assistant": _one_of([*special, *markers, *unread]),
            "answer": _one_of([*special, *markers]),
        }
        self._sheltered = _one_of(list(self._shelter.values()))
        self._outside = {mark: spelling for spelling, mark in self._shelter.items()}
        self._tokenizer = _respelled(inner, self._inside)

    def is_control_token(self, number: int) -> bool:
        return self._tokenizer.id_to_token(number) in self._inside.values()

    def escape_control_tokens(self, text: str, role: Role) -> str:
        """``text`` as input of a template, with placeholders for the control tokens spelled in it.

        An earlier message of the ``assistant`` keeps the tags that the template searches for, such
        as those of its reasoning. An ``answer``, which is not rendered by a template, keeps all
        tags.
        """
        return self._hidden[role].sub(lambda match: self._shelter[match[0]], text)

    def encode_rendered(self, text: str) -> list[int]:
        """Tokens of the text that a template rendered from sheltered texts."""
        text = self._hidden["user"].sub(lambda match: self._inside[match[0]], text)
        text = self._sheltered.sub(lambda match: self._outside[match[0]], text)
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_untemplated(self, text: str) -> list[int]:
        """Tokens of an answer without a template."""
        return self.encode_rendered(self.escape_control_tokens(text, "answer"))


def _is_read(tag: str, template: str) -> bool:
    """Whether ``template`` searches texts for ``tag`` or its opening or closing counterpart."""
    name = re.escape(tag).replace("</", "<").replace("<", "</?", 1)
    looks = r"(?:split|strip|startswith|endswith|find|partition|replace)\(\s*"
    return bool(
        re.search(rf"{looks}(['\"])(?:\\n)*{name}(?:\\n)*\1", template)
        or re.search(rf"(['\"]){name}\1\s+(?:not\s+)?in\b", template)
    )


def _one_of(spellings: list[str]) -> re.Pattern[str]:
    """A pattern for the longest of ``spellings`` at a position, as a tokenizer matches."""
    longest_first = sorted(spellings, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _respelled(inner: dict[str, Any], names: Mapping[str, str]) -> Any:
    """The tokenizer with the JSON form ``inner`` and tokens renamed by ``names`` (old -> new), also
    in its model: otherwise a Unigram model, a merge or a whole-word lookup would still find the
    old spellings in a text.
    """
    from tokenizers import Tokenizer

    for token in inner["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = inner["model"]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(piece, piece): number for piece, number in vocabulary.items()}
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocabulary]
    if model.get("unk_token"):
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        model["merges"] = [pair for pair in model["merges"] if not _makes(pair, names)]
    inner["post_processor"] = inner["truncation"] = inner["padding"] = None
    return Tokenizer.from_str(json.dumps(inner))


def _makes(pair: str | list[str], names: Mapping[str, str]) -> bool:
    left, right = pair.split(" ") if isinstance(pair, str) else pair
    return left + right in names or left in names or right in names

"""The tokens that structure a conversation, written by a chat template and by nobody else.

A text may spell such a token letter by letter. It stays a text: every control token of the
tokenizer in use here has another spelling, one that no text can know.
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


class ControlTokens:
    """Tokenizes what a template wrote around texts, given a fast ``tokenizer`` of transformers and
    its ``template``.

    Control tokens are those that the tokenizer calls special, those of the form ``<|...|>``, and
    tags that are in the template's source, opening or closing, and more than letters (Qwen's
    ``<think>``). The rest of what was added to a vocabulary, such as runs of spaces, is text.
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
        # Hexadecimal digits survive what templates and normalizers do to text.
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

    def shelter(self, text: str, role: Role) -> str:
        """``text`` for a template, without the control tokens that are spelled in it.

        In what the ``assistant`` said before, tags stay that the template itself looks for, as for
        its reasoning. An ``answer`` that no template is filled with keeps all tags.
        """
        return self._hidden[role].sub(lambda match: self._shelter[match[0]], text)

    def encode_rendered(self, text: str) -> list[int]:
        """Tokens of what a template made of sheltered texts."""
        text = self._hidden["user"].sub(lambda match: self._inside[match[0]], text)
        text = self._sheltered.sub(lambda match: self._outside[match[0]], text)
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_text(self, text: str) -> list[int]:
        """Tokens of an answer by itself."""
        return self.encode_rendered(self.shelter(text, "answer"))


def _is_read(tag: str, template: str) -> bool:
    """Whether ``template`` looks for a tag in a text, or for its opening or closing partner."""
    name = re.escape(tag).replace("</", "<").replace("<", "</?", 1)
    looks = r"(?:split|strip|startswith|endswith|find|partition|replace)\(\s*"
    return bool(
        re.search(rf"{looks}(['\"])(?:\\n)*{name}(?:\\n)*\1", template)
        or re.search(rf"(['\"]){name}\1\s+(?:not\s+)?in\b", template)
    )


def _one_of(spellings: list[str]) -> re.Pattern[str]:
    """Matches the longest of ``spellings`` at a place, as a tokenizer does."""
    longest_first = sorted(spellings, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _respelled(inner: dict[str, Any], names: Mapping[str, str]) -> Any:
    """The tokenizer of which ``inner`` is the JSON form, with ``names`` (from old to new) in place
    of its tokens' spellings, in its model too: a Unigram model, a merge or a word that is looked
    up as a whole would find the old ones in a text.
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

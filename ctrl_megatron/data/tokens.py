"""The only place where text becomes tokens and tokens become text."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import takewhile
from os import PathLike
from pathlib import Path
from typing import Any

from ctrl_megatron.data.control_tokens import ControlTokenEncoder
from ctrl_megatron.errors import UserError
from ctrl_megatron.types import Message

_log = logging.getLogger(__name__)
TEMPLATE_DATE = datetime(2024, 7, 26)
"""The date for chat templates that print today's date. Fixed, so that a configuration produces the
same tokens every day; Llama's templates have it as their default.
"""
_ANSWER = "7c0f94d1e2"
"""Stands for an answer in a conversation of which only the rest is needed."""
_DRAWS = re.compile(r"\|\s*random\b|\bmap\(\s*['\"]random\b|\blipsum\s*\(")


class TextCodec:
    """A tokenizer with a chat template. Loaded from a model directory at the first use."""

    def __init__(self, tokenizer_path: str | PathLike[str]) -> None:
        """Raises ``ValueError`` unless ``tokenizer_path`` is a directory with a tokenizer."""
        self.path = Path(tokenizer_path)
        if not self.path.is_dir():
            raise UserError(f"tokenizer directory {self.path} not found")
        if not any(self.path.glob("tokenizer*")):
            run = (self.path / "checkpoints").is_dir()
            raise UserError(
                f"{self.path} holds no tokenizer (tokenizer.json or tokenizer.model)",
                remedy="it is a run's directory: export its weights with "
                f"ctrl-convert-megatron-to-hf --checkpoint {self.path} --out DIR"
                if run
                else "",
            )
        self._said_date = False

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of transformers. Raises ``ValueError`` if it cannot be loaded or has no
        chat template.
        """
        tokenizer = _loaded(self.path)
        if not tokenizer.chat_template:
            raise UserError(
                f"the tokenizer of {self.path} has no chat template; use a chat model's, or add "
                "chat_template.jinja"
            )
        return tokenizer

    @cached_property
    def _template(self) -> str:
        """Source of the chat template. Raises ``ValueError`` if it contains random choices."""
        template = self.tokenizer.get_chat_template()
        if drawn := _DRAWS.search(template):
            raise UserError(
                f"the chat template of {self.path} draws at random ({drawn[0].strip()}), so equal "
                "conversations would have different tokens; take that out of it"
            )
        return template

    @cached_property
    def _control(self) -> ControlTokenEncoder:
        if getattr(self.tokenizer, "backend_tokenizer", None) is None:
            raise UserError(
                f"the tokenizer of {self.path} has no fast form; save one with tokenizer.json"
            )
        return ControlTokenEncoder(self.tokenizer, self._template)

    def encode_chat(
        self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> list[int]:
        """Tokens of a conversation, by default up to the start of the assistant's answer.

        Only the template writes control tokens; a control token spelled in a message is ordinary
        text. Raises ``ValueError`` for an empty conversation or one that the template refuses.
        """
        return self._control.encode_rendered(self._rendered(messages, add_generation_prompt))

    def encode_chat_and_answer(
        self, messages: Sequence[Mapping[str, str]], answer: str
    ) -> tuple[list[int], list[int]]:
        """Tokens of a conversation whose last message is the assistant's ``answer``: (those that
        are as before any answer to ``messages``, the rest). Raises as ``encode_chat``.
        """
        last = {"role": "assistant", "content": answer}
        whole = self.encode_chat([*messages, last], add_generation_prompt=False)
        pairs = zip(whole, self.encode_chat(messages), strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return whole[:same], whole[same:]

    def encode_next_turn(self, text: str, *, ended: bool) -> list[int]:
        """Tokens by which a conversation goes on after an answer: the rest of the answer's turn,
        the user's message ``text``, and the start of the next answer, as the template writes them.

        ``ended`` says whether the answer's last token is an end token; without it the template's
        own end comes first. The answer itself is not tokenized again, so its tokens remain those
        that were drawn. UserError for a template that changes answers.
        """
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
        whole = self._rendered([*messages, {"role": "user", "content": text}], True)
        _, found, after = whole.partition(_ANSWER)
        if not found:
            raise UserError(
                f"the chat template of {self.path} changes an assistant's text, so a conversation "
                "of several turns cannot go on after it"
            )
        tokens = self._control.encode_rendered(after)
        return tokens[1:] if ended and tokens[:1] and tokens[0] in self.eos_token_ids else tokens

    def _rendered(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool) -> str:
        """The template's text for the messages, in which control tokens are sheltered."""
        from jinja2 import TemplateError

        if not messages:
            raise UserError("a conversation needs at least one message")
        chat: list[Message] = [
            {
                key: self._control.escape_control_tokens(
                    text, "assistant" if message.get("role") == "assistant" else "user"
                )
                for key, text in message.items()
            }
            for message in messages
        ]
        try:
            return self.tokenizer.apply_chat_template(
                chat,
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                strftime_now=self.template_date,
            )
        except TemplateError as error:
            roles = ", ".join(message.get("role", "?") for message in chat)
            raise UserError(
                f"the chat template of {self.path} refuses the roles ({roles}): {error}"
            ) from error

    def template_date(self, form: str) -> str:
        """``TEMPLATE_DATE`` in a template's format; the first call logs a warning."""
        if not self._said_date:
            self._said_date = True
            _log.warning(
                "the chat template of %s prints today's date; it always gets %s, so that "
                "equal conversations have equal tokens",
                self.path,
                f"{TEMPLATE_DATE:%d %B %Y}",
            )
        return TEMPLATE_DATE.strftime(form)

    def encode(self, text: str) -> list[int]:
        """Tokens of ``text`` without added tokens. A special token spelled in it is text."""
        return self._control.encode_untemplated(text)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids`` with unchanged white space."""
        return self.tokenizer.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def fingerprint(self) -> str:
        """A digest of vocabulary, chat template and end-of-text tokens (16 hex digits), independent
        of the directory. Raises ``ValueError`` if the tokenizer cannot be used.
        """
        vocabulary = sorted(self.tokenizer.get_vocab().items())
        known = (vocabulary, self.tokenizer.chat_template, self.eos_token_ids)
        return hashlib.sha256(repr(known).encode()).hexdigest()[:16]

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer: the tokenizer's, those of ``generation_config.json``, and the
        template's ``turn_end_token_id``, in this order.

        Raises ``ValueError`` if the files name none.
        """
        ids = _end_tokens(self.path, self.tokenizer)
        if not ids:
            raise UserError(f"{self.path} names no end-of-text token (eos_token)")
        return ids if self.turn_end_token_id in (None, *ids) else (*ids, self.turn_end_token_id)

    @cached_property
    def turn_end_token_id(self) -> int | None:
        """The control token that the chat template writes behind an answer, with which a model of
        this template has to end its own; None where it writes none.
        """
        asks: Message = {"role": "user", "content": "?"}
        answered: list[Message] = [asks, {"role": "assistant", "content": _ANSWER}]
        try:
            # What begins a turn, also that of a template which always asks for the next answer,
            # differs between the two.
            ends, goes_on = (
                self._control.encode_rendered(self._rendered(talk, False).partition(_ANSWER)[2])
                for talk in (answered, [*answered, asks])
            )
        except UserError:
            return None  # a template without answers
        shared = takewhile(lambda both: both[0] == both[1], zip(ends, goes_on, strict=False))
        return next((token for token, _ in shared if self._control.is_control_token(token)), None)

    @property
    def pad_token_id(self) -> int:
        """The token of padding, which is always masked; defaults to the first end-of-text token."""
        pad = self.tokenizer.pad_token_id
        return self.eos_token_ids[0] if pad is None else pad


def _end_tokens(directory: Path, tokenizer: Any) -> tuple[int, ...]:
    file = directory / "generation_config.json"
    named = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
    more = named if isinstance(named, list) else [named]
    return tuple(dict.fromkeys(i for i in (tokenizer.eos_token_id, *more) if i is not None))


@dataclass(frozen=True, slots=True)
class MaskToken:
    """The mask token of a tokenizer."""

    number: int
    is_new: bool
    """Whether the tokenizer did not have it before."""
    others: int
    """Number of the tokenizer's other tokens, which come before it if it is new."""


def add_mask_token(directory: Path, text: str) -> MaskToken:
    """Give the tokenizer in ``directory`` the special token ``text``, unless it has it.

    UserError for a directory without a tokenizer, or one whose tokenizer cannot be loaded.
    """
    if not any(directory.glob("tokenizer*")):
        raise UserError("the model's directory holds no tokenizer (tokenizer.json)")
    tokenizer = _loaded(directory)
    known = tokenizer.get_vocab()
    if text in known:
        return MaskToken(number=known[text], is_new=False, others=len(known) - 1)
    tokenizer.add_special_tokens({"mask_token": text})
    tokenizer.save_pretrained(str(directory))
    number = tokenizer.convert_tokens_to_ids(text)
    return MaskToken(number=number, is_new=True, others=number)


def _loaded(directory: str | PathLike[str]) -> Any:
    """The tokenizer of transformers. UserError if it cannot be loaded, or only with code that the
    directory brings along."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        # The message of transformers advises the user to let the code run.
        own = "trust_remote_code" in str(error)
        why = "it needs code of the directory, which is never run" if own else error
        raise UserError(f"cannot load the tokenizer of {directory}: {why}") from error


MEANING = ("vocabulary", "merges")
"""Parts of a tokenizer that define its tokens. Models that read the same ids must agree in them."""


def tokenizer_parts(directory: str | PathLike[str]) -> dict[str, Any]:
    """The parts of a directory's tokenizer by name, for comparison with another tokenizer. A chat
    template is not required. Empty for a directory without a tokenizer. Raises ``ValueError`` if
    the tokenizer cannot be loaded.
    """
    if not any(Path(directory).glob("tokenizer*")):
        return {}
    tokenizer = _loaded(directory)
    fast = getattr(tokenizer, "backend_tokenizer", None)
    state = {} if fast is None else json.loads(fast.to_str())
    special = {token["content"] for token in state.get("added_tokens", ()) if token["special"]}
    ends = {*_end_tokens(Path(directory), tokenizer)}
    if fast is not None and tokenizer.chat_template:
        codec = TextCodec(directory)
        codec.tokenizer = tokenizer
        ends |= {codec.turn_end_token_id} - {None}
    return {
        "vocabulary": tokenizer.get_vocab(),
        "merges": state.get("model", {}).get("merges"),
        "way of splitting text": [state.get(name) for name in ("normalizer", "pre_tokenizer")],
        "special tokens": (tokenizer.bos_token, tokenizer.eos_token, special),
        "chat template": tokenizer.chat_template,
        "end tokens (eos_token, generation_config.json)": ends,
    }


def first_different_part(
    one: Mapping[str, Any], other: Mapping[str, Any], parts: Iterable[str]
) -> str | None:
    """The first of ``parts`` in which two results of ``tokenizer_parts`` differ, with a token as an
    example; None if they agree.
    """
    for part in parts:
        if one[part] == other[part]:
            continue
        if part != "vocabulary":
            return part
        tokens = sorted(one[part].items() ^ other[part].items(), key=lambda pair: pair[1])
        token, number = tokens[0]
        return f"vocabulary (token {number} is {token!r} in one of them)"
    return None

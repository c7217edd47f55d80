"""A model that is asked with messages and answers with text: what every source of text offers, and
our own engines in that form.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Protocol

from ctrl_megatron.data.tokens import TextCodec
from ctrl_megatron.rollout.engine import StreamingEngine
from ctrl_megatron.types import FinishReason, Message, SamplingParams

TextListener = Callable[[int, str], None]
"""Hears answers as they are written: which one, counted over all conversations, and how it goes
on."""


class ChatError(RuntimeError):
    """The source of text failed, after every retry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    """One answer to a conversation."""

    text: str
    finish_reason: FinishReason
    prompt_tokens: int | None
    """Tokens of the conversation; None where the server does not say."""
    completion_tokens: int | None
    """Tokens of the answer, the stop token included; None where the server does not say."""


class Chat(Protocol):
    """Where answers come from. Calls may overlap."""

    async def complete(
        self,
        conversations: Sequence[Sequence[Message]],
        params: SamplingParams,
        listener: TextListener | None = None,
    ) -> list[list[ChatAnswer]]:
        """``params.n`` answers per conversation, in order; none for a conversation that leaves no
        room for ``params.max_tokens``.

        With ``params.seed``, sample j of conversation i (counted from ``params.first_row``) draws
        from a stream of its own. Which tokens end an answer is the model's matter:
        ``params.stop_token_ids`` is not read. ``listener`` has heard every text when they are
        returned. Raises ``ChatError`` (a fault of the source) and
        ``ValueError`` (what was asked for cannot be had).
        """
        ...

    async def close(self) -> None:
        """Close the connections."""
        ...


class EngineChat:
    """``Chat`` over an engine. ``max_model_len`` is the engine's longest prompt plus completion, in
    tokens. Raises what the engine raises.
    """

    def __init__(self, engine: StreamingEngine, codec: TextCodec, *, max_model_len: int) -> None:
        self._engine, self._codec, self._longest = engine, codec, max_model_len

    async def complete(
        self,
        conversations: Sequence[Sequence[Message]],
        params: SamplingParams,
        listener: TextListener | None = None,
    ) -> list[list[ChatAnswer]]:
        params = replace(params, stop_token_ids=self._codec.eos_token_ids, log_probs=False)
        prompts = [self._codec.encode_chat(messages) for messages in conversations]
        answers: list[list[ChatAnswer]] = []
        # Prompts that fit go to the engine in runs, so that each keeps the number of its row.
        room = self._longest - params.max_tokens
        for fits, group in groupby(prompts, key=lambda prompt: len(prompt) <= room):
            run = list(group)
            before = len(answers)
            answers += await self._run(run, params, before, listener) if fits else [[] for _ in run]
        return answers

    async def _run(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        before: int,
        listener: TextListener | None,
    ) -> list[list[ChatAnswer]]:
        texts = None if listener is None else _Texts(self._codec, listener, before * params.n)
        drawn = await self._engine.generate(
            prompts, replace(params, first_row=params.first_row + before), texts and texts.hear
        )
        answers = [
            [
                ChatAnswer(
                    text=self._codec.decode(completion.token_ids),
                    finish_reason=completion.finish_reason,
                    prompt_tokens=len(prompt),
                    completion_tokens=len(completion.token_ids),
                )
                for completion in group
            ]
            for prompt, group in zip(prompts, drawn, strict=True)
        ]
        if texts is not None:
            texts.finish(answer.text for group in answers for answer in group)
        return answers

    async def close(self) -> None:
        """Close the engine's connections; whoever launched the engine stops it."""
        await self._engine.close()


class _Texts:
    """From tokens to what is new in the texts; completion 0 is the listener's ``first``."""

    def __init__(self, codec: TextCodec, listener: TextListener, first: int) -> None:
        self._codec, self._listener, self._first = codec, listener, first
        self._tokens: dict[int, list[int]] = defaultdict(list)
        self._told: dict[int, int] = defaultdict(int)

    def hear(self, place: int, tokens: Sequence[int]) -> None:
        self._tokens[place] += tokens
        # The last character is held back until all its bytes are there.
        self._tell(place, self._codec.decode(self._tokens[place]).rstrip("\ufffd"))

    def finish(self, texts: Iterable[str]) -> None:
        for place, text in enumerate(texts):
            self._tell(place, text)

    def _tell(self, place: int, text: str) -> None:
        if new := text[self._told[place] :]:
            self._told[place] = len(text)
            self._listener(self._first + place, new)

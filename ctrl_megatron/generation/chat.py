"""The interface of a chat model, which answers conversations with text, and its implementation by
an engine of this package.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Protocol

from ctrl_megatron.background import gather_results
from ctrl_megatron.data.tokens import TextCodec
from ctrl_megatron.prompts.confidence import judgment_confidence
from ctrl_megatron.rollout.engine import StreamingEngine
from ctrl_megatron.types import Completion, FinishReason, Message, SamplingParams

TextListener = Callable[[int, str], None]
"""Receives answers while they are drawn: (number of the answer over all conversations, next piece
of its text)."""


class ChatError(RuntimeError):
    """The server failed in every attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    """One answer to a conversation."""

    text: str
    finish_reason: FinishReason
    prompt_tokens: int | None
    """Tokens of the conversation; None where the server does not report them."""
    completion_tokens: int | None
    """Tokens of the answer with its stop token; None where the server does not report them."""
    model: str | None = None
    """The model that the server names; None where it names none."""
    confidence: float | None = None
    """Probability of "Correct" at the place of the answer's judgment (``judgment_confidence``);
    None without a judgment, from a server, and with ``SamplingParams.log_probs`` false."""


class Chat(Protocol):
    """A chat model. Calls may overlap."""

    async def complete(
        self,
        conversations: Sequence[Sequence[Message]],
        params: SamplingParams,
        listener: TextListener | None = None,
    ) -> list[list[ChatAnswer]]:
        """``params.n`` answers per conversation, in order; none for a conversation that leaves no
        room for ``params.max_tokens``.

        With ``params.seed``, each answer has its own random stream, derived from the seed, the
        conversation's name (``params.rows``) and the answer's number. The model decides which
        tokens end an answer: ``params.stop_token_ids`` is not read. ``listener`` has received every
        text when this returns. Raises ``ChatError`` where the server fails and ``ValueError`` for
        an impossible request.
        """
        ...

    async def close(self) -> None: ...


class MultiServerChat:
    """A ``Chat`` over several servers of one model: conversations are dealt to all of them, and one
    that a server fails to answer goes to the next. ``ChatError`` names the failures of all. It is
    not asked again of another server once ``listener`` has received a part of its answer.
    """

    def __init__(self, servers: Sequence[Chat]) -> None:
        self._servers, self._turns = list(servers), count()

    async def complete(
        self,
        conversations: Sequence[Sequence[Message]],
        params: SamplingParams,
        listener: TextListener | None = None,
    ) -> list[list[ChatAnswer]]:
        names = params.prompt_names(len(conversations))
        calls = [
            partial(self._ask, messages, replace(params, rows=(name,)), place, listener)
            for place, (name, messages) in enumerate(zip(names, conversations, strict=True))
        ]
        return await gather_results(calls)

    async def close(self) -> None:
        for server in self._servers:
            await server.close()

    async def _ask(
        self,
        messages: Sequence[Message],
        params: SamplingParams,
        place: int,
        listener: TextListener | None,
    ) -> list[ChatAnswer]:
        heard = False

        def hear(number: int, text: str) -> None:
            nonlocal heard
            assert listener is not None
            heard = True
            listener(place * params.n + number, text)

        first, errors = next(self._turns) % len(self._servers), []
        for server in self._servers[first:] + self._servers[:first]:
            try:
                (answers,) = await server.complete([messages], params, listener and hear)
            except ChatError as error:
                errors.append(error)
                if heard:
                    break
                continue
            return answers
        raise ChatError("; ".join(map(str, errors))) from errors[-1]


class EngineChat:
    """A ``Chat`` by an engine. ``max_model_len`` is the engine's longest sequence (prompt and
    completion) in tokens. Exceptions of the engine pass unchanged.
    """

    def __init__(self, engine: StreamingEngine, codec: TextCodec, *, max_model_len: int) -> None:
        self._engine, self._codec, self._longest = engine, codec, max_model_len

    async def complete(
        self,
        conversations: Sequence[Sequence[Message]],
        params: SamplingParams,
        listener: TextListener | None = None,
    ) -> list[list[ChatAnswer]]:
        encoded = [self._codec.encode_chat(messages) for messages in conversations]
        room = self._longest - params.max_tokens
        asked = [place for place, prompt in enumerate(encoded) if len(prompt) <= room]
        names = params.prompt_names(len(encoded))
        params = replace(
            params,
            rows=tuple(names[place] for place in asked),
            stop_token_ids=self._codec.eos_token_ids,
        )
        answers: list[list[ChatAnswer]] = [[] for _ in encoded]
        if not asked:
            return answers
        texts = None
        if listener is not None:
            places = [place * params.n + j for place in asked for j in range(params.n)]
            texts = _Texts(self._codec, listener, places)
        prompts = [encoded[place] for place in asked]
        drawn = await self._engine.generate(prompts, params, texts and texts.hear)
        for place, prompt, group in zip(asked, prompts, drawn, strict=True):
            answers[place] = [self._answer(prompt, completion) for completion in group]
        if texts is not None:
            texts.finish(answer.text for group in answers for answer in group)
        return answers

    def _answer(self, prompt: Sequence[int], completion: Completion) -> ChatAnswer:
        text = self._codec.decode(completion.token_ids)
        return ChatAnswer(
            text=text,
            finish_reason=completion.finish_reason,
            prompt_tokens=len(prompt),
            completion_tokens=len(completion.token_ids),
            confidence=judgment_confidence(self._codec, completion, text),
        )

    async def close(self) -> None:
        """Close the engine's connections. The engine itself goes on."""
        await self._engine.close()


class _Texts:
    """Sends the new text of every completion to a listener, which knows completion i as
    ``places[i]``.
    """

    def __init__(self, codec: TextCodec, listener: TextListener, places: Sequence[int]) -> None:
        self._codec, self._listener, self._places = codec, listener, places
        self._tokens: dict[int, list[int]] = defaultdict(list)
        self._sent: dict[int, int] = defaultdict(int)

    def hear(self, place: int, tokens: Sequence[int]) -> None:
        self._tokens[place] += tokens
        # The last character waits until all its bytes are drawn.
        self._send(place, self._codec.decode(self._tokens[place]).rstrip("\ufffd"))

    def finish(self, texts: Iterable[str]) -> None:
        for place, text in enumerate(texts):
            self._send(place, text)

    def _send(self, place: int, text: str) -> None:
        if new := text[self._sent[place] :]:
            self._sent[place] = len(text)
            self._listener(self._places[place], new)

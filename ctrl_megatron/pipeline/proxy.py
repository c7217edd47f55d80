"""The sources of revisions: the frozen proxy on the actor's engines, on engines of its own, or on
servers of OpenAI's protocol.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from ctrl_megatron.background import gathered
from ctrl_megatron.data.tokens import TextCodec
from ctrl_megatron.errors import UserError
from ctrl_megatron.generation.chat import Chat, ChatError
from ctrl_megatron.pipeline.batch import versions_of
from ctrl_megatron.pipeline.sampling import generate, greedy_params
from ctrl_megatron.pipeline.worker import Answer, Conversation, Failure, RolloutWorker
from ctrl_megatron.rollout.engine import INITIAL_VERSION, Engine
from ctrl_megatron.types import Completion, Message, SamplingParams

Ask = Callable[[list[list[int]], SamplingParams], list[list[Completion]]]
"""Takes prompts and parameters; returns ``params.n`` completions of each prompt. Collective."""
_KNOWN = 100_000
"""Answers of servers that are kept, the newest; some 200 MB of programs."""


class SharedProxy:
    """A proxy on the actor's engines, which get its weights before it answers.

    It has the actor's shape, tokenizer and chat template. ``max_model_len`` is the engines' longest
    sequence, in tokens.
    """

    def __init__(self, codec: TextCodec, *, max_model_len: int) -> None:
        self._codec, self._longest = codec, max_model_len

    def revise(
        self, worker: RolloutWorker, conversations: Sequence[Conversation], max_tokens: int
    ) -> list[Answer | Failure | None]:
        def ask(prompts: list[list[int]], params: SamplingParams) -> list[list[Completion]]:
            return generate(worker, "proxy", prompts, params)

        return answers_of(ask, self._codec, self._longest, conversations, max_tokens)

    async def greet(self) -> str:
        return ""

    async def close(self) -> None:
        """The engines are the run's; nothing is to be closed."""


class EngineProxy:
    """A proxy on engines of its own, which keep its weights.

    ``engine`` is a client of all of them on leaders, None elsewhere; ``max_model_len`` is their
    longest sequence, in the tokens of ``codec``.
    """

    def __init__(self, engine: Engine | None, codec: TextCodec, *, max_model_len: int) -> None:
        self._engine, self._codec, self._longest = engine, codec, max_model_len
        self._version = f"proxy:{codec.path.resolve().name}"

    async def greet(self) -> str:
        return ""

    def revise(
        self, worker: RolloutWorker, conversations: Sequence[Conversation], max_tokens: int
    ) -> list[Answer | Failure | None]:
        def ask(prompts: list[list[int]], params: SamplingParams) -> list[list[Completion]]:
            async def ask_engine() -> list[list[Completion]]:
                assert self._engine is not None
                return await self._engine.generate(prompts, params) if prompts else []

            return worker.ask(ask_engine, "the proxy to revise")

        found = answers_of(ask, self._codec, self._longest, conversations, max_tokens)
        for answer in found:
            if isinstance(answer, Answer) and answer.version != INITIAL_VERSION:
                raise RuntimeError(f"{self._version} answered with the weights {answer.version}")
        return [
            replace(answer, version=self._version) if isinstance(answer, Answer) else answer
            for answer in found
        ]

    async def close(self) -> None:
        if self._engine is not None:
            await self._engine.close()


class ApiProxy:
    """A proxy on servers, by the ``Chat`` of each address.

    Requests are dealt to all servers, and one that a server fails to answer goes to the next. An
    answer to an equal request of this object is given again.
    """

    def __init__(self, servers: Mapping[str, Chat], model: str) -> None:
        self._servers, self._model = dict(servers), model
        self._known: dict[str, Answer] = {}

    def revise(
        self, worker: RolloutWorker, conversations: Sequence[Conversation], max_tokens: int
    ) -> list[Answer | Failure | None]:
        calls = [
            partial(self._remembered, messages, max_tokens, place)
            for place, messages in enumerate(conversations)
        ]
        return worker.ask(lambda: gathered(calls), "the servers of the proxy to revise")

    async def greet(self) -> str:
        hello: list[Message] = [{"role": "user", "content": "?"}]
        answers = [await self._ask([server], hello, 1) for server in self._servers.values()]
        named = {answer.version for answer in answers if isinstance(answer, Answer)}
        failed = [answer.error for answer in answers if isinstance(answer, Failure)]
        if not named:
            raise UserError(
                f"no server of the proxy answers: {'; '.join(failed)}",
                key="actor_rollout_ref.proxy.api.base_url",
                remedy="correct the address, or start the server",
            )
        count = len(answers) - len(failed)
        without = f" (without {'; '.join(failed)})" if failed else ""
        return f"proxy {', '.join(sorted(named))} on {count} of {len(answers)} servers{without}"

    async def close(self) -> None:
        for server in self._servers.values():
            await server.close()

    async def _remembered(
        self, messages: Conversation, max_tokens: int, place: int
    ) -> Answer | Failure | None:
        request = json.dumps([messages, max_tokens])
        if request in self._known:
            return self._known[request]
        servers = list(self._servers.values())
        first = place % len(servers)
        answer = await self._ask(servers[first:] + servers[:first], messages, max_tokens)
        if isinstance(answer, Answer):
            self._known[request] = answer
            if len(self._known) > _KNOWN:
                del self._known[next(iter(self._known))]
        return answer

    async def _ask(
        self, servers: Sequence[Chat], messages: Conversation, max_tokens: int
    ) -> Answer | Failure | None:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, n=1, log_probs=False)
        errors = []
        for server in servers:
            try:
                (answers,) = await server.complete([messages], params)
            except ChatError as error:
                errors.append(str(error))
                continue
            if not answers:
                return None
            (answer,) = answers
            return Answer(
                text=answer.text,
                tokens=answer.completion_tokens,
                version=f"api:{answer.model or self._model}",
                finish_reason=answer.finish_reason,
            )
        return Failure(error="; ".join(errors))


def answers_of(
    ask: Ask,
    codec: TextCodec,
    longest: int,
    conversations: Sequence[Conversation],
    max_tokens: int,
) -> list[Answer | Failure | None]:
    """``Proxy.revise`` by engines for sequences of up to ``longest`` tokens, which ``ask`` asks for
    completions of prompts in the tokens of ``codec``.
    """
    encoded = [
        codec.encode_chat(messages, add_generation_prompt=True) for messages in conversations
    ]
    fitting = [list(prompt) for prompt in encoded if len(prompt) + max_tokens <= longest]
    drawn = iter(ask(fitting, greedy_params(codec, max_tokens)))
    return [
        _answer(codec, next(drawn)[0]) if len(prompt) + max_tokens <= longest else None
        for prompt in encoded
    ]


def _answer(codec: TextCodec, completion: Completion) -> Answer:
    return Answer(
        text=codec.decode(completion.token_ids),
        tokens=len(completion.token_ids),
        version=versions_of(completion),
        finish_reason=completion.finish_reason,
    )

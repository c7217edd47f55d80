"""The sources of revisions: the frozen proxy on the actor's engines, on engines of its own, or on
servers of OpenAI's protocol.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from os import PathLike
from typing import Any

from ctrl_megatron.background import gather_results
from ctrl_megatron.data.tokens import TextCodec
from ctrl_megatron.errors import ServiceLost, UserError
from ctrl_megatron.generation.chat import Chat, ChatError, MultiServerChat
from ctrl_megatron.resharding.device import DeviceOwner, Role
from ctrl_megatron.rewards.cache import CacheCounters, ResultCache, json_fingerprint
from ctrl_megatron.rollout.engine import INITIAL_VERSION, Engine
from ctrl_megatron.steps.sampling import greedy_params, require_weight_version
from ctrl_megatron.steps.worker import Conversation, ProxyAnswer, ProxyFailure, ProxyListener
from ctrl_megatron.types import Completion, Message, SamplingParams

_LOOK_SECONDS = 0.5
_KNOWN = 100_000
"""Answers of servers that are kept, the newest; some 200 MB of programs."""
_ANSWERS_ID, _ANSWERS_LAYOUT = 0x43545241, 1
"""SQLite's application id of a file of answers, and the version of its content."""

Reply = ProxyAnswer | ProxyFailure | None


class SharedProxy:
    """A proxy on engines of a policy, to which ``device`` pushes the weights of its ``role`` before
    it answers: a frozen model, or a policy that learns.

    ``codec`` has the tokenizer and chat template of that policy. ``engine`` is a client of all
    these engines on leaders, None elsewhere; ``max_model_len`` is their longest sequence in tokens.
    """

    can_overlap = False

    def __init__(
        self,
        engine: Engine | None,
        device: DeviceOwner,
        codec: TextCodec,
        *,
        max_model_len: int,
        role: Role = "proxy",
    ) -> None:
        self._engine, self._device = engine, device
        self._role: Role = role
        self._codec, self._longest, self._version = codec, max_model_len, str(role)

    def prepare(self, step: int) -> None:
        self._version = self._device.to_engine(self._role, step)

    async def answer(
        self, conversations: Sequence[Conversation], max_tokens: int, on_answer: ProxyListener
    ) -> list[ProxyAnswer | ProxyFailure | None]:
        assert self._engine is not None
        asked = _fitting(self._codec, conversations, max_tokens, self._longest)
        version = self._version
        return await _answers(
            self._engine,
            self._codec,
            asked,
            max_tokens,
            on_answer,
            drawn_by=version,
            version=version,
        )

    async def probe_servers(self) -> str:
        return ""

    async def close(self) -> None:
        """The engines are the run's; nothing is to be closed."""


class EngineProxy:
    """A proxy on engines of its own, which keep its weights.

    ``engine`` is a client of all of them on leaders, None elsewhere; ``max_model_len`` is their
    longest sequence, in the tokens of ``codec``. ``joins_calls`` says that they answer several
    calls together (``EngineKind``); others would serve early requests one after another. With
    ``patient`` the request that a lost engine has not answered waits until it runs again.
    """

    def __init__(
        self,
        engine: Engine | None,
        codec: TextCodec,
        *,
        max_model_len: int,
        joins_calls: bool,
        patient: bool = False,
    ) -> None:
        self._engine, self._codec, self._longest = engine, codec, max_model_len
        self._version = f"proxy:{codec.path.resolve().name}"
        self.can_overlap, self._patient = joins_calls, patient

    async def probe_servers(self) -> str:
        return ""

    def prepare(self, step: int) -> None:
        """Its engines are always ready."""

    async def answer(
        self, conversations: Sequence[Conversation], max_tokens: int, on_answer: ProxyListener
    ) -> list[ProxyAnswer | ProxyFailure | None]:
        assert self._engine is not None
        asked = _fitting(self._codec, conversations, max_tokens, self._longest)
        while True:
            try:
                return await _answers(
                    self._engine,
                    self._codec,
                    asked,
                    max_tokens,
                    on_answer,
                    drawn_by=INITIAL_VERSION,
                    version=self._version,
                )
            except ServiceLost:
                if not self._patient:
                    raise
            # An engine that is not started again ends the run, and with it this wait.
            while not await _runs(self._engine):
                await asyncio.sleep(_LOOK_SECONDS)

    async def close(self) -> None:
        if self._engine is not None:
            await self._engine.close()


class ApiProxy:
    """A proxy on servers, by the ``Chat`` of each address.

    Requests are dealt to all servers (``MultiServerChat``). An equal request gets the answer of the
    first one, from ``cache``. ``extra`` are the further fields of every request, which are a part
    of what is equal.
    """

    can_overlap = True

    def __init__(
        self,
        servers: Mapping[str, Chat],
        model: str,
        *,
        cache: ResultCache[Reply] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        self._servers, self._model = dict(servers), model
        self._dealt = MultiServerChat(list(servers.values()))
        self.cache = answer_cache() if cache is None else cache
        self._extra = dict(extra or {})

    def prepare(self, step: int) -> None:
        """Its servers are always ready."""

    async def answer(
        self, conversations: Sequence[Conversation], max_tokens: int, on_answer: ProxyListener
    ) -> list[ProxyAnswer | ProxyFailure | None]:
        async def one(place: int, messages: Conversation) -> ProxyAnswer | ProxyFailure | None:
            answer = await self._remembered(messages, max_tokens)
            on_answer(place, answer)
            return answer

        return await gather_results(
            [partial(one, *numbered) for numbered in enumerate(conversations)]
        )

    async def probe_servers(self) -> str:
        hello: list[Message] = [{"role": "user", "content": "?"}]
        answers = [await self._ask(server, hello, 1) for server in self._servers.values()]
        named = {answer.version for answer in answers if isinstance(answer, ProxyAnswer)}
        failed = [answer.error for answer in answers if isinstance(answer, ProxyFailure)]
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
        await self._dealt.close()
        self.cache.close()

    async def take_cache_counts(self) -> CacheCounters:
        """The cache's counters since the last call; it counts from zero again."""
        found, self.cache.counters = self.cache.counters, CacheCounters()
        return found

    async def _remembered(self, messages: Conversation, max_tokens: int) -> Reply:
        async def ask() -> Reply:
            return await self._ask(self._dealt, messages, max_tokens)

        greedy = {"max_tokens": max_tokens, "temperature": 0.0, "seed": None}
        key = json_fingerprint(self._model, list(messages), greedy, self._extra)
        answer, _ = await self.cache.get_or_run(key, ask)
        return answer

    async def _ask(self, chat: Chat, messages: Conversation, max_tokens: int) -> Reply:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, n=1, log_probs=False)
        try:
            (answers,) = await chat.complete([messages], params)
        except ChatError as error:
            return ProxyFailure(error=str(error))
        if not answers:
            return None
        (answer,) = answers
        return ProxyAnswer(
            text=answer.text,
            tokens=answer.completion_tokens,
            version=f"api:{answer.model or self._model}",
            finish_reason=answer.finish_reason,
        )


def answer_cache(path: str | PathLike[str] | None = None) -> ResultCache[Reply]:
    """A cache of servers' answers in memory or in the SQLite file ``path``, which runs may share.
    What a server did not answer is not kept. Raises ``CacheFileError``.
    """
    return ResultCache(
        path,
        encode=_encoded,
        decode=_decoded,
        keeps=lambda reply: isinstance(reply, ProxyAnswer),
        application=_ANSWERS_ID,
        layout=_ANSWERS_LAYOUT,
        capacity=_KNOWN,
    )


def _encoded(reply: Reply) -> str:
    assert isinstance(reply, ProxyAnswer)
    return json.dumps(asdict(reply))


def _decoded(text: str) -> Reply:
    try:
        return ProxyAnswer(**json.loads(text))
    except (TypeError, ValueError) as error:
        raise UserError(f"not an answer: {text[:100]!r}") from error


async def _runs(engine: Engine) -> bool:
    try:
        await engine.health()
    except ServiceLost:
        return False
    return True


def _fitting(
    codec: TextCodec, conversations: Sequence[Conversation], max_tokens: int, longest: int
) -> list[list[int] | None]:
    """The prompt of each conversation, in the tokens of ``codec``; None where it leaves no room for
    an answer in ``longest`` tokens.
    """
    encoded = [
        list(codec.encode_chat(messages, add_generation_prompt=True)) for messages in conversations
    ]
    return [prompt if len(prompt) + max_tokens <= longest else None for prompt in encoded]


async def _answers(
    engine: Engine,
    codec: TextCodec,
    prompts: Sequence[list[int] | None],
    max_tokens: int,
    on_answer: ProxyListener,
    *,
    drawn_by: str,
    version: str,
) -> list[ProxyAnswer | ProxyFailure | None]:
    """``Proxy.answer`` by ``engine``, with ``version`` in the answers. Raises RuntimeError where
    other weights than ``drawn_by`` drew one.
    """
    answers: list[ProxyAnswer | ProxyFailure | None] = [None] * len(prompts)
    places = [place for place, prompt in enumerate(prompts) if prompt is not None]
    for place in set(range(len(prompts))) - set(places):
        on_answer(place, None)

    def finished(number: int, completion: Completion) -> None:
        answer = answers[places[number]] = ProxyAnswer(
            text=codec.decode(completion.token_ids),
            tokens=len(completion.token_ids),
            version=version,
            finish_reason=completion.finish_reason,
        )
        on_answer(places[number], answer)

    if places:
        asked = [prompt for prompt in prompts if prompt is not None]
        params = greedy_params(codec, max_tokens)
        drawn = await engine.generate(asked, params, finished=finished)
        require_weight_version(drawn, drawn_by)
    return answers

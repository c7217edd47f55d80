"""A client of servers with OpenAI's ``/chat/completions``: vLLM, SGLang, llama.cpp, Ollama and
hosted services.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import aiohttp

from ctrl_megatron.background import gather_results
from ctrl_megatron.errors import UserError
from ctrl_megatron.generation.chat import ChatAnswer, ChatError, TextListener
from ctrl_megatron.sandbox.access import split_credentials
from ctrl_megatron.sandbox.client.attempts import (
    CONNECTION_FAILURES,
    SilenceDeadline,
    describe_failure,
    is_temporary,
    retry,
    retry_after,
)
from ctrl_megatron.types import FinishReason, Message, SamplingParams

_SHORTEST_ATTEMPT = 0.1
"""Seconds, where a pause has used up the time of a request; 0 would be no limit."""
_TOO_LONG = "context_length_exceeded"
_SAID_TOO_LONG = ("context length", "maximum model length", "context size")
"""Parts of the same message from servers without error codes (vLLM, SGLang, llama.cpp)."""
_REMEDIES = {
    401: "set OPENAI_API_KEY to a key that the server accepts",
    403: "set OPENAI_API_KEY to a key that may use this model",
    404: "check the model's name and the URL, which usually ends in /v1",
}


class TokenBudgetExceeded(UserError):
    """A request could exceed the budget of tokens and was not sent."""


class _ServerFault(Exception):
    """One attempt failed; another one may succeed, not before ``retry_after`` seconds."""

    def __init__(self, text: str, retry_after: float = 0.0) -> None:
        super().__init__(text)
        self.retry_after = retry_after


class _DoesNotFit(Exception):
    """The conversation and ``max_tokens`` exceed the model's context."""


@dataclass(slots=True)
class ChatCounters:
    """Counts of what a client did."""

    requests: int = 0
    """Requested answers."""
    retries: int = 0
    """Attempts beyond the first of each."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    """Tokens of complete answers, as the server counts them."""
    uncounted: int = 0
    """Answers whose tokens the server did not report."""


class TokenBudget:
    """A limit of prompt and completion tokens, for one client or for several of one event loop.

    A request reserves ``max_tokens`` before it is sent, and waits while the running requests could
    use up the budget. Only the server knows the length of a prompt, so the prompts of the requests
    that run at the end may exceed the budget.
    """

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise UserError(f"the budget must be at least 1 token, got {limit}")
        self.limit, self.spent = limit, 0
        self._reserved = 0
        self._changed = asyncio.Condition()

    async def reserve(self, tokens: int) -> None:
        """Wait until ``tokens`` may be used. Raises ``TokenBudgetExceeded`` where that is
        impossible.
        """
        async with self._changed:
            while True:
                if self.spent + tokens > self.limit:
                    raise TokenBudgetExceeded(
                        f"the budget of {self.limit} tokens is used up: {self.spent} are spent and "
                        f"the next answer may take {tokens}",
                        remedy="raise it; the next run continues from the saved parts",
                    )
                if self.spent + self._reserved + tokens <= self.limit:
                    self._reserved += tokens
                    return
                await self._changed.wait()

    async def settle(self, reserved: int, used: int) -> None:
        """End a request that reserved ``reserved`` tokens and used ``used``."""
        async with self._changed:
            self._reserved -= reserved
            self.spent += used
            self._changed.notify_all()


class OpenAIChat:
    """A ``Chat`` over HTTP. ``base_url`` is the address before ``/chat/completions`` and usually
    ends in ``/v1``; ``api_key`` is sent as bearer token.

    Every answer is a request of its own, because some servers ignore ``n`` and report usage per
    request. ``timeout`` (seconds) limits one attempt, and ``total`` all attempts of a request with
    the pauses between them, but not its wait for this client's other requests. A request is
    attempted up to ``attempts`` times, with a first pause of ``backoff`` seconds, doubled for each
    attempt, or after the server's ``Retry-After``. ``max_concurrency`` limits the requests that run
    at the same time; a request that waits for its next attempt does not count. ``extra_body`` is
    added to every request. Use it on one event loop only.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key: str | None = None,
        max_concurrency: int = 32,
        attempts: int = 6,
        timeout: float = 600.0,
        total: float = 1800.0,
        backoff: float = 1.0,
        budget: TokenBudget | None = None,
        extra_body: Mapping[str, Any] | None = None,
    ) -> None:
        address, self._headers = split_credentials(
            base_url.rstrip("/"), f"Bearer {api_key}" if api_key else None
        )
        if not model:
            raise UserError("the model's name is empty")
        if attempts < 1 or max_concurrency < 1:
            raise UserError("attempts and max_concurrency must be at least 1")
        self.model = model
        self.counters = ChatCounters()
        self._url = address + "/chat/completions"
        self._limit, self._attempts, self._backoff = max_concurrency, attempts, backoff
        self._timeout, self._total = timeout, total
        self._budget, self._extra = budget, dict(extra_body or {})
        self._slots = asyncio.Semaphore(max_concurrency)
        self._session: aiohttp.ClientSession | None = None

    async def complete(
        self,
        conversations: Sequence[Sequence[Message]],
        params: SamplingParams,
        listener: TextListener | None = None,
    ) -> list[list[ChatAnswer]]:
        """``params.n`` answers per conversation, in order; none where the server reports that a
        conversation is too long.

        The first failure cancels the other requests. Raises ``ChatError`` after the last attempt,
        ``UserError`` where the server refuses key, model or parameters, and
        ``TokenBudgetExceeded``. A request is not repeated once ``listener`` has received a part of
        its answer.
        """
        calls = [
            partial(self._answers, messages, params, place, name, listener)
            for place, (name, messages) in enumerate(
                zip(params.prompt_names(len(conversations)), conversations, strict=True)
            )
        ]
        return await gather_results(calls)

    async def close(self) -> None:
        """Close the connections; a later call opens new ones."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _answers(
        self,
        messages: Sequence[Message],
        params: SamplingParams,
        place: int,
        name: str | int,
        listener: TextListener | None,
    ) -> list[ChatAnswer]:
        calls = [
            partial(
                self._answer,
                self._body(messages, params, name, sample),
                listener and partial(listener, place * params.n + sample),
            )
            for sample in range(params.n)
        ]
        try:
            return await gather_results(calls)
        except _DoesNotFit:
            return []

    def _body(
        self, messages: Sequence[Message], params: SamplingParams, name: str | int, sample: int
    ) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": list(messages),
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
        }
        if params.top_p != 1.0:
            body["top_p"] = params.top_p
        if params.top_k != -1:
            body["top_k"] = params.top_k  # a parameter of vLLM, SGLang and llama.cpp, not of OpenAI
        if params.seed is not None:
            body["seed"] = Random(f"{params.seed}/{name}/{sample}").getrandbits(31)
        return body | self._extra

    async def _answer(self, body: dict[str, Any], tell: Callable[[str], None] | None) -> ChatAnswer:
        if tell is not None:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        self.counters.requests += 1
        reserved, used = body["max_tokens"], 0
        if self._budget is not None:
            await self._budget.reserve(reserved)
        try:
            answer = await self._retried(body, tell)
            used = self._count(answer)
        finally:
            if self._budget is not None:
                await self._budget.settle(reserved, used)
        return answer

    async def _retried(
        self, body: dict[str, Any], tell: Callable[[str], None] | None
    ) -> ChatAnswer:
        heard, time_left = False, SilenceDeadline(self._total)

        def hear(text: str) -> None:
            nonlocal heard
            heard = True
            if tell is not None:
                tell(text)

        def again(error: Exception) -> float | None:
            if heard or not isinstance(error, _ServerFault):
                return None
            if time_left.seconds_left <= error.retry_after:
                return None
            self.counters.retries += 1
            return error.retry_after

        attempt = partial(self._attempt, body, hear, time_left)
        try:
            return await retry(attempt, again, attempts=self._attempts, backoff=self._backoff)
        except _ServerFault as fault:
            if heard:
                end = "in the middle of it"
            elif time_left.seconds_left <= fault.retry_after:
                end = f"gave up after {self._total:g} s, the limit of a request"
            else:
                end = f"gave up after {self._attempts} attempts"
            raise ChatError(f"{fault} ({end})") from fault

    def _count(self, answer: ChatAnswer) -> int:
        prompt, completion = answer.prompt_tokens, answer.completion_tokens
        if prompt is None or completion is None:
            self.counters.uncounted += 1
            if self._budget is not None:
                raise UserError(
                    f"{self._url} does not report the tokens of an answer (usage), so a "
                    "budget is impossible",
                    remedy="leave the budget out",
                )
            return 0
        self.counters.prompt_tokens += prompt
        self.counters.completion_tokens += completion
        return prompt + completion

    async def _attempt(
        self, body: dict[str, Any], hear: Callable[[str], None], time_left: SilenceDeadline
    ) -> ChatAnswer:
        queued = time.monotonic()
        async with self._slots:
            time_left.extend(time.monotonic() - queued)
            seconds = min(self._timeout, max(time_left.seconds_left, _SHORTEST_ATTEMPT))
            limit = aiohttp.ClientTimeout(total=seconds)
            asking = self._open().post(self._url, json=body, headers=self._headers, timeout=limit)
            try:
                async with asking as reply:
                    status = reply.status
                    least = retry_after(reply.headers.get("Retry-After", ""))
                    if status == 200 and reply.content_type == "text/event-stream":
                        return parse_chat_answer(await _joined_chunks(reply.content, hear))
                    text = await reply.text()
            except (*CONNECTION_FAILURES, UnicodeDecodeError) as error:
                raise _ServerFault(f"{self._url} failed: {describe_failure(error)}") from error
            except ValueError as error:
                raise self._malformed(error) from error
        if status != 200:
            raise self._refusal(status, text, least)
        try:
            answer = parse_chat_answer(json.loads(text))
        except ValueError as error:
            raise self._malformed(error) from error
        hear(answer.text)
        return answer

    def _malformed(self, error: ValueError) -> _ServerFault:
        return _ServerFault(f"{self._url} sent a malformed answer: {error}")

    def _refusal(self, status: int, text: str, least: float) -> Exception:
        code, detail = _error_of(text)
        said = f"{self._url} answered {status}: {detail}"
        if code == "insufficient_quota":
            return UserError(said, remedy="the account has no credit left")
        if is_temporary(status):
            return _ServerFault(said, least)
        if status == 400 and (
            code == _TOO_LONG or any(w in detail.lower() for w in _SAID_TOO_LONG)
        ):
            return _DoesNotFit(detail)
        return UserError(said, remedy=_REMEDIES.get(status, f"the model is {self.model!r}"))

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=self._limit)
            self._session = aiohttp.ClientSession(connector=connector)
        return self._session


async def _joined_chunks(lines: AsyncIterable[bytes], hear: Callable[[str], None]) -> Any:
    """The ``chat.completion`` that a stream of ``chat.completion.chunk`` adds up to."""
    texts, reason, usage, model = [], None, None, None
    async for line in lines:
        name, _, value = line.partition(b":")
        if name != b"data":
            continue
        if value.strip() == b"[DONE]":
            break
        chunk = json.loads(value)
        try:
            if "error" in chunk:
                raise ValueError(f"it breaks off: {_error_of(value.decode())[1]}")
            for choice in chunk["choices"]:
                if text := choice["delta"].get("content"):
                    texts.append("" + text)
                    hear(text)
                reason = choice.get("finish_reason") or reason
            usage, model = chunk.get("usage") or usage, chunk.get("model") or model
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"no choices with a delta in {str(chunk)[:200]!r}") from error
    if reason is None:
        raise ValueError("it ends without a finish_reason")
    choice = {"message": {"content": "".join(texts)}, "finish_reason": reason}
    return {"model": model, "choices": [choice], "usage": usage}


def parse_chat_answer(data: Any) -> ChatAnswer:
    """The first choice of a ``chat.completion`` object. Raises ``ValueError`` for another
    object.
    """
    try:
        choice = data["choices"][0]
        text, reason = choice["message"]["content"], choice.get("finish_reason")
        usage = data.get("usage") or {}
        counts = [usage.get(key) for key in ("prompt_tokens", "completion_tokens")]
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"no choices[0].message.content in {str(data)[:200]!r}") from error
    if text is not None and not isinstance(text, str):
        raise ValueError(f"the content is no text: {str(text)[:200]!r}")
    if not all(count is None or (type(count) is int and count >= 0) for count in counts):
        raise ValueError(f"the usage counts no tokens: {str(usage)[:200]!r}")
    finish: FinishReason = "length" if reason == "length" else "stop"
    model = data.get("model")
    # A model that reasons until its last token has no content; its answer is empty.
    return ChatAnswer(
        text=text or "",
        finish_reason=finish,
        prompt_tokens=counts[0],
        completion_tokens=counts[1],
        model=model if isinstance(model, str) and model else None,
    )


def _error_of(text: str) -> tuple[str, str]:
    """(code, message) in the body of an error, for all forms that servers use."""
    try:
        body = json.loads(text)
    except ValueError:
        return "", text[:500]
    inner = body.get("error", body) if isinstance(body, dict) else body
    if not isinstance(inner, dict):
        return "", str(inner)[:500]
    message = inner.get("message") or inner.get("detail") or inner
    return str(inner.get("code") or ""), str(message)[:500]

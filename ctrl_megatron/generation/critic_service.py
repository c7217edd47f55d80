"""The critic over HTTP. ``/v1/critiques`` answers a problem and a solution with a critique, its
judgment and, on request, a revision and the verdicts on both, as one answer or as a stream of
events. ``/v1/chat/completions`` is OpenAI's route to the model. ``/`` is a web page.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from difflib import unified_diff
from functools import partial
from typing import Annotated, Any

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ctrl_megatron.background import gather_results
from ctrl_megatron.data.rows import row_of_attempt
from ctrl_megatron.generation.chat import Chat, ChatAnswer, ChatError, TextListener
from ctrl_megatron.generation.critic_page import show_page
from ctrl_megatron.generation.search_nodes import CritiqueVote, majority_vote, sum_if_known
from ctrl_megatron.prompts import critique_messages, extract_code, revision_messages
from ctrl_megatron.rewards.grading import (
    Judge,
    check_tests,
    descriptions_of_tests,
    grading_job,
    request_verdict,
)
from ctrl_megatron.rollout.callback_stream import callback_stream
from ctrl_megatron.rollout.engine import EngineError
from ctrl_megatron.sandbox.access import cross_site_refusal, is_allowed
from ctrl_megatron.sandbox.client import SandboxError
from ctrl_megatron.types import Attempt, Message, Problem, SamplingParams

_LARGEST_BODY = 1 << 20
Tell = Callable[[dict[str, Any]], None]
Text = Annotated[str, Field(min_length=1, max_length=100_000, pattern=r"\S")]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class CritiqueRequest(_Body):
    """Body of ``POST /v1/critiques``."""

    problem: Text
    solution: Text
    tests: list[Text] = Field(default_factory=list, max_length=100)
    """Asserts that judge the solution and its revision."""
    entry_point: str = ""
    """The function that the asserts call."""
    critiques: int = Field(default=1, ge=1, le=16)
    """Number of critiques, whose majority decides."""
    revise: bool = False
    temperature: float = Field(default=0.0, ge=0.0, le=2.0)
    seed: int | None = None
    stream: bool = False


class ChatMessage(_Body):
    """One message of ``POST /v1/chat/completions``."""

    role: str = Field(pattern="^(system|user|assistant)$")
    content: Text


class StreamOptions(BaseModel):
    """Options of a stream of ``POST /v1/chat/completions``."""

    include_usage: bool = False


class CompletionRequest(BaseModel):
    """Body of ``POST /v1/chat/completions``; other fields are ignored."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=1.0, ge=0.0, le=2.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    n: int = Field(default=1, ge=1, le=16)
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None


class _NoRoom(ValueError):
    """The request leaves no room for an answer."""


class CriticService:
    """``critic`` writes critiques, ``generator`` revisions, and ``judge`` runs tests; without it no
    program runs. Answers have at most ``max_tokens`` tokens. Clients must send ``token``. On
    ``loopback`` a request must name a loopback host, so that no web page can reach the service by
    another name.
    """

    def __init__(
        self,
        critic: Chat,
        generator: Chat,
        judge: Judge | None,
        *,
        model: str,
        max_tokens: int,
        loopback: bool,
        token: str | None = None,
    ) -> None:
        self._critic, self._generator, self._judge = critic, generator, judge
        self._model, self._max_tokens = model, max_tokens
        self._loopback, self._token = loopback, token

    def application(self) -> web.Application:
        app = web.Application(client_max_size=_LARGEST_BODY, middlewares=[self._guard])
        app.router.add_get("/", show_page)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/critiques", self._critiques)
        app.router.add_post("/v1/chat/completions", self._completions)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        sent = request.host, request.method, request.content_type
        if foreign := cross_site_refusal(*sent, loopback=self._loopback):
            return _refusal(*foreign)
        token = None if request.path == "/" else self._token
        if not is_allowed(request.headers.get("Authorization", ""), token):
            return _refusal(401, "send the service's token as Authorization: Bearer TOKEN")
        try:
            return await handler(request)
        except _FAULTS as error:
            status, body = _fault(error)
            return web.json_response(body, status=status)

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _models(self, request: web.Request) -> web.Response:
        data = [{"id": self._model, "object": "model", "owned_by": "ctrl_megatron"}]
        return web.json_response({"object": "list", "data": data})

    async def _critiques(self, request: web.Request) -> web.StreamResponse:
        asked = CritiqueRequest.model_validate_json(await request.text())
        if asked.critiques > 1 and asked.temperature == 0:
            raise ValueError("critiques: they are equal at temperature 0")
        if asked.tests and self._judge is None:
            raise ValueError("tests: this service runs no programs (--sandbox none)")
        problem = Problem(
            id="problem",
            statement=asked.problem,
            prompter_type="mbppplus",
            selected_uts=tuple(asked.tests),
            entry_point=asked.entry_point,
        )
        if asked.tests:
            check_tests(
                [row_of_attempt(Attempt(id="tests", problem=problem, solution=asked.solution))]
            )
        if asked.stream:
            return await _events(request, partial(self._criticise, asked, problem))
        answer: dict[str, Any] = {"tests": None, "revision": None}
        await self._criticise(asked, problem, answer.update)
        return web.json_response(answer)

    async def _criticise(self, asked: CritiqueRequest, problem: Problem, tell: Tell) -> None:
        """Send the fields of the answer as soon as they are known."""

        async def test() -> list[ChatAnswer]:
            if asked.tests:
                tell({"tests": await self._tested(problem, asked.solution)})
            return []

        drawn = await gather_results([partial(self._critique, asked, problem, tell), test])
        tell({"usage": _usage([answer for answers in drawn for answer in answers])})

    async def _critique(
        self, asked: CritiqueRequest, problem: Problem, tell: Tell
    ) -> list[ChatAnswer]:
        params = SamplingParams(
            max_tokens=self._max_tokens,
            temperature=asked.temperature,
            n=asked.critiques,
            seed=asked.seed,
        )
        # The critique that is shown is unknown until all have voted.
        heard = tell if asked.stream and asked.critiques == 1 else None
        messages = critique_messages(problem, asked.solution)
        drawn = await _drawn(self._critic, messages, params, "critique", heard)
        result = majority_vote([answer.text for answer in drawn])
        counts: dict[str, Any] = {"votes": result.votes, "votes_correct": result.votes_correct}
        counts["confidence"] = judgment_probability(drawn, result)
        tell({"critique": result.critique, "judgment": _judgment(result.judgment), **counts})
        if not asked.revise:
            return drawn
        greedy = SamplingParams(max_tokens=self._max_tokens, temperature=0.0, log_probs=False)
        messages = revision_messages(problem, asked.solution, result.critique)
        heard = tell if asked.stream else None
        (revised,) = await _drawn(self._generator, messages, greedy, "revision", heard)
        code = extract_code(revised.text)
        diff = _diff(extract_code(asked.solution), code)
        revision: dict[str, Any] = {"text": revised.text, "code": code, "diff": diff}
        tell({"revision": revision})
        tell({"revision": revision | {"tests": await self._tested(problem, revised.text)}})
        return [*drawn, revised]

    async def _tested(self, problem: Problem, solution: str) -> list[dict[str, Any]] | None:
        """Every test with ``passed`` and ``detail``; None without tests."""
        if not problem.selected_uts or self._judge is None:
            return None
        row = row_of_attempt(Attempt(id="solution", problem=problem, solution=solution), ())
        verdict = await request_verdict(self._judge, grading_job(solution, row, run_all_cases=True))
        return [
            {"test": test, "passed": passed, "detail": detail}
            for test, passed, detail in zip(
                descriptions_of_tests(problem, verdict), verdict.passed, verdict.detail, strict=True
            )
        ]

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        asked = CompletionRequest.model_validate_json(await request.text())
        head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": self._model,
        }
        if asked.stream:
            head["object"] = "chat.completion.chunk"
            return await _events(request, partial(self._chunks, asked, head))
        answers = await self._answers(asked, None)
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": answer.text},
                "finish_reason": answer.finish_reason,
            }
            for index, answer in enumerate(answers)
        ]
        whole = {"object": "chat.completion", "choices": choices, "usage": _usage(answers)}
        return web.json_response(head | whole)

    async def _answers(
        self, asked: CompletionRequest, listener: TextListener | None
    ) -> list[ChatAnswer]:
        params = SamplingParams(
            max_tokens=min(asked.max_tokens or self._max_tokens, self._max_tokens),
            temperature=asked.temperature,
            top_p=asked.top_p,
            n=asked.n,
            seed=asked.seed,
            log_probs=False,
        )
        messages: list[Message] = [turn.model_dump() for turn in asked.messages]
        (answers,) = await self._critic.complete([messages], params, listener)
        if not answers:
            raise _NoRoom("the messages leave no room for an answer")
        return answers

    async def _chunks(self, asked: CompletionRequest, head: dict[str, Any], tell: Tell) -> None:
        begun: set[int] = set()

        def chunk(index: int, delta: dict[str, str], reason: str | None = None) -> None:
            role = {} if index in begun else {"role": "assistant"}
            begun.add(index)
            choice = {"index": index, "delta": role | delta, "finish_reason": reason}
            tell(head | {"choices": [choice]})

        answers = await self._answers(asked, lambda index, text: chunk(index, {"content": text}))
        for index, answer in enumerate(answers):
            chunk(index, {}, answer.finish_reason)
        if asked.stream_options is not None and asked.stream_options.include_usage:
            tell(head | {"choices": [], "usage": _usage(answers)})


async def _drawn(
    chat: Chat, messages: Sequence[Message], params: SamplingParams, name: str, tell: Tell | None
) -> list[ChatAnswer]:
    """The answers. ``tell`` receives the new pieces of the field ``name`` while they are drawn."""
    listener = tell and (lambda _, text: tell({"delta": {name: text}}))
    (answers,) = await chat.complete([messages], params, listener)
    if not answers:
        raise _NoRoom(f"the request leaves no room for a {name}")
    return answers


async def _events(
    request: web.Request, work: Callable[[Tell], Awaitable[None]]
) -> web.StreamResponse:
    """The events of ``work`` as server-sent events; the last one is ``[DONE]``. An error before the
    first event is raised, a later one is an event. The work ends when the client disconnects.
    """
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
    )

    async def send(text: str) -> None:
        if not response.prepared:
            await response.prepare(request)
        await response.write(f"data: {text}\n\n".encode())

    async with aclosing(callback_stream(work)) as events:
        try:
            async for event in events:
                await send(json.dumps(event))
        except _FAULTS as error:
            if not response.prepared:
                raise
            await send(json.dumps(_fault(error)[1]))
    await send("[DONE]")
    return response


def _usage(answers: Sequence[ChatAnswer]) -> dict[str, int] | None:
    prompt = sum_if_known(answer.prompt_tokens for answer in answers)
    completion = sum_if_known(answer.completion_tokens for answer in answers)
    if prompt is None or completion is None:
        return None
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    return {**counts, "total_tokens": prompt + completion}


def judgment_probability(drawn: Sequence[ChatAnswer], result: CritiqueVote) -> float | None:
    """The probability that the critic gives to "correct": the mean of its critiques' own, or, where
    a server tells none, the share of several votes; else None."""
    known = [answer.confidence for answer in drawn if answer.confidence is not None]
    if known:
        return sum(known) / len(known)
    return result.votes_correct / result.votes if result.votes > 1 else None


def _judgment(judgment: bool | None) -> str | None:
    return None if judgment is None else ("correct" if judgment else "incorrect")


def _diff(before: str, after: str) -> str:
    lines = unified_diff(
        before.splitlines(), after.splitlines(), "solution", "revision", lineterm=""
    )
    return "\n".join(lines)


_FAULTS = (ValueError, ChatError, SandboxError, EngineError)


def _fault(error: Exception) -> tuple[int, dict[str, Any]]:
    """Status and body of the answer to a request that failed."""
    code = "context_length_exceeded" if isinstance(error, _NoRoom) else None
    if isinstance(error, ValidationError):
        return 422, _error("; ".join(_complaint(e) for e in error.errors()))
    if isinstance(error, ValueError):
        return 400, _error(str(error), code)
    # An engine's message ends with its log, which clients must not see.
    return 502, _error(str(error).partition("; the end of its log")[0])


def _complaint(error: Any) -> str:
    place = ".".join(str(part) for part in error["loc"])
    return f"{place}: {error['msg']}" if place else str(error["msg"])


def _refusal(status: int, message: str) -> web.Response:
    return web.json_response(_error(message), status=status)


def _error(message: str, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "code": code}}


async def serve_forever(service: CriticService, host: str, port: int) -> None:
    """Serve until cancelled. Prints the address once it accepts connections."""
    # The request of a client that disconnects is cancelled, and its answer is not drawn further.
    runner = web.AppRunner(service.application(), handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        print(f"the critic is served at http://{host}:{runner.addresses[0][1]}", flush=True)
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()

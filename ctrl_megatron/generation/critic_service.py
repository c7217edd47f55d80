"""The critic over HTTP: from a problem and a solution to critique, judgment and, if asked for, a
revision and what the tests say of both; the model itself by OpenAI's ``/chat/completions``.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ctrl_megatron.data.rows import row_of
from ctrl_megatron.generation.chat import Chat, ChatAnswer, ChatError
from ctrl_megatron.generation.nodes import total, vote
from ctrl_megatron.prompts import critique_messages, extract_code, revision_messages
from ctrl_megatron.rewards.grading import Judge, check_tests, grade, grading_job
from ctrl_megatron.sandbox.access import is_allowed
from ctrl_megatron.sandbox.client import SandboxError
from ctrl_megatron.types import Attempt, Message, Problem, SamplingParams

_LARGEST_BODY = 1 << 20
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
    """Critiques that vote."""
    revise: bool = False
    temperature: float = Field(default=0.0, ge=0.0, le=2.0)
    seed: int | None = None


class ChatTurn(_Body):
    """One message of ``POST /v1/chat/completions``."""

    role: str = Field(pattern="^(system|user|assistant)$")
    content: Text


class CompletionRequest(BaseModel):
    """Body of ``POST /v1/chat/completions``; what it does not name is not read."""

    messages: list[ChatTurn] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=1.0, ge=0.0, le=2.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    n: int = Field(default=1, ge=1, le=16)
    seed: int | None = None
    stream: bool = False


class CriticService:
    """``critic`` criticises, ``generator`` revises, ``judge`` runs tests (None: nothing is run).
    Answers are at most ``max_tokens`` long; ``token`` is what clients must send; on loopback only
    requests that name a loopback host are answered, so that no web page reaches it by another name.
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
        """The routes."""
        app = web.Application(client_max_size=_LARGEST_BODY, middlewares=[self._guard])
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/critiques", self._critiques)
        app.router.add_post("/v1/chat/completions", self._completions)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self._loopback and not _is_loopback_name(request.host):
            return _error(403, f"the host {request.host!r} is not this machine's loopback")
        if not is_allowed(request.headers.get("Authorization", ""), self._token):
            return _error(401, "send the service's token as Authorization: Bearer TOKEN")
        # A page of another site cannot send this type without asking first, which nobody grants.
        if request.method == "POST" and request.content_type != "application/json":
            return _error(415, "send application/json")
        try:
            return await handler(request)
        except ValidationError as error:
            return _error(422, "; ".join(_complaint(e) for e in error.errors()))
        except (ChatError, SandboxError) as error:
            return _error(502, str(error))
        except ValueError as error:
            return _error(400, str(error))

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _models(self, request: web.Request) -> web.Response:
        data = [{"id": self._model, "object": "model", "owned_by": "ctrl_megatron"}]
        return web.json_response({"object": "list", "data": data})

    async def _critiques(self, request: web.Request) -> web.Response:
        asked = CritiqueRequest.model_validate_json(await request.text())
        if asked.critiques > 1 and asked.temperature == 0:
            raise ValueError("critiques: they are equal at temperature 0")
        if asked.tests and self._judge is None:
            raise ValueError("tests: this service runs nothing (--sandbox none)")
        problem = Problem(
            id="problem",
            statement=asked.problem,
            prompter_type="mbppplus",
            selected_uts=tuple(asked.tests),
            entry_point=asked.entry_point,
        )
        if asked.tests:
            check_tests([row_of(Attempt(id="solution", problem=problem, solution=asked.solution))])
        params = SamplingParams(
            max_tokens=self._max_tokens,
            temperature=asked.temperature,
            n=asked.critiques,
            seed=asked.seed,
        )
        conversation = critique_messages(problem, asked.solution)
        (drawn,), before = await asyncio.gather(
            self._critic.complete([conversation], params), self._tested(problem, asked.solution)
        )
        if not drawn:
            raise ValueError("problem and solution leave no room for a critique")
        said = vote([answer.text for answer in drawn])
        answer: dict[str, Any] = {
            "critique": said.critique,
            "judgment": _judgment(said.judgment),
            "votes": said.votes,
            "votes_correct": said.votes_correct,
            "tests": before,
            "revision": None,
        }
        spent = list(drawn)
        if asked.revise:
            messages = revision_messages(problem, asked.solution, said.critique)
            greedy = SamplingParams(max_tokens=self._max_tokens, temperature=0.0)
            ((*revised,),) = await self._generator.complete([messages], greedy)
            if not revised:
                raise ValueError("solution and critique leave no room for a revision")
            spent += revised
            answer["revision"] = {
                "text": revised[0].text,
                "code": extract_code(revised[0].text),
                "tests": await self._tested(problem, revised[0].text),
            }
        return web.json_response(answer | {"usage": _usage(spent)})

    async def _tested(self, problem: Problem, solution: str) -> list[dict[str, Any]] | None:
        """Every test with ``passed`` and ``detail``; None where none was given."""
        if not problem.selected_uts or self._judge is None:
            return None
        row = row_of(Attempt(id="solution", problem=problem, solution=solution), ())
        verdict = await grade(self._judge, grading_job(solution, row, run_all_cases=True))
        return [
            {"test": test, "passed": passed, "detail": detail}
            for test, passed, detail in zip(
                problem.selected_uts, verdict.passed, verdict.detail, strict=True
            )
        ]

    async def _completions(self, request: web.Request) -> web.Response:
        asked = CompletionRequest.model_validate_json(await request.text())
        if asked.stream:
            raise ValueError("stream: answers come whole; leave it out")
        messages: list[Message] = [turn.model_dump() for turn in asked.messages]
        params = SamplingParams(
            max_tokens=min(asked.max_tokens or self._max_tokens, self._max_tokens),
            temperature=asked.temperature,
            top_p=asked.top_p,
            n=asked.n,
            seed=asked.seed,
        )
        (answers,) = await self._critic.complete([messages], params)
        if not answers:
            return _error(
                400, "the messages leave no room for an answer", "context_length_exceeded"
            )
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": answer.text},
                "finish_reason": answer.finish_reason,
            }
            for index, answer in enumerate(answers)
        ]
        return web.json_response(
            {
                "id": f"chatcmpl-{uuid.uuid4().hex}",
                "object": "chat.completion",
                "created": int(time.time()),
                "model": self._model,
                "choices": choices,
                "usage": _usage(answers),
            }
        )


def _usage(answers: Sequence[ChatAnswer]) -> dict[str, int] | None:
    prompt = total(answer.prompt_tokens for answer in answers)
    completion = total(answer.completion_tokens for answer in answers)
    if prompt is None or completion is None:
        return None
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    return {**counts, "total_tokens": prompt + completion}


def _judgment(judgment: bool | None) -> str | None:
    return None if judgment is None else ("correct" if judgment else "incorrect")


def _is_loopback_name(host: str) -> bool:
    name = host.rpartition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _complaint(error: Any) -> str:
    place = ".".join(str(part) for part in error["loc"])
    return f"{place}: {error['msg']}" if place else str(error["msg"])


def _error(status: int, message: str, code: str | None = None) -> web.Response:
    return web.json_response({"error": {"message": message, "code": code}}, status=status)


async def serve_forever(service: CriticService, host: str, port: int) -> None:
    """Listen until cancelled; prints the address once it is reached."""
    runner = web.AppRunner(service.application())
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        print(f"the critic is served at http://{host}:{runner.addresses[0][1]}", flush=True)
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()

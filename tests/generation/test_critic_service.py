"""The critic's service with scripted models and a real sandbox, over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from scripted_server import Scripted, good, serving

from ctrl_megatron.commands.serve_critic import main
from ctrl_megatron.generation.critic_service import CriticService
from ctrl_megatron.generation.openai_client import OpenAIChat
from ctrl_megatron.sandbox import EmbeddedSandbox, SandboxClient
from ctrl_megatron.types import SamplingParams

WRONG, RIGHT = "def add(a, b):\n    return a - b", "def add(a, b):\n    return a + b"
TESTS = ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]
ASKED = {"problem": "Add two numbers.", "solution": WRONG, "tests": TESTS, "entry_point": "add"}


def reply(body: dict[str, Any]) -> Any:
    asked = body["messages"][-1]["content"]
    if asked.startswith("Review"):
        return good(f"Overall judgment: {'Correct' if 'a + b' in asked else 'Incorrect'}")
    return good(f"```python\n{RIGHT}\n```") if len(body["messages"]) == 3 else good("yes")


@pytest.fixture(scope="module")
def sandbox() -> Iterator[str]:
    with EmbeddedSandbox.start(workers=1) as service:
        yield service.endpoint


def post(
    endpoint: str, path: str, body: Any, *, token: str | None = None, **request: Any
) -> tuple[int, Any]:
    async def run() -> tuple[int, Any]:
        async with serving(Scripted(reply)) as chat, SandboxClient(endpoint) as judge:
            service = CriticService(
                chat, chat, judge, model="tiny", max_tokens=8, loopback=True, token=token
            )
            async with TestClient(TestServer(service.application())) as client:
                given = {"json": body} if body is not None else {}
                async with client.post(path, **given, **request) as answer:
                    return answer.status, await answer.json()

    return asyncio.run(run())


def test_a_wrong_solution_is_criticised_revised_and_tested(sandbox: str) -> None:
    status, answer = post(sandbox, "/v1/critiques", {**ASKED, "revise": True})
    assert (status, answer["judgment"], answer["votes"]) == (200, "incorrect", 1)
    assert [test["passed"] for test in answer["tests"]] == [False, True]
    assert answer["tests"][0]["detail"] and answer["tests"][0]["test"] == TESTS[0]
    assert answer["revision"]["code"] == RIGHT
    assert [test["passed"] for test in answer["revision"]["tests"]] == [True, True]
    assert answer["usage"] == {"prompt_tokens": 10, "completion_tokens": 6, "total_tokens": 16}


def test_a_right_solution_without_tests(sandbox: str) -> None:
    status, answer = post(sandbox, "/v1/critiques", {"problem": "Add.", "solution": RIGHT})
    assert (status, answer["judgment"]) == (200, "correct")
    assert answer["tests"] is None and answer["revision"] is None


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({**ASKED, "solution": " "}, 422, "solution"),
        ({"solution": "x"}, 422, "problem"),
        ({**ASKED, "more": 1}, 422, "more"),
        ({**ASKED, "critiques": 3}, 400, "equal at temperature 0"),
        ({**ASKED, "tests": ["assert ("]}, 400, "solution"),
    ],
    ids=str,
)
def test_what_cannot_be_criticised_is_named(
    sandbox: str, body: Any, status: int, said: str
) -> None:
    found, answer = post(sandbox, "/v1/critiques", body)
    assert found == status and said in answer["error"]["message"]


def test_only_this_machine_and_json_are_answered(sandbox: str) -> None:
    assert post(sandbox, "/v1/critiques", ASKED, headers={"Host": "evil.example"})[0] == 403
    assert post(sandbox, "/v1/critiques", None, data="{}")[0] == 415
    assert post(sandbox, "/v1/critiques", ASKED, token="a" * 16)[0] == 401
    bearer = {"Authorization": "Bearer " + "a" * 16}
    assert post(sandbox, "/v1/critiques", ASKED, token="a" * 16, headers=bearer)[0] == 200


def test_our_own_client_talks_to_it() -> None:
    async def run() -> Any:
        async with serving(Scripted(reply)) as chat:
            service = CriticService(chat, chat, None, model="tiny", max_tokens=8, loopback=True)
            async with TestClient(TestServer(service.application())) as client:
                own = OpenAIChat(str(client.make_url("/v1")), "tiny")
                asked = [[{"role": "user", "content": "hello"}]]
                answers = await own.complete(asked, SamplingParams(max_tokens=4, n=2))
                await own.close()
                async with client.get("/v1/models") as models:
                    return answers, await models.json()

    answers, models = asyncio.run(run())
    assert [[a.text for a in group] for group in answers] == [["yes", "yes"]]
    assert answers[0][0].completion_tokens == 3
    assert models["data"][0]["id"] == "tiny"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--host", "0.0.0.0"], "--token-file"),
        (["--port", "70000"], "--port=70000"),
        (["--token-file", "none"], "none"),
    ],
    ids=str,
)
def test_a_service_that_cannot_be_is_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--critic", "tiny", "--critic-url", "http://127.0.0.1:9/v1", *arguments]
    assert main(given) == 2
    assert said in capsys.readouterr().err

"""The critic's service with scripted models and a real sandbox, over HTTP."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from scripted_server import Scripted, good, serving, streamed

from ctrl_megatron.commands.serve_critic import main
from ctrl_megatron.generation.chat import ChatAnswer
from ctrl_megatron.generation.critic_service import CriticService, judgment_probability
from ctrl_megatron.generation.openai_client import OpenAIChat
from ctrl_megatron.generation.search_nodes import majority_vote
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


def events_of(text: str) -> list[Any]:
    events = text.removesuffix("\n\n").split("\n\n")
    assert all(event.startswith("data: ") for event in events) and events.pop() == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def post(
    endpoint: str,
    path: str,
    body: Any,
    *,
    token: str | None = None,
    says: Callable[[dict[str, Any]], Any] = reply,
    **request: Any,
) -> tuple[int, Any]:
    async def run() -> tuple[int, Any]:
        async with serving(Scripted(says), attempts=1) as chat, SandboxClient(endpoint) as judge:
            service = CriticService(
                chat, chat, judge, model="tiny", max_tokens=8, loopback=True, token=token
            )
            async with TestClient(TestServer(service.application())) as client:
                given = {"json": body} if body is not None else {}
                async with client.post(path, **given, **request) as answer:
                    if answer.content_type == "text/event-stream":
                        return answer.status, events_of(await answer.text())
                    return answer.status, await answer.json()

    return asyncio.run(run())


def test_a_wrong_solution_is_criticised_revised_and_tested(sandbox: str) -> None:
    status, answer = post(sandbox, "/v1/critiques", {**ASKED, "revise": True})
    assert (status, answer["judgment"], answer["votes"]) == (200, "incorrect", 1)
    assert answer["confidence"] is None  # a server tells no probabilities, and this is one vote
    assert [test["passed"] for test in answer["tests"]] == [False, True]
    assert answer["tests"][0]["detail"] and answer["tests"][0]["test"] == TESTS[0]
    assert answer["revision"]["code"] == RIGHT
    assert [test["passed"] for test in answer["revision"]["tests"]] == [True, True]
    assert answer["revision"]["diff"].splitlines()[3:] == [
        " def add(a, b):",
        "-    return a - b",
        "+    return a + b",
    ]
    assert answer["usage"] == {"prompt_tokens": 10, "completion_tokens": 6, "total_tokens": 16}


def test_a_right_solution_without_tests(sandbox: str) -> None:
    status, answer = post(sandbox, "/v1/critiques", {"problem": "Add.", "solution": RIGHT})
    assert (status, answer["judgment"]) == (200, "correct")
    assert answer["tests"] is None and answer["revision"] is None


def test_the_confidence_is_the_mean_of_the_critiques_own_where_they_have_one() -> None:
    def answer(text: str, confidence: float | None) -> ChatAnswer:
        return ChatAnswer(
            text=text,
            finish_reason="stop",
            prompt_tokens=1,
            completion_tokens=1,
            confidence=confidence,
        )

    said = "Overall judgment: Correct", "Overall judgment: Incorrect", "nothing"
    vote = majority_vote([*said])
    drawn = [answer(text, sure) for text, sure in zip(said, (0.9, 0.3, None), strict=True)]
    assert judgment_probability(drawn, vote) == pytest.approx(0.6)
    untold = [answer(text, None) for text in said]
    assert judgment_probability(untold, vote) == 0.5
    assert judgment_probability(untold[:1], majority_vote([said[0]])) is None


def in_pieces(body: dict[str, Any]) -> Any:
    text = reply(body)["choices"][0]["message"]["content"]
    if not body.get("stream"):
        return good(text)
    usage = {"prompt_tokens": 5, "completion_tokens": 3}
    return streamed(*(text[i : i + 9] for i in range(0, len(text), 9)), usage=usage)


def test_the_parts_of_a_stream_are_the_whole_answer(sandbox: str) -> None:
    asked = {**ASKED, "revise": True}
    _, whole = post(sandbox, "/v1/critiques", asked, says=in_pieces)
    status, parts = post(sandbox, "/v1/critiques", {**asked, "stream": True}, says=in_pieces)
    joined, grown = {}, dict.fromkeys(("critique", "revision"), "")
    for part in parts:
        for name, text in part.pop("delta", {}).items():
            assert name not in joined  # what grows comes before what is whole
            grown[name] += text
        joined |= part
    assert (status, joined) == (200, whole)
    assert grown == {"critique": whole["critique"], "revision": whole["revision"]["text"]}
    assert len(parts) > 10


def test_critiques_that_vote_come_once_they_have_voted(sandbox: str) -> None:
    asked = {**ASKED, "stream": True, "critiques": 3, "temperature": 0.5}
    _, parts = post(sandbox, "/v1/critiques", asked, says=in_pieces)
    assert not any("delta" in part for part in parts)
    assert {"votes": 3, "votes_correct": 0}.items() <= {
        k: v for p in parts for k, v in p.items()
    }.items()


def test_a_stream_that_fails_says_so(sandbox: str) -> None:
    """Before its first event with a status, later as an event."""
    asked = {"problem": "Add.", "solution": WRONG, "stream": True}
    status, answer = post(sandbox, "/v1/critiques", asked, says=lambda body: (500, "broken"))
    assert status == 502 and "broken" in answer["error"]["message"]
    cut = streamed("Looks", finish=None)
    status, parts = post(sandbox, "/v1/critiques", asked, says=lambda body: cut)
    assert status == 200 and {"delta": {"critique": "Looks"}} in parts
    assert "without a finish_reason" in parts[-1]["error"]["message"]
    chat = {"messages": [{"role": "user", "content": "hello"}], "stream": True}
    long = (400, {"error": {"message": "long", "code": "context_length_exceeded"}})
    status, answer = post(sandbox, "/v1/chat/completions", chat, says=lambda body: long)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({**ASKED, "solution": " "}, 422, "solution"),
        ({"solution": "x"}, 422, "problem"),
        ({**ASKED, "more": 1}, 422, "more"),
        ({**ASKED, "critiques": 3}, 400, "equal at temperature 0"),
        ({**ASKED, "tests": ["assert ("]}, 400, "'tests': "),
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
                params = SamplingParams(max_tokens=4, n=2)
                answers = await own.complete(asked, params)
                heard: dict[int, list[str]] = {0: [], 1: []}
                assert answers == await own.complete(asked, params, lambda i, t: heard[i].append(t))
                assert heard == {0: ["yes"], 1: ["yes"]}
                await own.close()
                async with client.get("/v1/models") as models:
                    return answers, await models.json()

    answers, models = asyncio.run(run())
    assert [[a.text for a in group] for group in answers] == [["yes", "yes"]]
    assert answers[0][0].completion_tokens == 3
    assert models["data"][0]["id"] == "tiny"


def test_the_page_is_shown_to_all_and_allows_only_itself() -> None:
    async def run() -> tuple[str, str, list[int]]:
        async with serving(Scripted(reply)) as chat:
            service = CriticService(
                chat, chat, None, model="tiny", max_tokens=8, loopback=True, token="a" * 16
            )
            async with TestClient(TestServer(service.application())) as client:
                async with client.get("/") as answer:
                    shown = await answer.text(), answer.headers["Content-Security-Policy"]
                codes = []
                for path, host in (("/", "evil.example"), ("/v1/models", "localhost")):
                    async with client.get(path, headers={"Host": host}) as refused:
                        codes.append(refused.status)
                return *shown, codes

    page, policy, codes = asyncio.run(run())
    assert codes == [403, 401]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    for tag in ("script", "style"):
        inline = page.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
        digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
        assert len(inline) > 1000 and rules[f"{tag}-src"] == f"'sha256-{digest}'"
    assert rules["default-src"] == rules["form-action"] == rules["frame-ancestors"] == "'none'"
    assert not re.search(r"https?:|innerHTML|document\.write|insertAdjacent|\son\w+=|style=", page)


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

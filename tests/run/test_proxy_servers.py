"""Servers of the proxy: equal requests are sent once, and a request that fails goes to the next."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ctrl_megatron.errors import UserError
from ctrl_megatron.generation.chat import ChatAnswer, ChatError
from ctrl_megatron.rewards.cache import CacheCounters, CacheFileError, VerdictCache
from ctrl_megatron.steps.proxy import ApiProxy, answer_cache
from ctrl_megatron.steps.worker import Conversation, ProxyAnswer, ProxyFailure


class Scripted:
    """A ``Chat`` that fails, has no room for conversations with ``long`` in them, or answers."""

    def __init__(self, name: str, *, fails: bool = False) -> None:
        self.name, self.fails = name, fails
        self.asked: list[str] = []

    async def complete(self, conversations: Any, params: Any, listener: Any = None) -> Any:
        assert (params.temperature, params.n, params.log_probs) == (0.0, 1, False)
        ((message,),) = conversations
        text = message["content"]
        self.asked.append(text)
        if self.fails:
            raise ChatError(f"{self.name} is down")
        if "long" in text:
            return [[]]
        answer = ChatAnswer(
            text=text.upper(),
            finish_reason="stop",
            prompt_tokens=1,
            completion_tokens=2,
            model=self.name,
        )
        return [[answer]]

    async def close(self) -> None:
        """There are no connections."""


def answers(proxy: ApiProxy, conversations: list[Conversation], max_tokens: int) -> list[Any]:
    """The proxy's answers, each of which is heard as soon as it is there."""
    heard: dict[int, Any] = {}
    found = asyncio.run(proxy.answer(conversations, max_tokens, heard.__setitem__))
    assert [heard[place] for place in range(len(conversations))] == found
    return found


def talks(texts: Sequence[str]) -> list[Conversation]:
    return [[{"role": "user", "content": text}] for text in texts]


def test_a_request_goes_to_the_next_server_and_an_equal_one_to_none() -> None:
    first, second = Scripted("a"), Scripted("b", fails=True)
    proxy = ApiProxy({"http://a": first, "http://b": second}, "m")
    found = answers(proxy, talks(["x", "y", "long", "z"]), 5)
    expected = [
        ProxyAnswer(text=text, tokens=2, version="api:a", finish_reason="stop") for text in "XYZ"
    ]
    assert found == [*expected[:2], None, expected[2]]
    # Dealt round robin: y and z come from the server that is down.
    assert sorted(first.asked) == ["long", "x", "y", "z"] and sorted(second.asked) == ["y", "z"]
    assert answers(proxy, talks(["z"]), 5) == [expected[2]]
    assert len(first.asked) == 4
    # Another length is another request.
    answers(proxy, talks(["z"]), 6)
    assert len(first.asked) == 5
    assert asyncio.run(proxy.take_cache_counts()) == CacheCounters(hits=1, runs=5)
    assert asyncio.run(proxy.take_cache_counts()) == CacheCounters()
    first.fails = True
    (lost, known) = answers(proxy, talks(["new", "x"]), 5)
    assert lost == ProxyFailure(error="b is down; a is down") and known == expected[0]
    first.fails = False
    assert isinstance(answers(proxy, talks(["new"]), 5)[0], ProxyAnswer), "failures are not kept"


def test_the_first_lines_name_the_model_and_the_servers_that_do_not_answer() -> None:
    both = {"http://a": Scripted("big"), "http://b": Scripted("b", fails=True)}
    said = asyncio.run(ApiProxy(both, "m").probe_servers())
    assert said == "proxy api:big on 1 of 2 servers (without b is down)"
    down = ApiProxy({"http://b": Scripted("b", fails=True)}, "m")
    with pytest.raises(UserError, match=r"no server of the proxy answers: b is down"):
        asyncio.run(down.probe_servers())


def test_a_file_of_answers_serves_the_next_run_for_equal_requests_only(tmp_path: Path) -> None:
    file, server = tmp_path / "answers.sqlite", Scripted("a")

    def run(text: str, *, model: str = "m", extra: dict[str, Any] | None = None) -> list[Any]:
        cache = answer_cache(file)
        proxy = ApiProxy({"http://a": server}, model, cache=cache, extra=extra)
        found = [*answers(proxy, talks([text]), 5), cache.counters.hits]
        asyncio.run(proxy.close())
        return found

    answer = ProxyAnswer(text="X", tokens=2, version="api:a", finish_reason="stop")
    assert run("x") == [answer, 0]
    server.fails = True
    assert run("x") == [answer, 1]
    assert isinstance(run("x", model="other")[0], ProxyFailure)
    assert isinstance(run("x", extra={"seed": 1})[0], ProxyFailure)
    server.fails = False
    assert run("x", extra={"seed": 1}) == [answer, 0], "a failure is not kept"
    assert server.asked == ["x"] * 4
    with pytest.raises(CacheFileError, match="database of another program"):
        VerdictCache(file)


def test_equal_requests_at_once_are_sent_once() -> None:
    server = Scripted("a")
    first, second = answers(ApiProxy({"http://a": server}, "m"), talks(["x", "x"]), 5)
    assert first == second and server.asked == ["x"]

"""The OpenAI-compatible client against a scripted server; an engine as the same source of text."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from scripted_server import Scripted, good, serving, streamed

from ctrl_megatron.commands.chat_flags import add_chat_flags, chat_sources
from ctrl_megatron.commands.start import CommandParser
from ctrl_megatron.data.tokens import TextCodec
from ctrl_megatron.errors import UserError
from ctrl_megatron.generation import sources
from ctrl_megatron.generation.chat import Chat, ChatAnswer, ChatError, EngineChat, MultiServerChat
from ctrl_megatron.generation.openai_client import OpenAIChat, TokenBudget, TokenBudgetExceeded
from ctrl_megatron.rollout.engine import EngineSpec, TokenListener
from ctrl_megatron.types import Completion, Message, SamplingParams, VersionSpan

ASK: list[Message] = [{"role": "user", "content": "hello"}]
PARAMS = SamplingParams(max_tokens=8)


def talk(
    script: Scripted, use: Callable[[OpenAIChat], Awaitable[Any]], **options: Any
) -> tuple[Any, OpenAIChat]:
    async def run() -> tuple[Any, OpenAIChat]:
        async with serving(script, **options) as chat:
            return await use(chat), chat

    return asyncio.run(run())


def ask(script: Scripted, params: SamplingParams = PARAMS, count: int = 1, **options: Any) -> Any:
    return talk(script, lambda chat: chat.complete([ASK] * count, params), **options)


def test_an_answer_with_its_tokens() -> None:
    script = Scripted(good("hi\n", finish="length"))
    answers, chat = ask(script, api_key="sesame")
    assert [[(a.text, a.finish_reason) for a in group] for group in answers] == [
        [("hi\n", "length")]
    ]
    assert (answers[0][0].prompt_tokens, answers[0][0].completion_tokens) == (5, 3)
    assert (chat.counters.prompt_tokens, chat.counters.completion_tokens) == (5, 3)
    assert script.bodies == [
        {"model": "tiny", "messages": ASK, "max_tokens": 8, "temperature": 1.0}
    ]
    assert script.keys == ["Bearer sesame"]


def test_every_answer_is_a_request_with_a_seed_of_its_own() -> None:
    script = Scripted(lambda body: good(body["messages"][0]["content"]))
    params = SamplingParams(max_tokens=8, n=2, seed=7, top_p=0.9, top_k=5)
    asked = [[{"role": "user", "content": name}] for name in ("a", "b")]
    answers, _ = talk(script, lambda chat: chat.complete(asked, params))
    assert [[a.text for a in group] for group in answers] == [["a", "a"], ["b", "b"]]
    seeds = {body["seed"] for body in script.bodies}
    assert len(seeds) == 4 and script.bodies[0]["top_p"] == 0.9 and script.bodies[0]["top_k"] == 5
    part = Scripted(good())
    second = SamplingParams(max_tokens=8, n=2, seed=7, rows=(1,))
    talk(part, lambda chat: chat.complete(asked[1:], second))
    of_b = {b["seed"] for b in script.bodies if b["messages"][0]["content"] == "b"}
    assert {body["seed"] for body in part.bodies} == of_b


@pytest.mark.parametrize(
    "fault",
    [
        (429, {"error": {"message": "slow down", "code": "rate_limit_exceeded"}}),
        (500, "a traceback"),
        (503, {"detail": "starting"}),
        "hang up",
        "hang",
        "{no json",
        {"choices": []},
        {"choices": [{"message": {"content": 5}}]},
        {**good(), "usage": {"prompt_tokens": -1, "completion_tokens": 2}},
    ],
    ids=str,
)
def test_a_fault_of_the_server_is_tried_again(fault: Any) -> None:
    script = Scripted(fault, fault, good())
    answers, chat = ask(script, timeout=0.3)
    assert answers[0][0].text == "hi"
    assert (len(script.bodies), chat.counters.retries, chat.counters.requests) == (3, 2, 1)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ((500, {"error": "out of memory"}), "answered 500: out of memory"),
        ("{no json", "malformed answer"),
        ("hang", "TimeoutError"),
        ("hang up", "failed: "),
    ],
    ids=str,
)
def test_the_last_fault_is_raised_with_the_url(fault: Any, said: str) -> None:
    with pytest.raises(ChatError, match=r"/v1/chat/completions .*gave up after 2") as caught:
        ask(Scripted(fault), attempts=2, timeout=0.2)
    assert said in str(caught.value)


@pytest.mark.parametrize("fault", [(429, "busy"), "hang"], ids=str)
def test_a_server_that_is_busy_for_ever_is_given_up(fault: Any) -> None:
    script = Scripted(fault)
    with pytest.raises(ChatError, match=r"/v1/chat/completions .*gave up after 0\.4 s, the limit"):
        ask(script, attempts=10**6, timeout=0.1, total=0.4)
    assert 2 < len(script.bodies) < 40


def test_waiting_for_other_requests_does_not_count_as_time_of_a_request() -> None:
    script = Scripted(good())

    async def many(chat: OpenAIChat) -> int:
        return len(await chat.complete([ASK] * 30, PARAMS))

    assert talk(script, many, total=0.3, max_concurrency=1)[0] == 30


def test_retry_after_is_kept() -> None:
    script = Scripted((429, "busy", {"Retry-After": "0.4"}), good())

    async def timed(chat: OpenAIChat) -> float:
        start = asyncio.get_running_loop().time()
        await chat.complete([ASK], PARAMS)
        return asyncio.get_running_loop().time() - start

    assert talk(script, timed)[0] >= 0.4


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ((401, {"error": {"message": "bad key"}}), "bad key; set OPENAI_API_KEY"),
        ((404, {"error": {"message": "no such model"}}), "ends in /v1"),
        (
            (400, {"error": {"message": "top_k is unknown"}}),
            "top_k is unknown; the model is 'tiny'",
        ),
        ((429, {"error": {"message": "pay", "code": "insufficient_quota"}}), "no credit left"),
    ],
    ids=str,
)
def test_what_the_server_refuses_is_the_users(reply: Any, said: str) -> None:
    script = Scripted(reply)
    with pytest.raises(UserError) as caught:
        ask(script)
    assert said in str(caught.value) and len(script.bodies) == 1


@pytest.mark.parametrize(
    "reply",
    [
        (400, {"error": {"message": "too many", "code": "context_length_exceeded"}}),
        (400, {"message": "This model's maximum context length is 8 tokens."}),
    ],
    ids=str,
)
def test_a_conversation_that_does_not_fit_has_no_answers(reply: Any) -> None:
    long = [{"role": "user", "content": "long"}]
    script = Scripted(lambda body: reply if body["messages"] == long else good())
    answers, _ = talk(script, lambda chat: chat.complete([ASK, long, ASK], PARAMS))
    assert [[a.text for a in group] for group in answers] == [["hi"], [], ["hi"]]


def test_so_many_requests_at_once_and_no_more() -> None:
    script = Scripted(good())
    answers, _ = ask(script, count=12, max_concurrency=3)
    assert len(answers) == 12 and script.most_at_once == 3


def test_a_waiting_retry_holds_no_place() -> None:
    script = Scripted((429, "busy", {"Retry-After": "1"}), good())
    order = []

    async def use(chat: OpenAIChat) -> None:
        async def one(name: str) -> None:
            await chat.complete([ASK], PARAMS)
            order.append(name)

        await asyncio.gather(one("first"), one("second"))

    talk(script, use, max_concurrency=1)
    assert order == ["second", "first"]


def hear(script: Scripted, params: SamplingParams = PARAMS, **options: Any) -> tuple[Any, Any]:
    """The answers to two conversations, and the pieces that a listener received of each."""
    heard: dict[int, list[str]] = defaultdict(list)
    answers, _ = talk(
        script,
        lambda chat: chat.complete([ASK] * 2, params, lambda place, t: heard[place].append(t)),
        **options,
    )
    return answers, dict(heard)


def test_a_server_that_streams_is_heard_as_it_writes() -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 3}
    script = Scripted(streamed("h", "i\n", usage=usage, finish="length"))
    answers, heard = hear(script, SamplingParams(max_tokens=8, n=2), budget=TokenBudget(100))
    assert heard == {place: ["h", "i\n"] for place in range(4)}
    told = {(a.text, a.finish_reason, a.completion_tokens) for group in answers for a in group}
    assert told == {("hi\n", "length", 3)}
    assert script.bodies[0]["stream"] and script.bodies[0]["stream_options"]["include_usage"]


def test_a_server_that_does_not_stream_is_heard_in_one() -> None:
    answers, heard = hear(Scripted((503, "starting"), good("hi")))
    assert heard == {0: ["hi"], 1: ["hi"]} and answers[1][0].text == "hi"


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (streamed("h", finish=None), "without a finish_reason"),
        (streamed("h", more='data: {"error": {"message": "out of memory"}}\n'), "out of memory"),
        (streamed("h", more="data: {no json\n"), "malformed"),
        (streamed("h", more='data: {"choices": [{}]}\n'), "no choices with a delta"),
        (streamed("h", more='data: {"choices": [{"delta": {"content": 5}}]}\n'), "delta"),
    ],
    ids=str,
)
def test_a_stream_that_breaks_off_is_not_begun_again(fault: Any, said: str) -> None:
    script = Scripted(fault)
    with pytest.raises(ChatError, match="in the middle of it") as caught:
        hear(script, max_concurrency=1)
    assert said in str(caught.value) and len(script.bodies) <= 2


def test_the_budget_is_never_exceeded_by_answers() -> None:
    """Each answer takes 8 tokens and reserves 8: of 30 there are three, then the budget is used."""
    script = Scripted(good(prompt=0, completion=8))
    budget = TokenBudget(30)
    with pytest.raises(TokenBudgetExceeded, match="budget of 30 tokens is used up: 24 are spent"):
        ask(script, count=12, budget=budget)
    assert (budget.spent, len(script.bodies)) == (24, 3)


def test_the_budget_waits_for_what_is_under_way() -> None:
    """Reserved tokens that an answer did not take are there for others."""
    script = Scripted(good(prompt=1, completion=1))
    budget = TokenBudget(20)
    answers, _ = ask(script, count=7, budget=budget)
    assert len(answers) == 7 and budget.spent == 14


def test_usage_that_is_not_reported_is_unknown_and_no_zero() -> None:
    reply = good()
    del reply["usage"]
    answers, chat = ask(Scripted(reply))
    assert answers[0][0].completion_tokens is None and chat.counters.uncounted == 1
    with pytest.raises(UserError, match="leave the budget out"):
        ask(Scripted(reply), budget=TokenBudget(100))


def test_an_answer_without_content_is_empty() -> None:
    reply = good()
    reply["choices"][0] = {"message": {"content": None}, "finish_reason": "length"}
    answers, _ = ask(Scripted(reply))
    assert (answers[0][0].text, answers[0][0].finish_reason) == ("", "length")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("localhost:80", "m"), "no http:// or https:// URL"),
        (("http://localhost", ""), "name is empty"),
    ],
)
def test_a_client_that_cannot_work_is_refused(arguments: tuple[str, str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        OpenAIChat(*arguments)
    with pytest.raises(UserError, match="leave one out") as caught:
        OpenAIChat("http://me:secret@host", "m", api_key="k")
    assert "secret" not in str(caught.value)


class _Words:
    """A codec of one number per byte; 0 ends an answer."""

    eos_token_ids = (0,)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        return list("".join(message["content"] for message in messages).encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i).decode(errors="replace")


class _Echo:
    """An engine that answers with the prompt and its row."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, SamplingParams]] = []
        self.cut: int | None = None

    async def generate(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        listener: TokenListener | None = None,
    ) -> list[list[Completion]]:
        self.asked.append((len(prompts), params))
        done = [
            [
                Completion(
                    token_ids=(*prompt, ord(str(row)), 0)[: self.cut],
                    log_probs=(),
                    finish_reason="stop",
                    spans=(VersionSpan("0", 0, len(prompt) + 2),),
                )
            ]
            * params.n
            for row, prompt in zip(params.prompt_names(len(prompts)), prompts, strict=True)
        ]
        for place, completion in enumerate(c for group in done for c in group):
            for token in completion.token_ids if listener else ():
                cast(TokenListener, listener)(place, (token,))
        return done

    async def close(self) -> None:
        pass


def test_an_engine_is_asked_with_prompts_that_keep_their_names() -> None:
    engine = _Echo()
    chat: Chat = EngineChat(
        cast(Any, engine), cast(TextCodec, cast(object, _Words())), max_model_len=12
    )
    asked = [[{"role": "user", "content": text}] for text in ("ab", "c" * 5, "d", "ef")]
    params = SamplingParams(max_tokens=8, n=2, seed=3, rows=(2, 3, 4, "e"), log_probs=False)
    answers = asyncio.run(chat.complete(asked, params))
    assert [[a.text for a in group] for group in answers] == [
        ["ab2"] * 2,
        [],
        ["d4"] * 2,
        ["efe"] * 2,
    ]
    assert Counter(a.prompt_tokens for group in answers for a in group) == {2: 4, 1: 2}
    assert answers[0][0].completion_tokens == 4
    assert [(n, p.rows) for n, p in engine.asked] == [(3, (2, 4, "e"))]
    assert all(p.stop_token_ids == (0,) and not p.log_probs for _, p in engine.asked)


def test_characters_of_an_engine_are_heard_whole() -> None:
    chat = EngineChat(cast(Any, _Echo()), cast(TextCodec, cast(object, _Words())), max_model_len=16)
    heard: dict[int, list[str]] = defaultdict(list)
    asked = [[{"role": "user", "content": text}] for text in ("aé", "c" * 9, "€")]
    params = SamplingParams(max_tokens=8, n=2)
    answers = asyncio.run(chat.complete(asked, params, lambda i, t: heard[i].append(t)))
    assert heard == {
        **{place: ["a", "é", "0"] for place in (0, 1)},
        **{place: ["€", "2"] for place in (4, 5)},
    }
    assert [[a.text for a in group] for group in answers] == [["aé0"] * 2, [], ["€2"] * 2]
    # An answer that is cut inside of a character ends with the sign for it in both.
    heard.clear()
    cut = [[{"role": "user", "content": "é"}]]
    engine = _Echo()
    engine.cut = 1
    chat = EngineChat(cast(Any, engine), cast(TextCodec, cast(object, _Words())), max_model_len=16)
    ((answer,),) = asyncio.run(
        chat.complete(cut, SamplingParams(max_tokens=8), lambda i, t: heard[i].append(t))
    )
    assert heard == {0: [answer.text]} and answer.text == "\ufffd"


def test_engines_are_started_as_asked_and_once_per_model(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--generator", "served", "--generator-url", "http://127.0.0.1:9/v1"]
    parser = CommandParser("")
    add_chat_flags(parser, required="generator")
    asked = parser.parse_args([*flags, "--engine", "hf", "--dtype", "float32", "--threads", "3"])
    _, options = chat_sources(asked, required="generator")
    started: list[EngineSpec] = []
    ended: list[bool] = []
    process = SimpleNamespace(connect=lambda: None, stop=lambda: ended.append(True))
    monkeypatch.setattr(sources, "launch_engine", lambda spec: started.append(spec) or process)
    kept: list[bool] = []
    monkeypatch.setattr(sources, "bind_collectives_to_loopback", lambda: kept.append(not started))
    monkeypatch.setattr(sources, "TextCodec", lambda _: None)
    own = sources.ChatSource("model")
    with sources.open_chats({"generator": own, "critic": own}, options) as chats:
        assert chats["generator"] is chats["critic"]
        (spec,) = started
        assert (spec.name, spec.model_path) == ("hf", "model")
        assert (spec.dtype, spec.threads) == ("float32", 3) and not ended and kept == [True]
    assert ended == [True]


def test_engines_have_gpus_of_their_own_where_there_are_enough() -> None:
    assert sources.assign_engine_gpus(2, 2, 0) == [((), 0.9)] * 2
    assert sources.assign_engine_gpus(2, 2, 4) == [((0, 1), 0.9), ((2, 3), 0.9)]
    assert sources.assign_engine_gpus(1, 4, 4) == [((0, 1, 2, 3), 0.9)]
    assert sources.assign_engine_gpus(2, 2, 3) == [((0, 1), 0.45)] * 2
    assert sources.assign_engine_gpus(0, 8, 1) == []
    with pytest.raises(ValueError, match=r"tensor-parallel-size=2 is more than the 1 GPUs"):
        sources.assign_engine_gpus(1, 2, 1)


class _Server:
    """A ``Chat`` that answers with its name, or fails before or in the middle of an answer."""

    def __init__(self, name: str, fault: str = "") -> None:
        self.name, self.fault = name, fault
        self.asked: list[tuple[str, Any]] = []

    async def complete(self, conversations: Any, params: Any, listener: Any = None) -> Any:
        ((message,),) = conversations
        self.asked.append((message["content"], params.rows))
        if self.fault != "before":
            for number in range(params.n) if listener else ():
                listener(number, self.name)
        if self.fault:
            raise ChatError(f"{self.name} fails")
        answer = ChatAnswer(
            text=self.name, finish_reason="stop", prompt_tokens=1, completion_tokens=1
        )
        return [[answer] * params.n]


def test_conversations_are_dealt_and_go_to_the_next_server_unless_they_were_heard() -> None:
    one, two = _Server("one"), _Server("two", "before")
    asked: list[list[Message]] = [[{"role": "user", "content": text}] for text in "abc"]
    params = SamplingParams(max_tokens=2, n=2, rows=("x", "y", "z"), seed=1)
    heard: dict[int, str] = {}
    chat = MultiServerChat(cast(Any, [one, two]))
    answers = asyncio.run(chat.complete(asked, params, heard.__setitem__))
    assert [[answer.text for answer in group] for group in answers] == [["one"] * 2] * 3
    # The names, and with them the draws, do not depend on the server.
    assert sorted(one.asked) == [("a", ("x",)), ("b", ("y",)), ("c", ("z",))]
    assert two.asked == [("b", ("y",))] and heard == dict.fromkeys(range(6), "one")
    first = replace(params, rows=("x",))
    broken = MultiServerChat(cast(Any, [_Server("one", "middle"), two]))
    with pytest.raises(ChatError, match=r"^one fails$"):
        asyncio.run(broken.complete(asked[:1], first, heard.__setitem__))
    down = MultiServerChat(cast(Any, [_Server("one", "before"), two]))
    with pytest.raises(ChatError, match=r"^one fails; two fails$"):
        asyncio.run(down.complete(asked[:1], first))

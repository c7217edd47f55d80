"""Greedy revisions of the same dialogue are written once, and those that do not fit not at all."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from tensordict import TensorDict

from ctrl_megatron.config import load_config
from ctrl_megatron.rewards import JudgeCounts, Scores
from ctrl_megatron.steps.batch import fields_of_samples, samples_of
from ctrl_megatron.steps.chain import judge, revise
from ctrl_megatron.steps.conversation import VALIDATED
from ctrl_megatron.steps.critique_report import revision_metrics
from ctrl_megatron.steps.proxy import SharedProxy
from ctrl_megatron.steps.sample import Revision, Sample, revision_columns
from ctrl_megatron.steps.worker import Conversation, ProxyAnswer, ProxyFailure
from ctrl_megatron.types import Attempt, Completion, Problem, VersionSpan

CRITIQUES = ["the sign", "the sign", "no judgment", "the loop", "the sign"]


def row(number: int) -> Any:
    problem = Problem(
        id=str(number),
        statement=f"problem {number}",
        prompter_type="code_contests",
        selected_uts="[]",
    )
    return SimpleNamespace(
        solution="```python\npass\n```",
        task="critique",
        attempt=lambda: Attempt(id="0", problem=problem, solution="pass", pass_rate=0.0),
    )


def critiques(texts: list[str], valid: list[bool]) -> list[Sample]:
    drawn = Completion(token_ids=(1,), log_probs=(0.0,), finish_reason="stop", spans=())
    return [
        Sample(row_id="0", completion=drawn, text=text, judgment=False if ok else None)
        for text, ok in zip(texts, valid, strict=True)
    ]


def revisions(samples: list[Sample]) -> list[Revision]:
    return [sample.revision or Revision() for sample in samples]


def left_out(revised: list[Sample]) -> list[float]:
    return revision_metrics(revised)["revision/left_out_rate"].tolist()


class Scripted:
    """A proxy that numbers its answers. It fails at a conversation with ``fails`` in it, and has no
    room for one that is longer than ``room`` characters.
    """

    label = "scripted"

    def __init__(self, room: int = 10_000, fails: str = "never") -> None:
        self.room, self.fails = room, fails
        self.asked: list[str] = []

    can_overlap = False

    def prepare(self, step: int) -> None:
        """It is always ready."""

    async def answer(self, conversations: Any, max_tokens: int, heard: Any) -> list[Any]:
        found = [self._answer(str(messages)) for messages in conversations]
        for numbered in enumerate(found):
            heard(*numbered)
        return found

    def _answer(self, text: str) -> ProxyAnswer | ProxyFailure | None:
        self.asked.append(text)
        if self.fails in text:
            return ProxyFailure(error="down")
        if len(text) > self.room:
            return None
        number = len(self.asked)
        answer = f"revision {number}"
        return ProxyAnswer(text=answer, tokens=number, version="proxy:x", finish_reason="stop")

    async def close(self) -> None:
        """There are no connections."""


def working(proxy: Scripted) -> Any:
    rewards: Any = SimpleNamespace(judging=JudgeCounts(), begin=lambda item: None)
    rewards.begin_solution = lambda text, row: None
    return SimpleNamespace(
        config=load_config(None, [], "none"),
        proxy=proxy,
        pending={},
        step=0,
        run_on_leader=lambda work, what: asyncio.run(work()),
        rewards=rewards,
        reward_weights={"critic": 1.0},
    )


def test_equal_critiques_of_one_solution_are_answered_once() -> None:
    proxy = Scripted()
    worker = working(proxy)
    rows = [row(0), row(0), row(0), row(0), row(1)]
    valid = [True, True, False, True, True]
    revised = revise(worker, critiques(CRITIQUES, valid), rows)
    # The last critique is the first one's text, about another problem.
    found = revisions(revised)
    assert [r.text for r in found] == [
        *("revision 1", "revision 1", "", "revision 2", "revision 3")
    ]
    assert [r.tokens for r in found] == [1, 1, None, 2, 3]
    assert [r.version for r in found] == ["proxy:x", "proxy:x", "", "proxy:x", "proxy:x"]
    assert all(revision.fits for revision in found)
    assert len(proxy.asked) == 3 and "problem 1" in proxy.asked[2]
    assert left_out(revised) == [0.0] * 4
    # An evaluation revises what contains no judgment too.
    every = revise(worker, critiques(CRITIQUES, valid), rows, VALIDATED)
    assert len(proxy.asked) == 7 and all(revision.text for revision in revisions(every))


def test_a_critique_without_a_revision_is_not_judged_and_a_failure_of_the_proxy_is_counted() -> (
    None
):
    short, long, failing = "the sign", "the sign" * 400, "the loop"
    proxy = Scripted(room=2_500, fails=failing)
    worker, scored = working(proxy), list[str]()

    async def score(items: Any) -> Scores:
        scored.extend(item.critique for item in items)
        rewards: Any = [1.0] * len(items)
        return Scores(parts={"critic": rewards}, totals=rewards, outcomes=[None] * len(items))

    worker.score = score
    texts = [short, long, long, short, failing]
    rows = [row(0)] * 5
    revised = revise(worker, critiques(texts, [True, True, False, True, True]), rows)
    found = revisions(revised)
    assert [r.text for r in found] == ["revision 1", "", "", "revision 1", ""]
    assert [r.fits for r in found] == [True, False, True, True, True]
    assert left_out(revised) == [0.0, 1.0, 0.0, 0.0]
    # The batch carries all of it from node to node.
    batch = TensorDict(fields_of_samples(revised, revision_columns), batch_size=[5])
    assert batch["revision_failure"].tolist() == ["", "", "", "", "down"]
    assert samples_of(batch) == revised
    judged = asyncio.run(judge(worker, revised, rows))
    outcomes = [sample.outcome for sample in judged if sample.outcome]
    assert scored == [short, long, short]  # an invalid critique earns its zero
    assert [outcome.total for outcome in outcomes] == [1.0, None, 1.0, 1.0, None]
    assert outcomes[1].rewards == {"critic": None} and "too long" in outcomes[1].detail
    assert outcomes[4].rewards == {"critic": None} and outcomes[4].detail == "down"
    assert worker.rewards.judging == JudgeCounts(asked=1, failed=1, error="the proxy: down")


class Codec:
    """A tokenizer whose tokens are characters."""

    eos_token_ids = (0,)

    def encode_chat(self, messages: Any, add_generation_prompt: bool) -> list[int]:
        return [ord(c) for c in str(messages)]

    def decode(self, tokens: Any) -> str:
        return "".join(map(chr, tokens))


def test_engines_get_only_the_prompts_that_fit() -> None:
    talks: list[Conversation] = [[{"role": "user", "content": "x" * n}] for n in (3, 30, 4)]
    room = len(str(talks[2])) + 5

    class Engine:
        async def generate(self, prompts: list[list[int]], params: Any, *, finished: Any) -> Any:
            assert max(map(len, prompts), default=0) + params.max_tokens <= room
            assert params.temperature == 0.0 and params.stop_token_ids == (0,) and params.n == 1
            spans = (VersionSpan("proxy", 0, 1),)
            groups = [
                [Completion(token_ids=(len(p),), log_probs=(), finish_reason="stop", spans=spans)]
                for p in prompts
            ]
            for place, (completion,) in reversed([*enumerate(groups)]):
                finished(place, completion)
            return groups

    def answers(longest: int) -> list[Any]:
        parts: Any = (Engine(), None, Codec())
        return asyncio.run(SharedProxy(*parts, max_model_len=longest).answer(talks, 5, hear))

    heard: dict[int, Any] = {}
    hear = heard.__setitem__
    short, long, exact = answers(room)
    assert long is None
    assert [heard[place] for place in range(3)] == [short, long, exact]
    for answer, talk in ((short, talks[0]), (exact, talks[2])):
        assert isinstance(answer, ProxyAnswer)
        assert (answer.text, answer.tokens) == (chr(len(str(talk))), 1)
        assert answer.version == "proxy"
    assert answers(5) == [None] * 3


def _with_rows(worker: Any) -> Any:
    worker.train = SimpleNamespace(rows=[row(0)], number_of={"0": 0}, row=lambda _: row(0))
    return worker

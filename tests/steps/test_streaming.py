"""Revisions and verdicts that begin before their batch is complete: the same results, sooner.

Engines, proxy and judge wait for scripted seconds on an event loop whose clock jumps to its next
timer, so that a step takes exactly as long as its schedule.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctrl_megatron.config import load_config
from ctrl_megatron.data.prompt_table import PromptTable
from ctrl_megatron.data.rows import Row
from ctrl_megatron.eval.transcripts import ChainPlan
from ctrl_megatron.metrics import Timeline
from ctrl_megatron.prompts import critique_messages
from ctrl_megatron.rewards import RewardSum
from ctrl_megatron.rewards.code_rewards import CodeReward
from ctrl_megatron.rewards.critic import RewardModelForCritic
from ctrl_megatron.sandbox.client import SandboxError
from ctrl_megatron.sandbox.wire import EvalResult, SubmitRequest
from ctrl_megatron.steps import ctrl, grpo
from ctrl_megatron.steps.conversation import run_conversations
from ctrl_megatron.steps.draws import DrawsAhead
from ctrl_megatron.steps.dynamic_sampling import DynamicSampling
from ctrl_megatron.steps.rounds import ctrl_rounds_pipeline
from ctrl_megatron.steps.sample import Sample
from ctrl_megatron.steps.worker import ProxyAnswer, ProxyFailure
from ctrl_megatron.types import Completion, VersionSpan

N = 3
CONFIGS = {
    on: load_config(
        None,
        [f"actor_rollout_ref.rollout.n={N}", f"actor_rollout_ref.rollout.streaming={on}".lower()],
        "none",
    )
    for on in (True, False)
}


class Clock(asyncio.SelectorEventLoop):
    """An event loop on which nothing takes time but waiting for a timer."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        loop: Any = self
        if not loop._ready and loop._scheduled:
            self.now = max(self.now, loop._scheduled[0].when())
        super()._run_once()  # type: ignore[misc]


Delays = Sequence[tuple[float, float, float]]
"""Seconds of each critique, of its revision, and of its judging."""


class Script:
    """Engines, a proxy and a judge; the completion with number i takes ``delays[i]``."""

    def __init__(self, delays: Delays, *, beside: bool) -> None:
        self.delays, self.can_overlap = delays, beside
        self.revised, self.answered = list[int](), list[str]()

    async def generate(self, prompts: Any, params: Any, *, finished: Any) -> list[Any]:
        async def draw(place: int) -> Completion:
            # Every fifth critique repeats the one before it, and every seventh has no judgment.
            told = place - 1 if place % 5 == 4 else place
            await asyncio.sleep(self.delays[place][0])
            completion = Completion(
                token_ids=(told, int(place % 7 == 6)),
                log_probs=(-1.0, -1.0),
                finish_reason="stop",
                spans=(VersionSpan("actor@0", 0, 2),),
            )
            if finished is not None:
                finished(place, completion)
            return completion

        done = await asyncio.gather(*(draw(i) for i in range(len(prompts) * params.n)))
        return [done[i : i + params.n] for i in range(0, len(done), params.n)]

    def prepare(self, step: int) -> None:
        """It is always ready."""

    async def answer(self, conversations: Any, max_tokens: int, heard: Any) -> list[Any]:
        async def one(place: int, messages: Any) -> ProxyAnswer | ProxyFailure | None:
            number = int(str(messages).partition("number ")[2].partition(".")[0])
            self.revised.append(number)
            await asyncio.sleep(self.delays[number][1])
            text = f"```python\nx = {number}\n```"
            answer: ProxyAnswer | ProxyFailure | None = ProxyAnswer(
                text=text, tokens=3, version="proxy:x", finish_reason="stop"
            )
            if number % 11 == 10:
                answer = ProxyFailure(error="down")
            elif number % 13 == 12:
                answer = None
            heard(place, answer)
            return answer

        return await asyncio.gather(*(one(*numbered) for numbered in enumerate(conversations)))

    async def identity(self) -> object:
        return "script"

    async def submit(self, request: SubmitRequest, /) -> EvalResult:
        number = int(request.completion.partition("x = ")[2].partition("\n")[0] or 0)
        await asyncio.sleep(self.delays[number][2])
        if number % 9 == 8:
            raise SandboxError("gone")
        self.answered.append(request.completion)
        info = {"status": "Success", "message": ""}
        tests = [{"passed": number % 2 == 0, "exec_info": info}]
        return EvalResult.model_validate(
            {"id": 0, "accepted": number % 2 == 0, "extracted_code": "", "tests": tests}
        )


def decode(tokens: Sequence[int]) -> str:
    if len(tokens) < 2:
        return ""
    told, unjudged = tokens
    program = f"number {told}.\n```python\nx = {told}\n```\n"
    return program + ("" if unjudged else "Overall judgment: Incorrect")


def working(script: Script, loop: Clock, *, streaming: bool, code: bool = False) -> Any:
    rows = tuple(
        Row(
            id=f"row/{number}",
            problem=f"problem {number}",
            solution=f"```python\nx = {number}\n```",
            prompter_type="code_contests",
            selected_uts='[{"input": {"stdin": ""}, "output": {"stdout": ""}}]',
        )
        for number in range(-(-len(script.delays) // N))
    )
    rows = tuple(
        replace(row, prompt=tuple(critique_messages(row.attempt().problem, row.solution)))
        for row in rows
    )
    reward: Any = (
        CodeReward(provider=script)
        if code
        else RewardModelForCritic(rows, None, sandbox=script, show_progress=False)
    )
    rewards = RewardSum({"code" if code else "critic": reward})
    table = PromptTable(rows=rows, prompts=tuple((1,) for _ in rows), dropped=0)
    return SimpleNamespace(
        config=CONFIGS[streaming],
        groups=SimpleNamespace(
            place=SimpleNamespace(dp=0),
            layout=SimpleNamespace(data=1),
            gather_data_ranks=lambda value: [value],
            any_rank=lambda *flags: flags,
        ),
        train=table,
        validation=table,
        timeline=Timeline(),
        codec=SimpleNamespace(
            decode=decode,
            encode_chat=lambda messages, add_generation_prompt: [len(str(messages)) % 97],
            eos_token_ids=(0,),
            pad_token_id=0,
        ),
        global_means=lambda values: {},
        engine=script,
        proxy=script,
        pending={},
        background=SimpleNamespace(submit=loop.create_task),
        device_owner=SimpleNamespace(to_engine=lambda role, step: f"{role}@0"),
        role="actor",
        step=0,
        rewards=rewards,
        reward_weights=rewards.weights,
        score=rewards.score,
        judged_rate_metrics=rewards.pop_judge_counts,
        run_on_leader=lambda work, what="": loop.run_until_complete(work()),
        begin_on_leader=lambda work: loop.create_task(work()),
        wait_for_leader=lambda task, what="": loop.run_until_complete(task),
        wait_for_draws=lambda: None,
        ahead=DrawsAhead(),
    )


def run(
    delays: Delays, *, streaming: bool, beside: bool, code: bool = False, compare: str = ""
) -> tuple[float, list[Sample], Script]:
    """(seconds, samples with their fields, the script) of a step; with ``compare`` of three
    rounds."""
    script, loop = Script(delays, beside=beside), Clock()
    try:
        worker = working(script, loop, streaming=streaming, code=code)
        nodes = (
            grpo.JUDGED
            if code
            else (
                ctrl.generate_critiques,
                ctrl.generate_revisions,
                ctrl.judge_revisions,
            )
        )
        if compare:
            keys = {"turns": 3, "stop": False, "compare": compare}
            graph = ctrl_rounds_pipeline(CONFIGS[streaming], **keys)  # type: ignore[arg-type]
            names = ("critiques", "revisions", "later_turns")
            drawing = [graph.nodes[f"generate_{name}"].declared for name in names]
            nodes = (*drawing, graph.nodes["sandbox"].declared)
        step = DynamicSampling(nodes, lambda samples: {}, ())
        samples = step.draw(worker, range(len(worker.train.rows)), 0)
        assert not worker.pending
        return loop.now, samples, script
    finally:
        loop.close()


def seconds(samples: int) -> st.SearchStrategy[list[tuple[float, float, float]]]:
    second = st.integers(1, 40).map(float)
    one = st.tuples(second, second, second)
    return st.lists(one, min_size=samples, max_size=samples)


def results(sample: Any) -> Sample:
    """The sample; equal programs share a failure only if they are judged together."""
    cached = sample.outcome.total is not None and sample.outcome.cached
    return replace(sample, outcome=replace(sample.outcome, cached=cached))


@settings(max_examples=8, deadline=None)
@given(st.integers(1, 6).flatmap(lambda rows: seconds(rows * N)), st.booleans(), st.booleans())
def test_results_do_not_depend_on_streaming(delays: Delays, beside: bool, code: bool) -> None:
    _, waited, one = run(delays, streaming=False, beside=beside, code=code)
    _, streamed, two = run(delays, streaming=True, beside=beside, code=code)
    assert [results(s) for s in waited] == [results(s) for s in streamed]
    assert [s.completion for s in waited] == [s.completion for s in streamed]
    # Nothing is asked for twice; only failures are not shared by those that come later.
    assert sorted(one.revised) == sorted(two.revised)
    assert sorted(one.answered) == sorted(two.answered)


@settings(max_examples=8, deadline=None)
@given(
    st.integers(1, 4).flatmap(lambda rows: seconds(rows * N)),
    st.booleans(),
    st.sampled_from(["state", "chain"]),
)
def test_three_rounds_do_not_depend_on_streaming(
    delays: Delays, beside: bool, compare: str
) -> None:
    took, waited, one = run(delays, streaming=False, beside=beside, compare=compare)
    sooner, streamed, two = run(delays, streaming=True, beside=beside, compare=compare)
    assert [results(s) for s in waited] == [results(s) for s in streamed]
    assert sorted(one.revised) == sorted(two.revised) and sooner <= took
    assert {s.turn for s in waited} == {1, 2, 3}


@settings(max_examples=8, deadline=None)
@given(st.integers(2, 6).flatmap(lambda rows: seconds(rows * N)))
def test_a_step_takes_as_long_as_its_longest_chain(delays: Delays) -> None:
    """Without streaming each stage waits for the slowest of the stage before."""
    told = [place - 1 if place % 5 == 4 else place for place in range(len(delays))]
    drawn = [delay[0] for delay in delays]
    judged = [delays[number][2] for number in told]
    revised = [
        0.0 if place % 7 == 6 else delays[number][1] + delays[number][2]
        for place, number in enumerate(told)
    ]
    took, _, _ = run(delays, streaming=True, beside=True)
    assert max(drawn) <= took <= max(map(sum, zip(drawn, revised, strict=True)))
    # A shared engine revises when all critiques are there; only the judging streams.
    took, _, _ = run(delays, streaming=True, beside=False)
    assert took <= max(drawn) + max(revised)
    took, _, _ = run(delays, streaming=True, beside=False, code=True)
    assert took <= max(map(sum, zip(drawn, judged, strict=True)))


def test_without_streaming_a_step_takes_the_longest_of_every_stage() -> None:
    delays = [(30.0, 1.0, 1.0), (1.0, 20.0, 1.0), (1.0, 1.0, 10.0)]
    assert run(delays, streaming=False, beside=True)[0] == 60
    assert run(delays, streaming=True, beside=True)[0] == 32


@pytest.mark.parametrize("beside", [True, False])
def test_validation_streams_and_judges_first_solutions_meanwhile(beside: bool) -> None:
    delays = [(float(10 + i), float(30 - 2 * i), 5.0) for i in range(4)]
    turns: dict[bool, Any] = {}
    took: dict[bool, float] = {}
    for streaming in (True, False):
        script, loop = Script(delays, beside=beside), Clock()
        worker = working(script, loop, streaming=streaming)
        turns[streaming] = run_conversations(worker, ChainPlan(), critic="c", seed=0)
        took[streaming] = loop.now
        loop.close()
    assert turns[True] == turns[False] and len(turns[True]) == 2
    # Two greedy critiques of 10 and 11 s, their revisions of 30 and 28 s, and judging of 5 s. The
    # first solutions are equal to the revisions, so that one run judges both.
    assert took[False] == 11 + 30 + 5
    assert took[True] == (10 + 30 if beside else 11 + 30)

"""The critic's reward: does the revision that follows a critique pass the problem's tests?

Source: CTRL (arXiv 2502.03492) and its ``critic_rm.py``; the names and signatures are upstream's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from ctrl_megatron.prompts import generation_messages, parse_judgment, revision_request, sanitize
from ctrl_megatron.rewards.cache import CacheCounters, ResultCache
from ctrl_megatron.rewards.cached_judge import CachedJudge
from ctrl_megatron.rewards.disk_cache import verdict_cache
from ctrl_megatron.rewards.grading import Graded, Judge, grading_job
from ctrl_megatron.rewards.items import RewardItem, samples_of
from ctrl_megatron.rewards.progress import counting
from ctrl_megatron.rewards.samples import RUN_TIMEOUT, Paths, Sample, load_samples, problem_of
from ctrl_megatron.sandbox.client import SandboxError
from ctrl_megatron.types import Message, Verdict

MAX_REQUESTS = 256
"""Requests that one batch of rewards keeps under way, by default."""

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardOutcome:
    """What one critique earned, and why."""

    reward: float | None
    """In [0, 1]; None where the sandbox failed, so that nothing is known: mask the sample out."""
    valid: bool
    """The critique contains a judgment; without one the reward is 0 and nothing runs."""
    judged_correct: bool | None
    """What the critique says about the answer; None without a judgment."""
    passed: tuple[bool, ...] = ()
    """One entry per test that the revision was run on."""
    detail: tuple[str, ...] = ()
    """One short text per entry of ``passed``, empty where it passed."""
    cached: bool = False
    """The verdict was remembered or shared with an equal revision of the batch."""
    error: str = ""
    """The sandbox's fault; empty unless ``reward`` is None."""
    forged: bool | None = None
    """A grader that believes exit codes would have accepted the revision; None: not compared."""


class RewardModelForCritic:
    """Scores critiques by the revisions that follow them.

    ``file`` names the parquet file(s) of samples, ``tokenizer`` decodes responses, ``num_examine``
    of them are printed by every ``parse_response``. With ``run_all_cases`` the reward is the pass
    rate, without it 1 only if every test passes (the paper's). ``sandbox`` is needed to run
    anything: a client or a provider. With ``compare_lax`` our service tells which programs only a
    grader that believes exit codes would accept. ``cache`` replaces the cache in memory.
    ``id_key`` is the batch field that holds the samples' ids. At most ``max_requests`` of a batch
    are under way; a test takes ``run_timeout`` seconds at most where its row does not say. One
    event loop at a time.
    """

    # Class attributes, so that text-only methods work on an instance that was never initialised.
    show_progress: bool = True
    id_key: str = "problem_id"
    max_requests: int = MAX_REQUESTS
    run_timeout: float = RUN_TIMEOUT

    def __init__(
        self,
        file: Paths,
        tokenizer: Any,
        num_examine: int = 0,
        run_all_cases: bool = True,
        *,
        sandbox: Judge | None = None,
        id_key: str = "problem_id",
        show_progress: bool = True,
        cache_capacity: int = 200_000,
        max_requests: int = MAX_REQUESTS,
        run_timeout: float = RUN_TIMEOUT,
        cache: ResultCache[Graded] | None = None,
        compare_lax: bool = False,
    ) -> None:
        self.table = load_samples(file)
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.run_all_cases = run_all_cases
        self.id_key = id_key
        self.show_progress = show_progress
        self.judge = sandbox
        self.max_requests, self.run_timeout = max_requests, run_timeout
        self.cache = verdict_cache(capacity=cache_capacity) if cache is None else cache
        self.compare_lax = compare_lax

    @property
    def cache_counters(self) -> CacheCounters:
        """How often verdicts were remembered, shared or run."""
        return self.cache.counters

    def parse_response(self, data: Mapping[str, Any]) -> tuple[list[str], list[str], list[int]]:
        """Sample ids, texts without end-of-sequence tokens, and lengths in tokens of responses.

        ``data`` holds ``responses`` (B, R), ``attention_mask`` (B, P+R) and the ids under
        ``id_key`` (B,).
        """
        ids = [str(value) for value in _to_list(data[self.id_key])]
        responses = _to_list(data["responses"])
        masks = _to_list(data["attention_mask"])
        texts: list[str] = []
        lengths: list[int] = []
        for response, mask in zip(responses, masks, strict=True):
            length = int(sum(mask[len(mask) - len(response) :]))
            text = self.tokenizer.decode(response[:length], skip_special_tokens=False)
            texts.append(text.replace(self.tokenizer.eos_token, ""))
            lengths.append(length)
        for name, text in zip(ids[: self.num_examine], texts, strict=False):
            print(f"[{name}]\n{text}\n")
        return ids, texts, lengths

    def parse_query(self, ids: Iterable[str]) -> tuple[list[list[Message]], list[Sample]]:
        """For each id the dialogue before the critique (problem, raw answer) and the sample.

        Raises ``KeyError`` for an unknown id.
        """
        samples = [self.table[name] for name in ids]
        return [_dialogue(sample) for sample in samples], samples

    def build_revision_messages(self, init_messages: list[Message], critique: str) -> list[Message]:
        """The dialogue that asks for a revision: ``init_messages`` and a turn with the critique.

        As upstream, the last content of ``init_messages`` is reduced to its code in place.
        """
        assert isinstance(init_messages, list), "init_messages must be a list of messages"
        assert init_messages[-1]["role"] == "assistant", "the last message must be the assistant's"
        init_messages[-1]["content"] = sanitize(init_messages[-1]["content"])
        return [*init_messages, revision_request(critique)]

    async def reward_revision(
        self, critique: str, revision: str, sample: Sample, semaphore: asyncio.Semaphore
    ) -> float:
        """The reward of one critique, 0.0 without a judgment; raises ``SandboxError``."""
        if parse_judgment(critique) is None:
            return 0.0
        return await self.get_sandbox_response(sanitize(revision), sample, semaphore)

    async def get_sandbox_response(
        self, revision: str, sample: Sample, semaphore: asyncio.Semaphore
    ) -> float:
        """The reward of the program in ``revision``; raises ``SandboxError``."""
        graded, _ = await self._grade(revision, sample, self.run_all_cases, semaphore)
        return self._score(graded.verdict)

    async def close(self) -> None:
        """Let go of the sandbox client's connections, where it has any."""
        close = getattr(self.judge, "close", None)
        if close is not None:
            await close()

    async def get_reward_all(
        self, critiques: list[str], revisions: list[str], samples: list[Any]
    ) -> list[float]:
        """All rewards in order, at most ``max_requests`` under way.

        The shortest list sets the length. The first fault cancels the rest and is raised;
        ``judge_all`` reports faults sample by sample.
        """
        semaphore = asyncio.Semaphore(self.max_requests)
        triples = zip(critiques, revisions, samples, strict=False)
        return await self._gather(
            [partial(self.reward_revision, *triple, semaphore) for triple in triples]
        )

    async def judge_all(
        self, critiques: Sequence[str], revisions: Sequence[str], samples: Sequence[Sample]
    ) -> list[RewardOutcome]:
        """All outcomes in order; a fault of the sandbox is one of them.

        Raises ``ValueError`` for a sample that cannot be judged and for lists of unequal length.
        """
        semaphore = asyncio.Semaphore(self.max_requests)
        triples = zip(critiques, revisions, samples, strict=True)
        return await self._gather(
            [partial(self._judge_revision, *triple, semaphore) for triple in triples]
        )

    async def __call__(self, items: Sequence[RewardItem]) -> list[float | None]:
        """The reward function ``critic``: None where the sandbox failed."""
        critiques, revisions = [i.critique for i in items], [i.text for i in items]
        outcomes = await self.judge_all(critiques, revisions, samples_of("critic", items))
        return [outcome.reward for outcome in outcomes]

    async def judge_solution(self, solution_text: str, sample: Sample) -> Verdict:
        """The verdict of every test on an answer, whatever the mode. Raises ``SandboxError``."""
        graded, _ = await self._grade(solution_text, sample, True, None)
        return graded.verdict

    async def _judge_revision(
        self, critique: str, revision: str, sample: Sample, semaphore: asyncio.Semaphore
    ) -> RewardOutcome:
        judgment = parse_judgment(critique)
        if judgment is None:
            return RewardOutcome(reward=0.0, valid=False, judged_correct=None)
        outcome = partial(RewardOutcome, valid=True, judged_correct=judgment)
        try:
            graded, cached = await self._grade(revision, sample, self.run_all_cases, semaphore)
        except SandboxError as error:
            return outcome(reward=None, error=str(error) or type(error).__name__)
        verdict = graded.verdict
        return outcome(
            reward=self._score(verdict),
            passed=verdict.passed,
            detail=verdict.detail,
            cached=cached,
            forged=graded.forged,
        )

    async def _grade(
        self, text: str, sample: Sample, run_all_cases: bool, semaphore: asyncio.Semaphore | None
    ) -> tuple[Graded, bool]:
        if self.judge is None:
            raise ValueError(
                "RewardModelForCritic has no sandbox; pass sandbox=SandboxClient(endpoint)"
            )
        job = grading_job(
            text,
            sample,
            run_all_cases=run_all_cases,
            run_timeout=self.run_timeout,
            compare_lax=self.compare_lax,
        )
        return await CachedJudge(self.judge, self.cache).grade(job, semaphore)

    def _score(self, verdict: Verdict) -> float:
        return verdict.pass_rate if self.run_all_cases else float(verdict.accepted)

    async def _gather(self, jobs: list[Callable[[], Awaitable[Value]]]) -> list[Value]:
        with counting("Generating rewards", len(jobs), visible=self.show_progress) as advance:
            tasks = [asyncio.create_task(_then(job, advance)) for job in jobs]
            try:
                return list(await asyncio.gather(*tasks))
            except BaseException:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                raise


async def _then(job: Callable[[], Awaitable[Value]], advance: Callable[[], None]) -> Value:
    value = await job()
    advance()
    return value


def _dialogue(sample: Sample) -> list[Message]:
    answer = {"role": "assistant", "content": sample["solution"]}
    return [*generation_messages(problem_of(sample)), answer]


def _to_list(values: Any) -> list[Any]:
    """Rows of a tensor, an array or a non-tensor field as plain Python values."""
    return values.tolist() if hasattr(values, "tolist") else list(values)

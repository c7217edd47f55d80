"""The critic's reward: does the revision that follows a critique pass the problem's tests?

Source: CTRL (arXiv 2502.03492) and its ``critic_rm.py``; the names and signatures are upstream's.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

from ctrl_megatron.data.rows import ATTEMPT_COLUMNS, Paths, Row, read_rows, rows_by_id
from ctrl_megatron.prompts import (
    generation_messages,
    parse_judgment,
    revision_request,
    sanitized_answer,
)
from ctrl_megatron.rewards.cache import VerdictCache
from ctrl_megatron.rewards.copying import COPYING_THRESHOLD, copied_rate
from ctrl_megatron.rewards.gathered import gathered
from ctrl_megatron.rewards.grading import (
    MAX_REQUESTS,
    RUN_TIMEOUT,
    CachedJudge,
    Judge,
    check_tests,
    grading_job,
)
from ctrl_megatron.rewards.items import Copying, RewardItem, RewardOutcome, Rewards, rows_of
from ctrl_megatron.sandbox.client import SandboxError
from ctrl_megatron.types import Message, Verdict

Value = TypeVar("Value")


class RewardModelForCritic:
    """Scores critiques by the revisions that follow them.

    ``file`` names the parquet file(s) of the rows, or holds the rows; ``tokenizer`` decodes
    responses, ``num_examine`` of them are printed by every ``parse_response``. With
    ``run_all_cases`` the reward is the pass rate, without it 1 only if every test passes (the
    paper's). ``sandbox`` is needed to run anything: a client or a provider. ``cache`` replaces
    the cache in memory. ``id_key`` is the batch field that holds the rows' ids. At most
    ``max_requests`` of a batch are under way; a test takes ``run_timeout`` seconds at most where
    its row does not say. One event loop at a time. Raises ``ValueError`` naming a row whose tests
    cannot be judged.

    A critique that holds more than the share ``copying_threshold`` of the revision's program
    (``copied_rate``) earns 0 where ``copying`` is "penalise", and has no reward with "mask".
    """

    reads = ATTEMPT_COLUMNS
    # Class attributes, so that text-only methods work on an instance that was never initialised.
    show_progress: bool = True
    id_key: str = "problem_id"
    max_requests: int = MAX_REQUESTS
    run_timeout: float = RUN_TIMEOUT
    copying: Copying = "measure"
    copying_threshold: float = COPYING_THRESHOLD

    def __init__(
        self,
        file: Paths | Sequence[Row],
        tokenizer: Any,
        num_examine: int = 0,
        run_all_cases: bool = True,
        *,
        sandbox: Judge | None = None,
        id_key: str = "problem_id",
        show_progress: bool = True,
        max_requests: int = MAX_REQUESTS,
        run_timeout: float = RUN_TIMEOUT,
        cache: VerdictCache | None = None,
        copying: Copying = "measure",
        copying_threshold: float = COPYING_THRESHOLD,
    ) -> None:
        given = isinstance(file, Sequence) and any(isinstance(row, Row) for row in file)
        rows = file if given else read_rows(cast(Paths, file), prompt_key=None)
        self.table = rows_by_id(cast("Sequence[Row]", rows))
        check_tests(self.table.values())
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.run_all_cases = run_all_cases
        self.id_key = id_key
        self.show_progress = show_progress
        self.max_requests, self.run_timeout = max_requests, run_timeout
        self.copying, self.copying_threshold = copying, copying_threshold
        self._cache = VerdictCache() if cache is None else cache
        self._judge = None if sandbox is None else CachedJudge(sandbox, self._cache)

    def parse_response(self, data: Mapping[str, Any]) -> tuple[list[str], list[str], list[int]]:
        """Row ids, texts without end-of-sequence tokens, and lengths in tokens of responses.

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

    def parse_query(self, ids: Iterable[str]) -> tuple[list[list[Message]], list[Row]]:
        """For each id the dialogue before the critique (problem, raw answer) and the row.

        Raises ``KeyError`` for an unknown id.
        """
        rows = [self.table[name] for name in ids]
        dialogues = [
            [
                *generation_messages(row.attempt().problem),
                {"role": "assistant", "content": row.solution},
            ]
            for row in rows
        ]
        return dialogues, rows

    def build_revision_messages(self, init_messages: list[Message], critique: str) -> list[Message]:
        """The dialogue that asks for a revision: ``init_messages`` and a turn with the critique.

        As upstream, the last content of ``init_messages`` is reduced to its code in place.
        """
        assert isinstance(init_messages, list), "init_messages must be a list of messages"
        assert init_messages[-1]["role"] == "assistant", "the last message must be the assistant's"
        init_messages[-1]["content"] = sanitized_answer(init_messages[-1]["content"])
        return [*init_messages, revision_request(critique)]

    async def reward_revision(
        self, critique: str, revision: str, sample: Row, semaphore: asyncio.Semaphore
    ) -> float:
        """The reward of one critique, 0.0 without a judgment, NaN where ``copying`` masks it;
        raises ``SandboxError``.
        """
        if parse_judgment(critique) is None:
            return 0.0
        reward = await self.get_sandbox_response(sanitized_answer(revision), sample, semaphore)
        limited = self._limited(RewardOutcome(reward=reward), critique, revision).reward
        return math.nan if limited is None else limited

    async def get_sandbox_response(
        self, revision: str, sample: Row, semaphore: asyncio.Semaphore
    ) -> float:
        """The reward of the program in ``revision``; raises ``SandboxError``."""
        verdict, _ = await self._grade(revision, sample, self.run_all_cases, semaphore)
        return self._score(verdict)

    async def get_reward_all(
        self, critiques: list[str], revisions: list[str], samples: list[Any]
    ) -> list[float]:
        """All rewards in order, at most ``max_requests`` under way.

        The shortest list sets the length. The first fault cancels the rest and is raised; ``judge``
        reports faults item by item.
        """
        semaphore = asyncio.Semaphore(self.max_requests)
        triples = zip(critiques, revisions, samples, strict=False)
        return await self._gather(
            [partial(self.reward_revision, *triple, semaphore) for triple in triples]
        )

    async def judge(self, items: Sequence[RewardItem]) -> list[RewardOutcome]:
        """What each critique earned by its revision; a fault of the sandbox is an outcome.

        Without a judgment the reward is 0 and nothing runs. Raises ``ValueError`` for an item
        without a row, and for a row that cannot be judged.
        """
        semaphore = asyncio.Semaphore(self.max_requests)
        rows = rows_of("critic", items)
        return await self._gather(
            [
                partial(self._outcome, i.text, row, semaphore, i.judgment, critique=i.critique)
                for i, row in zip(items, rows, strict=True)
            ]
        )

    async def __call__(self, items: Sequence[RewardItem]) -> Rewards:
        """The reward function ``critic``: None where the sandbox failed."""
        return [outcome.reward for outcome in await self.judge(items)]

    async def judge_solutions(
        self, texts: Sequence[str], rows: Sequence[Row]
    ) -> list[RewardOutcome]:
        """What every answer earns by itself, judged on every test whatever the mode.

        A fault of the sandbox is an outcome without verdict. Raises ``ValueError`` for lists of
        unequal length and for a row that cannot be judged.
        """
        semaphore = asyncio.Semaphore(self.max_requests)
        return await self._gather(
            [
                partial(self._outcome, text, row, semaphore, None, solution=True)
                for text, row in zip(texts, rows, strict=True)
            ]
        )

    async def _outcome(
        self,
        text: str,
        row: Row,
        semaphore: asyncio.Semaphore,
        judgment: bool | None,
        *,
        critique: str = "",
        solution: bool = False,
    ) -> RewardOutcome:
        if judgment is None and not solution:
            return RewardOutcome(reward=0.0)
        run_all_cases = solution or self.run_all_cases
        try:
            verdict, cached = await self._grade(text, row, run_all_cases, semaphore)
        except SandboxError as error:
            fault = str(error) or type(error).__name__
            return RewardOutcome(reward=None, judgment=judgment, error=fault)
        outcome = RewardOutcome(
            reward=self._score(verdict), judgment=judgment, verdict=verdict, cached=cached
        )
        return self._limited(outcome, critique, text) if critique else outcome

    def _limited(self, outcome: RewardOutcome, critique: str, revision: str) -> RewardOutcome:
        copied = copied_rate(critique, revision)
        if self.copying == "measure" or copied <= self.copying_threshold:
            return replace(outcome, copied=copied)
        reward = 0.0 if self.copying == "penalise" else None
        return replace(outcome, reward=reward, copied=copied, copying=self.copying)

    async def _grade(
        self, text: str, row: Row, run_all_cases: bool, semaphore: asyncio.Semaphore
    ) -> tuple[Verdict, bool]:
        if self._judge is None:
            raise ValueError(
                "RewardModelForCritic has no sandbox; pass sandbox=SandboxClient(endpoint)"
            )
        job = grading_job(text, row, run_all_cases=run_all_cases, run_timeout=self.run_timeout)
        return await self._judge.grade(job, semaphore)

    def _score(self, verdict: Verdict) -> float:
        return verdict.pass_rate if self.run_all_cases else float(verdict.accepted)

    async def _gather(self, calls: Sequence[Callable[[], Awaitable[Value]]]) -> list[Value]:
        """All results in order, with a progress bar; the first exception cancels the rest."""
        if not self.show_progress:
            return await gathered(calls)
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress("{task.description}", *columns, console=Console(stderr=True)) as progress:
            bar = progress.add_task("Generating rewards", total=len(calls))

            async def counted(call: Callable[[], Awaitable[Value]]) -> Value:
                value = await call()
                progress.advance(bar)
                return value

            return await gathered([partial(counted, call) for call in calls])


def _to_list(values: Any) -> list[Any]:
    """Rows of a tensor, an array or a non-tensor field as plain Python values."""
    return values.tolist() if hasattr(values, "tolist") else list(values)

"""The critic's reward: does the revision that follows a critique pass the problem's tests?

Source: CTRL (arXiv 2502.03492) and its ``critic_rm.py``; the names and signatures are upstream's.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

from ctrl_megatron.background import gather_results
from ctrl_megatron.data.rows import ATTEMPT_COLUMNS, Paths, Row, read_rows, rows_by_id
from ctrl_megatron.prompts import (
    generation_messages,
    parse_judgment,
    revision_request,
    sanitized_answer,
)
from ctrl_megatron.rewards.cache import VerdictCache
from ctrl_megatron.rewards.copying import COPYING_THRESHOLD, copied_line_share
from ctrl_megatron.rewards.grading import (
    MAX_REQUESTS,
    RUN_TIMEOUT,
    BatchTests,
    CachedJudge,
    GradingJob,
    Judge,
    RetryPolicy,
    RowTests,
    check_tests,
    outcome_with_reward,
    program_to_judge,
    replace_surrogates,
)
from ctrl_megatron.rewards.items import Copying, RewardItem, RewardOutcome, Rewards, item_rows
from ctrl_megatron.types import Message, Verdict


class RewardModelForCritic:
    """Rewards critiques by the revisions that follow them.

    ``file`` is the parquet file or files of the rows, or the rows themselves. ``tokenizer`` decodes
    responses, of which every ``parse_response`` prints ``num_examine``. With ``run_all_cases`` the
    reward is the pass rate; without it the reward is 1 where every test passes and else 0 (the
    paper's). ``sandbox``, a client or a provider, is required to judge; ``patience`` defines what a
    batch does about one that fails. ``cache`` replaces the cache in memory. ``id_key`` is the batch
    field with the rows' ids. At most ``max_requests`` requests of a batch run at the same time. A
    test may take ``run_timeout`` seconds where its row sets no limit. Use it on one event loop
    only. Rows with ``grader_files`` are judged with ``shared_process_graders`` only. Raises
    ``ValueError`` that names a row whose tests cannot be judged, unless ``check`` is False because
    the rows were checked before.

    A critique that contains more than the share ``copying_threshold`` of the revision's program
    (``copied_line_share``) earns 0 with ``copying`` "penalise", and has no reward with "mask".
    """

    reads = ATTEMPT_COLUMNS
    # Class attributes, so that methods on texts work on an instance without ``__init__``.
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
        patience: RetryPolicy | None = None,
        shared_process_graders: bool = False,
        copying: Copying = "measure",
        copying_threshold: float = COPYING_THRESHOLD,
        check: bool = True,
    ) -> None:
        given = isinstance(file, Sequence) and any(isinstance(row, Row) for row in file)
        rows = file if given else read_rows(cast(Paths, file), prompt_key=None)
        self.table = rows_by_id(cast("Sequence[Row]", rows))
        if check:
            options = {"run_timeout": run_timeout, "shared_process_graders": shared_process_graders}
            check_tests(self.table.values(), **options)
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.run_all_cases = run_all_cases
        self.id_key = id_key
        self.show_progress = show_progress
        self.max_requests, self.run_timeout = max_requests, run_timeout
        self.copying, self.copying_threshold = copying, copying_threshold
        self._graders = shared_process_graders
        self._cache = VerdictCache() if cache is None else cache
        self._judge = None if sandbox is None else CachedJudge(sandbox, self._cache, patience)
        self._room = asyncio.Semaphore(max_requests)
        """Bounds the runs that ``begin`` starts."""
        self._batch: dict[bool, BatchTests] = {}
        """``run_all_cases`` -> the tests of the batch of which some items have begun."""

    def parse_response(self, data: Mapping[str, Any]) -> tuple[list[str], list[str], list[int]]:
        """(row ids, texts without end-of-sequence tokens, lengths in tokens) of the responses.

        ``data`` has ``responses`` (B, R), ``attention_mask`` (B, P+R) and the row ids (B,) in the
        field ``id_key``.
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
        """(the dialogues before the critiques, the rows) of ``ids``. A dialogue has the problem and
        the first solution.

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
        """The dialogue that requests a revision: ``init_messages`` and a turn with the critique.

        As upstream, the last content of ``init_messages`` is reduced to its code in place.
        """
        assert isinstance(init_messages, list), "init_messages must be a list of messages"
        assert init_messages[-1]["role"] == "assistant", "the last message must be the assistant's"
        init_messages[-1]["content"] = sanitized_answer(init_messages[-1]["content"])
        return [*init_messages, revision_request(critique)]

    async def reward_revision(
        self, critique: str, revision: str, sample: Row, semaphore: asyncio.Semaphore
    ) -> float:
        """The reward of one critique: 0.0 without a judgment, NaN where ``copying`` masks it.
        Raises ``SandboxError``.
        """
        if parse_judgment(critique) is None:
            return 0.0
        reward = await self.get_sandbox_response(sanitized_answer(revision), sample, semaphore)
        outcome = RewardOutcome(reward=reward)
        limited = self._limited(outcome, critique, program_to_judge(revision)).reward
        return math.nan if limited is None else limited

    async def get_sandbox_response(
        self, revision: str, sample: Row, semaphore: asyncio.Semaphore
    ) -> float:
        """The reward of the program in ``revision``. Raises ``SandboxError``."""
        verdict, _ = await self._grade(
            program_to_judge(revision), self._tests().tests_of_row(sample), semaphore
        )
        return self._score(verdict)

    async def get_reward_all(
        self, critiques: list[str], revisions: list[str], samples: list[Any]
    ) -> list[float]:
        """All rewards in order; at most ``max_requests`` requests run at the same time.

        The result is as long as the shortest list. The first failure of the sandbox cancels the
        rest and is raised; ``judge`` reports failures item by item.
        """
        semaphore = asyncio.Semaphore(self.max_requests)
        triples = list(zip(critiques, revisions, samples, strict=False))
        with self._progress(len(triples)) as advance:

            async def rewarded(triple: tuple[str, str, Any]) -> float:
                reward = await self.reward_revision(*triple, semaphore)
                advance()
                return reward

            return await gather_results([partial(rewarded, triple) for triple in triples])

    async def judge(self, items: Sequence[RewardItem]) -> list[RewardOutcome]:
        """The outcome of every item: the reward that its critique earned by its revision. A failure
        of the sandbox is an outcome without a verdict.

        Without a judgment the reward is 0 and nothing runs. Raises ``ValueError`` for an item
        without a row, and for a row that cannot be judged.
        """
        tests, rows = self._tests(), item_rows("critic", items)
        programs = [program_to_judge(item.text) for item in items]
        jobs = [
            None if item.judgment is None else tests.tests_of_row(row).job_of_program(program)
            for item, row, program in zip(items, rows, programs, strict=True)
        ]
        answers = await self._grade_all(jobs)
        self._required_judge.warn_of_refused_tests(rows, answers)
        judged = zip(items, programs, answers, strict=True)
        return [self._outcome(item, program, answer) for item, program, answer in judged]

    def begin(self, item: RewardItem) -> None:
        if item.judgment is not None:
            (row,) = item_rows("critic", [item])
            self._begin(item.text, row, run_all_cases=self.run_all_cases)

    def begin_solution(self, text: str, row: Row) -> None:
        self._begin(text, row, run_all_cases=True)

    def _begin(self, text: str, row: Row, *, run_all_cases: bool) -> None:
        tests = self._batch[run_all_cases] = self._tests(run_all_cases=run_all_cases)
        self._required_judge.start_grading(
            tests.tests_of_row(row).job_of_program(program_to_judge(text)), self._room
        )

    async def __call__(self, items: Sequence[RewardItem]) -> Rewards:
        """The rewards of ``judge``, as a reward function; None where the sandbox failed."""
        return [outcome.reward for outcome in await self.judge(items)]

    async def judge_solutions(
        self, texts: Sequence[str], rows: Sequence[Row]
    ) -> list[RewardOutcome]:
        """The outcome of every answer, judged on every test, also without ``run_all_cases``.

        A failure of the sandbox is an outcome without a verdict. Raises ``ValueError`` for lists of
        unequal length and for a row that cannot be judged.
        """
        tests = self._tests(run_all_cases=True)
        pairs = zip(texts, rows, strict=True)
        jobs = [
            tests.tests_of_row(row).job_of_program(program_to_judge(text)) for text, row in pairs
        ]
        answers = await self._grade_all(jobs)
        self._required_judge.warn_of_refused_tests(rows, answers)
        return [outcome_with_reward(answer, self._score) for answer in answers]

    def _outcome(
        self, item: RewardItem, program: str, answer: RewardOutcome | None
    ) -> RewardOutcome:
        found = outcome_with_reward(answer, self._score, item.judgment)
        judged = found.verdict is not None and item.critique
        return self._limited(found, item.critique, program) if judged else found

    def _limited(self, outcome: RewardOutcome, critique: str, program: str) -> RewardOutcome:
        copied = copied_line_share(replace_surrogates(critique), program)
        if self.copying == "measure" or copied <= self.copying_threshold:
            return replace(outcome, copied=copied)
        reward = 0.0 if self.copying == "penalise" else None
        return replace(outcome, reward=reward, copied=copied, copying=self.copying)

    def _tests(self, *, run_all_cases: bool | None = None) -> BatchTests:
        """The tests of a batch: those that ``_begin`` has read, if it was called before."""
        mode = self.run_all_cases if run_all_cases is None else run_all_cases
        begun = self._batch.pop(mode, None)
        return begun or BatchTests(
            run_all_cases=mode,
            run_timeout=self.run_timeout,
            shared_process_graders=self._graders,
        )

    async def _grade(
        self, program: str, tests: RowTests, semaphore: asyncio.Semaphore
    ) -> tuple[Verdict, bool]:
        return await self._required_judge.grade(tests.job_of_program(program), semaphore)

    async def _grade_all(self, jobs: Sequence[GradingJob | None]) -> list[RewardOutcome | None]:
        """``CachedJudge.grade_all``, with a progress bar."""
        if not any(jobs):
            return [None] * len(jobs)
        with self._progress(len(jobs)) as advance:
            return await self._required_judge.grade_all(jobs, self.max_requests, advance)

    @property
    def _required_judge(self) -> CachedJudge:
        if self._judge is None:
            raise ValueError(
                "RewardModelForCritic has no sandbox; pass sandbox=SandboxClient(endpoint)"
            )
        return self._judge

    def _score(self, verdict: Verdict) -> float:
        return verdict.pass_rate if self.run_all_cases else float(verdict.accepted)

    @contextmanager
    def _progress(self, total: int) -> Iterator[Callable[[], None]]:
        """A progress bar, where it is wanted, and the function that advances it by one."""
        if not self.show_progress:
            yield lambda: None
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress("{task.description}", *columns, console=Console(stderr=True)) as progress:
            bar = progress.add_task("Generating rewards", total=total)
            yield lambda: progress.advance(bar)


def _to_list(values: Any) -> list[Any]:
    return values.tolist() if hasattr(values, "tolist") else list(values)

"""Rewards of an answer that contains a program: ``code_format``, ``code``, ``binary_code`` and
``ioi_code``.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ctrl_megatron.data.rows import Row
from ctrl_megatron.errors import UserError
from ctrl_megatron.problems.long_integers import load_long_integer_json
from ctrl_megatron.prompts.python_source import has_effect, parse_python
from ctrl_megatron.rewards.cache import VerdictCache
from ctrl_megatron.rewards.grading import (
    MAX_REQUESTS,
    RUN_TIMEOUT,
    BatchTests,
    CachedJudge,
    GradingJob,
    Judge,
    RequestCheck,
    RetryPolicy,
    count_judgeable_tests,
    outcome_with_reward,
    program_to_judge,
)
from ctrl_megatron.rewards.items import RewardItem, RewardOutcome, Rewards, item_rows
from ctrl_megatron.types import Verdict

_FENCE = "```"
WELL_FORMED, UNPARSABLE, MALFORMED = 1.0, 0.5, 0.0


def code_format_score(text: str, *, final_newline: bool = True, language: str = "python") -> float:
    """1.0 for one well-formed block, 0.5 if its code does not parse, and else 0.0, also where no
    statement of the code has an effect.

    A well-formed answer consists of text without a fence, an opening fence with the tag
    ``language`` at the end of a line, code, a closing fence on a separate line, and one line break.
    Without ``final_newline`` the line break may be missing. Only Python is parsed; code of other
    languages must not be blank. Source: DiffuCoder (arXiv 2506.20639),
    ``code_format_reward``, where the opening fence need not begin a line either.
    """
    if text.count(_FENCE) != 2 or text.count("`" * 4):
        return MALFORMED
    before, _, rest = text.partition(f"{_FENCE}{language}\n")
    if not rest or _FENCE in before:
        return MALFORMED
    endings = ("\n```\n",) if final_newline else ("\n```\n", "\n```")
    ending = next((e for e in endings if rest.endswith(e)), None)
    if ending is None:
        return MALFORMED
    code = rest.removesuffix(ending)
    if language != "python":
        return WELL_FORMED if code.strip() else MALFORMED
    tree = parse_python(code)
    if tree is None:
        return UNPARSABLE
    return WELL_FORMED if has_effect(tree) else MALFORMED


class CodeFormatReward:
    """``code_format_score`` of every text."""

    def __init__(self, *, final_newline: bool = True) -> None:
        self._final_newline = final_newline

    async def __call__(self, items: Sequence[RewardItem]) -> Rewards:
        return [
            code_format_score(
                item.text, final_newline=self._final_newline, language=language_of_row(item.row)
            )
            for item in items
        ]


def language_of_row(row: Row | None, default: str = "python") -> str:
    """The language of a row's programs: its column ``language``, where its tests are stdin/stdout
    cases, else ``default``. UserError where the column holds no text."""
    named = row is not None and row.prompter_type == "code_contests" and row.extra.get("language")
    language = named or default
    if row is not None and not isinstance(language, str):
        raise UserError(f"{row.id!r}: column 'language' must be text", file=row.place)
    return language


class CodeReward:
    """``code``: the share of a problem's tests that an answer's program passes.

    ``provider`` runs the programs: a ``ScriptProvider`` or a ``SandboxClient``. With
    ``require_format`` an answer that is not well-formed (``code_format`` below 1) earns 0 and does
    not run, as in DiffuCoder. Reward functions that share a ``cache`` run an equal program once.
    A row with stdin/stdout cases may name another language than Python in a column ``language``,
    if the provider runs it.
    """

    name = "code"
    language = "python"
    """The language of rows that name none."""
    reads: tuple[str, ...] = ("prompter_type", "selected_uts")

    def __init__(
        self,
        *,
        provider: Judge,
        require_format: bool = False,
        run_timeout: float = RUN_TIMEOUT,
        max_requests: int = MAX_REQUESTS,
        cache: VerdictCache | None = None,
        patience: RetryPolicy | None = None,
        shared_process_graders: bool = False,
    ) -> None:
        verdicts = VerdictCache() if cache is None else cache
        self._judge = CachedJudge(provider, verdicts, patience)
        self._require_format = require_format
        self._run_timeout, self._max_requests = run_timeout, max_requests
        self._graders = shared_process_graders
        self._room = asyncio.Semaphore(max_requests)
        """Bounds the runs that ``begin`` starts."""
        self._batch: BatchTests | None = None
        """The tests of the batch of which some items have begun."""

    def begin(self, item: RewardItem) -> None:
        (row,) = item_rows(self.name, [item])
        if self._runs(item):
            self._batch = self._tests()
            self._judge.start_grading(self._job(item.text, row, self._batch), self._room)

    def check_row(self, row: Row, check: RequestCheck) -> None:
        """Raise ``UserError`` for a row that a judge with this ``check`` cannot judge."""
        count_judgeable_tests(
            row, check, **self._options(), language=language_of_row(row, self.language)
        )

    async def __call__(self, items: Sequence[RewardItem]) -> Rewards:
        """The rewards of ``judge``, as a reward function; None where the judge failed."""
        return [outcome.reward for outcome in await self.judge(items)]

    async def judge(self, items: Sequence[RewardItem]) -> list[RewardOutcome]:
        """The outcome of every item; a failure of the judge is an outcome without a verdict.

        Raises ``ValueError`` for a row that cannot be judged.
        """
        rows = item_rows(self.name, items)
        tests, self._batch = self._tests(), None
        jobs = [
            self._job(item.text, row, tests) if self._runs(item) else None
            for item, row in zip(items, rows, strict=True)
        ]
        answers = await self._judge.grade_all(jobs, self._max_requests)
        self._judge.warn_of_refused_tests(rows, answers)
        return [
            outcome_with_reward(answer, partial(self._score, row=row))
            for answer, row in zip(answers, rows, strict=True)
        ]

    def _runs(self, item: RewardItem) -> bool:
        if not self._require_format:
            return True
        language = language_of_row(item.row, self.language)
        score = code_format_score(item.text, final_newline=False, language=language)
        return score == WELL_FORMED

    def _tests(self) -> BatchTests:
        """The tests of a batch: those that ``begin`` has read, if it was called before."""
        return self._batch or BatchTests(run_all_cases=True, **self._options())

    def _options(self) -> dict[str, Any]:
        return {"run_timeout": self._run_timeout, "shared_process_graders": self._graders}

    def _job(self, text: str, row: Row, tests: BatchTests) -> GradingJob:
        language = language_of_row(row, self.language)
        of_row = tests.tests_of_row(row, language=language)
        return of_row.job_of_program(program_to_judge(text, language))

    def _score(self, verdict: Verdict, row: Row) -> float:
        return verdict.pass_rate


class BinaryCodeReward(CodeReward):
    """``binary_code``: 1 where the reward ``code`` is above 0.99, else 0; None where it is None."""

    name = "binary_code"

    def _score(self, verdict: Verdict, row: Row) -> float:
        return float(verdict.pass_rate > 0.99)


@dataclass(frozen=True, slots=True, kw_only=True)
class IoiSubtask:
    """A group of tests whose points are awarded together."""

    points: float
    """Points for a full score, positive."""
    tests: tuple[int, ...]
    """Numbers of the subtask's tests, from 0; not empty."""


class IoiCodeReward(CodeReward):
    """``ioi_code``: the points of an olympiad problem. A subtask earns its points times the score
    of its weakest test.

    The row has stdin/stdout cases in ``selected_uts`` and a column ``subtasks``, a list (or its
    JSON) of ``{"points": 20, "tests": [0, 1, 2]}``, where ``tests`` numbers the cases from 0; a
    test may belong to several subtasks. A ``checker`` may give a test a part of its points, and
    ``grader_files`` are compiled with the program (``grading.row_tests``), which needs
    ``shared_process_graders``. ``language`` is the
    language of rows without a column of that name. With ``normalise`` the points are divided by the
    problem's full points.
    """

    name = "ioi_code"
    reads = ("prompter_type", "selected_uts", "subtasks")

    def __init__(
        self,
        *,
        provider: Judge,
        language: str = "cpp",
        normalise: bool = False,
        run_timeout: float = RUN_TIMEOUT,
        max_requests: int = MAX_REQUESTS,
        cache: VerdictCache | None = None,
        patience: RetryPolicy | None = None,
        shared_process_graders: bool = False,
    ) -> None:
        super().__init__(
            provider=provider,
            run_timeout=run_timeout,
            max_requests=max_requests,
            cache=cache,
            patience=patience,
            shared_process_graders=shared_process_graders,
        )
        self.language, self._normalise = language, normalise

    def check_row(self, row: Row, check: RequestCheck) -> None:
        options = {**self._options(), "language": language_of_row(row, self.language)}
        subtasks_of(row, count_judgeable_tests(row, check, **options))

    def _job(self, text: str, row: Row, tests: BatchTests) -> GradingJob:
        of_row = tests.tests_of_row(row, language=language_of_row(row, self.language))
        subtasks_of(row, of_row.total)  # refuses a row before a program runs
        return super()._job(text, row, tests)

    def _score(self, verdict: Verdict, row: Row) -> float:
        subtasks = subtasks_of(row, verdict.total)
        # A test without a verdict counts as failed.
        missing = [0.0] * (verdict.total - len(verdict.passed))
        points = ioi_score(subtasks, [*(verdict.scores or map(float, verdict.passed)), *missing])
        return points / sum(s.points for s in subtasks) if self._normalise else points


def ioi_score(subtasks: Sequence[IoiSubtask], test_scores: Sequence[float]) -> float:
    """The sum over subtasks of points times the smallest score of the subtask's tests.

    ``test_scores`` are in [0, 1], one per test of the problem.
    """
    return sum(s.points * min(test_scores[test] for test in s.tests) for s in subtasks)


def subtasks_of(row: Row, tests: int | None) -> list[IoiSubtask]:
    """The subtasks of ``row``, which has ``tests`` tests (``RowTests.total``). Raises
    ``UserError`` naming the row.
    """
    where, given = f"{row.place}: {row.id!r}", row.extra.get("subtasks")
    try:
        entries = load_long_integer_json(given) if isinstance(given, str) else given
        subtasks = [
            IoiSubtask(points=float(e["points"]), tests=tuple(int(t) for t in e["tests"]))
            for e in entries or ()
        ]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UserError(
            f"{where}: subtasks must be a list of {{points, tests}}: {error!r}"
        ) from error
    if tests is None:
        raise UserError(f"{where}: ioi_code needs cases of stdin and stdout, not unit tests")
    if not subtasks:
        raise UserError(f"{where}: ioi_code needs the column subtasks, and it is empty")
    for subtask in subtasks:
        if not math.isfinite(subtask.points) or subtask.points <= 0:
            raise UserError(f"{where}: a subtask's points must be positive")
        if not subtask.tests or not all(0 <= test < tests for test in subtask.tests):
            raise UserError(
                f"{where}: a subtask names tests {list(subtask.tests)}; the row has tests 0 to "
                f"{tests - 1}"
            )
    return subtasks

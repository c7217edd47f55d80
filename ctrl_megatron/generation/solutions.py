"""First solutions of problems: drawn from a model, normalised, and judged in the sandbox."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from ctrl_megatron.data.rows import row_of_attempt
from ctrl_megatron.generation.chat import Chat
from ctrl_megatron.prompts import generation_messages, normalise_answer
from ctrl_megatron.rewards.grading import GradingJob, Judge, grading_job, request_verdict
from ctrl_megatron.types import Attempt, Problem, SamplingParams, Verdict

Fate = Literal["as written", "normalised", "unreadable", "no room"]
_REDRAWN = 1_000_003
"""Difference between the seeds of two rounds of draws."""


async def draw_first_solutions(
    chat: Chat, problems: Sequence[Problem], params: SamplingParams, *, redraws: int = 2
) -> list[tuple[Attempt, Fate]]:
    """``params.n`` attempts per problem, not judged yet, with the ids ``<problem id>/<number>``.

    An answer whose program ``extract_code`` does not find is normalised or, where it is unreadable,
    drawn again up to ``redraws`` times. ``no room`` marks a problem that leaves no room for
    ``params.max_tokens``; its solution is empty.
    """
    asked = [generation_messages(problem) for problem in problems]
    answers: dict[tuple[int, int], tuple[str, Fate]] = {}
    rows, names = list(range(len(problems))), params.prompt_names(len(problems))
    for turn in range(1 + redraws):
        # A draw depends only on its problem, its number and the round.
        seed = None if params.seed is None else params.seed + turn * _REDRAWN
        calls = [(0, asked)] if turn == 0 else [(row, [asked[row]]) for row in rows]
        drawn = await asyncio.gather(
            *(
                chat.complete(
                    part, replace(params, seed=seed, rows=names[first : first + len(part)])
                )
                for first, part in calls
            )
        )
        for row, group in zip(rows, (group for call in drawn for group in call), strict=True):
            if not group:
                answers |= {(row, number): ("", "no room") for number in range(params.n)}
            for number, answer in enumerate(group):
                if answers.get((row, number), ("", "unreadable"))[1] == "unreadable":
                    answers[row, number] = normalise_answer(answer.text)
        rows = sorted({row for (row, _), (_, fate) in answers.items() if fate == "unreadable"})
        if not rows:
            break
    return [
        (Attempt(id=f"{problem.id}/{number}", problem=problem, solution=text), fate)
        for row, problem in enumerate(problems)
        for number in range(params.n)
        for text, fate in [answers[row, number]]
    ]


def grading_job_of_attempt(attempt: Attempt) -> GradingJob:
    return grading_job(attempt.solution, row_of_attempt(attempt, ()), run_all_cases=True)


async def judge_attempts(
    judge: Judge,
    attempts: Sequence[Attempt],
    *,
    at_once: int = 32,
    advance: Callable[[], None] = lambda: None,
) -> list[tuple[Attempt, Verdict]]:
    """(attempt with its pass rate, verdict) of every attempt. Raises ``SandboxError``."""
    slots = asyncio.Semaphore(at_once)

    async def one(attempt: Attempt) -> tuple[Attempt, Verdict]:
        async with slots:
            verdict = await request_verdict(judge, grading_job_of_attempt(attempt))
        advance()
        return replace(attempt, pass_rate=verdict.pass_rate), verdict

    return list(await asyncio.gather(*(one(attempt) for attempt in attempts)))

"""First solutions of problems: drawn by an engine, judged in the sandbox."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from ctrl_megatron.data.rows import row_of
from ctrl_megatron.data.tokens import TextCodec
from ctrl_megatron.prompts import generation_messages
from ctrl_megatron.rewards.grading import Judge, grade, grading_job
from ctrl_megatron.rollout.engine import Engine
from ctrl_megatron.types import Attempt, Problem, SamplingParams, Verdict


async def first_solutions(
    engine: Engine, codec: TextCodec, problems: Sequence[Problem], params: SamplingParams
) -> list[Attempt]:
    """``params.n`` attempts per problem, not judged yet, called ``<problem id>/<number>``."""
    prompts = [
        codec.encode_chat(generation_messages(problem), add_generation_prompt=True)
        for problem in problems
    ]
    answers = await engine.generate(prompts, params)
    return [
        Attempt(
            id=f"{problem.id}/{number}", problem=problem, solution=codec.decode(answer.token_ids)
        )
        for problem, group in zip(problems, answers, strict=True)
        for number, answer in enumerate(group)
    ]


async def judge_attempts(
    judge: Judge,
    attempts: Sequence[Attempt],
    *,
    at_once: int = 32,
    advance: Callable[[], None] = lambda: None,
) -> list[tuple[Attempt, Verdict]]:
    """Every attempt with its pass rate filled in, and its verdict. Raises ``SandboxError``."""
    slots = asyncio.Semaphore(at_once)

    async def one(attempt: Attempt) -> tuple[Attempt, Verdict]:
        job = grading_job(attempt.solution, row_of(attempt), run_all_cases=True)
        async with slots:
            verdict = await grade(judge, job)
        advance()
        return replace(attempt, pass_rate=verdict.pass_rate), verdict

    return list(await asyncio.gather(*(one(attempt) for attempt in attempts)))

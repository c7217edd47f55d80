"""Rows of further tasks, made from rows of critiques, for runs that train on a mixture of tasks.

Source: Critique-Coder (arXiv 2509.22824), which mixes the judging of programs into the training of
a model that solves problems.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ctrl_megatron.data.rows import Row, require_columns
from ctrl_megatron.prompts import generation_messages, judging_messages

SOLVING, JUDGING = "solving", "judging"


def make_solving_rows(rows: Iterable[Row]) -> list[Row]:
    """New rows, one per problem of ``rows``, whose prompt asks for a program: ``code`` rewards it.
    They have no solution and no pass rate. UserError for a row without a problem."""
    problems = {row.problem_id: row for row in reversed(list(rows))}
    return [
        replace(
            row,
            id=f"{row.problem_id}/{SOLVING}",
            prompt=tuple(generation_messages(row.attempt().problem)),
            solution="",
            pass_rate=None,
            task=SOLVING,
            extra={},
        )
        for row in reversed(problems.values())
    ]


def make_judging_rows(rows: Iterable[Row]) -> list[Row]:
    """New rows, one per program of ``rows``, whose prompt asks whether it is correct: ``judgment``
    rewards the answer. UserError for a row without the share of tests that its program passes."""
    made = []
    for row in rows:
        require_columns([row], ("pass_rate",), "a row of judging")
        prompt = tuple(judging_messages(row.attempt().problem, row.solution))
        made.append(replace(row, id=f"{row.id}/{JUDGING}", prompt=prompt, task=JUDGING))
    return made

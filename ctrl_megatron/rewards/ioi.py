"""Olympiad problems: points per subtask, each worth its weakest test.

A sample's ``subtasks`` is a list (or its JSON) of ``{"points": 20, "tests": [0, 1, 2]}``, where
``tests`` counts the sample's stdin/stdout cases from 0. A test may belong to several subtasks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ctrl_megatron.prompts.code_block import FENCE
from ctrl_megatron.rewards.grading import GradingJob
from ctrl_megatron.rewards.samples import Sample, cases_of, time_limit_of
from ctrl_megatron.sandbox.wire import SubmitRequest, TestConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Subtask:
    """A group of tests that earns its points together."""

    points: float
    """Points for a full score, positive."""
    tests: tuple[int, ...]
    """Numbers of its tests, from 0; not empty."""


def ioi_score(subtasks: Sequence[Subtask], test_scores: Sequence[float]) -> float:
    """The sum over subtasks of points times the smallest score of the subtask's tests.

    ``test_scores`` lie in [0, 1], one per test of the problem. Raises ``ValueError`` for a subtask
    with a test that has no score.
    """
    total = 0.0
    for number, subtask in enumerate(subtasks):
        if not subtask.tests or max(subtask.tests) >= len(test_scores) or min(subtask.tests) < 0:
            raise ValueError(
                f"subtask {number} has tests {list(subtask.tests)}, but {len(test_scores)} tests "
                "were scored"
            )
        total += subtask.points * min(test_scores[test] for test in subtask.tests)
    return total


def subtasks_of(sample: Sample, tests: int) -> list[Subtask]:
    """The sample's subtasks over its ``tests`` tests. Raises ``ValueError`` naming the sample."""
    name, given = sample["id"], sample.get("subtasks")
    try:
        entries = json.loads(given) if isinstance(given, str) else given
        subtasks = [
            Subtask(points=float(e["points"]), tests=tuple(int(t) for t in e["tests"]))
            for e in entries or ()
        ]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"sample {name!r}: subtasks must be a list of {{points, tests}}: {error!r}"
        ) from error
    if not subtasks:
        raise ValueError(f"sample {name!r}: ioi_code needs the column subtasks, and it is empty")
    for subtask in subtasks:
        if not math.isfinite(subtask.points) or subtask.points <= 0:
            raise ValueError(f"sample {name!r}: a subtask's points must be positive")
        if not subtask.tests or not all(0 <= test < tests for test in subtask.tests):
            raise ValueError(
                f"sample {name!r}: a subtask names tests {list(subtask.tests)}; the sample has "
                f"tests 0 to {tests - 1}"
            )
    return subtasks


def ioi_job(text: str, sample: Sample, language: str, run_timeout: float) -> GradingJob:
    """How to judge an answer on every test. Raises ``ValueError`` for a sample that cannot be."""
    cases = cases_of(sample)
    subtasks_of(sample, len(cases))  # before anything runs
    language = sample.get("language") or language
    config = TestConfig(
        dataset_type="CommonOJDataset",
        language=language,
        run_timeout=time_limit_of(sample, run_timeout),
        provided_data={"test": cases},
        extra={"run_all_cases": True},
    )
    # The judge extracts the program; an answer without a fence is one block.
    completion = text if FENCE in text else f"{FENCE}{language}\n{text}\n{FENCE}"
    request = SubmitRequest(dataset="ioi", id=0, completion=completion, config=config)
    return GradingJob(request=request, total=len(cases))

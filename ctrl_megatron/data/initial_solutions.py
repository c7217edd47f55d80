"""First solutions by models, with a measured verdict per test: gzipped JSON lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from ctrl_megatron.data.problems import check_keys, read_json_lines
from ctrl_megatron.prompts import fenced
from ctrl_megatron.types import Attempt, Problem, Verdict

_KEYS = {
    "source": str,
    "model": str,
    "licence": str,
    "task_id": str,
    "prompt": str,
    "solution": str,
    "tests": list,
    "setup": str,
    "stub": list,
    "verdicts": list,
    "pass_rate": (int, float),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedSolution:
    """An attempt and what its tests said."""

    attempt: Attempt
    verdict: Verdict
    """``detail`` holds the file's own word for every test that did not pass, e.g. ``timeout``."""
    model: str
    """Who wrote the solution."""
    licence: str


def read_initial_solutions(path: str | PathLike[str]) -> list[JudgedSolution]:
    """All solutions of a ``.jsonl.gz`` file, in order; ids are ``source/task/model/n``.

    Raises ``ValueError`` naming file, line and key for anything that does not fit.
    """
    solutions: list[JudgedSolution] = []
    counts: Counter[str] = Counter()
    for place, record in read_json_lines(Path(path)):
        check_keys(record, _KEYS, place)
        if len(record["stub"]) != 1:
            raise ValueError(f"{place}: key 'stub' must name one function")
        if not record["tests"] or len(record["tests"]) != len(record["verdicts"]):
            raise ValueError(
                f"{place}: keys 'tests' and 'verdicts' must be equally long and not empty"
            )
        name = f"{record['source']}/{record['task_id']}/{record['model']}"
        solutions.append(_judged(record, f"{name}/{counts[name]}"))
        counts[name] += 1
    return solutions


def _judged(record: Mapping[str, Any], identity: str) -> JudgedSolution:
    problem = Problem(
        id=f"{record['source']}/{record['task_id']}",
        statement=record["prompt"],
        prompter_type="mbppplus",
        selected_uts=tuple(record["tests"]),
        entry_point=record["stub"][0],
        test_setup=record["setup"],
    )
    words = record["verdicts"]
    verdict = Verdict(
        passed=tuple(word == "pass" for word in words),
        total=len(words),
        detail=tuple("" if word == "pass" else word for word in words),
    )
    attempt = Attempt(
        id=identity,
        problem=problem,
        solution=fenced(record["solution"].strip()),
        pass_rate=verdict.pass_rate,
    )
    return JudgedSolution(
        attempt=attempt, verdict=verdict, model=record["model"], licence=record["licence"]
    )

"""Problems whose tests and references were checked, for the commands that prepare data."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ctrl_megatron.data.rows import row_of_attempt
from ctrl_megatron.errors import UserError
from ctrl_megatron.generation.checked_tests import (
    FILE,
    RowTestChecks,
    read_check_results,
    write_check_results,
)
from ctrl_megatron.metrics.display import count_progress_bar
from ctrl_megatron.preparation.stages import OpenJudge, open_sandbox
from ctrl_megatron.sandbox.cores import usable_cores
from ctrl_megatron.types import Attempt, Problem

_AT_ONCE = 4
"""Problems per processor that are checked at the same time."""


def select_judgeable_problems(
    problems: Sequence[Problem],
    source: Path,
    folder: Path,
    open_judge: OpenJudge = open_sandbox,
) -> tuple[list[Problem], list[str]]:
    """The problems on which programs can be judged, which know the tests that do not count, and for
    each other one its id and the reason.

    A check that was made for the folder of ``source``, the problems' file or folder, is not made
    again. The results are kept in ``folder``, where a run finds them beside the rows. A sandbox is
    opened only if a check is missing. Raises ``SandboxError`` where it fails.
    """
    rows = [
        replace(
            row_of_attempt(Attempt(id=problem.id, problem=problem, solution=""), ()),
            place=f"{folder / source.name}: row {number}",
        )
        for number, problem in enumerate(problems, start=1)
    ]
    beside = source if source.is_dir() else source.parent
    checks = RowTestChecks(rows, beside)
    if checks.missing:
        asyncio.run(_make(checks, open_judge))
    if beside.resolve() != folder.resolve():
        # The rows of a run have the keys of their problems.
        write_check_results(
            folder / FILE, read_check_results(folder / FILE) | checks.results_by_key()
        )
    kept, left_out = list[Problem](), list[str]()
    for problem, row in zip(problems, rows, strict=True):
        try:
            found = checks.result_of(row).remove_uncounted_from(row)
        except UserError:
            left_out.append(f"{problem.id}: {checks.result_of(row).fault}")
        else:
            kept.append(replace(problem, uncounted=found.uncounted))
    return kept, left_out


async def _make(checks: RowTestChecks, open_judge: OpenJudge) -> None:
    with count_progress_bar("the check of tests and references", len(checks.missing)) as advance:
        async with open_judge() as judge:
            await checks.run_missing_checks(
                judge, at_once=_AT_ONCE * usable_cores(), advance=advance
            )

"""The check of the rows' tests and references, before engines start and models are built.

Rank 0 makes the checks that nobody has made before, in a sandbox with all processors of its host or
at the configured one; the others wait and get the results.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from ctrl_megatron.config import Config
from ctrl_megatron.data.prompt_table import PromptTable
from ctrl_megatron.errors import ServiceFault, UserError
from ctrl_megatron.generation.checked_tests import RowTestChecks, TestCheckResult
from ctrl_megatron.metrics.display import count_progress_bar
from ctrl_megatron.parallel.waiting import WaitRules
from ctrl_megatron.rewards.build import code_judge
from ctrl_megatron.run.inputs import RunInputs, require_enough_rows
from ctrl_megatron.run.session import Session
from ctrl_megatron.sandbox import EmbeddedSandbox, SandboxClient, SandboxError
from ctrl_megatron.sandbox.cores import usable_cores
from ctrl_megatron.sandbox.kept import sandbox_options

_WHAT = "the check of tests and references"


def inputs_with_checked_tests(run: Session, inputs: RunInputs) -> RunInputs:
    """``inputs`` whose rows name the tests that do not count. Collective over all ranks.

    A row without a test that counts, or whose reference fails, is left out with
    ``data.bad_rows=drop``; else UserError names it. Raises ServiceFault where the sandbox fails.
    """
    config, first = run.config, run.all_ranks.is_first
    rows = [*inputs.train.rows, *(inputs.validation.rows if inputs.validation else ())]
    asking = [f for f in inputs.rewards.text_rewards.values() if f.runs_programs]
    rows = list({row.id: row for function in asking for row in function.filter_rows(rows)}.values())
    if not rows:
        return inputs
    if config.reward.provider != "local":
        if first:
            print(f"{_WHAT} is left out with reward.provider={config.reward.provider}", flush=True)
        return inputs
    reward = config.reward
    with ExitStack() as stack:
        work, checks = None, None
        if first:
            options = {"run_timeout": reward.run_timeout}
            options |= {"shared_process_graders": reward.shared_process_graders}
            checks = RowTestChecks(rows, Path(config.trainer.run_dir), options)
            work = _begun(run, checks, stack) if checks.missing else None
        waiting = WaitRules(groups=run.all_ranks, stop=run.stop, limit=math.inf)
        waiting.wait_together(work, _WHAT)
    results = run.all_ranks.broadcast_from_first(
        None if checks is None else checks.results_by_row()
    )
    assert results is not None
    drop, same = config.data.bad_rows == "drop", inputs.validation is inputs.train
    train = _checked("data.train_files", inputs.train, results, drop=drop, aloud=first)
    validation = train if same else inputs.validation
    if validation is not None and not same:
        validation = _checked("data.val_files", validation, results, drop=drop, aloud=first)
    if not same and len(train.rows) < len(inputs.train.rows):
        require_enough_rows(len(train.rows), train.dropped, len(train.bad), config)
    return inputs.with_tables(train, validation)


def _begun(run: Session, checks: RowTestChecks, stack: ExitStack) -> Future[None]:
    """The work that makes the missing checks; ``stack`` ends what it needs."""
    config, token = run.config, None
    endpoint = config.sandbox.endpoint or ""
    if not endpoint:
        token, workers = secrets.token_hex(32), config.sandbox.workers or usable_cores()
        # It ends with the thread that starts it.
        sandbox = EmbeddedSandbox.start(workers=workers, token=token, **sandbox_options(config))
        stack.callback(sandbox.stop)
        run.at_end.append(sandbox.stop)
        endpoint = sandbox.endpoint
    judge = code_judge(config, endpoint, token)
    assert isinstance(judge, SandboxClient)
    stack.callback(lambda: run.background.run_before_close(judge.close()))
    advance = stack.enter_context(count_progress_bar(_WHAT, len(checks.missing)))

    async def make() -> None:
        try:
            await checks.run_missing_checks(judge, at_once=_at_once(config), advance=advance)
        except SandboxError as error:
            raise ServiceFault(str(error)) from error

    return run.background.submit(make())


def _at_once(config: Config) -> int:
    return min(config.reward.max_requests, 4 * usable_cores())


def _checked(
    key: str,
    table: PromptTable,
    found: Mapping[str, TestCheckResult],
    *,
    drop: bool,
    aloud: bool,
) -> PromptTable:
    kept, bad = list[int](), list[str]()
    rows = list(table.rows)
    for number, row in enumerate(table.rows):
        try:
            rows[number] = found.get(row.id, TestCheckResult()).remove_uncounted_from(
                row, log=aloud
            )
            kept.append(number)
        except UserError as error:
            if not drop:
                raise
            bad.append(str(error))
    left = table.of_rows([rows[number] for number in kept])
    if not kept or not all(left.sets.values()):
        raise UserError(f"no row is left to use, the last because {bad[-1]}", key=key)
    return replace(left, bad=(*table.bad, *bad))

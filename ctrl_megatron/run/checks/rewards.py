"""Checks of the reward functions: what they are made of, and the rows that they reward."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ctrl_megatron.config import Config
from ctrl_megatron.config.algorithm import ADV_ESTIMATORS
from ctrl_megatron.data.rows import CRITIQUE, Row, require_columns
from ctrl_megatron.errors import UserError, convert_input_errors, raise_all
from ctrl_megatron.rewards.build import code_judge, options_without_judge
from ctrl_megatron.rewards.grading import SHARED_PROCESS, has_graders
from ctrl_megatron.rewards.plan import OF_CRITIQUES, RewardPlan, plan_rewards
from ctrl_megatron.rewards.registry import make_reward

_log = logging.getLogger(__name__)


def check_rewards(config: Config) -> None:
    """Raise ``UserError`` for a wrong name, option or import path of a reward function, and for a
    missing key, package or file of the judge. Needs no service.
    """
    key = "reward.provider" if config.reward.provider != "local" else "sandbox"
    key = "sandbox.token_file" if key == "sandbox" and config.sandbox.token_file else key
    problems = []
    for name, check in (
        ("reward.reward_funcs", lambda: _make_all(plan_rewards(config))),
        (key, lambda: code_judge(config, config.sandbox.endpoint or "http://127.0.0.1")),
    ):
        try:
            with convert_input_errors(name):
                check()
        except UserError as error:
            problems.append(error)
    raise_all(problems)


def inert_reward_warnings(config: Config) -> list[str]:
    """A warning for rewards that train as ``critic`` alone does, because all critiques of a group
    are about one first solution (docs/rewards.md, "Judgment, delta and transition")."""
    algorithm, stages = config.algorithm, config.reward.stages
    used = {name for name, planned in plan_rewards(config).functions.items() if planned.weight}
    used |= {name for stage in stages for name, weight in stage.weights.items() if weight}
    if config.reward.judge.gate is not None:
        return []
    whole = {"gae", "reinforce_plus_plus", "remax"}
    in_group = algorithm.adv_estimator in {*ADV_ESTIMATORS} - whole
    if "delta" in used and used <= {"critic", "delta"} and in_group:
        return [
            "warning: within the critiques of one first solution the reward delta differs from "
            f"critic by a constant, which algorithm.adv_estimator={algorithm.adv_estimator} takes "
            "off again: this run trains as one with critic alone"
        ]
    divided = algorithm.adv_estimator == "gdpo" or (
        algorithm.adv_estimator == "grpo" and algorithm.norm_adv_by_std_in_grpo
    )
    table = config.reward.transition
    rises = table.wrong_to_right > table.wrong_to_wrong
    rises = rises and table.right_to_right > table.right_to_wrong
    if used == {"transition"} and divided and rises:
        return [
            "warning: within the critiques of one first solution reward.transition has one value "
            "where the revision passes and one where it fails, and the division by the group's "
            "deviation makes them those of critic with reward.run_all_cases=false; set "
            "algorithm.norm_adv_by_std_in_grpo=false to let the table weigh groups"
        ]
    return []


def _make_all(plan: RewardPlan) -> None:
    """Make every function but ``critic``, so that mistakes in options are found."""
    for name, planned in plan.text_rewards.items():
        if name != "critic":
            make_reward(name, **options_without_judge(name), **planned.options)


def check_rows_rewardable(plan: RewardPlan, rows: Sequence[Row]) -> None:
    """Raise ``UserError`` for a row without a value in a column that a function reads, for a
    row of another task that a function for critiques would reward, for a task that nothing
    rewards, and for a task that no row has. Warns of rows with ``grader_files``.
    """
    present = dict.fromkeys(row.task for row in rows)
    for name, function in plan.functions.items():
        mine = function.filter_rows(rows)
        if unknown := [task for task in function.tasks or () if task not in present]:
            raise UserError(
                f"names the task {unknown[0]!r}, and the rows have {', '.join(present)}",
                key=f"reward.reward_tasks.{name}",
                remedy="name tasks of the rows (their column 'task')",
            )
        other = next((row for row in mine if row.task != CRITIQUE), None)
        if name in OF_CRITIQUES and other is not None:
            raise UserError(
                f"{other.place or f'row {other.id!r}'} has the task {other.task!r}, and "
                f"{name} rewards critiques by their revisions",
                key=f"reward.reward_tasks.{name}",
                remedy=f"set it to [{CRITIQUE}]",
            )
        require_columns(mine, function.reads, f"the reward {name}")
        shared = [row.id for row in mine if has_graders(row)]
        if function.runs_programs and shared:
            text = "%s: the grader_files of %d rows (%s, ...) %s"
            _log.warning(text, name, len(shared), shared[0], SHARED_PROCESS)
    for step, weights in plan.weights_by_stage.items():
        counted = [plan.functions[name].tasks for name, weight in weights.items() if weight]
        for task in present if counted else ():
            if any(tasks is None or task in tasks for tasks in counted):
                continue
            raise UserError(
                f"no function of a weight other than 0 rewards the task {task!r} from step "
                f"{step} on",
                key="reward.reward_tasks",
                remedy="name the task there, or leave its rows out",
            )

"""The sandbox runs while log-probs are computed, and its verdicts become token rewards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import in_process
from tiny_run import REPOSITORY

from ctrl_megatron.data.rows import row_of_attempt, write_rows
from ctrl_megatron.preparation.problem_files import read_problems
from ctrl_megatron.types import Attempt, Problem

# A busy machine may be several times slower than an idle one.
pytestmark = pytest.mark.timeout(900)

LOST = "# never comes back"
YES, NO, NONE = "Overall judgment: Correct", "Overall judgment: Incorrect", "It looks fine."
SLEEPY = "import time\ntime.sleep(1.5)\n"


@pytest.fixture(scope="module")
def judged(actor_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Nine critiques of three problems; what the nodes made of them."""
    problems = read_problems(REPOSITORY / "examples/problems")[:3]
    data = tmp_path_factory.mktemp("rows") / "train.parquet"
    attempts = [Attempt(id=p.id, problem=p, solution="pass", pass_rate=0.0) for p in problems]
    write_rows(data, [row_of_attempt(attempt) for attempt in attempts])
    right = [problem.reference for problem in problems]
    wrong = [problem.buggy[0] for problem in problems]
    written = [
        (0, f"Good. {YES}", SLEEPY + right[0]),
        (0, f"Bad. {NO}", wrong[0]),
        (0, NONE, right[0]),
        (1, f"Not quite right, look at the sign. {NO}", SLEEPY + right[1]),
        (1, f"{YES}", right[1] + LOST),
        (1, f"Well done. {YES}", "def nothing(:"),
        (2, f"{NO}", right[2]),
        (2, f"So so. {NO}", right[2]),
        (2, NONE, wrong[2]),
    ]
    rows = [
        {
            "uid": f"group{n}",
            "row_id": problems[n].id,
            "prompt": problems[n].statement,
            "critique": critique,
            "revision": f"```python\n{program}\n```",
        }
        for n, critique, program in written
    ]
    family = "actor_rollout_ref"
    overrides = [
        *(f"data.train_files={data}", "data.val_files=[]", f"{family}.model.path={actor_path}"),
        *(f"{family}.model.dtype=float32", f"{family}.rollout.name=hf"),
        # A second optimizer step on the batch needs the log-probs from before the first.
        f"{family}.actor.ppo_epochs=2",
    ]
    found = in_process("judge_beside_log_probs", overrides=overrides, rows=rows, lost=LOST)
    return {**found, "wrong": _share(wrong[0], problems[0])}


def _share(program: str, problem: Problem) -> float:
    """The pass rate of a program, found without a sandbox."""
    space: dict[str, Any] = {}
    exec(program, space)
    passed = [bool(eval(test.removeprefix("assert "), space)) for test in problem.selected_uts]
    return sum(passed) / len(passed)


def test_the_sandbox_overlaps_the_log_probs(judged: dict[str, Any]) -> None:
    phases = {phase["name"]: phase for phase in judged["phases"]}
    sandbox, wait = phases["sandbox"], phases["wait_sandbox"]
    for name in ("old_log_prob", "ref_log_prob"):
        # The background thread may get its first turn a little after the main thread goes on.
        assert sandbox["start"] < phases[name]["end"] < sandbox["end"]
    assert sandbox["kind"] == "host" and phases["old_log_prob"]["kind"] == "main"
    # The main thread only waits once there is nothing left to compute.
    assert wait["start"] >= phases["ref_log_prob"]["end"]


def test_rewards_sit_on_the_last_valid_token(judged: dict[str, Any]) -> None:
    scores, before = judged["token_level_scores"], judged["mask_before"]
    expected = [1.0, judged["wrong"], 0.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0]
    assert 0 < judged["wrong"] < 1
    assert scores.sum(dim=1).tolist() == pytest.approx(expected)
    for row, reward in enumerate(expected):
        last = int(before[row].sum()) - 1
        assert scores[row, last].item() == pytest.approx(reward)
        assert torch.count_nonzero(scores[row]).item() == (reward > 0)


def test_invalid_critiques_never_reach_the_sandbox(judged: dict[str, Any]) -> None:
    # Nine rows, two without a judgment, and rows 6 and 7 share one program.
    assert len(judged["programs"]) == 6 and len(set(judged["programs"])) == 6
    assert judged["requests"] == 5
    # The rate counts the eight samples that were judged.
    assert judged["metrics"]["reward/cached_rate"] == pytest.approx(1 / 8)


def test_a_fault_of_the_service_masks_its_row_out(judged: dict[str, Any]) -> None:
    mask, before, uids = judged["response_mask"], judged["mask_before"], judged["uid"]
    for row in range(9):
        assert torch.equal(mask[row], torch.zeros_like(mask[row]) if row == 4 else before[row])
    assert uids[3] == uids[5] == "group1" and uids.count(uids[4]) == 1
    assert "fell over" in judged["detail"][4]
    metrics = judged["metrics"]
    # Seven critiques have a program to judge.
    assert metrics["reward/judged_rate"] == pytest.approx(6 / 7)
    assert metrics["reward/masked_rate"] == pytest.approx(1 / 9)
    assert metrics["reward/mean"] == pytest.approx((4.0 + judged["wrong"]) / 8)
    # Six rows with a judgment were judged.
    assert metrics["pass_rate/after"] == pytest.approx((4.0 + judged["wrong"]) / 6)


def test_actor_and_reference_agree_exactly(judged: dict[str, Any]) -> None:
    assert torch.equal(judged["old_log_probs"], judged["ref_log_prob"])
    assert (judged["old_log_probs"][judged["mask_before"]] < 0).all()

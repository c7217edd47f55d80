"""Pipelines other than CTRL's: GRPO on completions, and one of a foreign shape."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from forked_run import run_forked
from launched_run import Job

from ctrl_megatron.metrics import read_json_lines

pytestmark = pytest.mark.timeout(900)

GRPO = (
    "dag.custom_pipeline_fn=ctrl_megatron.pipeline:grpo_pipeline",
    "reward.reward_funcs=[foreign_pipeline:brevity]",
)
NOBODY_REVISES = (
    "actor_rollout_ref.proxy.model.path",
    "actor_rollout_ref.rollout.revision_max_tokens",
)
UNREAD = (*NOBODY_REVISES, "sandbox.workers")
"""The graph has no node that revises or rewards."""
DAPO = (
    *("algorithm.filter_groups.enable=true", "data.gen_batch_size=6"),
    "actor_rollout_ref.rollout.n=4",
)


@pytest.mark.parametrize(
    "extra", [(), pytest.param(DAPO, marks=pytest.mark.long)], ids=["grpo", "dapo"]
)
def test_completions_are_rewarded_by_a_function_of_ones_own(
    job: Job, extra: tuple[str, ...]
) -> None:
    name = "grpo_dapo" if extra else "grpo"
    validation = (f"data.val_files={job.data}", "data.val_batch_size=4")
    given = (*GRPO, *extra, *validation)
    run = run_forked(job, name, steps=3, extra=given, without=NOBODY_REVISES, draws=True)
    assert run.codes == (0, 0), run.output[-8000:]
    steps = [record["metrics"] for record in run.metrics()]
    trained = [step for step in steps if "actor/grad_norm" in step]
    assert len(trained) == 3 and all(step["actor/grad_norm"] > 0 for step in trained)
    assert all(0 < step["reward/mean"] < 1 for step in trained)
    assert not any(key.startswith(("critique/", "revision/")) for key in trained[0])
    table = json.loads((run.folder / "summary.json").read_text())["table"]
    assert table[-1]["stage"] == "after RL"
    assert 0 < table[-1]["reward/foreign_pipeline:brevity"] < 1
    assert (run.folder / "report.html").is_file()


def test_weights_reach_the_engine_without_a_node_for_it_and_through_a_medium_of_ones_own(
    job: Job,
) -> None:
    """Checksums of every push are compared (``trainer.verify_weight_sync``)."""
    own = (
        "dag.custom_pipeline_fn=foreign_pipeline:build_without_sync",
        "actor_rollout_ref.rollout.weight_transport=file_sender:FileSender",
        # Several buckets, so that both files are used again.
        *("actor_rollout_ref.rollout.update_bucket_megabytes=1", "trainer.verify_weight_sync=true"),
        "actor_rollout_ref.actor.use_kl_loss=false",
    )
    run = run_forked(job, "no_sync", steps=3, extra=own, without=UNREAD)
    assert run.codes == (0, 0), run.output[-8000:]
    drawn_by = [example["version"] for example in read_json_lines(run.folder / "examples.jsonl")]
    assert drawn_by == ["actor@0", "actor@1", "actor@2"]
    gaps = [record["metrics"]["rollout/probs_diff_mean"] for record in run.metrics()]
    assert len(gaps) == 3 and max(gaps) < 1e-4
    folders = re.findall(r"weights go through (\S*?file-sender-\w{8})", run.output)
    # One push before each step, by two ranks.
    assert len(folders) == 6 and len(set(folders)) == 3
    assert not any(Path(folder).exists() for folder in folders)


def test_a_pipeline_of_a_foreign_shape_runs_is_reported_saved_and_resumed(job: Job) -> None:
    own = (
        "dag.custom_pipeline_fn=foreign_pipeline:build",
        "actor_rollout_ref.actor.use_kl_loss=false",
        "actor_rollout_ref.actor.policy_loss=foreign_ratio",
        "actor_rollout_ref.actor.policy_loss_options.sharpness=0.5",
        "dag.options={vowel_weight: 0.25}",
    )
    runs = {}
    for name, stops in (("foreign", (4,)), ("foreign_stopped", (2, 4))):
        for steps in stops:
            run = run_forked(job, name, steps=steps, extra=own, without=UNREAD, draws=steps == 4)
            assert run.codes == (0, 0), run.output[-8000:]
        runs[name] = [record["metrics"] for record in run.metrics()]
        report = (run.folder / "report.html").read_text()
        # The report draws the logged metrics, and no reward, because there is none.
        assert "Foreign: vowels" in report and "Foreign: short" in report
        assert ">Reward<" not in report
        assert (run.folder / "checkpoints/global_step_4/trainer_state.json").is_file()
    assert len(runs["foreign"]) == 4
    assert all(math.isfinite(value) for step in runs["foreign"] for value in step.values())
    assert runs["foreign"][0]["actor/grad_norm"] > 0
    for step in runs["foreign"]:
        # The loss and the pipeline were called with their options from the configuration.
        assert step["actor/pg_clipfrac_lower"] == pytest.approx(0.5, rel=1e-6)
        assert step["foreign/vowel_weight"] == 0.25
    # No node requires a sandbox, so none is started whose programs could be suspended.
    assert not any("sandbox/isolation" in step for step in runs["foreign"])
    for whole, stopped in zip(runs["foreign"], runs["foreign_stopped"], strict=True):
        for name in ("foreign/short", "foreign/vowels", "actor/loss", "actor/grad_norm"):
            assert stopped[name] == pytest.approx(whole[name], rel=1e-6), name

"""The example of an agent in a simulated world, as a user starts it."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked_run import run_forked
from launched_run import Job

from examples import embodied

PIPELINE = (
    "dag.custom_pipeline_fn=ctrl_megatron.pipeline:embodied_srpo_pipeline",
    "dag.options={environment: examples.embodied:GridWorld, embedding: examples.embodied:embed, "
    "turns: 8, turn_tokens: 1, upper: 0.9}",
    *("data.max_prompt_length=16", "data.max_response_length=96", "data.train_batch_size=8"),
    *("actor_rollout_ref.actor.ppo_mini_batch_size=8", "actor_rollout_ref.rollout.n=8"),
)
UNREAD = (
    *("actor_rollout_ref.proxy.model.path", "actor_rollout_ref.rollout.revision_max_tokens"),
    "sandbox.workers",
)


@pytest.mark.long
def test_three_steps_in_the_world(tmp_path: Path) -> None:
    embodied.main(tmp_path)
    model = tmp_path / "model"
    job = Job(actor=model, proxy=model, data=tmp_path / "train.parquet", folder=tmp_path / "runs")
    done = run_forked(job, "embodied", steps=3, extra=PIPELINE, without=UNREAD)
    assert done.codes == (0, 0), done.output[-8000:]
    trained = [record["metrics"] for record in done.metrics()]
    assert len(trained) == 3
    for metrics in trained:
        assert metrics["actor/grad_norm"] > 0 and 0 < metrics["embodied/success_rate"] < 1
        assert 0 < metrics["embodied/progress"] < 0.6
        # Every answer is one token, and the rest of an episode is read.
        assert metrics["response/length"] == metrics["episode/turns"] > 1
        assert metrics["rollout/probs_diff_max"] < 1e-3
        assert 0 < metrics["filter/embodied_sampling"] <= 1

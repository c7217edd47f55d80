"""Runs that draw the critiques of the next two steps while a step trains."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from forked_run import ForkedRun, run_forked
from launched_run import Job

from ctrl_megatron.checkpoint.store import DRAWN_AHEAD
from ctrl_megatron.data.tokens import TextCodec
from ctrl_megatron.metrics import read_json_lines
from ctrl_megatron.steps.sample import completion_from_state, weight_versions_text

# A busy machine may be several times slower than an idle one.
pytestmark = pytest.mark.timeout(900)

AHEAD = (
    "actor_rollout_ref.rollout.staleness=2",
    "actor_rollout_ref.rollout.placement=dedicated",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
    "algorithm.rollout_correction.rollout_is=token",
    "trainer.save_freq=1",
)
SAME = (
    *("actor/loss", "actor/grad_norm", "critique/length", "reward/mean", "rollout/staleness"),
    *("rollout/is_mean", "rollout/kl"),
)
STEPS = 4


def numbers(run: ForkedRun) -> dict[int, dict[str, float]]:
    """By step, without the lines of validations."""
    steps = [record for record in run.metrics() if "actor/loss" in record["metrics"]]
    return {record["step"]: {name: record["metrics"][name] for name in SAME} for record in steps}


@pytest.mark.long
def test_a_step_trains_on_samples_of_older_weights_and_a_resumed_run_on_the_same(
    job: Job, tmp_path: Path
) -> None:
    validated = (*AHEAD, f"data.val_files={job.data}", "trainer.test_freq=2")
    whole = run_forked(job, "ahead", steps=STEPS, extra=validated)
    assert whole.codes == (0, 0), whole.output[-6000:]
    assert [known["rollout/staleness"] for known in numbers(whole).values()] == [0.0, 1.0, 2.0, 1.0]
    # Fresh samples need no correction; older ones were drawn by other probabilities.
    drift = [known["rollout/kl"] for known in numbers(whole).values()]
    assert min(drift[1:]) > 10 * abs(drift[0])
    # The critiques' engine calls are 1, 3 and 4, the revisions' 2, 5 and 6: the stop reaches the
    # third step while it revises.
    stopped = run_forked(
        job, "stopped_ahead", steps=STEPS, extra=AHEAD, phases=tmp_path / "one", stop_at=6
    )
    assert stopped.codes == (130, 130), stopped.output[-6000:]
    assert re.search(r"the state after step 2 is saved", stopped.output), stopped.output[-3000:]
    shutil.copytree(job.folder / "stopped_ahead", job.folder / "on_one_rank")
    expected = numbers(whole)
    for name, ranks in (("stopped_ahead", 2), ("on_one_rank", 1)):
        here = (*AHEAD, f"trainer.n_gpus_per_node={ranks}")
        resumed = run_forked(job, name, steps=STEPS, extra=here, ranks=ranks)
        assert resumed.codes == (0,) * ranks, resumed.output[-6000:]
        for step, found in numbers(resumed).items():
            assert found == pytest.approx(expected[step], rel=1e-6), (name, step)
        assert sorted(numbers(resumed)) == [1, 2, 3, 4]


@pytest.mark.long
def test_a_resumed_run_replays_the_texts_that_updates_in_flight_met(
    job: Job, tmp_path: Path
) -> None:
    extra = (*AHEAD, "actor_rollout_ref.rollout.update_in_flight=true")
    stopped = run_forked(
        job, "in_flight", steps=STEPS, extra=extra, phases=tmp_path / "phases", stop_at=6
    )
    assert stopped.codes == (130, 130), stopped.output[-6000:]
    newest = max(stopped.folder.glob("checkpoints/global_step_*"), key=lambda p: p.name)
    state = json.loads((newest / "trainer_state.json").read_text())[DRAWN_AHEAD]
    codec, drawn = TextCodec(job.actor), dict[int, set[tuple[str, str]]]()
    for draw in state["draws"]:
        every = [completion_from_state(one) for group in draw["groups"] for one in group]
        drawn[draw["step"] + 1] = {
            (codec.decode(one.token_ids), f"critique by {weight_versions_text(one)}")
            for one in every
        }
    assert drawn, "the stop left nothing to replay"
    resumed = run_forked(job, "in_flight", steps=STEPS, extra=extra)
    assert resumed.codes == (0, 0), resumed.output[-6000:]
    assert sorted(numbers(resumed)) == [1, 2, 3, 4]
    shown = read_json_lines(resumed.folder / "examples.jsonl")
    for step, saved in drawn.items():
        found = [example for example in shown if example["step"] == step]
        assert found
        for example in found:
            critique, _, _ = example["versions"].partition(", revision")
            assert (example["critique"], critique) in saved

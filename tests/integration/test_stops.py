"""A run is asked to stop at many places of its life: it ends soon, keeps every finished step and
leaves nothing behind.

``tests/commands/test_start.py`` has the stops while ranks meet and before a restart.
"""

from __future__ import annotations

import re
import time

import pytest
from launched_run import Job

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

STEPS = 3
WITHIN = 30.0
"""Seconds from the signal to the end of every process, on an idle machine."""
PLACES = {
    # what the run is doing -> the function whose call asks for the stop, and which call of it
    "before the ranks meet": "ctrl_megatron.parallel.meeting:agree_on_meeting_name 1",
    "after they have met": "ctrl_megatron.run.session:RunLock.acquire 1",
    "services start": "ctrl_megatron.rollout.fleet:Services.start 1",
    "services come up": "ctrl_megatron.rollout.fleet:Services.wait 1",
    "models are built": "ctrl_megatron.run.train:build_worker 1",
    "the checkpoint is looked for": "ctrl_megatron.checkpoint.store:CheckpointStore.load_newest 1",
    "validation before training": "ctrl_megatron.run.loop:TrainingLoop._validate 1",
    "the first push begins": "ctrl_megatron.resharding.device:push 1",
    "inside the first push": "ctrl_megatron.resharding.push:ChunkQueue.put 2",
    "the end of a push": "ctrl_megatron.resharding.push:ChunkQueue.finish 4",
    "inside a later push": "ctrl_megatron.resharding.push:ChunkQueue.put 20",
    "engines wake": "ctrl_megatron.resharding.device:DeviceOwner._wake 5",
    "engines go to sleep": "ctrl_megatron.resharding.device:DeviceOwner.free_for_trainer 9",
    "critiques are drawn": "ctrl_megatron.steps.ctrl:generate_critiques 2",
    "an engine generates": "ctrl_megatron.rollout.client:RemoteEngine.generate 4",
    "programs are judged": "ctrl_megatron.rewards.reward_sum:RewardSum.score 2",
    "the first update begins": "ctrl_megatron.run.loop:TrainingLoop._before_update 1",
    "inside an update": "ctrl_megatron.models.parallel_model:ParallelModel.step 2",
    "the step's weights are new": "ctrl_megatron.run.loop:TrainingLoop._snapshot 3",
    "a step is recorded": "ctrl_megatron.record.recorder:Recorder.end_step 2",
    "a save begins": "ctrl_megatron.checkpoint.store:CheckpointStore.save 2",
    "inside a save": "ctrl_megatron.checkpoint.store:CheckpointStore._write 2",
    "validation between steps": "ctrl_megatron.run.loop:TrainingLoop._validate 2",
    "the report is written": "ctrl_megatron.record.recorder:Recorder.close 1",
}


@pytest.mark.parametrize("place", PLACES)
def test_a_stop_at_any_place_ends_the_run_and_loses_no_step(job: Job, place: str) -> None:
    extra = (
        *("trainer.save_freq=1", "trainer.test_freq=1", "trainer.val_before_train=true"),
        *(f"data.val_files=[{job.data}]", "trainer.async_save=true"),
        "actor_rollout_ref.actor.megatron.param_offload=true",
        "actor_rollout_ref.rollout.update_bucket_megabytes=1",
    )
    name, at = "stopped_" + re.sub(r"\W", "_", place), PLACES[place]
    with job.launch(name, steps=STEPS, extra=extra, preloaded=True, own=True, stopped_at=at) as run:
        run.wait_for(lambda: run.log.is_file() and "stop asked at" in run.output())
        asked = time.monotonic()
        code = run.ends(WITHIN)
        while run.look() and time.monotonic() < asked + WITHIN:
            time.sleep(0.1)
        print(f"{place}: gone {time.monotonic() - asked:.1f} s after the signal")
        assert run.look() == [], run.output()[-8000:]
        assert run.shared_memory() == []
    # A run that was asked too late has done its work, but its launcher was stopped.
    done = place == "the report is written"
    assert code == 130 or (done and code == 0), run.output()[-8000:]
    assert "Traceback" not in run.output(), run.output()[-8000:]
    recorded = [record["step"] for record in run.metrics() if "time/step" in record["metrics"]]
    saved = [
        int(path.parent.name.rpartition("_")[2])
        for path in run.folder.glob("checkpoints/global_step_*/trainer_state.json")
    ]
    assert max(saved, default=0) == max(recorded, default=0), run.output()[-8000:]
    assert not done or max(saved) == STEPS

"""A run is asked to stop at twenty moments of its life: it ends soon and keeps every finished
step.
"""

from __future__ import annotations

import os
import signal
import time

import pytest
from launched_run import Job

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

MOMENTS, STEPS = 20, 4
WITHIN = 30.0
"""Seconds from the signal to the end of every process."""


@pytest.fixture(scope="module")
def whole_seconds(job: Job) -> float:
    """The duration of a run that nobody stops."""
    begin = time.monotonic()
    with job.launch("unstopped", steps=STEPS) as run:
        assert run.ends() == 0, run.output()[-8000:]
    return time.monotonic() - begin


@pytest.mark.parametrize("moment", range(MOMENTS))
def test_a_stop_at_any_moment_ends_the_run_and_loses_no_step(
    job: Job, whole_seconds: float, moment: int
) -> None:
    with job.launch(f"stopped_{moment}", steps=STEPS) as run:
        time.sleep(whole_seconds * (moment + 0.5) / MOMENTS)
        run.look()
        if run.process.poll() is None:
            os.kill(run.process.pid, signal.SIGTERM)
        asked = time.monotonic()
        run.ends(WITHIN)
        while run.look() and time.monotonic() < asked + WITHIN:
            time.sleep(0.1)
        print(f"gone {time.monotonic() - asked:.1f} s after the signal")
        assert run.look() == [], run.output()[-8000:]
        assert run.shared_memory() == []
        recorded = [record["step"] for record in run.metrics()]
        saved = [
            int(path.parent.name.rpartition("_")[2])
            for path in run.folder.glob("checkpoints/global_step_*/trainer_state.json")
        ]
        assert max(saved, default=0) == max(recorded, default=0), run.output()[-8000:]

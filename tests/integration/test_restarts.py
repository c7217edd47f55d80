"""A rank or the launcher is killed; after a new start of all ranks the run ends as if nothing had
happened.
"""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
from launched_run import Job, Run
from test_resume import assert_same_steps

# A busy machine may be several times slower than an idle one.
pytestmark = pytest.mark.timeout(900)


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["own", "torchrun"])
def test_ranks_come_back_after_one_was_killed(job: Job, whole_run: Run, launcher: str) -> None:
    own, name = launcher == "own", f"restarted_by_{launcher}"
    saving = ("trainer.save_freq=1",)
    with job.launch(name, steps=4, extra=saving, preloaded=True, restarts=2, own=own) as run:
        run.wait_for_steps(2)
        engine = run.find(r"^engine")
        run.rank(1).kill()
        run.wait_for(lambda: "continuing from" in run.output())
        # The new ranks have a new engine, and the old one is gone.
        assert not engine.is_running()
        assert run.ends() == 0, run.output()[-8000:]
        assert run.look() == [] and run.shared_memory() == []
    start = re.search(r"continuing from \S+ after step (\d+)", run.output())
    assert start and int(start[1]) >= 1
    assert [r["step"] for r in run.metrics()][-1] == 4
    assert_same_steps(run, whole_run)
    if own:
        told = (
            r"train_rl: rank 1 was killed by signal 9; restart 1 of at most 2 from the checkpoint"
        )
        assert len(re.findall(told, run.output())) == 1


@pytest.mark.long
def test_nothing_outlives_the_commands_launcher_and_the_same_command_goes_on(
    job: Job, whole_run: Run
) -> None:
    saving = ("trainer.save_freq=1",)
    with job.launch("orphaned", steps=4, extra=saving, preloaded=True, own=True) as run:
        run.wait_for_steps(2)
        assert len(run.look()) >= 4  # two ranks, an engine and a sandbox
        os.kill(run.process.pid, signal.SIGKILL)
        killed = time.monotonic()
        run.process.wait(10)
        while run.look() and time.monotonic() < killed + 30:
            time.sleep(0.1)
        print(f"gone {time.monotonic() - killed:.1f} s after the launcher")
        assert run.look() == [] and run.shared_memory() == []
    with job.launch("orphaned", steps=4, extra=saving, preloaded=True, own=True) as again:
        assert again.ends() == 0, again.output()[-8000:]
    assert "continuing from" in again.output()
    assert sorted({record["step"] for record in again.metrics()}) == [1, 2, 3, 4]
    assert_same_steps(again, whole_run)

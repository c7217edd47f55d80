"""A rank is killed; its launcher starts all ranks again, and the run ends as if nothing had
happened.
"""

from __future__ import annotations

import re

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

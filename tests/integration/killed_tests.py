"""Tests that ``test_killed_tests.py`` runs and kills; no other run collects them."""

from __future__ import annotations

import os
from pathlib import Path

from launched_run import Job


def test_the_ranks_start(job: Job) -> None:
    """The ranks import or meet: nobody watches them yet."""
    with job.launch("starting", steps=10_000) as run:
        run.wait_for(lambda: len(run.look()) >= 2)
        Path(os.environ["READY_FILE"]).touch()
        run.ends()


def test_a_step(job: Job) -> None:
    with job.launch("stepping", steps=10_000, preloaded=True) as run:
        run.wait_for_steps(1)
        Path(os.environ["READY_FILE"]).touch()
        run.ends()

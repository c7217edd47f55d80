"""Models, data and one uninterrupted run that the tests of this folder share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from launched_run import Job, Run
from tiny_run import JUDGMENTS, PROGRAM, chain_model, smollm2, write_problems

# Several threads of one process are slower than one where others compute as well.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm2_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real model's directory, the same for all of xdist's workers."""
    own = tmp_path_factory.getbasetemp()
    return smollm2(own.parent if "PYTEST_XDIST_WORKER" in os.environ else own)


@pytest.fixture(scope="session")
def actor_path(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny critic that keeps the format about every second time."""
    return chain_model(tmp_path_factory.mktemp("tiny") / "actor", smollm2_path, JUDGMENTS, 0.8)


@pytest.fixture(scope="session")
def job(actor_path: Path, smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Models and data of a run of a few seconds; the recorded runs of ``golden_runs`` use them."""
    folder = tmp_path_factory.mktemp("runs")
    proxy = chain_model(folder / "proxy", smollm2_path, [PROGRAM], 0.9)
    data = write_problems(folder / "train.parquet")
    return Job(actor=actor_path, proxy=proxy, data=data, folder=folder / "runs")


@pytest.fixture(scope="session")
def whole_run(job: Job) -> Run:
    """A finished run of four steps."""
    with job.launch("whole", steps=4) as run:
        assert run.ends() == 0, run.output()[-8000:]
    return run

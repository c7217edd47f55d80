"""Profiled steps leave a trace of all ranks, of the phases that the step's metrics report."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from forked_run import run_forked
from launched_run import Job

from ctrl_megatron.config import load_config
from ctrl_megatron.errors import UserError
from ctrl_megatron.run.checks.machine import check_profile

pytestmark = pytest.mark.timeout(600)


def test_a_profiled_step(job: Job) -> None:
    extra = ("trainer.profile_steps=[2]", "trainer.profile_torch=true")
    run = run_forked(job, "profiled", steps=2, extra=extra)
    assert run.codes == (0, 0), run.output[-8000:]
    folder = run.folder / "profile"
    names = ["step_2.json", "step_2.rank_0.torch.json", "step_2.rank_1.torch.json"]
    assert sorted(path.name for path in folder.iterdir()) == names
    trace = json.loads((folder / "step_2.json").read_text())
    events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert {e["pid"] for e in events} == {0, 1} and trace["otherData"] == {"step": 2}
    for rank in (0, 1):
        own = [e for e in events if e["pid"] == rank]
        phases = {e["name"] for e in own}
        assert {"generate_critiques", "sandbox", "wait_sandbox", "actor_update"} <= phases
        aside = [e for e in own if e["tid"] > 0]
        assert [e["name"] for e in aside] == ["sandbox"] and aside[0]["cat"] == "host"
        main = sorted((e["ts"], e["ts"] + e["dur"]) for e in own if e["tid"] == 0)
        for (_, end), (start, last) in pairwise(main):
            assert start >= end or last <= end, "phases of a thread are nested or apart"
    # The first rank's phases are those of the step's metrics.
    metrics = run.metrics()[1]["metrics"]
    for name in ("actor_update", "generate_critiques"):
        seconds = sum(e["dur"] for e in events if e["pid"] == 0 and e["name"] == name) / 1e6
        assert seconds == pytest.approx(metrics[f"time/{name}"], abs=1e-3)
    # Ranks count from the same moment: what both wait for ends together.
    ends = [e["ts"] + e["dur"] for e in events if e["name"] == "actor_update"]
    assert max(ends) - min(ends) < 1e6
    for rank in (0, 1):
        operators = json.loads((folder / f"step_2.rank_{rank}.torch.json").read_text())
        assert any("aten::" in event.get("name", "") for event in operators["traceEvents"])


def test_the_memory_of_a_gpu_that_is_not_there_is_refused() -> None:
    settings = ["trainer.profile_steps=all", "trainer.profile_memory=true"]
    config = load_config(None, settings, "none")
    assert config.trainer.is_profile_step(1) and config.trainer.is_profile_step(1000)
    with pytest.raises(UserError, match=r"trainer\.profile_memory: there is no GPU"):
        check_profile(config)

"""Runs on two hosts, which share an Ethernet but no memory."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from launched_run import Job

SCRIPT = Path(__file__).with_name("several_hosts.sh")


def can_make_hosts() -> bool:
    """Whether this process may give others names, shared memories and networks of their own."""
    return subprocess.run([SCRIPT, "1", "true"], capture_output=True, check=False).returncode == 0


pytestmark = [
    # A busy machine may be several times slower than an idle one.
    pytest.mark.timeout(900),
    pytest.mark.skipif(not can_make_hosts(), reason="needs root, namespaces and ip"),
]

# Two ranks and two engines a host: each host holds one half of two copies, and the leaders are on
# the first. What a host lacks has to travel, and half of the prompts too. Dedicated engines never
# sleep.
STAGES = (
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2",
    "actor_rollout_ref.rollout.placement=dedicated",
    "actor_rollout_ref.rollout.n_gpus_per_node=2",
)
# One rank and one engine a host: each holds a whole copy. No weights travel.
COPIES = ()


@pytest.mark.parametrize(
    ("extra", "ranks", "engines"),
    [
        (STAGES, 2, {"engine.log", "engine.1.log", "engine.2.log", "engine.3.log"}),
        pytest.param(COPIES, 1, {"engine.log", "engine.1.log"}, marks=pytest.mark.long),
    ],
    ids=["stages", "copies"],
)
def test_engines_follow_a_trainer_that_is_spread_over_hosts(
    job: Job, extra: tuple[str, ...], ranks: int, engines: set[str]
) -> None:
    settings = (
        *("trainer.nnodes=2", f"trainer.n_gpus_per_node={ranks}"),
        "actor_rollout_ref.rollout.update_bucket_megabytes=1",
    )
    name = f"hosts_of_{ranks}"
    given = (*extra, *settings)
    with job.launch(name, steps=2, extra=given, hosts=2, ranks=ranks, preloaded=True) as run:
        assert run.ends() == 0, run.output()[-8000:]
    records = [record["metrics"] for record in run.metrics()]
    assert len(records) == 2
    for metrics in records:
        assert metrics["actor/grad_norm"] > 0.0
        # In the second step the engines hold what the first has learned.
        assert metrics["rollout/probs_diff_mean"] < 1e-4
        # Every engine draws, and every host's sandbox says what it can do.
        assert metrics["perf/engine_balance"] > 0.0
        assert "sandbox/isolation" in metrics
    assert {path.name for path in run.folder.glob("engine*.log")} == engines

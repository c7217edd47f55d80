"""Runs that train adapters: the objective's reference is the actor without them."""

from __future__ import annotations

from typing import Any

import pytest
from forked_run import run_forked
from launched_run import Job

from ctrl_megatron.rollout.engine import available_engines

PUSH, MERGED = (f"actor_rollout_ref.rollout.adapter_push={word}" for word in ("true", "false"))
LORA = (
    "actor_rollout_ref.model.lora_rank=4",
    "actor_rollout_ref.model.lora_alpha=8",
    "actor_rollout_ref.actor.optim.lr=1e-2",
    "actor_rollout_ref.actor.use_kl_loss=true",
)


def metrics_of(job: Job, name: str, steps: int, *extra: str) -> list[dict[str, Any]]:
    run = run_forked(job, name, steps=steps, extra=(*LORA, *extra))
    assert run.codes == (0, 0), run.output[-6000:]
    found = [record["metrics"] for record in run.metrics()]
    assert len(found) == steps
    # The engine computed with the adapters of the trainer.
    assert max(metrics["rollout/probs_diff_max"] for metrics in found) < 1e-4
    return found


def gigabytes(metrics: dict[str, Any]) -> float:
    return metrics["sync/gigabytes"]


@pytest.mark.long
def test_adapters_by_themselves_give_the_same_rewards_as_merged_weights(job: Job) -> None:
    """Every push compares checksums. The reference needs no second model, and begins equal to the
    actor."""
    proxy = "actor_rollout_ref.proxy.kind=engine", "actor_rollout_ref.proxy.engine.name=hf"
    merged = metrics_of(job, "merged", 3, *proxy, MERGED)
    alone = metrics_of(job, "adapters", 3, *proxy)
    assert any(metrics["reward/mean"] > 0 for metrics in merged)
    assert abs(merged[0]["actor/kl_loss"]) < 1e-6 < merged[2]["actor/kl_loss"]
    for one, other in zip(merged, alone, strict=True):
        assert one.keys() == other.keys()
        for name in ("reward/mean", "critique/length", "actor/pg_loss", "actor/kl_loss"):
            assert one[name] == pytest.approx(other[name], abs=1e-5), name
    assert gigabytes(alone[1]) < gigabytes(merged[1]) / 10


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["megatron", "fsdp"])
def test_a_shared_proxy_is_the_actor_without_its_adapters(job: Job, strategy: str) -> None:
    proxy = f"actor_rollout_ref.proxy.model.path={job.actor}"
    computed = f"actor_rollout_ref.actor.strategy={strategy}"
    metrics_of(job, f"shared_{strategy}", 2, proxy, PUSH, computed)


@pytest.mark.long
def test_both_strategies_train_the_same_adapters(job: Job) -> None:
    """Merged, so that all weights are pushed. Large steps would multiply rounding until other
    tokens are drawn."""
    of, small = "actor_rollout_ref.actor.strategy=", "actor_rollout_ref.actor.optim."
    megatron, fsdp = (
        metrics_of(job, f"of_{name}", 3, of + name, small + "lr=1e-3", small + "eps=1e-4")
        for name in ("megatron", "fsdp")
    )
    for one, other in zip(megatron, fsdp, strict=True):
        for name in ("reward/mean", "critique/length", "actor/pg_loss", "actor/kl_loss"):
            assert one[name] == pytest.approx(other[name], abs=1e-5), name


@pytest.mark.long
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_engines_compute_with_the_newest_adapters(job: Job, engine: str) -> None:
    if engine not in available_engines():
        pytest.skip(f"{engine} is not installed; `make env` brings it")
    proxy = f"actor_rollout_ref.proxy.model.path={job.actor}"
    found = metrics_of(job, engine, 3, proxy, PUSH, f"actor_rollout_ref.rollout.name={engine}")
    assert found[0]["actor/kl_loss"] < 1e-6 < found[2]["actor/kl_loss"]
    assert any(metrics["actor/grad_norm"] > 0 for metrics in found)

"""A model with experts is trained and fine-tuned, with every engine and on other layouts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from forked_run import run_forked
from golden_runs import sft_examples
from launched_run import Job
from tiny_run import JUDGMENTS, PROGRAM, chain_model

from ctrl_megatron.rollout.engine import available_engines

MEGATRON = "actor_rollout_ref.actor.megatron."


@pytest.fixture(scope="module")
def experts_job(job: Job, smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The runs of ``job`` with a critic and a proxy that have experts."""
    folder = tmp_path_factory.mktemp("experts")
    return replace(
        job,
        actor=chain_model(folder / "actor", smollm2_path, JUDGMENTS, 0.8, experts=4),
        proxy=chain_model(folder / "proxy", smollm2_path, [PROGRAM], 0.9, experts=4),
        folder=folder / "runs",
    )


@pytest.mark.parametrize(
    ("engine", "expert_ranks"),
    [
        pytest.param("hf", 1, marks=pytest.mark.long),
        pytest.param("vllm", 2, marks=pytest.mark.long),
        pytest.param("sglang", 2, marks=pytest.mark.long),
    ],
)
def test_ctrl_trains_with_an_engine_that_holds_what_was_sent_and_agrees(
    experts_job: Job, engine: str, expert_ranks: int
) -> None:
    """Every push compares checksums, so that a run that ends held what was sent."""
    if engine not in available_engines():
        pytest.skip(f"{engine} is not installed; `make env` brings it")
    chosen = (
        f"actor_rollout_ref.rollout.name={engine}",
        f"{MEGATRON}expert_model_parallel_size={expert_ranks}",
    )
    run = run_forked(experts_job, engine, steps=3, extra=chosen)
    assert run.codes == (0, 0), run.output[-6000:]
    steps = [record["metrics"] for record in run.metrics()]
    print([{name: m[name] for name in m if "probs_diff" in name} for m in steps])
    assert len(steps) == 3
    assert all(metrics["sync/pushes"] >= 1 for metrics in steps)
    assert max(metrics["rollout/probs_diff_max"] for metrics in steps) < 1e-4
    assert any(metrics["actor/grad_norm"] > 0 for metrics in steps)


@pytest.mark.long
def test_fine_tuning_learns_and_a_resume_on_pipeline_stages_equals_the_whole_run(
    experts_job: Job, tmp_path: Path
) -> None:
    data = (f"sft.train_files={sft_examples(tmp_path / 'sft.parquet')}",)

    def losses(name: str, steps: int, *extra: str) -> list[float]:
        run = run_forked(experts_job, name, steps=steps, extra=(*data, *extra), purpose="sft")
        assert run.codes == (0, 0), run.output[-6000:]
        return [record["metrics"]["sft/loss"] for record in run.metrics()]

    whole = losses("whole", 4, "trainer.save_freq=2")
    assert whole[-1] < whole[0]
    resumed = losses(
        "resumed",
        4,
        f"trainer.resume_mode={experts_job.folder / 'whole' / 'checkpoints' / 'global_step_2'}",
        f"{MEGATRON}pipeline_model_parallel_size=2",
    )
    assert resumed == pytest.approx(whole[2:], rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("shared", [False, True])
def test_adapters_of_experts_are_trained_and_a_resume_on_stages_equals_the_whole_run(
    experts_job: Job, shared: bool
) -> None:
    """The proxy is the actor without its adapters, so that the engines get these alone."""
    family = "actor_rollout_ref."
    keys = (
        *(f"{family}proxy.model.path={experts_job.actor}", f"{family}actor.optim.lr=1e-2"),
        *(f"{family}model.lora_rank=4", f"{family}model.experts_shared_outer_loras={shared}"),
    )

    def trained(name: str, *extra: str) -> list[dict[str, float]]:
        run = run_forked(experts_job, f"{name} {shared}", steps=3, extra=(*keys, *extra))
        assert run.codes == (0, 0), run.output[-6000:]
        return [record["metrics"] for record in run.metrics()]

    expert_ranks = f"{MEGATRON}expert_model_parallel_size=2"
    whole = trained("adapters", expert_ranks, "trainer.save_freq=2")
    assert max(metrics["rollout/probs_diff_max"] for metrics in whole) < 1e-4
    assert whole[0]["actor/kl_loss"] < 1e-6 < whole[2]["actor/kl_loss"]
    checkpoint = experts_job.folder / f"adapters {shared}" / "checkpoints" / "global_step_2"
    (again,) = trained(
        "adapters again",
        f"trainer.resume_mode={checkpoint}",
        f"{MEGATRON}pipeline_model_parallel_size=2",
    )
    for name in ("reward/mean", "critique/length", "actor/pg_loss", "actor/kl_loss"):
        assert again[name] == pytest.approx(whole[2][name], abs=1e-5), name


ROLLOUT = "actor_rollout_ref.rollout."
BF16 = ("actor_rollout_ref.model.dtype=bfloat16", f"{ROLLOUT}temperature=1.3", f"{ROLLOUT}top_k=8")
REPLAYS: dict[str, tuple[str, ...]] = {
    "engine": (f"{ROLLOUT}router_replay=engine",),
    "trainer": (f"{ROLLOUT}router_replay=trainer", "actor_rollout_ref.actor.ppo_epochs=2"),
    "engine, a step ahead": (
        *(f"{ROLLOUT}router_replay=engine", f"{ROLLOUT}staleness=1"),
        *(f"{ROLLOUT}placement=dedicated", f"{ROLLOUT}n_gpus_per_node=1"),
        "algorithm.rollout_correction.rollout_is=token",
    ),
    "engine, in flight": (
        *(f"{ROLLOUT}router_replay=engine", f"{ROLLOUT}staleness=1"),
        *(f"{ROLLOUT}placement=dedicated", f"{ROLLOUT}n_gpus_per_node=1"),
        *("algorithm.rollout_correction.rollout_is=token", f"{ROLLOUT}update_in_flight=true"),
    ),
    "engine, sglang": (f"{ROLLOUT}router_replay=engine", f"{ROLLOUT}name=sglang"),
    "engine, on stages": (
        f"{ROLLOUT}router_replay=engine",
        f"{MEGATRON}pipeline_model_parallel_size=2",
    ),
}


@pytest.mark.parametrize(
    "name", [n if n == "engine" else pytest.param(n, marks=pytest.mark.long) for n in REPLAYS]
)
def test_choices_of_experts_are_replayed_in_a_run(experts_job: Job, name: str) -> None:
    if "sglang" in name and "sglang" not in available_engines():
        pytest.skip("sglang is not installed; `make env` brings it")
    run = run_forked(experts_job, f"replay {name}", steps=3, extra=(*BF16, *REPLAYS[name]))
    assert run.codes == (0, 0), run.output[-6000:]
    steps = [record["metrics"] for record in run.metrics()]
    print([{k: m[k] for k in m if "replay" in k or "probs_diff_mean" in k} for m in steps])
    rates = [metrics["moe/replayed_rate"] for metrics in steps]
    if name == "engine, a step ahead":
        # The first step's texts have its own weights; later ones those before the last update.
        assert rates[1:] == [0.0, 0.0]
    elif name == "engine, in flight":
        # A text that went on with newer weights was read again by these, whole.
        assert all(0 <= rate < 1 for rate in rates)
    elif name == "trainer":
        assert rates == [1.0] * 3
        assert steps[0]["moe/replay_differs_rate"] < 0.5
    else:
        # All tokens but the last of each text.
        assert all(0.9 < rate < 1 for rate in rates)
    assert all(metrics["actor/grad_norm"] > 0 for metrics in steps)

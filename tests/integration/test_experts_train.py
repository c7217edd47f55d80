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

"""Models with gated delta nets are trained with engine hf, and resumed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from forked_run import run_forked
from launched_run import Job
from tiny_run import JUDGMENTS, PROGRAM, chain_model

DELTA: dict[str, Any] = {
    **{"num_hidden_layers": 2, "full_attention_interval": 2, "linear_num_key_heads": 2},
    **{"linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
}
EXPERTS = {
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    **{"shared_expert_intermediate_size": 32},
}
LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("family", "strategy", "extra"),
    [
        ("qwen3_5_text", "megatron", ()),
        pytest.param("qwen3_5_text", "fsdp", (), marks=LONG),
        pytest.param(
            "qwen3_5_moe_text",
            "megatron",
            ("actor.megatron.expert_model_parallel_size=2",),
            marks=LONG,
        ),
        pytest.param("qwen3_5_moe_text", "fsdp", (), marks=LONG),
        pytest.param("qwen3_5_text", "megatron", ("model.lora_rank=4",), marks=LONG),
        pytest.param(
            "qwen3_next", "megatron", ("actor.megatron.pipeline_model_parallel_size=2",), marks=LONG
        ),
    ],
)
def test_ctrl_trains_agrees_with_its_engine_and_a_resume_equals_the_whole_run(
    job: Job,
    smollm2_path: Path,
    tmp_path: Path,
    family: str,
    strategy: str,
    extra: tuple[str, ...],
) -> None:
    """Every push compares checksums, so that a run that ends held what was sent."""
    keys = {**DELTA, **(EXPERTS if family != "qwen3_5_text" else {})}
    own = replace(
        job,
        actor=chain_model(tmp_path / "actor", smollm2_path, JUDGMENTS, 0.8, family=family, **keys),
        proxy=chain_model(tmp_path / "proxy", smollm2_path, [PROGRAM], 0.9, family=family, **keys),
        folder=tmp_path / "runs",
    )
    chosen = (
        "actor_rollout_ref.rollout.name=hf",
        f"actor_rollout_ref.actor.strategy={strategy}",
        *(f"actor_rollout_ref.{key}" for key in extra),
    )

    def trained(name: str, *keys: str) -> list[dict[str, float]]:
        run = run_forked(own, name, steps=3, extra=(*chosen, *keys))
        assert run.codes == (0, 0), run.output[-6000:]
        return [record["metrics"] for record in run.metrics()]

    whole = trained("whole", "trainer.save_freq=2")
    assert len(whole) == 3 and all(metrics["sync/pushes"] >= 1 for metrics in whole)
    assert max(metrics["rollout/probs_diff_max"] for metrics in whole) < 1e-4
    assert any(metrics["actor/grad_norm"] > 0 for metrics in whole)
    checkpoint = own.folder / "whole" / "checkpoints" / "global_step_2"
    (again,) = trained("again", f"trainer.resume_mode={checkpoint}")
    exact = [n for n in whole[2] if n.startswith(("actor/", "reward/mean", "critique/"))]
    assert len(exact) > 10
    assert {n: again[n] for n in exact} == {n: whole[2][n] for n in exact}

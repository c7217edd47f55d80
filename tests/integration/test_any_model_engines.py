"""Engines take the weights of families that Megatron's table lacks and compute what the trainer
does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from forked_run import run_forked
from launched_run import Job
from safetensors.torch import load_file
from tiny_run import JUDGMENTS, PROGRAM, chain_model

from ctrl_megatron.checkpoint.convert import megatron_to_hf
from ctrl_megatron.rollout.engine import available_engines

# A busy machine may be several times slower than an idle one.
pytestmark = [pytest.mark.timeout(900), pytest.mark.long]

FAMILIES: dict[str, dict[str, Any]] = {
    "granite": {
        **{"logits_scaling": 2.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5},
        **{"attention_multiplier": 0.2, "tie_word_embeddings": True},
    },
    # Its files have queries, keys and values in one tensor.
    "phi3": {"tie_word_embeddings": False, "sliding_window": 64},
    "mistral": {"tie_word_embeddings": False, "sliding_window": 64},
    "smollm3": {},
    "gemma2": {"sliding_window": 64},
    "gemma3_text": {"sliding_window": 64},
}


@pytest.mark.parametrize(
    ("engine", "family"), [("vllm", "granite"), ("vllm", "phi3"), ("sglang", "granite")]
)
def test_a_family_of_transformers_is_trained_with_the_engine(
    engine: str, family: str, job: Job, smollm2_path: Path, tmp_path: Path
) -> None:
    """Three steps with a shared proxy, so that both models' weights are pushed, checksums compared
    after each push."""
    if engine not in available_engines():
        pytest.skip(f"{engine} is not installed; `make env` brings it")
    made = {
        role: chain_model(
            tmp_path / role, smollm2_path, texts, probability, family=family, **FAMILIES[family]
        )
        for role, texts, probability in (("actor", JUDGMENTS, 0.8), ("proxy", [PROGRAM], 0.9))
    }
    run = run_forked(
        replace(job, **made, folder=tmp_path / "runs"),
        f"{family}_{engine}",
        steps=3,
        extra=(
            *("actor_rollout_ref.actor.strategy=fsdp", f"actor_rollout_ref.rollout.name={engine}"),
            *("actor_rollout_ref.actor.optim.lr=1e-2", "trainer.save_freq=3"),
        ),
        timeout=800.0,
    )
    assert run.codes == (0, 0), run.output[-6000:]
    steps = [record["metrics"] for record in run.metrics()]
    assert len(steps) == 3
    assert any(step["actor/grad_norm"] > 0 for step in steps)
    assert max(step["rollout/probs_diff_max"] for step in steps) < 1e-4
    assert all(step["sync/gigabytes"] > 0 for step in steps)
    megatron_to_hf(run.folder / "checkpoints/global_step_3", tmp_path / "trained")
    before, after = (
        load_file(folder / "model.safetensors") for folder in (made["actor"], tmp_path / "trained")
    )
    assert before.keys() == after.keys()
    assert all(before[name].shape == after[name].shape for name in before)
    assert any((before[name] - after[name]).abs().max() > 1e-3 for name in before)

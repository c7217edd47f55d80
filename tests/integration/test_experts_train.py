"""Fine-tuning of a model with experts, resumed on another layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from forked_run import run_forked
from golden_runs import sft_examples
from launched_run import Job

MEGATRON = "actor_rollout_ref.actor.megatron."


def experts(directory: Path, tokenizer_from: Path) -> Path:
    """A tiny random Qwen3-MoE with the tokenizer of ``tokenizer_from``."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_from)
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def test_fine_tuning_learns_and_a_resume_on_pipeline_stages_equals_the_whole_run(
    job: Job, smollm2_path: Path, tmp_path: Path
) -> None:
    model = experts(tmp_path / "model", smollm2_path)
    mine = replace(job, actor=model, folder=tmp_path / "runs")
    data = (f"sft.train_files={sft_examples(tmp_path / 'sft.parquet')}",)

    def losses(name: str, steps: int, *extra: str) -> list[float]:
        run = run_forked(mine, name, steps=steps, extra=(*data, *extra), purpose="sft")
        assert run.codes == (0, 0), run.output[-6000:]
        return [record["metrics"]["sft/loss"] for record in run.metrics()]

    whole = losses("whole", 4, "trainer.save_freq=2")
    assert whole[-1] < whole[0]
    resumed = losses(
        "resumed",
        4,
        f"trainer.resume_mode={tmp_path / 'runs' / 'whole' / 'checkpoints' / 'global_step_2'}",
        f"{MEGATRON}pipeline_model_parallel_size=2",
    )
    assert resumed == pytest.approx(whole[2:], rel=1e-5)

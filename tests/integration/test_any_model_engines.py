"""Engines take the weights of families that Megatron's table lacks and compute what the trainer
does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import golden_runs
import pytest
import torch
from forked_run import run_forked
from in_process import in_process
from launched_run import Job
from safetensors.torch import load_file
from tiny_run import JUDGMENTS, PROGRAM, chain_model

from ctrl_megatron.checkpoint.convert import megatron_to_hf
from ctrl_megatron.eval.transcripts import read_evaluation
from ctrl_megatron.generation.search_nodes import SearchNode, read_records
from ctrl_megatron.rollout.engine import available_engines

# A busy machine may be several times slower than an idle one.
pytestmark = [pytest.mark.timeout(900), pytest.mark.long]

FSDP = "actor_rollout_ref.actor.strategy=fsdp"
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


def made_models(family: str, folder: Path, tokenizer: Path) -> dict[str, Path]:
    """A critic and a proxy of the family."""
    said = {"actor": (JUDGMENTS, 0.8), "proxy": ([PROGRAM], 0.9)}
    return {
        role: chain_model(
            folder / role, tokenizer, texts, probability, family=family, **FAMILIES[family]
        )
        for role, (texts, probability) in said.items()
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
    made = made_models(family, tmp_path, smollm2_path)
    run = run_forked(
        replace(job, **made, folder=tmp_path / "runs"),
        f"{family}_{engine}",
        steps=3,
        extra=(
            *(FSDP, f"actor_rollout_ref.rollout.name={engine}"),
            *("actor_rollout_ref.actor.optim.lr=1e-2", "trainer.save_freq=3"),
        ),
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


def test_a_family_of_transformers_is_fine_tuned_converted_evaluated_and_generates(
    job: Job, smollm2_path: Path, tmp_path: Path
) -> None:
    """From a directory of the family to trees of texts, by the commands alone."""
    made = made_models("granite", tmp_path, smollm2_path)
    own = replace(job, **made, folder=tmp_path / "runs")
    examples = f"sft.train_files={golden_runs.sft_examples(tmp_path / 'sft.parquet')}"
    run = run_forked(own, "tuned", steps=2, extra=(examples, FSDP), purpose="sft")
    assert run.codes == (0, 0), run.output[-6000:]
    assert len(run.metrics()) == 2
    tuned = run.folder / "hf"
    # There and back, bit for bit.
    command("convert_hf_to_megatron", "--hf", tuned, "--out", tmp_path / "checkpoint")
    back = tmp_path / "back"
    command("convert_megatron_to_hf", "--checkpoint", tmp_path / "checkpoint", "--out", back)
    there, here = (load_file(folder / "model.safetensors") for folder in (tuned, back))
    assert there.keys() == here.keys() == load_file(made["actor"] / "model.safetensors").keys()
    assert all(torch.equal(tensor, here[name]) for name, tensor in there.items())
    assert any(
        not torch.equal(tensor, here[name])
        for name, tensor in load_file(made["actor"] / "model.safetensors").items()
    )

    out = tmp_path / "evaluation"
    named = ("--config", "examples/ctrl_smollm2_cpu.yaml", f"tuned={back}", "--out", out, "--set")
    keys = [o for o in own.overrides("training", 1) if not o.startswith("data.val_files")]
    keys = [*named, *keys, f"data.val_files={job.data}"]
    with pytest.raises(AssertionError, match=r"'granite' is not supported .*strategy=fsdp"):
        command("evaluate", *keys)
    command("evaluate", *keys, FSDP)
    turns = read_evaluation(out).turns
    assert len(turns) == 8 and {turn.revision for turn in turns} == {PROGRAM}

    tree = tmp_path / "tree"
    models = ("--generator", made["proxy"], "--critic", back, "--engine", "hf", "--threads", "1")
    lengths = [f"--{kind}max-tokens=24" for kind in ("", "critique-", "revision-")]
    asked = ("--problems", job.data, "--out", tree, "--widths", "1", "1", "1", "--limit", "2")
    command("generate", *asked, *models, *lengths, "--dtype", "float32", "--temperature", "0")
    nodes, _ = read_records(tree / "nodes.parquet", SearchNode)
    assert [n.sanitized_solution for n in nodes if n.depth] == [PROGRAM] * 4
    assert all(node.critique for node in nodes if node.depth == 2)


def command(name: str, *arguments: object) -> None:
    """A command of the package ends well."""
    words = [str(word) for word in arguments]
    found = in_process("run_command", name=name, arguments=words)
    assert found["code"] == 0, found["output"][-6000:]

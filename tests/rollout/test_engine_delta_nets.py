"""vLLM with gated delta nets: it takes our weights, computes with them and gives them back."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_models import Sender, asked, log_probs
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ctrl_megatron.models.families import FAMILIES
from ctrl_megatron.rollout.client import RemoteEngine
from ctrl_megatron.rollout.engine import available_engines
from ctrl_megatron.rollout.weight_update import checkpoint_specs, tensor_checksum
from ctrl_megatron.types import Completion, SamplingParams

sys.path.append(str(Path(__file__).parents[1] / "distributed"))
from tiny_models import save_tiny, with_pictures, with_stacks

PROMPTS = [[5], [1, 2, 3], list(range(20, 60))]
SIZES: dict[str, Any] = {
    # vLLM's CPU kernels need heads of 64 in gated delta nets, of 32 in attention, and experts of
    # multiples of 32.
    **{"linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_num_key_heads": 2},
    **{"linear_num_value_heads": 4, "num_hidden_layers": 2, "head_dim": 32, "hidden_size": 64},
}
EXPERTS = {"moe_intermediate_size": 32}
LONG = pytest.mark.long
NOISE = 0.05
"""Twice the mean rounding of bfloat16; other weights give differences above 2."""


def changed(directory: Path, to: Path) -> Path:
    """The directory with other weights."""
    shutil.copytree(directory, to)
    draw = torch.Generator().manual_seed(7)
    tensors = load_file(to / "model.safetensors")
    for name, tensor in tensors.items():
        tensors[name] = tensor + (0.1 * torch.randn(tensor.shape, generator=draw)).to(tensor.dtype)
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


def sent_tensors(directory: Path, family: str) -> dict[str, torch.Tensor]:
    """The weights in ``directory`` as a push sends them."""
    tensors = load_file(directory / "model.safetensors")
    if FAMILIES[family].stacked_experts:
        tensors = with_stacks(tensors)
    return {spec.name: tensors[spec.name] for spec in checkpoint_specs(directory, "bfloat16")}


def difference(directory: Path, answers: list[list[Completion]]) -> float:
    """How far the log-probs of ``answers`` are from transformers' in float32, in the mean."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    apart = [
        (torch.tensor(one.log_probs) - log_probs(model, prompt, one.token_ids)).abs()
        for prompt, drawn in zip(PROMPTS, answers, strict=True)
        for one in drawn
    ]
    return float(torch.cat(apart).mean())


@pytest.mark.parametrize(
    ("family", "whole", "workers"),
    [
        ("qwen3_5_text", None, 1),
        pytest.param("qwen3_5_moe_text", None, 1, marks=LONG),
        pytest.param("qwen3_next", None, 1, marks=LONG),
        pytest.param("qwen3_5_text", "qwen3_5", 1, marks=LONG),
        pytest.param("qwen3_5_moe_text", "qwen3_5_moe", 1, marks=LONG),
        pytest.param("qwen3_5_moe_text", None, 2, marks=LONG),
        pytest.param("qwen3_next", None, 2, marks=LONG),
    ],
)
def test_vllm_computes_with_what_was_sent(
    tmp_path: Path, family: str, whole: str | None, workers: int
) -> None:
    if "vllm" not in available_engines():
        pytest.skip("the optional engine vllm is not installed")
    sizes = SIZES | (EXPERTS if family != "qwen3_5_text" else {})
    old = save_tiny(family, tmp_path / "text", torch.bfloat16, **sizes)
    if whole is not None:
        old = with_pictures(old, tmp_path / "old", whole)
    new = changed(old, tmp_path / "new")
    tensors = sent_tensors(new, whole or family)
    params = SamplingParams(n=2, max_tokens=12, seed=1)

    async def ask(engine: RemoteEngine) -> None:
        first = await engine.generate(PROMPTS, params)
        assert difference(old, first) < NOISE and difference(new, first) > 1
        sender = Sender(tensors)
        await engine.update(sender.specs(), sender.chunks(), "sent")
        assert await engine.checksums() == {n: tensor_checksum(t) for n, t in tensors.items()}
        then = await engine.generate(PROMPTS, params)
        assert difference(new, then) < NOISE and difference(old, then) > 1

    asked("vllm", old, ask, dtype="bfloat16", tensor_parallel_size=workers, max_num_seqs=8)

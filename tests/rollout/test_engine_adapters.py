"""Engines with pushed adapters compute what transformers does with merged weights."""

from __future__ import annotations

import asyncio
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from rollout_models import (
    Sender,
    asked,
    log_probs,
    save,
    tiny_experts,
    tiny_latent,
    tiny_llama,
    tiny_mixtral,
)
from safetensors.torch import load_file, save_file

from ctrl_megatron.checkpoint.peft import with_own_matrices
from ctrl_megatron.models.rules import adapter_names
from ctrl_megatron.rollout.client import RemoteEngine
from ctrl_megatron.rollout.engine import EngineError, available_engines
from ctrl_megatron.rollout.weight_update import tensor_checksum
from ctrl_megatron.types import Lora, SamplingParams

pytestmark = pytest.mark.timeout(900)

ROW = list(range(20, 60))
PREFIX, RANK, ALPHA = "base_model.model.", 8, 12.0
LATENT = "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"
DENSE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def adapters(weights: dict[str, torch.Tensor], lora: Lora, seed: int) -> dict[str, torch.Tensor]:
    """PEFT's tensors for the weights that ``lora`` names; B is zero for seed 0."""
    generator, found = torch.Generator().manual_seed(seed), {}
    for name, weight in sorted(weights.items()):
        if weight.dim() == 2 and name.split(".")[-2] in lora.targets:
            out, width = weight.shape
            down, up = (
                0.3 * torch.randn(size, generator=generator)
                for size in ((lora.rank, width), (out, lora.rank))
            )
            found |= dict(zip(adapter_names(name, lora), (down, up * (seed > 0)), strict=True))
    return found


def merged(path: Path, given: dict[str, torch.Tensor], lora: Lora) -> Any:
    """transformers' model of the directory with merged adapters."""
    weights, given = load_file(path / "model.safetensors"), with_own_matrices(given)
    for name, down in given.items():
        if ".lora_A." in name:
            own = name.removeprefix(PREFIX).replace(".lora_A.", ".")
            weights[own] = weights[own] + lora.scale * given[name.replace("_A.", "_B.")] @ down
    folder = path / "merged"
    folder.mkdir(exist_ok=True)
    shutil.copy(path / "config.json", folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def said(name: str, path: Path, lora: Lora, pushed: list[dict[str, torch.Tensor]]) -> list[Any]:
    """After the start and each push: (the log-probs of ``ROW``, its checksums, a greedy text)."""

    async def ask(engine: RemoteEngine) -> list[Any]:
        found = []
        params = SamplingParams(max_tokens=8, temperature=0.0)
        for number in range(len(pushed) + 1):
            if number:
                sender = Sender(pushed[number - 1])
                await engine.update(sender.specs(), sender.chunks(), f"version {number}")
            ((completion,),) = await engine.generate([ROW[:20]], params)
            (own,) = await engine.token_log_probs(ROW)
            held = await engine.checksums() if number else {}
            found.append((torch.tensor(own), held, completion))
        # Its weights stay while it sleeps, and so do the adapters.
        await engine.sleep(1)
        await engine.wake(["weights", "kv_cache"])
        (own,) = await engine.token_log_probs(ROW)
        assert torch.allclose(torch.tensor(own), found[-1][0], atol=1e-5)
        if name != "hf":
            # So many that they still draw when the first token of them has been seen.
            draws, params = asyncio.Event(), SamplingParams(max_tokens=90, n=256)
            drawing = asyncio.create_task(
                engine.generate([ROW[:4]], params, lambda place, tokens: draws.set())
            )
            await draws.wait()
            sender = Sender(pushed[-1])
            with pytest.raises(EngineError, match="still draw with the adapters of before"):
                await engine.update(sender.specs(), sender.chunks(), "too early")
            await drawing
        return found

    return asked(name, path, ask, lora=lora, may_sleep=True)


@pytest.mark.parametrize(
    ("name", "make", "targets", "shared"),
    [
        ("hf", tiny_llama, DENSE, False),
        ("vllm", tiny_llama, DENSE, False),
        pytest.param("sglang", tiny_llama, DENSE, False, marks=pytest.mark.long),
        # SGLang has these layers only with others in one.
        pytest.param(
            *("sglang", tiny_llama, ("q_proj", "down_proj", "gate_proj"), False),
            marks=pytest.mark.long,
        ),
        ("hf", tiny_experts, DENSE, False),
        ("hf", tiny_experts, DENSE, True),
        pytest.param("hf", tiny_experts, ("k_proj", "up_proj"), False, marks=pytest.mark.long),
        pytest.param(
            *("hf", tiny_mixtral, ("q_proj", "w1", "w2", "w3"), True), marks=pytest.mark.long
        ),
        ("hf", tiny_latent, (*LATENT, *DENSE[3:]), False),
    ],
)
def test_adapters_that_are_pushed_are_merged_weights(
    tmp_path: Path, name: str, make: Any, targets: tuple[str, ...], shared: bool
) -> None:
    if name not in available_engines():
        pytest.skip(f"the optional engine {name} is not installed")
    torch.set_num_threads(1)
    path = save(make(0), tmp_path / "model")
    lora = Lora(rank=RANK, alpha=ALPHA, targets=targets, shared_outer=shared)
    weights = load_file(path / "model.safetensors")
    pushed = [adapters(weights, lora, seed) for seed in range(3)]
    base, *found = said(name, path, lora, pushed)
    rows = []
    for given, (own, checksums, completion) in zip(pushed, found, strict=True):
        model = merged(path, given, lora)
        oracle = log_probs(model, ROW[:1], ROW[1:])
        assert (own - oracle).abs().max() < 1e-4
        assert checksums == {one: tensor_checksum(tensor) for one, tensor in given.items()}
        drawn = log_probs(model, ROW[:20], completion.token_ids)
        assert (torch.tensor(completion.log_probs) - drawn).abs().max() < 1e-4
        rows.append(own)
    # B is zero at first; every later push changes what the engine says.
    assert torch.allclose(base[0], rows[0], atol=1e-5)
    assert all((a - b).abs().max() > 0.05 for a, b in pairwise(rows))

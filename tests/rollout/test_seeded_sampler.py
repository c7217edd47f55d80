"""Rows with seeds are drawn together on a GPU; everything but the GPU's own generator runs here."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from patience import PATIENCE

from ctrl_megatron.rollout.engine import EngineSpec, available_engines
from ctrl_megatron.rollout.launch import engine_environment
from ctrl_megatron.rollout.sampling import inverse_sample, next_random_numbers


class CountingGenerator:
    """A GPU's generator as far as it is used: a seed, and a place that may be moved back."""

    device = SimpleNamespace(type="cuda")

    def __init__(self, seed: int) -> None:
        self._seed, self._place = seed, 0

    def initial_seed(self) -> int:
        return self._seed

    def get_offset(self) -> int:
        return self._place

    def set_offset(self, offset: int) -> None:
        assert offset % 4 == 0, "torch refuses other places"
        self._place = offset


def next_numbers(generators: dict[int, Any], rows: int) -> torch.Tensor:
    return next_random_numbers(generators, rows, torch.device("cpu"))


def test_streams_of_numbers_are_uniform_and_their_own() -> None:
    generators: dict[int, Any] = {row: CountingGenerator(row) for row in range(8)}
    drawn = torch.stack([next_numbers(generators, 8) for _ in range(500)], dim=1)
    assert drawn.min() >= 0 and drawn.max() < 1
    ordered = drawn.flatten().sort().values
    expected = torch.arange(1, len(ordered) + 1) / len(ordered)
    # Kolmogorov and Smirnov: a hundred-thousandth of all uniform samples is further off.
    assert float((ordered - expected).abs().max()) < 2.5 / len(ordered) ** 0.5
    between = torch.corrcoef(drawn) - torch.eye(8)
    assert float(between.abs().max()) < 0.25


def test_a_number_depends_on_no_other_row() -> None:
    many: dict[int, Any] = {row: CountingGenerator(row + 100) for row in range(5)}
    few: dict[int, Any] = {1: CountingGenerator(103)}
    for _ in range(3):
        assert next_numbers(few, 2)[1] == next_numbers(many, 9)[3]


def test_a_draw_that_is_taken_back_is_drawn_again() -> None:
    generator: Any = CountingGenerator(7)
    next_numbers({0: generator}, 1)
    second = next_numbers({0: generator}, 1)
    # vLLM takes the number back after a part of a prompt that is not its end.
    generator.set_offset(generator.get_offset() - 4)
    assert next_numbers({0: generator}, 1) == second != next_numbers({0: generator}, 1)


def test_numbers_pick_tokens_by_their_share() -> None:
    weights = torch.tensor([[0.5, 0.0, 1.5], [3.0, 1.0, 0.0]])
    for number, tokens in [(0.0, [0, 0]), (0.249, [0, 0]), (0.251, [2, 0]), (0.76, [2, 1])]:
        assert (
            inverse_sample(weights, torch.tensor([number] * 2, dtype=torch.float64)).tolist()
            == tokens
        )
    assert inverse_sample(weights, torch.tensor([1.0, 1.0], dtype=torch.float64)).tolist() == [2, 1]


DRAW = """
import json, torch
from ctrl_megatron.rollout.vllm_worker import SeededSampler
logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(0)).mul_(2).expand(600, 40)
def draw(rows, k=None, p=None):
    seeded = {i: torch.Generator().manual_seed(row) for i, row in enumerate(rows)}
    few = logits[: len(rows)].clone()
    tokens, log_probs = SeededSampler.draw_together(few, seeded, k, p)
    torch.testing.assert_close(log_probs, logits[: len(rows)].log_softmax(-1))
    return tokens.tolist()
print(json.dumps({
    "free": draw(range(600)),
    "alone": [draw([row])[0] for row in range(20)],
    "top": draw(range(600), torch.full((600,), 4), torch.full((600,), 0.95)),
    "probabilities": logits[0].softmax(-1).tolist(),
}))
"""


SPARED = """
import json, torch
from types import SimpleNamespace
from torch.utils._python_dispatch import TorchDispatchMode
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.v1.sample.sampler import Sampler
from ctrl_megatron.rollout import vllm_cpu

class Names(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        called.append(str(function))
        return function(*args, **(kwargs or {}))

gaps, called = {}, []
with set_current_vllm_config(VllmConfig()):
    for dtype in (torch.float32, torch.bfloat16):
        norm = RMSNorm(576, eps=1e-5, dtype=dtype)
        norm.weight.data.uniform_(0.5, 2)
        x, residual = torch.randn(2, 40, 576).to(dtype)
        own = norm(x), *norm(x.clone(), residual.clone())
        sampler = SimpleNamespace(gather_logprobs=Sampler.gather_logprobs)
        vllm_cpu.install_cpu_kernels(torch.nn.ModuleList([norm]), sampler)
        with Names():
            now = norm(x), *norm(x.clone(), residual.clone())
        far = [(a - b).float().abs() / (1 + a.float().abs()) for a, b in zip(own, now, strict=True)]
        gaps[str(dtype)] = max(float(gap.max()) for gap in far)
log_probs = torch.randn(5, 300).log_softmax(-1)
tokens = torch.tensor([3, 0, 299, 7, 7])
ranked = Sampler.gather_logprobs(log_probs, 0, token_ids=tokens)
plain = sampler.gather_logprobs(log_probs, 0, token_ids=tokens)
unpacked = []
shapes = (torch.float32, 64, 40), (torch.bfloat16, 32, 96), (torch.bfloat16, 320, 3)
for dtype, out, width in shapes:
    weights = torch.randn(3, out, width).to(dtype)
    packed = cpu_prepack_moe_weight(weights, "vec")
    assert not torch.equal(packed, weights)
    unpacked.append(torch.equal(vllm_cpu._unpacked(packed, "vec"), weights))
print(json.dumps({
    "unpacked": unpacked,
    "gaps": gaps,
    "called": called,
    "same": all(torch.equal(a, b) for a, b in zip(ranked[:2], plain[:2])),
    "asked": len(sampler.gather_logprobs(log_probs, 2, token_ids=tokens)[0][0]),
}))
"""


@pytest.fixture(scope="module")
def printed() -> list[dict[str, Any]]:
    """What ``DRAW`` and ``SPARED`` print in a process of vLLM, whose import takes long."""
    if "vllm" not in available_engines():
        pytest.skip("the optional vllm is not installed")
    environment = engine_environment(EngineSpec(name="vllm", model_path="", threads=1))
    environment["TORCHDYNAMO_DISABLE"] = "1"
    done = subprocess.run(
        [sys.executable, "-c", DRAW + SPARED],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()[-2:]]


def test_rows_are_drawn_from_their_distribution_alone_and_in_company(
    printed: list[dict[str, Any]],
) -> None:
    found = printed[0]
    assert found["alone"] == found["free"][:20]
    shares = torch.tensor(found["probabilities"])
    drawn = torch.bincount(torch.tensor(found["free"]), minlength=40) / 600
    assert (((shares * (1 - shares) / 600).sqrt() * 4.5 + 2e-3) > (drawn - shares).abs()).all()
    assert set(found["top"]) <= set(shares.topk(4).indices.tolist())
    assert len(set(found["top"])) > 1


def test_what_is_spared_on_a_cpu_changes_nothing(printed: list[dict[str, Any]]) -> None:
    found = printed[1]
    assert found["gaps"]["torch.float32"] < 1e-6
    # The kernel takes the norm of the rounded sum: two roundings of a bfloat16 instead of one.
    assert found["gaps"]["torch.bfloat16"] < 2**-6
    assert {"_C.rms_norm.default", "_C.fused_add_rms_norm.default"} <= set(found["called"])
    assert found["same"] and found["asked"] == 3
    assert all(found["unpacked"])

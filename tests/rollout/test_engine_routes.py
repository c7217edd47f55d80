"""The experts that engines say they chose are those that transformers chooses in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_models import Sender, asked, log_probs, save, tiny_experts, tiny_indexed, weights

from ctrl_megatron.rollout.client import RemoteEngine
from ctrl_megatron.rollout.engine import available_engines
from ctrl_megatron.rollout.hf_routes import RouteRecorder
from ctrl_megatron.steps.routes import route_tensor
from ctrl_megatron.types import Completion, SamplingParams

pytestmark = pytest.mark.timeout(900)

PROMPTS = [[1, 2, 3], [7, 8, 9, 10, 11, 12, 13], [5]]


def chosen_by_transformers(model: Any, tokens: list[int]) -> torch.Tensor:
    """(tokens - 1, layers, top_k), each token's experts ascending."""
    recorder = RouteRecorder(model)
    with torch.no_grad():
        model(torch.tensor([tokens[:-1]]))
    return recorder.take_pass(1)[0].sort(-1).values


def drawn(name: str, path: Path, later: Any) -> list[list[list[Completion]]]:
    """Texts of the engine's own weights, and of those of ``later`` for the same prompts."""

    async def ask(engine: RemoteEngine) -> Any:
        params = SamplingParams(max_tokens=12, n=2, seed=5)
        first = await engine.generate(PROMPTS, params)
        sender = Sender(weights(later))
        await engine.update(sender.specs(), sender.chunks(), "later")
        return [first, await engine.generate(PROMPTS, params)]

    return asked(name, path, ask, returns_routes=True)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        pytest.param("hf", tiny_experts, marks=pytest.mark.long),
        ("hf", tiny_indexed),
        pytest.param("sglang", tiny_experts, marks=pytest.mark.long),
    ],
)
def test_the_experts_of_every_token_come_with_it(name: str, make: Any, tmp_path: Path) -> None:
    """Also after an update, for prompts that the engine has kept keys and values of."""
    if name not in available_engines():
        pytest.skip(f"{name} is not installed; `make env` brings it")
    models = [make(0), make(1)]
    save(models[0], tmp_path)
    for model, answers in zip(models, drawn(name, tmp_path, models[1]), strict=True):
        for prompt, group in zip(PROMPTS, answers, strict=True):
            for completion in group:
                assert completion.routes is not None
                assert completion.routes.version == completion.spans[-1].version
                found = route_tensor(completion.routes).sort(-1).values
                wanted = chosen_by_transformers(model, [*prompt, *completion.token_ids])
                assert torch.equal(found, wanted)
                drawn_with = log_probs(model, prompt, completion.token_ids)
                assert (torch.tensor(completion.log_probs) - drawn_with).abs().max() < 1e-4

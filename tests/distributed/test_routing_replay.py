"""Routing replay: the routers' own choices replayed change nothing, others give what transformers
computes with them, and ranks, recomputation and micro-batches do not matter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import (
    EXPERTS,
    gradient_bound,
    predicted,
    random_batch,
    save_tiny,
    weights_of,
)
from world import run_world

from ctrl_megatron.parallel.layout import Layout

TENSOR: dict[str, Any] = {"tensor": 2, "sequence_parallel": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2_ep2_etp1": TENSOR | {"expert": 2, "expert_tensor": 1},
    "pp2": {"pipeline": 2},
    "cp2_ep2": {"context": 2, "expert": 2},
    "ep2": {"data": 2, "expert": 2},
    "vpp2_ep2": {"pipeline": 2, "virtual_pipeline": 2, "data": 2, "expert": 2},
    "tp2_cp2": TENSOR | {"context": 2},
}
DAILY = (("one", "kept"), ("tp2_ep2_etp1", "recomputed"))
BATCH = random_batch(seed=11, group=3)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: save_tiny(name, root / name) for name in EXPERTS}


def routers(model: Any) -> list[Any]:
    return [m for m in model.modules() if type(m).__name__.lower().endswith("topkrouter")]


def random_routes(directory: Path, seed: int) -> torch.Tensor:
    """Any experts for all tokens, the same ones in prompts that rows share, none for a third of
    them."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    generator = torch.Generator().manual_seed(seed)
    layers = routers(model)
    shape = (*BATCH["input_ids"].shape, len(layers), layers[0].weight.shape[0])
    routes = torch.rand(shape, generator=generator).argsort(dim=-1)[..., : layers[0].top_k]
    prompt = shape[1] - BATCH["response_mask"].shape[1]
    groups = shape[0] // 3
    routes[:, :prompt] = routes[torch.arange(shape[0]) % groups, :prompt]
    missing = torch.rand(shape[:2], generator=generator) < 1 / 3
    missing[:, :prompt] = missing[torch.arange(shape[0]) % groups, :prompt]
    routes[missing] = -1
    return routes.to(torch.int16)


def weights_at(router: Any, config: Any, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The weights of given experts by the rule of the family."""
    if config.model_type in ("deepseek_v3", "deepseek_v32", "glm4_moe"):
        chosen = logits.float().sigmoid().gather(1, ids)
        return chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * config.routed_scaling_factor
    chosen = logits.float().softmax(-1).gather(1, ids)
    if config.model_type == "deepseek_v2":
        return chosen * config.routed_scaling_factor
    if config.model_type in ("mixtral", "qwen3_5_moe_text") or config.norm_topk_prob:
        chosen = chosen / chosen.sum(-1, keepdim=True)
    return chosen


def oracle(directory: Path, routes: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs (B, R) and gradients of ``workers.weighted_loss`` by transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    given: list[torch.Tensor] = []

    def replay(number: int) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> Any:
            logits, weights, own = output
            ids = given[0][:, number].long()
            chosen = torch.where((ids >= 0).all(-1, keepdim=True), ids, own)
            return (
                logits,
                weights_at(module, model.config, logits, chosen).to(weights.dtype),
                chosen,
            )

        return hook

    for number, router in enumerate(routers(model)):
        router.register_forward_hook(replay(number))
    found = torch.zeros(BATCH["response_mask"].shape)
    names = ("input_ids", "attention_mask", "response_mask", "advantages")
    for row, (ids, seen, mask, weights) in enumerate(
        zip(*(BATCH[name] for name in names), strict=True)
    ):
        tokens, places = ids[seen.bool()], predicted(seen, mask)
        given[:] = [routes[row][seen.bool()]]
        log_p = model(tokens[None]).logits[0].log_softmax(-1)[places - 1]
        chosen = log_p.gather(-1, tokens[places, None]).squeeze(-1)
        found[row, mask] = chosen.detach()
        (-(chosen * weights[mask]).sum() / BATCH["response_mask"].sum()).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(gradients.get(name, torch.zeros_like(parameter)))
    model.save_pretrained(directory.parent / f"{directory.name}_gradients")
    return found, weights_of(directory.parent / f"{directory.name}_gradients")


@pytest.fixture(scope="module")
def routes(models: dict[str, Path]) -> dict[str, torch.Tensor]:
    return {name: random_routes(path, seed) for seed, (name, path) in enumerate(models.items())}


@pytest.fixture(scope="module")
def expected(models: dict[str, Path], routes: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: oracle(path, routes[name]) for name, path in models.items()}


@pytest.fixture(scope="module")
def alone(models: dict[str, Path], routes: dict[str, Any], tmp_path_factory: Any) -> dict[str, Any]:
    """What one rank records."""
    return in_world(models, routes, "one", tmp_path_factory.mktemp("alone"))[0]


def in_world(
    models: dict[str, Path], routes: dict[str, Any], name: str, out: Path, recompute: bool = False
) -> list[dict[str, Any]]:
    layout = LAYOUTS[name]
    return run_world(
        "replayed",
        Layout(**layout).world_size,
        layout=layout,
        directories={family: str(path) for family, path in models.items()},
        batch=BATCH,
        routes=routes,
        recompute=recompute,
        out=str(out),
    )


@pytest.mark.parametrize(
    ("name", "recompute"),
    [
        pytest.param(
            *(name, passes == "recomputed"),
            id=f"{name}-{passes}",
            marks=() if (name, passes) in DAILY else pytest.mark.long,
        )
        for passes in ("kept", "recomputed")
        for name in LAYOUTS
    ],
)
def test_recorded_choices_change_nothing_and_others_are_taken(
    models: dict[str, Path],
    routes: dict[str, torch.Tensor],
    expected: dict[str, Any],
    alone: dict[str, Any],
    name: str,
    recompute: bool,
    tmp_path: Path,
) -> None:
    attended = BATCH["attention_mask"].bool()
    for results in in_world(models, routes, name, tmp_path, recompute):
        for family, (own, again, recorded, same, other, rates) in results.items():
            assert torch.equal(own, same), family
            torch.testing.assert_close(own, again, atol=1e-5, rtol=0)
            assert ((recorded >= 0).all(-1).all(-1) == attended).all()
            sets = recorded.sort(-1).values, alone[family][2].sort(-1).values
            assert torch.equal(*sets), family
            torch.testing.assert_close(other, expected[family][0], atol=1e-5, rtol=0)
            known = (routes[family][attended] >= 0).all(-1).double()
            assert rates["moe/replayed_rate"] == pytest.approx(float(known.mean()), abs=0.15)
            assert rates["moe/replay_differs_rate"] > 0.5
    for family in models:
        found, bound = weights_of(tmp_path / family), 2 * gradient_bound(family, 4)
        for tensor, want in expected[family][1].items():
            gap = float((found[tensor] - want).norm())
            assert gap <= bound * float(want.norm()) + 1e-9, (family, tensor, gap)


@pytest.mark.parametrize("name", ["one", pytest.param("tp2_cp2", marks=pytest.mark.long)])
def test_with_the_engines_choices_the_gap_is_that_of_equal_experts(
    tmp_path: Path, name: str
) -> None:
    """In bfloat16 engine and trainer choose other experts; with the engine's choices the log-probs
    differ as they do where all experts are equal."""
    sizes = {"hidden_size": 128, "num_hidden_layers": 4, "num_experts": 32}
    directory = save_tiny("qwen3_moe", tmp_path / "model", torch.bfloat16, **sizes)
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(0, 90, (12, 20), generator=generator).tolist()
    layout = LAYOUTS[name]
    found = run_world(
        "replayed_engine",
        Layout(**layout).world_size,
        layout=layout,
        directory=str(directory),
        prompts=prompts,
        tokens=40,
        dtype="bfloat16",
    )[0]
    mask, attended = found["mask"], found["attended"]
    known = attended & (found["routes"] >= 0).all(-1).all(-1)
    differs = (found["chosen"].sort(-1).values != found["routes"].sort(-1).values).any(-1).any(-1)
    share = float(differs[known].double().mean())
    gaps = {way: (found[way] - found["engine"]).abs()[mask] for way in ("own", "replayed")}
    # A drawn token is predicted at the token before it.
    start = attended.shape[1] - mask.shape[1]
    equal = ~differs[:, start - 1 : -1][mask]
    base = float(gaps["own"][equal].mean())
    figures = {
        "tokens with other experts": share,
        "gap, all experts equal": base,
        "gap, some differ": float(gaps["own"][~equal].mean()),
        "gap, replayed": float(gaps["replayed"].mean()),
    }
    print(figures)
    assert share > 0.05
    assert figures["gap, replayed"] <= 1.15 * base < figures["gap, some differ"]

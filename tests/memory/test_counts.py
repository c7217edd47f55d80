"""The budget against models that are really built: parameters, gradients, optimizer, passes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import measured
import pytest

from ctrl_megatron.memory.activations import (
    PassShape,
    inference_workspace,
    saved_bytes_per_token,
    update_activations_and_workspace,
)
from ctrl_megatron.memory.model_state import (
    ModelMemory,
    largest_layer_parameter,
    stage_buckets,
    trained_model_memory,
)
from ctrl_megatron.models.hf_config import parse_model_shape
from ctrl_megatron.models.shape import ModelShape, value_model_shape
from ctrl_megatron.parallel.layout import Layout

SHAPES = Path(__file__).parents[2] / "examples/shapes"
BIG, EXPERTS_30B = SHAPES / "qwen2.5-72b.json", SHAPES / "qwen3-30b-a3b.json"
EXPERTS_235B = SHAPES / "qwen3-235b-a22b.json"
LARGE: dict[str, tuple[Path, dict[str, Any], list[int]]] = {
    "64 ranks": (
        BIG,
        {"tensor": 8, "pipeline": 8, "sequence_parallel": True},
        [tp + 8 * pp for pp in range(8) for tp in (0, 7)],
    ),
    "experts on 8 ranks": (
        EXPERTS_30B,
        {"tensor": 4, "data": 2, "expert": 8, "expert_tensor": 1, "sequence_parallel": True},
        [7],
    ),
    "experts in uneven stages": (
        EXPERTS_235B,
        {
            **{"tensor": 4, "pipeline": 8, "data": 2, "expert": 8, "expert_tensor": 1},
            "sequence_parallel": True,
        },
        [0, 15, 63],
    ),
    "512 ranks": (
        BIG,
        {"tensor": 8, "pipeline": 8, "data": 8, "sequence_parallel": True},
        # Both ends and a middle of every dimension.
        [tp + 8 * (dp + 8 * pp) for pp in (0, 3, 7) for dp in (0, 7) for tp in (0, 7)],
    ),
    "512 ranks, virtual stages": (
        BIG,
        {"tensor": 8, "pipeline": 4, "virtual_pipeline": 2, "data": 16, "sequence_parallel": True},
        [0, 127, 128, 511],
    ),
}


def assert_equal_within(state: ModelMemory, held: dict[str, int], share: float) -> None:
    for part in ("parameters", "gradients", "master", "moments"):
        planned, real = getattr(state, part), held[part]
        assert abs(planned - real) <= share * real, (part, planned, real)


def elements(shape: ModelShape, layout: Layout, pp: int) -> int:
    return sum(sum(bucket.sizes) for bucket in stage_buckets(shape, layout, pp=pp))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.long) if n in ("64 ranks", "experts on 8 ranks") else n
        for n in LARGE
    ],
)
def test_every_rank_of_a_large_model_holds_what_is_planned(name: str, tmp_path: Path) -> None:
    file, layout_keys, ranks = LARGE[name]
    layout, shape = Layout(**layout_keys), parse_model_shape(json.loads(file.read_text()))
    found = measured.count("large_ranks", str(file), layout_keys, ranks, folder=tmp_path)
    for rank, held in zip(ranks, found, strict=True):
        pp = layout.coordinates(rank).pp
        assert held["count"] == elements(shape, layout, pp), rank
        state = trained_model_memory(shape, layout, pp=pp, dtype="bfloat16", distributed=True)
        assert_equal_within(state, held, 0.02)


def case(
    layout: dict[str, Any] | None = None, shape: dict[str, Any] | None = None, **options: Any
) -> dict[str, Any]:
    return {"layout": layout or {}, "shape": shape or {}, "options": options}


SEQUENCE = {"tensor": 2, "sequence_parallel": True}
EXPERTS = {
    "model_type": "qwen3_moe",
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
}
LATENT = {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 8,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
STATES = {
    "latent attention": case({"data": 2}, LATENT),
    "latent attention, expert and tensor ranks": case({**SEQUENCE, "data": 2, "expert": 2}, LATENT),
    "latent attention, stages": case({"pipeline": 2}, LATENT),
    "one": case(),
    "float32": case(dtype="float32"),
    "plain optimizer": case(distributed=False),
    "plain optimizer, float32": case(distributed=False, dtype="float32"),
    "data 4": case({"data": 4}),
    "context ranks": case({"context": 2, "data": 2}),
    "odd vocabulary": case({"tensor": 2, "data": 3}, {"vocab_size": 2011}),
    "tied over stages": case({"pipeline": 2, "data": 2}, {"tie_word_embeddings": True}),
    "tied": case({"tensor": 2}, {"tie_word_embeddings": True}),
    "virtual stages": case({"pipeline": 2, "virtual_pipeline": 2}),
    "qk norms": case({"tensor": 2}, {"model_type": "qwen3", "head_dim": 32}),
    "adapters": case({"tensor": 2, "data": 2}, {"lora": 8, "tie_word_embeddings": True}),
    "adapters over stages": case({**SEQUENCE, "pipeline": 2}, {"lora": 8}),
    "adapters of experts": case({"data": 2, "expert": 2}, {**EXPERTS, "lora": 8}),
    "adapters of experts over tensor ranks": case(
        {**SEQUENCE, "data": 2, "expert": 2}, {**EXPERTS, "lora": 8}
    ),
    "adapters of latent attention": case({**SEQUENCE, "data": 2}, {**LATENT, "lora": 8}),
    "experts": case({"data": 2}, EXPERTS),
    "experts over context ranks": case({"context": 2, "data": 2, "expert": 4}, EXPERTS),
    "adapters over context ranks": case({"tensor": 2, "context": 2}, {"lora": 8}),
    "expert ranks": case({"data": 4, "expert": 2}, EXPERTS),
    "expert ranks of stages": case({"pipeline": 2, "data": 2, "expert": 2}, EXPERTS),
    "expert and tensor ranks": case({**SEQUENCE, "data": 4, "expert": 2}, EXPERTS),
    "whole experts beside tensor ranks": case(
        {**SEQUENCE, "data": 2, "expert": 2, "expert_tensor": 1}, EXPERTS
    ),
    "plain optimizer, expert ranks": case({"data": 2, "expert": 2}, EXPERTS, distributed=False),
}


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, int]]]:
    folder = tmp_path_factory.mktemp("states")
    found = iter(measured.count("small_ranks", list(STATES.values()), folder=folder))
    return {
        name: [next(found) for _ in range(given["layout"].get("pipeline", 1))]
        for name, given in STATES.items()
    }


@pytest.mark.parametrize("name", STATES)
def test_models_in_host_memory_hold_what_is_planned(
    states: dict[str, list[dict[str, int]]], name: str
) -> None:
    given = STATES[name]
    layout, options = Layout(**given["layout"]), given["options"]
    shape = measured.small(**given["shape"])
    for pp, held in enumerate(states[name]):
        assert held["count"] == elements(shape, layout, pp)
        state = trained_model_memory(
            shape,
            layout,
            pp=pp,
            dtype=options.get("dtype", "bfloat16"),
            distributed=options.get("distributed", True),
        )
        assert_equal_within(state, held, 0.02)


FFN_BOUND = {"vocab_size": 256, "hidden_size": 512, "intermediate_size": 2048}
MANY_EXPERTS = {**EXPERTS, "vocab_size": 256, "num_experts_per_tok": 4}
GROUPED = {"overrides": {"moe_grouped_gemm": True}}
LOGITS_BOUND = {"vocab_size": 16000}
MLP = {"recompute_granularity": "selective", "overrides": {"recompute_modules": ["mlp"]}}
PASSES = {
    "one": case(),
    "float32": case(dtype="float32"),
    "attention again": case(recompute_granularity="selective"),
    "mlp again": case(**MLP),
    "layers again": case(recompute_granularity="full"),
    "two layers again": case(recompute_granularity="full", recompute_num_layers=2),
    "tensor 2": case({"tensor": 2}),
    "sequence parallel": case(SEQUENCE),
    "sequence parallel, layers again": case(SEQUENCE, recompute_granularity="full"),
    "first of two stages": case({**SEQUENCE, "pipeline": 2}),
    "qk norms": case(shape={"model_type": "qwen3", "head_dim": 32}),
    "wide": case(shape=FFN_BOUND),
    "wide, layers again": case(SEQUENCE, FFN_BOUND, recompute_granularity="full"),
    "large vocabulary": case(SEQUENCE, LOGITS_BOUND),
    "large vocabulary, float32": case(shape=LOGITS_BOUND, dtype="float32"),
    "experts": case(shape=EXPERTS),
    "experts, layers again": case(shape=EXPERTS, recompute_granularity="full"),
    "experts over ranks": case({"data": 2, "expert": 2}, EXPERTS),
    "experts over tensor ranks": case(SEQUENCE, EXPERTS),
    "experts that bound": case(shape=MANY_EXPERTS),
    "experts over ranks that bound": case({"data": 2, "expert": 2}, MANY_EXPERTS),
    "whole experts over tensor ranks": case(
        {**SEQUENCE, "data": 2, "expert": 4, "expert_tensor": 1}, EXPERTS
    ),
    "grouped experts": case(shape=EXPERTS, **GROUPED),
    "grouped experts that bound": case(shape=MANY_EXPERTS, **GROUPED),
    "grouped experts over ranks": case({"data": 2, "expert": 2}, MANY_EXPERTS, **GROUPED),
    "latent attention": case(shape=LATENT),
    "adapters": case(shape={"lora": 8}),
    "adapters over tensor ranks": case(SEQUENCE, {"lora": 8}),
    "adapters, layers again": case(shape={"lora": 8}, recompute_granularity="full"),
    "adapters of experts": case(shape={**EXPERTS, "lora": 8}),
    "adapters of grouped experts": case(shape={**EXPERTS, "lora": 8}, **GROUPED),
    "adapters of latent attention": case(shape={**LATENT, "lora": 8}),
    "value model": case() | {"kind": "value"},
    "shared prompts": case() | {"kind": "shared"},
    "context ranks": case({"context": 2}),
    "context and tensor ranks": case({**SEQUENCE, "context": 2}, {"num_key_value_heads": 2}),
    "context ranks with all keys": case({"context": 3}),
    "experts over context ranks": case({"context": 2, "expert": 2}, EXPERTS),
    "adapters over context ranks": case({"context": 2}, {"lora": 8}),
    "value model over context ranks": case({"context": 2}) | {"kind": "value"},
    "context ranks, latent attention": case({"context": 2}, LATENT),
}


SECOND_CASES = frozenset(
    {
        *("two layers again", "sequence parallel, layers again", "wide, layers again"),
        *("large vocabulary, float32", "experts, layers again", "experts over tensor ranks"),
        *("experts over ranks that bound", "grouped experts that bound", "adapters, layers again"),
        *("adapters over tensor ranks", "adapters of grouped experts"),
        *("adapters of latent attention", "context ranks with all keys"),
        *("experts over context ranks", "adapters over context ranks"),
        *("value model over context ranks", "context ranks, latent attention"),
        *("whole experts over tensor ranks", "grouped experts over ranks", "adapters of experts"),
        "context and tensor ranks",
    }
)
"""Cases that combine what others have apart, which only long runs of the tests measure."""


def pass_parameters(names: Iterable[str]) -> list[Any]:
    return [pytest.param(n, marks=pytest.mark.long) if n in SECOND_CASES else n for n in names]


@pytest.fixture(scope="module")
def found_in_passes(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], dict[str, int]]:
    """What a case takes; those that are asked for in one run of the tests are measured together."""

    @cache
    def measure(second: bool) -> dict[str, dict[str, int]]:
        names = [name for name in PASSES if (name in SECOND_CASES) is second]
        folder = tmp_path_factory.mktemp("passes")
        found = measured.count("passes", [PASSES[name] for name in names], folder=folder)
        return dict(zip(names, found, strict=True))

    return lambda name: measure(name in SECOND_CASES)[name]


def pass_shape(given: dict[str, Any]) -> PassShape:
    options, shape = given["options"], measured.small(**given["shape"])
    modules = options.get("overrides", {}).get("recompute_modules", ["core_attn"])
    return PassShape(
        shape=value_model_shape(shape) if given.get("kind") == "value" else shape,
        layout=Layout(**given["layout"]),
        kernels="torch",
        dtype_size=4 if options.get("dtype") == "float32" else 2,
        tokens=measured.tokens(given.get("kind") == "shared") // given["layout"].get("context", 1),
        micro_batches=1,
        logprob_chunk=128,
        recompute_granularity=options.get("recompute_granularity"),
        recompute_num_layers=options.get("recompute_num_layers", 1),
        recompute_modules=modules,
        grouped_experts=options.get("overrides", {}).get("moe_grouped_gemm", False),
    )


@pytest.mark.parametrize("name", pass_parameters(PASSES))
def test_passes_take_what_is_planned(
    found_in_passes: Callable[[str], dict[str, int]], name: str
) -> None:
    given, found = PASSES[name], found_in_passes(name)
    p = pass_shape(given)
    largest = largest_layer_parameter(p.shape, p.layout)
    kept, workspace = update_activations_and_workspace(p, pp=0, largest=largest)
    if p.recompute_granularity != "full":
        # Without the layers that are computed again while the others' gradients are made.
        assert kept == pytest.approx(found["kept"], rel=0.15)
    assert kept + workspace == pytest.approx(found["update"], rel=0.15)
    assert inference_workspace(p, pp=0) == pytest.approx(found["inference"], rel=0.15)


@pytest.mark.parametrize(
    "name",
    pass_parameters(
        name
        for name, given in PASSES.items()
        # Without what is computed again: layers, and the logits of a large vocabulary.
        if not given["options"]
        and "vocab_size" not in given["shape"]
        and "pipeline" not in given["layout"]
    ),
)
def test_passes_compute_what_is_counted(
    found_in_passes: Callable[[str], dict[str, int]], name: str
) -> None:
    found, layout = found_in_passes(name), Layout(**PASSES[name]["layout"])
    counted = found["counted_flops"] / (layout.tensor * layout.context)
    assert counted == pytest.approx(found["flops"], rel=0.15)


def test_a_whole_step_over_gloo_takes_what_is_planned(tmp_path: Path) -> None:
    held = measured.count("one_real_step", {}, folder=tmp_path)
    p = pass_shape(case())
    state = trained_model_memory(p.shape, Layout(), pp=0, dtype="bfloat16", distributed=True)
    assert_equal_within(state, held, 0.02)
    use = update_activations_and_workspace(
        p, pp=0, largest=largest_layer_parameter(p.shape, Layout())
    )
    assert sum(use) == pytest.approx(held["peak"], rel=0.15)


def test_fused_swiglu_keeps_three_fifths(tmp_path: Path) -> None:
    """The plan's assumption about Transformer Engine, checked with Megatron's own kernel."""
    megatrons = {"use_te_activation_func": False}
    plain = case(overrides=megatrons)
    fused = case(overrides={**megatrons, "bias_activation_fusion": True})
    before, after = measured.count("passes", [plain, fused], folder=tmp_path)
    p = pass_shape(plain)
    halves = 2 * p.dtype_size * p.shape.max_layer_width * p.shape.num_layers * p.tokens
    assert before["kept"] - after["kept"] == pytest.approx(halves, rel=0.01)
    assert saved_bytes_per_token(p) > 0

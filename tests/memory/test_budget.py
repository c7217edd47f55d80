"""Configurations that fit, configurations that are refused, and the messages."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctrl_megatron.config import Config, load_config
from ctrl_megatron.engine_kinds import ENGINES
from ctrl_megatron.memory.activations import PassShape, micro_batches_in_flight
from ctrl_megatron.memory.budget import RESERVE, MemoryBudget, memory_budget
from ctrl_megatron.memory.engine import GIB, EngineMemoryUse, actor_engine_memory
from ctrl_megatron.memory.fit import describe_misfit, phase_over_limit
from ctrl_megatron.memory.model_state import (
    engine_weight_bytes,
    frozen_model_memory,
    trained_model_memory,
)
from ctrl_megatron.memory.shapes import ModelShapes
from ctrl_megatron.models.hf_config import parse_model_shape
from ctrl_megatron.models.rules import hf_shapes
from ctrl_megatron.models.shape import ModelShape, value_model_shape
from ctrl_megatron.parallel.layout import Layout, worlds_of

EXAMPLES = Path(__file__).parents[2] / "examples"
MODELS = {
    "ctrl_7b.yaml": "qwen2.5-7b.json",
    "ctrl_70b.yaml": "qwen2.5-72b.json",
    "qwen3_30b_a3b.yaml": "qwen3-30b-a3b.json",
    "qwen3_235b.yaml": "qwen3-235b-a22b.json",
    "qwen3_5_35b_a3b.yaml": "qwen3.5-35b-a3b.json",
    "glm_4_5_air.yaml": "glm-4.5-air.json",
    "diffucoder_7b.yaml": "dream-7b.json",
}
PHASES = (
    *("start: engine", "start: models", "generate", "sync proxy", "log-probs", "update", "sync"),
    "save",
)
MEMORY = 80 * GIB
M, R = "actor_rollout_ref.actor.megatron.", "actor_rollout_ref.rollout."


def shape_of(file: str) -> ModelShape:
    return parse_model_shape(json.loads((EXAMPLES / "shapes" / file).read_text()))


def example(file: str, *overrides: str, value: bool = False) -> tuple[Config, ModelShapes]:
    shape = shape_of(MODELS[file])
    config = load_config(EXAMPLES / file, overrides)
    return config, ModelShapes(
        actor=shape, reference=shape, value=value_model_shape(shape) if value else None
    )


def fault(config: Config, shapes: ModelShapes) -> str:
    return describe_misfit(config, shapes, gpu_memory=MEMORY) or ""


def totals(budget: MemoryBudget) -> dict[str, int]:
    return {use.phase: use.total for use in budget.phases}


@pytest.mark.parametrize("purpose", ["rl", "sft"])
@pytest.mark.parametrize("file", MODELS)
def test_the_examples_fit_gpus_of_80_gb_with_a_reserve(file: str, purpose: Any) -> None:
    memory = 79 * GIB  # what CUDA says of them
    config, shapes = example(file)
    if purpose == "sft":
        shapes = replace(shapes, reference=None)
    assert describe_misfit(config, shapes, gpu_memory=memory, purpose=purpose) is None
    budget = memory_budget(config, shapes, gpu_memory=memory, purpose=purpose)
    assert max(totals(budget).values()) <= (1 - RESERVE) * memory
    if purpose == "rl":
        assert budget.engine is not None
        rollout = config.actor_rollout_ref.rollout
        rows = (
            1
            if rollout.name == "diffusion"
            else rollout.max_num_seqs or ENGINES[rollout.name].default_max_sequences(memory)
        )
        assert budget.engine.kv_cache_tokens >= rows * config.max_model_len
    # Nodes of eight such GPUs have 1 to 2 TiB.
    assert sum(budget.host.values()) < 768 * GIB


def test_kept_prefixes_are_a_cache_of_all_rows() -> None:
    sizes = []
    for kept in ("false", "true"):
        kwargs = f"actor_rollout_ref.rollout.engine_kwargs={{steps: 256, keep_prefix: {kept}}}"
        config, shapes = example("diffucoder_7b.yaml", kwargs)
        engine = memory_budget(config, shapes, gpu_memory=MEMORY).engine
        assert engine is not None
        sizes.append(engine.kv_cache_tokens)
    assert sizes[1] == 20 * sizes[0]  # max_num_seqs of the file


@pytest.mark.parametrize("file", MODELS)
def test_every_phase_of_a_run_is_there_in_its_order(file: str) -> None:
    config, shapes = example(file)
    found = list(totals(memory_budget(config, shapes, gpu_memory=MEMORY)))
    phases = [p for p in PHASES if config.proxy_shares_engines or p != "sync proxy"]
    assert found == [*phases, "save-on-stop", "resume"]
    tuned = memory_budget(config, shapes, gpu_memory=MEMORY, purpose="sft")
    assert not {"start: engine", "generate", "log-probs", "sync"} & totals(tuned).keys()
    assert tuned.engine is None


def test_the_proxy_arrives_beside_the_cache() -> None:
    """Its push follows the critiques, without a sleep between: the engine is awake as a whole."""
    config, shapes = example("ctrl_70b.yaml")
    budget = memory_budget(config, shapes, gpu_memory=MEMORY)
    found, engine = totals(budget), budget.engine
    assert engine is not None
    assert found["sync proxy"] == found["generate"] + engine.reload
    assert found["sync proxy"] > 68 * GIB > 2 * found["sync"]
    grpo = "dag.custom_pipeline_fn=ctrl_megatron.pipeline:grpo_pipeline"
    plain, shapes = example("ctrl_70b.yaml", grpo, "reward.reward_funcs=[code]")
    assert "sync proxy" not in totals(memory_budget(plain, shapes, gpu_memory=MEMORY))
    own, shapes = example("ctrl_70b.yaml", "actor_rollout_ref.proxy.kind=engine")
    assert "sync proxy" not in totals(memory_budget(own, shapes, gpu_memory=MEMORY))


def test_a_second_policy_takes_what_the_actor_takes() -> None:
    second = ("agent1.model.path=solver", "dag.custom_pipeline_fn=mine:build")
    config, shapes = example("ctrl_7b.yaml", *second, f"{M}param_offload=false")
    shapes = replace(shapes, further=(replace(shapes, further=()),))
    budget = memory_budget(config, shapes, gpu_memory=MEMORY)
    update = next(use.items for use in budget.phases if use.phase == "update")
    for part in ("parameters", "gradients", "master weights", "moments"):
        assert update[f"agent1's {part}"] == update[f"actor's {part}"] > 0
    # Each has a reference.
    for reference in ("reference", "reference of agent1"):
        assert update[f"{reference}'s parameters"] == update["actor's parameters"]
    found, engine = totals(budget), budget.engine
    assert (
        engine is not None
        and found["sync of further policies"] == found["generate"] + engine.reload
    )
    assert shapes.trained_shapes == (shapes.actor, shapes.actor)


def test_a_divergence_over_the_vocabulary_is_in_the_update() -> None:
    keys = "algorithm.distillation."
    taught = (f"{keys}teacher=policy", f"{keys}divergence=jsd")
    updates = [
        totals(memory_budget(*example("ctrl_7b.yaml", *extra), gpu_memory=MEMORY))["update"]
        for extra in ((), taught, (*taught, f"{keys}estimator=full"))
    ]
    assert updates[0] == updates[1] < updates[2]


def test_an_engine_that_fills_its_gpu_has_no_room_for_the_proxys_tensors() -> None:
    config, shapes = example("ctrl_70b.yaml", f"{R}gpu_memory_utilization=0.87")
    assert re.search(r"^sync proxy needs 7\d\.\d GiB .* fits with .*0\.85", fault(config, shapes))


TOO_LARGE = {
    "nothing leaves": (f"{M}param_offload=false", f"{M}optimizer_offload=false"),
    "long micro-batches": ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=32768",),
    "greedy engine": (f"{R}gpu_memory_utilization=0.97",),
    "an engine that never sleeps": (f"{R}free_cache_engine=false",),
    "all at once": (
        *(f"{M}param_offload=false", f"{M}optimizer_offload=false", f"{M}grad_offload=false"),
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=32768",
        f"{R}gpu_memory_utilization=0.85",
    ),
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_what_does_not_fit_is_refused_in_a_line_whose_remedy_helps(name: str) -> None:
    config, shapes = example("ctrl_7b.yaml", *TOO_LARGE[name])
    text = fault(config, shapes)
    assert "\n" not in text and re.match(
        r"(start: \w+|generate|update|log-probs|sync|sync proxy) needs", text
    )
    assert re.search(r"largest: [a-z' -]+ \d+\.\d GiB, ", text)
    _, _, remedy = text.partition("it fits with ")
    assert remedy, text
    for alternative in remedy.split(", or with "):
        changed, _ = example("ctrl_7b.yaml", *TOO_LARGE[name], *alternative.split())
        assert not fault(changed, shapes)


def test_a_model_too_large_for_its_gpus_gets_a_larger_layout_as_remedy() -> None:
    config, shapes = example("ctrl_7b.yaml")
    large = shape_of("qwen2.5-72b.json")
    shapes = ModelShapes(actor=large, reference=large, value=None)
    assert re.search(r"raise .*tensor_model_parallel_size or pipeline", fault(config, shapes))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (f"{M}tensor_model_parallel_size=8", "num_attention_heads=28 does not divide"),
        (f"{M}pipeline_model_parallel_size=32 trainer.nnodes=4", "28 layers are too few"),
    ],
)
def test_a_layout_that_does_not_suit_the_model_is_named(override: str, words: str) -> None:
    config, shapes = example(
        "ctrl_7b.yaml",
        *(f"{M}tensor_model_parallel_size=1", *override.split(), f"{M}sequence_parallel=false"),
    )
    with pytest.raises(ValueError, match=words):
        fault(config, shapes)


def test_an_engine_without_room_for_one_sequence_is_refused() -> None:
    config, shapes = example("ctrl_70b.yaml", f"{R}gpu_memory_utilization=0.24")
    assert re.search(
        r"tokens beside weights .*, a sequence of .* needs 4096", fault(config, shapes)
    )


def test_a_7b_model_is_trained_on_one_gpu_of_80_gb_with_its_optimizer_on_the_host() -> None:
    alone = [
        *("trainer.nnodes=1", "trainer.n_gpus_per_node=1", f"{M}tensor_model_parallel_size=1"),
        *(f"{R}tensor_model_parallel_size=1", f"{R}gpu_memory_utilization=0.7"),
        *(f"{M}sequence_parallel=false", f"{M}recompute_granularity=full"),
        *(f"{M}{key}_offload=true" for key in ("param", "optimizer", "grad")),
    ]
    config, shapes = example("ctrl_7b.yaml", *alone)
    used = totals(memory_budget(config, shapes, gpu_memory=MEMORY))
    assert used["update"] > 1.5 * MEMORY
    config, shapes = example("ctrl_7b.yaml", *alone, f"{M}optimizer_cpu_offload=true")
    budget = memory_budget(config, shapes, gpu_memory=MEMORY)
    assert phase_over_limit(config, budget) is None
    assert budget.host["optimizer away"] == pytest.approx(12 * 7.6e9, rel=0.02)


def test_the_old_7b_example_would_not_have_fitted() -> None:
    """The run had no offloading, selective recomputation and micro-batches of 16384 tokens."""
    old = [f"{M}{key}_offload=false" for key in ("param", "optimizer", "grad")]
    old += [f"{M}recompute_granularity=selective"]
    old += ["actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384"]
    config, shapes = example("ctrl_7b.yaml", *old)
    used = totals(memory_budget(config, shapes, gpu_memory=MEMORY))
    assert used["generate"] > MEMORY and used["update"] > MEMORY


def test_a_value_model_takes_what_an_actor_takes_without_its_vocabulary() -> None:
    config, shapes = example("ctrl_7b.yaml", "algorithm.adv_estimator=gae")
    one = memory_budget(config, shapes, gpu_memory=MEMORY)
    _, both = example("ctrl_7b.yaml", value=True)
    two = memory_budget(config, both, gpu_memory=MEMORY)
    for use, alone in zip(two.phases, one.phases, strict=True):
        if use.phase in ("update", "save", "resume"):
            assert use.items["value model's moments"] < use.items["actor's moments"]
            assert use.total > alone.total
    assert sum(two.host.values()) > sum(one.host.values())


def test_models_on_ranks_of_their_own_are_planned_there_and_not_beside_the_actor() -> None:
    keys = ("algorithm.adv_estimator=gae", "trainer.nnodes=2")
    where = ("placement.critic={hosts: [1]}", "critic.megatron.tensor_model_parallel_size=4")
    where += (
        "placement.reference=[6,7]",
        "actor_rollout_ref.ref.megatron.tensor_model_parallel_size=2",
    )
    together, shapes = example("ctrl_7b.yaml", *keys, value=True)
    apart, _ = example("ctrl_7b.yaml", *keys, *where)
    actor, critic, reference = worlds_of(16, apart)
    assert [len(world.ranks) for world in (actor, critic, reference)] == [6, 8, 2]
    one = memory_budget(together, shapes, gpu_memory=MEMORY)
    several = memory_budget(apart, shapes, gpu_memory=MEMORY)
    uses = {use.phase: use for use in several.phases}
    kept = trained_model_memory(
        value_model_shape(shapes.actor), critic.layout, pp=0, dtype="bfloat16", distributed=True
    )
    update = uses["critic: update"]
    assert update.rank == 8
    for part, size in {
        "parameters": kept.parameters,
        "gradients": kept.gradients,
        "master weights": kept.master,
        "moments": kept.moments,
    }.items():
        assert update.items[f"value model's {part}"] == size
    frozen = frozen_model_memory(shapes.actor, reference.layout, pp=0, dtype="bfloat16").parameters
    assert uses["reference: log-probs"].items["reference's parameters"] == frozen
    assert uses["reference: log-probs"].rank == 6
    assert "reference: update" not in uses and "critic: generate" not in uses
    of_actor = [
        use for use in several.phases if ":" not in use.phase or use.phase.startswith("start")
    ]
    items = {item for use in of_actor for item in use.items}
    assert not any("value model" in item or "reference" in item for item in items)
    # The actor itself is spread over fewer ranks.
    assert uses["update"].items["actor's moments"] > totals_of(one, "actor's moments")


def totals_of(budget: MemoryBudget, item: str) -> int:
    return max(use.items.get(item, 0) for use in budget.phases)


def test_4096_ranks_are_planned_and_each_holds_less() -> None:
    config, shapes = example("ctrl_70b.yaml")
    few = memory_budget(config, shapes, gpu_memory=MEMORY)
    many, _ = example("ctrl_70b.yaml", "trainer.nnodes=512")
    most = memory_budget(many, shapes, gpu_memory=MEMORY)
    assert totals(most)["update"] < totals(few)["update"]
    assert sum(most.host.values()) < sum(few.host.values())


CHOICES = st.fixed_dictionaries(
    {
        f"{M}param_offload": st.booleans(),
        f"{M}optimizer_offload": st.booleans(),
        f"{M}grad_offload": st.booleans(),
        f"{M}optimizer_cpu_offload": st.booleans(),
        f"{M}sequence_parallel": st.booleans(),
        f"{M}tensor_model_parallel_size": st.sampled_from([1, 2, 4]),
        f"{R}free_cache_engine": st.booleans(),
        f"{R}gpu_memory_utilization": st.sampled_from([0.3, 0.5, 0.8]),
    }
)


def drawn(choices: dict[str, Any]) -> tuple[Config, ModelShapes]:
    if choices[f"{M}tensor_model_parallel_size"] == 1:
        choices = {**choices, f"{M}sequence_parallel": False}
    return example("ctrl_7b.yaml", *(f"{k}={str(v).lower()}" for k, v in choices.items()))


@settings(max_examples=12)
@given(CHOICES)
def test_more_memory_and_more_offloading_never_hurt(choices: dict[str, Any]) -> None:
    config, shapes = drawn(choices)
    budget = memory_budget(config, shapes, gpu_memory=MEMORY)
    larger = memory_budget(config, shapes, gpu_memory=2 * MEMORY)
    if phase_over_limit(config, budget) is None:
        assert phase_over_limit(config, larger) is None
    keys = ("param_offload", "optimizer_offload", "grad_offload", "optimizer_cpu_offload")
    for key in keys:
        off, on = (drawn({**choices, M + key: flag}) for flag in (False, True))
        before = totals(memory_budget(*off, gpu_memory=MEMORY))
        after = totals(memory_budget(*on, gpu_memory=MEMORY))
        assert all(after[phase] <= before[phase] for phase in before)
    for use in budget.phases:
        assert all(size > 0 for size in use.items.values())


@settings(max_examples=40)
@given(
    stages=st.integers(2, 8),
    virtual=st.integers(1, 3),
    micro=st.integers(1, 20),
    data=st.data(),
)
def test_micro_batches_under_way_are_those_of_megatrons_schedule(
    stages: int, virtual: int, micro: int, data: st.DataObject
) -> None:
    from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches

    pp = data.draw(st.integers(0, stages - 1))
    if virtual > 1:
        micro *= stages  # the interleaved schedule requires whole rounds
    group = SimpleNamespace(size=lambda: stages, rank=lambda: pp)
    virtual_size = virtual if virtual > 1 else None
    talker: Any = SimpleNamespace(pp_group=group, virtual_pipeline_model_parallel_size=virtual_size)
    total, _, warmup, _ = get_pp_rank_microbatches(micro, virtual, stages, p2p_communicator=talker)
    shape = PassShape(
        shape=shape_of("qwen2.5-7b.json"),
        layout=Layout(pipeline=stages, virtual_pipeline=virtual),
        kernels="te",
        dtype_size=2,
        tokens=1,
        micro_batches=micro,
        logprob_chunk=1,
    )
    # One forward pass more before the first backward pass.
    assert micro_batches_in_flight(shape, pp=pp) == min(warmup + 1, total)


@pytest.mark.parametrize("file", MODELS.values())
def test_shards_of_trainer_and_engine_add_up_to_the_model(file: str) -> None:
    shape = shape_of(file)
    whole = 2 * sum(map(math.prod, hf_shapes(shape).values()))
    ranks = min(4, shape.attention.groups)
    layout = Layout(tensor=ranks, pipeline=4)
    held = [frozen_model_memory(shape, layout, pp=pp, dtype="bfloat16") for pp in range(4)]
    norms = whole // 500  # every tensor rank has them, and routers, whole
    assert whole <= ranks * sum(state.parameters for state in held) <= whole + norms
    for tensor in (n for n in (1, 2, 4) if n <= ranks):
        each = engine_weight_bytes(shape, tensor=tensor, dtype="bfloat16")
        assert whole <= tensor * each <= whole + norms
    # All but embedding, head, norms and routers, in half of the bytes and with few scales.
    large = 2 * shape.vocab_size * shape.hidden_size
    halved = engine_weight_bytes(shape, tensor=1, dtype="bfloat16", quantised=True)
    if not any(kind.names.stacked for kind in shape.expert_kinds):
        assert whole / 2 < halved <= (whole + 2 * large) / 2 + norms
    # More workers than heads of keys: some hold the same ones.
    shared = engine_weight_bytes(shape, tensor=16, dtype="bfloat16") * 16
    assert shared > whole


def test_the_cache_of_an_engine_is_what_its_share_leaves() -> None:
    config, shapes = example("ctrl_7b.yaml")
    engine = actor_engine_memory(config, shapes.actor, MEMORY)
    assert engine.weights + engine.kv_cache_bytes + engine.workspace + engine.graphs == engine.share
    # Two kinds, four heads on two GPUs, 128 numbers of two bytes, 28 layers.
    assert engine.cache_per_token == 2 * 2 * 128 * 2 * 28
    eager = actor_engine_memory(
        load_config(EXAMPLES / "ctrl_7b.yaml", [f"{R}enforce_eager=true"]), shapes.actor, MEMORY
    )
    assert eager.graphs == 0 and eager.asleep_bytes < engine.asleep_bytes


def test_sglang_computes_beside_its_share() -> None:
    config, shapes = example("ctrl_7b.yaml")
    vllm = actor_engine_memory(config, shapes.actor, MEMORY)
    sglang = actor_engine_memory(
        load_config(EXAMPLES / "ctrl_7b.yaml", [f"{R}name=sglang"]), shapes.actor, MEMORY
    )
    assert sglang.kv_cache_bytes == sglang.share - sglang.weights > vllm.kv_cache_bytes
    assert sglang.awake_bytes == vllm.awake_bytes + vllm.workspace + vllm.graphs


def test_buckets_on_gpus_are_those_of_the_plan() -> None:
    def buckets(*keys: str) -> tuple[int, ModelShapes]:
        config, shapes = example("ctrl_7b.yaml", f"{R}update_bucket_megabytes=1000000", *keys)
        budget = memory_budget(config, shapes, gpu_memory=MEMORY)
        return {p.phase: p.items for p in budget.phases}["sync"].get("weight buckets", 0), shapes

    none, shapes = buckets()
    assert none == 0
    config, _ = example("ctrl_7b.yaml")
    ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
    tensor = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    whole = 2 * sum(math.prod(size) for size in hf_shapes(shapes.actor).values())
    # Everything is in one bucket, of which a GPU has room for three.
    mapped, _ = buckets(f"{R}weight_transport=cuda_ipc")
    assert mapped == pytest.approx(3 * whole / tensor, rel=0.01)
    apart = [f"{R}placement=dedicated", f"{R}n_gpus_per_node={tensor}"]
    sent, _ = buckets(f"{R}weight_transport=nccl", *apart)
    assert sent == pytest.approx(3 * whole * config.trainer.nnodes / ranks, rel=0.1)


def test_a_worker_with_a_gpu_of_its_own_has_room_for_what_it_receives() -> None:
    config, shapes = example("ctrl_7b.yaml")
    tensor = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    whole = 2 * sum(math.prod(size) for size in hf_shapes(shapes.actor).values())
    apart = [f"{R}placement=dedicated", f"{R}n_gpus_per_node={tensor}"]

    def engine(*keys: str) -> EngineMemoryUse:
        changed, _ = example("ctrl_7b.yaml", *apart, *keys)
        return actor_engine_memory(changed, shapes.actor, MEMORY)

    quiet, nccl = engine(), f"{R}weight_transport=nccl"
    assert quiet.received == 0
    # Everything is in one bucket, or many buckets of a GiB take turns in two places.
    once = engine(nccl, f"{R}update_bucket_megabytes=1000000")
    assert once.received == pytest.approx(whole / tensor, rel=0.01)
    often = engine(nccl, f"{R}update_bucket_megabytes=1024")
    assert GIB < often.received <= 2 * GIB
    assert often.awake_bytes == quiet.awake_bytes + often.received
    full = [*apart, nccl, f"{R}gpu_memory_utilization=0.98", f"{R}update_bucket_megabytes=512"]
    config, _ = example("ctrl_7b.yaml", *full)
    assert re.search(
        r"^start: engine needs .* arriving weights; it fits with", fault(config, shapes)
    )

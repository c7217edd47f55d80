"""Adapters against transformers' models with merged weights, in real gloo processes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from adapting import random_adapters
from safetensors.torch import load_file, save_file
from tiny_models import exact_models, gradient_bound, random_batch, reference_log_probs, save_tiny
from torch.func import functional_call
from world import run_world

from ctrl_megatron.checkpoint.convert import megatron_to_hf, megatron_to_peft
from ctrl_megatron.checkpoint.sharded import saved_tensor_metadata
from ctrl_megatron.errors import UserError
from ctrl_megatron.parallel.layout import Layout

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp1": {},
    "tp2": {"tensor": 2},
    "tp2_sp": {"tensor": 2, "sequence_parallel": True},
    "pp2": {"pipeline": 2},
    "dp2": {"data": 2},
    "cp2": {"context": 2},
    "tp2_cp2_sp": {"tensor": 2, "context": 2, "sequence_parallel": True},
}
FSDP: dict[str, dict[str, Any]] = {
    "shards": {"data": 2},
    "copies": {"data": 2, "sharded": 1},
    "copies of shards": {"data": 4, "sharded": 2},
}
FAMILIES = ("qwen2", "qwen3", "llama")
SCALE, PREFIX = 5 / 3, "base_model.model."


def ranks(layout: dict[str, Any]) -> int:
    return Layout(**layout).world_size


def merged(weights: dict[str, Any], adapters: dict[str, Any]) -> dict[str, Any]:
    """W + scale B A of every weight that has an adapter."""
    whole, adapters = dict(weights), unshared(adapters)
    for name in adapters:
        if ".lora_A." in name:
            up = adapters[name.replace(".lora_A.", ".lora_B.")]
            own = name.removeprefix(PREFIX).replace(".lora_A.", ".")
            whole |= added(whole, own, SCALE * (up @ adapters[name]))
    return whole


def unshared(adapters: dict[str, Any]) -> dict[str, Any]:
    """The adapters with every matrix of an expert under the expert's own name."""
    numbers = {int(found[1]) for n in adapters if (found := re.search(r"\.experts\.(\d+)\.", n))}
    found = dict[str, Any]()
    for name, tensor in adapters.items():
        shared = re.search(r"\.experts\.[a-z]", name)
        for number in numbers if shared else ():
            found[name.replace(".experts.", f".experts.{number}.")] = tensor
        if not shared:
            found[name] = tensor
    return found


def added(weights: dict[str, Any], name: str, delta: Any) -> dict[str, Any]:
    """The weight of transformers' model in which the one called ``name`` is, with ``delta`` added:
    it has the experts of a layer in one tensor, gate before up."""
    expert = re.fullmatch(r"(.*)\.experts\.(\d+)\.(\w+)\.weight", name)
    if expert is None:
        return {name: weights[name] + delta}
    block = expert[1].replace("block_sparse_moe", "mlp")
    part = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1}.get(expert[3])
    place = f"{block}.experts.{'down_proj' if part is None else 'gate_up_proj'}"
    whole, number = torch.zeros_like(weights[place]), int(expert[2])
    rows = slice(None) if part is None else slice(part * len(delta), (part + 1) * len(delta))
    whole[number, rows] = delta
    return {place: weights[place] + whole}


def expected(directory: Path, file: Path, batch: dict) -> tuple[torch.Tensor, dict[str, Any]]:
    """(log-probs with merged weights, gradients of ``workers.weighted_loss``), in float64."""
    adapters = {n: t.double().requires_grad_() for n, t in load_file(file).items()}
    width = batch["response_mask"].shape[1]
    log_probs = []
    with exact_models() as load:
        model = load(directory).requires_grad_(False)
        weights = merged(dict(model.named_parameters()), adapters)
        for ids, seen in zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True):
            own = functional_call(model, weights, (ids[seen][None],)).logits[0, :-1].log_softmax(-1)
            row = own.gather(1, ids[seen][1:, None])[:, 0]
            answer = int(seen[-width:].sum())
            log_probs.append(torch.nn.functional.pad(row[len(row) - answer :], (0, width - answer)))
    found = torch.stack(log_probs)
    mask = batch["response_mask"]
    loss = -(found * batch["advantages"] * mask).sum() / mask.sum()
    grads = torch.autograd.grad(loss, list(adapters.values()))
    return found.detach(), dict(zip(adapters, grads, strict=True))


def check(
    tmp_path: Path,
    layouts: dict[str, Any],
    families: tuple[str, ...],
    *,
    layers: int = 4,
    **further: Any,
) -> None:
    """All layouts against transformers, and the adapters after three steps against each other."""
    batch = random_batch(seed=3, group=3)
    paths = {f: save_tiny(f, tmp_path / f, num_hidden_layers=layers) for f in families}
    lora = {"targets": further.get("targets", ("all-linear",))}
    lora |= {"shared_outer": further.get("shared_outer", False)}
    files = {
        f: random_adapters(path, tmp_path / f"{f}.safetensors", **lora) for f, path in paths.items()
    }
    wanted = {f: expected(path, files[f], batch) for f, path in paths.items()}
    stepped: dict[str, dict[str, torch.Tensor]] = {}
    for name, layout in layouts.items():
        results = run_world(
            "adapting:adapted_run",
            ranks(layout),
            layout=layout,
            directories={f: str(path) for f, path in paths.items()},
            adapters={f: str(file) for f, file in files.items()},
            batch=batch,
            out=str(tmp_path / name),
            **further,
        )
        for family, path in paths.items():
            log_probs, gradients = wanted[family]
            out = tmp_path / name / family
            plain, _ = reference_log_probs(path, batch, temperature=1.0)
            again, _ = reference_log_probs(out / "merged", batch, temperature=1.0)
            mask, most = batch["response_mask"], gradient_bound(family, 4)
            for result in results:
                assert (result[family]["on"] - log_probs)[mask].abs().max() < most, (name, family)
                assert (result[family]["off"] - plain)[mask].abs().max() < most, (name, family)
            assert (log_probs - plain)[mask].abs().max() > 0.1
            assert (again - log_probs)[mask].abs().max() < most
            found = load_file(out / "gradients" / "adapter_model.safetensors")
            assert found.keys() == unshared(gradients).keys()
            found |= {
                n: found[n.replace(".experts.", ".experts.1.")]
                for n in gradients.keys() - found.keys()
            }
            norm = torch.stack([g.norm() for g in gradients.values()]).norm()
            for one, grad in gradients.items():
                # The second term is float32's rounding: keys' gradients nearly cancel.
                gap, bound = (found[one] - grad).norm(), most * grad.norm() + 1e-7 * norm
                assert gap < bound, (name, family, one, float(gap), float(bound))
            assert results[0][family]["step 0"]["grad_norm"] == pytest.approx(float(norm), rel=most)
            after = load_file(out / "stepped" / "adapter_model.safetensors")
            first = stepped.setdefault(family, after)
            for one, tensor in first.items():
                gap = (after[one] - tensor).norm() / tensor.norm()
                assert gap < most, (name, family, one, float(gap))


def test_adapters_are_merged_weights(tmp_path: Path) -> None:
    check(tmp_path, {"tp2_sp": LAYOUTS["tp2_sp"]}, ("qwen2",))


def test_adapters_of_experts_and_of_latent_attention_are_merged_weights(tmp_path: Path) -> None:
    layout = {"tensor": 2, "sequence_parallel": True, "expert": 2, "expert_tensor": 1}
    check(tmp_path, {"tp2_ep2": layout}, ("qwen3_moe", "deepseek_v3"))


def test_experts_share_outer_matrices(tmp_path: Path) -> None:
    layout = {"tensor": 2, "sequence_parallel": True, "expert": 2, "data": 2}
    check(tmp_path, {"etp2_ep2": layout}, ("qwen3_moe",), shared_outer=True)


@pytest.mark.long
@pytest.mark.parametrize(
    "further",
    [{}, {"recompute_granularity": "full", "targets": ("k_proj", "gate_proj", "o_proj")}],
    ids=["all", "recompute"],
)
def test_adapters_of_models_of_transformers_are_merged_weights(
    tmp_path: Path, further: dict
) -> None:
    check(tmp_path, {"tp1": {}}, FAMILIES, **further)
    check(tmp_path / "fsdp", FSDP, FAMILIES, strategy="fsdp", **further)
    for family in FAMILIES:
        theirs, ours = (
            folder / family / "stepped" for folder in (tmp_path / "tp1", tmp_path / "fsdp/shards")
        )
        assert_same(theirs, ours, 1e-5)


@pytest.mark.parametrize(
    ("strategy", "layouts"),
    [
        ("megatron", (LAYOUTS["tp2_sp"], LAYOUTS["cp2"])),
        pytest.param("fsdp", (FSDP["shards"], {}), marks=pytest.mark.long),
    ],
)
def test_adapters_are_saved_resumed_on_another_layout_and_exported(
    tmp_path: Path, strategy: str, layouts: tuple[dict[str, Any], ...]
) -> None:
    path, other = (
        save_tiny("qwen2", tmp_path / name, num_hidden_layers=2) for name in ("base", "other")
    )
    for name, layout, resume in zip(("first", "again"), layouts, (False, True), strict=True):
        (steps, *_) = run_world(
            "adapting:save_or_resume",
            ranks(layout),
            layout=layout,
            directory=str(path),
            checkpoints=str(tmp_path / "checkpoints"),
            resume=resume,
            batch=random_batch(seed=3),
            out=str(tmp_path / name),
            strategy=strategy,
        )
        assert all(step["grad_norm"] > 0 for step in steps.values())
    (checkpoint,) = (tmp_path / "checkpoints").glob("global_step_*")
    for model in ("policy", "value"):
        first, again = tmp_path / "first" / model, tmp_path / "again" / model
        assert_same(first / "saved", again / "saved", 0.0)
        assert_same(first / "stepped", again / "stepped", 1e-4)
        held = {
            n.split(".lora_")[0].split(".")[-1] for n in saved_tensor_metadata(checkpoint / model)
        }
        assert held.isdisjoint({"embed_tokens", "norm"}) and "down_proj" in held
        megatron_to_hf(checkpoint, tmp_path / f"{model}_hf", folder=model)
        assert_same(first / "merged", tmp_path / f"{model}_hf", 1e-6)
        megatron_to_peft(checkpoint, tmp_path / f"{model}_peft", folder=model)
        assert_same(first / "saved", tmp_path / f"{model}_peft", 0.0)
        config = json.loads((tmp_path / f"{model}_peft" / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == str(path)
    assert (config["r"], config["target_modules"]) == (2, ["q_proj", "down_proj"])
    with torch.no_grad():
        weights = load_file(other / "model.safetensors")
        weights["model.norm.weight"] += 1
        save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"were trained beside the weights of .* differ"):
        megatron_to_hf(checkpoint, tmp_path / "wrong", base=other)


def assert_same(left: Path, right: Path, rel: float) -> None:
    """Equal tensors in the only safetensors file of two directories."""
    (one,), (two,) = (list(folder.glob("*.safetensors")) for folder in (left, right))
    before, after = load_file(one), load_file(two)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert (after[name] - tensor).norm() <= rel * tensor.norm(), name


@pytest.mark.long
@pytest.mark.parametrize(
    "further",
    [
        {},
        {"recompute_granularity": "full"},
        {"targets": ("q_proj", "v_proj", "up_proj", "down_proj")},
        {"targets": ("k_proj", "gate_proj", "o_proj")},
    ],
    ids=["all", "recompute", "some", "others"],
)
def test_every_layout_computes_and_learns_the_same(tmp_path: Path, further: dict) -> None:
    check(tmp_path, LAYOUTS, FAMILIES, **further)


OF_EXPERTS: dict[str, dict[str, Any]] = {
    "tp1": {},
    "tp2_etp2": {"tensor": 2, "sequence_parallel": True},
    "ep2": {"data": 2, "expert": 2},
    "tp2_ep2": {"tensor": 2, "sequence_parallel": True, "expert": 2, "expert_tensor": 1},
    "etp2_ep2": {"tensor": 2, "data": 2, "sequence_parallel": True, "expert": 2},
    "pp2": {"pipeline": 2},
    "cp2_ep2": {"context": 2, "expert": 2},
}


ALL_OF_THEM = "qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3", "glm4_moe"


@pytest.mark.long
@pytest.mark.parametrize(
    ("families", "further"),
    [
        (ALL_OF_THEM, {}),
        (ALL_OF_THEM, {"recompute_granularity": "full"}),
        (ALL_OF_THEM, {"overrides": {"moe_grouped_gemm": False}}),
        (ALL_OF_THEM, {"shared_outer": True}),
        (ALL_OF_THEM, {"shared_outer": True, "overrides": {"moe_grouped_gemm": False}}),
        (("qwen3_moe",), {"targets": ("k_proj", "up_proj")}),
        (
            ("deepseek_v3", "deepseek_v32"),
            {"targets": ("q_b_proj", "kv_b_proj", "gate_proj", "down_proj")},
        ),
    ],
    ids=["all", "recompute", "one by one", "shared", "shared, one by one", "some", "others"],
)
def test_every_layout_adapts_experts_and_latent_attention(
    tmp_path: Path, families: tuple[str, ...], further: dict
) -> None:
    check(tmp_path, OF_EXPERTS, families, **further)


@pytest.mark.long
def test_every_layout_adapts_gated_delta_nets(tmp_path: Path) -> None:
    layouts = {name: LAYOUTS[name] for name in ("tp2_sp", "pp2", "cp2")}
    check(tmp_path, layouts, ("qwen3_5_text",), layers=2)
    check(tmp_path / "experts", OF_EXPERTS, ("qwen3_next",), layers=2)
    check(tmp_path / "fsdp", FSDP, ("qwen3_5_text",), layers=2, strategy="fsdp")


@pytest.mark.long
@pytest.mark.parametrize("name", ["tp2_sp", "pp2", "cp2"])
def test_layers_of_transformer_engine_get_adapters_too(tmp_path: Path, name: str) -> None:
    check(tmp_path, {name: LAYOUTS[name]}, FAMILIES, te=True)


@pytest.mark.long
@pytest.mark.parametrize("name", ["tp1", "tp2_etp2"])
def test_experts_and_latent_attention_of_transformer_engine_get_adapters_too(
    tmp_path: Path, name: str
) -> None:
    check(tmp_path, {name: OF_EXPERTS[name]}, ("qwen3_moe", "deepseek_v3"), te=True)

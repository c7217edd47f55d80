"""Checkpoints bring every bit back, on every layout, in real gloo processes."""

from __future__ import annotations

import asyncio
import filecmp
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from patience import PATIENCE
from safetensors.torch import load_file, save_file
from te_stand_ins import SPECS
from tiny_models import VOCAB, layers_for, random_batch, save_tiny
from world import run_world

from ctrl_megatron.checkpoint.convert import megatron_to_hf
from ctrl_megatron.checkpoint.files import MARKER
from ctrl_megatron.checkpoint.sharded import (
    STEPS_FILE,
    TensorParts,
    load_tensors,
    saved_tensor_metadata,
)
from ctrl_megatron.rollout.engine import EngineSpec, available_engines
from ctrl_megatron.rollout.launch import launch_engine
from ctrl_megatron.rollout.weight_update import tensor_checksum
from ctrl_megatron.types import SamplingParams

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "dp2": {"data": 2},
    "tp2_sp": {"tensor": 2, "sequence_parallel": True},
    "pp2": {"pipeline": 2},
    "vpp2": {"pipeline": 2, "virtual_pipeline": 2},
    "tp2_pp2_dp2": {"tensor": 2, "pipeline": 2, "data": 2},
}
CASES: dict[str, tuple[str, ...]] = {
    "one": ("bfloat16", "before_the_first_step"),
    "dp2": ("tied", "untied", "bfloat16", "plain_optimizer"),
    "tp2_sp": ("tied", "untied", "bfloat16", "qk_norm"),
    "pp2": ("tied", "before_the_first_step"),
    "vpp2": ("untied", "bfloat16"),
    "tp2_pp2_dp2": ("bfloat16", "plain_optimizer"),
}
"""The settings that are saved on each layout, chosen by what the layout could break."""
DAILY = ("tp2_pp2_dp2",)


def ranks(layout: dict[str, Any]) -> int:
    return layout.get("tensor", 1) * layout.get("pipeline", 1) * layout.get("data", 1)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Path]:
    """By family and number of layers."""
    root = tmp_path_factory.mktemp("models")
    return {
        (family, layers): save_tiny(family, root / f"{family}{layers}", num_hidden_layers=layers)
        for family in ("qwen2", "qwen2_tied", "qwen3")
        for layers in (2, 3, 4)
    }


def contents(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint's folder, whole."""
    found = {
        name: torch.full(held.size, 7.0, dtype=held.properties.dtype)
        for name, held in saved_tensor_metadata(folder).items()
    }
    wanted = {}
    for name, tensor in found.items():
        wanted[name] = TensorParts(tuple(tensor.shape), tensor.dtype)
        wanted[name].parts[torch.Size([0] * tensor.dim())] = tensor
    load_tensors(wanted, folder, None)
    return found


def same_files(left: Path, right: Path) -> set[str]:
    """The names of the files of two equal directories, but for a tool's list of what it wrote."""
    names, others = ({p.name for p in folder.iterdir()} - {MARKER} for folder in (left, right))
    assert names == others
    assert filecmp.cmpfiles(left, right, names, shallow=False)[1:] == ([], [])
    return names


def assert_same_contents(left: Path, right: Path) -> None:
    before, after = contents(left), contents(right)
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert (left / STEPS_FILE).read_text() == (right / STEPS_FILE).read_text()


@pytest.mark.parametrize(
    "name",
    [name if name in DAILY else pytest.param(name, marks=pytest.mark.long) for name in LAYOUTS],
)
def test_a_loaded_model_equals_the_saved_one_to_the_last_bit(
    models: dict[tuple[str, int], Path], tmp_path: Path, name: str
) -> None:
    """Layers and Adam of Transformer Engine or not; each reads what the other has saved."""
    # An odd vocabulary and tied embeddings: the ranks' shares of a padded buffer cross parameters.
    assert VOCAB % 2
    many = ranks(LAYOUTS[name]) > 2  # eight processes on two cores take the time of all others
    layers = 2 if many else layers_for(LAYOUTS[name])
    layers = 3 if name == "pp2" else layers  # two on the first stage, one on the second
    tied, untied = str(models["qwen2_tied", layers]), str(models["qwen2", layers])
    cases: dict[str, dict[str, Any]] = {
        "tied": {"directory": tied},
        "untied": {"directory": untied, "ddp": {"bucket_size": 20_000}},
        "bfloat16": {"directory": tied, "dtype": "bfloat16"},
        "plain_optimizer": {"directory": tied, "optimizer": {"distributed": False}},
        "before_the_first_step": {"directory": tied, "dtype": "bfloat16", "steps": 0},
        "qk_norm": {"directory": str(models["qwen3", layers])},
    }
    cases = {case: cases[case] for case in CASES[name]}
    metrics, *_ = run_world(
        "saving:save_and_go_on",
        ranks(LAYOUTS[name]),
        layout=LAYOUTS[name],
        cases=cases,
        batch=random_batch(seed=5, rows=8),
        out=str(tmp_path),
    )
    for case in cases:
        for spec, again in (("local", "read_by_te"), ("te", "read_by_local")):
            assert_same_contents(tmp_path / spec / case, tmp_path / again / case)
            assert_same_contents(tmp_path / spec / case, tmp_path / f"{spec}_away" / case)
        if "dtype" not in cases[case]:
            for local, te in zip(metrics["local"][case], metrics["te"][case], strict=True):
                assert te == pytest.approx(local, rel=1e-5, abs=1e-9), case


def test_state_that_is_no_parameter_is_saved_resumed_and_exported(
    models: dict[tuple[str, int], Path], tmp_path: Path
) -> None:
    """In its own type: none of the values is a bfloat16 number."""
    directory = shutil.copytree(models["qwen2", 2], tmp_path / "hf")
    tensors = load_file(directory / "model.safetensors")
    biases = {
        f"model.layers.{i}.mlp.bias": torch.arange(5, dtype=torch.float32) + (i + 1) / 1000
        for i in range(2)
    }
    save_file(tensors | biases, directory / "model.safetensors", metadata={"format": "pt"})
    run_world(
        "saving:keep_buffers",
        2,
        layout={"tensor": 2},
        directory=str(directory),
        batch=random_batch(seed=5, rows=4),
        out=str(tmp_path),
    )
    saved = contents(tmp_path / "checkpoint")
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    for name, bias in biases.items():
        assert saved[name].dtype == exported[name].dtype == torch.float32
        assert torch.equal(saved[name], bias) and torch.equal(exported[name], bias)
    assert not [name for name in saved if name.startswith("optimizer") and "mlp.bias" in name]
    assert exported["model.norm.weight"].dtype == torch.bfloat16


def test_layouts_and_layer_specs_read_each_others_checkpoints(
    models: dict[tuple[str, int], Path], tmp_path: Path
) -> None:
    """Local spec, TP x PP -> Transformer Engine, DP -> local spec, one rank; then equal steps."""
    common = {"directory": str(models["qwen2_tied", 4]), "batch": random_batch(seed=5, rows=8)}
    layout: dict[str, Any] = {"tensor": 2, "pipeline": 2, "sequence_parallel": True}
    (local, *_) = run_world("saving:go_on", 4, layout=layout, out=f"{tmp_path}/a", **common)
    start = f"{tmp_path}/a/first"
    (fused, _) = run_world(
        "saving:go_on", 2, layout={"data": 2}, out=f"{tmp_path}/b", te=True, load=start, **common
    )
    start = f"{tmp_path}/b/first"
    (alone,) = run_world("saving:go_on", 1, layout={}, out=f"{tmp_path}/c", load=start, **common)
    assert_same_contents(tmp_path / "a/first", tmp_path / "b/first")
    assert_same_contents(tmp_path / "a/first", tmp_path / "c/first")
    for metrics in (fused, alone):
        for expected, found in zip(local[2:], metrics, strict=True):
            assert found == pytest.approx(expected, rel=1e-5, abs=1e-9)
    # Both hold the same weights under the same names.
    expected = contents(tmp_path / "a/last")
    for folder in ("b", "c"):
        for name, weight in contents(tmp_path / folder / "last").items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=1e-6)
        exported = load_file(tmp_path / folder / "hf/model.safetensors")
        saved = contents(tmp_path / folder / "last")
        assert all(torch.equal(exported[name], saved[name]) for name in exported)


@pytest.mark.parametrize("name", ["one", pytest.param("tp2_pp2", marks=pytest.mark.long)])
def test_training_goes_on_while_a_checkpoint_is_written(
    models: dict[tuple[str, int], Path], tmp_path: Path, name: str
) -> None:
    layout = {"one": {}, "tp2_pp2": {"tensor": 2, "pipeline": 2}}[name]
    model = models["qwen2_tied", layers_for(layout)]
    run_world(
        "with_each_spec",
        ranks(layout),
        of="saving:save_aside",
        layout=layout,
        directory=str(model),
        batch=random_batch(seed=5, rows=8),
        out=str(tmp_path),
    )
    for out in (tmp_path / spec for spec in SPECS):
        assert same_files(model, out / "and_back") >= {"config.json", "model.safetensors"}
        checkpoint = out / "checkpoints/global_step_1"
        for exported, file_bytes in (("hf_exports/global_step_1", 1 << 30), ("parts", 40_000)):
            converted = out / "converted" / exported
            megatron_to_hf(checkpoint, converted, file_bytes=file_bytes)
            assert same_files(out / exported, converted) >= {"config.json"}
            loaded = transformers.AutoModelForCausalLM.from_pretrained(converted)
            saved = contents(checkpoint / "policy")
            for key, weight in loaded.state_dict().items():
                name = "model.embed_tokens.weight" if key == "lm_head.weight" else key
                assert weight.dtype == torch.bfloat16 and torch.equal(weight, saved[name]), key


@pytest.mark.long
@pytest.mark.skipif("vllm" not in available_engines(), reason="the optional vllm is not installed")
def test_what_a_running_model_exports_generates_in_vllm(tmp_path: Path) -> None:
    # Its attention on a CPU requires heads of 32.
    model = save_tiny("qwen2_tied", tmp_path / "model", hidden_size=128)
    run_world(
        "saving:save_aside",
        4,
        layout={"tensor": 2, "pipeline": 2},
        directory=str(model),
        batch=random_batch(seed=5, rows=8),
        out=str(tmp_path),
    )
    exported = tmp_path / "hf_exports/global_step_1"
    spec = EngineSpec(
        name="vllm",
        model_path=str(exported),
        dtype="bfloat16",
        max_model_len=64,
        max_num_seqs=4,
        kv_cache_gib=0.1,
        threads=1,
        log_path=str(tmp_path / "engine.log"),
        startup_timeout=PATIENCE,
    )
    loaded = transformers.AutoModelForCausalLM.from_pretrained(exported)
    names = set(loaded.state_dict()) - {"lm_head.weight"}

    async def ask() -> dict[str, int]:
        engine = process.connect()
        (completion,) = (await engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4)))[0]
        assert len(completion.token_ids) == 4
        held = await engine.checksums()
        await engine.close()
        return held

    with launch_engine(spec) as process:
        held = asyncio.run(asyncio.wait_for(ask(), 120))
    wanted = {name: tensor_checksum(loaded.state_dict()[name]) for name in names}
    assert {name: held[name] for name in names} == wanted

"""Models with multi-latent attention: dense ones against transformers on tensor ranks without
sequence parallelism, which layers with experts need, and steps and checkpoints of whole ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from te_stand_ins import SPECS
from test_saved_state import assert_same_contents
from tiny_models import random_batch, reference_gradients, reference_log_probs, save_tiny
from world import run_world


def test_tensor_ranks_compute_what_transformers_does(tmp_path: Path) -> None:
    dims = {"num_hidden_layers": 2, "first_k_dense_replace": 2}
    models = {f: save_tiny(f, tmp_path / f, **dims) for f in ("deepseek_v2", "deepseek_v3")}
    batch, directories = random_batch(seed=3, group=3), {f: str(p) for f, p in models.items()}
    common = {"layout": {"tensor": 2}, "directories": directories, "batch": batch}
    out = str(tmp_path / "ours")
    found = run_world("with_each_spec", 2, of="parity", out=out, temperature=0.7, **common)
    run_world("with_each_spec", 2, of="gradients", out=out, **common)
    for family, path in models.items():
        expected, _ = reference_log_probs(path, batch, temperature=0.7)
        theirs = reference_gradients(path, batch, tmp_path / "theirs" / family)
        gradients = load_file(theirs / "model.safetensors")
        for spec in SPECS:
            for results in found:
                log_probs, _ = results[spec][family]
                assert torch.allclose(log_probs, expected, atol=1e-5), (family, spec)
            for way in ("shared", "apart"):
                ours = load_file(Path(out) / spec / way / family / "model.safetensors")
                assert ours.keys() == gradients.keys()
                for name, want in gradients.items():
                    gap = (ours[name] - want).norm()
                    assert gap <= 1e-5 * want.norm(), (family, spec, way, name, float(gap))


def test_rows_of_which_an_indexer_would_leave_keys_out_are_refused(tmp_path: Path) -> None:
    source = save_tiny("deepseek_v32", tmp_path / "model", num_hidden_layers=2)
    given = {"directory": str(source), "strategies": ("megatron",)}
    for prompt, named in ((12, ""), (40, r"row \d has \d\d tokens, .* index_topk=21")):
        batch = random_batch(seed=3, prompt=prompt)
        (found,) = run_world("promised:longest_rows", 1, layout={}, batch=batch, **given)
        assert re.fullmatch(named, found["megatron"]), found


def test_steps_and_checkpoints_are_the_same_on_tensor_and_expert_ranks(tmp_path: Path) -> None:
    """Also the biases of the choice, which no step changes."""
    directory = save_tiny("deepseek_v3", tmp_path / "model", num_hidden_layers=2)
    layout = {"tensor": 2, "sequence_parallel": True, "expert": 2, "expert_tensor": 1}
    given = {"directory": str(directory), "batch": random_batch(seed=5, rows=8)}
    (alone,) = run_world(
        "saving:go_on", 1, layout={}, out=str(tmp_path / "alone"), load=None, **given
    )
    first = tmp_path / "alone/first"
    found, _ = run_world(
        "saving:go_on", 2, layout=layout, out=str(tmp_path / "split"), load=str(first), **given
    )
    for ours, want in zip(found, alone[2:], strict=True):
        assert ours == pytest.approx(want, rel=1e-5, abs=1e-9)
    assert_same_contents(first, tmp_path / "split/first")
    before, after = (
        load_file(folder / "model.safetensors") for folder in (directory, tmp_path / "split/hf")
    )
    biases = [name for name in before if name.endswith("e_score_correction_bias")]
    assert biases and all(torch.equal(before[name], after[name]) for name in biases)
    assert not any(torch.equal(before[name], after[name]) for name in before.keys() - set(biases))

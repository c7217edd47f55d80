"""Multi-latent attention on tensor ranks without sequence parallelism, which layers with experts
need: models of dense layers against transformers."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from te_stand_ins import SPECS
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

"""Masked-diffusion models against transformers with a full mask in float64, on several layouts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from te_stand_ins import SPECS
from test_policy import LAYOUTS, assert_same_weights, ranks
from tiny_models import llada_name, random_batch, reference_scores, save_masked, with_masks
from world import run_world

from ctrl_megatron.models.hf_config import read_model_shape

SHIFTED = {"dream": True, "dream_tied": True, "llada": False}
LONG = ["dp2", "tp2", "tp2_sp", "pp2", "vpp2", "tp2_pp2_sp", "cp2"]


def distance(ours: torch.Tensor, exact: torch.Tensor) -> float:
    """The norm of the difference, relative to that of ``exact``."""
    return float((ours.double() - exact).norm() / exact.norm())


def is_rounding(tensor: str) -> bool:
    """Whether its gradient is rounding alone: a key's bias moves all scores of a query alike."""
    return tensor.endswith("k_proj.bias")


@pytest.mark.parametrize(
    ("layout", "single"),
    [
        ("tp1", False),
        *(pytest.param(name, False, marks=pytest.mark.long) for name in LONG),
        *(pytest.param(name, True, marks=pytest.mark.long) for name in ("tp1", *LONG)),
    ],
)
def test_scores_and_gradients_are_transformers_and_files_survive(
    tmp_path: Path, layout: str, single: bool
) -> None:
    """Three coupled versions of a row, and the single one of fine-tuning."""
    layers = 4 if "virtual_pipeline" in LAYOUTS[layout] else 2
    # A tied head differs from other models' only where stages or ranks share it.
    names = [name for name in SHIFTED if name != "dream_tied" or layout != "tp1"]
    models = {
        name: save_masked(name, tmp_path / "models" / name, num_hidden_layers=layers)
        for name in names
    }
    batch = with_masks(random_batch(seed=3), seed=4)
    if single:
        batch["mask_level"] = batch.pop("mask_share")
    # A canvas that goes on behind the response, and a row that was not judged.
    batch["response_mask"] = batch["response_mask"].clone()
    batch["response_mask"][0, 1:] = batch["response_mask"][1] = False
    assert bool(batch["attention_mask"][0, -9:].sum() > 1)
    batch["advantages"] = batch["advantages"] * batch["response_mask"]
    results = run_world(
        "with_each_spec",
        ranks(LAYOUTS[layout]),
        of="coupled",
        layout=LAYOUTS[layout],
        directories={name: str(own) for name, (own, _) in models.items()},
        batch=batch,
        temperature=0.7,
        out=str(tmp_path / "out"),
    )
    for name, (own, theirs) in models.items():
        references = {}
        for dtype in (torch.float64, torch.float32):
            model, scores, entropies = reference_scores(
                theirs, batch, shifted=SHIFTED[name], temperature=0.7, dtype=dtype
            )
            loss = -(scores * batch["advantages"]).sum() / batch["response_mask"].sum()
            loss.backward()
            gradients = {n: p.grad.double() for n, p in model.named_parameters()}
            references[dtype] = (scores.detach(), entropies, gradients)
        scores, entropies, wanted = references[torch.float64]
        rounded = references[torch.float32][2]
        for spec in SPECS:
            for result in results:
                for ours, exact in zip(result[spec][name], (scores, entropies), strict=True):
                    assert distance(ours, exact) < 1e-5, (name, spec)
            out = tmp_path / "out" / spec
            assert_same_weights(own, out / name, rel=0)
            assert read_model_shape(out / name) == read_model_shape(own)
            found = load_file(out / f"{name}_gradients" / "model.safetensors")
            # Gradients of more layers have more of float32's rounding, also transformers' own.
            least = {t: distance(rounded[t], e) for t, e in wanted.items() if not is_rounding(t)}
            limit = max(1e-5, 2 * max(least.values()))
            for tensor, exact in wanted.items():
                published = llada_name(tensor) if name == "llada" else tensor
                if not is_rounding(tensor):
                    gap = distance(found[published], exact)
                    assert gap < limit, (name, spec, tensor, gap, limit)

"""The trainer's loss on a batch that is cut in every way, over gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_policy import LAYOUTS, ranks
from tiny_models import random_batch, save_tiny
from world import run_world

from ctrl_megatron.algorithms import LOSS_AGG_MODES, POLICY_LOSS_REGISTRY

KL = {"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coeff": 0.01}
ACTORS: dict[str, dict[str, Any]] = {
    **{mode: {"loss_agg_mode": mode, **KL} for mode in LOSS_AGG_MODES},
    **{
        loss: {
            "policy_loss": loss,
            "loss_agg_mode": "seq-mean-token-mean",
            "clip_cov_ratio": 0.2,
            "clip_cov_lb": -10.0,
            "kl_cov_ratio": 0.2,
        }
        for loss in POLICY_LOSS_REGISTRY
    },
}
ONE, THREE, EIGHT = 4096, 56, 21
"""Token budgets that give the eight rows below about so many micro-batches."""
CUTS: dict[str, tuple[dict[str, Any], int]] = {
    "three micro-batches": ({}, THREE),
    "eight micro-batches": ({}, EIGHT),
    "dp2": ({"data": 2}, ONE),
    "dp4": ({"data": 4}, THREE),
    "tp2": (LAYOUTS["tp2"], ONE),
    "pp2": (LAYOUTS["pp2"], EIGHT),
}

DAILY = "dp4"


def losses_of(model: Path, out: Path, layout: dict[str, Any], budget: int) -> list[dict[str, Any]]:
    batch = random_batch(seed=7, rows=8, holes=True)
    batch["rollout_is_weights"] = (0.5 + batch["advantages"].abs()).clamp(max=2.0)
    # A token and a whole row that take no part.
    batch["loss_mask"] = batch["response_mask"].clone()
    batch["loss_mask"][0, 0] = batch["loss_mask"][1] = False
    return run_world(
        "objectives",
        ranks(layout),
        layout=layout,
        directory=str(model),
        batch=batch,
        actors=ACTORS,
        budget=budget,
        out=str(out),
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("qwen2_tied", tmp_path_factory.mktemp("objectives") / "model")


@pytest.fixture(scope="module")
def whole(model: Path) -> dict[str, dict[str, float]]:
    (found,) = losses_of(model, model.parent / "whole", {}, ONE)
    return found


def gradient(model: Path, stepped: Path) -> torch.Tensor:
    """The change of every weight in the step."""
    before, after = (load_file(path / "model.safetensors") for path in (model, stepped))
    return torch.cat([(after[k].double() - before[k].double()).flatten() for k in before])


@pytest.mark.parametrize(
    "cut",
    [cut if cut == DAILY else pytest.param(cut, marks=pytest.mark.long) for cut in CUTS],
)
def test_every_aggregation_and_loss_is_the_same_however_the_batch_is_cut(
    model: Path, whole: dict[str, dict[str, float]], cut: str, tmp_path: Path
) -> None:
    for found in losses_of(model, tmp_path, *CUTS[cut]):
        assert found.keys() == whole.keys()
        for name, metrics in found.items():
            assert metrics == pytest.approx(whole[name], rel=1e-5, abs=1e-9), name
    for name in whole:
        uncut = gradient(model, model.parent / "whole" / name)
        gap = (gradient(model, tmp_path / name) - uncut).norm() / uncut.norm()
        assert gap <= 1e-5, (name, float(gap))


def test_a_step_with_its_own_log_probs_is_the_same(
    model: Path, whole: dict[str, dict[str, float]]
) -> None:
    given, own = (gradient(model, model.parent / "whole" / name) for name in ("given", "own"))
    assert whole["own"] == pytest.approx(whole["given"], rel=1e-6, abs=1e-9)
    assert (given - own).norm() <= 1e-6 * given.norm() and given.norm() > 0


def test_the_objectives_differ(whole: dict[str, dict[str, float]]) -> None:
    norms = [round(metrics["grad_norm"], 7) for metrics in whole.values()]
    assert len(set(norms)) >= len(norms) - 1, "two configurations compute the same"


KEPT = ([True, False] * 4, [False, True, False, False, True, False, True, False])
"""With two ranks the first leaves one of them without a row, the second with other numbers."""


@pytest.mark.parametrize("kept", [KEPT[0], pytest.param(KEPT[1], marks=pytest.mark.long)])
def test_rows_that_a_filter_leaves_out_count_nowhere_and_hang_no_rank(
    model: Path, kept: list[bool], tmp_path: Path
) -> None:
    """The rows in two mini-batches, on one rank and on two; and the step of the kept rows alone."""
    batch = random_batch(seed=3, rows=8)
    batch["mini_batch"] = torch.arange(8) // 4
    alone = {key: value[torch.tensor(kept)] for key, value in batch.items()}
    found = {}
    for name, layout, rows, stay in (
        ("alone", {}, alone, [True] * sum(kept)),
        ("one", {}, batch, kept),
        ("two", {"data": 2}, batch, kept),
    ):
        found[name] = run_world(
            "filtered_step",
            ranks(layout),
            layout=layout,
            directory=str(model),
            batch=rows,
            kept=stay,
            out=str(tmp_path / name),
        )
    (metrics,) = found["alone"]
    for other in (*found["one"], *found["two"]):
        assert other.pop("filter/update") == sum(kept) / 8
        assert other == pytest.approx(
            {k: v for k, v in metrics.items() if k != "filter/update"}, rel=1e-5, abs=1e-6
        )
    wanted = gradient(model, tmp_path / "alone")
    for name in ("one", "two"):
        assert (gradient(model, tmp_path / name) - wanted).norm() <= 1e-5 * wanted.norm()

"""The value model against transformers and against itself on other layouts, over gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from te_stand_ins import SPECS
from test_contract import ANY
from test_policy import LAYOUTS, assert_same_metrics, assert_same_weights, ranks
from tiny_models import FAMILIES, layers_for, predicted, random_batch, save_tiny
from world import run_world

CLASSIFY = [family for family in ANY if family not in ("granite", "gemma3_text")]
"""Those of which transformers has token classification models."""
OWN = [
    family
    for family, (config, _) in FAMILIES.items()
    if config in transformers.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING
]
"""The same of the families that both strategies have."""


def save_value_model(family: str, directory: Path, **dims: int) -> Path:
    """transformers' own token classifier with one label and a random head."""
    base = save_tiny(family, directory / "base", **dims)
    model = transformers.AutoModelForTokenClassification.from_pretrained(
        base, num_labels=1, dtype=torch.float32
    )
    with torch.no_grad():
        model.score.weight.normal_(0, 0.3)
        model.score.bias.fill_(0.7)
    model.save_pretrained(directory / "value")
    return directory / "value"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("value_models")
    return {family: save_value_model(family, root / family) for family in OWN}


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directory of the model for layouts without pipeline stages (``layers_for``)."""
    root = tmp_path_factory.mktemp("shallow")
    return {f: save_value_model(f, root / f, num_hidden_layers=2) for f in OWN}


@torch.no_grad()
def reference_values(directory: Path, batch: dict) -> torch.Tensor:
    """transformers' values before each response token, computed row by row without padding."""
    model = transformers.AutoModelForTokenClassification.from_pretrained(
        # The other kinds of attention leave soft caps out.
        directory,
        attn_implementation="eager",
    )
    values = torch.zeros(batch["response_mask"].shape)
    for row, (ids, seen, mask) in enumerate(
        zip(batch["input_ids"], batch["attention_mask"], batch["response_mask"], strict=True)
    ):
        found = model(ids[seen.bool()][None]).logits[0, :, 0]
        values[row, mask] = found[predicted(seen, mask) - 1]
    return values


def value_batch(seed: int, rows: int = 8) -> dict:
    batch = random_batch(seed=seed, rows=rows, group=2, holes=True)
    mask = batch["response_mask"]
    generator = torch.Generator().manual_seed(seed)
    batch["returns"] = torch.rand(mask.shape, generator=generator) * mask
    batch["values"] = 0.3 * torch.rand(mask.shape, generator=generator) * mask
    return batch


@pytest.mark.parametrize(
    "name",
    [
        *("tp1", "tp2_pp2_sp"),
        *(
            pytest.param(n, marks=pytest.mark.long)
            for n in ("tp2", "tp2_sp", "pp2", "vpp2", "tp2_cp2_sp")
        ),
    ],
)
def test_values_equal_transformers_and_survive_a_round_trip(
    models: dict[str, Path], shallow: dict[str, Path], tmp_path: Path, name: str
) -> None:
    batch = random_batch(seed=3, group=3, holes=True)
    models = models if layers_for(LAYOUTS[name]) == 4 else shallow
    results = run_world(
        "with_each_spec",
        ranks(LAYOUTS[name]),
        of="value_parity",
        layout=LAYOUTS[name],
        directories={family: str(path) for family, path in models.items()},
        batch=batch,
        out=str(tmp_path),
    )
    for family, path in models.items():
        expected = reference_values(path, batch)
        assert expected.abs().max() > 0.1
        for spec in SPECS:
            for result in results:
                assert torch.allclose(result[spec][family], expected, atol=1e-4), (family, spec)
            assert_same_weights(path, tmp_path / spec / family, rel=0)
        assert torch.equal(reference_values(tmp_path / "te" / family, batch), expected)


@pytest.mark.parametrize(
    ("families", "ranks"),
    [
        (["qwen2_tied"], 2),
        *(
            pytest.param(["llama", "qwen2", "qwen3", *CLASSIFY], n, marks=pytest.mark.long)
            for n in (1, 2, 4)
        ),
    ],
)
def test_value_models_of_transformers_are_its_own(
    tmp_path: Path, families: list[str], ranks: int
) -> None:
    batch = random_batch(seed=3, group=3)
    with pytest.MonkeyPatch.context() as patch:
        for family in families:
            patch.setitem(FAMILIES, family, {**ANY, **FAMILIES}[family])
        paths = {f: save_value_model(f, tmp_path / f, num_hidden_layers=4) for f in families}
    for result in run_world(
        "value_parity",
        ranks,
        layout={"data": ranks},
        directories={family: str(path) for family, path in paths.items()},
        batch=batch,
        out=str(tmp_path / "out"),
        strategy="fsdp",
    ):
        for family, path in paths.items():
            expected = reference_values(path, batch)
            assert expected.abs().max() > 0.1
            torch.testing.assert_close(result[family], expected, atol=1e-5, rtol=1e-5)
            assert_same_weights(path, tmp_path / "out" / family, rel=0)
            assert torch.equal(reference_values(tmp_path / "out" / family, batch), expected)


def test_a_value_model_from_a_language_model_expects_nothing(tmp_path: Path) -> None:
    base = save_tiny("qwen2_tied", tmp_path / "base")
    (result,) = run_world(
        "value_parity",
        1,
        layout={},
        directories={"fresh": str(base)},
        batch=random_batch(seed=3),
        out=str(tmp_path),
    )
    assert torch.equal(result["fresh"], torch.zeros_like(result["fresh"]))
    made = load_file(tmp_path / "fresh/model.safetensors")
    kept = load_file(base / "model.safetensors")
    assert made.keys() - kept.keys() == {"score.weight", "score.bias"}
    assert all(torch.equal(tensor, made[name]) for name, tensor in kept.items())


def test_explained_variance_rises_from_nothing(tmp_path: Path) -> None:
    layout = LAYOUTS["dp2"]
    first, second = run_world(
        "value_learns",
        ranks(layout),
        layout=layout,
        directory=str(save_tiny("qwen2_tied", tmp_path / "base")),
        batch=value_batch(seed=5),
        steps=41,
    )
    assert first == second, "the ranks report the whole batch's"
    every_tenth = first[::10]
    assert every_tenth[0] == pytest.approx(0.0, abs=1e-6)
    assert every_tenth == sorted(set(every_tenth)) and every_tenth[-1] > 0.8, every_tenth


def steps_of(path: Path, out: Path, layout: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    arguments = {"steps": 3, "resume_at": None, **options}
    return run_world(
        "value_steps",
        ranks(layout),
        layout=layout,
        directory=str(path),
        batch=value_batch(seed=5),
        out=str(out),
        **arguments,
    )


@pytest.fixture(scope="module")
def alone(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict[str, float]]]:
    out = tmp_path_factory.mktemp("alone")
    (result,) = steps_of(models["qwen2_tied"], out, {})
    return out, result["metrics"]


@pytest.mark.parametrize(
    "name",
    [
        *("vpp2", "tp2_pp2_dp2", "cp2"),
        *(
            pytest.param(n, marks=pytest.mark.long)
            for n in ("dp2", "tp2", "tp2_sp", "pp2", "tp2_cp2_sp")
        ),
    ],
)
def test_layouts_take_the_same_steps(
    models: dict[str, Path],
    alone: tuple[Path, list[dict[str, float]]],
    tmp_path: Path,
    name: str,
) -> None:
    for result in steps_of(models["qwen2_tied"], tmp_path, LAYOUTS[name]):
        assert_same_metrics(alone[1], result["metrics"])
    assert_same_weights(alone[0] / "value", tmp_path / "value", rel=1e-5)


def test_both_strategies_take_the_same_steps(
    models: dict[str, Path], alone: tuple[Path, list[dict[str, float]]], tmp_path: Path
) -> None:
    """Also after a resume."""
    options = {"strategy": "fsdp", "resume_at": 2}
    for result in steps_of(models["qwen2_tied"], tmp_path, LAYOUTS["dp2"], **options):
        assert_same_metrics(alone[1], result["metrics"])
    assert_same_weights(alone[0] / "value", tmp_path / "value", rel=1e-5)


def float64_steps(base: Path, batch: dict, optimizer: dict[str, Any]) -> list[dict[str, float]]:
    """What ``promised.value_steps`` computes, by transformers and torch in float64."""
    model = transformers.AutoModelForTokenClassification.from_pretrained(
        base, num_labels=1, dtype=torch.float64, attn_implementation="eager"
    ).eval()
    torch.nn.init.zeros_(model.score.weight)
    torch.nn.init.zeros_(model.score.bias)
    weights = [*model.parameters()]
    groups: list[dict[str, Any]] = [
        {"params": [w for w in weights if w.dim() > 1]},
        {"params": [w for w in weights if w.dim() == 1], "weight_decay": 0.0},
    ]
    clip, keys = optimizer["clip_grad"], {key: optimizer[key] for key in ("lr", "eps")}
    adam = torch.optim.AdamW(groups, weight_decay=0.01, **keys)
    masks = batch["response_mask"]
    returns = batch["returns"][masks].double()

    def values() -> torch.Tensor:
        found = []
        for ids, seen, mask in zip(batch["input_ids"], batch["attention_mask"], masks, strict=True):
            row = model(ids[seen.bool()][None]).logits[0, :, 0]
            found.append(row[predicted(seen, mask) - 1])
        return torch.cat(found)

    steps = []
    for old in (values().detach() for _ in range(3)):
        for _ in range(2):
            new = values()
            held = old + (new - old).clamp(-0.5, 0.5)
            loss = 0.5 * torch.maximum((new - returns) ** 2, (held - returns) ** 2).mean()
            adam.zero_grad()
            loss.backward()
            norm = float(torch.nn.utils.clip_grad_norm_(weights, clip))
            adam.step()
            mean = float(new.mean())
            steps.append({"loss": float(loss), "grad_norm": norm, "critic/value_mean": mean})
    return steps


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["megatron", "fsdp"])
def test_steps_of_a_new_value_model_are_those_of_float64(tmp_path: Path, strategy: str) -> None:
    base, batch = save_tiny("llama", tmp_path / "base", num_hidden_layers=2), value_batch(seed=5)
    optimizer = {"lr": 1e-3, "eps": 1e-4, "clip_grad": 1.0, "total_steps": 6}
    wanted = float64_steps(base, batch, optimizer)
    (found,) = run_world(
        "promised:value_steps",
        1,
        layout={},
        strategy=strategy,
        directory=str(base),
        batch=batch,
        optimizer=optimizer,
    )
    for one, other in zip(found, wanted, strict=True):
        assert one["loss"] == one["critic/vf_loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)
        # Values begin at zero, so their mean is as exact as returns of up to 1 are.
        mean = pytest.approx(other["critic/value_mean"], rel=1e-5, abs=1e-6)
        assert one["critic/value_mean"] == mean
    assert found[0]["loss"] > 1.05 * found[-1]["loss"]


@pytest.mark.parametrize(
    ("name", "step"),
    [
        *(("dp2", 0), ("tp2_pp2_dp2", 2)),
        *(pytest.param(n, 2, marks=pytest.mark.long) for n in ("tp2", "tp2_cp2_sp")),
    ],
)
def test_a_resumed_value_model_goes_on_as_if_nothing_had_happened(
    models: dict[str, Path],
    alone: tuple[Path, list[dict[str, float]]],
    tmp_path: Path,
    name: str,
    step: int,
) -> None:
    """Step 0: what has learned nothing is saved too, as an actor in the critic's warm-up."""
    results = run_world(
        "with_each_spec",
        ranks(LAYOUTS[name]),
        of="value_steps",
        layout=LAYOUTS[name],
        directory=str(models["qwen2_tied"]),
        batch=value_batch(seed=5),
        steps=3,
        resume_at=step,
        out=str(tmp_path),
    )
    for spec in SPECS:
        for result in results:
            assert_same_metrics(alone[1], result[spec]["metrics"])
        assert_same_weights(alone[0] / "value", tmp_path / spec / "value", rel=1e-5)


def test_heads_of_tensor_ranks_never_diverge(shallow: dict[str, Path], tmp_path: Path) -> None:
    """Peers' bias, unmarked, drifted under sequence parallelism."""
    for name in ("tp2_sp", "tp2"):
        first, second = steps_of(shallow["qwen2_tied"], tmp_path / name, LAYOUTS[name], steps=35)
        assert first["head"].keys() == {"output_layer.weight", "output_layer.bias"}
        for key, value in first["head"].items():
            assert torch.equal(value, second["head"][key]), (name, key)
        losses = [step["loss"] for step in first["metrics"]]
        assert losses[-1] < 0.5 * losses[0]

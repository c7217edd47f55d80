"""The manifest of a checkpoint's tensors, and whether an update has the same tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from tensor_specs import spec, specs

from ctrl_megatron.rollout.weight_update import check_specs, checkpoint_specs
from ctrl_megatron.types import TensorSpec


def checkpoint(directory: Path, files: dict[str, dict[str, torch.Tensor]], *, tied: bool) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))
    for file, tensors in files.items():
        save_file(tensors, directory / file, metadata={"format": "pt"})
    if len(files) > 1:
        table = {name: file for file, tensors in files.items() for name in tensors}
        index = directory / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": table}))
    return directory


@pytest.mark.parametrize("tied", [True, False])
def test_the_manifest_covers_all_files_and_leaves_out_what_no_update_brings(
    tmp_path: Path, tied: bool
) -> None:
    path = checkpoint(
        tmp_path / "model",
        {
            "a.safetensors": {"lm_head.weight": torch.zeros(4, 2), "x": torch.zeros(3).bfloat16()},
            "b.safetensors": {"rope.inv_freq": torch.zeros(2), "y": torch.zeros(1, 5)},
        },
        tied=tied,
    )
    found = {s.name: s.shape for s in checkpoint_specs(path, "bfloat16")}
    head = {} if tied else {"lm_head.weight": (4, 2)}
    assert found == {"x": (3,), "y": (1, 5), **head}
    assert {s.dtype for s in checkpoint_specs(path, "bfloat16")} == {"bfloat16"}


def test_a_directory_that_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json does not exist"):
        checkpoint_specs(tmp_path, "float32")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor"):
        checkpoint_specs(tmp_path, "float32")


def test_every_kind_of_disagreement_is_listed_at_once() -> None:
    manifest = [spec("a"), spec("b"), spec("c"), spec("d")]
    given_specs = [spec("a"), spec("b", (3, 2)), spec("z"), spec("d", dtype="int8")]
    with pytest.raises(ValueError) as caught:
        check_specs(manifest, given_specs)
    text = str(caught.value)
    for part in (
        "1 unknown: z",
        "1 missing: c",
        "mis-shaped: b (3, 2) instead of (2, 3)",
        "d int8",
    ):
        assert part in text
    with pytest.raises(ValueError, match=r"2 repeated|repeated: a"):
        check_specs([spec("a")], [spec("a"), spec("a")])


@given(st.lists(specs, unique_by=lambda s: s.name, max_size=8), st.randoms())
def test_any_order_and_any_weight_dtype_is_accepted(
    found: list[TensorSpec], random: object
) -> None:
    shuffled = [spec(s.name, s.shape, "float16") for s in found]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    check_specs(found, shuffled)

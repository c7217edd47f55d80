"""A damaged checkpoint is noticed, and named, before anything of it is used."""

from __future__ import annotations

from pathlib import Path

from damaging import NEWEST
from tiny_models import random_batch, save_tiny
from world import run_world

from ctrl_megatron.checkpoint.manifest import MARKER


def test_every_damage_is_named_and_an_older_checkpoint_takes_its_place(tmp_path: Path) -> None:
    model = save_tiny("qwen2_tied", tmp_path / "model", num_hidden_layers=2)
    found, other = run_world(
        "damaging:spoil_and_continue",
        2,
        layout={"data": 2},
        directory=str(model),
        batch=random_batch(seed=5, rows=4),
        out=str(tmp_path),
    )
    assert found == other, "the ranks disagree"
    (notes, all_damaged) = found.pop("added notes.txt"), found.pop("all damaged")
    assert len(found) >= 40
    assert found["hostile policy/.metadata"][1] and not (tmp_path / "flag").exists()
    folder = tmp_path / "run/checkpoints" / NEWEST
    for case, (error, remark, start) in found.items():
        kind, _, file = case.rpartition(" ")
        place = folder / file
        if file == ".":
            assert "is the checkpoint of step 1" in error, case
        elif file == MARKER and kind.startswith("of another"):
            assert error.startswith(str(folder)), (case, error)
        else:
            assert error.startswith(f"{place}: "), (case, error)
        if file.endswith(("distcp", "optimizer.json", "trainer_state.json")):
            for said, word in (("of another run", "of another run"), ("of another step", "step 1")):
                assert kind != said or word in error, (case, error)
        assert "\n" not in error
        if remark:
            assert remark == f"{error}; an older checkpoint takes its place"
        # What tensors hold is compared when the ranks have met, all else before.
        unseen = kind != "missing" and kind != "truncated" and file.startswith(("policy/__", "hf/"))
        assert start == (2 if unseen else 1), case
    assert sum(bool(remark) for _, remark, _ in found.values()) > 4
    assert notes == f"{folder} also holds notes.txt, which is not used"
    error = all_damaged
    assert error.startswith(f"{folder / 'policy/.metadata'}: is missing")
    assert error.endswith("; an older one is damaged too")

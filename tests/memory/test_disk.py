"""The bytes that a run writes to disk; a run without room for them is refused at start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from test_budget import example

from ctrl_megatron.errors import UserError
from ctrl_megatron.memory.disk import disk_use
from ctrl_megatron.models.rules import hf_shapes
from ctrl_megatron.run.checks import machine

PARAMETERS = 7_615_616_512
"""Parameters of Qwen2.5-7B according to its model card."""


def test_a_checkpoint_has_weights_moments_and_master_weights() -> None:
    config, shapes = example("ctrl_7b.yaml", "trainer.save_freq=-1", "trainer.save_hf_freq=-1")
    assert sum(map(_size, hf_shapes(shapes.actor).values())) == PARAMETERS
    use = disk_use(config, shapes.trained_shapes, "rl")
    assert use.checkpoint == PARAMETERS * (2 + 4 + 4 + 4)
    assert (use.checkpoints, use.exports) == (1, 0)
    assert use.total == pytest.approx(use.checkpoint, rel=1e-3)
    single, _ = example(
        "ctrl_7b.yaml", "trainer.save_freq=-1", "actor_rollout_ref.model.dtype=float32"
    )
    assert disk_use(single, shapes.trained_shapes, "rl").checkpoint == PARAMETERS * (4 + 4 + 4)


def _size(shape: tuple[int, ...]) -> int:
    return shape[0] * (shape[1] if len(shape) > 1 else 1)


@pytest.mark.parametrize(
    ("settings", "checkpoints", "exports"),
    [
        (("save_freq=1", "max_ckpt_to_keep=2", "total_training_steps=9"), 3, 0),
        (("save_freq=4", "max_ckpt_to_keep=5", "total_training_steps=9"), 3, 0),
        (("save_freq=1", "max_ckpt_to_keep=1", "total_training_steps=1"), 1, 0),
        (("save_freq=1", "max_ckpt_to_keep=3"), 2, 0),
        (("save_freq=1", "max_ckpt_to_keep=-1", "total_training_steps=9"), 2, 0),
        (("save_freq=-1", "save_hf_freq=3", "total_training_steps=8"), 1, 2),
        (("save_freq=-1", "save_hf_freq=9", "total_training_steps=8"), 1, 0),
    ],
)
def test_as_many_are_there_at_once_as_are_kept_and_written(
    settings: tuple[str, ...], checkpoints: int, exports: int
) -> None:
    config, shapes = example("ctrl_7b.yaml", "trainer.save_hf_freq=-1")
    given = {name: int(value) for name, value in (text.split("=") for text in settings)}
    trainer = replace(config.trainer, **{"total_training_steps": None, **given})
    use = disk_use(replace(config, trainer=trainer), shapes.trained_shapes, "rl")
    assert (use.checkpoints, use.exports) == (checkpoints, exports)
    # Checkpoints of an earlier start already have their room; a new one always needs some.
    least = use.bytes_still_needed(10**15)
    assert least >= use.checkpoint
    assert use.bytes_still_needed(use.checkpoint) == max(use.total - use.checkpoint, least)


@pytest.mark.parametrize("purpose", ["rl", "sft"])
def test_a_disk_that_is_nearly_full_is_named_with_its_bytes(
    tmp_path: Path, purpose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, shapes = example("ctrl_7b.yaml")
    place = {"default_local_dir": str(tmp_path / "runs"), "experiment_name": "mine"}
    config = replace(config, trainer=replace(config.trainer, **place))
    monkeypatch.setattr(machine, "model_shapes", lambda *_: shapes)
    needed = disk_use(config, shapes.trained_shapes, purpose).total  # type: ignore[arg-type]
    for free, refused in ((needed, False), (needed - 1, True), (0, True)):
        monkeypatch.setattr(
            "ctrl_megatron.checkpoint.files.free_disk_bytes", lambda _, free=free: free
        )
        if not refused:
            machine.check_disk(config, purpose)  # type: ignore[arg-type]
            continue
        with pytest.raises(UserError, match=r"trainer\.default_local_dir") as caught:
            machine.check_disk(config, purpose)  # type: ignore[arg-type]
        text = str(caught.value)
        assert str(tmp_path / "runs/mine") in text and f"{needed} bytes" in text
        assert "checkpoint" in text and len(text.splitlines()) == 1

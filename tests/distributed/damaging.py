"""What the processes of ``test_damaged_checkpoints`` run: save, spoil, and continue."""

from __future__ import annotations

import os
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from saving import OPTIMIZER, assert_equal_states, state_of
from workers import make_policy, policy_loss, start

NEWEST, OLDER = "global_step_2", "global_step_1"
SPOILT = ("policy/__0_0_0.distcp", "policy/__1_0_0.distcp", "policy/.metadata")
SPOILT += ("policy/optimizer.json", "trainer_state.json", ".ctrl_megatron.json", "hf/config.json")


class MakesFolder:
    """Unpickling it without restriction makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.makedirs, (str(self.folder),)


@dataclass(frozen=True)
class Damage:
    """What is done to one file of the newest checkpoint."""

    kind: str
    file: str
    do: Callable[[Path], None]


def damages(older: Path, foreign: Path) -> Iterator[Damage]:
    """Every kind of damage to every kind of file; ``foreign`` is the same step of another run."""
    draw = random.Random(36)

    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)

    def cut(path: Path) -> None:
        path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])

    for file in SPOILT:
        yield from (Damage(f"flipped {n}", file, flip) for n in range(3))
        yield Damage("truncated", file, cut)
        yield Damage("missing", file, Path.unlink)
        if not file.startswith("hf/"):
            for kind, source in (("of another step", older), ("of another run", foreign)):
                yield Damage(kind, file, lambda p, s=source, f=file: shutil.copyfile(s / f, p))  # type: ignore[misc]
    flag = older.parents[2] / "flag"
    yield Damage("hostile", "policy/.metadata", lambda p: attack(p, flag))
    yield Damage("a whole checkpoint of another step", ".", lambda p: _replace(p, older))


def attack(table: Path, flag: Path) -> None:
    """A table of tensors that makes ``flag`` if it is unpickled, in a checkpoint whose manifest
    agrees with it.
    """
    from ctrl_megatron.checkpoint.manifest import TRAINER, read_manifest, write_manifest

    checkpoint = table.parents[1]
    table.write_bytes(pickle.dumps(MakesFolder(flag)))
    before = read_manifest(checkpoint)
    assert before is not None
    write_manifest(checkpoint, TRAINER, origin=before.origin)


def _replace(path: Path, other: Path) -> None:
    shutil.rmtree(path)
    shutil.copytree(other, path)


def spoil_and_continue(
    rank: int, layout: dict, directory: str, batch: dict, out: str
) -> dict[str, Any]:
    """For every damage to the second of two checkpoints, by kind and file: the error that all ranks
    raise; the remark of a resume, which brings the state after the first step back, or nothing
    where none was tried; and the step from which a run would begin before its ranks have met.
    """
    from ctrl_megatron.checkpoint.store import CheckpointStore, verify_across_ranks
    from ctrl_megatron.errors import UserError

    groups = start(layout)
    model = make_policy(groups, directory, optimizer=OPTIMIZER, token_budget=64)
    mine = {k: v[groups.place.dp :: groups.layout.data] for k, v in batch.items()}
    runs = [Path(out) / name / "checkpoints" for name in ("run", "other")]
    store, other = (CheckpointStore(r, keep=-1, side_files=Path(directory)) for r in runs)
    states = []
    for step in (1, 2):
        model.step(mine, policy_loss)
        states.append(state_of(model))
        for one in (store, other):
            one.save({"policy": model}, step, {"sampler": step})
    spoilt, kept = runs[0] / NEWEST, Path(out) / "kept"
    if groups.is_first:
        shutil.copytree(spoilt, kept)
    found: dict[str, Any] = {}

    def continued() -> Any:
        return store.load_newest({"policy": model}, "auto", parts=("sampler",))

    for damage in damages(runs[0] / OLDER, runs[1] / NEWEST):
        groups.barrier()
        if groups.is_first:
            _replace(spoilt, kept)
            damage.do(spoilt / damage.file)
        groups.barrier()
        error = remark = ""
        try:
            verify_across_ranks(spoilt, groups)
        except UserError as caught:
            error = str(caught)
        if not len(found) % 8 or damage.kind == "hostile":
            loaded = continued()
            remark = loaded.remarks[0]
            assert loaded.state["step"] == loaded.checkpoint.step == loaded.state["sampler"] == 1
            assert_equal_states(state_of(model), states[0])
        begun = store.find_undamaged("auto")
        assert begun is not None
        found[f"{damage.kind} {damage.file}"] = (error, remark, begun.step)
    groups.barrier()
    if groups.is_first:
        _replace(spoilt, kept)
        (spoilt / "notes.txt").write_text("mine")
    groups.barrier()
    loaded = continued()
    assert loaded.state["step"] == 2
    assert_equal_states(state_of(model), states[1])
    found["added notes.txt"] = groups.broadcast_from_first(loaded.remarks)[0]
    groups.barrier()
    for one in (spoilt, runs[0] / OLDER):
        if groups.is_first:
            (one / "policy/.metadata").unlink()
    groups.barrier()
    try:
        continued()
    except UserError as caught:
        found["all damaged"] = str(caught)
    return found


def skip_an_update(
    rank: int, layout: dict, directory: str, batch: dict, spoilt: int
) -> tuple[int, list[Any], dict[str, float], dict[str, float]]:
    """(data rank, the skipped updates, the metrics of a good step after a bad one, those of it
    without a bad one), for a batch whose advantages of one row are not numbers. The bad step
    changes nothing.
    """
    groups = start(layout)
    bad = {**batch, "advantages": batch["advantages"].clone()}
    bad["advantages"][spoilt] = float("nan")

    def mine(rows: dict) -> dict:
        place = {"place": 100 + torch.arange(len(batch["input_ids"]))}
        return {k: v[groups.place.dp :: groups.layout.data] for k, v in (rows | place).items()}

    def make() -> Any:
        model = make_policy(groups, directory, optimizer=OPTIMIZER, token_budget=30)
        model.step(mine(batch), policy_loss)
        return model

    model, other = make(), make()
    before, steps = state_of(model), model.optimization.adam_and_schedule_steps()
    assert model.step(mine(bad), policy_loss) == {}
    assert_equal_states(before, state_of(model))
    assert model.optimization.adam_and_schedule_steps() == steps and model.update_count == 1
    skipped = model.take_skipped_updates()
    assert model.take_skipped_updates() == [] == other.take_skipped_updates()
    good = [one.step(mine(batch), policy_loss) for one in (model, other)]
    assert_equal_states(state_of(model), state_of(other))
    return groups.place.dp, [(one.reason, one.rows) for one in skipped], *good

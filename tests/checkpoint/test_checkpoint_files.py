"""Files that appear whole or not at all, and which checkpoints of a run there are."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from byte_tokenizer import save_tokenizer
from test_conversion import write_hf

from ctrl_megatron.checkpoint.convert import hf_to_megatron
from ctrl_megatron.checkpoint.files import atomic_directory, write_text_atomically
from ctrl_megatron.checkpoint.hashes import hash_file
from ctrl_megatron.checkpoint.hf import add_turn_end_to_generation_config, copy_side_files
from ctrl_megatron.checkpoint.manifest import MARKER, TRAINER, DamagedFiles, _seal, write_manifest
from ctrl_megatron.checkpoint.sharded import TensorParts, save_tensors
from ctrl_megatron.checkpoint.store import STATE_FILE, Checkpoint, CheckpointStore
from ctrl_megatron.data.tokens import tokenizer_parts
from ctrl_megatron.errors import UserError, find_user_error


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_directory_appears_when_its_block_ends(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "target"
    with atomic_directory(target) as work:
        (work / "file").write_text("new")
        assert not target.exists() and work.parent == target.parent
    assert (target / "file").read_text() == "new" and names(target.parent) == ["target"]


def test_a_directory_replaces_the_old_one_as_a_whole(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "old").touch()
    with atomic_directory(target) as work:
        (work / "new").touch()
    assert names(target) == ["new"] and names(tmp_path) == ["target"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failed_block_changes_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "old").touch()
    with pytest.raises(error), atomic_directory(target) as work:
        (work / "half").touch()
        raise error
    assert names(target) == ["old"] and names(tmp_path) == ["target"]


def test_ranks_that_do_not_write_only_learn_the_target(tmp_path: Path) -> None:
    with atomic_directory(tmp_path / "target", active=False) as work:
        assert work == tmp_path / "target"
    assert names(tmp_path) == []


def test_a_file_is_replaced_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file"
    write_text_atomically(path, "one")
    write_text_atomically(path, "two")
    assert path.read_text() == "two" and names(path.parent) == ["file"]


def store_with(folder: Path, *checkpoints: str) -> CheckpointStore:
    for name in checkpoints:
        (folder / name).mkdir(parents=True)
        (folder / name / STATE_FILE).write_text("{}")
    return CheckpointStore(folder, keep=2, side_files=folder)


def test_the_newest_finished_checkpoint_is_found(tmp_path: Path) -> None:
    store = store_with(
        tmp_path, "global_step_9", "global_step_10", ".global_step_11.4f3a", "global_step_x"
    )
    assert [c.step for c in store.finished_checkpoints()] == [9, 10]
    newest = Checkpoint(path=tmp_path / "global_step_10", step=10)
    assert store.find_undamaged("auto") == newest
    assert store.find_undamaged("disable") is None
    nine = Checkpoint(path=tmp_path / "global_step_9", step=9)
    assert store.find_undamaged(str(tmp_path / "global_step_9")) == nine


def steps_of(store: CheckpointStore) -> list[int]:
    return [checkpoint.step for checkpoint in store.finished_checkpoints()]


def test_a_run_that_goes_back_sets_later_checkpoints_aside(tmp_path: Path) -> None:
    store = store_with(tmp_path / "runs", *(f"global_step_{n}" for n in (2, 5, 6)))
    back = str(tmp_path / "runs/global_step_2")
    left = store.set_aside_later(back, store.find_undamaged(back))
    assert [path.name for path in left] == ["global_step_5", "global_step_6"]
    assert all((path / STATE_FILE).is_file() for path in left)
    assert steps_of(store) == [2]
    # The same command continues after a stop and leaves no temporary file.
    store_with(tmp_path / "runs", "global_step_3")
    again = store.find_undamaged(back)
    assert again is not None and again.step == 3
    assert store.set_aside_later(back, again) == [] and steps_of(store) == [2, 3]


def test_a_run_that_was_begun_elsewhere_goes_on_here(tmp_path: Path) -> None:
    store_with(tmp_path / "kept", "global_step_2")
    store, origin = store_with(tmp_path / "runs"), str(tmp_path / "kept/global_step_2")
    assert store.set_aside_later(origin, store.find_undamaged(origin)) == []
    store_with(tmp_path / "runs", "global_step_3")
    found = store.find_undamaged(origin)
    assert found is not None and found.path == tmp_path / "runs/global_step_3"
    other = store_with(tmp_path / "kept", "global_step_1") and tmp_path / "kept/global_step_1"
    elsewhere = store.find_undamaged(str(other))
    assert elsewhere is not None and elsewhere.path == other
    assert [path.name for path in store.set_aside_later(str(other), elsewhere)] == ["global_step_3"]


def test_what_lay_there_before_is_not_what_the_run_has_saved(tmp_path: Path) -> None:
    store_with(tmp_path / "kept", "global_step_2")
    store, origin = store_with(tmp_path / "runs", "global_step_1"), tmp_path / "kept/global_step_2"
    found = Checkpoint(path=origin, step=2)
    assert store.find_undamaged(str(origin)) == found
    assert store.set_aside_later(str(origin), found) == []
    # Stopped before it has saved.
    assert store.find_undamaged(str(origin)) == found


def test_a_run_that_starts_over_sets_all_aside_and_replaces_what_lay_there(tmp_path: Path) -> None:
    store = store_with(tmp_path, "global_step_1", "abandoned/global_step_1")
    (tmp_path / "abandoned/global_step_1/old").touch()
    assert store.set_aside_later("disable", None) == [tmp_path / "abandoned/global_step_1"]
    assert steps_of(store) == [] and names(tmp_path / "abandoned/global_step_1") == [STATE_FILE]


def test_without_a_checkpoint_a_run_starts_over(tmp_path: Path) -> None:
    store = store_with(tmp_path / "never made")
    assert store.finished_checkpoints() == [] and store.find_undamaged("auto") is None


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a model and hashes."""
    folder = tmp_path_factory.mktemp("whole")
    hf_to_megatron(write_hf(folder / "hf"), folder / "global_step_2")
    return folder / "global_step_2"


def nest(path: Path) -> None:
    (path / STATE_FILE).write_text("[" * 100_000)
    write_manifest(path, TRAINER)


def leave_pipe(path: Path) -> None:
    (path / MARKER).unlink()
    os.mkfifo(path / MARKER)


def leave_state(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()
    (path / STATE_FILE).write_text('{"step": 3}')


def leave_half_a_model(path: Path) -> None:
    (path / MARKER).unlink()
    (path / "policy/.metadata").unlink()


def list_others(path: Path) -> None:
    write_manifest(path, TRAINER)
    text = json.loads((path / MARKER).read_text())
    text["files"] |= {"../../secret": 6}
    text["blake3"] |= {"../../secret": hash_file(path.parents[1] / "secret")}
    del text["seal"]
    (path / MARKER).write_text(json.dumps({**text, "seal": _seal(text)}))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (nest, "trainer_state.json: cannot be read"),
        (leave_pipe, ".ctrl_megatron.json: is no ordinary file"),
        (leave_state, "holds no policy/"),
        (leave_half_a_model, "holds no policy/"),
        (list_others, "it lists '../../secret', which is not below its directory"),
    ],
)
def test_an_older_checkpoint_takes_the_place_of_a_damaged_one(
    whole: Path, tmp_path: Path, damage: Callable[[Path], None], said: str
) -> None:
    (tmp_path / "secret").write_text("secret")
    runs = tmp_path / "checkpoints"
    for step in (2, 3):
        shutil.copytree(whole, runs / f"global_step_{step}")
    damage(runs / "global_step_3")
    store = CheckpointStore(runs, keep=2, side_files=runs)
    found = store.find_undamaged("auto", ("policy",))
    assert found is not None and found.step == 2
    shutil.rmtree(runs / "global_step_2")
    with pytest.raises(DamagedFiles, match=re.escape(said)):
        store.find_undamaged("auto", ("policy",))


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("name", ["policy", MARKER, STATE_FILE, ".", ".."])
def test_what_cannot_be_read_now_is_no_damage(
    whole: Path, tmp_path: Path, number: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = tmp_path / "checkpoints"
    for step in (2, 3):
        shutil.copytree(whole, runs / f"global_step_{step}")
    shut = os.path.normpath(runs / "global_step_3" / name)

    def refusing(function: Any) -> Any:
        def call(path: Any, *arguments: Any, **named: Any) -> Any:
            inside = isinstance(path, str | os.PathLike) and f"{os.fspath(path)}/".startswith
            if inside and inside(f"{shut}/"):
                raise OSError(number, os.strerror(number), os.fspath(path))
            return function(path, *arguments, **named)

        return call

    for module, function in (("os", "stat"), ("os", "open"), ("os", "listdir"), ("io", "open")):
        monkeypatch.setattr(
            f"{module}.{function}", refusing(getattr(import_module(module), function))
        )
    monkeypatch.setattr("builtins.open", refusing(open))
    store = CheckpointStore(runs, keep=2, side_files=runs)
    with pytest.raises(UserError, match="cannot be read now") as caught:
        store.find_undamaged("auto", ("policy",))
    assert not isinstance(caught.value, DamagedFiles) and shut in str(caught.value)


def test_only_numbers_are_steps(tmp_path: Path) -> None:
    store = store_with(tmp_path, "global_step_2", "global_step_²", "global_step_٣")
    assert steps_of(store) == [2]
    with pytest.raises(UserError, match="is not a checkpoint"):
        store.find_undamaged(str(tmp_path / "global_step_²"))


def test_a_full_disk_is_named_by_whoever_writes(tmp_path: Path) -> None:
    tensors = {"weight": TensorParts((64, 64), torch.float32)}
    tensors["weight"].parts[torch.Size([0, 0])] = torch.rand(64, 64)
    (tmp_path / "there").mkdir()
    save_tensors(tensors, tmp_path / "there", None)
    (name,) = [path.name for path in (tmp_path / "there").glob("*.distcp")]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / name).symlink_to("/dev/full")
    with pytest.raises(OSError) as caught:
        save_tensors(tensors, tmp_path / "full", None)
    assert caught.value.errno == errno.ENOSPC
    assert str(find_user_error(caught.value)).startswith(
        f"the disk of {tmp_path / 'full' / name} is full"
    )


@pytest.mark.parametrize("name", ["global_step_3", "somewhere_else", "missing"])
def test_a_path_that_is_no_checkpoint_is_refused(tmp_path: Path, name: str) -> None:
    store = store_with(tmp_path / "run", "somewhere_else")
    (tmp_path / "run" / "global_step_3").mkdir()
    with pytest.raises(ValueError, match=r"trainer\.resume_mode=.* is not a checkpoint"):
        store.find_undamaged(str(tmp_path / "run" / name))


@pytest.mark.parametrize(
    ("named", "written"),
    [
        ({"generation_config.json": {"eos_token_id": 256, "top_p": 1}}, [256, 257]),
        ({"generation_config.json": {"eos_token_id": [257, 3]}}, [257, 3]),
        ({}, [256, 257]),
    ],
)
def test_an_export_names_the_token_that_ends_a_turn(
    tmp_path: Path, named: dict[str, Any], written: list[int]
) -> None:
    """Other programs stop at what ``generation_config.json`` names, not at the template's end."""
    source = save_tokenizer(tmp_path / "source", eos="<s>")
    for name, content in {"config.json": {"eos_token_id": 256}, **named}.items():
        (source / name).write_text(json.dumps(content))
    folder = tmp_path / "hf"
    folder.mkdir()
    copy_side_files(source, folder)
    parts = tokenizer_parts(folder)
    add_turn_end_to_generation_config(folder)
    assert tokenizer_parts(folder) == parts
    found = json.loads((folder / "generation_config.json").read_text())
    assert found == {**named.get("generation_config.json", {}), "eos_token_id": written}

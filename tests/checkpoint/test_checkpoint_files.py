"""Files that appear whole or not at all, and which checkpoints of a run there are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from byte_tokenizer import save_tokenizer

from ctrl_megatron.checkpoint.files import whole_directory, write_whole
from ctrl_megatron.checkpoint.hf import copy_side_files, name_turn_end
from ctrl_megatron.checkpoint.store import STATE_FILE, Checkpoint, CheckpointStore
from ctrl_megatron.data.tokens import tokenizer_parts


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_directory_appears_when_its_block_ends(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "target"
    with whole_directory(target) as work:
        (work / "file").write_text("new")
        assert not target.exists() and work.parent == target.parent
    assert (target / "file").read_text() == "new" and names(target.parent) == ["target"]


def test_a_directory_replaces_the_old_one_as_a_whole(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "old").touch()
    with whole_directory(target) as work:
        (work / "new").touch()
    assert names(target) == ["new"] and names(tmp_path) == ["target"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failed_block_changes_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "old").touch()
    with pytest.raises(error), whole_directory(target) as work:
        (work / "half").touch()
        raise error
    assert names(target) == ["old"] and names(tmp_path) == ["target"]


def test_ranks_that_do_not_write_only_learn_the_target(tmp_path: Path) -> None:
    with whole_directory(tmp_path / "target", active=False) as work:
        assert work == tmp_path / "target"
    assert names(tmp_path) == []


def test_a_file_is_replaced_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file"
    write_whole(path, "one")
    write_whole(path, "two")
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
    assert [c.step for c in store.all()] == [9, 10]
    newest = Checkpoint(path=tmp_path / "global_step_10", step=10)
    assert store.find("auto") == newest
    assert store.find("disable") is None
    nine = Checkpoint(path=tmp_path / "global_step_9", step=9)
    assert store.find(str(tmp_path / "global_step_9")) == nine


def steps_of(store: CheckpointStore) -> list[int]:
    return [checkpoint.step for checkpoint in store.all()]


def test_a_run_that_goes_back_sets_later_checkpoints_aside(tmp_path: Path) -> None:
    store = store_with(tmp_path / "runs", *(f"global_step_{n}" for n in (2, 5, 6)))
    back = str(tmp_path / "runs/global_step_2")
    left = store.begin(back, store.find(back))
    assert [path.name for path in left] == ["global_step_5", "global_step_6"]
    assert all((path / STATE_FILE).is_file() for path in left)
    assert steps_of(store) == [2]
    # The same command continues after a stop and leaves no temporary file.
    store_with(tmp_path / "runs", "global_step_3")
    again = store.find(back)
    assert again is not None and again.step == 3
    assert store.begin(back, again) == [] and steps_of(store) == [2, 3]


def test_a_run_that_was_begun_elsewhere_goes_on_here(tmp_path: Path) -> None:
    store_with(tmp_path / "kept", "global_step_2")
    store, origin = store_with(tmp_path / "runs"), str(tmp_path / "kept/global_step_2")
    assert store.begin(origin, store.find(origin)) == []
    store_with(tmp_path / "runs", "global_step_3")
    found = store.find(origin)
    assert found is not None and found.path == tmp_path / "runs/global_step_3"
    other = store_with(tmp_path / "kept", "global_step_1") and tmp_path / "kept/global_step_1"
    elsewhere = store.find(str(other))
    assert elsewhere is not None and elsewhere.path == other
    assert [path.name for path in store.begin(str(other), elsewhere)] == ["global_step_3"]


def test_what_lay_there_before_is_not_what_the_run_has_saved(tmp_path: Path) -> None:
    store_with(tmp_path / "kept", "global_step_2")
    store, origin = store_with(tmp_path / "runs", "global_step_1"), tmp_path / "kept/global_step_2"
    found = Checkpoint(path=origin, step=2)
    assert store.find(str(origin)) == found
    assert store.begin(str(origin), found) == []
    # Stopped before it has saved.
    assert store.find(str(origin)) == found


def test_a_run_that_starts_over_sets_all_aside_and_replaces_what_lay_there(tmp_path: Path) -> None:
    store = store_with(tmp_path, "global_step_1", "abandoned/global_step_1")
    (tmp_path / "abandoned/global_step_1/old").touch()
    assert store.begin("disable", None) == [tmp_path / "abandoned/global_step_1"]
    assert steps_of(store) == [] and names(tmp_path / "abandoned/global_step_1") == [STATE_FILE]


def test_without_a_checkpoint_a_run_starts_over(tmp_path: Path) -> None:
    store = store_with(tmp_path / "never made")
    assert store.all() == [] and store.find("auto") is None


@pytest.mark.parametrize("name", ["global_step_3", "somewhere_else", "missing"])
def test_a_path_that_is_no_checkpoint_is_refused(tmp_path: Path, name: str) -> None:
    store = store_with(tmp_path / "run", "somewhere_else")
    (tmp_path / "run" / "global_step_3").mkdir()
    with pytest.raises(ValueError, match=r"trainer\.resume_mode=.* is not a checkpoint"):
        store.find(str(tmp_path / "run" / name))


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
    name_turn_end(folder)
    assert tokenizer_parts(folder) == parts
    found = json.loads((folder / "generation_config.json").read_text())
    assert found == {**named.get("generation_config.json", {}), "eos_token_id": written}

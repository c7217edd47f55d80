"""The table of a checkpoint's tensors is a pickle of others: reading it runs nothing of theirs."""

from __future__ import annotations

import enum
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_conversion import write_hf
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    Metadata,
    TensorProperties,
)

from ctrl_megatron.checkpoint.convert import hf_to_megatron
from ctrl_megatron.checkpoint.manifest import DamagedFiles, write_manifest
from ctrl_megatron.checkpoint.store import Checkpoint, CheckpointStore, read_trainer_state
from ctrl_megatron.checkpoint.tensor_metadata import read_tensor_metadata
from ctrl_megatron.commands import check_checkpoint, convert_megatron_to_hf


class Calls:
    """Unpickling it without restriction calls a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


def inside(flag: str, table: Metadata) -> Metadata:
    """A whole table with a call in a place that nothing reads."""
    table.planner_data = Calls(os.system, f"touch {flag}")
    return table


def elsewhere(flag: str, table: Metadata) -> Metadata:
    """A table that names a file outside its directory."""
    for part in table.storage_data.values():
        part.relative_path = "../../secret"
    return table


def objects(flag: str, table: Metadata) -> Metadata:
    """A table of a tensor and of an object, which torch would unpickle."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    table.state_dict_metadata["model.norm.weight"] = BytesStorageMetadata()
    return table


# Sets an attribute of one of torch's classes: (class, (None, {name: value})) BUILD.
ON_A_CLASS = (
    b"\x80\x04ctorch.distributed.checkpoint.metadata\nTensorProperties\n(N}\x8c\x06hidden\x8c\x01xst"
    b"b."
)
HOSTILE: dict[str, Callable[[str, Metadata], Any]] = {
    "a call": lambda flag, table: Calls(os.system, f"touch {flag}"),
    "eval": lambda flag, table: Calls(eval, f"open({flag!r}, 'w')"),
    "getattr": lambda flag, table: Calls(getattr, torch.Size, "__class__"),
    "getattr of formats": lambda flag, table: Calls(getattr, _MEM_FORMAT_ENCODING, "__class__"),
    "a part of torch": lambda flag, table: Calls(torch.load, flag),
    "inside": inside,
    "elsewhere": elsewhere,
    "objects": objects,
    "on a class": lambda flag, table: ON_A_CLASS,
    "another kind": lambda flag, table: {"model": torch.Size([2])},
    "cut off": lambda flag, table: pickle.dumps(table)[:-20],
    "no pickle": lambda flag, table: b"\x00" * 64,
    "a huge memo": lambda flag, table: b"\x80\x04N" + b"r\xff\xff\xff\x7f" + b".",
    "deep": lambda flag, table: b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b".",
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a tiny model."""
    folder = tmp_path_factory.mktemp("saved")
    hf_to_megatron(write_hf(folder / "hf"), folder / "global_step_0")
    return folder / "global_step_0"


def test_the_table_is_torchs_own(saved: Path) -> None:
    found, torchs = read_tensor_metadata(saved / "policy"), FileSystemReader(saved / "policy")
    whole = torchs.read_metadata()
    assert found.state_dict_metadata == whole.state_dict_metadata
    assert found.storage_data == whole.storage_data and len(whole.storage_data) > 10


def test_the_table_of_an_older_python_is_read(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian 12's Python 3.11.2 pickles the members of an enumeration like this."""
    table = FileSystemReader(saved / "policy").read_metadata()
    older = lambda member, protocol: (getattr, (type(member), member.name))  # noqa: E731
    monkeypatch.setattr(enum.Enum, "__reduce_ex__", older)
    data = pickle.dumps(table)
    assert b"getattr" in data
    (tmp_path / ".metadata").write_bytes(data)
    assert read_tensor_metadata(tmp_path).state_dict_metadata == table.state_dict_metadata


@pytest.mark.parametrize("kind", HOSTILE)
def test_every_way_in_refuses_what_is_no_table(
    saved: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, flag = tmp_path / "global_step_0", tmp_path / "flag"
    os.system(f"cp -r {saved} {checkpoint}")
    file = checkpoint / "policy/.metadata"
    written = HOSTILE[kind](str(flag), FileSystemReader(file.parent).read_metadata())
    file.write_bytes(written if isinstance(written, bytes) else pickle.dumps(written))
    # Hashes have no key: whoever writes the file can write them too.
    write_manifest(checkpoint, "convert_hf_to_megatron")

    with pytest.raises(DamagedFiles, match=r"policy/\.metadata: is no table"):
        read_trainer_state(Checkpoint(path=checkpoint, step=0), ("policy",))
    with pytest.raises(DamagedFiles, match=r"policy/\.metadata: is no table"):
        CheckpointStore(tmp_path, keep=1, side_files=tmp_path).find_undamaged("auto", ("policy",))
    assert check_checkpoint.main([str(checkpoint)]) == 1
    assert "policy/.metadata: is no table" in capsys.readouterr().out
    out = ["--out", str(tmp_path / "back")]
    assert convert_megatron_to_hf.main(["--checkpoint", str(checkpoint), *out]) == 2
    assert "policy/.metadata: is no table" in capsys.readouterr().err
    assert not flag.exists() and not hasattr(TensorProperties, "hidden")

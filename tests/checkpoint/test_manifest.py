"""Manifests: hashes as they are written and read, and the command that compares them."""

from __future__ import annotations

import json
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from test_conversion import write_hf

from ctrl_megatron.checkpoint import hashes
from ctrl_megatron.checkpoint.convert import hf_to_megatron, megatron_to_hf
from ctrl_megatron.checkpoint.hashes import HashingFile, hash_file
from ctrl_megatron.checkpoint.manifest import (
    MARKER,
    DamagedFiles,
    split_by_bytes,
    verify_manifest,
    write_manifest,
)
from ctrl_megatron.commands import check_checkpoint


@pytest.mark.parametrize("aside", [1 << 18, 1 << 10])
def test_a_file_is_hashed_as_it_is_written(
    tmp_path: Path, aside: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashes, "_ASIDE", aside)
    draw = random.Random(aside)
    parts = [draw.randbytes(draw.choice((0, 1, 70, 5000, 1 << 19))) for _ in range(40)]
    with ThreadPoolExecutor(1) as pool, HashingFile(tmp_path / "file", pool) as file:
        for part in parts:
            reused = bytearray(part)
            assert file.write(reused) == len(part)
            reused[:] = bytes(len(part))
        assert file.tell() == sum(map(len, parts))
    whole = b"".join(parts)
    assert (tmp_path / "file").read_bytes() == whole
    assert file.hexdigest() == hash_file(tmp_path / "file") == blake3(whole).hexdigest()


@given(st.dictionaries(st.text(), st.integers(0, 1000)), st.integers(1, 9))
def test_shares_are_disjoint_whole_and_about_equal(sizes: dict[str, int], count: int) -> None:
    shares = split_by_bytes(sizes, count)
    assert sorted(name for share in shares for name in share) == sorted(sizes)
    loads = [sum(sizes[name] for name in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes.values(), default=0)


def test_older_manifests_without_hashes_are_no_damage(tmp_path: Path) -> None:
    (tmp_path / MARKER).write_text(json.dumps({"tool": "tool", "files": {"a": 1}}))
    assert verify_manifest(tmp_path, remedy="") is None
    write_manifest(tmp_path, "tool")
    text = json.loads((tmp_path / MARKER).read_text())
    for name in ("seal", "blake3"):
        (tmp_path / MARKER).write_text(json.dumps({k: v for k, v in text.items() if k != name}))
        with pytest.raises(DamagedFiles, match="its content is not that which was written"):
            verify_manifest(tmp_path, remedy="")


def test_a_command_says_what_is_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    hf_to_megatron(write_hf(tmp_path / "hf"), run / "checkpoints/global_step_2")
    shutil.copytree(run / "checkpoints/global_step_2", run / "checkpoints/global_step_10")
    megatron_to_hf(run / "checkpoints/global_step_2", run / "hf_exports/global_step_2")

    def check(*places: Path) -> tuple[int, list[str]]:
        code = check_checkpoint.main([str(place) for place in places])
        return code, capsys.readouterr().out.splitlines()

    code, lines = check(run)
    assert code == 0 and [line.split(":")[0].split() for line in lines] == [
        ["whole", str(run / name)]
        for name in (
            "checkpoints/global_step_2",
            "checkpoints/global_step_10",
            "hf_exports/global_step_2",
        )
    ]
    for place, name in (
        (run / "checkpoints/global_step_10", next((run / "checkpoints").rglob("*.distcp")).name),
        (run / "hf_exports/global_step_2", "model.safetensors"),
    ):
        file = next(place.rglob(name))
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
        code, lines = check(run / "checkpoints/global_step_2", place)
        assert code == 1 and [line.split()[0] for line in lines] == ["whole", "damaged"]
        assert f"{file}: is not what was saved" in lines[1]
    with pytest.raises(DamagedFiles, match="is not what was saved"):
        megatron_to_hf(run / "checkpoints/global_step_10", tmp_path / "made")
    assert not (tmp_path / "made").exists()
    (run / "checkpoints/global_step_2" / MARKER).unlink()
    code, lines = check(run / "checkpoints/global_step_2")
    assert code == 1 and lines[0].startswith("unverified")
    assert check_checkpoint.main([str(tmp_path)]) == 2

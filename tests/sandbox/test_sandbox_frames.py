"""Frames however they are cut, and directories however they are left."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctrl_megatron.sandbox.jail import files, frames

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(JSON, max_size=5), st.integers(0, 400))
def test_split_takes_whole_frames_only(messages: list[object], cut: int) -> None:
    data = b"".join(map(frames.encode_frame, messages))
    cut = min(cut, len(data))
    first, rest = frames.split_frames(data[:cut])
    second, left = frames.split_frames(rest + data[cut:])
    assert first + second == messages and left == b""
    lengths = [4 + len(json.dumps(m, separators=(",", ":")).encode()) for m in messages]
    whole = sum(sum(lengths[: n + 1]) <= cut for n in range(len(lengths)))
    assert len(first) == whole


@given(st.lists(JSON, min_size=1, max_size=5), st.integers(1, 7))
def test_a_reader_gets_every_frame_from_any_pieces(messages: list[object], size: int) -> None:
    data = b"".join(map(frames.encode_frame, messages))
    reader_end, writer_end = os.pipe()

    def write() -> None:
        for at in range(0, len(data), size):
            os.write(writer_end, data[at : at + size])
        os.close(writer_end)

    thread = threading.Thread(target=write)
    thread.start()
    reader = frames.FrameReader(reader_end, limit=1 << 20)
    assert [reader.receive() for _ in messages] == messages
    with pytest.raises(frames.PeerGone):
        reader.receive()
    thread.join()
    os.close(reader_end)


def test_a_reader_keeps_its_limits() -> None:
    reader_end, writer_end = os.pipe()
    try:
        with pytest.raises(frames.DeadlinePassed):
            frames.FrameReader(reader_end, limit=10).receive(time.monotonic() + 0.01)
        os.write(writer_end, frames.encode_frame("x" * 20))
        with pytest.raises(frames.FrameError, match="exceeds"):
            frames.FrameReader(reader_end, limit=10).receive()
        os.write(writer_end, b"\0\0\0\2{]")
    finally:
        os.close(writer_end)
        os.close(reader_end)


def test_a_tree_of_any_depth_is_removed(tmp_path: Path) -> None:
    top, here = tmp_path / "top", os.getcwd()
    top.mkdir()
    try:
        os.chdir(top)
        for level in range(600):
            Path("file").write_text("x")
            Path("moved-1").mkdir()
            if level % 50 == 0:
                os.symlink("/", "link")
            os.mkdir("d" * 40)
            os.chdir("d" * 40)
        os.chmod(".", 0)
    finally:
        os.chdir(here)
    assert files.directory_exceeds(str(top), 1 << 40), (
        "a path too long to follow counts as too much"
    )
    files.remove_tree(str(top))
    assert not top.exists() and Path("/").exists()


def test_frames_beyond_the_limit_are_refused(tmp_path: Path) -> None:
    assert not files.directory_exceeds(str(tmp_path), 1 << 16)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_bytes(b"x" * (1 << 17))
    assert files.directory_exceeds(str(tmp_path), 1 << 16)
    assert not files.directory_exceeds(str(tmp_path), 1 << 20)
    for number in range(files.MAX_ENTRIES + 1):
        (tmp_path / "a" / f"{number}").touch()
    assert files.directory_exceeds(str(tmp_path), 1 << 30)

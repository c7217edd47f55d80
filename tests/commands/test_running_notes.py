"""What a rank notes of the user's code that it runs, where everybody may write."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ctrl_megatron import errors
from ctrl_megatron.errors import (
    convert_user_code_errors,
    open_user_code_note,
    user_code_running_in,
)


@pytest.fixture(autouse=True)
def note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of this process."""
    monkeypatch.setattr(errors, "_NOTES", str(tmp_path))
    return tmp_path / f"ctrl_running_{os.getpid()}"


def noted() -> str:
    """What the launcher reads of this process."""
    return user_code_running_in(os.getpid())


def test_a_file_that_is_there_already_is_replaced(note: Path, tmp_path: Path) -> None:
    target = tmp_path / "mine"
    target.write_text("precious")
    note.symlink_to(target)
    end = open_user_code_note()
    try:
        with convert_user_code_errors("reward 'mine.py:score' failed"):
            assert noted() == ", while this ran: reward 'mine.py:score'"
    finally:
        end()
    assert target.read_text() == "precious" and not note.exists()


def test_only_a_file_of_the_same_user_is_believed(note: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("anything")
    note.symlink_to(elsewhere)
    assert noted() == ""
    note.unlink()
    os.mkfifo(note)
    assert noted() == ""
    note.unlink()
    note.write_text("mine")
    assert noted() == ", while this ran: mine"
    if os.geteuid() == 0:
        os.chown(note, 12345, -1)
        assert noted() == ""

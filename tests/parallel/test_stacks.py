"""The file of a rank's stacks: written on a signal, removed where it is empty."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

from ctrl_megatron.parallel.stacks import StackFile


def test_a_signal_writes_the_stacks_of_all_threads(tmp_path: Path) -> None:
    ends = threading.Event()

    def a_function_of_a_thread() -> None:
        ends.wait()

    thread = threading.Thread(target=a_function_of_a_thread)
    thread.start()
    stacks, file = StackFile(tmp_path, 3), tmp_path / "stacks/rank_3.txt"
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        on_signal = file.read_text()
        stacks.append_stacks("why it is written")
    finally:
        ends.set()
        thread.join()
        stacks.close()
    assert "in a_function_of_a_thread" in on_signal and "in test_a_signal" in on_signal
    later = file.read_text().removeprefix(on_signal)
    assert "why it is written" in later.splitlines()[0] and "in a_function_of_a_thread" in later


def test_a_run_without_stacks_leaves_no_file(tmp_path: Path) -> None:
    first, second = StackFile(tmp_path, 0), StackFile(tmp_path, 1)
    second.append_stacks("only this one")
    second.close()
    first.close()
    assert [path.name for path in tmp_path.rglob("*")] == ["stacks", "rank_1.txt"]
    (tmp_path / "stacks/rank_1.txt").write_text("")
    StackFile(tmp_path, 1).close()
    assert not list(tmp_path.iterdir())


def test_a_process_that_cannot_answer_is_not_waited_for(tmp_path: Path) -> None:
    stacks = StackFile(tmp_path, 0)
    stacks.request_stacks_of(1, 2**22 - 1)
    stacks.close()
    assert not list(tmp_path.iterdir())

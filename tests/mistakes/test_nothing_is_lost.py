"""A full disk, another user's folder, a second run, files of the user: nothing is lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from forked_command import NOBODY, run, started
from mistaken_world import make_world, write_model
from safetensors.torch import load_file, save_file

from ctrl_megatron.checkpoint import convert, files, run_directory
from ctrl_megatron.checkpoint.convert import hf_to_megatron, megatron_to_hf
from ctrl_megatron.checkpoint.run_directory import LOCK_FILE, RunLock, require_shared_directory
from ctrl_megatron.checkpoint.sharded import require_complete_files
from ctrl_megatron.config import load_config
from ctrl_megatron.errors import UserError, find_user_error
from ctrl_megatron.metrics import JsonlWriter, build_sinks, read_json_lines
from ctrl_megatron.record.recorder import Recorder

SFT = "ctrl_megatron.commands.train_sft"
MIB = 1 << 20


@pytest.fixture(scope="module")
def world() -> Iterator[Path]:
    """A folder that every user may read."""
    folder = Path(tempfile.mkdtemp(prefix="ctrl-world-"))
    folder.chmod(0o755)
    try:
        yield make_world(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """30 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=30m", "tmpfs", str(disk)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no disk can be mounted here: {done.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def sft(*overrides: str, steps: int = 2) -> list[str]:
    return ["--config", "run.yaml", f"sft.total_training_steps={steps}", *overrides]


def test_a_run_stops_before_a_checkpoint_that_does_not_fit(world: Path, small_disk: Path) -> None:
    """The checkpoints that are there stay whole."""
    if not (world / "large").exists():
        write_model(world / "large", vocab_size=36_000)
    settings = ("trainer.save_freq=1", "trainer.max_ckpt_to_keep=-1", "trainer.logger=[jsonl]")
    place = (f"trainer.default_local_dir={small_disk}", "actor_rollout_ref.model.path=large")
    code, output = run(SFT, sft(*settings, *place, steps=8), world)
    assert code == 2, output[-3000:]
    (line,) = (line for line in output.splitlines() if line.startswith("the run stops:"))
    assert "a checkpoint of step" in line and str(small_disk) in line and "MiB free" in line
    assert "Traceback" not in output
    kept = sorted(path for path in (small_disk / "mine/checkpoints").iterdir())
    assert [path.name for path in kept] == [f"global_step_{n}" for n in range(1, len(kept) + 1)]
    assert kept
    for path in kept:
        require_complete_files(path / "policy")
    assert not (small_disk / "mine" / LOCK_FILE).exists()


def stops_with_one_line(output: str) -> str:
    """The line with which the run stops; nothing else is said about its end."""
    assert "Traceback" not in output, output[-3000:]
    (line,) = (line for line in output.splitlines() if "stops" in line)
    assert line.startswith("the run stops: ")
    return line


def test_a_disk_that_fills_ends_the_run_and_is_named(world: Path, small_disk: Path) -> None:
    place = (f"trainer.default_local_dir={small_disk}", "trainer.logger=[jsonl]")
    metrics = small_disk / "mine/metrics.jsonl"
    with started(SFT, sft(*place, steps=100_000), world) as command:
        command.wait_for(small_disk / "mine/config.yaml")
        with suppress(OSError), (small_disk / "filler").open("wb") as filler:
            while True:
                filler.write(bytes(4096))
                filler.flush()
        assert command.ends() == 2, command.output()[-3000:]
    assert f"the disk of {metrics} is full" in stops_with_one_line(command.output())


def test_every_writer_names_the_full_disk(small_disk: Path) -> None:
    (sink,) = build_sinks(["tensorboard"], small_disk, {})
    lines = JsonlWriter(small_disk / "lines.jsonl")
    lines.append({"kept": "x" * 5000})
    with suppress(OSError), (small_disk / "filler").open("wb") as filler:
        while True:
            filler.write(bytes(1024))
            filler.flush()
    for write, name in (
        (lambda: lines.append({"lost": "x" * 5000}), "lines.jsonl"),
        (lambda: [sink.log(1, {"x" * 99: 1.0}) for _ in range(99)], "events.out"),
    ):
        with pytest.raises(OSError) as full:
            write()
        assert str(small_disk) in str(find_user_error(full.value)) and name in str(full.value)
    assert (small_disk / "lines.jsonl").read_text().count("\n") == 1


def test_a_run_without_its_timeline_goes_on(world: Path, tmp_path: Path) -> None:
    # A device that is always full, which only this file is on.
    config = load_config(str(world / "run.yaml"), [f"trainer.default_local_dir={tmp_path}"], "sft")
    recorder = Recorder(config, active=True, total_steps=3)
    assert recorder._timelines is not None
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, recorder._timelines._file)
    os.close(full)
    for step in (1, 2, 3):
        recorder.end_step(step, {"x": 1.0}, {"step": step}, [])
    recorder.close(report=False)
    assert len(read_json_lines(Path(config.trainer.run_dir) / "metrics.jsonl")) == 3


def test_a_removed_directory_ends_the_run_with_one_line(world: Path, tmp_path: Path) -> None:
    place = (f"trainer.default_local_dir={tmp_path}", "trainer.logger=[jsonl]")
    with started(SFT, sft(*place, steps=100_000), world) as command:
        command.wait_for(tmp_path / "mine/metrics.jsonl")
        shutil.rmtree(tmp_path / "mine")
        assert command.ends() == 2, command.output()[-3000:]
    assert f"{tmp_path / 'mine'}, or run.lock in it, was removed" in stops_with_one_line(
        command.output()
    )


def test_ruined_weights_are_not_saved(world: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(world / "model", world / "learns"))
    weights = load_file(model / "model.safetensors")
    torch.manual_seed(0)
    save_file(
        {n: torch.randn_like(w) / 10 for n, w in weights.items()}, model / "model.safetensors"
    )
    place = (f"trainer.default_local_dir={tmp_path}", f"actor_rollout_ref.model.path={model}")
    code, output = run(SFT, sft(*place, "trainer.save_freq=1", "sft.lr=1e30"), world)
    assert code == 2, output[-3000:]
    assert "sft.lr=1e+30: the norm of the updated weights" in stops_with_one_line(output)
    assert list(tmp_path.rglob("global_step_*")) == []


def test_a_run_whose_losses_are_no_numbers_ends_and_saves_nothing(
    world: Path, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(world / "model", tmp_path / "model"))
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"][3] = torch.nan
    save_file(weights, model / "model.safetensors")
    place = (f"trainer.default_local_dir={tmp_path}", f"actor_rollout_ref.model.path={model}")
    bad = ("trainer.save_freq=1", "trainer.max_bad_steps=2")
    code, output = run(SFT, sft(*place, *bad, steps=5), world)
    assert code == 2, output[-3000:]
    said = (
        "2 steps in a row, up to step 2, skipped an update (trainer.max_bad_steps): the loss is nan"
    )
    assert said in stops_with_one_line(output)
    assert "step 1 does not update policy: the loss is nan" in output and "; rows: " in output
    assert list(tmp_path.rglob("global_step_*")) == []


def test_a_conversion_looks_for_room_first(world: Path, small_disk: Path) -> None:
    hf_to_megatron(world / "model", small_disk / "mine")
    (small_disk / "filler").write_bytes(bytes(29 * MIB))
    write_model(world / "larger", vocab_size=40_000)
    with pytest.raises(UserError, match=r"the checkpoint needs .* MiB free; nothing was begun"):
        hf_to_megatron(world / "larger", small_disk / "mine", overwrite=True)
    require_complete_files(small_disk / "mine/policy")
    assert sorted(p.name for p in small_disk.iterdir()) == ["filler", "mine"]


@pytest.mark.parametrize("direction", ["to checkpoint", "to model"])
def test_a_disk_that_fills_up_meanwhile_is_named_and_nothing_half_written(
    world: Path, small_disk: Path, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    large, checkpoint = world / "large_both", world / "large_checkpoint"
    if not large.exists():
        write_model(large, vocab_size=40_000)
        hf_to_megatron(large, checkpoint)
    target = small_disk / "mine"
    hf_to_megatron(world / "model", target)
    before = files.file_sizes(target)
    (small_disk / "filler").write_bytes(bytes(29 * MIB))
    monkeypatch.setattr(convert, "require_free_disk_bytes", lambda *_: None)
    monkeypatch.setattr(convert, "require_replaceable_directory", lambda *_, **__: None)
    monkeypatch.setattr(files, "require_replaceable_directory", lambda *_, **__: None)
    with pytest.raises(Exception) as caught:
        if direction == "to model":
            megatron_to_hf(checkpoint, target)
        else:
            hf_to_megatron(large, target)
    fault = find_user_error(caught.value)
    assert fault is not None and "is full" in str(fault), repr(caught.value)
    assert files.file_sizes(target) == before
    assert sorted(p.name for p in small_disk.iterdir()) == ["filler", "mine"]


def test_an_ordinary_user_in_a_folder_that_is_not_theirs(world: Path) -> None:
    """One line before anything starts, and the folder as it was."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    for module, arguments in (
        (SFT, sft()),
        ("ctrl_megatron.commands.train_rl", ["--config", "run.yaml"]),
        ("ctrl_megatron.commands.convert_hf_to_megatron", ["--hf", "model", "--out", "new"]),
    ):
        names = sorted(path.name for path in world.iterdir())
        code, output = run(module, arguments, world, user=NOBODY)
        assert code == 2 and str(NOBODY) in output, output[-3000:]
        assert len(output.strip().splitlines()) == 1, output
        assert sorted(path.name for path in world.iterdir()) == names


def test_a_second_run_is_refused_and_the_first_goes_on(world: Path, tmp_path: Path) -> None:
    place = f"trainer.default_local_dir={tmp_path}"
    checkpoints = tmp_path / "mine/checkpoints"
    saving = (place, "trainer.save_freq=1", "trainer.logger=[jsonl]")
    with started(SFT, sft(*saving, steps=100_000), world) as first:
        first.wait_for(checkpoints / "global_step_1")
        code, output = run(SFT, sft(place), world)
        assert code == 2 and f"pid {first.process.pid}" in output
        assert len(output.strip().splitlines()) == 1, output
        assert first.process.is_alive()
        os.kill(first.process.pid, signal.SIGTERM)
        assert first.ends() == 130, first.output()[-3000:]
    assert "Traceback" not in first.output()
    assert not (tmp_path / "mine" / LOCK_FILE).exists()
    newest = max(checkpoints.iterdir(), key=lambda path: int(path.name.rpartition("_")[2]))
    require_complete_files(newest / "policy")


def test_a_dead_run_holds_nothing(tmp_path: Path) -> None:
    with started("forked_holder", [str(tmp_path / "run")], tmp_path) as holder:
        holder.wait_for(tmp_path / "run" / LOCK_FILE)
        with pytest.raises(UserError, match=f"in use by the run with pid {holder.process.pid} on"):
            RunLock(tmp_path / "run").acquire()
        os.kill(holder.process.pid, signal.SIGKILL)
        holder.process.join()
    lock = RunLock(tmp_path / "run").acquire()
    lock.release()
    assert not (tmp_path / "run" / LOCK_FILE).exists()


def test_a_rank_that_does_not_see_the_lock_says_that_the_directory_is_not_shared(
    tmp_path: Path,
) -> None:
    lock = RunLock(tmp_path / "here").acquire()
    try:
        require_shared_directory(tmp_path / "here", lock.holder)
        for other in (tmp_path / "there", tmp_path):
            with pytest.raises(UserError, match="on a file system that all machines share"):
                require_shared_directory(other, lock.holder, seconds=0.1)
    finally:
        lock.release()


def test_a_run_of_another_host_lives_while_it_renews_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_directory, "_SILENT_SECONDS", 1.5)
    lock = RunLock(tmp_path).acquire()
    file = tmp_path / LOCK_FILE
    elsewhere = json.loads(file.read_text()) | {"host": "elsewhere", "boot": "another"}
    lock.release()

    def renew() -> None:
        for beat in range(12):
            file.write_text(json.dumps(elsewhere | {"beat": beat}))
            time.sleep(0.2)

    other = threading.Thread(target=renew)
    other.start()
    time.sleep(0.1)
    with pytest.raises(UserError, match="on elsewhere"):
        RunLock(tmp_path).acquire()
    other.join()
    RunLock(tmp_path).acquire().release()


def test_no_clock_that_can_be_set_makes_a_living_run_look_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started("forked_holder", [str(tmp_path / "run")], tmp_path) as holder:
        holder.wait_for(tmp_path / "run" / LOCK_FILE)
        now, boot = time.time(), psutil.boot_time()
        for step in (10, 86_400, -86_400):
            monkeypatch.setattr(time, "time", lambda step=step: now + step)
            monkeypatch.setattr(psutil._pslinux, "boot_time", lambda step=step: boot + step)
            os.utime(tmp_path / "run" / LOCK_FILE, (now - step, now - step))
            with pytest.raises(UserError, match=f"pid {holder.process.pid} on"):
                RunLock(tmp_path / "run").acquire()


def test_a_lock_of_the_kernel_counts_where_process_ids_differ(tmp_path: Path) -> None:
    # As in two containers of one host: the holder's process id means another process here.
    lock = RunLock(tmp_path).acquire()
    file = tmp_path / LOCK_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pid": 2**22 + 1}))
    with pytest.raises(UserError, match=f"pid {2**22 + 1} on"):
        RunLock(tmp_path).acquire()
    os.close(lock._file)
    RunLock(tmp_path).acquire().release()


def test_a_run_notices_that_its_directory_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_directory, "_BEAT_SECONDS", 0.05)
    for damage in (shutil.rmtree, _unlock):
        lock = RunLock(tmp_path / "run").acquire()
        time.sleep(0.2)
        assert lock.lost_error() is None
        damage(tmp_path / "run")
        deadline = time.monotonic() + 10
        while lock.lost_error() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        assert f"{tmp_path / 'run'}, or run.lock in it, was removed" in str(lock.lost_error())
        lock.release()


def _unlock(run_dir: Path) -> None:
    (run_dir / LOCK_FILE).unlink()


def test_files_beside_own_ones_stay(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "val.parquet").write_text("mine too")
    with (
        pytest.raises(UserError, match=r"val\.parquet was not written so by tool"),
        files.tool_output_files(tmp_path, ["train.parquet", "val.parquet"], "tool", overwrite=True),
    ):
        raise AssertionError
    names = ["train.parquet"]
    for overwrite in (False, True):
        with files.tool_output_files(tmp_path, names, "tool", overwrite=overwrite) as work:
            (work / "train.parquet").write_text("made")
    with pytest.raises(UserError, match="--overwrite replaces it"):
        files.require_replaceable_files(tmp_path, names, "tool", overwrite=False)
    files.remove_tool_files(tmp_path, "tool")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "val.parquet"]


def test_own_products_are_replaced_when_asked(world: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    hf_to_megatron(world / "model", out)
    with pytest.raises(UserError, match="--overwrite replaces it"):
        hf_to_megatron(world / "model", out)
    hf_to_megatron(world / "model", out, overwrite=True)
    (out / "hf" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"hf/notes\.txt, which convert_hf_to_megatron did not"):
        hf_to_megatron(world / "model", out, overwrite=True)
    assert (out / "hf/notes.txt").read_text() == "mine"
    with pytest.raises(UserError, match="did not write"):
        megatron_to_hf(world / "checkpoint", out, overwrite=True)

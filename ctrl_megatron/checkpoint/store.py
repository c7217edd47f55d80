"""The checkpoints of a run: list, save, remove old ones, resume."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent import futures
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ctrl_megatron.checkpoint.files import (
    atomic_directory,
    require_free_disk_bytes,
    write_text_atomically,
)
from ctrl_megatron.checkpoint.hf import add_turn_end_to_generation_config, copy_side_files, save_hf
from ctrl_megatron.checkpoint.manifest import (
    ANOTHER,
    MARKER,
    TRAINER,
    CheckpointOrigin,
    DamagedFiles,
    Manifest,
    find_added_files,
    find_changed_files,
    find_missing_or_resized_files,
    ordinary_file_size,
    read_checkpoint_json,
    read_manifest,
    require_undamaged,
    split_by_bytes,
    unreadable_error,
    verify_manifest,
    write_manifest,
)
from ctrl_megatron.checkpoint.run_directory import run_identity
from ctrl_megatron.checkpoint.sharded import (
    PARTS_SUFFIX,
    Snapshot,
    load_sharded,
    require_complete_files,
    take_snapshot,
    write_snapshot,
)
from ctrl_megatron.checkpoint.tensor_metadata import METADATA_FILE
from ctrl_megatron.errors import UserError
from ctrl_megatron.models.parallel_model import ParallelModel
from ctrl_megatron.parallel.groups import ProcessGroups, RankSet

STATE_FILE = "trainer_state.json"
POLICY_FOLDER, VALUE_FOLDER, REFERENCE_FOLDER = "policy", "value", "reference"
"""The folders of the actor's models in a checkpoint."""
HF_FOLDER = "hf"
DRAWN_AHEAD = "ahead"
"""The part of the state with samples of the next step, which a run may lack or leave unread."""
EXPORT_FOLDER = "hf_exports"
LEFT_FOLDER = "abandoned"
"""Subdirectory for checkpoints ahead of the one from which the run was resumed."""
_PREFIX = "global_step_"
_NAME = re.compile(rf"{_PREFIX}([0-9]{{1,18}})")


def model_folder(kind: str, role: str) -> str:
    """The folder of a policy's model: of the actor ``policy``, ``value`` or ``reference``; of
    ``agent1`` ``agent1``, ``agent1_value`` or ``agent1_reference``."""
    if role == "actor":
        return kind
    return role if kind == POLICY_FOLDER else f"{role}_{kind}"


def hf_folder(model: str) -> str:
    """The folder with config.json and the tokenizer of the model in the folder ``model``: each
    policy has its own."""
    found = re.match(r"agent[0-9]+", model)
    return f"{HF_FOLDER}_{found[0]}" if found else HF_FOLDER


_ANEW = "start over with trainer.resume_mode=disable or another trainer.experiment_name"
_BEGAN_FILE = "began_from"
"""File in the checkpoints' directory: the path from which the run that saves there started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The directory of a checkpoint (models, their optimizers and the trainer's small state), and
    the step after which it was saved. ``CheckpointStore.load`` reads it."""

    path: Path
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedCheckpoint:
    """A checkpoint that is loaded."""

    checkpoint: Checkpoint
    state: dict[str, Any]
    """The trainer's small state."""
    remarks: tuple[str, ...]
    """Faults of newer checkpoints, and files that this one lacks or has beside its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """Size and duration of a save."""

    path: Path
    step: int
    num_bytes: int
    """Bytes written by the rank that wrote most."""
    seconds: float
    """Time until the checkpoint had its final name."""
    blocked: float
    """Seconds during which training waited."""

    def metrics(self) -> dict[str, float]:
        return {
            "checkpoint/gib_per_rank": self.num_bytes / 2**30,
            "checkpoint/seconds": self.seconds,
            "checkpoint/blocked_seconds": self.blocked,
        }

    def __str__(self) -> str:
        return (
            f"saved {self.path} in {self.seconds:.1f} s, at most {self.num_bytes / 2**20:.1f} MiB "
            f"per rank; training waited {self.blocked:.1f} s"
        )


def checkpoints_in(directory: Path) -> list[Checkpoint]:
    """The finished checkpoints of a run's directory ``checkpoints``, oldest first. UserError if it
    cannot be read now.
    """
    try:
        names = os.listdir(directory)
    except OSError as error:
        fault = unreadable_error(directory, error)
        if isinstance(fault, DamagedFiles):
            return []
        raise fault from error
    found = [
        Checkpoint(path=directory / name, step=step)
        for name in names
        if (step := _step_of(directory / name)) is not None
    ]
    return sorted(found, key=lambda c: c.step)


class CheckpointStore:
    """The checkpoints below ``runs/<name>/checkpoints``."""

    def __init__(
        self,
        directory: Path,
        *,
        keep: int,
        side_files: Path,
        further: Mapping[str, Path] | None = None,
        asynchronous: bool = False,
        everyone: RankSet | None = None,
    ) -> None:
        """``side_files``, and ``further`` by the policies' roles, are the HF directories with
        config.json and the tokenizer of the models. ``everyone``: all ranks, where some have models
        that others lack; None for the ranks of the models."""
        self._everyone = everyone
        self.directory, self._keep = directory, keep
        own = {hf_folder(role): path for role, path in (further or {}).items()}
        self._side_files = {HF_FOLDER: side_files, **own}
        self._asynchronous = asynchronous
        self._writing: futures.Future[SaveReport] | None = None

    def finished_checkpoints(self) -> list[Checkpoint]:
        """Finished checkpoints, oldest first."""
        return checkpoints_in(self.directory)

    def find_undamaged(self, resume_mode: str, models: Collection[str] = ()) -> Checkpoint | None:
        """The first of ``resume_candidates`` that is undamaged as far as ``verify_without_tensors``
        sees, given the ``models`` of the run; None if there are no candidates. Raises UserError if
        all are damaged, or if one cannot be read now, and as ``resume_candidates``.
        """
        damages = list[DamagedFiles]()
        for checkpoint in self.resume_candidates(resume_mode):
            try:
                manifest = verify_without_tensors(checkpoint.path)
                _require_models(checkpoint.path, models, whole=manifest is not None)
            except DamagedFiles as error:
                damages.append(error)
            else:
                return checkpoint
        return _none_whole(damages)

    def resume_candidates(self, resume_mode: str) -> list[Checkpoint]:
        """The checkpoints to continue from, the first that is whole: the newest (``auto``) and
        those before it, none (``disable``), or a path.

        A run that was started from that path and has saved since continues from its newest
        checkpoint, so that the same command continues after a stop. Raises UserError if the path is
        not a checkpoint.
        """
        if resume_mode == "disable":
            return []
        newest_first = self.finished_checkpoints()[::-1]
        if resume_mode == "auto":
            return newest_first
        path, began = Path(resume_mode), self.directory / _BEGAN_FILE
        same = began.is_file() and began.read_text() == str(path.resolve())
        # Checkpoints that existed before and are not ahead of the path are older than it.
        step = _step_of(path)
        own = [one for one in newest_first if same and step is not None and one.step > step]
        if step is not None and ordinary_file_size(path / STATE_FILE) is not None:
            return [*own, Checkpoint(path=path, step=step)]
        if own:
            return own
        raise UserError(
            f"trainer.resume_mode={resume_mode} is not a checkpoint; give auto, disable, or a "
            f"directory {_PREFIX}N that holds {STATE_FILE}"
        )

    def set_aside_later(self, resume_mode: str, checkpoint: Checkpoint | None) -> list[Path]:
        """Set aside checkpoints of later steps than ``checkpoint``, the result of
        ``find_undamaged``.

        Otherwise ``auto`` would continue from them, and they would be kept instead of this run's.
        Returns their new paths. Called on one rank.
        """
        began, start = self.directory / _BEGAN_FILE, checkpoint.step if checkpoint else 0
        aside, places = self.directory / LEFT_FOLDER, list[Path]()
        for ahead in (one.path for one in self.finished_checkpoints() if one.step > start):
            aside.mkdir(exist_ok=True)
            path = aside / ahead.name
            if path.exists():
                shutil.rmtree(path)
            ahead.rename(path)
            places.append(path)
        if resume_mode == "disable":
            began.unlink(missing_ok=True)
        elif resume_mode != "auto":
            write_text_atomically(began, str(Path(resume_mode).resolve()))
        return places

    def save(self, models: Mapping[str, ParallelModel], step: int, state: dict[str, Any]) -> None:
        """Save everything a resumed run needs; ``state`` must be JSON. Collective.

        Each model gets a folder of its name (``policy``, ``value``). The directory gets its name
        only when all ranks have written all files. With ``asynchronous`` this rank's part is copied
        to host memory and written by a thread while training continues, after the previous save has
        ended. ``pop_save_report`` and ``wait_for_save`` return its report.
        """
        self.wait_for_save()
        start = time.monotonic()
        taken = {name: take_snapshot(m, copy=self._asynchronous) for name, m in models.items()}
        groups = self._everyone or next(iter(models.values())).groups
        shares = groups.all_gather(sum(one.num_bytes for one in taken.values()))
        num_bytes = max(shares)
        if groups.is_first:
            require_free_disk_bytes(self.directory, sum(shares), f"a checkpoint of step {step}")
        origin = CheckpointOrigin(self._run(groups), step)
        text = json.dumps({**asdict(origin), **state}, indent=1)
        blocked = time.monotonic() - start
        target = self.directory / f"{_PREFIX}{step}"
        # Collectives of two threads must not share a group.
        writers = replace(groups, host=groups.writers)
        of_models = {n: replace(m.groups, host=m.groups.writers) for n, m in models.items()}

        def write() -> SaveReport:
            self._write(taken, target, origin, text, writers, of_models)
            seconds = time.monotonic() - start
            return SaveReport(
                path=target,
                step=step,
                num_bytes=num_bytes,
                seconds=seconds,
                blocked=blocked if self._asynchronous else seconds,
            )

        self._writing = _in_thread(write) if self._asynchronous else _done(write())

    def pop_save_report(self) -> SaveReport | None:
        """The report of the save that has ended since the last call, on this rank.

        Raises the RuntimeError or OSError of an asynchronous save that failed.
        """
        if self._writing is None or not self._writing.done():
            return None
        writing, self._writing = self._writing, None
        return writing.result()

    def wait_for_save(self) -> SaveReport | None:
        """Wait for the save that is being written; its ``pop_save_report``."""
        if self._writing is not None:
            futures.wait([self._writing])
        return self.pop_save_report()

    def _write(
        self,
        taken: Mapping[str, Snapshot],
        target: Path,
        origin: CheckpointOrigin,
        state: str,
        groups: RankSet,
        of_models: Mapping[str, ProcessGroups],
    ) -> None:
        names = dict.fromkeys(name for names in groups.all_gather([*taken]) for name in names)
        if groups.is_first:
            # Incomplete checkpoints of a run that was killed.
            for stale in self.directory.glob(f".{_PREFIX}*"):
                shutil.rmtree(stale)
        with atomic_directory(target, active=groups.is_first) as work:
            work = groups.broadcast_from_first(work)
            if groups.is_first:
                for name in names:
                    (work / name).mkdir()
                for folder, given in self._side_files.items():
                    copy_side_files(given, work / folder)
                    add_turn_end_to_generation_config(work / folder)
            groups.barrier()
            hashes = dict[str, str]()
            for name, one in taken.items():
                written = write_snapshot(one, work / name, of_models[name], origin)
                hashes |= {f"{name}/{file}": found for file, found in written.items()}
            everyone = groups.all_gather(hashes)
            if groups.is_first:
                for name in names:
                    require_complete_files(work / name)
                (work / STATE_FILE).write_text(state)
                known = {file: found for part in everyone for file, found in part.items()}
                write_manifest(work, TRAINER, known=known, origin=origin)
        if groups.is_first and self._keep > 0:
            for old in self.finished_checkpoints()[: -self._keep]:
                _remove(old.path)
        groups.barrier()

    def _run(self, groups: RankSet) -> str:
        """The identity of the run. Collective."""
        return groups.broadcast_from_first(
            run_identity(self.directory.parent) if groups.is_first else ""
        )

    def export_hf(self, models: Mapping[str, ParallelModel], step: int) -> Path:
        """Write each model as an HF directory ``hf_exports/global_step_N`` (the value model's has
        ``_value`` added) beside the checkpoints' directory; returns the policy's. Collective."""
        target = self.directory.parent / EXPORT_FOLDER / f"{_PREFIX}{step}"
        groups = self._everyone or next(iter(models.values())).groups
        origin = CheckpointOrigin(self._run(groups), step)
        for name, model in models.items():
            folder = target if name == POLICY_FOLDER else Path(f"{target}_{name}")
            given = self._side_files[hf_folder(name)]
            save_hf(model, folder, side_files=given, origin=origin)
        return target

    def load_newest(
        self, models: Mapping[str, ParallelModel], resume_mode: str, *, parts: Collection[str]
    ) -> LoadedCheckpoint | None:
        """``load`` the first of ``resume_candidates`` that is whole; None if there are no
        candidates. Collective.

        Raises UserError if all are damaged, and as ``resume_candidates`` and ``load``.
        """
        groups = self._everyone or next(iter(models.values())).groups
        damages = list[DamagedFiles]()
        # One rank decides, because a shared file system may show other ranks an older state.
        for checkpoint in groups.broadcast_from_first(self.resume_candidates(resume_mode)):
            try:
                loaded = self.load(models, checkpoint, parts=parts, everyone=groups)
            except DamagedFiles as error:
                damages.append(error)
                continue
            skipped = (f"{one}; an older checkpoint takes its place" for one in damages)
            return replace(loaded, remarks=(*skipped, *loaded.remarks))
        return _none_whole(damages)

    @staticmethod
    def load(
        models: Mapping[str, ParallelModel],
        checkpoint: Checkpoint,
        *,
        parts: Collection[str] = (),
        everyone: RankSet | None = None,
    ) -> LoadedCheckpoint:
        """Fill the models and their optimizers; the trainer's small state has the named ``parts``.
        Collective.

        Raises UserError, before anything is loaded, if the checkpoint lacks one of the models or
        parts, and DamagedFiles, on all ranks, if a file is not as it was saved.
        """
        groups = everyone or next(iter(models.values())).groups
        remarks = verify_across_ranks(checkpoint.path, groups)
        state = read_trainer_state(checkpoint, models, parts)
        for name, model in models.items():
            load_sharded(model, checkpoint.path / name)
        return LoadedCheckpoint(checkpoint=checkpoint, state=state, remarks=remarks)


def verify_without_tensors(path: Path) -> Manifest | None:
    """The manifest of the checkpoint ``path``; None if an older version, without hashes, saved it.

    Raises DamagedFiles for what can be seen without reading tensors: files that are missing or of
    another size, other content of the small files that a resume reads, another step, a table of
    tensors that is none; UserError for a file that cannot be read now.
    """
    manifest = read_manifest(path)
    if manifest is None or not manifest.hashes:
        if _names_run(path / STATE_FILE):
            raise DamagedFiles("is missing", file=path / MARKER, remedy=ANOTHER)
        _require_tables(path)
        return None
    origin = manifest.origin
    named = path.name.startswith(_PREFIX)
    if named and origin is not None and path.name != f"{_PREFIX}{origin.step}":
        raise DamagedFiles(f"{path} is the checkpoint of step {origin.step}", remedy=ANOTHER)
    wrong = find_missing_or_resized_files(path, manifest)
    small = [name for name in manifest.hashes if name not in wrong and not _is_large(name)]
    require_undamaged(path, wrong | find_changed_files(path, manifest, small), ANOTHER)
    _names_run(path / STATE_FILE)
    _require_tables(path)
    return manifest


def _names_run(state: Path) -> bool:
    """Whether a trainer's state names its run, which the checkpoints of older versions do not.
    DamagedFiles if it is no state."""
    found = read_checkpoint_json(state)
    if not isinstance(found, dict):
        raise DamagedFiles("is no state of a trainer", file=state, remedy=ANOTHER)
    return "run" in found


def _require_tables(path: Path) -> None:
    """DamagedFiles unless the table of every model's tensors agrees with its files."""
    for table in sorted(path.glob(f"*/{METADATA_FILE}")):
        require_complete_files(table.parent)


def _require_models(path: Path, models: Collection[str], *, whole: bool) -> None:
    """UserError unless the checkpoint has all models; DamagedFiles if it is not known to be
    ``whole``, so that the rest may not have been copied.
    """
    for name in models:
        if ordinary_file_size(path / name / METADATA_FILE) is None:
            problem = f"{path} holds no {name}/: a run without that model saved it"
            if whole:
                raise UserError(problem, remedy=_ANEW)
            raise DamagedFiles(f"{problem}, or it was not copied whole", remedy=ANOTHER)


def _is_large(name: str) -> bool:
    return name.endswith(PARTS_SUFFIX) or name.startswith((f"{HF_FOLDER}/", f"{HF_FOLDER}_"))


def verify_in_one_process(path: Path) -> Manifest | None:
    """The manifest of the checkpoint ``path``, with which every file agrees; None if an older
    version, without hashes, saved it. Raises DamagedFiles for the first file that differs.
    """
    verify_without_tensors(path)
    return verify_manifest(path, remedy=ANOTHER)


def verify_across_ranks(path: Path, groups: RankSet) -> tuple[str, ...]:
    """Compare every file with the manifest, each on one rank; returns what is worth a line in the
    log. Collective. Raises DamagedFiles, on all ranks, for the first file that differs, UserError
    for one that cannot be read now.
    """
    manifest, fault = None, None
    if groups.is_first:
        try:
            manifest = verify_without_tensors(path)
        except UserError as error:
            fault = error
    manifest, fault = groups.broadcast_from_first((manifest, fault))
    if fault is not None:
        raise fault
    if manifest is None:
        return (f"{path} has no hashes, because an older version saved it: it is not verified",)
    large = {name: manifest.sizes[name] for name in manifest.hashes if _is_large(name)}
    mine = split_by_bytes(large, groups.size)[groups.rank]
    try:
        seen = find_changed_files(path, manifest, mine)
    except UserError as error:
        seen = error
    wrong = {}
    for part in groups.all_gather(seen):
        if isinstance(part, UserError):
            raise part
        wrong |= part
    require_undamaged(path, wrong, ANOTHER)
    others = find_added_files(path, manifest) if groups.is_first else []
    return (f"{path} also holds {', '.join(others)}, which is not used",) if others else ()


def _none_whole(damages: list[DamagedFiles]) -> None:
    """Return if there are none; else raise the first, of the newest checkpoint."""
    if damages:
        older = len(damages) - 1
        others = "an older one is" if older == 1 else f"{older} older ones are"
        raise DamagedFiles(f"{damages[0]}" + (f"; {others} damaged too" if older else ""))


def read_trainer_state(
    checkpoint: Checkpoint, models: Collection[str], parts: Collection[str] = ()
) -> dict[str, Any]:
    """The trainer's small state; UserError unless the checkpoint is complete, with all models and,
    if any are named, exactly these parts of the state. Reads no tensor.
    """
    verified = verify_without_tensors(checkpoint.path) is not None
    _require_models(checkpoint.path, models, whole=verified)
    file = checkpoint.path / STATE_FILE
    state = read_checkpoint_json(file)
    if not isinstance(state, dict) or not isinstance(state.get("step"), int):
        raise UserError("holds no number of steps", file=file, remedy=_ANEW)
    if state.get("weights_only") and models:
        raise UserError(
            f"{checkpoint.path} holds weights only and training cannot resume from it",
            remedy="convert it with ctrl-convert-megatron-to-hf and give the result as the model's "
            "path",
        )
    missing = [name for name in parts if name not in state]
    further = sorted(state.keys() - {"run", "step", DRAWN_AHEAD, *parts}) if parts else []
    for verb, names in (("lacks", missing), ("holds", further)):
        if names:
            raise UserError(
                f"{checkpoint.path} {verb} {', '.join(names)}: another kind of run saved it",
                remedy=_ANEW,
            )
    return state


def _step_of(path: Path) -> int | None:
    """The step in the name of a checkpoint; None for another name."""
    found = _NAME.fullmatch(path.name)
    return int(found[1]) if found else None


def _remove(old: Path) -> None:
    """Remove an old checkpoint; a warning if that fails, because the new one is saved already."""
    try:
        shutil.rmtree(old)
    except OSError as error:
        print(f"warning: {old} is not removed: {error}", file=sys.stderr, flush=True)


def _done(report: SaveReport) -> futures.Future[SaveReport]:
    done: futures.Future[SaveReport] = futures.Future()
    done.set_result(report)
    return done


def _in_thread(work: Callable[[], SaveReport]) -> futures.Future[SaveReport]:
    """Runs in a daemon thread, unlike an executor's, so that a failing run does not wait for it."""
    done: futures.Future[SaveReport] = futures.Future()
    # A new thread uses GPU 0, where every rank of a host would open a context.
    gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run() -> None:
        try:
            if gpu is not None:
                torch.cuda.set_device(gpu)
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="checkpoint-writer", daemon=True).start()
    return done

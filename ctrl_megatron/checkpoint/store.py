"""The checkpoints of a run: which exist, saving one whole, removing old ones, resuming."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing

from ctrl_megatron.checkpoint.files import whole_directory
from ctrl_megatron.checkpoint.hf import copy_side_files
from ctrl_megatron.models.parallel_model import ParallelModel

STATE_FILE = "trainer_state.json"
POLICY_FOLDER, VALUE_FOLDER = "policy", "value"
HF_FOLDER = "hf"
_PREFIX = "global_step_"
_METADATA = {
    # The one optimizer format that is saved on a CPU and loaded on another TP x PP x DP layout.
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A directory that holds models, their optimizers and the trainer's small state."""

    path: Path
    step: int


class CheckpointStore:
    """The checkpoints below ``runs/<name>/checkpoints``."""

    def __init__(self, directory: Path, *, keep: int, side_files: Path) -> None:
        self.directory, self._keep, self._side_files = directory, keep, side_files

    def all(self) -> list[Checkpoint]:
        """Finished checkpoints, oldest first."""
        found = [
            Checkpoint(path=path, step=int(path.name.removeprefix(_PREFIX)))
            for path in self.directory.glob(f"{_PREFIX}*")
            if path.name.removeprefix(_PREFIX).isdigit()
        ]
        return sorted(found, key=lambda c: c.step)

    def find(self, resume_mode: str) -> Checkpoint | None:
        """The checkpoint to continue from: the newest (``auto``), none (``disable``), or a path.

        Raises ValueError if the path is not a checkpoint.
        """
        if resume_mode == "disable":
            return None
        if resume_mode == "auto":
            return self.all()[-1] if self.all() else None
        path = Path(resume_mode)
        if not (path / STATE_FILE).is_file() or not path.name.startswith(_PREFIX):
            raise ValueError(
                f"trainer.resume_mode={resume_mode} is not a checkpoint; give auto, disable, or a "
                f"directory {_PREFIX}N that holds {STATE_FILE}"
            )
        return Checkpoint(path=path, step=int(path.name.removeprefix(_PREFIX)))

    def save(self, models: Mapping[str, ParallelModel], step: int, state: dict[str, Any]) -> Path:
        """Save everything a resumed run needs; ``state`` must be JSON. Collective.

        Each model gets a folder of its name (``policy``, ``value``). The directory gets its name
        only when all ranks have written all files.
        """
        groups = next(iter(models.values())).groups
        if groups.is_first:
            # What a killed run left half-written.
            for stale in self.directory.glob(f".{_PREFIX}*"):
                shutil.rmtree(stale)
        target = self.directory / f"{_PREFIX}{step}"
        with whole_directory(target, active=groups.is_first) as work:
            work = Path(groups.from_first(str(work)))
            if groups.is_first:
                for name in models:
                    (work / name).mkdir()
                copy_side_files(self._side_files, work / HF_FOLDER)
            groups.barrier()
            for name, model in models.items():
                save_sharded(model, work / name)
            groups.barrier()
            if groups.is_first:
                (work / STATE_FILE).write_text(json.dumps({"step": step, **state}, indent=1))
        groups.barrier()
        if groups.is_first and self._keep > 0:
            for old in self.all()[: -self._keep]:
                shutil.rmtree(old.path)
        return target

    @staticmethod
    def load(models: Mapping[str, ParallelModel], checkpoint: Checkpoint) -> dict[str, Any]:
        """Fill the models and their optimizers; returns the trainer's small state. Collective.

        Raises ValueError, before anything is loaded, if the checkpoint lacks one of the models.
        """
        for name in models:
            if not (checkpoint.path / name).is_dir():
                raise ValueError(
                    f"{checkpoint.path} holds no {name}/: a run without that model saved it; start "
                    "over with trainer.resume_mode=disable or another trainer.experiment_name"
                )
        for name, model in models.items():
            load_sharded(model, checkpoint.path / name)
        return json.loads((checkpoint.path / STATE_FILE).read_text())


def save_sharded(model: ParallelModel, directory: Path) -> None:
    """Write this model's shards into the existing, empty ``directory``. Collective."""
    dist_checkpointing.save(
        _sharded_state(model, loading=False), str(directory), validate_access_integrity=True
    )


def load_sharded(model: ParallelModel, directory: Path) -> None:
    """Fill the model's weights and optimizer from ``directory``. Collective.

    Raises whatever Megatron reports for missing or misshapen tensors; nothing is skipped.
    """
    state: Any = dist_checkpointing.load(_sharded_state(model, loading=True), str(directory))
    for index, chunk in enumerate(model.models):
        chunk.load_state_dict(state[f"model{index}"], strict=True)
    if model.optimization is not None:
        model.optimization.load_state_dict(state["optimizer"], state["scheduler"])


def _sharded_state(model: ParallelModel, *, loading: bool) -> dict[str, Any]:
    model.onload("weights", "optimizer")
    # Nothing of them is saved, and what is gathered needs room.
    model.offload("gradients")
    on_cpu = next(model.models[0].parameters()).device.type == "cpu"
    # Ranks on a CPU share its memory: only the first data-parallel one holds what is gathered.
    metadata = {**_METADATA, "distrib_optim_fully_reshardable_mem_efficient": on_cpu}
    state: dict[str, Any] = {}
    for index, chunk in enumerate(model.models):
        state[f"model{index}"] = chunk.sharded_state_dict(metadata=metadata)
    if model.optimization is not None:
        # Also for a model that has not learned yet, as an actor in the critic's warm-up.
        model.optimization.create_state()
        weights = state if len(model.models) > 1 else state["model0"]
        optimizer = model.optimization.optimizer.sharded_state_dict(
            weights, is_loading=loading, metadata=metadata
        )
        if "param_state" in optimizer and optimizer["param_state"] is None:
            # A rank that has nothing to save; Megatron warns that the ranks' keys differ.
            del optimizer["param_state"]
        state["optimizer"] = optimizer
        state["scheduler"] = model.optimization.scheduler.state_dict()
    return state

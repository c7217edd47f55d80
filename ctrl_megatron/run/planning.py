"""How many steps a run takes, and what its checkpoints hold."""

from __future__ import annotations

from pathlib import Path

from ctrl_megatron.checkpoint.store import (
    POLICY_FOLDER,
    REFERENCE_FOLDER,
    VALUE_FOLDER,
    CheckpointStore,
    model_folder,
    read_trainer_state,
)
from ctrl_megatron.config import Config
from ctrl_megatron.data.prompt_table import PromptTable
from ctrl_megatron.errors import convert_input_errors
from ctrl_megatron.resharding.device import policy_role
from ctrl_megatron.run.build import row_sampler, total_steps

_PARTS = ("kl_controller", "reserve")
"""Parts of the state in a checkpoint beside the sampler."""


def checkpoint_model_folders(config: Config) -> tuple[str, ...]:
    """The folders of the models in a checkpoint, policy by policy."""
    found = list[str]()
    for number, own in enumerate(config.agents):
        others = {VALUE_FOLDER: own.needs_value_model, REFERENCE_FOLDER: own.refreshes_reference}
        kinds = [POLICY_FOLDER, *(kind for kind, is_saved in others.items() if is_saved)]
        found += [model_folder(kind, policy_role(number)) for kind in kinds]
    return tuple(found)


def checkpoint_state_parts(config: Config) -> tuple[str, ...]:
    """The parts of the state in a checkpoint beside the sampler."""
    further = map(policy_role, range(1, len(config.agents)))
    return (*_PARTS, *(f"{role}/{part}" for role in further for part in _PARTS))


def epoch_limit(config: Config) -> int | None:
    """The epochs after which dynamic sampling begins no further step. A step of it draws several
    batches of rows, so the number of steps does not follow from the rows. None if the number of
    steps is fixed.
    """
    counted = config.algorithm.filter_groups.enable and config.trainer.total_training_steps is None
    return config.trainer.total_epochs if counted else None


def planned_steps(config: Config, train: PromptTable) -> int:
    """Training steps of the run. Where epochs set the length it is an upper bound; a checkpoint
    that has drawn all rows ends the run at its own step."""
    steps, epochs = total_steps(config, len(train.rows)), epoch_limit(config)
    trainer = config.trainer
    store = CheckpointStore(
        Path(trainer.run_dir) / "checkpoints", keep=-1, side_files=Path(trainer.run_dir)
    )
    models = checkpoint_model_folders(config)
    checkpoint = None if epochs is None else store.find_undamaged(trainer.resume_mode, models)
    if epochs is None or checkpoint is None:
        return steps
    with convert_input_errors():
        state = read_trainer_state(checkpoint, models, ("sampler", *checkpoint_state_parts(config)))
        sampler = row_sampler(config, train)
        sampler.load_state_dict(state["sampler"])
    through = sampler.is_exhausted(epochs, config.gen_batch_size)
    return min(steps, checkpoint.step) if through else steps

"""On how many hosts a run goes on when some are lost. Pure."""

from __future__ import annotations

from dataclasses import replace

from ctrl_megatron.config.checks import Purpose, check_world_size
from ctrl_megatron.config.schema import Config
from ctrl_megatron.errors import UserError


def config_for_hosts(config: Config, hosts: int) -> Config:
    """The same run on so many hosts. Sizes of a model copy and of the batches stay; the number of
    data ranks follows from the hosts, and each has more or fewer micro-batches.
    """
    return config.replace_groups(trainer=replace(config.trainer, nnodes=hosts))


def config_for_world_size(config: Config, world_size: int) -> Config:
    """The run on the hosts of ``world_size`` started ranks, if the configuration allows so many;
    else the configuration as it is.
    """
    trainer = config.trainer
    hosts, rest = divmod(world_size, trainer.n_gpus_per_node)
    allowed = trainer.min_nnodes is not None and trainer.min_nnodes <= hosts < trainer.nnodes
    return config_for_hosts(config, hosts) if allowed and not rest else config


def max_fitting_hosts(config: Config, available: int, purpose: Purpose = "rl") -> int:
    """The largest number of hosts, of ``available``, that hold whole model copies which share the
    batches equally. UserError, with what does not fit on all of them, if it is smaller than
    ``trainer.min_nnodes``.
    """
    trainer = config.trainer
    least = trainer.nnodes if trainer.min_nnodes is None else trainer.min_nnodes
    if available < least:
        raise UserError(
            f"the run needs {least} hosts, and {available} are left",
            key="trainer.nnodes" if trainer.min_nnodes is None else "trainer.min_nnodes",
            remedy="wait for more hosts, or set a smaller trainer.min_nnodes",
        )
    refusals: list[UserError] = []
    for hosts in range(min(available, trainer.nnodes), least - 1, -1):
        try:
            check_world_size(
                config_for_hosts(config, hosts), hosts * trainer.n_gpus_per_node, purpose
            )
        except UserError as error:
            refusals.append(error)
        else:
            return hosts
    raise refusals[0]

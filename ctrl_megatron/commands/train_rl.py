"""Train a critic by reinforcement learning.

``ctrl-train-rl --nproc-per-node 2 --config FILE key=value``, or under torchrun or srun.
"""

from __future__ import annotations

from collections.abc import Sequence

from ctrl_megatron.commands.start import command_entry_point, load_config_or_launch
from ctrl_megatron.config import Config
from ctrl_megatron.errors import STOPPED


@command_entry_point("train_rl")
def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 finished, 2 wrong input, 13 a process failed, 14 a service that judges failed,
    130 stopped by a signal.
    """
    config = load_config_or_launch("train_rl", "rl", arguments, __doc__, check_rl_inputs)
    if isinstance(config, int):
        return config
    from ctrl_megatron.run.train import train

    return 0 if train(config) else STOPPED


def check_rl_inputs(config: Config) -> None:
    """Raise UserError for wrong input of the run, before a rank starts."""
    from ctrl_megatron.run.checks.rl import check_rl_run
    from ctrl_megatron.run.inputs import check_rows

    graph, rewards = check_rl_run(config)
    check_rows(config, rewards, validates=graph.report.validate is not None)


if __name__ == "__main__":
    raise SystemExit(main())

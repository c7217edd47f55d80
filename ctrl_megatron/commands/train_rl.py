"""Train a critic by reinforcement learning.

``ctrl-train-rl --nproc-per-node 2 --config FILE key=value``, or under torchrun or srun.
"""

from __future__ import annotations

from collections.abc import Sequence

from ctrl_megatron.commands.start import STOPPED, refuse, training_config


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 finished, 2 wrong input, 130 stopped by a signal."""
    config = training_config("train_rl", "rl", arguments, __doc__)
    if isinstance(config, int):
        return config
    from ctrl_megatron.pipeline.run import train

    try:
        return 0 if train(config) else STOPPED
    except ValueError as error:
        return refuse("train_rl", error)


if __name__ == "__main__":
    raise SystemExit(main())

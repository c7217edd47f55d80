"""Train a critic by reinforcement learning.

``ctrl-train-rl --nproc-per-node 2 --config FILE key=value``, or under torchrun or srun.
"""

from __future__ import annotations

from collections.abc import Sequence

from ctrl_megatron.commands.start import train_command
from ctrl_megatron.config import Config


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 finished, 2 wrong input, 130 stopped by a signal."""
    return train_command("train_rl", "rl", _train, arguments, __doc__)


def _train(config: Config) -> bool:
    from ctrl_megatron.pipeline.run import train

    return train(config)


if __name__ == "__main__":
    raise SystemExit(main())

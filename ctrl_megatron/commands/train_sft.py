"""Fine-tune on synthesised critiques.

``ctrl-train-sft --nproc-per-node 2 --config FILE key=value``, or under torchrun or srun.
"""

from __future__ import annotations

from collections.abc import Sequence

from ctrl_megatron.commands.start import train_command
from ctrl_megatron.config import Config


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 finished, 2 wrong input, 130 stopped by a signal."""
    return train_command("train_sft", "sft", _train, arguments, __doc__)


def _train(config: Config) -> bool:
    from ctrl_megatron.sft.run import train_sft

    return train_sft(config)


if __name__ == "__main__":
    raise SystemExit(main())

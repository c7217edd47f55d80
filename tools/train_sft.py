"""Fine-tune on synthesised critiques.

``torchrun --nproc-per-node 2 tools/train_sft.py --config examples/ctrl_smollm2_cpu.yaml key=value``
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
warnings.filterwarnings("ignore", module=r"megatron|torch")

from ctrl_megatron.config import check_files, check_world_size, load_config
from ctrl_megatron.config.environment import read_launch, read_log_level


def main() -> int:
    """Parse, check, build, run. Exit codes: 0 finished, 2 wrong input, 130 stopped by a signal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True, help="YAML file, e.g. examples/ctrl_7b.yaml")
    parser.add_argument("overrides", nargs="*", help="key=value, e.g. sft.total_epochs=2")
    arguments = parser.parse_args()
    try:
        logging.basicConfig(level=read_log_level())
        config = load_config(arguments.config, arguments.overrides, "sft")
        check_files(config, "sft")
        check_world_size(config, read_launch().world_size, "sft")
    except ValueError as error:
        print(f"train_sft: {error}", file=sys.stderr)
        return 2
    from ctrl_megatron.sft.run import train_sft

    return 0 if train_sft(config) else 130


if __name__ == "__main__":
    raise SystemExit(main())

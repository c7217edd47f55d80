"""``ctrl-prepare-smollm2`` from a checkout, without an installation."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ctrl_megatron.commands.prepare_smollm2 import main

if __name__ == "__main__":
    raise SystemExit(main())

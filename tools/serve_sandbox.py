"""Serve the sandbox: ``python tools/serve_sandbox.py --host 127.0.0.1 --port 8080 --workers 2
--isolation standard``.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ctrl_megatron.sandbox.__main__ import main

if __name__ == "__main__":
    raise SystemExit(main())

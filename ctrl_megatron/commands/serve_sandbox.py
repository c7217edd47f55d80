"""Serve the sandbox, which runs untrusted programs.

``ctrl-serve-sandbox --host 127.0.0.1 --port 8080 --workers 2``
"""

from __future__ import annotations

from ctrl_megatron.sandbox.__main__ import main

if __name__ == "__main__":
    raise SystemExit(main())

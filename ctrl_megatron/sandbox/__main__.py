"""``python -m ctrl_megatron.sandbox``: the service as a process of its own."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys

from ctrl_megatron.sandbox.isolation import LEVELS, MECHANISMS, IsolationRefused
from ctrl_megatron.sandbox.limits import SandboxLimits
from ctrl_megatron.sandbox.serve import Owner, serve
from ctrl_megatron.sandbox.workers import WorkerFault, WorkerSettings


def main(arguments: list[str] | None = None) -> int:
    """Parse, check, serve. Returns the exit status; a failure to start is one line on stderr."""
    options = _parser().parse_args(arguments)
    if options.workers < 1:
        print("sandbox: --workers must be at least 1", file=sys.stderr)
        return 2
    try:
        limits = SandboxLimits(**json.loads(options.limits))
        settings = WorkerSettings(
            level=options.isolation,
            limits=limits,
            python=os.path.realpath(options.python),
            preload=tuple(options.preload),
            without=tuple(options.without),
        )
        owner = None
        if options.owner:
            owner = Owner(pid=options.owner, main_thread=options.owner_main_thread)
        service = serve(
            settings, workers=options.workers, host=options.host, port=options.port, owner=owner
        )
        asyncio.run(service)
    except (IsolationRefused, WorkerFault, OSError, ValueError, TypeError) as error:
        text = error.strerror if isinstance(error, OSError) and error.strerror else error
        print(f"sandbox: {text}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Run untrusted programs behind SandboxFusion's HTTP contract."
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080, help="0 takes a free port")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--isolation", choices=LEVELS, default="standard")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the programs")
    parser.add_argument("--preload", nargs="*", default=[], help="further modules to import once")
    parser.add_argument("--without", nargs="*", choices=MECHANISMS, default=[])
    parser.add_argument("--limits", default="{}", help="JSON object of SandboxLimits fields")
    parser.add_argument("--owner", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--owner-main-thread", action="store_true", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())

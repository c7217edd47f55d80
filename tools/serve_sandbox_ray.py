"""Serve the sandbox on every node of a Ray cluster, until Ctrl-C or SIGTERM.

A trainer spreads its requests over the services with
sandbox.endpoint="$(cat ENDPOINTS_FILE)" sandbox.token_file=TOKEN_FILE. A service that ends is
replaced, and a node that joins gets one.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
from datetime import datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ctrl_megatron.config.flags import ToolParser
from ctrl_megatron.sandbox.access import read_token
from ctrl_megatron.sandbox.client.ray_cluster import (
    Deployment,
    NodeFailure,
    ServiceOptions,
    connect,
)
from ctrl_megatron.sandbox.limits import LEVELS


def main(arguments: list[str] | None = None) -> int:
    """Deploy, watch, stop. Returns the exit status; a failure to start is one line on stderr."""
    options = _parser().parse_args(arguments)
    told = threading.Event()
    try:
        token = _token(Path(options.token_file))
        connect(options.address)
        # Not before: joining a cluster may take long, and has nothing to drain.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: told.set())
        service = ServiceOptions(
            token=token,
            workers=options.workers,
            isolation=options.isolation,
            port=options.port,
            drain_seconds=options.drain_seconds,
        )
        deployment = Deployment(service, Path(options.endpoints_file))
        try:
            done = deployment.reconcile()
            deployment.require_all()
            _say(*done, f"{len(deployment.endpoints)} services: {options.endpoints_file}")
            while not told.wait(options.every):
                _say(*deployment.reconcile())
            _say("draining")
        finally:
            deployment.stop()
    except (ImportError, ConnectionError, NodeFailure, OSError, ValueError) as error:
        print(f"sandbox: {error}", file=sys.stderr)
        return 1
    return 0


def _token(path: Path) -> str:
    """The token in ``path``; a new one if the file does not exist."""
    if not path.exists():
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            print(secrets.token_hex(32), file=file)
    return read_token(path)


def _say(*lines: str) -> None:
    for line in lines:
        print(f"{datetime.now():%H:%M:%S} {line}", flush=True)


def _parser() -> ToolParser:
    parser = ToolParser(__doc__)
    parser.add_argument("--endpoints-file", required=True, help="file to hold the addresses")
    parser.add_argument(
        "--token-file", required=True, help="the clients' bearer token; made if it is not there"
    )
    parser.add_argument("--address", help="of the Ray cluster; RAY_ADDRESS or this machine's")
    parser.add_argument("--workers", type=int, help="per node; one per processor")
    parser.add_argument("--isolation", choices=LEVELS, default="strict")
    parser.add_argument("--port", type=int, default=0, help="on each node; 0 takes a free one")
    parser.add_argument(
        "--drain-seconds", type=float, default=20.0, help="what running requests get at the end"
    )
    parser.add_argument(
        "--every", type=float, default=5.0, help="seconds between two looks at the cluster"
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())

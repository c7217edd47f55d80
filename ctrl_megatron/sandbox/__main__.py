"""``python -m ctrl_megatron.sandbox``: the service as a process of its own."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from dataclasses import fields, replace

from ctrl_megatron.config.flags import (
    CommandParser,
    existing_file,
    float_flag,
    integer_flag,
    output_path,
    port,
)
from ctrl_megatron.errors import UserError, convert_input_errors
from ctrl_megatron.problems.long_integers import INTEGER_DIGITS
from ctrl_megatron.sandbox.access import read_token
from ctrl_megatron.sandbox.cores import usable_cores
from ctrl_megatron.sandbox.jail.isolation import IsolationRefused
from ctrl_megatron.sandbox.limits import LEVELS, MECHANISMS, SandboxLimits
from ctrl_megatron.sandbox.service.server import ServerOptions, serve_sandbox
from ctrl_megatron.sandbox.service.telemetry import LOG_LEVELS, log_json_lines
from ctrl_megatron.sandbox.service.worker import WorkerFault, WorkerSettings


def main(arguments: list[str] | None = None) -> int:
    """Parse and check the arguments, then serve. Exit codes: 2 for wrong input, including an
    address or file that cannot be used; 1 if the workers do not start. Either prints one line on
    stderr.
    """
    try:
        options = _parser().parse_args(arguments)
        with convert_input_errors("--limits"):
            limits = _limits(options.limits)
        if options.problem_seconds is not None:
            with convert_input_errors("--problem-seconds"):
                limits = replace(limits, problem_seconds=options.problem_seconds)
        with convert_input_errors("--token-file"):
            token = read_token(options.token_file) if options.token_file else None
        if not (os.path.isfile(options.python) and os.access(options.python, os.X_OK)):
            raise UserError(f"--python {options.python} is no program that can be run")
    except UserError as error:
        print(f"sandbox: {error}", file=sys.stderr)
        return 2
    log_json_lines(options.log_level)
    sys.set_int_max_str_digits(INTEGER_DIGITS)
    try:
        settings = WorkerSettings(
            level=options.isolation,
            limits=limits,
            python=os.path.realpath(options.python),
            preload=tuple(options.preload),
            without=tuple(options.without),
        )
        server = ServerOptions(
            host=options.host,
            port=options.port,
            token=token,
            allow_open=options.allow_open,
            drain_seconds=options.drain_seconds,
            endpoint_file=options.endpoint_file,
            owner=options.owner,
            owner_main_thread=options.owner_main_thread,
        )
        asyncio.run(serve_sandbox(settings, workers=options.workers, options=server))
    except (IsolationRefused, WorkerFault, OSError, ValueError, TypeError) as error:
        text = error
        if isinstance(error, OSError) and error.strerror:
            named = f": {error.filename}" if error.filename else ""
            text = f"{error.strerror}{named}"
        print(f"sandbox: {text}", file=sys.stderr)
        return 1 if isinstance(error, (IsolationRefused, WorkerFault)) else 2
    return 0


def _limits(text: str) -> SandboxLimits:
    given = json.loads(text)
    known = {field.name for field in fields(SandboxLimits)}
    if not isinstance(given, dict) or (unknown := given.keys() - known):
        what = ", ".join(sorted(unknown)) if isinstance(given, dict) else repr(given)
        raise UserError(f"{what}: no field of SandboxLimits; known: {', '.join(sorted(known))}")
    if wrong := [name for name, value in given.items() if type(value) not in (int, float)]:
        raise UserError(f"{wrong[0]}={given[wrong[0]]!r} is no number")
    return SandboxLimits(**given)


def _parser() -> CommandParser:
    parser = CommandParser("Run untrusted programs behind SandboxFusion's HTTP contract.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=port, default=8080, help="0 takes a free port")
    parser.add_argument(
        "--token-file",
        type=existing_file,
        help="file whose first line is the clients' bearer token",
    )
    parser.add_argument(
        "--allow-open", action="store_true", help="listen beyond loopback without a token"
    )
    parser.add_argument(
        "--drain-seconds",
        type=float_flag(0, 86400),
        default=10.0,
        help="what running requests get to finish after SIGTERM",
    )
    parser.add_argument(
        "--endpoint-file", type=output_path, help="file to hold the address while it answers"
    )
    parser.add_argument("--log-level", choices=LOG_LEVELS, default="info")
    parser.add_argument("--workers", type=integer_flag(1, 1024), default=usable_cores())
    parser.add_argument("--isolation", choices=LEVELS, default="standard")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the programs")
    parser.add_argument("--preload", nargs="*", default=[], help="further modules to import once")
    parser.add_argument("--without", nargs="*", choices=MECHANISMS, default=[])
    parser.add_argument(
        "--problem-seconds",
        type=float_flag(above=0, most=86400),
        help="what all tests of a problem may spend on workers (as in --limits)",
    )
    parser.add_argument("--limits", default="{}", help="JSON object of SandboxLimits fields")
    parser.add_argument("--owner", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--owner-main-thread", action="store_true", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())

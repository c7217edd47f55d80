"""Serve a critic: it receives a problem and a solution, and returns a critique, a judgment and a
tested revision.

``ctrl-serve-critic --critic DIR --port 8090``

GET / is a web page. POST /v1/critiques accepts an object with ``problem``, ``solution``, ``tests``,
``revise`` and ``stream``. POST /v1/chat/completions is OpenAI's protocol with the critic. The
service listens on the loopback interface unless --host names another one.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
from collections.abc import Sequence

from ctrl_megatron.commands.chat_flags import add_chat_flags, chat_sources, open_flagged_sandbox
from ctrl_megatron.commands.start import CommandParser, command_entry_point
from ctrl_megatron.config.flags import count_flag, existing_file, port
from ctrl_megatron.errors import UserError, convert_input_errors


@command_entry_point("serve_critic")
def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, check, serve until a signal. Exit codes: 2 wrong input, 130 stopped."""
    parser = CommandParser(__doc__)
    add_chat_flags(parser, required="critic")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=port, default=8090, help="0 chooses a free one")
    parser.add_argument(
        "--max-tokens", type=count_flag(), default=768, help="most tokens of an answer"
    )
    parser.add_argument(
        "--token-file",
        type=existing_file,
        help="its first line is the token that clients must send",
    )
    parser.add_argument("--allow-open", action="store_true", help="serve without a token")
    options = parser.parse_args(arguments)
    from ctrl_megatron.sandbox.access import read_token, require_safe_address

    with convert_input_errors("--token-file"):
        token = read_token(options.token_file) if options.token_file else None
    with convert_input_errors("--host"):
        require_safe_address(options.host, token, allow_open=options.allow_open)
    _require_free(options.host, options.port)
    _serve(options, token)
    return 0


def _require_free(host: str, port: int) -> None:
    """Raise UserError if the port is in use, before a model is loaded for minutes."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        problem = f"cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}"
        raise UserError(problem, key="--port", remedy="choose another") from error


def _serve(options: argparse.Namespace, token: str | None) -> None:
    sources, engines = chat_sources(options, required="critic")
    from ctrl_megatron.generation.critic_service import CriticService, serve_forever
    from ctrl_megatron.generation.sources import open_chats

    with open_flagged_sandbox(options.sandbox) as judge, open_chats(sources, engines) as chats:
        service = CriticService(
            chats["critic"],
            chats["generator"],
            judge,
            model=options.critic,
            max_tokens=options.max_tokens,
            loopback=not options.allow_open and token is None,
            token=token,
        )
        asyncio.run(serve_forever(service, options.host, options.port))


if __name__ == "__main__":
    raise SystemExit(main())

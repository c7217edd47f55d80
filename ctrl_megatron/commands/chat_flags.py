"""Flags of commands that use models: the models, and how engines and clients run."""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ctrl_megatron.commands.hub import hub_directory
from ctrl_megatron.commands.start import CommandParser
from ctrl_megatron.config.flags import count_flag, integer_flag
from ctrl_megatron.engine_kinds import ENGINES
from ctrl_megatron.errors import UserError

if TYPE_CHECKING:
    from ctrl_megatron.generation.sources import ChatSource, EngineOptions
    from ctrl_megatron.rewards.grading import Judge

_CHATS = {"generator": "writes solutions and revisions", "critic": "criticises"}
DTYPES = ("bfloat16", "float32")
MOST_THREADS = 4096
SERVERS = "server of MODEL, or several with commas between them"


def add_chat_flags(parser: CommandParser, *, required: str) -> None:
    """Add ``--generator`` and ``--critic`` (``required`` is mandatory) and related flags."""
    for role, does in _CHATS.items():
        other = "" if role == required else "; the other one by default"
        parser.add_argument(
            f"--{role}", required=role == required, metavar="MODEL", help=does + other
        )
        parser.add_argument(f"--{role}-url", default="", metavar="URL", help=SERVERS)
    parser.add_argument("--engine", choices=list(ENGINES), help="for model directories")
    parser.add_argument(
        "--max-model-len", type=count_flag(), default=2048, help="prompt plus answer, tokens"
    )
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="of an engine")
    parser.add_argument(
        "--threads", type=integer_flag(1, MOST_THREADS), help="CPU threads of an engine"
    )
    add_tensor_parallel_flag(parser)
    parser.add_argument(
        "--max-concurrency", type=count_flag(), default=32, help="concurrent requests to a server"
    )
    parser.add_argument(
        "--token-budget", type=integer_flag(1), help="most tokens of all requests to servers"
    )
    parser.add_argument(
        "--sandbox",
        default="",
        metavar="URL|none",
        help="defaults to a sandbox that the command starts",
    )


def add_tensor_parallel_flag(parser: CommandParser) -> None:
    parser.add_argument(
        "--tensor-parallel-size",
        type=count_flag(),
        default=1,
        help="GPUs of an engine; the models have GPUs of their own, or share too few of them",
    )


def chat_sources(
    options: argparse.Namespace, *, required: str
) -> tuple[dict[str, ChatSource], EngineOptions]:
    """The source of each role, and options of their engines. Raises UserError for wrong sources."""
    from ctrl_megatron.generation.sources import EngineOptions, check_source

    engines = EngineOptions(
        engine=options.engine,
        max_model_len=options.max_model_len,
        dtype=options.dtype,
        threads=options.threads,
        tensor_parallel_size=options.tensor_parallel_size,
        max_concurrency=options.max_concurrency,
        token_budget=options.token_budget,
    )
    sources: dict[str, ChatSource] = {}
    for role in _CHATS:
        model, url = getattr(options, role), getattr(options, f"{role}_url")
        if url and not model:
            raise UserError(f"--{role}-url needs --{role}, the model's name there")
        if model:
            sources[role] = model_source(f"--{role}", model, url)
            check_source(f"--{role}-url" if url else f"--{role}", sources[role], engines)
    return {role: sources.get(role, sources[required]) for role in _CHATS}, engines


def model_source(flag: str, model: str, url: str) -> ChatSource:
    """The source of a model that ``flag`` names; without a server, downloaded if it is an id on the
    Hub. UserError if it cannot be."""
    from ctrl_megatron.generation.sources import ChatSource

    return ChatSource(model if url else hub_directory(model, flag), url)


@contextmanager
def convert_service_faults(out: Path) -> Iterator[None]:
    """Turn the failure of a server or sandbox into a UserError that points to ``out``."""
    from ctrl_megatron.generation.chat import ChatError
    from ctrl_megatron.sandbox import SandboxError

    try:
        yield
    except (ChatError, SandboxError) as error:
        raise UserError(str(error), remedy=f"{out} keeps what is finished: run it again") from error


@contextmanager
def open_flagged_sandbox(flag: str) -> Iterator[Judge | None]:
    """The sandbox of ``--sandbox``: None for ``none``; if the flag is empty, start one."""
    from ctrl_megatron.errors import convert_input_errors
    from ctrl_megatron.sandbox import EmbeddedSandbox, SandboxClient

    if flag == "none":
        yield None
    elif flag:
        with convert_input_errors("--sandbox"):
            client = SandboxClient(flag)
        yield client
    else:
        token = secrets.token_urlsafe(32)
        with EmbeddedSandbox.start(token=token) as service:
            yield SandboxClient(service.endpoint, token=token)

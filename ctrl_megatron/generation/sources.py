"""From the model that a user names, a directory or a server's model, to a ``Chat``. Sources are
checked before anything starts; an engine is launched once per model and stopped at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from ctrl_megatron.config.environment import read_openai_key
from ctrl_megatron.data.tokens import TextCodec
from ctrl_megatron.errors import UserError, users_input
from ctrl_megatron.generation.chat import EngineChat
from ctrl_megatron.generation.openai_client import OpenAIChat, TokenBudget
from ctrl_megatron.models.hf_config import read_model_shape
from ctrl_megatron.models.safetensors_dir import SafetensorsDirectory
from ctrl_megatron.rollout.client import RemoteEngine
from ctrl_megatron.rollout.engine import EngineSpec, default_engine, require_engine
from ctrl_megatron.rollout.launch import EngineProcess, launch_engine


@dataclass(frozen=True, slots=True)
class ChatSource:
    """The model of one role."""

    model: str
    """An HF directory or, with ``url``, the server's name of the model."""
    url: str = ""
    """Address of the server, usually ending in ``/v1``; empty for a model directory."""

    def weights(self) -> str | None:
        """Fingerprint of the directory's weights; None for a server, whose weights are unknown.
        Raises ``ValueError`` for a directory that cannot be read.
        """
        return None if self.url else SafetensorsDirectory(self.model).fingerprint()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Options of the engines that are launched and limits of the clients of servers."""

    engine: str | None = None
    dtype: str = "bfloat16"
    """With ``float32`` an answer seldom depends on the other answers of its batch."""
    max_model_len: int = 2048
    threads: int | None = None
    max_concurrency: int = 32
    token_budget: int | None = None


def check_source(flag: str, source: ChatSource, options: EngineOptions) -> None:
    """Raise UserError that names ``flag`` for a source that cannot be opened."""
    with users_input(flag):
        if source.url:
            OpenAIChat(source.url, source.model)
            return
        require_engine(options.engine or default_engine())
        _ = TextCodec(source.model).eos_token_ids
        shape = read_model_shape(source.model)
        SafetensorsDirectory(source.model).check(shape)
        if options.max_model_len > shape.max_position_embeddings:
            raise UserError(
                f"the model of {source.model} has a context of max_position_embeddings="
                f"{shape.max_position_embeddings} tokens, fewer than --max-model-len="
                f"{options.max_model_len}",
                remedy="lower --max-model-len, or name a model with a longer context",
            )


@contextmanager
def open_chats(
    sources: Mapping[str, ChatSource], options: EngineOptions
) -> Iterator[dict[str, EngineChat | OpenAIChat]]:
    """A chat per role; roles with one source share it. Engines run until the block ends. Raises
    ``EngineDied`` for an engine that does not start. Use the chats on one event loop only.
    """
    budget = None if options.token_budget is None else TokenBudget(options.token_budget)
    chats: dict[ChatSource, EngineChat | OpenAIChat] = {}
    launched: list[EngineProcess] = []
    try:
        for source in dict.fromkeys(sources.values()):
            if source.url:
                chats[source] = OpenAIChat(
                    source.url,
                    source.model,
                    api_key=read_openai_key(),
                    max_concurrency=options.max_concurrency,
                    budget=budget,
                )
                continue
            spec = EngineSpec(
                name=options.engine or default_engine(),
                model_path=source.model,
                dtype=options.dtype,
                max_model_len=options.max_model_len,
                kv_cache_gib=1.0,
                threads=options.threads,
            )
            launched.append(launch_engine(spec))
            engine: RemoteEngine = launched[-1].connect()
            codec = TextCodec(source.model)
            chats[source] = EngineChat(engine, codec, max_model_len=options.max_model_len)
        yield {role: chats[source] for role, source in sources.items()}
    finally:
        for process in launched:
            process.stop()

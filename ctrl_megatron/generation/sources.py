"""From the model that a user names, a directory or a server's model, to a ``Chat``. Sources are
checked before anything starts; an engine is launched once per model and stopped at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from ctrl_megatron.config.environment import bind_collectives_to_loopback, read_openai_key
from ctrl_megatron.data.tokens import TextCodec
from ctrl_megatron.engine_kinds import ENGINES
from ctrl_megatron.errors import UserError, convert_input_errors
from ctrl_megatron.generation.chat import EngineChat, MultiServerChat
from ctrl_megatron.generation.openai_client import OpenAIChat, TokenBudget
from ctrl_megatron.models.hf_config import read_shape
from ctrl_megatron.models.safetensors_dir import SafetensorsDirectory
from ctrl_megatron.parallel.devices import visible_gpus
from ctrl_megatron.rollout.client import RemoteEngine
from ctrl_megatron.rollout.engine import EngineSpec, default_engine, require_engine
from ctrl_megatron.rollout.launch import EngineProcess, launch_engine

_SHARE = 0.9
"""Share of a GPU's memory that engines use."""


@dataclass(frozen=True, slots=True)
class ChatSource:
    """The model of one role."""

    model: str
    """An HF directory or, with ``url``, the server's name of the model."""
    url: str = ""
    """Addresses of the model's servers, usually ending in ``/v1``, separated by commas; empty for a
    model directory."""

    @property
    def urls(self) -> list[str]:
        return [url.strip() for url in self.url.split(",")] if self.url else []

    def weights_fingerprint(self) -> str | None:
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
    tensor_parallel_size: int = 1
    max_concurrency: int = 32
    token_budget: int | None = None


def check_source(flag: str, source: ChatSource, options: EngineOptions) -> None:
    """Raise UserError that names ``flag`` for a source that cannot be opened."""
    with convert_input_errors(flag):
        if source.url:
            for url in source.urls:
                OpenAIChat(url, source.model)
            return
        name = options.engine or default_engine()
        require_engine(name)
        if options.tensor_parallel_size > 1 and not ENGINES[name].tensor_parallel:
            raise UserError(
                f"--tensor-parallel-size={options.tensor_parallel_size} is not possible with "
                f"--engine {name}",
                remedy="name another engine, or leave it out",
            )
        _ = TextCodec(source.model).eos_token_ids
        shape = read_shape(source.model, None)
        SafetensorsDirectory(source.model).check(shape)
        if options.max_model_len > shape.max_position_embeddings:
            raise UserError(
                f"the model of {source.model} has a context of max_position_embeddings="
                f"{shape.max_position_embeddings} tokens, fewer than --max-model-len="
                f"{options.max_model_len}",
                remedy="lower --max-model-len, or name a model with a longer context",
            )


def assign_engine_gpus(engines: int, tensor: int, gpus: int) -> list[tuple[tuple[int, ...], float]]:
    """(GPUs, share of their memory) of each engine of ``tensor`` processes: GPUs of its own where
    the machine has enough of its ``gpus``, otherwise the first ones in equal parts; no GPUs on a
    machine without any. Raises ``UserError`` where one engine needs more than there are.
    """
    if not gpus:
        return [((), _SHARE)] * engines
    if engines and gpus < tensor:
        raise UserError(
            f"--tensor-parallel-size={tensor} is more than the {gpus} GPUs that are there",
            remedy="lower it",
        )
    if gpus < engines * tensor:
        return [(tuple(range(tensor)), _SHARE / engines)] * engines
    return [(tuple(range(i * tensor, (i + 1) * tensor)), _SHARE) for i in range(engines)]


@contextmanager
def open_chats(
    sources: Mapping[str, ChatSource], options: EngineOptions
) -> Iterator[dict[str, EngineChat | OpenAIChat | MultiServerChat]]:
    """A chat per role; roles with one source share it. Engines run until the block ends. Raises
    ``EngineDied`` for an engine that does not start. Use the chats on one event loop only.

    On a machine with GPUs each engine has its own, if there are enough for all of them; otherwise
    they share the first ones in equal parts (``assign_engine_gpus``).
    """
    budget = None if options.token_budget is None else TokenBudget(options.token_budget)
    chats: dict[ChatSource, EngineChat | OpenAIChat | MultiServerChat] = {}
    launched: list[EngineProcess] = []
    different = list(dict.fromkeys(sources.values()))
    places = assign_engine_gpus(
        sum(not source.url for source in different),
        options.tensor_parallel_size,
        visible_gpus(),
    )
    try:
        for source in different:
            if source.url:
                servers = [
                    OpenAIChat(
                        url,
                        source.model,
                        api_key=read_openai_key(),
                        max_concurrency=options.max_concurrency,
                        budget=budget,
                    )
                    for url in source.urls
                ]
                chats[source] = servers[0] if len(servers) == 1 else MultiServerChat(servers)
                continue
            devices, share = places[len(launched)]
            spec = EngineSpec(
                name=options.engine or default_engine(),
                model_path=source.model,
                dtype=options.dtype,
                max_model_len=options.max_model_len,
                kv_cache_gib=1.0,
                threads=options.threads,
                tensor_parallel_size=options.tensor_parallel_size,
                devices=devices,
                gpu_memory_utilization=share,
            )
            bind_collectives_to_loopback()
            launched.append(launch_engine(spec))
            engine: RemoteEngine = launched[-1].connect()
            codec = TextCodec(source.model)
            chats[source] = EngineChat(engine, codec, max_model_len=options.max_model_len)
        yield {role: chats[source] for role, source in sources.items()}
    finally:
        for process in launched:
            process.stop()

"""What every rollout engine offers, and what passes between engine and trainer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ctrl_megatron.engine_kinds import ENGINES
from ctrl_megatron.errors import UserError
from ctrl_megatron.types import Completion, SamplingParams, TensorSpec

if TYPE_CHECKING:
    # The server's process imports torch only after its parent is watched.
    from ctrl_megatron.rollout.weight_chunks import WeightChunk

PauseMode = Literal["abort", "keep"]
"""``abort`` ends running completions with finish reason ``abort``; ``keep`` freezes them: they go
on after ``resume``, with the weights in force then."""

EngineMemory = Literal["weights", "kv_cache"]
"""What an engine sleeps without and wakes to, one after the other."""
ENGINE_MEMORY: tuple[EngineMemory, ...] = ("weights", "kv_cache")
SleepLevel = Literal[1, 2]
"""1 keeps a copy of the weights in host memory; 2 forgets them: an update must follow."""

TokenListener = Callable[[int, Sequence[int]], None]
"""Hears the tokens of a call's completions as they are drawn: which completion, counted over all
prompts, and its next tokens."""


class EngineError(RuntimeError):
    """The engine failed, or is not in a state to do what it was asked for."""


class EngineDied(EngineError):
    """The engine's process is gone or no longer answers; it has to be launched again."""


class EngineBroken(EngineError):
    """A weight update failed half-way; the engine holds a mixture and refuses to generate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """Everything needed to start one engine."""

    name: str
    """A name of ``ENGINES``."""
    python: str | None = None
    """Interpreter of the engine's process, of another environment than ours; None for our own."""
    title: str = ""
    """What errors call the engine; empty for ``name``."""
    host: str = "127.0.0.1"
    """Address of this machine at which the engine is reached."""
    devices: tuple[int, ...] = ()
    """Those GPUs of the launching process's that the engine may use; empty for all."""
    model_path: str
    """HF directory with ``config.json`` and safetensors."""
    dtype: str = "bfloat16"
    """``bfloat16`` or ``float32``: what the engine computes in and holds."""
    max_model_len: int = 2048
    """Longest prompt plus completion, in tokens."""
    max_num_seqs: int = 64
    """Most sequences decoded together."""
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9
    """Share of each GPU for weights and KV cache."""
    kv_cache_gib: float | None = None
    """Size of the KV cache on a CPU, in GiB; None is 2."""
    enforce_eager: bool = False
    """No CUDA graphs; a CPU has none to capture."""
    may_sleep: bool = False
    """Whether ``sleep`` will be asked for, which some engines must know when they start."""
    seed: int = 0
    """Seed of draws that have no ``SamplingParams.seed``."""
    threads: int | None = None
    """CPU threads the engine computes with; None leaves the choice to the engine."""
    startup_timeout: float = 600.0
    """Seconds until a start counts as failed."""
    log_path: str | None = None
    """Where the process writes; None makes a file in the temporary directory."""
    extra: dict[str, Any] = field(default_factory=dict)
    """More arguments of the engine's own constructor (vLLM: ``AsyncEngineArgs``; SGLang:
    ``ServerArgs``)."""

    def require_sleep(self) -> None:
        """ValueError without ``may_sleep``."""
        if not self.may_sleep:
            raise ValueError("the engine was started without may_sleep; set it in EngineSpec")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAddress:
    """How other processes reach an engine. Plain data: send it to other ranks."""

    name: str
    endpoint: str
    """``http://HOST:PORT``; on loopback only the engine's own machine gets there."""
    home: Hashable
    """The engine's ``host_identity``: only there do process id and log say anything."""
    token: str = field(repr=False)
    pid: int
    log_path: str


class Engine(Protocol):
    """An engine as the trainer sees it. All methods may be called concurrently."""

    async def generate(
        self, prompts: list[list[int]], params: SamplingParams
    ) -> list[list[Completion]]:
        """Draw ``params.n`` completions per prompt, in the order of the prompts.

        Only ``params.stop_token_ids`` and ``params.max_tokens`` end a completion. With
        ``params.seed`` set, sample j of row i (counted from ``params.first_row``) draws from a
        stream of its own, derived from (seed, i, j). Raises ValueError for prompts that do not fit,
        EngineError while anything sleeps or the weights are forgotten, EngineBroken, EngineDied.
        """
        ...

    async def update(
        self, specs: Sequence[TensorSpec], chunks: AsyncIterator[WeightChunk], version: str
    ) -> None:
        """Replace all weights; completions drawn afterwards carry ``version``.

        ``specs`` must be the tensors of the engine's checkpoint, a tied head left out, in any dtype
        that weights travel in: ValueError names every difference and leaves the engine untouched.
        The next chunk is pulled only when the previous one has been read, so its memory may be
        used again then. Running completions freeze meanwhile and go on with the new weights; all
        caches are dropped. EngineError on a failure after the first chunk: the engine is broken.
        """
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop drawing. Requests that arrive while paused wait for ``resume``."""
        ...

    async def resume(self) -> None:
        """Draw again."""
        ...

    async def sleep(self, level: SleepLevel) -> None:
        """Free all device memory, weights and caches. Nobody may be generating.

        ValueError without ``EngineSpec.may_sleep``.
        """
        ...

    async def wake(self, tags: Sequence[EngineMemory]) -> None:
        """Take memory back: the weights' before an update, the cache's before a completion."""
        ...

    async def checksums(self) -> dict[str, str]:
        """HF name -> ``tensor_checksum`` of the weights that the engine computes with."""
        ...

    async def health(self) -> None:
        """Return if the engine works; raise what is wrong with it otherwise."""
        ...

    async def close(self) -> None:
        """Let go of the engine (an embedded one frees its model, a remote one its connections)."""
        ...


class StreamingEngine(Engine, Protocol):
    """An engine whose completions can be heard while they are drawn."""

    async def generate(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        listener: TokenListener | None = None,
    ) -> list[list[Completion]]:
        """As ``Engine.generate``; ``listener`` has heard all tokens when it returns."""
        ...


def next_tokens(listener: TokenListener, place: int) -> Callable[[Sequence[int]], None]:
    """For engines that show all tokens of a completion so far: passes on those that are new."""
    heard = 0

    def show(tokens: Sequence[int]) -> None:
        nonlocal heard
        if new := tuple(tokens[heard:]):
            heard += len(new)
            listener(place, new)

    return show


def available_engines() -> tuple[str, ...]:
    """Names of the engines whose library is installed."""
    return tuple(name for name, kind in ENGINES.items() if find_spec(kind.library))


def default_engine() -> str:
    """``vllm`` where it is installed, else ``hf``."""
    return "vllm" if "vllm" in available_engines() else "hf"


def require_engine(name: str, python: str | None = None) -> None:
    """UserError if the engine ``name`` cannot be started here, with the remedy; with ``python``, in
    that interpreter's environment.
    """
    if name not in ENGINES:
        raise UserError(f"unknown engine {name!r}; use one of {sorted(ENGINES)}")
    library = ENGINES[name].library
    if python is not None:
        # An engine's own process imports this file, and has no configuration.
        from ctrl_megatron.rollout.interpreter import require_modules

        require_modules(python, library)
        return
    if name not in available_engines():
        raise UserError(
            f"engine {name!r} is not installed here; install the extra that brings "
            f"{library!r}, or use one of {available_engines()}"
        )

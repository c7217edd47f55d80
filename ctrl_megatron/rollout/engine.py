"""The protocol of every rollout engine, and the records that engine and trainer exchange."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ctrl_megatron.engine_kinds import ENGINES
from ctrl_megatron.errors import ServiceLost, UserError
from ctrl_megatron.rollout.counters import Counters
from ctrl_megatron.types import Completion, Lora, SamplingParams, TensorSpec

if TYPE_CHECKING:
    # The server's process imports torch only after it has begun to watch its parent.
    from ctrl_megatron.rollout.weight_chunks import WeightChunk

PauseMode = Literal["abort", "keep"]
"""``abort`` ends running completions with finish reason ``abort``; ``keep`` freezes them: they
continue after ``resume``, with the weights of that time."""

EngineMemory = Literal["weights", "kv_cache"]
"""Device memory that an engine frees for its sleep and takes back, one after the other."""
ENGINE_MEMORY: tuple[EngineMemory, ...] = ("weights", "kv_cache")
INITIAL_VERSION = "initial"
"""Version of the weights of an engine's own directory, which no update has replaced."""
SleepLevel = Literal[1, 2]
"""1 keeps a copy of the weights in host memory; 2 drops them, so that an update must follow."""

TokenListener = Callable[[int, Sequence[int]], None]
"""Called with the tokens of a call's completions as they are drawn: (the completion's number over
all prompts, its next tokens)."""
CompletionListener = Callable[[int, Completion], None]
"""Called with every completion of a call as soon as it is drawn: (its number over all prompts, the
completion)."""


class EngineError(RuntimeError):
    """The engine failed, or its state does not allow the call."""


class EngineDied(EngineError, ServiceLost):
    """The engine's process has ended or no longer answers; launch it again."""


class EngineBroken(EngineError, ServiceLost):
    """A weight update failed half-way; the engine's weights are a mixture, and it refuses to
    generate."""


class EngineWithoutWeights(EngineError, ServiceLost):
    """The engine has no weights to generate with, because it was launched or slept without them;
    update it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePart:
    """One part of an engine whose workers are on several hosts, equally many on each."""

    number: int
    """The part's number among ``of``. Part 0 serves; the others have workers only."""
    of: int
    first: str
    """Address of the host of part 0."""
    group_port: int
    """Port there at which the workers meet."""
    watch_port: int
    """Port there at which the parts notice each other's end."""
    token: str = field(repr=False)
    """By it the parts recognise each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """Everything needed to start one engine."""

    name: str
    """A name of ``ENGINES``."""
    python: str | None = None
    """Interpreter of the engine's process, of another environment; None for this process's."""
    title: str = ""
    """The engine's name in errors; empty for ``name``."""
    host: str = "127.0.0.1"
    """Address of this machine at which the engine is reached."""
    port: int = 0
    """Port at which it listens; 0 takes a free one."""
    devices: tuple[int, ...] = ()
    """The GPUs of the launching process that the engine may use; empty for all."""
    model_path: str
    """HF directory with ``config.json`` and safetensors."""
    dtype: str = "bfloat16"
    """``bfloat16`` or ``float32``: the dtype of the engine's weights and computations."""
    max_model_len: int = 2048
    """Longest prompt plus completion, in tokens."""
    max_num_seqs: int = 64
    """Most sequences decoded together."""
    tensor_parallel_size: int = 1
    part: EnginePart | None = None
    """The part that is started, of an engine on several hosts; None for a whole engine."""
    gpu_memory_utilization: float = 0.9
    """Share of each GPU for weights and KV cache."""
    kv_cache_gib: float | None = None
    """Size of the KV cache on a CPU, in GiB; None means 2."""
    enforce_eager: bool = False
    """Capture no CUDA graphs; has no effect on a CPU."""
    awaits_weights: bool = False
    """An update comes before the first completion, and the server refuses to generate until then.
    ``vllm`` and ``sglang`` then start with random weights instead of reading the directory's."""
    lora: Lora | None = None
    """Adapters beside the directory's weights, which updates replace in place of the weights; zero
    at first. ``sleep`` must keep the weights then."""
    quantised: bool = False
    """Linear layers have weights in 8 bits (``models.fp8``), and updates bring them so."""
    returns_routes: bool = False
    """Completions have the experts that were chosen (``Completion.routes``)."""
    may_sleep: bool = False
    """Whether ``sleep`` will be called; some engines need this when they start."""
    seed: int = 0
    """Seed of draws without a ``SamplingParams.seed``."""
    threads: int | None = None
    """Number of CPU threads; None lets the engine choose."""
    startup_timeout: float = 600.0
    """Seconds after which a start has failed."""
    log_path: str | None = None
    """File for the process's output; None makes one in the temporary directory."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the engine's own constructor (vLLM: ``AsyncEngineArgs``; SGLang:
    ``ServerArgs``)."""

    @property
    def is_serving(self) -> bool:
        """Whether the process generates and takes updates, for itself and for other parts."""
        return self.part is None or self.part.number == 0

    def require_sleep_allowed(self) -> None:
        """ValueError without ``may_sleep``."""
        if not self.may_sleep:
            raise ValueError("the engine was started without may_sleep; set it in EngineSpec")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAddress:
    """The address of an engine. Plain data, which other ranks can receive."""

    name: str
    endpoint: str
    """``http://HOST:PORT``; an address on loopback is reachable from the engine's machine only."""
    home: Hashable
    """The engine's ``host_identity``: process id and log are valid only on that host."""
    token: str = field(repr=False)
    pid: int
    log_path: str


class Engine(Protocol):
    """An engine as the trainer sees it. All methods may be called concurrently."""

    async def generate(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        *,
        finished: CompletionListener | None = None,
    ) -> list[list[Completion]]:
        """Draw ``params.n`` completions per prompt, in the order of the prompts. ``finished`` has
        been called with all of them when it returns.

        Only ``params.stop_token_ids`` and ``params.max_tokens`` end a completion. With
        ``params.seed`` set, each completion draws from a stream of its own, which depends on the
        seed, the prompt's name (``params.rows``) and the number of the completion, and not on the
        engine or the other prompts. Raises ValueError for prompts that do not fit,
        EngineError while anything sleeps or the weights are forgotten, EngineBroken, EngineDied.
        """
        ...

    async def update(
        self, specs: Sequence[TensorSpec], chunks: AsyncIterator[WeightChunk], version: str
    ) -> None:
        """Replace all weights; completions drawn afterwards carry ``version``.

        ``specs`` must be the tensors of the engine's checkpoint without a tied head, in any dtype
        of ``DTYPE_BYTES``: ValueError names every difference and leaves the engine unchanged. The
        engine requests the next chunk only when it has read the previous one, whose memory may be
        reused then. Running completions freeze meanwhile and continue with the new weights; all
        caches are dropped. EngineBroken on a failure after the first chunk.
        """
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop drawing. Requests that arrive during a pause wait for ``resume``."""
        ...

    async def resume(self) -> None:
        """Draw again."""
        ...

    async def sleep(self, level: SleepLevel) -> None:
        """Free all device memory, weights and caches. No completion may be running.

        ValueError without ``EngineSpec.may_sleep``.
        """
        ...

    async def wake(self, tags: Sequence[EngineMemory]) -> None:
        """Take memory back: ``weights`` before an update, ``kv_cache`` before a completion."""
        ...

    async def checksums(self) -> dict[str, str]:
        """HF name -> ``tensor_checksum`` of the weights that the engine computes with."""
        ...

    async def token_log_probs(self, tokens: list[int]) -> list[list[float]]:
        """The log-probs of all ``tokens`` but the first, each behind those before it, at
        temperature 1: one list for each engine, if there are several. There must be room for a
        completion of one token. Raises as ``generate``; NotImplementedError by an engine that
        denoises."""
        ...

    async def health(self) -> None:
        """Return if the engine works; raise what is wrong otherwise."""
        ...

    async def close(self) -> None:
        """Free what this object has: the model of an embedded engine, the connections of a
        client."""
        ...


class CountedEngine(Engine, Protocol):
    """An engine in a process of its own, or several, as the trainer sees them."""

    async def counters(self) -> dict[str, Counters]:
        """The counters of each engine, by its name. An engine answers in every state."""
        ...


class StreamingEngine(Engine, Protocol):
    """An engine that reports the tokens of its completions while it draws them."""

    async def generate(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        listener: TokenListener | None = None,
        *,
        finished: CompletionListener | None = None,
    ) -> list[list[Completion]]:
        """As ``Engine.generate``; ``listener`` has been called with all tokens when it returns."""
        ...


class LocalEnginePart(Protocol):
    """An engine in the process that serves it, or its workers on another host."""

    async def health(self) -> None:
        """Return if it works; raise what is wrong otherwise."""
        ...


class EmbeddedEngine(StreamingEngine, Protocol):
    """An engine in the process that serves it."""

    def mark_weights_missing(self) -> None:
        """Refuse to generate until the next update; called once, after the start."""
        ...

    async def own_counters(self) -> Counters:
        """The counters that an engine of this kind has, beside those of its requests."""
        ...


def new_tokens_callback(listener: TokenListener, place: int) -> Callable[[Sequence[int]], None]:
    """A function for engines that report all tokens of a completion so far: it passes on the new
    ones."""
    heard = 0

    def show(tokens: Sequence[int]) -> None:
        nonlocal heard
        if new := tuple(tokens[heard:]):
            heard += len(new)
            listener(place, new)

    return show


def available_engines(*, denoising: bool | None = None) -> tuple[str, ...]:
    """Names of the engines whose library is installed, all of them or those for masked-diffusion or
    for autoregressive models."""
    return tuple(
        name
        for name, kind in ENGINES.items()
        if denoising in (None, kind.denoises) and find_spec(kind.library)
    )


def default_engine() -> str:
    """The first default that is installed."""
    return next(name for name in available_engines() if ENGINES[name].default)


def require_engine(name: str, python: str | None = None) -> None:
    """UserError with the remedy if the engine ``name`` is not installed here, or in the environment
    of the interpreter ``python``.
    """
    if name not in ENGINES:
        raise UserError(f"unknown engine {name!r}; use one of {sorted(ENGINES)}")
    library = ENGINES[name].library
    if python is not None:
        # An engine's process imports this file, and its environment may lack what config imports.
        from ctrl_megatron.rollout.interpreter import require_modules

        require_modules(python, library)
        return
    if name not in available_engines():
        raise UserError(
            f"engine {name!r} is not installed here; install the extra that brings "
            f"{library!r}, or use one of {available_engines()}"
        )

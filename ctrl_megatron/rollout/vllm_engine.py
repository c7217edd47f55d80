"""vLLM (0.32 or later) behind the ``Engine`` protocol, through its public ``AsyncLLM``."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

from vllm import SamplingParams as VllmSamplingParams
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from ctrl_megatron.background import gather_results
from ctrl_megatron.engine_kinds import BATCHED_TOKENS
from ctrl_megatron.models.fp8 import quantization_config
from ctrl_megatron.parallel import host_memory
from ctrl_megatron.rollout.counters import Counters
from ctrl_megatron.rollout.engine import (
    CompletionListener,
    EngineDied,
    EngineError,
    EngineMemory,
    EngineSpec,
    PauseMode,
    SleepLevel,
    TokenListener,
    new_tokens_callback,
)
from ctrl_megatron.rollout.sampling import check_request, stream_seed
from ctrl_megatron.rollout.vllm_adapters import VllmAdapters, vllm_lora_args
from ctrl_megatron.rollout.vllm_counters import VllmCounters
from ctrl_megatron.rollout.vllm_delta import (
    has_delta_nets,
    register_text_classes,
    text_class_override,
)
from ctrl_megatron.rollout.weight_chunks import VLLM_BACKEND, WeightChunk
from ctrl_megatron.rollout.weight_update import WeightState, read_model_config, updated_tensor_specs
from ctrl_megatron.types import Completion, SamplingParams, TensorSpec, VersionSpan

# A name, not an import: the worker module must first be imported by vLLM's workers.
_EXTENSION = "ctrl_megatron.rollout.vllm_worker.VllmWorkerExtension"
_CPU_KV_CACHE_GIB = 2.0


def engine_args(spec: EngineSpec) -> AsyncEngineArgs:
    """vLLM's arguments for the engine of ``spec``."""
    gib = spec.kv_cache_gib or _CPU_KV_CACHE_GIB
    chosen: dict[str, Any] = {
        "model": spec.model_path,
        "dtype": spec.dtype,
        "load_format": "dummy" if spec.awaits_weights else "auto",
        "max_model_len": spec.max_model_len,
        "max_num_seqs": spec.max_num_seqs,
        "tensor_parallel_size": spec.tensor_parallel_size,
        "gpu_memory_utilization": spec.gpu_memory_utilization,
        "kv_cache_memory_bytes": int(gib * 2**30) if current_platform.is_cpu() else None,
        # Otherwise vLLM compiles on a CPU, which takes minutes and a C++ compiler.
        "enforce_eager": spec.enforce_eager or current_platform.is_cpu(),
        "enable_sleep_mode": spec.may_sleep and current_platform.is_sleep_mode_available(),
        "seed": spec.seed,
        # The engine never sees texts, and generation_config.json must not change draws.
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "weight_transfer_config": WeightTransferConfig(backend=VLLM_BACKEND),
        "worker_extension_cls": _EXTENSION,
        "disable_log_stats": True,
    }
    chosen |= vllm_lora_args(spec.lora)
    chosen["hf_overrides"] = text_class_override(spec.model_path)
    if spec.quantised:
        chosen["hf_overrides"] |= {"quantization_config": quantization_config()}
    if current_platform.is_cpu():
        # vLLM rewinds the request's generator for a prompt in several parts. CPU generators cannot
        # be rewound, so prompts stay whole.
        chosen |= {
            # The smallest block that its attention allows; the default is 128 tokens here. Whole
            # blocks of a prompt are computed once for all completions.
            "block_size": 32,
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(spec.max_model_len, 4096),
        }
        if has_delta_nets(spec.model_path):
            # vLLM caches the states of gated delta nets for chunked prefill only.
            chosen["enable_prefix_caching"] = False
        if spec.extra.get("enable_expert_parallel"):
            raise ValueError(
                "on a CPU vLLM's kernel computes all experts on every rank; remove "
                "actor_rollout_ref.rollout.engine_kwargs.enable_expert_parallel"
            )
    else:
        chosen["max_num_batched_tokens"] = max(BATCHED_TOKENS, spec.max_num_seqs)
    if _in_core(spec):
        chosen["distributed_executor_backend"] = "uni"
    if (part := spec.part) is not None:
        chosen |= {
            **{"nnodes": part.of, "node_rank": part.number, "master_addr": part.first},
            **{"master_port": part.group_port, "distributed_executor_backend": "mp"},
        }
    return AsyncEngineArgs(**{**chosen, **spec.extra})


def _in_core(spec: EngineSpec) -> bool:
    """Whether the model runs in the scheduler's process."""
    return current_platform.is_cpu() and spec.tensor_parallel_size == 1


def vllm_params(
    params: SamplingParams, row: str | int, sample: int, *, heard: bool = False
) -> VllmSamplingParams:
    """vLLM's parameters for one completion."""
    return VllmSamplingParams(
        n=1,
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        seed=None if params.seed is None else stream_seed(params.seed, row, sample),
        stop_token_ids=list(params.stop_token_ids),
        ignore_eos=True,
        logprobs=0 if params.log_probs else None,
        detokenize=False,
        output_kind=RequestOutputKind.CUMULATIVE if heard else RequestOutputKind.FINAL_ONLY,
    )


def _died(error: Exception) -> EngineDied:
    return EngineDied(f"engine vllm (pid {os.getpid()}) died with its core: {error}")


def _engine_config(spec: EngineSpec) -> VllmConfig:
    """vLLM's configuration for ``spec``, in the process that starts its workers."""
    if _in_core(spec):
        # Otherwise vLLM starts a separate process for a CPU worker, and core and worker poll shared
        # memory, which costs the model one of two cores.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if spec.part is not None:
        os.environ["VLLM_HOST_IP"] = spec.host
    if current_platform.is_cpu():
        # Otherwise the sampler compiles small kernels on first use, with a C++ compiler.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        # Weights and activations use large pages that stay with the process.
        host_memory.keep_freed_memory()
    register_text_classes(spec.model_path)
    usage, serves = UsageContext.ENGINE_CONTEXT, spec.is_serving
    config = engine_args(spec).create_engine_config(usage, headless=not serves)
    if current_platform.is_cpu():
        # The platform has just selected spawned processes, each of which would import vLLM again,
        # for ten seconds of a core. This process has computed nothing yet, so forking is safe, as
        # vLLM does elsewhere.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    return config


class VllmWorkers:
    """``LocalEnginePart`` of an engine that another host serves, as vLLM's own headless nodes
    are."""

    def __init__(self, executor: MultiprocExecutor) -> None:
        self._executor = executor

    async def health(self) -> None:
        """EngineDied if a worker has ended."""
        if self._executor.is_failed:
            raise EngineDied(f"a worker of engine vllm (pid {os.getpid()}) on this host has ended")


class VllmEngine:
    """``Engine`` on ``AsyncLLM``; build it inside a running event loop."""

    def __init__(self, spec: EngineSpec, llm: AsyncLLM, counted: VllmCounters) -> None:
        self._spec, self._llm, self._counted = spec, llm, counted
        self._vocab_size: int = read_model_config(spec.model_path)["vocab_size"]
        self._state = WeightState(updated_tensor_specs(spec))
        self._adapters = VllmAdapters(llm, spec.lora) if spec.lora else None
        self._resume_after, self._running = True, 0

    @classmethod
    async def build(cls, spec: EngineSpec) -> VllmEngine:
        """Start vLLM's processes and load the model; returns when it can generate."""
        config = _engine_config(spec)
        counted = VllmCounters()
        llm = AsyncLLM.from_vllm_config(
            config, stat_loggers=[counted.factory], disable_log_stats=True
        )
        engine = cls(spec, llm, counted)
        await engine._llm.collective_rpc("ctrl_prepare")
        await engine._llm.update_weight_version(engine._state.version)
        return engine

    @staticmethod
    async def build_part(spec: EngineSpec) -> VllmWorkers:
        """Start the workers of a part that does not serve; returns when they have met the others
        and loaded the model."""
        return VllmWorkers(MultiprocExecutor(_engine_config(spec)))

    async def generate(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        listener: TokenListener | None = None,
        *,
        finished: CompletionListener | None = None,
    ) -> list[list[Completion]]:
        self._state.require_ready()
        check_request(
            prompts, params, max_model_len=self._spec.max_model_len, vocab_size=self._vocab_size
        )

        async def draw(prompt: list[int], row: str | int, sample: int, place: int) -> Completion:
            own = vllm_params(params, row, sample, heard=listener is not None)
            show = new_tokens_callback(listener, place) if listener else None
            completion = await self._one(prompt, own, show)
            if finished is not None:
                finished(place, completion)
            return completion

        names = params.prompt_names(len(prompts))
        draws = [
            partial(draw, prompt, row, sample, number * params.n + sample)
            for number, (row, prompt) in enumerate(zip(names, prompts, strict=True))
            for sample in range(params.n)
        ]
        try:
            self._running += 1
            done = await gather_results(draws)
        except EngineDeadError as error:
            raise _died(error) from error
        finally:
            self._running -= 1
        self._state.require_not_broken()
        return params.group_by_prompt(done)

    async def _one(
        self,
        prompt: list[int],
        params: VllmSamplingParams,
        show: Callable[[Sequence[int]], None] | None,
    ) -> Completion:
        (output,) = (await self._last_output(prompt, params, show)).outputs
        tokens = tuple(output.token_ids)
        steps: Any = output.logprobs or []
        asked = params.logprobs is not None
        reason = output.finish_reason
        if reason not in ("stop", "length", "abort"):
            raise RuntimeError(f"vLLM ended a completion with finish reason {reason!r}")
        return Completion(
            token_ids=tokens,
            log_probs=tuple(s[t].logprob for s, t in zip(steps, tokens, strict=asked)),
            finish_reason=reason,
            spans=tuple(
                VersionSpan(span.version, span.start, span.end)
                for span in output.weight_versions or ()
            ),
        )

    async def _last_output(
        self,
        prompt: list[int],
        params: VllmSamplingParams,
        show: Callable[[Sequence[int]], None] | None = None,
    ) -> Any:
        """vLLM's last output for one prompt; ``show`` gets the tokens of all."""
        stream = self._llm.generate(
            {"prompt_token_ids": prompt},
            params,
            request_id=uuid.uuid4().hex,
            lora_request=self._adapters and self._adapters.request,
        )
        request = None
        async for request in stream:
            if show is not None:
                show(request.outputs[0].token_ids)
        return request

    async def update(
        self, specs: Sequence[TensorSpec], chunks: AsyncIterator[WeightChunk], version: str
    ) -> None:
        """Frozen completions recompute their KV cache afterwards. Adapters are only replaced while
        no completion runs: each carries the adapter with which it began."""
        if self._adapters and self._running:
            raise EngineError(f"{self._running} calls still draw with the adapters of before")
        try:
            await self._state.replace_weights(self, specs, chunks, version)
        except EngineDeadError as error:
            raise _died(error) from error

    async def begin_update(self) -> None:
        self._resume_after = not await self._llm.is_paused()
        # A step with half-loaded weights kills vLLM's engine core. ``pause_generation`` does the
        # same as this call and sleeps 20 ms.
        await self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
        if not self._adapters:
            await self._llm.start_weight_update()

    async def load_chunk(self, chunk: WeightChunk) -> None:
        """``vllm_worker.ChunkTransfer`` reads the chunk in every worker."""
        if self._adapters:
            await asyncio.to_thread(self._adapters.files.read_chunk, chunk)
        else:
            await self._llm.update_weights(WeightTransferUpdateRequest(update_info=dict(chunk)))

    async def commit_update(self, version: str) -> None:
        if self._adapters:
            await self._adapters.load_version(version)
            await self._llm.update_weight_version(version)
        else:
            await self._llm.finish_weight_update(weight_version=version)
        # Keys and values in it are of the old weights.
        if not await self._llm.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM did not flush its prefix cache")
        if self._resume_after:
            await self._llm.resume_generation()

    async def end_frozen_completions(self) -> None:
        """End the completions that were frozen for an update which has failed half-way. EngineDied
        where vLLM cannot do that: its core still answers for a moment after it has lost a worker.
        """
        try:
            await self._llm.pause_generation(mode="abort", clear_cache=False)
        except Exception as error:
            raise _died(error) from error

    async def pause(self, mode: PauseMode) -> None:
        await self._llm.pause_generation(mode=mode, clear_cache=mode == "abort")

    async def resume(self) -> None:
        self._state.require_not_broken()
        await self._llm.resume_generation()

    async def sleep(self, level: SleepLevel) -> None:
        """On a CPU vLLM only stops scheduling."""
        self._spec.require_sleep_allowed()
        self._state.mark_asleep(level)
        await self._llm.sleep(level=level, mode="keep")

    async def wake(self, tags: Sequence[EngineMemory]) -> None:
        """vLLM schedules again when everything is awake."""
        self._state.mark_awake(tags)
        await self._llm.wake_up(list(tags))

    def mark_weights_missing(self) -> None:
        self._state.mark_weights_missing()

    async def checksums(self) -> dict[str, str]:
        """Checksums of what updates bring, read back from vLLM: of the adapters if there are any,
        else of the layers' weights, un-fused and gathered.

        RuntimeError if vLLM does not have exactly the manifest's tensors.
        """
        self._state.require_weights()
        if self._adapters:
            return self._state.require_same_names(await self._adapters.checksums(), "vLLM")
        parts: list[dict[str, str]] = await self._llm.collective_rpc("ctrl_checksums")
        held = {name: checksum for part in parts for name, checksum in part.items()}
        return self._state.require_same_names(held, "vLLM")

    async def token_log_probs(self, tokens: list[int]) -> list[list[float]]:
        self._state.require_ready()
        params = VllmSamplingParams(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        try:
            found = await self._last_output(tokens, params)
        except EngineDeadError as error:
            raise _died(error) from error
        # The first token has none.
        steps: Any = found.prompt_logprobs[1:]
        return [[s[t].logprob for s, t in zip(steps, tokens[1:], strict=True)]]

    async def health(self) -> None:
        """EngineDied if vLLM's own processes are gone."""
        try:
            await self._llm.check_health()
        except EngineDeadError as error:
            raise _died(error) from error
        self._state.require_not_broken()

    async def own_counters(self) -> Counters:
        return dict(self._counted.counters)

    async def close(self) -> None:
        if self._adapters:
            self._adapters.files.close()
        self._llm.shutdown()

"""SGLang (0.5.23) behind the ``Engine`` protocol, through its public ``Engine``."""

# ruff: noqa: E402
from __future__ import annotations

import asyncio
import json
import os
import random
from base64 import b64decode
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from ctrl_megatron.rollout.sglang_stand_ins import install_stand_ins

install_stand_ins()

from sglang.srt.entrypoints.engine import Engine as BaseEngine
from sglang.srt.managers.io_struct import (
    BeginWeightUpdateReqInput,
    CheckWeightsReqInput,
    ContinueGenerationReqInput,
    EndWeightUpdateReqInput,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightVersionReqInput,
)
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.network import NetworkAddress

from ctrl_megatron.errors import did_you_mean
from ctrl_megatron.models.hf_config import read_shape
from ctrl_megatron.models.shape import Experts, ModelShape
from ctrl_megatron.parallel.parent_watch import process_gone
from ctrl_megatron.rollout.counters import Counters
from ctrl_megatron.rollout.engine import (
    ENGINE_MEMORY,
    INITIAL_VERSION,
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
from ctrl_megatron.rollout.hf_routes import joined_routes
from ctrl_megatron.rollout.sampling import check_request, stream_seed
from ctrl_megatron.rollout.sglang_adapters import SglangAdapters, sglang_lora_args
from ctrl_megatron.rollout.sglang_worker import QUEUED, SAMPLER, run_scheduler
from ctrl_megatron.rollout.weight_chunks import DTYPE_BYTES, WeightChunk
from ctrl_megatron.rollout.weight_update import (
    WeightState,
    checksums,
    read_model_config,
    updated_tensor_specs,
)
from ctrl_megatron.types import (
    Completion,
    ExpertRoutes,
    SamplingParams,
    TensorSpec,
    VersionSpan,
)

_CPU_KV_CACHE_GIB = 2.0
_COUNTED = {
    "prompt_tokens": "prompt_tokens",
    "cached_tokens": "cached_tokens",
    "preemptions": "num_retractions",
}
"""Counters by their names in SGLang's answers."""


def server_args(spec: EngineSpec) -> dict[str, Any]:
    """SGLang's arguments for ``spec``; ValueError for ``spec.extra`` that SGLang does not know."""
    struct: Any = ServerArgs
    known: tuple[str, ...] = struct.__struct_fields__
    for name in spec.extra:
        if name not in known:
            raise ValueError(
                f"engine 'sglang' has no argument {name!r} (engine_kwargs)"
                f"{did_you_mean(name, known)}"
            )
    on_gpu = torch.cuda.is_available()
    chosen: dict[str, Any] = {
        "model_path": spec.model_path,
        "dtype": spec.dtype,
        "load_format": "dummy" if spec.awaits_weights else "auto",
        "context_length": spec.max_model_len,
        "max_running_requests": spec.max_num_seqs,
        "tp_size": spec.tensor_parallel_size,
        "random_seed": spec.seed,
        "disable_cuda_graph": spec.enforce_eager or not on_gpu,
        "sampling_backend": SAMPLER,
        # The engine never sees texts, and generation_config.json must not change draws.
        "skip_tokenizer_init": True,
        "sampling_defaults": "openai",
        "weight_version": INITIAL_VERSION,
        "log_level": "warning",
        # Otherwise its scheduler polls with a whole core while the trainer computes.
        "sleep_on_idle": True,
        "enable_return_routed_experts": spec.returns_routes,
    }
    if on_gpu:
        chosen |= {
            "mem_fraction_static": spec.gpu_memory_utilization,
            "enable_memory_saver": spec.may_sleep,
            "enable_weights_cpu_backup": spec.may_sleep,
        }
    else:
        chosen |= {
            "device": "cpu",
            "attention_backend": "torch_native",
            "max_total_tokens": kv_cache_token_capacity(spec),
            # Overlapping work would compete for the same cores.
            "disable_overlap_schedule": True,
        }
    chosen |= sglang_lora_args(spec.lora, on_gpu=on_gpu)
    if (part := spec.part) is not None:
        chosen |= {
            **{"nnodes": part.of, "node_rank": part.number},
            "dist_init_addr": NetworkAddress(part.first, part.group_port).to_host_port_str(),
        }
    return {**chosen, **spec.extra}


def kv_cache_token_capacity(spec: EngineSpec) -> int:
    """Tokens whose keys and values fit into ``spec.kv_cache_gib``; at least one sequence."""
    config = read_model_config(spec.model_path)
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    kv_heads = config.get("num_key_value_heads") or heads
    per_token = 2 * config["num_hidden_layers"] * kv_heads * width * DTYPE_BYTES[spec.dtype]
    tokens = int((spec.kv_cache_gib or _CPU_KV_CACHE_GIB) * 2**30) // per_token
    return max(tokens, spec.max_model_len)


def sglang_params(params: SamplingParams, seed: int) -> dict[str, Any]:
    """SGLang's parameters for one completion, which draws by ``seed``."""
    return {
        "max_new_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "stop_token_ids": list(params.stop_token_ids),
        "sampling_seed": seed,
    }


class _Engine(BaseEngine):
    """SGLang's processes with our scheduler and without a detokenizer."""

    run_scheduler_process_func = staticmethod(run_scheduler)

    @classmethod
    def _launch_detokenizer_subprocesses(
        cls, server_args: Any, port_args: Any, run_detokenizer_process_func: Any
    ) -> tuple[list[Any], list[str]]:
        return [], []


def completion_from_sglang(answer: dict[str, Any], *, log_probs: bool) -> Completion:
    info = answer["meta_info"]
    tokens = tuple(answer["output_ids"])
    steps: Any = info["output_token_logprobs"] if log_probs else ()
    reason = info["finish_reason"]["type"]
    if reason not in ("stop", "length", "abort"):
        raise RuntimeError(f"SGLang ended a completion with finish reason {info['finish_reason']}")
    spans = info.get("weight_versions") or ()
    return Completion(
        token_ids=tokens,
        log_probs=tuple(step[0] for _, step in zip(tokens, steps, strict=log_probs)),
        finish_reason=reason,
        spans=tuple(VersionSpan(s["version"], s["start"], s["end"]) for s in spans if s["end"]),
    )


def routes_from_sglang(
    packed: Any, shape: ModelShape, spans: Sequence[VersionSpan]
) -> ExpertRoutes | None:
    """The choices in ``routed_experts`` of an answer: int32 (tokens, all layers, top_k), in base64.
    None where several weights, or none, drew the text: SGLang's table has a row for each place in
    the cache, whoever wrote it."""
    if len({span.version for span in spans}) != 1:
        return None
    data = b64decode(packed) if isinstance(packed, str | bytes) else packed.numpy().tobytes()
    values = torch.frombuffer(bytearray(data), dtype=torch.int32)
    layers = [n for n, kind in enumerate(shape.feed_forward) if isinstance(kind, Experts)]
    chosen = values.view(-1, shape.num_layers, shape.expert_choices[1])[:, layers]
    return joined_routes([chosen.to(torch.int16)], spans[0].version)


def _require(answer: tuple[Any, ...], what: str) -> Any:
    """``answer``; RuntimeError for a failure, which SGLang reports as (False, message)."""
    if not answer[0]:
        raise RuntimeError(f"SGLang did not {what}: {answer[1]}")
    return answer


def _start(spec: EngineSpec) -> _Engine:
    """SGLang's processes for ``spec``, which have loaded the model and met those of other parts."""
    # On a CPU SGLang requires cores for each tensor rank, although nothing is bound to them
    # without its own kernels.
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join("0" * spec.tensor_parallel_size)
    if spec.part is not None:
        # Schedulers of other hosts connect to it.
        os.environ["SGLANG_HOST_IP"] = spec.host
        # Otherwise the constructor of a part that does not serve never returns.
        os.environ["SGLANG_BLOCK_NONZERO_RANK_CHILDREN"] = "0"
    return _Engine(**server_args(spec))


def _require_processes(engine: _Engine) -> None:
    """EngineDied if one of SGLang's own processes on this host is gone."""
    if gone := [pid for pid in engine.get_all_child_pids() if process_gone(pid)]:
        raise EngineDied(
            f"engine sglang (pid {os.getpid()}) died with its scheduler (pid {gone[0]})"
        )


class SglangWorkers:
    """``LocalEnginePart`` of an engine that another host serves: schedulers without a server."""

    def __init__(self, engine: _Engine) -> None:
        self._engine = engine

    async def health(self) -> None:
        """EngineDied if a scheduler has ended."""
        _require_processes(self._engine)


class SglangEngine:
    """``Engine`` on SGLang's own; requires a running event loop of the main thread."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._vocab_size: int = read_model_config(spec.model_path)["vocab_size"]
        self._state = WeightState(updated_tensor_specs(spec))
        self._engine = _start(spec)
        self._control: Any = self._engine.tokenizer_manager
        self._adapters = SglangAdapters(self._control, spec, spec.lora) if spec.lora else None
        self._running = 0
        # ``health`` reports a dead child.
        self._control._subprocess_watchdog.stop()
        self._control.auto_create_handle_loop()
        self._one_rpc = asyncio.Lock()
        self._counted: Counters = dict.fromkeys(_COUNTED, 0.0)
        self._unseeded = random.Random(spec.seed)
        shape = read_shape(spec.model_path, "megatron") if spec.returns_routes else None
        self._shape = shape if isinstance(shape, ModelShape) else None
        self._paused = self._resume_after = False

    @classmethod
    async def build(cls, spec: EngineSpec) -> SglangEngine:
        """Start SGLang's processes and load the model; returns when it can generate."""
        engine = cls(spec)
        await engine._rpc("ctrl_spare_garbage")
        return engine

    @staticmethod
    async def build_part(spec: EngineSpec) -> SglangWorkers:
        """Start the schedulers of a part that does not serve; returns when they have met the others
        and loaded the model."""
        return SglangWorkers(_start(spec))

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
        self._running += 1
        try:
            return await self._draw(prompts, params, listener, finished)
        finally:
            self._running -= 1

    async def _draw(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        listener: TokenListener | None,
        finished: CompletionListener | None,
    ) -> list[list[Completion]]:
        base = self._unseeded.getrandbits(63) if params.seed is None else params.seed
        asked = [
            (prompt, sglang_params(params, stream_seed(base, row, sample)))
            for row, prompt in zip(params.prompt_names(len(prompts)), prompts, strict=True)
            for sample in range(params.n)
        ]
        if not asked:
            return []
        if params.n > 1 and not await self._fill_cache(prompts):
            ended = Completion(token_ids=(), log_probs=(), finish_reason="abort", spans=())
            if finished is not None:
                for place in range(len(asked)):
                    finished(place, ended)
            return [[ended] * params.n for _ in prompts]
        listened = listener is not None or finished is not None
        # One request for all: SGLang then computes the same batches whenever it is asked the same.
        answers: Any = await self._engine.async_generate(
            input_ids=[prompt for prompt, _ in asked],
            sampling_params=[
                # Where nobody hears tokens, a completion is told once, when it ends.
                own if listener else {**own, "stream_interval": params.max_tokens}
                for _, own in asked
            ],
            return_logprob=params.log_probs,
            return_routed_experts=self._spec.returns_routes,
            stream=listened,
            **self._adapter_of(len(asked)),
        )
        done: dict[int, Completion] = {}
        shows = [
            new_tokens_callback(listener, place) if listener else None
            for place in range(len(asked))
        ]

        def take(place: int, answer: dict[str, Any]) -> None:
            if (show := shows[place]) is not None:
                show(answer["output_ids"])
            if answer["meta_info"]["finish_reason"] is not None:
                done[place] = self._completion(answer, params)
                self._count(answer["meta_info"])
                if finished is not None:
                    finished(place, done[place])

        if listened:
            async for answer in answers:
                take(answer["index"], answer)
        else:
            for place, answer in enumerate(answers):
                take(place, answer)
        self._state.require_not_broken()
        every = [done[place] for place in range(len(asked))]
        return params.group_by_prompt(every)

    def _completion(self, answer: dict[str, Any], params: SamplingParams) -> Completion:
        done = completion_from_sglang(answer, log_probs=params.log_probs)
        packed = answer["meta_info"].get("routed_experts")
        if self._shape is None or packed is None:
            return done
        return replace(done, routes=routes_from_sglang(packed, self._shape, done.spans))

    async def _fill_cache(self, prompts: list[list[int]]) -> bool:
        """Compute each prompt once, for all its completions: completions that begin together would
        each compute their prompt. False if a pause has ended the requests.
        """
        nothing = {"max_new_tokens": 0, "sampling_seed": 0}
        answers: Any = await self._engine.async_generate(
            input_ids=prompts,
            sampling_params=[nothing] * len(prompts),
            **self._adapter_of(len(prompts)),
        )
        # The completions will report these tokens as cached, but here they were computed for them.
        infos = [answer["meta_info"] for answer in answers]
        self._counted["cached_tokens"] -= sum(
            i["prompt_tokens"] - i["cached_tokens"] for i in infos
        )
        return all(info["finish_reason"]["type"] != "abort" for info in infos)

    def _adapter_of(self, requests: int | None = None) -> dict[str, Any]:
        """The argument of a call by which its ``requests``, or its only one, use the adapters."""
        name = self._adapters and self._adapters.name
        return {"lora_path": name if requests is None else [name] * requests} if name else {}

    def _count(self, info: dict[str, Any]) -> None:
        for name, own in _COUNTED.items():
            self._counted[name] += info[own]

    async def own_counters(self) -> Counters:
        """``waiting`` is as old as the scheduler's last report; ``queued_seconds`` is there after
        the scheduler's next pass.
        """
        loads = self._control.load_snapshot_reader.read_all()
        queued = (await self._control.get_internal_state())[0][QUEUED]
        waiting = sum(load.num_waiting_reqs for load in loads)
        return {**self._counted, "queued_seconds": queued, "waiting": waiting}

    async def update(
        self, specs: Sequence[TensorSpec], chunks: AsyncIterator[WeightChunk], version: str
    ) -> None:
        """Frozen completions recompute their KV cache afterwards. Adapters are only replaced while
        no completion runs: each carries the adapter with which it began."""
        if self._adapters and self._running:
            raise EngineError(f"{self._running} calls still draw with the adapters of before")
        await self._state.replace_weights(self, specs, chunks, version)

    async def begin_update(self) -> None:
        if self._adapters:
            return
        self._resume_after = not self._paused
        await self.pause("keep")
        opened = await self._control.begin_weight_update(BeginWeightUpdateReqInput())
        _require(opened, "begin a weight update")

    async def load_chunk(self, chunk: WeightChunk) -> None:
        """``sglang_worker.load_chunk`` reads the chunk in every scheduler."""
        if self._adapters:
            await asyncio.to_thread(self._adapters.files.read_chunk, chunk)
            return
        await self._rpc("ctrl_load_chunk", chunk=json.dumps(chunk))

    async def commit_update(self, version: str) -> None:
        if self._adapters:
            await self._adapters.load_version(version)
        else:
            await self._end_weight_update()
        named = UpdateWeightVersionReqInput(new_version=version, abort_all_requests=False)
        await self._control.update_weight_version(named)
        if self._resume_after:
            await self.resume()

    async def _end_weight_update(self) -> None:
        ended = await self._control.end_weight_update(EndWeightUpdateReqInput())
        _require(ended, "end the weight update")
        # Keys and values in it are of the old weights.
        flushed = await self._control.flush_cache()
        _require((flushed.success, flushed.message), "flush its prefix cache")

    async def end_frozen_completions(self) -> None:
        # Frozen requests end after they resume; the tokens that they draw from the mixture are
        # dropped.
        await self._go_on()
        await self.pause("abort")

    async def pause(self, mode: PauseMode) -> None:
        """Frozen completions lose their part of the cache; ``resume`` recomputes it."""
        self._paused = True
        own = "retract" if mode == "keep" else "abort"
        await self._control.pause_generation(PauseGenerationReqInput(mode=own))

    async def resume(self) -> None:
        self._state.require_not_broken()
        await self._go_on()

    async def _go_on(self) -> None:
        self._paused = False
        await self._control.continue_generation(
            ContinueGenerationReqInput(torch_empty_cache=torch.cuda.is_available())
        )

    async def sleep(self, level: SleepLevel) -> None:
        """On a CPU this frees the cache's memory, and at level 2 the weights'."""
        self._spec.require_sleep_allowed()
        self._state.mark_asleep(level)
        await self.pause("keep")
        tags = ReleaseMemoryOccupationReqInput(tags=list(ENGINE_MEMORY))
        await self._control.release_memory_occupation(tags)
        if not torch.cuda.is_available():
            await self._rpc("ctrl_leave", forget_weights=level == 2)

    async def wake(self, tags: Sequence[EngineMemory]) -> None:
        """SGLang schedules again when everything is awake."""
        all_awake = self._state.mark_awake(tags)
        if not torch.cuda.is_available():
            for tag in tags:
                await self._rpc("ctrl_come_back", tag=tag)
        await self._control.resume_memory_occupation(
            ResumeMemoryOccupationReqInput(tags=list(tags))
        )
        if all_awake:
            await self.resume()

    def mark_weights_missing(self) -> None:
        self._state.mark_weights_missing()

    async def checksums(self) -> dict[str, str]:
        """Checksums of the weights read back from SGLang's layers, un-fused and gathered; of the
        adapters, if there are any, once the schedulers have compared theirs with what was pushed.

        RuntimeError if SGLang does not have exactly the manifest's tensors.
        """
        self._state.require_weights()
        if self._adapters:
            file = self._adapters.files.newest / "adapter_model.safetensors"
            await self._rpc("ctrl_check_adapters", file=str(file))
            held = await asyncio.to_thread(checksums, self._adapters.files.held.items())
            return self._state.require_same_names(held, "SGLang")
        answer = await self._control.check_weights(CheckWeightsReqInput(action="checksum"))
        ranks = _require(answer, "compute checksums")[2]
        held = {name: value for rank in ranks for name, value in rank["checksums"].items()}
        return self._state.require_same_names(held, "SGLang")

    async def token_log_probs(self, tokens: list[int]) -> list[list[float]]:
        self._state.require_ready()
        answer: Any = await self._engine.async_generate(
            input_ids=tokens,
            sampling_params={"max_new_tokens": 1, "temperature": 0.0, "sampling_seed": 0},
            return_logprob=True,
            logprob_start_len=0,
            **self._adapter_of(),
        )
        # The first token has none.
        return [[step[0] for step in answer["meta_info"]["input_token_logprobs"][1:]]]

    async def health(self) -> None:
        """EngineDied if one of SGLang's own processes is gone."""
        _require_processes(self._engine)
        self._state.require_not_broken()

    async def close(self) -> None:
        if self._adapters:
            self._adapters.files.close()
        self._engine.shutdown()

    async def _rpc(self, method: str, **scalars: Any) -> None:
        """Call a scheduler's method on all tensor ranks; RuntimeError with what it raised."""
        async with self._one_rpc:
            try:
                await asyncio.to_thread(self._engine.collective_rpc, method, **scalars)
            except AssertionError as error:
                # SGLang reports failures of remote calls this way.
                raise RuntimeError(f"SGLang's {method}: {error}") from error

"""The engine ``hf``: a transformers model that decodes in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from ctrl_megatron.background import AbandonableCall
from ctrl_megatron.models.offload import OffloadedTensors
from ctrl_megatron.rollout.counters import Counters
from ctrl_megatron.rollout.decoding import (
    CancelToken,
    DecodingBatch,
    DecodingRow,
    PauseControl,
    StepwiseBatch,
    decode_all,
    score_tokens,
)
from ctrl_megatron.rollout.engine import (
    CompletionListener,
    EngineDied,
    EngineMemory,
    EngineSpec,
    PauseMode,
    SleepLevel,
    TokenListener,
)
from ctrl_megatron.rollout.hf_adapters import add_peft_adapters
from ctrl_megatron.rollout.hf_routes import RouteRecorder
from ctrl_megatron.rollout.hf_weights import QuantisedWeights, weight_views_by_name
from ctrl_megatron.rollout.sampling import check_request, stream_seed
from ctrl_megatron.rollout.transports import read_chunk, wait_until_copied
from ctrl_megatron.rollout.weight_chunks import WeightChunk
from ctrl_megatron.rollout.weight_update import (
    WeightState,
    checkpoint_specs,
    checksums,
    read_model_config,
    updated_tensor_specs,
)
from ctrl_megatron.types import Completion, SamplingParams, TensorSpec

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model of transformers and how it generates."""

    model: Any
    views: Callable[[Sequence[TensorSpec]], dict[str, torch.Tensor]]
    """From the tensors of the model's directory to their places in ``model``, by name."""
    batch: Callable[[Sequence[DecodingRow], SamplingParams], StepwiseBatch]
    score: Callable[[Sequence[int]], list[float]] | None = None
    """The log-probs of all tokens but the first; None for a model that does not order them."""


def load_autoregressive(spec: EngineSpec) -> LoadedModel:
    """The model of the directory, token by token."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        spec.model_path,
        dtype=getattr(torch, spec.dtype),
        trust_remote_code=False,
        use_safetensors=True,
        **spec.extra,
    )
    model = model.eval().to(DEVICE)
    recorder = RouteRecorder(model) if spec.returns_routes else None
    return LoadedModel(
        model=model,
        views=partial(weight_views_by_name, model),
        batch=partial(DecodingBatch, model, recorder=recorder),
        score=partial(score_tokens, model, recorder),
    )


class HfEngine:
    """``Engine`` on transformers; calls of ``generate`` run one after another, each in batches."""

    def __init__(
        self, spec: EngineSpec, load: Callable[[EngineSpec], LoadedModel] = load_autoregressive
    ) -> None:
        if spec.tensor_parallel_size != 1:
            raise ValueError(
                f"engine {spec.name!r} runs on one device; tensor_parallel_size="
                f"{spec.tensor_parallel_size} needs engine 'vllm' or 'sglang'"
            )
        if spec.threads:
            torch.set_num_threads(spec.threads)
        self._spec = spec
        self._vocab_size: int = read_model_config(spec.model_path)["vocab_size"]
        self._state = WeightState(updated_tensor_specs(spec))
        loaded = load(spec)
        self._model: Any = loaded.model
        self._batch: Any = loaded.batch
        self._score: Any = loaded.score
        if spec.may_sleep:
            for weight in self._model.parameters():
                # The memory of a mapped file cannot be freed.
                weight.data = weight.data.clone()
        self._quantised: QuantisedWeights | None = None
        if spec.quantised:
            views = loaded.views(checkpoint_specs(spec.model_path, spec.dtype))
            self._quantised = QuantisedWeights(views, self._state.manifest)
            self._weights = self._quantised.held
        elif spec.lora is None:
            self._weights = loaded.views(self._state.manifest)
        else:
            dtype = getattr(torch, spec.dtype)
            self._weights = {
                tensor.name: torch.zeros(tensor.shape, dtype=dtype, device=DEVICE)
                for tensor in self._state.manifest
            }
            views = loaded.views(checkpoint_specs(spec.model_path, spec.dtype))
            add_peft_adapters(self._model, views, self._weights, spec.lora)
        self._control, self._one_call = PauseControl(), asyncio.Lock()
        self._resume_after = True
        self._sleeping: OffloadedTensors | None = None
        self._calls = 0
        self._decoding: AbandonableCall[None] | None = None
        self._broken = ""
        """Why nothing can be decoded any more; empty while it can."""

    @classmethod
    async def build(cls, spec: EngineSpec) -> HfEngine:
        return cls(spec)

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
        rows = self._rows(prompts, params, listener, finished)
        # Before the wait for earlier calls: an abort ends the calls that wait as well.
        token = self._control.begin_work()
        async with self._one_call:
            # It may have fallen asleep while this call waited.
            self._state.require_ready()
            await self._decode(rows, params, token)
        self._state.require_not_broken()
        done = [row.completion() for row in rows]
        return params.group_by_prompt(done)

    async def _decode(
        self, rows: list[DecodingRow], params: SamplingParams, token: CancelToken
    ) -> None:
        work = partial(
            decode_all,
            self._batch,
            rows,
            params,
            max_rows=self._spec.max_num_seqs,
            control=self._control,
            token=token,
            version=lambda: self._state.version,
        )
        self._decoding = AbandonableCall(work, "decoding")
        done = asyncio.wrap_future(self._decoding.future)
        try:
            await asyncio.shield(done)
        except asyncio.CancelledError:
            # The caller is gone. A thread cannot be cancelled, so it gets a signal to end.
            self._control.cancel(token)
            await done
            raise
        except Exception as error:
            # The requests were checked before, so the engine is at fault: out of memory, most
            # often. Its weights or its device may be in any state.
            self._broken = f"decoding failed: {type(error).__name__}: {error}"
            raise EngineDied(self._broken) from error

    def _rows(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        listener: TokenListener | None,
        finished: CompletionListener | None,
    ) -> list[DecodingRow]:
        self._calls += 1
        own = stream_seed(self._spec.seed, self._calls, 0)
        base = own if params.seed is None else params.seed
        return [
            DecodingRow(
                prompt,
                torch.Generator().manual_seed(stream_seed(base, row, j)),
                show=_passed_on(listener, number * params.n + j),
                ended=_passed_on(finished, number * params.n + j),
            )
            for number, (row, prompt) in enumerate(
                zip(params.prompt_names(len(prompts)), prompts, strict=True)
            )
            for j in range(params.n)
        ]

    async def update(
        self, specs: Sequence[TensorSpec], chunks: AsyncIterator[WeightChunk], version: str
    ) -> None:
        """The KV cache of frozen rows is rebuilt from the new weights."""
        await self._state.replace_weights(self, specs, chunks, version)

    async def begin_update(self) -> None:
        self._resume_after = not self._control.is_paused
        await self.pause("keep")

    async def load_chunk(self, chunk: WeightChunk) -> None:
        await asyncio.to_thread(self._copy, chunk)

    @torch.no_grad()
    def _copy(self, chunk: WeightChunk) -> None:
        for name, tensor in read_chunk(chunk):
            self._weights[name].copy_(tensor)
        if self._quantised is not None:
            self._quantised.dequantise_into_model(tensor["name"] for tensor in chunk["tensors"])
        wait_until_copied(torch.device(DEVICE))

    async def commit_update(self, version: str) -> None:
        self._state.version = version
        if self._resume_after:
            self._control.resume()

    async def end_frozen_completions(self) -> None:
        await self.pause("abort")
        self._control.resume()

    async def pause(self, mode: PauseMode) -> None:
        await asyncio.to_thread(self._control.pause, abort=mode == "abort")

    async def resume(self) -> None:
        self._control.resume()

    async def sleep(self, level: SleepLevel) -> None:
        """Needs no care for the KV cache, which exists only while a batch is decoded."""
        self._spec.require_sleep_allowed()
        # A call that was cancelled may still be in its last step.
        async with self._one_call:
            self._state.mark_asleep(level)
            self._sleeping = OffloadedTensors(self._model.parameters, keep=level == 1)
            await asyncio.to_thread(self._sleeping.offload)
        torch.cuda.empty_cache()

    async def wake(self, tags: Sequence[EngineMemory]) -> None:
        self._state.mark_awake(tags)
        if "weights" in tags:
            assert self._sleeping is not None
            await asyncio.to_thread(self._sleeping.onload)
            self._sleeping = None

    def mark_weights_missing(self) -> None:
        self._state.mark_weights_missing()

    async def checksums(self) -> dict[str, str]:
        self._state.require_weights()
        held = [(spec.name, self._weights[spec.name]) for spec in self._state.manifest]
        return await asyncio.to_thread(checksums, held)

    async def token_log_probs(self, tokens: list[int]) -> list[list[float]]:
        """Between two steps of the completions that run."""
        if self._score is None:
            raise NotImplementedError(f"engine {self._spec.name!r} orders no tokens")
        self._state.require_ready()
        resume_after = not self._control.is_paused
        await self.pause("keep")
        try:
            return [await asyncio.to_thread(self._score, tokens)]
        finally:
            if resume_after:
                self._control.resume()

    async def health(self) -> None:
        call = self._decoding
        if call is not None and not call.alive() and not call.future.done():
            self._broken = "its decoding thread ended without a result"
        if self._broken:
            raise EngineDied(self._broken)
        self._state.require_not_broken()

    async def own_counters(self) -> Counters:
        """Nothing: it keeps no keys between calls and preempts no completion."""
        return {}

    async def close(self) -> None:
        """End all completions and free the model."""
        await self.pause("abort")
        self._weights = {}
        self._model = self._batch = self._score = None


def _passed_on(
    listener: Callable[[int, Any], None] | None, place: int
) -> Callable[[Any], object] | None:
    """A function for the decoding thread that calls ``listener`` with ``place`` and its argument on
    this event loop.
    """
    if listener is None:
        return None
    loop = asyncio.get_running_loop()
    return lambda value: loop.call_soon_threadsafe(listener, place, value)

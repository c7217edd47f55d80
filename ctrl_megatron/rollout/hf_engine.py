"""The embedded default engine: a transformers model that decodes in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import torch

from ctrl_megatron.rollout.decoding import Row, decode_all
from ctrl_megatron.rollout.digest import digest_all
from ctrl_megatron.rollout.engine import Chunk, EngineSpec, PauseMode
from ctrl_megatron.rollout.gate import Gate, Ticket
from ctrl_megatron.rollout.manifest import read_manifest, read_model_config
from ctrl_megatron.rollout.requests import check_request, stream_seed
from ctrl_megatron.rollout.segment import open_chunk
from ctrl_megatron.rollout.update import WeightState
from ctrl_megatron.types import Completion, SamplingParams, TensorSpec

_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def load_model(spec: EngineSpec) -> Any:
    """The transformers model of ``spec`` on ``_DEVICE``."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        spec.model_path, dtype=getattr(torch, spec.dtype), **spec.extra
    )
    return model.eval().to(_DEVICE)


class HfEngine:
    """``Engine`` on transformers. Calls of ``generate`` take turns; each is decoded in batches."""

    def __init__(self, spec: EngineSpec) -> None:
        if spec.tensor_parallel_size != 1:
            raise ValueError(
                f"engine 'hf' runs on one device; tensor_parallel_size={spec.tensor_parallel_size} "
                "needs engine 'vllm'"
            )
        if spec.threads:
            torch.set_num_threads(spec.threads)
        self._spec = spec
        self._vocab_size: int = read_model_config(spec.model_path)["vocab_size"]
        self._state = WeightState(read_manifest(spec.model_path, spec.dtype), spec.initial_version)
        self._model: Any = load_model(spec)
        self._weights = dict(self._model.named_parameters())
        strange = [s.name for s in self._state.manifest if s.name not in self._weights]
        if strange:
            raise ValueError(
                f"engine 'hf' cannot update {spec.model_path}: transformers renames {strange[:5]}"
            )
        self._gate, self._turn = Gate(), asyncio.Lock()
        self._reopen = True
        self._calls = 0

    async def generate(
        self, prompts: list[list[int]], params: SamplingParams
    ) -> list[list[Completion]]:
        """See ``Engine.generate``."""
        self._state.require_whole()
        check_request(
            prompts, params, max_model_len=self._spec.max_model_len, vocab_size=self._vocab_size
        )
        rows, ticket = self._rows(prompts, params), self._gate.ticket()
        async with self._turn:
            await self._decode(rows, params, ticket)
        self._state.require_whole()
        done = [row.completion() for row in rows]
        return [done[i : i + params.n] for i in range(0, len(done), params.n)]

    async def _decode(self, rows: list[Row], params: SamplingParams, ticket: Ticket) -> None:
        thread = asyncio.create_task(
            asyncio.to_thread(
                decode_all,
                self._model,
                rows,
                params,
                max_rows=self._spec.max_num_seqs,
                gate=self._gate,
                ticket=ticket,
                version=lambda: self._state.version,
            )
        )
        try:
            await asyncio.shield(thread)
        except asyncio.CancelledError:
            # The caller is gone. A thread cannot be cancelled, so it is told, and waited for.
            self._gate.revoke(ticket)
            await thread
            raise

    def _rows(self, prompts: list[list[int]], params: SamplingParams) -> list[Row]:
        self._calls += 1
        base = params.seed
        if base is None:
            base = stream_seed(self._spec.seed, self._calls, 0)
        return [
            Row(
                prompt=prompt,
                stream=torch.Generator().manual_seed(stream_seed(base, i, j)),
            )
            for i, prompt in enumerate(prompts)
            for j in range(params.n)
        ]

    async def manifest(self) -> tuple[TensorSpec, ...]:
        """See ``Engine.manifest``."""
        return self._state.manifest

    async def update(
        self, specs: Sequence[TensorSpec], chunks: AsyncIterator[Chunk], version: str
    ) -> None:
        """See ``Engine.update``. The KV cache of frozen rows is rebuilt from the new weights."""
        await self._state.replace(
            specs,
            chunks,
            version,
            begin=self._begin,
            read=self._read,
            commit=self._commit,
            fail=self._fail,
        )

    async def _begin(self) -> None:
        self._reopen = self._gate.is_open
        await asyncio.to_thread(self._gate.close, abort=False)

    async def _read(self, chunk: Chunk) -> None:
        await asyncio.to_thread(self._copy, chunk)

    async def _commit(self, version: str) -> None:
        self._state.version = version
        if self._reopen:
            self._gate.open()

    async def _fail(self) -> None:
        await self.pause("abort")
        self._gate.open()

    @torch.no_grad()
    def _copy(self, chunk: Chunk) -> None:
        for name, tensor in open_chunk(chunk):
            self._weights[name].copy_(tensor)

    async def pause(self, mode: PauseMode) -> None:
        """See ``Engine.pause``."""
        await asyncio.to_thread(self._gate.close, abort=mode == "abort")

    async def resume(self) -> None:
        """See ``Engine.resume``."""
        self._gate.open()

    async def connect(self, group: dict[str, Any]) -> None:
        """See ``Engine.connect``."""
        raise NotImplementedError("engine 'hf' takes weights through shared memory only")

    async def sleep(self, tags: Sequence[str]) -> None:
        """Weights go to host memory; the KV cache lives only while a batch is decoded."""
        if "weights" in tags:
            await asyncio.to_thread(self._model.to, "cpu")
            torch.cuda.empty_cache()

    async def wake(self, tags: Sequence[str]) -> None:
        """Bring the weights back."""
        if "weights" in tags:
            await asyncio.to_thread(self._model.to, _DEVICE)

    async def checksums(self) -> dict[str, str]:
        """Digests of the live parameters."""
        held = [(spec.name, self._weights[spec.name]) for spec in self._state.manifest]
        return await asyncio.to_thread(digest_all, held)

    async def version(self) -> str:
        """See ``Engine.version``."""
        return self._state.version

    async def health(self) -> None:
        """See ``Engine.health``."""
        self._state.require_whole()

    async def close(self) -> None:
        """End what runs and free the model."""
        await self.pause("abort")
        self._weights = {}
        self._model = None

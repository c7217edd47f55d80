"""The course of a weight update, the same for every engine: check, read chunk by chunk, commit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from ctrl_megatron.rollout.engine import Chunk, EngineBroken, EngineError
from ctrl_megatron.rollout.manifest import Coverage, check_specs
from ctrl_megatron.types import TensorSpec


class WeightState:
    """What an engine knows about its weights: manifest, version, and whether they are whole."""

    def __init__(self, manifest: Sequence[TensorSpec], version: str) -> None:
        self.manifest = tuple(manifest)
        self.version = version
        self._broken = ""
        self._turn = asyncio.Lock()

    def require_whole(self) -> None:
        """EngineBroken after an update that failed half-way."""
        if self._broken:
            raise EngineBroken(self._broken)

    async def replace(
        self,
        specs: Sequence[TensorSpec],
        chunks: AsyncIterator[Chunk],
        version: str,
        *,
        begin: Callable[[], Awaitable[None]],
        read: Callable[[Chunk], Awaitable[None]],
        commit: Callable[[str], Awaitable[None]],
        fail: Callable[[], Awaitable[None]],
    ) -> None:
        """Run one update with the engine's own steps.

        ``read`` returns when the chunk's memory is no longer needed; only then is the next chunk
        pulled. ``begin`` is called once the first chunk is there, so a producer that fails before
        leaves the engine whole. ``fail`` ends frozen completions after a failure.
        """
        async with self._turn:
            self.require_whole()
            check_specs(self.manifest, specs)
            coverage, touched = Coverage(specs), False
            try:
                async for chunk in chunks:
                    coverage.take(chunk)
                    if not touched:
                        touched = True
                        await begin()
                    await read(chunk)
                coverage.finish()
                await commit(version)
            except BaseException as error:
                if touched:
                    self._broken = (
                        f"weight update {version!r} failed half-way "
                        f"({type(error).__name__}: {error}); the weights are a mixture: launch the "
                        "engine again"
                    )
                    await fail()
                if isinstance(error, Exception):
                    reason = self._broken or f"weight update {version!r} did not start: {error}"
                    raise (EngineBroken if touched else EngineError)(reason) from error
                raise
            self.version = version

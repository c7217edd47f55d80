"""Puts weights into live engines: fills buckets, hands them over, compares checksums."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass

from ctrl_megatron.parallel.background import BackgroundLoop
from ctrl_megatron.parallel.groups import Groups
from ctrl_megatron.resharding.plan import spec_bytes
from ctrl_megatron.resharding.shared_memory import Segment, segments, stream
from ctrl_megatron.resharding.sources import WeightSource, view
from ctrl_megatron.rollout.digest import tensor_digest
from ctrl_megatron.rollout.engine import Chunk, Engine, Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """What one push moved."""

    version: str
    num_bytes: int
    seconds: float
    verified: bool

    @property
    def gigabytes_per_second(self) -> float:
        """10**9 bytes per second, checksums included where they were compared."""
        return self.num_bytes / self.seconds / 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLink:
    """The way to a host's engine, held by the first rank there."""

    engine: Engine
    loop: BackgroundLoop


def push(
    source: WeightSource,
    link: EngineLink | None,
    groups: Groups,
    *,
    version: str,
    verify: bool = False,
) -> SyncReport:
    """Load the source's weights into all engines under the name ``version``. Collective.

    ``link`` is given on the first rank of every host that has an engine. While engines read one
    bucket, all ranks fill the other. With ``verify`` an engine's checksums must equal those of what
    lay in its host's buckets: RuntimeError names the first tensors that differ.
    """
    # Nobody may still be generating when the engine's weights begin to change.
    groups.barrier()
    start = time.monotonic()
    handover = _Handover(source, link, version) if link else None
    digests: dict[str, str] = {}
    with segments(source.slices, groups) as pair:
        wait = handover.wait_until_released if handover else lambda bucket: None
        for bucket, segment in stream(source, pair, groups, wait):
            if handover:
                if verify:
                    digests |= _digests(source, bucket, segment)
                handover.give(bucket, segment)
        if handover:
            handover.finish()
        groups.barrier()
    if link and verify:
        _compare(digests, link.loop.run(link.engine.checksums()), version)
    return SyncReport(
        version=version,
        num_bytes=sum(spec_bytes(s.spec) for s in source.slices),
        seconds=time.monotonic() - start,
        verified=verify,
    )


def _digests(source: WeightSource, bucket: int, segment: Segment) -> dict[str, str]:
    inside = [s for s in source.slices if s.bucket == bucket]
    return {s.spec.name: tensor_digest(view(segment.memory, s)) for s in inside}


def _compare(sent: dict[str, str], held: dict[str, str], version: str) -> None:
    wrong = [name for name, digest in sent.items() if held.get(name) != digest]
    if wrong:
        raise RuntimeError(
            f"after the update to {version} the engine holds other bytes than were sent for "
            f"{len(wrong)} of {len(sent)} tensors: {wrong[:5]}"
        )


class _Handover:
    """Between the thread that fills buckets and the engine's coroutine that asks for them.

    The engine asks for the next chunk only when it has read the one before, so the number of
    times it has asked says which segments may be filled again.
    """

    def __init__(self, source: WeightSource, link: EngineLink, version: str) -> None:
        self._source, self._loop = source, link.loop.loop
        self._asked, self._changed = 0, threading.Condition()
        self._queue: asyncio.Queue[Chunk | None] = asyncio.Queue()
        specs = [s.spec for s in source.slices]
        self._update: Future[None] = link.loop.submit(link.engine.update(specs, self, version))
        self._update.add_done_callback(self._wake)

    def __aiter__(self) -> _Handover:
        return self

    async def __anext__(self) -> Chunk:
        with self._changed:
            self._asked += 1
            self._changed.notify_all()
        chunk = await self._queue.get()
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    def _wake(self, _: Future[None]) -> None:
        with self._changed:
            self._changed.notify_all()

    def give(self, bucket: int, segment: Segment) -> None:
        """Offer a filled bucket."""
        slots = tuple(
            Slot(spec=s.spec, offset=s.offset) for s in self._source.slices if s.bucket == bucket
        )
        chunk = Chunk(segment=segment.name, slots=slots)
        self._loop.call_soon_threadsafe(self._queue.put_nowait, chunk)

    def wait_until_released(self, bucket: int) -> None:
        """Block until the engine has read ``bucket``; raises what made its update fail."""
        with self._changed:
            self._changed.wait_for(lambda: self._asked >= bucket + 2 or self._update.done())
        if self._update.done():
            self._update.result()

    def finish(self) -> None:
        """Say that there are no more buckets and wait for the engine to commit."""
        self._loop.call_soon_threadsafe(self._queue.put_nowait, None)
        self._update.result()

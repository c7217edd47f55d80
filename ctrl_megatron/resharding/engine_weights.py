"""Which weights the engines hold: pushing them, comparing checksums, its sleep.

``EngineWeights.load`` -> ``push`` -> ``Engine.update``: there the weights leave the trainer.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ctrl_megatron.parallel.background import BackgroundLoop
from ctrl_megatron.parallel.groups import ProcessGroups
from ctrl_megatron.resharding.buckets import FilledBucket, fill_buckets, shared_segments
from ctrl_megatron.resharding.sources import WeightSource
from ctrl_megatron.rollout.engine import Engine
from ctrl_megatron.rollout.weight_chunks import WeightChunk, spec_bytes
from ctrl_megatron.rollout.weight_update import checksums
from ctrl_megatron.types import TensorSpec

Role = Literal["actor", "proxy"]
_MEMORY: tuple[str, ...] = ("weights", "kv_cache")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLink:
    """The way to a host's engines, held by the first rank there."""

    engine: Engine
    """One, or the pool of all that stand there."""
    loop: BackgroundLoop


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """What one push moved."""

    num_bytes: int
    seconds: float
    """Checksums included where they were compared."""


class EngineWeights:
    """The engines generate for two models in turn; every completion names the one that drew it.

    With ``may_sleep`` they give their device memory to the trainer between ``rest`` and the next
    ``load`` or ``use``. They are awake at first. All ranks call the same methods in the same order;
    the first rank of a host drives the engines there.
    """

    def __init__(
        self,
        sources: Mapping[Role, WeightSource],
        link: EngineLink | None,
        groups: ProcessGroups,
        *,
        verify: bool,
        may_sleep: bool = False,
    ) -> None:
        self._sources, self._link, self._groups, self._verify = sources, link, groups, verify
        self._may_sleep, self._asleep = may_sleep, set[str]()
        self._actor_step = 0
        self._loaded: str | None = None
        self.reports: list[SyncReport] = []
        """Pushes since the last ``take_reports``."""

    def version(self, role: Role) -> str:
        """The name under which the engine knows the role's present weights."""
        return "proxy" if role == "proxy" else f"actor@{self._actor_step}"

    def actor_changed(self, step: int) -> None:
        """The trainer's weights are now those after ``step`` training steps."""
        self._actor_step = step

    def use(self, role: Role) -> str:
        """Let the engine generate with the role's weights; returns their version. Collective."""
        version = self.load(role)
        self._wake("kv_cache")
        return version

    def load(self, role: Role) -> str:
        """Make the engine hold the role's weights; returns their version. Collective."""
        version = self.version(role)
        self._wake("weights")
        if self._loaded != version:
            # A push that fails half-way leaves nothing that may be relied on.
            self._loaded = None
            source = self._sources[role]
            self.reports.append(
                push(source, self._link, self._groups, version=version, verify=self._verify)
            )
            self._loaded = version
        return version

    def rest(self) -> None:
        """Nobody needs the engine for a while: free its device memory. Collective."""
        if not self._may_sleep or self._asleep == set(_MEMORY):
            return
        # Engines fall asleep as a whole.
        self._wake("kv_cache")
        # Another leader may still be generating; and nobody may take the memory before it is free.
        self._groups.barrier()
        if self._link:
            self._link.loop.run(self._link.engine.sleep(_MEMORY))
        self._asleep = set(_MEMORY)
        self._groups.barrier()

    def _wake(self, tag: str) -> None:
        if tag not in self._asleep:
            return
        self._groups.barrier()
        if self._link:
            self._link.loop.run(self._link.engine.wake((tag,)))
        self._asleep.remove(tag)
        self._groups.barrier()

    def close(self) -> None:
        """Let go of the connections to this host's engines."""
        if self._link:
            self._link.loop.run(self._link.engine.close())

    def take_reports(self) -> list[SyncReport]:
        """The pushes since the last call."""
        reports, self.reports = self.reports, []
        return reports


def push(
    source: WeightSource,
    link: EngineLink | None,
    groups: ProcessGroups,
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
    queue, sent = None, dict[str, str]()
    if link:
        queue = ChunkQueue(link, [place.spec for place in source.places], version)
    with shared_segments(source.places, groups) as segments:
        wait_until_free = queue.wait_until_read if queue else lambda bucket: None
        for bucket in fill_buckets(source, segments, groups, wait_until_free):
            if queue:
                if verify:
                    sent |= checksums(bucket.tensors())
                queue.put(bucket)
        if queue:
            queue.finish()
        groups.barrier()
    if link and verify:
        held = link.loop.run(link.engine.checksums())
        wrong = [name for name, checksum in sent.items() if held.get(name) != checksum]
        if wrong:
            raise RuntimeError(
                f"after the update to {version} the engine holds other bytes than were sent for "
                f"{len(wrong)} of {len(sent)} tensors: {wrong[:5]}"
            )
    num_bytes = sum(spec_bytes(place.spec) for place in source.places)
    return SyncReport(num_bytes=num_bytes, seconds=time.monotonic() - start)


class ChunkQueue:
    """An update: its chunks on their way from the thread that fills buckets to the engine.

    An engine asks for the next chunk only when it has read the one before, so the number of times
    it has asked says which segments may be filled again.
    """

    def __init__(self, link: EngineLink, specs: Sequence[TensorSpec], version: str) -> None:
        self._loop, self._queue = link.loop.loop, asyncio.Queue[WeightChunk | None]()
        self._asked, self._changed = 0, threading.Condition()
        self._update = link.loop.submit(link.engine.update(specs, self, version))
        # Its failure ends every wait.
        self._update.add_done_callback(lambda _: self._notify(asked=0))

    def put(self, bucket: FilledBucket) -> None:
        """Offer a filled bucket."""
        self._loop.call_soon_threadsafe(self._queue.put_nowait, bucket.chunk())

    def wait_until_read(self, bucket: int) -> None:
        """Block until the engine has read ``bucket``; raises what made its update fail."""
        with self._changed:
            self._changed.wait_for(lambda: self._asked >= bucket + 2 or self._update.done())
        if self._update.done():
            self._update.result()

    def finish(self) -> None:
        """Say that there are no more buckets and wait for the engine to commit."""
        self._loop.call_soon_threadsafe(self._queue.put_nowait, None)
        self._update.result()

    def __aiter__(self) -> ChunkQueue:
        return self

    async def __anext__(self) -> WeightChunk:
        self._notify(asked=1)
        chunk = await self._queue.get()
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    def _notify(self, *, asked: int) -> None:
        with self._changed:
            self._asked += asked
            self._changed.notify_all()

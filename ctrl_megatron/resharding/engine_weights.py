"""Which weights the engines hold: pushing them, comparing checksums.

``EngineWeights.load`` -> ``push`` -> ``Engine.update``: there the weights leave the trainer.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal

from ctrl_megatron.models.parallel_model import ParallelModel
from ctrl_megatron.parallel.background import BackgroundLoop
from ctrl_megatron.parallel.groups import ProcessGroups
from ctrl_megatron.parallel.waiting import result_of, wait_together
from ctrl_megatron.resharding.buckets import BucketMemory, FilledBucket, fill_buckets
from ctrl_megatron.resharding.sources import WeightSource
from ctrl_megatron.rollout.engine import Engine
from ctrl_megatron.rollout.weight_chunks import WeightChunk, spec_bytes
from ctrl_megatron.rollout.weight_update import Checksums
from ctrl_megatron.types import TensorSpec

Role = Literal["actor", "proxy"]


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

    All ranks call the same methods in the same order; the first rank of a host drives the engines
    there.
    """

    def __init__(
        self,
        sources: Mapping[Role, WeightSource],
        link: EngineLink | None,
        groups: ProcessGroups,
        *,
        verify: bool,
    ) -> None:
        self._sources, self._link, self._verify = sources, link, verify
        self._memory = BucketMemory(groups)
        self._actor_step = 0
        self.loaded: str | None = None
        """The version that the engine holds, None where that is none of ours."""
        self.reports: list[SyncReport] = []
        """Pushes since the last ``take_reports``."""

    def version(self, role: Role) -> str:
        """The name under which the engine knows the role's present weights."""
        return "proxy" if role == "proxy" else f"actor@{self._actor_step}"

    def actor_changed(self, step: int) -> None:
        """The trainer's weights are now those after ``step`` training steps."""
        self._actor_step = step

    def holds(self, role: Role) -> bool:
        """Whether the engine has the role's present weights."""
        return self.loaded == self.version(role)

    def model(self, role: Role) -> ParallelModel | None:
        """The trainer's model whose weights a push of the role reads, if it reads a model's."""
        return self._sources[role].model

    def forget(self) -> None:
        """The engine holds nothing any more."""
        self.loaded = None

    def load(self, role: Role) -> None:
        """Push the role's weights into the engine, whose own are awake. Collective."""
        # A push that fails half-way leaves nothing that may be relied on.
        self.loaded, version = None, self.version(role)
        source, link, memory = self._sources[role], self._link, self._memory
        self.reports.append(push(source, link, memory, version=version, verify=self._verify))
        self.loaded = version

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
    memory: BucketMemory,
    *,
    version: str,
    verify: bool = False,
) -> SyncReport:
    """Load the source's weights into all engines under the name ``version``. Collective.

    ``link`` is given on the first rank of every host that has an engine. While engines read one
    bucket, all ranks fill the other, and with ``verify`` threads compute checksums of what lies in
    both. The engine's own must equal them: RuntimeError names the first tensors that differ.
    """
    groups = memory.groups
    # Nobody may still be generating when the engine's weights begin to change.
    groups.barrier()
    start = time.monotonic()
    queue, sent = None, Checksums() if link and verify else None
    if link:
        queue = ChunkQueue(link, [place.spec for place in source.places], version)

    def wait_until_free(bucket: int) -> None:
        if queue:
            queue.wait_until_read(bucket)
        if sent:
            sent.wait()

    with memory.segments(source.places) as segments:
        for bucket in fill_buckets(source, segments, groups, wait_until_free):
            if queue:
                queue.put(bucket)
            if sent:
                for name, tensor in bucket.tensors():
                    sent.add(name, tensor)
        wait_together(queue.finish() if queue else None, groups)
    if verify:
        asked = link.loop.submit(link.engine.checksums()) if link else None
        held, wanted = result_of(asked, groups) or {}, sent.result() if sent else {}
        wrong = [name for name, checksum in wanted.items() if held.get(name) != checksum]
        if wrong:
            raise RuntimeError(
                f"after the update to {version} the engine holds other bytes than were sent for "
                f"{len(wrong)} of {len(wanted)} tensors: {wrong[:5]}"
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

    def finish(self) -> Future[None]:
        """Say that there are no more buckets; the engine's commit is what comes back."""
        self._loop.call_soon_threadsafe(self._queue.put_nowait, None)
        return self._update

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

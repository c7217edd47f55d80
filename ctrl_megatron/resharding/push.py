"""One push: the source's weights into this host's engines, through a medium of ``transports``."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from ctrl_megatron.background import BackgroundLoop
from ctrl_megatron.errors import ServiceLost
from ctrl_megatron.parallel.waiting import WaitRules
from ctrl_megatron.resharding.sources import WeightSource
from ctrl_megatron.resharding.transports import Sender
from ctrl_megatron.resharding.transports.shared_memory import SharedMemorySender
from ctrl_megatron.rollout.engine import Engine
from ctrl_megatron.rollout.weight_chunks import WeightChunk, spec_bytes
from ctrl_megatron.rollout.weight_update import Checksums
from ctrl_megatron.types import TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PushReport:
    """Size and duration of one push."""

    num_bytes: int
    """Bytes that were filled and exchanged for it: 0 if they were kept from an earlier push."""
    seconds: float
    """Includes the comparison of checksums where there is one."""


def push(
    source: WeightSource,
    engine: Engine | None,
    loop: BackgroundLoop,
    sender: Sender,
    waiting: WaitRules,
    *,
    version: str,
    verify: bool = False,
) -> PushReport:
    """Load the source's weights into all engines under the name ``version``. Collective.

    ``engine`` is a client of this host's engines on the host's first rank, None on every other rank
    and on hosts without engines; its calls run on ``loop``, and the ranks wait for them on the
    conditions of ``waiting``. With ``verify`` threads compute
    checksums of what is sent while engines read it. Those of every engine must be equal:
    RuntimeError names the first tensors that differ. Raises ServiceLost, on all ranks, if an engine
    is lost meanwhile.
    """
    groups = sender.groups
    # The engines' weights must not change while another rank still generates.
    groups.barrier()
    start = time.monotonic()
    queue, sent = None, Checksums() if engine and verify else None
    if engine:
        queue = ChunkQueue(engine, loop, waiting, source.specs, version)

    def wait_until_read(bucket: int) -> None:
        if queue:
            queue.wait_until_read(bucket)
        if sent:
            sent.wait()

    moved, unseen = False, False
    with sender.send(source, wait_until_read) as buckets:
        for bucket in buckets:
            moved, unseen = moved or not bucket.kept, unseen or bucket.unseen
            if queue:
                queue.put(bucket.chunk)
            if sent:
                for name, tensor in bucket.tensors:
                    sent.add(name, tensor)
        # Inside the context: engines read the last buckets' memory until then.
        waiting.wait_together(queue.finish() if queue else None, f"the engines to load {version}")
    if verify and unseen:
        checksum_whole_weights(source, sender, sent)
    if verify:
        asked = loop.submit(engine.checksums()) if engine else None
        held = waiting.wait_together(asked, f"the engines' checksums of {version}") or {}
        wanted = sent.result() if sent else {}
        wrong = [name for name, checksum in wanted.items() if held.get(name) != checksum]
        if wrong:
            raise RuntimeError(
                f"after the update to {version} the engine has other bytes than were sent for "
                f"{len(wrong)} of {len(wanted)} tensors: {wrong[:5]}"
            )
    num_bytes = sum(map(spec_bytes, source.specs)) if moved else 0
    return PushReport(num_bytes=num_bytes, seconds=time.monotonic() - start)


def checksum_whole_weights(source: WeightSource, sender: Sender, sent: Checksums | None) -> None:
    """Add the source's tensors to ``sent``, of which ranks without an engine have none. Collective.

    A medium whose bytes go from device to device leaves nothing to read, so that verified pushes
    read the weights once more, through host memory.
    """
    whole = SharedMemorySender(sender.groups)
    with whole.send(source, lambda bucket: sent.wait() if sent else None) as buckets:
        for bucket in buckets:
            if sent:
                for name, tensor in bucket.tensors:
                    sent.add(name, tensor)


class ChunkQueue:
    """The chunks of one update, from the thread that fills buckets to the engine.

    An engine requests the next chunk only when it has read the one before, so the number of its
    requests says which buckets' memory may be filled again.
    """

    def __init__(
        self,
        engine: Engine,
        loop: BackgroundLoop,
        waiting: WaitRules,
        specs: Sequence[TensorSpec],
        version: str,
    ) -> None:
        self._waiting, self._version = waiting, version
        self._loop, self._queue = loop.loop, asyncio.Queue[WeightChunk | None]()
        self._requested, self._changed = 0, threading.Condition()
        self._update = loop.submit(engine.update(specs, self, version))
        # Its failure ends every wait.
        self._update.add_done_callback(lambda _: self._notify(requested=0))

    def put(self, chunk: WeightChunk) -> None:
        """Give the engine the next chunk."""
        # asyncio's queues are for one thread, and buckets are filled in another.
        self._loop.call_soon_threadsafe(self._queue.put_nowait, chunk)

    def wait_until_read(self, bucket: int) -> None:
        """Block until the engine has read the chunk of that number, counted from 0; raises what
        made its update fail. A lost engine reads nothing more, which ``finish`` tells all ranks
        when they have exchanged the rest."""

        # Request number b + 1 asks for bucket b, so request b + 2 says that it has been read.
        def is_read(seconds: float) -> bool:
            with self._changed:
                return self._changed.wait_for(
                    lambda: self._requested >= bucket + 2 or self._update.done(), seconds
                )

        what = f"the engines to read bucket {bucket + 1} of {self._version}"
        self._waiting.wait_alone(is_read, what)
        if self._update.done() and not isinstance(self._update.exception(), ServiceLost):
            self._update.result()

    def finish(self) -> Future[None]:
        """End the chunks; the future is done when the engine has committed the update."""
        self._loop.call_soon_threadsafe(self._queue.put_nowait, None)
        return self._update

    def __aiter__(self) -> ChunkQueue:
        return self

    async def __anext__(self) -> WeightChunk:
        self._notify(requested=1)
        chunk = await self._queue.get()
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    def _notify(self, *, requested: int) -> None:
        with self._changed:
            self._requested += requested
            self._changed.notify_all()

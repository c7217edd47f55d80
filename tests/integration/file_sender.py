"""A medium of a user's own: weights in temporary files. The sending half."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ctrl_megatron.parallel.groups import ProcessGroups
from ctrl_megatron.resharding.buckets import Buckets, HostBuckets, push_through_host
from ctrl_megatron.resharding.schedule import IN_FLIGHT
from ctrl_megatron.resharding.sources import WeightSource
from ctrl_megatron.resharding.transports import ReadableBucket
from ctrl_megatron.rollout.weight_chunks import WeightChunk, weight_chunk


class FileSender:
    """A file for each bucket in flight on every host, which its ranks have mapped."""

    def __init__(self, groups: ProcessGroups) -> None:
        self.groups = groups

    @contextmanager
    def send(
        self, source: WeightSource, wait_until_read: Callable[[int], None]
    ) -> Iterator[Iterator[ReadableBucket]]:
        buckets = Buckets(source, self.groups)
        with tempfile.TemporaryDirectory(prefix="file-sender-") as own:
            folder = Path(self.groups.broadcast_from_host_first(own))
            paths = [folder / str(number) for number in range(IN_FLIGHT)]
            files = [
                torch.from_file(
                    str(path), shared=True, size=buckets.max_bucket_bytes, dtype=torch.uint8
                )
                for path in paths
            ]
            print(f"weights go through {folder}", flush=True)

            def chunk(number: int, first: int) -> WeightChunk:
                places = buckets.places[number]
                place = {
                    "file": str(paths[first]),
                    "first_bytes": {p.spec.name: p.offset for p in places},
                }
                return weight_chunk("file_receiver:FileReceiver", (p.spec for p in places), place)

            memory = HostBuckets(buckets, files, chunk)
            yield push_through_host(buckets, self.groups, memory, wait_until_read)
            # The other ranks' files are in the first rank's folder.
            self.groups.barrier()

    def close(self) -> None:
        """The folders end with the pushes."""

"""A medium of a user's own: weights in temporary files. The sending half."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ctrl_megatron.parallel.groups import ProcessGroups
from ctrl_megatron.resharding.buckets import fill_buckets
from ctrl_megatron.resharding.sources import WeightSource
from ctrl_megatron.resharding.transports import SentBucket
from ctrl_megatron.rollout.weight_chunks import spec_bytes, weight_chunk


class FileSender:
    """Two files on every host, which its ranks have mapped."""

    def __init__(self, groups: ProcessGroups) -> None:
        self.groups = groups

    @contextmanager
    def send(
        self, source: WeightSource, wait_until_read: Callable[[int], None]
    ) -> Iterator[Iterator[SentBucket]]:
        size = max(place.offset + spec_bytes(place.spec) for place in source.places)
        with tempfile.TemporaryDirectory(prefix="file-sender-") as own:
            folder = Path(self.groups.from_first_here(own))
            paths = [folder / "0", folder / "1"]
            memory = [
                torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
                for path in paths
            ]
            print(f"weights go through {folder}", flush=True)

            def sent() -> Iterator[SentBucket]:
                for bucket in fill_buckets(source, memory, self.groups, wait_until_read):
                    place = {
                        "file": str(paths[bucket.number % 2]),
                        "first_bytes": {p.spec.name: p.offset for p in bucket.places},
                    }
                    specs = [p.spec for p in bucket.places]
                    chunk = weight_chunk("file_receiver:FileReceiver", specs, place)
                    yield SentBucket(chunk=chunk, tensors=tuple(bucket.tensors()))

            yield sent()
            # The other ranks' files are in the first rank's folder.
            self.groups.barrier()

    def close(self) -> None:
        """The folders end with the pushes."""

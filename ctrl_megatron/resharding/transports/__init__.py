"""Sending halves of the media that bring weights to engines: one file per medium.

``actor_rollout_ref.rollout.weight_transport`` chooses the medium: a file of this folder by its
name, or ``module:Class`` of a user's own. A new medium is one file here and one in
``rollout.transports``, which the chunks of this half name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pkgutil import iter_modules
from typing import Protocol, cast

import torch

from ctrl_megatron.config.import_path import import_callable
from ctrl_megatron.errors import UserError
from ctrl_megatron.parallel.groups import ProcessGroups
from ctrl_megatron.resharding.sources import WeightSource
from ctrl_megatron.rollout.weight_chunks import WeightChunk

_KEY = "actor_rollout_ref.rollout.weight_transport"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadableBucket:
    """Tensors that the engines of this rank's host can read now."""

    chunk: WeightChunk
    """The message from which an engine reads them."""
    tensors: Iterable[tuple[str, torch.Tensor]] = ()
    """(HF name, whole tensor) of what was sent, for checksums; read once, before the next
    bucket."""
    unseen: bool = False
    """Whether the memory of this host does not have all of the bytes, on all ranks alike; so there
    are no ``tensors``."""
    kept: bool = False
    """Whether the bytes have been there since an earlier push."""


class Sender(Protocol):
    """Brings weights from the trainer's ranks to the engines of their hosts.

    Every rank makes one and calls the same methods in the same order.
    """

    groups: ProcessGroups

    def __init__(self, groups: ProcessGroups) -> None: ...

    def send(
        self, source: WeightSource, wait_until_read: Callable[[int], None]
    ) -> AbstractContextManager[Iterator[ReadableBucket]]:
        """A context that yields the source's buckets, one after the other. Collective.

        ``wait_until_read(number)`` returns when the engines beside this rank have read the bucket
        of that number, counted from 0; before that its memory must not change. The context ends
        when the engines have read everything or the push has failed.
        """
        ...

    def close(self) -> None:
        """Remove whatever this host's senders have left in the system; another thread may call it
        in the middle of a push when a run ends."""
        ...


def sender_class(name: str) -> type[Sender]:
    """The sending half that ``weight_transport`` names; UserError if there is none."""
    own = [module.name for module in iter_modules(__path__)]
    if ":" not in name and name not in own:
        raise UserError(
            f"{_KEY}={name} is none of {', '.join(own)}",
            remedy="name one of them, or module:Class of your own",
        )
    if ":" not in name:
        # shared_memory -> SharedMemorySender
        name = f"{__name__}.{name}:{name.title().replace('_', '')}Sender"
    return cast("type[Sender]", import_callable(name, _KEY))

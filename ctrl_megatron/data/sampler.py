"""The order in which rows are drawn. It is a function of (seed, epoch), so a checkpoint stores only
the position.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, Protocol

from ctrl_megatron.errors import UserError


class Sampler(Protocol):
    """An order of rows that a run can continue."""

    def next_batch(self, size: int) -> list[int]:
        """The positions of the next ``size`` distinct rows."""
        ...

    def peek(self, size: int, batches: int) -> list[list[int]]:
        """The batches that the next calls of ``next_batch`` will return."""
        ...

    def is_exhausted(self, epochs: int, size: int) -> bool:
        """Whether the first ``epochs`` epochs have no further batch of ``size`` rows."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The position of the next batch, and the values that the order depends on."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at ``state``. Raises ``ValueError`` if this sampler has a different order."""
        ...


class ResumableSampler:
    """Global batches of row indices, the same on every rank and for every data-parallel size.

    Each epoch is a permutation of all rows, drawn from ``seed`` and the epoch's number. Rows that
    do not fill a last batch are dropped in that epoch. The state counts rows, not batches, so a run
    may resume with another batch size.
    """

    def __init__(self, num_rows: int, *, seed: int | str, shuffle: bool = True) -> None:
        """Raises ``ValueError`` for a data set without rows."""
        if num_rows < 1:
            raise UserError("the training data has no rows")
        self.num_rows, self.seed, self.shuffle = num_rows, seed, shuffle
        self.epoch = self.position = 0
        self._order: tuple[int, list[int]] | None = None

    def next_batch(self, size: int) -> list[int]:
        """The next ``size`` distinct rows. Raises ``ValueError`` if the data has fewer."""
        if size < 1:
            raise UserError(f"data.train_batch_size must be positive, is {size}")
        if size > self.num_rows:
            raise UserError(
                f"data.train_batch_size={size} is larger than the training data "
                f"({self.num_rows} rows); lower it or add rows"
            )
        if self.position + size > self.num_rows:
            self.epoch, self.position = self.epoch + 1, 0
        batch = self._order_of_epoch()[self.position : self.position + size]
        self.position += size
        return batch

    def peek(self, size: int, batches: int) -> list[list[int]]:
        now = self.epoch, self.position
        coming = [self.next_batch(size) for _ in range(batches)]
        self.epoch, self.position = now
        return coming

    def is_exhausted(self, epochs: int, size: int) -> bool:
        return self.epoch + (self.position + size > self.num_rows) >= epochs

    def state_dict(self) -> dict[str, Any]:
        names = ("epoch", "position", "num_rows", "seed", "shuffle")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "mixture" in state:
            raise UserError(
                f"the checkpoint's data order has the shares {state['mixture']}",
                key="data.mixture",
                remedy="resume with the same data.mixture, or start a new run",
            )
        for name in ("num_rows", "seed", "shuffle"):
            here = getattr(self, name)
            if state[name] != here:
                raise UserError(
                    f"the checkpoint's data order has {name}={state[name]}, this run has {here}; "
                    "resume with the same training files, trainer.seed and data.shuffle, or "
                    "start a new run"
                )
        self.epoch, self.position = state["epoch"], state["position"]

    def _order_of_epoch(self) -> list[int]:
        if self._order is None or self._order[0] != self.epoch:
            order = list(range(self.num_rows))
            if self.shuffle:
                # Seeding with a string hashes it: neighbouring seeds and epochs are unrelated.
                Random(f"{self.seed}/{self.epoch}").shuffle(order)
            self._order = (self.epoch, order)
        return self._order[1]


class MixtureSampler:
    """Batches that draw from several sets of rows, in given shares (``data.mixture``).

    ``parts`` are the positions of the rows of each set, and ``shares`` their shares of the drawn
    rows, of any sum. Each set has a ``ResumableSampler``, and so epochs, of its own: rows of a
    small set with a large share return sooner. At every moment each set has contributed its share
    of all rows drawn so far, to within one row per other set, so that batches, and the mini-batches
    inside them, are mixed alike. An epoch of the whole has as many rows as all sets together.
    """

    def __init__(
        self,
        parts: Sequence[Sequence[int]],
        shares: Sequence[float],
        *,
        seed: int,
        shuffle: bool = True,
    ) -> None:
        """Raises ``ValueError`` for a set without rows."""
        self._parts = [tuple(part) for part in parts]
        self._shares = [share / sum(shares) for share in shares]
        self._samplers = [
            ResumableSampler(len(part), seed=f"{seed}/{number}", shuffle=shuffle)
            for number, part in enumerate(parts)
        ]
        self._drawn = [0] * len(parts)

    def next_batch(self, size: int) -> list[int]:
        """The next ``size`` distinct rows. Raises ``ValueError`` if a set has fewer rows than its
        share of the batch.
        """
        order = [self._next_part() for _ in range(size)]
        drawn = []
        for number, (sampler, part) in enumerate(zip(self._samplers, self._parts, strict=True)):
            count = order.count(number)
            if count > len(part):
                raise UserError(
                    f"a batch of data.train_batch_size={size} rows takes {count} from file "
                    f"{number + 1} of data.train_files, which has {len(part)}",
                    key="data.mixture",
                    remedy="lower the file's share or the batch size, or add rows",
                )
            drawn.append(iter([part[row] for row in sampler.next_batch(count)] if count else []))
        return [next(drawn[number]) for number in order]

    def _next_part(self) -> int:
        """The set that is furthest behind its share of the rows drawn so far."""
        total = sum(self._drawn) + 1
        behind = [
            share * total - drawn for share, drawn in zip(self._shares, self._drawn, strict=True)
        ]
        number = behind.index(max(behind))
        self._drawn[number] += 1
        return number

    def peek(self, size: int, batches: int) -> list[list[int]]:
        now = self.state_dict()
        coming = [self.next_batch(size) for _ in range(batches)]
        self.load_state_dict(now)
        return coming

    def is_exhausted(self, epochs: int, size: int) -> bool:
        """Whether ``size`` further rows would be more than ``epochs`` times all rows."""
        return sum(self._drawn) + size > epochs * sum(map(len, self._parts))

    def state_dict(self) -> dict[str, Any]:
        """The position in every set, and the values that the order depends on."""
        return {
            "mixture": self._shares,
            "drawn": list(self._drawn),
            "parts": [sampler.state_dict() for sampler in self._samplers],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.get("mixture") != self._shares:
            raise UserError(
                f"the checkpoint's data order has the shares {state.get('mixture', 'of one set')}, "
                f"this run has {self._shares}",
                key="data.mixture",
                remedy="resume with the same data.mixture and data.train_files, or start a new run",
            )
        for sampler, part in zip(self._samplers, state["parts"], strict=True):
            sampler.load_state_dict(part)
        self._drawn = list(state["drawn"])

"""The order in which rows are drawn. It is a function of (seed, epoch), so a checkpoint stores only
the position.
"""

from __future__ import annotations

from random import Random
from typing import Any

from ctrl_megatron.errors import UserError


class ResumableSampler:
    """Global batches of row indices, the same on every rank and for every data-parallel size.

    Each epoch is a permutation of all rows, drawn from ``seed`` and the epoch's number. Rows that
    do not fill a last batch are dropped in that epoch. The state counts rows, not batches, so a run
    may resume with another batch size.
    """

    def __init__(self, num_rows: int, *, seed: int, shuffle: bool = True) -> None:
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
        """The batches that the next calls of ``next_batch`` will return."""
        now = self.epoch, self.position
        coming = [self.next_batch(size) for _ in range(batches)]
        self.epoch, self.position = now
        return coming

    def is_through(self, epochs: int, size: int) -> bool:
        """Whether a batch of ``size`` further rows would begin after the first ``epochs``
        epochs.
        """
        return self.epoch + (self.position + size > self.num_rows) >= epochs

    def state_dict(self) -> dict[str, Any]:
        """The position of the next batch, and the values that the order depends on."""
        names = ("epoch", "position", "num_rows", "seed", "shuffle")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at ``state``. Raises ``ValueError`` if this sampler has a different order."""
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

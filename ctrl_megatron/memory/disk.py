"""The largest size of a run's directory, in bytes. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ctrl_megatron.config import Config, Purpose
from ctrl_megatron.memory.model_state import DTYPE_SIZE
from ctrl_megatron.models.rules import hf_shapes, trained_names
from ctrl_megatron.models.shape import AnyShape

_BESIDE = 8 << 20
"""Bytes for logs, metrics, examples and the report."""
_OPEN = 2
"""The newest checkpoint beside an older one: for a run whose number of steps is not configured, and
for one that keeps all (``max_ckpt_to_keep=-1``), because its owner may move them elsewhere.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedDiskUse:
    """Size of one checkpoint and of one export of the weights, and the largest number of each."""

    checkpoint: int
    checkpoints: int
    export: int
    exports: int

    @property
    def total(self) -> int:
        """The most bytes that the run's directory takes: all checkpoints and exports that are kept
        at one time, and some for logs and reports."""
        return self.checkpoint * self.checkpoints + self.export * self.exports + _BESIDE

    def bytes_still_needed(self, there: int) -> int:
        """Bytes beyond the ``there`` of an earlier start. A new checkpoint is written before an old
        one is removed.
        """
        return max(self.total - there, self.checkpoint + _BESIDE)

    def __str__(self) -> str:
        kinds = ((self.checkpoints, "checkpoint"), (self.exports, "export"))
        return " and ".join(f"{n} {name}{'s' if n > 1 else ''}" for n, name in kinds if n)


def disk_use(config: Config, shapes: Sequence[AnyShape], purpose: Purpose) -> PredictedDiskUse:
    """The disk use of a run that trains models of ``shapes``. A checkpoint holds trained weights,
    Adam's moments, a float32 copy of the weights unless they are float32, and the reference if it
    follows the actor (``shapes[0]``); an export holds the weights."""
    trainer, dtype = config.trainer, config.actor_rollout_ref.model_dtype
    elements = sum(_elements(shape, trained_names(shape)) for shape in shapes)
    exported = sum(
        _elements(shape.without_adapters, hf_shapes(shape.without_adapters)) for shape in shapes
    )
    # FSDP's weights are float32 whatever the model computes in.
    sharded = config.actor_rollout_ref.actor.strategy == "fsdp"
    weight = 4 if sharded else DTYPE_SIZE[dtype]
    master = 0 if weight == 4 else 4
    rl, frozen = purpose == "rl", 0
    if rl and config.refreshes_reference:
        frozen = _elements(shapes[0], trained_names(shapes[0]))
    steps = trainer.total_training_steps if rl else config.sft.total_training_steps
    saves = _times(steps, trainer.save_freq)
    keep = _OPEN - 1 if trainer.max_ckpt_to_keep < 0 else trainer.max_ckpt_to_keep
    exports = 1 if not rl else min(_times(steps, trainer.save_hf_freq, last=False), _OPEN)
    return PredictedDiskUse(
        checkpoint=elements * (weight + master + 8) + frozen * weight,
        checkpoints=min(saves, keep + 1),
        export=exported * DTYPE_SIZE[dtype],
        exports=exports,
    )


def _times(steps: int | None, every: int, *, last: bool = True) -> int:
    """Number of writes with one every so many steps, and one after step ``last``."""
    if every <= 0:
        return int(last)
    if steps is None:
        return _OPEN
    return math.ceil(steps / every) if last else steps // every


def _elements(shape: AnyShape, names: Collection[str]) -> int:
    sizes = hf_shapes(shape)
    return sum(math.prod(sizes[name]) for name in names)

"""The largest size of a run's directory, in bytes. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from ctrl_megatron.config import Config, Purpose
from ctrl_megatron.memory.model_state import DTYPE_SIZE
from ctrl_megatron.memory.shapes import ModelShapes
from ctrl_megatron.models.rules import hf_shapes, trained_names
from ctrl_megatron.models.shape import ModelShape

_BESIDE = 8 << 20
"""Bytes for logs, metrics, examples and the report."""
_OPEN = 2
"""The newest checkpoint beside an older one: for a run whose number of steps is not configured, and
for one that keeps all (``max_ckpt_to_keep=-1``), because its owner may move them elsewhere.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskUse:
    """Size of one checkpoint and of one export of the weights, and the largest number of each."""

    checkpoint: int
    checkpoints: int
    export: int
    exports: int

    @property
    def total(self) -> int:
        """Bytes of the whole directory."""
        return self.checkpoint * self.checkpoints + self.export * self.exports + _BESIDE

    def still_needed(self, there: int) -> int:
        """Bytes beyond the ``there`` of an earlier start. A new checkpoint is written before an old
        one is removed.
        """
        return max(self.total - there, self.checkpoint + _BESIDE)

    def __str__(self) -> str:
        kinds = ((self.checkpoints, "checkpoint"), (self.exports, "export"))
        return " and ".join(f"{n} {name}{'s' if n > 1 else ''}" for n, name in kinds if n)


def disk_use(config: Config, shapes: ModelShapes, purpose: Purpose) -> DiskUse:
    """The disk use of the run. A checkpoint has what is trained, its moments in float32 and, unless
    that is its type, the same in float32, and a reference that follows the actor; an export has
    the weights.
    """
    trainer, dtype = config.trainer, config.actor_rollout_ref.model.dtype
    models = [shape for shape in (shapes.actor, shapes.value) if shape is not None]
    elements = sum(_elements(shape, trained_names(shape)) for shape in models)
    frozen = 0
    if config.refreshes_reference and shapes.reference is not None:
        frozen = _elements(shapes.reference, trained_names(shapes.reference))
    exported = sum(_elements(shape.base, hf_shapes(shape.base)) for shape in models)
    master = 0 if dtype == "float32" else 4
    rl = purpose == "rl"
    steps = trainer.total_training_steps if rl else config.sft.total_training_steps
    saves = _times(steps, trainer.save_freq)
    keep = _OPEN - 1 if trainer.max_ckpt_to_keep < 0 else trainer.max_ckpt_to_keep
    exports = 1 if not rl else min(_times(steps, trainer.save_hf_freq, last=False), _OPEN)
    return DiskUse(
        checkpoint=elements * (DTYPE_SIZE[dtype] + master + 8) + frozen * DTYPE_SIZE[dtype],
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


def _elements(shape: ModelShape, names: Collection[str]) -> int:
    sizes = hf_shapes(shape)
    return sum(math.prod(sizes[name]) for name in names)

"""What a run writes to its directory, at the moment when most of it is there. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ctrl_megatron.config import Config, Purpose
from ctrl_megatron.memory.model_state import DTYPE_SIZE
from ctrl_megatron.memory.shapes import ModelShapes
from ctrl_megatron.models.families import hf_names, hf_shape
from ctrl_megatron.models.hf_config import ModelShape

_BESIDE = 8 << 20
"""Bytes for logs, metrics, examples and the report."""
_OPEN = 2
"""The newest, written beside another: of a run whose length follows from its rows, and of one that
keeps all (``max_ckpt_to_keep=-1``), whose owner may move them away meanwhile.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskUse:
    """Bytes of one checkpoint and of one export of the weights, and how many are there at once."""

    checkpoint: int
    checkpoints: int
    export: int
    exports: int

    @property
    def total(self) -> int:
        """Bytes of all that the directory holds."""
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
    """What the run writes. A checkpoint has the weights, both moments in float32 and, unless that
    is their type, the weights in float32; an export has the weights.
    """
    trainer, dtype = config.trainer, config.actor_rollout_ref.model.dtype
    trained = [shape for shape in (shapes.actor, shapes.value) if shape is not None]
    elements = sum(map(_elements, trained))
    master = 0 if dtype == "float32" else 4
    rl = purpose == "rl"
    steps = trainer.total_training_steps if rl else config.sft.total_training_steps
    saves = _times(steps, trainer.save_freq)
    keep = _OPEN - 1 if trainer.max_ckpt_to_keep < 0 else trainer.max_ckpt_to_keep
    exports = 1 if not rl else min(_times(steps, trainer.save_hf_freq, last=False), _OPEN)
    return DiskUse(
        checkpoint=elements * (DTYPE_SIZE[dtype] + master + 8),
        checkpoints=min(saves, keep + 1),
        export=elements * DTYPE_SIZE[dtype],
        exports=exports,
    )


def _times(steps: int | None, every: int, *, last: bool = True) -> int:
    """How often something is written every so many steps, after the ``last`` one in any case."""
    if every <= 0:
        return int(last)
    if steps is None:
        return _OPEN
    return math.ceil(steps / every) if last else steps // every


def _elements(shape: ModelShape) -> int:
    return sum(math.prod(hf_shape(name, shape)) for name in hf_names(shape))

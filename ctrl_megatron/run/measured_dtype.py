"""``actor_rollout_ref.model.dtype=auto``: the type in which this machine is faster."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ctrl_megatron.config import Config
from ctrl_megatron.config.actor_rollout_ref import DTYPES, Dtype
from ctrl_megatron.config.environment import read_launch
from ctrl_megatron.config.load import recorded_value
from ctrl_megatron.errors import UserError, convert_input_errors
from ctrl_megatron.memory.fit import with_changed_keys

KEY = "actor_rollout_ref.model.dtype"


def resolve_auto_dtype(config: Config) -> Config:
    """The configuration with a type in place of ``auto``: that of the run directory, else bfloat16
    where there is a GPU, else the one in which products of the model's own shapes are faster, which
    rank 0 prints. UserError for a model without a readable config.json.
    """
    if config.actor_rollout_ref.model.dtype != "auto":
        return config
    chosen = _kept(Path(config.trainer.run_dir) / "config.yaml")
    return with_changed_keys(config, {KEY: chosen or _faster(config)})


def _kept(file: Path) -> Dtype | None:
    """The type with which a run began; None if its directory is new."""
    if not file.is_file():
        return None
    found = recorded_value(file, KEY)
    if found not in DTYPES:
        raise UserError(
            f"the type {found!r} is none of {', '.join(DTYPES)}",
            file=f"{file}: {KEY}",
            remedy="name the type with which the run began",
        )
    return found


def _faster(config: Config) -> Dtype:
    import torch

    from ctrl_megatron.metrics.flops import measure_matmul_rates
    from ctrl_megatron.models.hf_config import typical_linear_sizes

    if torch.cuda.is_available():
        return "bfloat16"
    with convert_input_errors("actor_rollout_ref.model.path"):
        sizes = typical_linear_sizes(config.actor_rollout_ref.model.path)
    if sizes is None:
        raise UserError(
            "the model's config.json names no hidden_size, whose products would be measured",
            key=f"{KEY}=auto",
            remedy=f"set it to {' or '.join(DTYPES)}",
        )
    # In turns, and the best of each: other work on the machine comes and goes.
    turns = [
        {dtype: measure_matmul_rates(dtype, sizes=sizes, seconds=0.05) for dtype in DTYPES}
        for _ in range(3)
    ]
    # The three products of a layer have equally many operations.
    rates = {
        dtype: 3 / sum(1 / max(best) for best in zip(*(turn[dtype] for turn in turns), strict=True))
        for dtype in DTYPES
    }
    chosen = max(DTYPES, key=rates.__getitem__)
    if read_launch().rank == 0:
        measured = " and ".join(f"{rate / 1e9:.3g} in {name}" for name, rate in rates.items())
        print(f"this CPU multiplies the model's matrices at {measured} GFLOP/s: {KEY}={chosen}")
    return chosen


def require_one_dtype(of_ranks: Sequence[str]) -> None:
    """UserError if ranks that another launcher has started have measured different types."""
    if len(set(of_ranks)) > 1:
        ranks = ", ".join(f"{dtype} on rank {rank}" for rank, dtype in enumerate(of_ranks))
        raise UserError(
            f"the processors differ: {ranks}", key=f"{KEY}=auto", remedy="name one of the types"
        )

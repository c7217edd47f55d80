"""Where metrics go. Each sink imports its library when it is built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ctrl_megatron.metrics.display import Display
from ctrl_megatron.metrics.sinks.console import ConsoleSink
from ctrl_megatron.metrics.sinks.files import JsonlSink, TensorboardSink
from ctrl_megatron.metrics.sinks.trackers import MlflowSink, WandbSink


class Sink(Protocol):
    """Takes the metrics of a step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of step ``step``."""
        ...

    def close(self) -> None:
        """Write everything out and let go of files and connections."""
        ...


def build_sinks(
    names: Sequence[str],
    run_dir: Path,
    config: Mapping[str, Any],
    display: Display | None = None,
) -> list[Sink]:
    """The sinks called ``names`` for a run in ``run_dir``; call it on one rank only.

    ``config`` is the configuration as nested dicts (its ``trainer`` group names project and run).
    Raises ValueError for an unknown name or a library that is not installed.
    """
    sinks: list[Sink] = []
    try:
        for name in dict.fromkeys(names):
            sinks.append(_build(name, run_dir, config, display))
    except BaseException:
        for sink in sinks:
            sink.close()
        raise
    return sinks


def _build(name: str, run_dir: Path, config: Mapping[str, Any], display: Display | None) -> Sink:
    if name == "console":
        return ConsoleSink(display if display is not None else Display(0))
    if name == "jsonl":
        return JsonlSink(run_dir / "metrics.jsonl")
    if name == "tensorboard":
        return TensorboardSink(run_dir / "tensorboard")
    if name == "wandb":
        return WandbSink(run_dir, config)
    if name == "mlflow":
        return MlflowSink(run_dir, config)
    raise ValueError(
        f"trainer.logger: unknown sink {name!r}; choose from console, jsonl, tensorboard, "
        f"wandb, mlflow"
    )


__all__ = ["Sink", "build_sinks"]

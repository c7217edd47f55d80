"""Sinks of experiment trackers; their libraries are optional."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class WandbSink:
    """Weights & Biases: one run, resumed under the same id when the training resumes."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        trainer = config["trainer"]
        self._run = _library("wandb").init(
            project=trainer["project_name"],
            name=trainer["experiment_name"],
            id=trainer["experiment_name"],
            resume="allow",
            dir=str(run_dir),
            config=dict(config),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of one step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Wait until everything is sent."""
        self._run.finish()


class MlflowSink:
    """MLflow: one run per start, the configuration as an artifact."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        self._mlflow = _library("mlflow")
        trainer = config["trainer"]
        self._mlflow.set_experiment(trainer["project_name"])
        self._mlflow.start_run(run_name=trainer["experiment_name"])
        self._mlflow.log_dict(dict(config), "config.yaml")
        self._mlflow.set_tag("run_dir", str(run_dir))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of one step."""
        self._mlflow.log_metrics(dict(metrics), step=step)

    def close(self) -> None:
        """End the run."""
        self._mlflow.end_run()


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            f"trainer.logger names {name}, which is not installed; "
            f"pip install {name} or remove it from the list"
        ) from error

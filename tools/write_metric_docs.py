"""Write docs/metrics.md from the declared metrics: ``python tools/write_metric_docs.py``."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ctrl_megatron.metrics.names import METRICS

TARGET = ROOT / "docs/metrics.md"
_INTRODUCTION = """# Metrics

Written by `python tools/write_metric_docs.py` from `ctrl_megatron/metrics/names.py`; do not edit by
hand.

A step logs the names below to every sink of `trainer.logger`: the terminal's table,
`runs/NAME/metrics.jsonl`, TensorBoard, Weights & Biases, MLflow, Trackio, SwanLab or a class of
your own; `runs/NAME/report.html` draws them. Values are means over the whole global batch unless
the text says otherwise. A name is absent where there is nothing to report (no KL, no value model,
one engine): the unknown is not a 0. A capital NAME is a placeholder that the run fills in. Your own
pipelines, losses and reward functions log further names, which the report draws too.

The trackers `wandb` (Weights & Biases), `mlflow`, `trackio` and `swanlab` are named in
`trainer.logger` (`[console, jsonl, wandb]`) and installed by you, as in `pip install wandb`. Their
own variables say where the numbers go, also without a network:

- `WANDB_MODE=offline` writes below `runs/NAME/wandb/`; `wandb sync` of that folder sends it later.
- `MLFLOW_TRACKING_URI=sqlite:///runs/mlflow.db` is a file, which `mlflow ui --backend-store-uri`
  shows.
- Trackio writes below `TRACKIO_DIR`, and `trackio show` draws it; `TRACKIO_SPACE_ID` names a Space
  of Hugging Face instead.
- `SWANLAB_MODE=offline` writes below `runs/NAME/swanlab/`; `swanlab sync` of a folder in it sends
  it later.

Project and run are `trainer.project_name` and `trainer.experiment_name`. A training that is resumed
goes on in the same run of Weights & Biases, Trackio and SwanLab, and begins a new one of MLflow,
tagged with `run_dir`.

A sink of your own is a class, `trainer.logger=[console, jsonl, mine:Sink]` (also
`FILE.py:Sink`):

```python
# mine.py
class Sink:
    def __init__(self, run_dir, config):  # a Path, and nested dicts without secrets
        self.file = run_dir / "mine.txt"

    def log(self, step, metrics):  # on rank 0; a step may be logged in several parts
        self.file.write_text(f"{step}: {metrics}")

    def close(self):  # at the end of the run
        pass
```

A class that cannot be imported or lacks a method is refused before the run starts; an exception of
a method ends the run and names its line.

What to look at first:

- `rollout/probs_diff_mean` says whether engine and trainer compute the same model: below 0.01 in
  bfloat16, 1e-4 in float32. More is a bug or a wrong setting of the rollout, and makes every other
  number worthless.
- `actor/ppo_kl_first` is 0, up to rounding.
- `advantage/mean_abs` near 0 means that groups have equal rewards: tasks too easy or too hard, `n`
  too small, or a temperature too low. `algorithm.filter_groups.enable=true` draws on until groups
  differ.
- `critique/cut_rate` above 0.1 (from 0.2 on a warning): raise `data.max_response_length`.
- `reward/mean` that rises while `val/revision_pass_rate` does not: the reward is being gamed, or
  the training rows are too few.
"""


def render() -> str:
    """The whole page."""
    parts = [_INTRODUCTION]
    groups: dict[str, list[str]] = {}
    for name in METRICS:
        groups.setdefault(name.partition("/")[0], []).append(name)
    for group, names in groups.items():
        rows = "".join(f"| `{name}` | {METRICS[name].meaning} |\n" for name in names)
        parts.append(f"\n## {group}\n\n| name | says |\n|---|---|\n{rows}")
    return "".join(parts)


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
    print(TARGET.relative_to(ROOT))

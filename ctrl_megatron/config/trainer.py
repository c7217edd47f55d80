"""Keys of ``trainer``, ``dag`` and ``sft``: the loop, its outputs, and the stage before it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ctrl_megatron.config.actor import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """The training loop and what it writes."""

    project_name: str = "ctrl_megatron"
    """Project under which remote sinks file the run."""
    experiment_name: str = "run"
    """Name of the run and of its directory."""
    default_local_dir: str = "runs"
    """Directory that holds the run's directory."""
    total_epochs: int = 1
    """Passes over the training rows."""
    total_training_steps: int | None = None
    """Steps after which training ends, whatever the epochs say; None for all epochs."""
    save_freq: int = -1
    """Steps between checkpoints; -1 saves only at the end."""
    test_freq: int = -1
    """Steps between validations; -1 validates at the end, where there are data.val_files."""
    val_before_train: bool = False
    """Validate before the first step."""
    critic_warmup: int = 0
    """Training steps in which only the value model learns."""
    resume_mode: str = "auto"
    """auto continues from the newest checkpoint, disable starts over, a path names one."""
    logger: tuple[str, ...] = ("console", "jsonl", "tensorboard")
    """Sinks of the metrics."""
    seed: int = 1
    """Seed of everything that has no seed of its own."""
    verify_weight_sync: bool = False
    """Compare checksums of trainer and engine after every weight update."""
    max_ckpt_to_keep: int = 2
    """Checkpoints that stay on disk; -1 keeps all."""
    nnodes: int = 1
    """Machines of the run, compared with what was started."""
    n_gpus_per_node: int = 1
    """Processes per machine; nnodes times this must be what was started."""
    balance_batch: bool = True
    """Level the token counts of the data-parallel ranks."""
    peak_tflops_per_device: float | None = None
    """Peak of one device in the model's type, for MFU; None looks the device up."""
    examples_in_report: int = 6
    """Critiques per step that are kept for the report."""
    failure_timeout: float = 20.0
    """Seconds until a silent rank or service counts as dead."""
    distributed_timeout: float = 600.0
    """Seconds until a collective gives up."""

    @property
    def run_dir(self) -> Path:
        """Directory of everything the run writes."""
        return Path(self.default_local_dir) / self.experiment_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Dag:
    """The task graph."""

    custom_pipeline_fn: str | None = None
    """Function that builds the pipeline, as ``module:function``; None for the built-in one."""
    enable_perf: bool = False
    """Synchronise the device around every node so that its time is its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sft:
    """Supervised fine-tuning on synthesised critiques."""

    train_files: tuple[str, ...] = ()
    """Parquet file or list of parquet files to train on (required for SFT)."""
    val_files: tuple[str, ...] = ()
    """Parquet file or list of parquet files to validate on; empty for no validation."""
    train_batch_size: int = 16
    """Sequences per optimizer step, over all ranks."""
    max_length: int = 1024
    """Longest sequence, prompt and critique together, in tokens."""
    total_epochs: int = 1
    """Passes over the training rows."""
    total_training_steps: int | None = None
    """Steps after which fine-tuning ends, whatever the epochs say; None for all epochs."""
    lr: float = 2e-5
    """Peak learning rate."""
    warmup_steps_ratio: float = 0.0
    """Warm-up as a share of all optimizer steps."""
    lr_scheduler_type: Schedule = "cosine"
    """Shape of the schedule after the warm-up."""
    grad_clip: float = 1.0
    """Largest global gradient norm."""
    max_token_len_per_gpu: int = 16384
    """Token budget of a packed micro-batch."""
    save_freq: int = -1
    """Steps between checkpoints; -1 saves only at the end."""

"""Keys of ``data``: which files, how long, how many."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """The training and validation rows of the RL stage."""

    train_files: tuple[str, ...] = ()
    """Parquet file or list of parquet files to train on (required)."""
    val_files: tuple[str, ...] = ()
    """Parquet file or list of parquet files to validate on; empty for no validation."""
    prompt_key: str = "prompt"
    """Column that holds the critique prompt."""
    max_prompt_length: int = 1536
    """Longest critique prompt, in tokens."""
    max_response_length: int = 768
    """Longest critique, in tokens."""
    train_batch_size: int = 1024
    """Prompts per training step, over all ranks."""
    gen_batch_size: int | None = None
    """Prompts that dynamic sampling draws at a time; None takes train_batch_size."""
    val_batch_size: int = 256
    """Prompts that are sent to the engine together in validation, over all ranks."""
    shuffle: bool = True
    """Draw the training rows in a new random order every epoch."""
    seed: int = 1
    """Seed of the row order."""
    filter_overlong_prompts: bool = True
    """Drop (and count) rows whose prompt exceeds max_prompt_length; False makes them an error."""

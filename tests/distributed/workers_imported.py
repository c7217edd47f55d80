"""What the process imports from which ranks are forked; it must start no thread."""

from __future__ import annotations

import os

# Before torch is imported: ranks are many and cores are few.
os.environ["OMP_NUM_THREADS"] = "1"

import workers  # noqa: F401

import ctrl_megatron.checkpoint.sharded
import ctrl_megatron.models.value  # noqa: F401

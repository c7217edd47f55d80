"""What the process imports from which the tests' ranks and engines are forked; it must start no
thread.
"""

# ruff: noqa: F401
from __future__ import annotations

import gc

import torch.distributed.run
import transformers.models.llama.modeling_llama
import transformers.models.llama.tokenization_llama

import ctrl_megatron.checkpoint.store
import ctrl_megatron.metrics.report.page
import ctrl_megatron.models.value
import ctrl_megatron.pipeline.ctrl
import ctrl_megatron.pipeline.dynamic_sampling
import ctrl_megatron.pipeline.run
import ctrl_megatron.rollout.hf_engine

# Forks share the pages of all this as long as no collection of theirs walks through it.
gc.collect()
gc.freeze()

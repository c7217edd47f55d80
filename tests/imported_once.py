"""The imports of the process from which the tests' ranks and engines are forked. They must start no
thread.

A shell ignores SIGINT for jobs in its background (``nohup make test &``), and their children
inherit that. Commands that a test interrupts must not, so the default handler is restored here: the
fork server gives every fork the handlers that it had after this import.
"""

# ruff: noqa: F401
from __future__ import annotations

import gc
import signal

import torch.distributed.run
import transformers.models.llama.modeling_llama
import transformers.models.llama.tokenization_llama

import ctrl_megatron.checkpoint.store
import ctrl_megatron.metrics.report.page
import ctrl_megatron.models.value
import ctrl_megatron.rollout.hf_engine
import ctrl_megatron.run.train
import ctrl_megatron.steps.ctrl
import ctrl_megatron.steps.dynamic_sampling

signal.signal(signal.SIGINT, signal.default_int_handler)

# Forks share the pages of all this as long as no collection of theirs walks through it.
gc.collect()
gc.freeze()

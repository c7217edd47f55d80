"""What the process imports from which the tests' ranks are forked; it must start no thread."""

from __future__ import annotations

import ctrl_megatron.checkpoint.store
import ctrl_megatron.models.value
import ctrl_megatron.pipeline.ctrl
import ctrl_megatron.pipeline.dynamic_sampling
import ctrl_megatron.pipeline.run
import ctrl_megatron.pipeline.value_model  # noqa: F401

"""vLLM's counters of its requests."""

from __future__ import annotations

from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from ctrl_megatron.rollout.counters import Counters


class VllmCounters(StatLoggerBase):
    """Adds up vLLM's statistics; pass ``factory`` of an object as one of vLLM's loggers."""

    def __init__(self, vllm_config: Any = None, engine_index: int = 0) -> None:
        self.counters: Counters = dict.fromkeys(
            ("prompt_tokens", "cached_tokens", "preemptions", "queued_seconds", "waiting"), 0.0
        )

    def factory(self, vllm_config: Any, engine_index: int = 0) -> VllmCounters:
        """This object, for all of vLLM's engines in this process."""
        return self

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Called by vLLM after every step of the model."""
        if scheduler_stats is not None:
            self.counters["waiting"] = scheduler_stats.num_waiting_reqs
        for request in iteration_stats.finished_requests if iteration_stats is not None else ():
            self.counters["prompt_tokens"] += request.num_prompt_tokens
            self.counters["cached_tokens"] += request.num_cached_tokens
            self.counters["preemptions"] += request.num_preemptions
            self.counters["queued_seconds"] += request.queued_time

    def log_engine_initialized(self) -> None:
        """Nothing to prepare."""

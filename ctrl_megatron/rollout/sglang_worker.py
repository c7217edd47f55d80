"""Our code in SGLang's scheduler processes: reads chunks, reads weights back, draws tokens.

SGLang calls ``run_scheduler`` in each of them (one per tensor rank), through an attribute of its
``Engine``. Where its public interface has no hook, ``patch_sglang`` replaces a method.
"""

# ruff: noqa: E402
from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from ctrl_megatron.models.families import FAMILIES
from ctrl_megatron.rollout.imports import garbage_collection_paused
from ctrl_megatron.rollout.sglang_stand_ins import UnpinnedTorch, install_stand_ins

install_stand_ins()

with garbage_collection_paused():
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed.communication_op import tensor_model_parallel_all_gather
    from sglang.srt.layers.sampler import Sampler, register_sampler_backend
    from sglang.srt.lora import layers as lora_layers
    from sglang.srt.lora.backend import torch_backend
    from sglang.srt.managers.scheduler import Scheduler, run_scheduler_process
    from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS
    from sglang.srt.observability.req_time_stats import SchedulerReqTimeStats
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.utils.weight_checker import WeightChecker

from ctrl_megatron.models.offload import OffloadedTensors
from ctrl_megatron.parallel.store import install_single_address_store
from ctrl_megatron.rollout.held_tensors import (
    HF_NAMES,
    RankExpertWeights,
    engine_hf_checksums,
    name_with_attention,
)
from ctrl_megatron.rollout.sampling import (
    DRAWN_ROWS,
    inverse_sample,
    random_numbers_at,
    truncate_rows,
)
from ctrl_megatron.rollout.sglang_adapters import FUSED, require_loaded_adapters
from ctrl_megatron.rollout.transports import read_chunk, wait_until_copied

SAMPLER = "pytorch"
"""The name of our sampler: the only one that SGLang accepts on a CPU."""
QUEUED = "ctrl_queued_seconds"
"""The seconds that requests of a scheduler have waited, in its internal state."""
_UNREADABLE = ("triton_kernels", "flashinfer_trtllm_moe", "flashinfer_cutlass")
"""Kernels for experts that keep weights in another order; ``triton`` is none of them."""


def run_scheduler(*given: Any, **named: Any) -> None:
    """``run_scheduler_process`` with the changes of ``patch_sglang``."""
    patch_sglang()
    run_scheduler_process(*given, **named)


def _allocate_unpinned(
    dims: tuple[int, ...], dtype: torch.dtype, device: str, *given: Any, **named: Any
) -> torch.Tensor:
    """Host memory in the place of ``alloc_with_host_register``, which needs CUDA."""
    return torch.empty(dims, dtype=dtype, device=device)


def patch_sglang() -> None:
    """Replace SGLang's methods; called once, before a scheduler is made."""
    if not torch.cuda.is_available():
        # The table of chosen experts, and adapters, are pinned for a GPU, wherever the model is.
        ALLOC_MEMORY_FUNCS["cpu"] = _allocate_unpinned
        lora_layers.torch = torch_backend.torch = UnpinnedTorch()
        torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]
    install_single_address_store()
    register_sampler_backend(SAMPLER, SglangSampler)
    changes: Any = (
        (SamplingBatchInfo, "adjusted_from_schedule_batch", apply_request_seeds),
        (ModelConfig, "_get_hf_eos_token_id", no_stop_tokens),
        (WeightChecker, "_compute_checksum", hf_checksums),
        (Scheduler, "_record_scheduler_state_for_paused_engine", wait_while_paused),
        (Scheduler, "ctrl_spare_garbage", freeze_garbage),
        (SchedulerReqTimeStats, "set_forward_entry_time", QueueTimeSum.record_end_of_wait),
        (Scheduler, "get_internal_state", QueueTimeSum.state_with_queue_time),
        (Scheduler, "ctrl_load_chunk", load_chunk),
        (Scheduler, "ctrl_check_adapters", check_adapters),
        (Scheduler, "ctrl_leave", free_memory_of_cpu_engine),
        (Scheduler, "ctrl_come_back", restore_memory_of_cpu_engine),
    )
    for owner, name, function in changes:
        if not name.startswith("ctrl_") and not hasattr(owner, name):
            raise RuntimeError(f"this SGLang has no {owner.__name__}.{name}; use SGLang 0.5.23")
        setattr(owner, name, function)


def apply_request_seeds(self: Any, batch: Any, vocab_size: int) -> None:
    """Set the requests' seeds, which SGLang uses only if all kernels are deterministic."""
    seeds = [request.sampling_params.sampling_seed for request in batch.reqs]
    self.sampling_seed = torch.tensor(seeds, dtype=torch.int64).to(self.device, non_blocking=True)


def no_stop_tokens(self: Any) -> set[int]:
    """No tokens: only a request defines what ends it, not the model's files."""
    return set()


def wait_while_paused(self: Any) -> None:
    """Sleep until a request arrives: SGLang does so when it is idle, but not during a pause."""
    self.maybe_sleep_on_idle()


class QueueTimeSum:
    """Sums the time that requests wait, which SGLang tells only with Prometheus's collectors."""

    seconds = 0.0
    _end: Any = SchedulerReqTimeStats.set_forward_entry_time
    _report: Any = Scheduler.get_internal_state

    @staticmethod
    def record_end_of_wait(request: Any, ts: float | None = None) -> None:
        """A request is computed for the first time, or again after a retraction."""
        before = request.queue_duration_s
        QueueTimeSum._end(request, ts)
        QueueTimeSum.seconds += request.queue_duration_s - before

    @staticmethod
    def state_with_queue_time(scheduler: Any, asked: Any) -> Any:
        """The scheduler's internal state with the sum."""
        found = QueueTimeSum._report(scheduler, asked)
        found.internal_state[QUEUED] = QueueTimeSum.seconds
        return found


class SglangSampler(Sampler):
    """Draws each row with one random number, which depends only on its seed and position.

    SGLang's own seeded draw uses a number for every token of the vocabulary.
    """

    def _sample_from_probs(
        self,
        probs: torch.Tensor,
        sampling_info: SamplingBatchInfo,
        positions: torch.Tensor,
        simple_sampling_case: bool,
    ) -> tuple[torch.Tensor, None]:
        """(B,) int32 tokens; ``probs`` (B, V) fp32 must not change: log-probs are read from
        them."""
        assert sampling_info.sampling_seed is not None
        numbers = random_numbers_at(sampling_info.sampling_seed, positions.to(torch.int64))
        rows = (probs, numbers, sampling_info.top_ps, sampling_info.top_ks)
        drawn = [
            inverse_sample(part if simple_sampling_case else truncate_rows(part, top_p, top_k), own)
            for part, own, top_p, top_k in zip(*(r.split(DRAWN_ROWS) for r in rows), strict=True)
        ]
        return torch.cat(drawn).to(torch.int32), None


def freeze_garbage(self: Any) -> None:
    """RPC: exclude all present objects from garbage collections.

    On a CPU SGLang collects garbage whenever it flushes its cache, after every update: that takes
    half a second and finds nothing in the loaded modules.
    """
    gc.freeze()


def load_chunk(self: Any, chunk: str) -> None:
    """RPC: load a ``WeightChunk`` given as JSON; the model's own loaders cut this rank's share.

    RuntimeError on every rank if one fails: SGLang reports only the first rank's result.
    """
    failure = ""
    try:
        model = _model(self)
        model.load_weights(read_chunk(json.loads(chunk)))
        wait_until_copied(next(model.parameters()).device)
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    failures = [""] * dist.get_world_size(self.tp_cpu_group)
    dist.all_gather_object(failures, failure, group=self.tp_cpu_group)
    if any(failures):
        raise RuntimeError("; ".join(filter(None, failures)))


def check_adapters(self: Any, file: str) -> None:
    """RPC: RuntimeError unless the scheduler has the adapters of a file."""
    require_loaded_adapters(self.tp_worker.model_runner.lora_manager, load_file(file))


def hf_checksums(
    self: Any, skip_tensor_list: Sequence[str] | None = None, *, role: str
) -> dict[str, Any]:
    """Checksums by HF name, on the first tensor rank; replaces SGLang's of its fused layers."""
    model = self._get_model()
    found = engine_hf_checksums(
        model,
        next(model.parameters()).dtype,
        is_first=get_parallel().tp_rank == 0,
        tied=model.config.tie_word_embeddings,
        family=FAMILIES.get(model.config.model_type),
        gather=tensor_model_parallel_all_gather,
        fused=getattr(model, "packed_modules_mapping", FUSED),
        computed_experts=lambda module: rank_expert_weights(module, model.config),
    )
    # Parameters of the module above.
    twice = ".linear_attn.attn."
    return {
        "checksums": {
            name_with_attention(own): sums for own, sums in found.items() if twice not in own
        },
        "per_gpu_checksum": "",
        "parallelism_info": self._parallelism_info(role=role).model_dump(),
    }


def rank_expert_weights(module: Any, config: Any) -> RankExpertWeights:
    """The weights of a ``FusedMoE``; ``config`` is the model's.

    RuntimeError for a kernel whose layout cannot be read back.
    """
    method = module.quant_method
    if any(getattr(method, f"use_{name}") for name in _UNREADABLE):
        raise RuntimeError(
            "SGLang computes experts with a kernel whose weights cannot be read back; set "
            "actor_rollout_ref.rollout.engine_kwargs.moe_runner_backend=triton, or "
            "trainer.verify_weight_sync=false"
        )
    gate_up, numbers = module.w13_weight, None
    if method.w13_swiglu_interleaved:
        gate_up = torch.cat([gate_up[:, 0::2], gate_up[:, 1::2]], dim=1)
    if module.moe_ep_size > 1:
        if module.moe_tp_size > 1:
            raise RuntimeError("SGLang's experts cannot be read back where ep_size < tp_size")
        count = module.num_local_experts
        numbers = torch.arange(count, device=gate_up.device) + count * module.moe_ep_rank
    # On a CPU SGLang pads the width to a multiple of 32 on every rank, behind the last rank's part.
    has_own = hasattr(config, "moe_intermediate_size")
    key = "moe_intermediate_size" if has_own else "intermediate_size"
    width = getattr(config, f"original_{key}", getattr(config, key))
    names = ("w1", "w3", "w2") if config.model_type == "mixtral" else HF_NAMES
    return RankExpertWeights(gate_up, module.w2_weight, numbers, width, names)


def free_memory_of_cpu_engine(self: Any, forget_weights: bool) -> None:
    """RPC, on a CPU: free the cache's memory, and with ``forget_weights`` the weights'.

    On GPUs torch_memory_saver does so inside SGLang.
    """
    runner = self.tp_worker.model_runner
    pool = runner.token_to_kv_pool
    held = {"kv_cache": lambda: (*pool.k_buffer, *pool.v_buffer)}
    if forget_weights:
        held["weights"] = _model(self).parameters
    self.ctrl_away = {tag: OffloadedTensors(tensors, keep=False) for tag, tensors in held.items()}
    for away in self.ctrl_away.values():
        away.offload()


def restore_memory_of_cpu_engine(self: Any, tag: str) -> None:
    """RPC: undo ``free_memory_of_cpu_engine`` for the cache or the weights, which become zeros."""
    if away := self.ctrl_away.pop(tag, None):
        away.onload()


def _model(scheduler: Any) -> Any:
    return scheduler.tp_worker.model_runner.model

"""Speed of a step, relative to the peak of the devices, and its memory."""

from __future__ import annotations

import sys
from collections import Counter

import torch
from tensordict import TensorDict

from ctrl_megatron.config import Config
from ctrl_megatron.errors import ServiceLost
from ctrl_megatron.graph.graph import policy_node_id
from ctrl_megatron.metrics import (
    Gauge,
    device_peak_flops,
    measure_cpu_peak_flops,
    mfu,
    seconds_by_name,
)
from ctrl_megatron.metrics.flops import SQUARE
from ctrl_megatron.models.hf_config import typical_linear_sizes
from ctrl_megatron.parallel.groups import ProcessGroups, RankSet
from ctrl_megatron.resharding.device import DeviceOwner
from ctrl_megatron.rewards.registry import MODEL_REWARD
from ctrl_megatron.rollout.counters import Counters, step_metrics
from ctrl_megatron.rollout.engine import Engine
from ctrl_megatron.rollout.pool import EnginePool
from ctrl_megatron.steps.proxy import ApiProxy
from ctrl_megatron.steps.worker import DAGWorker

_GIB = 2**30


def global_token_count(batch: TensorDict, groups: ProcessGroups) -> int:
    """Tokens of all rows of the global batch. Collective."""
    return sum(groups.gather_data_ranks(int(batch["attention_mask"].sum())))


def step_performance(worker: DAGWorker, batch: TensorDict) -> dict[str, float]:
    """``perf/tokens_per_second`` and ``perf/mfu`` of a step of ``ctrl.add_update_nodes``, the
    metrics ``engine/...``, ``proxy/...`` and ``sandbox/restarts``, and of several engines
    ``perf/engine_balance``.

    MFU counts what the trainer's passes (log-probs, values, updates) computed over the time they
    took, a prompt that rows share once; tokens per second counts every row's whole sequence over
    the whole step. Collective.
    """
    flops, seconds = map(sum, zip(pass_flops_and_seconds(worker), *worker.elsewhere, strict=True))
    return {
        "perf/tokens_per_second": global_token_count(batch, worker.groups)
        / worker.timeline.elapsed(),
        "perf/mfu": mfu(
            flops=flops,
            seconds=seconds,
            devices=1,
            peak=worker.peak_flops,
        ),
        **engine_metrics(worker),
        **api_proxy_metrics(worker),
        **restart_metrics(worker),
        **engine_balance_metric(worker.engine, worker.groups),
    }


def pass_flops_and_seconds(worker: DAGWorker) -> tuple[float, float]:
    """(floating-point operations of this world's passes since the last call, the seconds that they
    took in this step, added up over all its devices). Collective."""
    seconds = seconds_by_name(worker.timeline.phases())
    rewarding = None if worker.reward_model is None else worker.reward_model.model
    total = 0
    for agent in worker.agents:
        models = [agent.actor, agent.reference, agent.value, rewarding]
        # Read once, whoever asks.
        rewarding = None
        local = sum(sum(model.take_flops()) for model in models if model is not None)
        total += sum(agent.groups.gather_data_ranks(local))
    nodes = ("old_log_prob", "ref_log_prob", "actor_update", "values", "critic_update")
    names = [policy_node_id(name, policy) for policy in range(len(worker.agents)) for name in nodes]
    took = sum(seconds.get(f"time/{name}", 0.0) for name in (*names, MODEL_REWARD))
    return total, took * worker.groups.size


def engine_metrics(worker: DAGWorker) -> dict[str, float]:
    """The engines' metrics since the last call (``step_metrics``), on rank 0. Collective."""
    engine = worker.engine if worker.groups.is_first else None

    async def ask() -> dict[str, Counters]:
        return {} if engine is None else await engine.counters()

    try:
        # The step is done and will be recorded, also where a stop was requested meanwhile.
        counted = worker.run_on_leader(ask, "the engines' counters", stoppable=False)
    except ServiceLost as lost:
        worker.device_owner.mark_lost(lost)
        return {}
    before, worker.counted = worker.counted, counted
    return step_metrics(before, counted)


def api_proxy_metrics(worker: DAGWorker) -> dict[str, float]:
    """``proxy/requests``, those to servers of the proxy since the last call, and
    ``proxy/cached_rate``, the share of the revisions that needed none; nothing with another kind of
    proxy. Collective.
    """
    proxy, groups = worker.proxy, worker.groups
    if not isinstance(proxy, ApiProxy):
        return {}
    local = worker.run_on_leader(proxy.take_cache_counts, "the proxy's counters", stoppable=False)
    every = groups.gather_data_ranks(local)
    sent, spared = sum(one.runs for one in every), sum(one.hits + one.joined for one in every)
    rate = {"proxy/cached_rate": spared / (sent + spared)} if sent + spared else {}
    return {"proxy/requests": float(sent), **rate}


def restart_metrics(worker: DAGWorker) -> dict[str, float]:
    """``engine/restarts`` and ``sandbox/restarts``: the restarts of the run since its start, on all
    hosts; nothing for services that have not been started again. Collective.
    """
    restarts = Counter[str]()
    for of_rank in worker.groups.all_gather(worker.restarts()):
        restarts.update(of_rank)
    return {name: count for name, count in restarts.items() if count}


def weights_gauges(device: DeviceOwner) -> list[Gauge]:
    """Which weights the engines got last for each policy that learns, for any thread; nothing
    before a push."""
    every = list(device.pushed.items())
    samples = [({} if role == "actor" else {"agent": role}, number) for role, number in every]
    text = "Finished steps of the weights that the engines got last for the actor."
    return [Gauge("ctrl_weights_version", text, samples)] if samples else []


def engine_balance_metric(engine: Engine | None, groups: ProcessGroups) -> dict[str, float]:
    """``perf/engine_balance``: the fewest tokens that an engine drew since the last call, as a
    share of the most that one drew. Nothing where there is one engine. Collective.
    """
    local = engine.take_drawn_token_counts() if isinstance(engine, EnginePool) else []
    drawn = [sum(parts) for parts in zip(*groups.gather_data_ranks(local), strict=True)]
    return {"perf/engine_balance": min(drawn) / max(drawn)} if any(drawn) else {}


def peak_flops_per_device(config: Config, groups: ProcessGroups) -> float:
    """Mean over the ranks of the peak flop/s of one device. Collective: all ranks measure a CPU at
    the same time, as in training. Warns if a CPU lacks instructions for the configured type."""
    cuda, dtype = groups.device.type == "cuda", config.actor_rollout_ref.model_dtype
    name = torch.cuda.get_device_name() if cuda else "cpu"
    groups.barrier()
    given, path = config.trainer.peak_tflops_per_device, config.actor_rollout_ref.model.path
    sizes = None if cuda or given is not None else typical_linear_sizes(path)
    peak = device_peak_flops(name, configured_tflops=given, dtype=dtype, sizes=sizes or SQUARE)
    if not cuda and dtype != "float32" and groups.is_first:
        plain = measure_cpu_peak_flops("float32")
        if plain > 2 * peak:
            print(
                f"warning: this CPU multiplies {plain / peak:.0f} times faster in float32 than in "
                f"{dtype}; set actor_rollout_ref.model.dtype=float32",
                file=sys.stderr,
            )
    return sum(groups.all_gather(peak)) / groups.size


class DeviceMemory:
    """Measures device memory in the phases of a rank's main thread, which may be nested, and marks
    them for Nsight Systems (NVTX)."""

    def __init__(self) -> None:
        self._open: list[int] = []
        self._found: dict[str, float] = {}

    def begin_phase(self, name: str) -> None:
        torch.cuda.nvtx.range_push(name)
        self._fold_peak()
        self._open.append(0)

    def end_phase(self, name: str) -> None:
        self._fold_peak()
        free, total = torch.cuda.mem_get_info()
        for kind, size in (("peak", self._open.pop()), ("device", total - free)):
            key = f"memory/{name}_{kind}_gib"
            self._found[key] = max(self._found.get(key, 0.0), size / _GIB)
        torch.cuda.nvtx.range_pop()

    def _fold_peak(self) -> None:
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self._open = [max(known, peak) for known in self._open]

    def take_peak_metrics(self, groups: RankSet) -> dict[str, float]:
        """Per phase since the last call, of the rank that has most: ``memory/NAME_peak_gib``, the
        most that PyTorch's tensors took, and ``memory/NAME_device_gib``, what all processes on the
        device, the engine's too, held at its end. Collective.
        """
        found, self._found = self._found, {}
        every = groups.all_gather(found)
        names = dict.fromkeys(name for one in every for name in one)
        return {name: max(one.get(name, 0.0) for one in every) for name in names}


def device_memory(groups: ProcessGroups) -> DeviceMemory | None:
    """A new measurement on a GPU; None on a CPU."""
    return DeviceMemory() if groups.device.type == "cuda" else None

"""The plan of a push from shard to shard for a configuration, and its memory. Pure."""

from __future__ import annotations

from ctrl_megatron.config import Config
from ctrl_megatron.models.shape import AnyShape, ModelShape
from ctrl_megatron.parallel.hosts import hosts_from_identities
from ctrl_megatron.parallel.layout import worlds_of
from ctrl_megatron.resharding.plan import (
    PushPlan,
    engine_cut,
    receiving_ranks_of_engines,
    workers_as_receivers,
)
from ctrl_megatron.resharding.schedule import IN_FLIGHT
from ctrl_megatron.rollout.engine_specs import engine_placement, led_placement
from ctrl_megatron.rollout.transports.nccl import SLOTS


def push_plan(config: Config, shape: AnyShape) -> PushPlan:
    """The plan that brings the actor to the configuration's engines, on GPUs."""
    assert isinstance(shape, ModelShape)  # the configuration refuses others with these media
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    each, tensor = trainer.n_gpus_per_node, rollout.tensor_model_parallel_size
    worlds = worlds_of(trainer.nnodes * each, config)
    every = hosts_from_identities([(str(n // each), None) for n in range(trainer.nnodes * each)])
    visible = each + config.engine_gpus_per_node
    placement = engine_placement(config, every, worlds, visible=visible).of_role("rollout")
    placement = led_placement(placement, every, worlds)
    world, host_of_rank = worlds[0], every.restricted_to_ranks(worlds[0].ranks).of_rank
    takers, hosts = workers_as_receivers(placement, host_of_rank)
    if rollout.placement == "colocated":
        takers, hosts = receiving_ranks_of_engines(placement, host_of_rank)
    return PushPlan(
        shape.without_adapters,
        world.layout,
        engine_cut(rollout.name, tensor, rollout.engine_kwargs, on_cpu=False),
        takers,
        hosts,
        dtype=config.actor_rollout_ref.rollout_dtype,
    )


def push_bucket_bytes(config: Config, shape: AnyShape, rank: int) -> int:
    """Bytes of the buckets of a push on the GPU of ``rank``: with ``cuda_ipc`` those of the worker
    on that GPU, with ``nccl`` the messages that the rank sends; 0 with media in host memory."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.weight_transport not in ("cuda_ipc", "nccl"):
        return 0
    plan, size = push_plan(config, shape), rollout.update_bucket_megabytes << 20
    buckets = plan.buckets(size)
    if rollout.weight_transport == "cuda_ipc":
        return IN_FLIGHT * max(map(plan.max_worker_bytes, buckets))
    number_of = {part: number for number, bucket in enumerate(buckets) for part in bucket}
    sent = [0] * len(buckets)
    for transfer in plan.transfers(rank):
        if transfer.giver == rank:
            sent[number_of[transfer.part]] += transfer.num_bytes
    return IN_FLIGHT * max(sent)


def received_bucket_bytes(config: Config, shape: AnyShape) -> int:
    """Bytes of the buckets in which a worker on a GPU of its own receives weights, which it keeps
    from the first push on. 0 unless ``rollout.weight_transport`` is ``nccl``: other transports put
    the weights into the host's or the ranks' memory."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.weight_transport != "nccl":
        return 0
    plan = push_plan(config, shape)
    sizes = list(map(plan.max_worker_bytes, plan.buckets(rollout.update_bucket_megabytes << 20)))
    # Buckets use the slots in turn, and each slot grows to its largest one.
    return sum(max(sizes[slot::SLOTS], default=0) for slot in range(SLOTS))

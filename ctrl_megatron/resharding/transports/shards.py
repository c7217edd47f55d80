"""From shard to shard through shared memory: every worker of an engine gets only its own bytes."""

from __future__ import annotations

from ctrl_megatron.resharding.transports.shared_memory import SharedMemorySender


class ShardsSender(SharedMemorySender):
    """``SharedMemorySender`` of workers' parts."""

    parts = True

"""Section 6 of siiRL's guide: samples that go from one node to another through a coordinator.

    python -m examples.guide.coordinator

The guide's coordinator is a Ray actor that keeps references to Ray's object store. Here it is an
object of one process, so that ``ray.put``, ``ray.get`` and ``.remote`` fall away, and what it keeps
are the samples themselves. No run needs it: rows go from rank to rank (docs/own_pipeline.md).
"""

from __future__ import annotations

import torch
from tensordict import TensorDict

from ctrl_megatron.pipeline import DataCoordinator, SampleInfo


def Dict2Samples(data: TensorDict) -> list[TensorDict]:
    """The rows of a batch, each with a batch dimension of 1."""
    return list(data.split(1))


def Samples2Dict(samples: list[TensorDict]) -> TensorDict:
    """Rows as one batch."""
    return torch.cat(samples)


class DataFlow:
    """Section 6.5: what a worker of the guide puts and gets."""

    def __init__(self, data_coordinator: DataCoordinator[TensorDict], rollout_n: int) -> None:
        self.data_coordinator, self.rollout_n = data_coordinator, rollout_n
        self.internal_data_cache: dict[str, TensorDict] = {}

    def put_data_to_buffers(
        self,
        key: str,
        data: TensorDict,
        source_dp_size: int,
        dest_dp_size: int,
        enforce_buffer: bool = False,
    ) -> None:
        """Put data into DataCoordinator"""
        # Same source and dest DP size and not forcing buffer, use local cache
        if source_dp_size == dest_dp_size and not enforce_buffer:
            self.internal_data_cache[key] = data
            return
        samples = Dict2Samples(data)
        sample_infos = [
            SampleInfo(
                sum_tokens=int(sample["attention_mask"].sum()),
                uid=str(sample["uid"].item()),
                dict_info={"key": key, "source_dp_size": source_dp_size},
            )
            for sample in samples
        ]
        self.data_coordinator.put_batch(sample_infos, samples, "this machine")

    def get_data_from_buffers(
        self, key: str, cur_dp_size: int, cur_dp_rank: int, train_batch_size: int
    ) -> TensorDict | None:
        """Get data from DataCoordinator"""
        # Check local cache first
        if key in self.internal_data_cache:
            return self.internal_data_cache.pop(key)

        def key_filter(sample_info: SampleInfo) -> bool:
            return sample_info.dict_info.get("key") == key

        adjusted_batch_size = int(train_batch_size * self.rollout_n / cur_dp_size)
        samples = self.data_coordinator.get_batch(
            adjusted_batch_size,
            cur_dp_rank,
            filter_plugin=key_filter,
            balance_partitions=cur_dp_size,
        )
        return Samples2Dict(samples) if samples else None


def shared(lengths: list[int], ranks: int) -> list[TensorDict | None]:
    """Samples of those lengths, in groups of two, on so many data ranks."""
    coordinator = DataCoordinator[TensorDict](nnodes=1, ppo_mini_batch_size=2, world_size=ranks)
    flow = DataFlow(coordinator, rollout_n=2)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    data = TensorDict(
        {"attention_mask": mask, "uid": torch.arange(len(lengths)) // 2},
        batch_size=[len(lengths)],
    )
    flow.put_data_to_buffers("reward", data, source_dp_size=1, dest_dp_size=ranks)
    prompts = len(lengths) // 2
    return [flow.get_data_from_buffers("reward", ranks, rank, prompts) for rank in range(ranks)]


if __name__ == "__main__":
    for rank, mine in enumerate(shared([90, 80, 10, 20, 40, 30, 70, 60], ranks=2)):
        assert mine is not None
        print(f"rank {rank}: {mine['attention_mask'].sum(dim=1).tolist()} tokens")

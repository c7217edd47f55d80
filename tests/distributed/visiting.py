"""What the ranks do whose optimizer state visits the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import te_stand_ins
import torch
from workers import make_policy, policy_loss, start

STEPS = 3
USUAL = {"lr": 1e-3, "total_steps": 10, "clip_grad": 0.5, "eps": 1e-4, "warmup_steps": 2}


def train(
    rank: int,
    layout: dict[str, Any],
    directory: str,
    batch: dict[str, torch.Tensor],
    out: str,
    cases: dict[str, dict[str, Any]],
    te: bool = False,
) -> dict[str, list[Any]]:
    """By case, and where the state is, the metrics of three steps and of another third step from a
    checkpoint of the second; this rank's weights and state after each of both are compared."""
    from ctrl_megatron.checkpoint.sharded import load_sharded, save_sharded
    from ctrl_megatron.models import host_state

    # Some tensors visit together, others alone.
    host_state.PART_BYTES = 20_000
    groups, found = start(layout), {}
    mine = {k: v[groups.place.dp :: groups.layout.data] for k, v in batch.items()}
    with te_stand_ins.installed(te):
        for name, case in cases.items():
            optimizer = USUAL | case.pop("optimizer", {})
            kept: dict[bool, list[torch.Tensor]] = {}
            for on_host in (False, True):
                options = {"optimizer": optimizer | {"on_host": on_host}, "token_budget": 64}
                policy, metrics = make_policy(groups, directory, **options, **case), []
                saved = Path(f"{out}/{name}_{on_host}")
                for number in range(STEPS):
                    if number == STEPS - 1:
                        groups.barrier()
                        saved.mkdir(parents=True, exist_ok=True)
                        save_sharded(policy, saved)
                    metrics.append(policy.step(mine, policy_loss))
                    resting = policy.optimization.offloaded_state
                    assert bool(resting) == on_host and all(part.is_offloaded for part in resting)
                resumed = make_policy(groups, directory, **options, **case)
                load_sharded(resumed, saved)
                metrics.append(resumed.step(mine, policy_loss))
                kept[on_host] = [*_state(policy), *_state(resumed)]
                found.setdefault(name, []).append(
                    [metrics, policy.optimization.adam_and_schedule_steps()]
                )
            assert len(kept[True]) == len(kept[False])
            assert all(torch.equal(a, b) for a, b in zip(kept[True], kept[False], strict=True))
            # One part would be the state itself, which comes and goes.
            assert len(resting) > 1, len(resting)
    return found


def _state(policy: Any) -> list[torch.Tensor]:
    weights = [weight.detach().clone() for weight in policy.strategy.weights()]
    owned = [t for one in policy.optimization.owned_ranges() for t in one.tensors.values()]
    return [*weights, *(policy.current_tensor(tensor).clone() for tensor in owned)]

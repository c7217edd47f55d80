"""What the ranks of the contract of strategies do: the same for each of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from workers import make_policy, make_value_model, policy_loss, start, weighted_loss

STEPS = 3
USUAL = {"lr": 1e-3, "total_steps": 10, "clip_grad": 0.5, "eps": 1e-4, "warmup_steps": 2}


@contextmanager
def gradients_become_weights(policy: Any) -> Iterator[None]:
    """A step in the block puts its gradients in the place of the weights."""

    def step(norm: float) -> dict[str, float]:
        if policy.shape.strategy == "megatron":
            for model in policy.models:
                for weight in model.parameters():
                    weight.copy_(weight.main_grad)
        else:
            for _, shard in policy.optimization._pairs:
                shard.copy_(shard.grad)
        return {"grad_norm": norm}

    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy.optimization, "step", torch.no_grad()(step))
        with torch.enable_grad():
            yield


@torch.no_grad()
def response_logits(policy: Any, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """By row the logits (n, V) before each of its n response tokens, as a pass of ``fsdp`` has
    them."""
    from ctrl_megatron.models.micro_batch import split_into_micro_batches

    strategy, found = policy.strategy, [torch.empty(0)] * len(batch["input_ids"])
    for micro in split_into_micro_batches(
        batch,
        token_budget=policy.options.token_budget,
        shared_prefix=policy.options.shared_prefix,
        multiple=1,
        count=strategy.padded_micro_batch_count,
        device=policy.groups.device,
        apart=not strategy.packs_rows,
    ):
        logits = strategy.forward(micro).squeeze(0)
        if strategy.packs_rows:
            logits = F.linear(logits[micro.predictors], strategy._head.weight)
        for place, number in enumerate(micro.rows):
            found[number] = logits[micro.row_of == place]
    strategy.models[0].reshard()
    return found


def keep(
    rank: int,
    layout: dict[str, Any],
    cases: dict[str, dict[str, Any]],
    batch: dict[str, torch.Tensor],
    out: str,
) -> dict[str, Any]:
    """By case the log-probs of a batch, of ``fsdp`` also the logits, the metrics of three steps and
    whether rows were packed, which they never are with ``apart``. Below ``out`` the weights before,
    the gradients, the weights after three steps, and the weights of a model that continues the
    third step from a checkpoint of the second."""
    from ctrl_megatron.checkpoint.hf import save_hf
    from ctrl_megatron.checkpoint.sharded import load_sharded, save_sharded

    groups, found = start(layout), {}
    mine = {k: v[groups.place.dp :: groups.layout.data] for k, v in batch.items()}
    for name, case in cases.items():
        directory, apart = case.pop("directory"), case.pop("apart", False)

        def model(**optimizer: Any) -> Any:
            chosen = {"token_budget": 64, **case, "optimizer": USUAL | optimizer}  # noqa: B023
            made = make_policy(groups, directory, **chosen)  # noqa: B023
            if apart:  # noqa: B023
                made.strategy.packs_rows = False
            return made

        def save(policy: Any, what: str) -> None:
            save_hf(policy, f"{out}/{what}/{name}", side_files=directory)  # noqa: B023

        policy = model(clip_grad=1e9)
        before, logits = policy.log_probs(batch, 0.7), None
        if policy.shape.strategy == "fsdp":
            logits = response_logits(policy, batch)
        save(policy, "before")
        with gradients_become_weights(policy):
            policy.step(mine, weighted_loss)
        save(policy, "gradients")
        policy, metrics = model(), []
        saved = Path(f"{out}/checkpoint/{name}")
        for number in range(STEPS):
            if number == STEPS - 1:
                policy.offload("weights", "gradients", "optimizer")
                if groups.is_first:
                    saved.mkdir(parents=True)
                groups.barrier()
                save_sharded(policy, saved)
                assert policy.offloaded_parts
            metrics.append(policy.step(mine, policy_loss))
        save(policy, "after")
        resumed = model()
        load_sharded(resumed, saved)
        assert resumed.update_count == STEPS - 1
        metrics.append(resumed.step(mine, policy_loss))
        save(resumed, "resumed")
        found[name] = {
            "log_probs": before,
            "logits": logits,
            "metrics": metrics,
            "packs": policy.strategy.packs_rows,
            "flops": policy.take_flops(),
            "parameters": sum(weight.nbytes for weight in policy.strategy.weights()),
            "moments": sum(tensor.nbytes for tensor in policy.optimization.state_tensors()),
        }
    return found


def step_with_all_rows_on_one_rank(
    rank: int, layout: dict[str, Any], directory: str, batch: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """By strategy the log-probs of this rank's rows, of which only the first data rank has any, and
    the metrics of two steps."""
    groups, found = start(layout), {}
    mine = {k: v[: None if groups.place.dp == 0 else 0] for k, v in batch.items()}
    for strategy in ("megatron", "fsdp"):
        policy = make_policy(groups, directory, strategy=strategy, optimizer=USUAL, token_budget=64)
        log_probs = policy.log_probs(mine)[0]
        found[strategy] = log_probs, [policy.step(mine, policy_loss) for _ in range(2)]
    return found


def longest_rows(
    rank: int,
    layout: dict[str, Any],
    directory: str,
    batch: dict[str, torch.Tensor],
    strategies: tuple[str, ...] = ("megatron", "fsdp"),
) -> dict[str, str]:
    """By strategy why the log-probs of a batch are refused; empty if they are not."""
    groups, found = start(layout), {}
    for strategy in strategies:
        policy, found[strategy] = make_policy(groups, directory, strategy=strategy), ""
        try:
            policy.log_probs(batch)
        except ValueError as error:
            found[strategy] = str(error)
    return found


def resume(
    rank: int,
    layout: dict[str, Any],
    strategy: str,
    directory: str,
    saved: str,
    batch: dict[str, torch.Tensor],
    out: str,
) -> dict[str, float]:
    """The third step from a checkpoint that other ranks, or another strategy, saved."""
    from ctrl_megatron.checkpoint.hf import save_hf
    from ctrl_megatron.checkpoint.sharded import load_sharded

    groups = start(layout)
    mine = {k: v[groups.place.dp :: groups.layout.data] for k, v in batch.items()}
    policy = make_policy(groups, directory, strategy=strategy, optimizer=dict(USUAL))
    load_sharded(policy, Path(saved))
    metrics = policy.step(mine, policy_loss)
    save_hf(policy, out, side_files=directory)
    return metrics


def value_steps(
    rank: int,
    layout: dict[str, Any],
    strategy: str,
    directory: str,
    batch: dict[str, torch.Tensor],
    optimizer: dict[str, Any],
) -> list[dict[str, float]]:
    """The metrics of three steps of two updates each, with the trainer's own loss, of a value model
    that begins with a head of zeros."""
    from ctrl_megatron.steps.losses import ValueLoss

    groups, found = start(layout), []
    mine = {k: v[groups.place.dp :: groups.layout.data] for k, v in batch.items()}
    model = make_value_model(
        groups, directory, strategy=strategy, optimizer=optimizer, token_budget=64
    )
    loss = ValueLoss(0.5, loss_agg_mode="token-mean", response_limit=mine["returns"].shape[1])
    for _ in range(STEPS):
        rows = {**mine, "values": model.values(mine)}
        found += [model.step(rows, loss) for _ in range(2)]
    return found


def masters(
    rank: int, layout: dict[str, Any], directory: str, batch: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Of a model that computes in bfloat16: the types of its shards, the largest difference of
    log-probs to float32, the norms of the first gradient in both, and the median change of a norm's
    weights in a step with the learning rate 1e-5."""
    groups, found, log_probs = start(layout), dict[str, Any](norms={}), {}
    mine = {k: v[groups.place.dp :: groups.layout.data] for k, v in batch.items()}
    for dtype in ("float32", "bfloat16"):
        optimizer = {"lr": 1e-5, "total_steps": 10, "weight_decay": 0.0}
        policy = make_policy(
            groups, directory, strategy="fsdp", dtype=dtype, optimizer=optimizer, token_budget=64
        )
        log_probs[dtype] = policy.log_probs(batch, 0.7)[0]
        norms = next(w for p, w in policy.shards() if "norm" in p.name)
        before = norms.clone()
        found["norms"][dtype] = policy.step(mine, weighted_loss)["grad_norm"]
        found["change"] = float((norms - before).abs().median())
        found["types"] = {weight.dtype for weight in policy.strategy.weights()}
    found["gap"] = float((log_probs["bfloat16"] - log_probs["float32"]).abs().max())
    return found


def refuse(rank: int, directory: str) -> str:
    """What is said of a model whose attention would be computed with another scale."""
    from ctrl_megatron.errors import UserError
    from ctrl_megatron.models import fsdp

    attend = fsdp.attend_packed
    fsdp.attend_packed = lambda q, k, v, packed, scale: attend(q, k, v, packed, 2 * scale)
    groups = start({})
    with pytest.raises(UserError) as refused:
        make_policy(groups, directory, strategy="fsdp")
    return str(refused.value)

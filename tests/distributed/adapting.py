"""Ranks with adapters, for ``test_adapters``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import te_stand_ins
import torch
import workers
from safetensors.torch import load_file

TARGETS = ("all-linear",)


def lora_policy(
    groups: Any,
    directory: str,
    adapters: str | None,
    *,
    targets: tuple[str, ...],
    strategy: Any = "megatron",
    shared_outer: bool = False,
    **options: Any,
) -> Any:
    """A policy with the adapters of a PEFT file, or with new ones."""
    from ctrl_megatron.checkpoint.hf import load_hf
    from ctrl_megatron.models.hf_config import read_shape
    from ctrl_megatron.models.lora import shape_with_adapters
    from ctrl_megatron.models.policy import Policy
    from ctrl_megatron.types import Lora

    shape = shape_with_adapters(
        read_shape(directory, strategy),
        Lora(rank=3, alpha=5.0, targets=targets, shared_outer=shared_outer),
    )
    optimizer = options.pop(
        "optimizer", {"lr": 1e-2, "total_steps": 10, "clip_grad": 1e9, "eps": 1e-3}
    )
    policy = Policy(shape, groups, workers._model_options(optimizer, options))
    load_hf(policy, directory)
    if adapters is not None:
        given = load_file(adapters)
        with torch.no_grad():
            for param, weight in policy.shards():
                for piece in param.pieces if param.trained else ():
                    weight[piece.shard_slices] = given[piece.hf][piece.hf_slices]
    policy.start_optimizer()
    return policy


def adapted_run(
    rank: int,
    layout: dict,
    directories: dict[str, str],
    adapters: dict[str, str],
    batch: dict,
    out: str,
    targets: tuple[str, ...] = TARGETS,
    te: bool = False,
    strategy: str = "megatron",
    shared_outer: bool = False,
    **build: Any,
) -> dict[str, Any]:
    """Per model: log-probs with and without adapters, the gradients of the first of three steps
    (as PEFT's files), the adapters after the third, and the merged model before it; below ``out``.
    """
    with te_stand_ins.installed(te):
        kind = {"targets": targets, "strategy": strategy, "shared_outer": shared_outer}
        return _adapted_run(layout, directories, adapters, batch, out, kind, build)


def _adapted_run(
    layout: dict,
    directories: dict[str, str],
    adapters: dict[str, str],
    batch: dict,
    out: str,
    kind: dict,
    build: dict,
) -> dict[str, Any]:
    from ctrl_megatron.checkpoint.hf import save_adapters, save_hf

    groups, found = workers.start(layout), {}
    mine = {k: v[groups.place.dp :: groups.layout.data] for k, v in batch.items()}
    for name, directory in directories.items():
        policy = lora_policy(
            *(groups, directory, adapters[name]),
            **{**kind, "token_budget": 64, "build": build},
        )
        gradients = _kept_gradients(policy)
        result = {"on": policy.log_probs(batch)[0]}
        with policy.without_adapters():
            result["off"] = policy.log_probs(batch)[0]
        save_hf(policy, f"{out}/{name}/merged", side_files=directory)
        result["frozen"] = [w.detach().clone() for p, w in policy.shards() if not p.trained]
        for step in range(3):
            result[f"step {step}"] = policy.step(mine, workers.weighted_loss)
            if step == 0:
                kept = [w.detach().clone() for p, w in policy.shards() if p.trained]
                trained = [w for p, w in policy.shards() if p.trained]
                with torch.no_grad():
                    for weight in trained:
                        weight.copy_(gradients(weight))
                    save_adapters(policy, f"{out}/{name}/gradients")
                    for weight, own in zip(trained, kept, strict=True):
                        weight.copy_(own)
        save_adapters(policy, f"{out}/{name}/stepped")
        still = [w.detach() for p, w in policy.shards() if not p.trained]
        assert all(map(torch.equal, still, result.pop("frozen")))
        elements = sum(w.numel() for p, w in policy.shards() if p.trained)
        held = sum(
            t.numel() for own in policy.optimization.owned_ranges() for t in own.tensors.values()
        )
        assert held <= 2 * elements
        found[name] = result
    return found


def _kept_gradients(policy: Any) -> Callable[[Any], torch.Tensor]:
    """The gradient that the last optimizer step had for a weight."""
    if policy.shape.strategy == "megatron":
        return lambda weight: weight.main_grad
    kept, step = {}, policy.optimization.step

    def keeping(norm: float) -> dict[str, float]:
        for _, shard in policy.optimization._pairs:
            kept[id(shard)] = shard.grad.clone()
        return step(norm)

    policy.optimization.step = keeping
    # A rank may have no row of a small matrix.
    return lambda weight: kept.get(id(weight), weight)


def save_or_resume(
    rank: int,
    layout: dict,
    directory: str,
    checkpoints: str,
    resume: bool,
    batch: dict,
    out: str,
    strategy: Any = "megatron",
) -> dict[str, Any]:
    """Two steps of a bfloat16 policy and of a value model with adapters and a checkpoint, or a
    resume from it; then exports and a third step below ``out``."""
    from ctrl_megatron.checkpoint.hf import load_hf, save_adapters, save_hf
    from ctrl_megatron.checkpoint.store import CheckpointStore
    from ctrl_megatron.models.hf_config import read_shape
    from ctrl_megatron.models.lora import shape_with_adapters
    from ctrl_megatron.models.shape import value_model_shape
    from ctrl_megatron.models.value import ValueModel
    from ctrl_megatron.types import Lora

    groups = workers.start(layout)
    mine = {k: v[groups.place.dp :: groups.layout.data] for k, v in batch.items()}
    policy = lora_policy(
        groups, directory, None, targets=TARGETS, strategy=strategy, token_budget=64
    )
    shape = value_model_shape(read_shape(directory, strategy))
    optimizer = {"lr": 1e-2, "total_steps": 10, "eps": 1e-3}
    value = ValueModel(
        shape_with_adapters(shape, Lora(rank=2, alpha=2.0, targets=("q_proj", "down_proj"))),
        groups,
        workers._model_options(optimizer, {"token_budget": 64}),
    )
    load_hf(value, directory)
    value.start_optimizer()
    models = {"policy": policy, "value": value}
    loss = workers.weighted_loss, value_loss
    store = CheckpointStore(Path(checkpoints), keep=1, side_files=Path(directory))
    if resume:
        assert store.load_newest(models, "auto", parts=()) is not None
    else:
        for _ in range(2):
            for model, own in zip(models.values(), loss, strict=True):
                model.step(mine, own)
        store.save(models, 2, {"step": 2})
    steps = {}
    for (name, model), own in zip(models.items(), loss, strict=True):
        save_hf(model, f"{out}/{name}/merged", side_files=directory)
        save_adapters(model, f"{out}/{name}/saved")
        steps[name] = model.step(mine, own)
        save_adapters(model, f"{out}/{name}/stepped")
    return steps


def value_loss(values: torch.Tensor, rows: dict, counts: Any) -> tuple[torch.Tensor, dict]:
    """The squared distance to the advantages."""
    gaps = (values - rows["advantages"]) * rows["response_mask"]
    return (gaps**2).sum() / counts.tokens, {}


def random_adapters(
    directory: Path, out: Path, targets: tuple[str, ...] = TARGETS, *, shared_outer: bool = False
) -> Path:
    """Adapters of which no matrix is zero, as one file."""
    from safetensors.torch import save_file

    from ctrl_megatron.models.hf_config import read_model_shape
    from ctrl_megatron.models.lora import shape_with_adapters
    from ctrl_megatron.models.rules import ADAPTED, hf_shapes
    from ctrl_megatron.types import Lora

    shape = shape_with_adapters(
        read_model_shape(directory),
        Lora(rank=3, alpha=5.0, targets=targets, shared_outer=shared_outer),
    )
    generator = torch.Generator().manual_seed(5)
    tensors = {
        name: 0.2 * torch.randn(size, generator=generator)
        for name, size in hf_shapes(shape).items()
        if name.startswith(ADAPTED)
    }
    save_file(tensors, out)
    return out

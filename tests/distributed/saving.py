"""The functions that the processes of ``test_saved_state`` run."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import te_stand_ins
import torch
from te_stand_ins import SPECS
from workers import ddp_options, make_policy, policy_loss, start

OPTIMIZER = {"lr": 1e-3, "total_steps": 10, "warmup_steps": 3, "clip_grad": 0.5, "eps": 1e-4}


def has_te_names(model: Any) -> bool:
    """Whether the model's norms are fused into the linear layers behind them."""
    fused = ".self_attention.linear_qkv.layer_norm_weight"
    return any(name.endswith(fused) for name, _ in model.models[0].named_parameters())


def make_directory(folder: Path, groups: Any) -> Path:
    """The new folder, once it is there on every rank."""
    if groups.is_first:
        folder.mkdir(parents=True)
    groups.barrier()
    return folder


def state_of(model: Any) -> dict[str, torch.Tensor]:
    """Everything that a checkpoint must bring back, copied: weights, main weights, moments."""
    found = {}
    for index, chunk in enumerate(model.models):
        for name, parameter in chunk.named_parameters():
            found[f"{index}.{name}"] = parameter.detach().clone()
    for number, inner in enumerate(model.optimization.optimizer.chained_optimizers):
        adam = inner.optimizer
        for place, group in enumerate(adam.param_groups):
            for order, parameter in enumerate(group["params"]):
                key = f"optimizer {number} group {place} {order}"
                found[key] = parameter.detach().clone()
                for name, value in adam.state.get(parameter, {}).items():
                    found[f"{key} {name}"] = torch.as_tensor(value).clone()
    return found


def assert_equal_states(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    wrong = [name for name, value in left.items() if not torch.equal(value, right[name])]
    assert not wrong, wrong


def save_and_go_on(
    rank: int, layout: dict, cases: dict[str, dict[str, Any]], batch: dict, out: str
) -> dict[str, dict[str, list[dict[str, float]]]]:
    """For both layer specs and every case: steps, a checkpoint, and the next steps of the model and
    of its copy.

    A new model that has loaded the checkpoint must equal the old one to the last bit, also after
    two more steps. ``out/SPEC_away`` is saved from host memory. What each spec has saved the other
    loads and saves again, below ``out/read_by_SPEC``. The metrics of all steps are returned.
    """
    from ctrl_megatron.checkpoint.sharded import load_sharded, save_sharded

    groups = start(layout)
    mine = {k: v[groups.place.dp :: groups.layout.data] for k, v in batch.items()}
    results: dict[str, dict[str, list[dict[str, float]]]] = {spec: {} for spec in SPECS}

    def make(case: dict[str, Any]) -> Any:
        options = {k: v for k, v in case.items() if k not in ("directory", "steps", "ddp")}
        optimizer = OPTIMIZER | options.pop("optimizer", {})
        with ddp_options(**case.get("ddp", {})):
            return make_policy(
                groups, case["directory"], optimizer=optimizer, token_budget=64, **options
            )

    def load(case: dict[str, Any], folder: Path) -> Any:
        copy = make(case)
        with torch.no_grad():
            for parameter in (p for chunk in copy.models for p in chunk.parameters()):
                parameter.fill_(7.0)
        load_sharded(copy, folder)
        return copy

    def save(model: Any, folder: Path) -> None:
        save_sharded(model, make_directory(folder, groups))

    for spec, te in SPECS.items():
        with te_stand_ins.installed(te):
            for name, case in cases.items():
                model = make(case)
                assert has_te_names(model) == te
                metrics = [model.step(mine, policy_loss) for _ in range(case.get("steps", 2))]
                folder = Path(out) / spec / name
                save(model, folder)
                # Nothing comes back for what is saved from host memory.
                model.offload("weights", "gradients", "optimizer")
                save(model, Path(out) / f"{spec}_away" / name)
                assert model.offloaded_parts == {"weights", "gradients", "optimizer"}
                model.onload("weights", "optimizer")
                copy = load(case, folder)
                assert_equal_states(state_of(model), state_of(copy))
                further = [model.step(mine, policy_loss) for _ in range(2)]
                assert further == [copy.step(mine, policy_loss) for _ in range(2)]
                assert_equal_states(state_of(model), state_of(copy))
                results[spec][name] = metrics + further
    for spec, te in SPECS.items():
        (other,) = SPECS.keys() - {spec}
        with te_stand_ins.installed(te):
            for name, case in cases.items():
                save(load(case, Path(out) / other / name), Path(out) / f"read_by_{spec}" / name)
    return results


def keep_buffers(rank: int, layout: dict, directory: str, batch: dict, out: str) -> None:
    """A bfloat16 model whose layers have a float32 buffer each: what ``directory`` has of it is in
    a checkpoint, in a model that has loaded this, and in what is exported after a step."""
    from ctrl_megatron.checkpoint.hf import save_hf
    from ctrl_megatron.checkpoint.sharded import load_sharded, save_sharded
    from ctrl_megatron.models import megatron, rules, shards
    from ctrl_megatron.models.rules import ParamRule
    from ctrl_megatron.models.shape import HfTensor
    from ctrl_megatron.resharding import plan

    def with_buffers(*given: Any) -> list[torch.nn.Module]:
        chunks = build(*given)
        for chunk in chunks:
            for layer in chunk.decoder.layers:
                layer.mlp.register_buffer("bias", torch.full((5,), torch.nan))
        return chunks

    def with_rule(shape: Any) -> tuple[ParamRule, ...]:
        name, layers = "layers.{i}.mlp.bias", tuple(range(shape.num_layers))
        hf = HfTensor(f"model.{name}", (5,))
        return (
            *known(shape),
            ParamRule(
                "layer", f"decoder.{name}", (hf,), "replicated", layers=layers, buffer="float32"
            ),
        )

    build, known, groups = megatron.build_chunks, rules.param_rules, start(layout)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(megatron, "build_chunks", with_buffers)
        for module in (rules, shards, plan):
            patch.setattr(module, "param_rules", with_rule)
        make = partial(
            make_policy, groups, directory, optimizer=OPTIMIZER, token_budget=64, dtype="bfloat16"
        )
        model = make()
        mine = {k: v[groups.place.dp :: groups.layout.data] for k, v in batch.items()}
        model.step(mine, policy_loss)
        folder = make_directory(Path(out) / "checkpoint", groups)
        save_sharded(model, folder)
        copy = make()
        for _, buffer in copy.models[0].named_buffers():
            buffer.fill_(7)
        load_sharded(copy, folder)
        assert_equal_states(state_of(model), state_of(copy))
        save_hf(copy, Path(out) / "exported", side_files=directory)


def go_on(
    rank: int,
    layout: dict,
    directory: str,
    batch: dict,
    out: str,
    te: bool = False,
    load: str | None = None,
    steps: int = 2,
    router: dict[str, float] | None = None,
) -> list[dict[str, float]]:
    """Load a checkpoint or start from ``directory``; ``out/first``, steps, ``out/last``, an export.

    Only a model that was started from ``directory`` takes steps before ``out/first``.
    """
    from ctrl_megatron.checkpoint.hf import save_hf
    from ctrl_megatron.checkpoint.sharded import load_sharded, save_sharded
    from ctrl_megatron.models.router import RouterOptions

    groups = start(layout)
    mine = {k: v[groups.place.dp :: groups.layout.data] for k, v in batch.items()}
    with te_stand_ins.installed(te):
        model = make_policy(
            groups,
            directory,
            optimizer=OPTIMIZER,
            token_budget=64,
            router=RouterOptions(**router or {}),
        )
        assert has_te_names(model) == te
        metrics = []
        if load is not None:
            load_sharded(model, Path(load))
        else:
            metrics = [model.step(mine, policy_loss) for _ in range(steps)]
        for name in ("first", "last"):
            save_sharded(model, make_directory(Path(out) / name, groups))
            if name == "first":
                metrics += [model.step(mine, policy_loss) for _ in range(2)]
        save_hf(model, f"{out}/hf", side_files=directory)
    return metrics


def save_aside(rank: int, layout: dict, directory: str, batch: dict, out: str) -> None:
    """A checkpoint is written while a step is taken; before it the same weights are exported, and
    before that what ``directory`` is converted to without a model.

    Then one rank cannot write; its error reaches all, and nothing is published.
    """
    with pytest.MonkeyPatch.context() as patch:
        _save_aside(start(layout), directory, batch, Path(out), patch)


def _save_aside(
    groups: Any, directory: str, batch: dict, out: Path, patch: pytest.MonkeyPatch
) -> None:
    import multiprocessing.process

    from ctrl_megatron.checkpoint import run_directory, sharded, store
    from ctrl_megatron.checkpoint.convert import hf_to_megatron
    from ctrl_megatron.checkpoint.hf import save_hf

    def refuse(_: Any) -> None:
        raise AssertionError("saving started a process; a script without a main guard would hang")

    patch.setattr(multiprocessing.process.BaseProcess, "start", refuse)
    converted = out / "from_hf"
    if groups.is_first:
        hf_to_megatron(Path(directory), converted)
    groups.barrier()
    frozen = make_policy(groups, directory)
    with torch.no_grad():
        for parameter in (p for chunk in frozen.models for p in chunk.parameters()):
            parameter.fill_(7.0)
    sharded.load_sharded(frozen, converted / store.POLICY_FOLDER)
    save_hf(frozen, out / "and_back", side_files=converted / store.HF_FOLDER)

    mine = {k: v[groups.place.dp :: groups.layout.data] for k, v in batch.items()}
    model = make_policy(groups, directory, optimizer=OPTIMIZER, dtype="bfloat16", token_budget=64)
    model.step(mine, policy_loss)

    checkpoints = out / "checkpoints"
    saved = store.CheckpointStore(
        checkpoints, keep=2, side_files=Path(directory), asynchronous=True
    )
    exported = saved.export_hf({"policy": model}, 1)
    assert exported == out / "hf_exports/global_step_1"
    save_hf(model, out / "parts", side_files=directory, file_bytes=40_000)
    before = state_of(model)

    gate, write = threading.Event(), store.write_snapshot

    def late(*arguments: Any) -> dict[str, str]:
        assert gate.wait(60)
        return write(*arguments)

    patch.setattr(store, "write_snapshot", late)
    model.offload("weights", "gradients", "optimizer")
    saved.save({"policy": model}, 1, {"sampler": [1, 2]})
    assert saved.pop_save_report() is None and saved.finished_checkpoints() == []
    model.step(mine, policy_loss)
    groups.barrier()
    assert saved.pop_save_report() is None and saved.finished_checkpoints() == []
    gate.set()
    report = saved.wait_for_save()
    assert report is not None and report.path == checkpoints / "global_step_1"
    assert 0 < report.blocked < report.seconds
    written = sum(groups.all_gather(sharded.take_snapshot(model, copy=False).num_bytes))
    numbers = sum(p.numel() for p in make_policy(groups, directory).models[0].parameters())
    if groups.layout.world_size == 1:
        assert report.num_bytes == written == numbers * (2 + 3 * 4)
    assert groups.layout.world_size * report.num_bytes < 1.5 * written
    assert saved.pop_save_report() is None

    copy = make_policy(groups, directory, optimizer=OPTIMIZER, dtype="bfloat16", token_budget=64)
    loaded = saved.load({"policy": copy}, saved.finished_checkpoints()[0])
    assert loaded.state == {
        "run": run_directory.run_identity(out),
        "step": 1,
        "sampler": [1, 2],
    }
    assert loaded.remarks == ()
    assert_equal_states(before, state_of(copy))

    saved.save({"policy": model}, 2, {})
    assert (last := saved.wait_for_save()) is not None and last.step == 2
    groups.barrier()
    assert [c.step for c in saved.finished_checkpoints()] == [1, 2]

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    if groups.rank == groups.layout.world_size - 1:
        patch.setattr(sharded.TensorParts, "part", full)
    saved.save({"policy": model}, 3, {})
    with pytest.raises(OSError, match="No space left"):
        saved.wait_for_save()
    groups.barrier()
    assert [c.step for c in saved.finished_checkpoints()] == [1, 2]
    assert {path.name for path in checkpoints.iterdir()} == {"global_step_1", "global_step_2"}

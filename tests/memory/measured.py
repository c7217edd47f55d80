"""Bytes that real models really use, counted in a separate process.

Layouts of many ranks are built rank by rank under torch's fake process group: its collectives
return at once, and all memory is allocated as it would be. Models too large for a host are built
on the meta device.
"""

from __future__ import annotations

import dataclasses
import json
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked_ranks import fork_context
from patience import PATIENCE
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ctrl_megatron.models.hf_config import parse_model_shape
from ctrl_megatron.models.lora import shape_with_adapters
from ctrl_megatron.models.shape import ModelShape, value_model_shape
from ctrl_megatron.parallel.hosts import Hosts
from ctrl_megatron.parallel.layout import Layout
from ctrl_megatron.types import Lora

aten = torch.ops.aten

SMALL = {
    "model_type": "qwen2",
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 256,
    "intermediate_size": 688,
    "max_position_embeddings": 1024,
    "num_attention_heads": 8,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 2048,
}
ROWS, PROMPT, RESPONSE = 4, 8, 120


def small(**changes: Any) -> ModelShape:
    """A model that takes milliseconds; ``lora`` is the rank of its adapters."""
    rank = changes.pop("lora", 0)
    lora = Lora(rank=rank, alpha=1.0, targets=("all-linear",)) if rank else None
    return shape_with_adapters(parse_model_shape({**SMALL, **changes}), lora)


def count(function: str, *arguments: Any, folder: Path) -> Any:
    """``function`` of this module in a forked process; what it returns goes through JSON."""
    result, log = folder / "result.json", folder / "log.txt"
    process = fork_context().Process(target=_run, args=(function, arguments, str(result), str(log)))
    process.start()
    process.join(PATIENCE)
    if process.is_alive():
        process.kill()
        process.join()
        pytest.fail(f"{function} did not end within {PATIENCE} s\n{log.read_text()[-5000:]}")
    assert process.exitcode == 0, log.read_text()[-5000:]
    return json.loads(result.read_text())


def _run(function: str, arguments: Sequence[Any], result: str, log: str) -> None:
    import os
    import sys
    import warnings

    with open(log, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    warnings.filterwarnings("ignore")
    sys.path.insert(0, str(Path(__file__).parent))
    from ctrl_megatron.parallel import vocab

    vocab._on_cpu = lambda device: False  # whole rows of logits, as on a GPU
    torch.set_num_threads(1)
    torch.manual_seed(0)
    Path(result).write_text(json.dumps(globals()[function](*arguments)))


@contextmanager
def fake_rank(layout: Layout, rank: int, device: str) -> Iterator[Any]:
    """The groups of one rank of ``layout``, all others being absent."""
    from datetime import timedelta

    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.transformer.moe import token_dispatcher

    from ctrl_megatron.parallel import cpu_platform
    from ctrl_megatron.parallel.groups import (
        GroupMaker,
        ProcessGroups,
        megatron_groups,
        set_megatron_globals,
    )

    cpu_platform.install_cpu_platform()
    with pytest.MonkeyPatch.context() as patch:
        make_group, gather = dist.new_group, token_dispatcher.gather_from_sequence_parallel_region
        patch.setattr(dist, "new_group", lambda *a, **k: make_group(*a, **{**k, "backend": "fake"}))
        # Every absent rank has as many tokens for each expert as this one.
        patch.setattr(
            token_dispatcher,
            "gather_from_sequence_parallel_region",
            lambda rows, group, **sizes: (
                gather(rows, group=group, **sizes)
                if rows.is_floating_point()
                else rows.repeat(group.size())
            ),
        )
        if device == "meta":
            patch.setattr(torch.cuda, "current_device", lambda: torch.device("meta"))
            for name, stands_for in list(cpu_platform._TYPE_NAMES.items()):
                meta = name.replace("torch.", "torch.meta.")
                patch.setitem(cpu_platform._TYPE_NAMES, meta, stands_for)
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
        place = layout.coordinates(rank)
        maker = GroupMaker(range(layout.world_size), timedelta(seconds=60))
        groups = megatron_groups(layout, maker)
        set_megatron_globals(groups)
        tensor_parallel.model_parallel_cuda_manual_seed(
            1, tp_rank=place.tp, ep_rank=place.ep, etp_rank=place.etp
        )
        try:
            given = {
                "layout": layout,
                "ranks": tuple(range(layout.world_size)),
                "rank": rank,
                "place": place,
                "device": torch.device(device),
                "hosts": Hosts(names=("host",), of_rank=(0,) * layout.world_size),
                "megatron": groups,
                "alone": maker.create_own_group([(rank,)]),
            }
            # Models are built and run without the groups of host memory.
            names = [field.name for field in dataclasses.fields(ProcessGroups)]
            yield ProcessGroups(**{name: given.get(name) for name in names})
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


def build(kind: str, shape: ModelShape, groups: Any, *, chunk: int = 128, **options: Any) -> Any:
    """A trained model with its optimizer's state."""
    from ctrl_megatron.models.build import BuildOptions
    from ctrl_megatron.models.optimizer import OptimizerOptions
    from ctrl_megatron.models.policy import Policy
    from ctrl_megatron.models.strategy import ModelOptions
    from ctrl_megatron.models.value import ValueModel

    distributed = options.pop("distributed", True)
    built = {"policy": Policy, "value": ValueModel}[kind](
        shape,
        groups,
        ModelOptions(
            build=BuildOptions(**options),
            token_budget=4096,
            logprob_chunk=chunk,
            optimizer=OptimizerOptions(lr=1e-4, total_steps=9, distributed=distributed),
        ),
    )
    for model in built.models:
        for weight in model.parameters():
            if weight.device.type != "meta":
                weight.data.normal_(0, 0.02)
    built.start_optimizer()
    return built


def tokens(shared: bool) -> int:
    """Tokens of the batch; if ``shared``, with half of each response as a prompt of all rows."""
    if shared:
        return RESPONSE // 2 + PROMPT + ROWS * RESPONSE // 2
    return ROWS * (PROMPT + RESPONSE)


def batch(rows: int = ROWS, *, shared: bool = False) -> dict[str, torch.Tensor]:
    """Rows of equal length, mostly responses."""
    ids = torch.randint(0, 200, (rows, PROMPT + RESPONSE))
    if shared:
        ids[:, : PROMPT + RESPONSE // 2] = ids[0, : PROMPT + RESPONSE // 2]
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "response_mask": torch.ones(rows, RESPONSE // 2, dtype=torch.bool),
        }
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "response_mask": torch.ones(rows, RESPONSE, dtype=torch.bool),
    }


def held(model: Any) -> dict[str, int]:
    """Bytes of a trained model's parameters, gradients, master weights and moments, and the number
    of parameters that are trained."""
    adams = [inner.optimizer for inner in model.optimization.optimizer.chained_optimizers]
    weights = {storage(p) for m in model.models for p in m.parameters()}
    stepped = [p for adam in adams for group in adam.param_groups for p in group["params"]]
    moments = [
        value
        for adam in adams
        for state in adam.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim()
    ]
    return {
        "count": sum(p.numel() for m in model.models for p in m.parameters() if p.requires_grad),
        "parameters": total([p for m in model.models for p in m.parameters()]),
        "gradients": total([buffer.grad_data for buffer in buffers_of(model)]),
        "master": total([p for p in stepped if storage(p) not in weights]),
        "moments": total(moments),
    }


def buffers_of(model: Any) -> list[Any]:
    """Megatron's buffers of gradients and, with the distributed optimizer, of parameters."""
    both = ((*chunk.buffers, *chunk.expert_parallel_buffers) for chunk in model.strategy.chunks)
    return [buffer for buffers in both for buffer in buffers]


def let_adam_make_its_state(model: Any) -> None:
    """In place of what was made for it: one step of Adam itself, on gradients that are 0."""
    for inner in model.optimization.optimizer.chained_optimizers:
        inner.optimizer.state.clear()
        for group in inner.optimizer.param_groups:
            for weight in group["params"]:
                weight.grad = torch.zeros_like(weight)
        inner.optimizer.step()


def held_with_adams_own_state(model: Any) -> dict[str, int]:
    """``held``, which is the same with the state that was made at the start."""
    at_start = held(model)
    let_adam_make_its_state(model)
    own = held(model)
    assert at_start == own
    return own


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def total(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of the storages below, each once."""
    return sum({storage(t): t.untyped_storage().nbytes() for t in tensors}.values())


# Functions that the tests call


def large_ranks(config: str, layout: dict[str, int], ranks: Sequence[int]) -> list[dict[str, int]]:
    """Every rank of ``ranks`` of a large model, built on the meta device."""
    shape, whole = parse_model_shape(json.loads(Path(config).read_text())), Layout(**layout)
    found = []
    for rank in ranks:
        with fake_rank(whole, rank, "meta") as groups, torch.device("meta"):
            model = build("policy", shape, groups)
        found.append(held_with_adams_own_state(model))
    return found


def small_ranks(cases: Sequence[dict[str, Any]]) -> list[dict[str, int]]:
    """Bytes of the first rank of each stage in host memory, for every case and stage."""
    found = []
    for case in cases:
        layout = Layout(**case["layout"])
        for pp in range(layout.pipeline):
            rank = layout.rank(tp=0, pp=pp, dp=0)
            with fake_rank(layout, rank, "cpu") as groups:
                model = build("policy", small(**case["shape"]), groups, **case["options"])
                found.append(held_with_adams_own_state(model))
    return found


def passes(cases: Sequence[dict[str, Any]]) -> list[dict[str, int]]:
    """Of rank 0, where about as many tokens go to each expert: bytes saved for the backward pass,
    the peak of an update's passes and of a pass without gradients, beside what the model holds; the
    operations of an update's passes as torch counts them, and those of the whole model copy as the
    model counts them."""
    return [_pass(**case) for case in cases]


def _pass(
    layout: dict[str, Any], shape: dict[str, Any], options: dict[str, Any], kind: str = "policy"
) -> dict[str, int]:
    from megatron.core.transformer.moe.router import TopKRouter

    whole, described = Layout(**layout), small(**shape)
    if kind == "value":
        described = value_model_shape(described)
    with fake_rank(whole, 0, "cpu") as groups:
        shared = kind == "shared"
        model = build("policy" if shared else kind, described, groups, **options)
        for module in (m for chunk in model.models for m in chunk.modules()):
            if isinstance(module, TopKRouter):
                module.config.moe_router_force_load_balancing = True
        saved: dict[int, Any] = {}
        own = resident(model)

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if storage(tensor) not in own:
                saved[storage(tensor)] = tensor.untyped_storage()
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with hooks, LiveBytes(own):
            loss = _forward(model, shared)
        kept = sum(piece.nbytes() for piece in saved.values())
        saved.clear()
        del loss
        model.take_flops()
        with LiveBytes(own) as update:
            _forward(model, shared).backward()
        _, counted = model.take_flops()
        with LiveBytes(own) as inference, torch.no_grad():
            _forward(model, shared)
    return {
        "kept": kept,
        "update": update.peak,
        "inference": inference.peak,
        "flops": update.flops,
        "counted_flops": counted,
    }


def _forward(model: Any, shared: bool) -> torch.Tensor:
    """The loss of one micro-batch, on a stage that is not the last the sum of its output."""
    from functools import partial

    from ctrl_megatron.models.forward_step import run_stage

    micro = model._micro_batches(batch(shared=shared), 4096, backward=True)[0]
    module, output = run_stage(model.strategy.chunks[0], micro)
    if not module.post_process:
        return output.sum()
    head = model._head
    if not model.shape.value_head:
        head = partial(head, temperature=1.0)
    vectors = head(module, micro, output)
    return sum(micro.to_rows(vector).sum() for vector in vectors) + 0.0 * output.sum()


def one_real_step(options: dict[str, Any]) -> dict[str, int]:
    """A whole optimizer step of one process over gloo, through the product's own way."""
    from ctrl_megatron.models.loss_scale import GlobalCounts
    from ctrl_megatron.parallel.groups import initialize_groups, shutdown_groups

    def loss(log_probs: Any, entropy: Any, rows: Any, counts: GlobalCounts) -> Any:
        return -(log_probs * rows["response_mask"]).sum() / counts.tokens, {}

    groups = initialize_groups(Layout(), seed=1, timeout_seconds=60)
    model = build("policy", small(), groups, **options)
    rows = batch()
    model.step(rows, loss)  # moments exist from now on
    before = held(model)
    with LiveBytes(resident(model)) as live:
        model.step(rows, loss)
    assert before == held(model)
    shutdown_groups()
    return {**before, "peak": live.peak}


def resident(model: Any) -> set[int]:
    """The storages that a model holds between its passes."""
    tensors = [p for m in model.models for p in (*m.parameters(), *m.buffers())]
    for buffer in buffers_of(model):
        tensors += [t for t in (buffer.param_data, buffer.grad_data) if t is not None]
    for inner in model.optimization.optimizer.chained_optimizers:
        tensors += [p for group in inner.optimizer.param_groups for p in group["params"]]
        for state in inner.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return {storage(tensor) for tensor in tensors}


_PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    """What ``func`` returns. Products of bfloat16 are computed in float32: their values do not
    matter here, and processors without instructions for bfloat16 take 13 times as long for them.
    """
    if func not in _PRODUCTS or args[-1].dtype is not torch.bfloat16:
        return func(*args, **kwargs)
    return func(*(arg.float() for arg in args), **kwargs).bfloat16()


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that operations make and that still exist, their peak, and the
    floating-point operations of matrix products, by torch's formulas."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()
        self._known, self._sizes = known, dict[int, int]()
        self._now = self.peak = self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = _computed(func, args, kwargs or {})
        if count := flop_registry.get(func._overloadpacket):
            self.flops += count(*args, **(kwargs or {}), out_val=out)
        for tensor in tree_leaves(out):
            if not isinstance(tensor, torch.Tensor):
                continue
            below = tensor.untyped_storage()
            if below._cdata in self._known or below._cdata in self._sizes:
                continue
            self._sizes[below._cdata] = below.nbytes()
            self._now += below.nbytes()
            weakref.finalize(below, self._gone, below._cdata)
        self.peak = max(self.peak, self._now)
        return out

    def _gone(self, identity: int) -> None:
        self._now -= self._sizes.pop(identity, 0)

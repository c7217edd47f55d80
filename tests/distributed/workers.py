"""The functions that the processes of the distributed tests run."""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import te_stand_ins
import torch

warnings.filterwarnings("ignore")
sys.path.insert(0, str(Path(__file__).parents[2]))


_joined: list[tuple[dict[str, Any], Any]] = []


def start(layout: dict[str, Any]) -> Any:
    """Join the world with the given layout; a process does so once."""
    from ctrl_megatron.parallel.groups import initialize_groups
    from ctrl_megatron.parallel.layout import Layout

    if not _joined:
        _joined.append((layout, initialize_groups(Layout(**layout), seed=1, timeout_seconds=60)))
    joined, groups = _joined[0]
    assert joined == layout
    return groups


def with_each_spec(rank: int, of: str, out: str, **arguments: Any) -> dict[str, Any]:
    """The results of the function ``of`` by name of ``SPECS``: with the package's layers and
    torch's AdamW, and with the stand-ins for Transformer Engine. Files are written below
    ``out/SPEC``."""
    found = {}
    for spec, te in te_stand_ins.SPECS.items():
        with te_stand_ins.installed(te):
            found[spec] = _named(of)(rank, out=f"{out}/{spec}", **arguments)
    return found


def in_turn(rank: int, layout: dict, out: str, calls: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """By name the results of several functions of one world, each with its own arguments; files are
    written below ``out/NAME``."""
    return {
        name: _named(name)(rank, layout=layout, out=f"{out}/{name}", **given)
        for name, given in calls.items()
    }


def on_hosts(groups: Any, of_rank: tuple[int, ...]) -> Any:
    """``groups`` as if the ranks were on these hosts."""
    from ctrl_megatron.parallel.hosts import Hosts

    names = tuple(f"host {number}" for number in range(1 + max(of_rank)))
    return replace(groups, hosts=Hosts(names=names, of_rank=of_rank))


def push_shards(
    rank: int,
    layout: dict[str, Any],
    directory: str,
    of_rank: tuple[int, ...],
    readers: tuple[int, ...],
    workers: int,
    transport: str,
    spanning: bool = False,
) -> list[list[dict[str, torch.Tensor]]]:
    """Two pushes from shard to shard, of the weights and of their doubles, into two engines on each
    of the ``readers``, or into one that spans them. Returns what each worker on this host has after
    each push, engine by engine, with the tensors for checksums last; empty on ranks that are not
    the first of a host."""
    from ctrl_megatron.parallel.placement import place_engines
    from ctrl_megatron.resharding import buckets as exchange
    from ctrl_megatron.resharding.plan import EngineCut, EngineLayout
    from ctrl_megatron.resharding.push import checksum_whole_weights
    from ctrl_megatron.resharding.sources import ModelSource
    from ctrl_megatron.resharding.transports import sender_class
    from ctrl_megatron.rollout.transports.cuda_ipc import CudaIpcReceiver
    from ctrl_megatron.rollout.transports.nccl import NcclReceiver
    from ctrl_megatron.rollout.transports.shared_memory import SharedMemoryReceiver

    # A host passes on one piece of a message while the next arrives.
    exchange._PIECE_BYTES = 700
    groups = on_hosts(start(layout), of_rank)
    policy = make_policy(groups, directory)
    each = workers // len(readers) if spanning else 2 * workers
    there = [range(each if host in readers else 0) for host in range(1 + max(of_rank))]
    taken = EngineLayout(
        dtype="float32",
        bucket_bytes=3000,
        placement=place_engines(there, tensor=workers),
        cut=EngineCut(tensor=workers),
    )
    source, sender = ModelSource(policy, taken), sender_class(transport)(groups)
    kinds: Any = {
        "shared_memory": SharedMemoryReceiver,
        "shards": SharedMemoryReceiver,
        "cuda_ipc": CudaIpcReceiver,
        "nccl": NcclReceiver,
    }
    placed = taken.placement.engines_on(groups.host_index) if groups.is_first_of_host else ()
    receivers = [
        (reader, kinds[transport](lambda own=worker: (own, workers)))
        for reader, engine in enumerate(placed)
        for worker, host in enumerate(engine.host_of_worker)
        if host == groups.host_index
    ]
    here = placed and taken.placement.engines_served_by(groups.host_index)
    threads = ThreadPoolExecutor(max(1, len(receivers)))

    class Engines:
        """Read a bucket at the last moment at which a sender must leave it alone."""

        def __init__(self) -> None:
            self.offered: list[Any] = []
            self.chunks: list[Any] = []
            self.waited: list[int] = []
            self.began: dict[int, list[Any]] = {}
            self.got: list[dict[str, torch.Tensor]] = [{} for _ in range(len(receivers) + 1)]

        def offer(self, bucket: Any) -> None:
            self.offered.append(bucket)
            # All workers of an engine get the chunk from the host that serves it.
            first = groups.hosts.first_rank(readers[0] if spanning else groups.host_index)
            self.chunks.append(groups.all_gather(bucket.chunk)[first])
            if not bucket.chunk["tensors"]:
                # With it the workers meet the trainer, which waits for them.
                self.begin(len(self.offered) - 1)

        def begin(self, number: int) -> None:
            chunk = json.loads(json.dumps(self.chunks[number]))
            self.began[number] = [
                threads.submit(self.take, place, receiver, {**chunk, "reader": reader})
                for place, (reader, receiver) in enumerate(receivers)
            ]

        def take(self, place: int, receiver: Any, chunk: Any) -> None:
            for name, tensor in receiver.tensors(chunk):
                self.got[place][name] = tensor.clone()

        def read(self, number: int) -> None:
            for earlier in range(number + 1):
                if earlier not in self.began:
                    self.begin(earlier)
                for reading in self.began[earlier]:
                    reading.result()

        def wait_until_read(self, number: int) -> None:
            self.waited.append(number)
            self.read(number)

        def add(self, name: str, tensor: torch.Tensor) -> None:
            self.got[-1][name] = tensor.clone()

        def wait(self) -> None:
            """What ``add`` was given is copied."""

    found: list[list[dict[str, torch.Tensor]]] = []
    for _ in range(2):
        engines = Engines()
        with sender.send(source, engines.wait_until_read) as buckets:
            for bucket in buckets:
                engines.offer(bucket)
                for name, tensor in bucket.tensors if here else ():
                    engines.add(name, tensor)
            full = [n for n, bucket in enumerate(engines.offered) if bucket.chunk["tensors"]]
            # Three buckets are in memory at the same time.
            assert [n for n in engines.waited if n in full] == full[:-3]
            engines.read(full[-1])
        if engines.offered[0].unseen:
            checksum_whole_weights(source, sender, engines if here else None)  # type: ignore[arg-type]
        got = engines.got
        found.append(got)
        with torch.no_grad():
            for model in policy.models:
                for parameter in model.parameters():
                    parameter.mul_(2)
    return found


def push_two_policies(
    rank: int, layout: dict[str, Any], directory: str, transport: str, workers: int
) -> list[tuple[int, int, int]]:
    """Pushes of two policies in turn into one engine, of which every rank has a worker or none.
    Returns what this rank has after each push: pieces of memory, those that it has mapped of
    others, and page-locked pieces."""
    from ctrl_megatron.parallel.placement import place_engines
    from ctrl_megatron.resharding.plan import EngineCut, EngineLayout
    from ctrl_megatron.resharding.sources import ModelSource
    from ctrl_megatron.resharding.transports import cuda_ipc, sender_class
    from ctrl_megatron.rollout import device_memory
    from ctrl_megatron.rollout.transports import cuda_ipc as receiving
    from ctrl_megatron.rollout.transports.shared_memory import SharedMemoryReceiver

    class Driver(device_memory.HostMemory):
        """As CUDA's, its memory may be freed only while nobody has it mapped."""

        pieces: ClassVar[dict[int, bytes]] = {}
        mapped: ClassVar[dict[int, bytes]] = {}

        def allocate(self, size: int) -> torch.Tensor:
            memory = super().allocate(size)
            self.pieces[memory.data_ptr()] = self.get_handle(memory)
            return memory

        def free(self, memory: torch.Tensor) -> None:
            assert self.pieces.pop(memory.data_ptr()) not in self.mapped.values()
            super().free(memory)

        def open_handle(self, handle: bytes, size: int) -> torch.Tensor:
            memory = super().open_handle(handle, size)
            self.mapped[memory.data_ptr()] = handle
            return memory

        def close(self, memory: torch.Tensor) -> None:
            del self.mapped[memory.data_ptr()]

    class Runtime:
        locked: ClassVar[set[int]] = set()

        def cudaHostRegister(self, place: int, size: int, flags: int) -> int:
            self.locked.add(place)
            return 0

        def cudaHostUnregister(self, place: int) -> int:
            self.locked.remove(place)
            return 0

    groups = start(layout)
    policy, sender, found = make_policy(groups, directory), sender_class(transport)(groups), []
    kind: Any = {"shards": SharedMemoryReceiver, "cuda_ipc": receiving.CudaIpcReceiver}[transport]
    receiver = kind(lambda: (rank % workers, workers))
    # The buckets of the second are larger.
    sources = [
        ModelSource(
            policy,
            EngineLayout(
                dtype="float32",
                bucket_bytes=size,
                placement=place_engines([range(workers)], tensor=workers),
                cut=EngineCut(tensor=workers),
            ),
        )
        for size in (3000, 40_000)
    ]

    def load(chunk: Any) -> None:
        for _ in receiver.tensors({**json.loads(json.dumps(chunk)), "reader": 0}):
            pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_ipc, "memory_driver", lambda name: Driver())
        patch.setattr(receiving, "memory_driver", lambda name: Driver())
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "cudart", Runtime)
        for source in (*sources, *sources, *sources):
            with sender.send(source, lambda number: None) as buckets:
                for bucket in buckets:
                    load(bucket.chunk)
            found.append((len(Driver.pieces), len(Driver.mapped), len(Runtime.locked)))
    return found


def push_to_restarted(rank: int, layout: dict[str, Any], directory: str) -> tuple[list[Any], str]:
    """Pushes over messages to a worker, to the same one, to one that was started anew, and to one
    with another library. Returns for each of the first three how many chunks it got and whether it
    has every tensor, and the refusal of the last."""
    from ctrl_megatron.resharding.plan import EngineLayout
    from ctrl_megatron.resharding.sources import ModelSource
    from ctrl_megatron.resharding.transports import sender_class
    from ctrl_megatron.rollout.transports import nccl

    groups = start(layout)
    policy = make_policy(groups, directory)
    source = ModelSource(policy, EngineLayout(dtype="float32", bucket_bytes=20000))
    sender = sender_class("nccl")(groups)

    def push(receiver: Any) -> tuple[int, bool]:
        found: list[str] = []
        futures: list[Any] = []
        with ThreadPoolExecutor(1) as thread:

            def read(chunk: Any) -> None:
                found.extend(name for name, _ in receiver.tensors(chunk))

            with sender.send(source, lambda number: futures[number].result()) as buckets:
                for bucket in buckets:
                    futures.append(thread.submit(read, bucket.chunk))
        return len(futures), found == [spec.name for spec in source.specs]

    first, other = nccl.NcclReceiver(), nccl.NcclReceiver()
    found = [push(first), push(first), push(other)]
    nccl.library_version = lambda library: "gloo of another torch"
    try:
        push(other)
    except ValueError as error:
        return found, str(error)
    return found, "nothing was refused"


def push_quantised(
    rank: int,
    layout: dict[str, Any],
    directory: str,
    of_rank: tuple[int, ...],
    readers: tuple[int, ...],
) -> dict[str, dict[str, torch.Tensor]]:
    """By source the tensors in 8 bits that a push brings to this host: of a model, and of its
    directory; empty on ranks that are not the first of a host."""
    from ctrl_megatron.parallel.placement import place_engines
    from ctrl_megatron.resharding.plan import EngineLayout
    from ctrl_megatron.resharding.sources import DirectorySource, ModelSource
    from ctrl_megatron.resharding.transports import sender_class

    groups = on_hosts(start(layout), of_rank)
    there = [range(int(host in readers)) for host in range(1 + max(of_rank))]
    engines = EngineLayout(
        dtype="float32",
        bucket_bytes=50000,
        placement=place_engines(there, tensor=1),
        quantised=True,
    )
    sender = sender_class("shared_memory")(groups)
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, source in (
        ("model", ModelSource(make_policy(groups, directory), engines)),
        ("directory", DirectorySource(directory, engines, groups)),
    ):
        got = found[name] = {}
        with sender.send(source, lambda bucket: None) as buckets:
            for bucket in buckets:
                if groups.is_first_of_host and groups.host_index in readers:
                    got |= {name: tensor.clone() for name, tensor in bucket.tensors}
                groups.barrier()
    sender.close()
    return found


@dataclass
class _Pushing:
    """A rank that is a host of its own, and the engine of the first one."""

    policy: Any
    engine: Any
    """None on the other ranks."""
    loop: Any
    push: Callable[..., None]
    """Pushes the policy's weights; takes a version and options of ``resharding.push``."""


def _pushing(
    layout: dict[str, Any],
    directory: str,
    address: Any,
    cut: dict[str, Any],
    transport: str,
    *,
    bucket_bytes: int,
    limit: float,
) -> _Pushing:
    """Every rank is a host, and the first has the engine at ``address``."""
    from ctrl_megatron.background import BackgroundLoop
    from ctrl_megatron.parallel.placement import place_engines
    from ctrl_megatron.parallel.stop import StopFlag
    from ctrl_megatron.parallel.waiting import WaitRules
    from ctrl_megatron.resharding.plan import EngineCut, EngineLayout
    from ctrl_megatron.resharding.push import push
    from ctrl_megatron.resharding.sources import ModelSource
    from ctrl_megatron.resharding.transports import sender_class
    from ctrl_megatron.rollout.client import RemoteEngine

    joined = start(layout)
    groups, workers = on_hosts(joined, tuple(range(joined.layout.world_size))), cut["tensor"]
    policy = make_policy(groups, directory)
    engines = EngineLayout(
        dtype="float32",
        bucket_bytes=bucket_bytes,
        placement=place_engines([range(workers)], tensor=workers),
        cut=EngineCut(**cut),
    )
    source, sender = ModelSource(policy, engines), sender_class(transport)(groups)
    loop, waiting = BackgroundLoop(), WaitRules(groups=groups, stop=StopFlag(), limit=limit)
    engine = RemoteEngine(address) if groups.is_first else None
    return _Pushing(policy, engine, loop, partial(push, source, engine, loop, sender, waiting))


def push_into(
    rank: int,
    layout: dict[str, Any],
    directory: str,
    address: Any,
    cut: dict[str, Any],
    transport: str,
) -> dict[str, dict[str, str]]:
    """Every rank is a host, and the first has the engine at ``address``: two verified pushes from
    shard to shard, of the weights and of their doubles. Returns version -> the engine's checksums,
    empty on the other ranks."""
    own = _pushing(layout, directory, address, cut, transport, bucket_bytes=20000, limit=200.0)
    found: dict[str, dict[str, str]] = {}
    for version in ("sent", "doubled"):
        own.push(version=version, verify=True)
        if own.engine is not None:
            found[version] = own.loop.run(own.engine.checksums())
        with torch.no_grad():
            for model in own.policy.models:
                for parameter in model.parameters():
                    parameter.mul_(2)
    if own.engine is not None:
        own.loop.run(own.engine.close())
    return found


def push_until_killed(
    rank: int,
    layout: dict[str, Any],
    directory: str,
    address: Any,
    cut: dict[str, Any],
    transport: str,
    folder: str,
) -> str:
    """Every rank is a host, and the first has the engine at ``address``: pushes without an end of
    ``version@N``, which is N times the directory's weights. ``folder`` gets every rank's process
    id, and rank 0's time when it is about to send version 2. Returns what ended the pushes."""
    from ctrl_megatron.errors import ServiceLost

    own = _pushing(layout, directory, address, cut, transport, bucket_bytes=4000, limit=100.0)
    whole = [(p, p.detach().clone()) for model in own.policy.models for p in model.parameters()]
    (Path(folder) / f"pid{rank}").write_text(str(os.getpid()))
    for number in itertools.count(1):
        with torch.no_grad():
            for parameter, before in whole:
                parameter.copy_(before * number)
        if number == 2 and rank == 0:
            (Path(folder) / "begins").touch()
        try:
            own.push(version=f"version@{number}")
        except ServiceLost as lost:
            return str(lost)
    raise AssertionError


def make_policy(
    groups: Any,
    directory: str,
    *,
    strategy: Any = "megatron",
    optimizer: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """A policy with the weights of the HF ``directory``."""
    from ctrl_megatron.models.hf_config import read_shape
    from ctrl_megatron.models.policy import Policy

    model = Policy(read_shape(directory, strategy), groups, _model_options(optimizer, options))
    return _filled(model, directory)


def make_value_model(
    groups: Any,
    directory: str,
    *,
    strategy: Any = "megatron",
    optimizer: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """A value model with the weights of the HF ``directory``, of either kind."""
    from ctrl_megatron.models.hf_config import read_shape
    from ctrl_megatron.models.shape import value_model_shape
    from ctrl_megatron.models.value import ValueModel

    shape = value_model_shape(read_shape(directory, strategy))
    return _filled(ValueModel(shape, groups, _model_options(optimizer, options)), directory)


def _model_options(optimizer: dict[str, Any] | None, options: dict[str, Any]) -> Any:
    from ctrl_megatron.models.build import BuildOptions
    from ctrl_megatron.models.optimizer import OptimizerOptions
    from ctrl_megatron.models.strategy import ModelOptions

    build = BuildOptions(dtype=options.pop("dtype", "float32"), **options.pop("build", {}))
    return ModelOptions(
        build=build, optimizer=OptimizerOptions(**optimizer) if optimizer else None, **options
    )


def _filled(model: Any, directory: str) -> Any:
    from ctrl_megatron.checkpoint.hf import load_hf

    load_hf(model, directory)
    if model.options.optimizer:
        model.start_optimizer()
    return model


@contextmanager
def ddp_options(**changed: Any) -> Iterator[None]:
    """Models that are built in the block reduce their gradients in another way."""
    from ctrl_megatron.models import megatron

    usual = megatron.DistributedDataParallelConfig
    with pytest.MonkeyPatch.context() as patch:
        make = lambda **given: usual(**{**given, **changed})  # noqa: E731
        patch.setattr(megatron, usual.__name__, make)
        yield


def parity(
    rank: int,
    layout: dict,
    directories: dict[str, str],
    batch: dict,
    temperature: float,
    out: str,
    **options: Any,
) -> dict[str, Any]:
    """Per family the log-probs and entropies of the batch; every model exported below ``out``.
    ``options`` are the models'."""
    from ctrl_megatron.checkpoint.hf import save_hf

    groups, results = start(layout), {}
    for family, directory in directories.items():
        given = {"token_budget": 64, "logprob_chunk": 7, **options}
        policy = make_policy(groups, directory, **given)
        results[family] = policy.log_probs(batch, temperature)
        # All rows in one micro-batch; and a separate budget that no row fits.
        for one, many in zip(
            policy.log_probs(batch, temperature, token_budget=10**6), results[family], strict=True
        ):
            torch.testing.assert_close(one, many, atol=1e-5, rtol=0)
        with pytest.raises(ValueError, match="more than the token budget of 1"):
            policy.log_probs(batch, temperature, token_budget=1)
        # No group is cut by either budget.
        twice, _ = policy.take_flops()
        policy.options = replace(policy.options, shared_prefix=False)
        for one, many in zip(policy.log_probs(batch, temperature), results[family], strict=True):
            torch.testing.assert_close(one, many, atol=1e-5, rtol=0)
        apart, updates = policy.take_flops()
        assert twice / 2 < apart and updates == 0
        save_hf(policy, f"{out}/{family}", side_files=directory)
    return results


def waits_for_counts(rank: int, layout: dict, directory: str, batch: dict) -> int:
    """How often numbers of tokens are taken to the host by the experts of one pass."""
    from megatron.core.transformer.moe import token_dispatcher

    options = {"token_budget": 10**6, "build": {"overrides": {"moe_grouped_gemm": True}}}
    policy = make_policy(start(layout), directory, **options)
    move = token_dispatcher.maybe_move_tensor_to_cpu
    with mock.patch.object(token_dispatcher, "maybe_move_tensor_to_cpu", wraps=move) as moved:
        policy.log_probs(batch, 1.0)
    return moved.call_count


def policy_loss(log_probs, entropy, rows, counts):
    """A clipped policy loss with entropy and KL terms, normalised by tokens."""
    mask = rows["response_mask"].float()
    ratio = (log_probs - rows["old_log_probs"]).exp()
    advantages = rows["advantages"]
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    kl = (rows["ref_log_prob"] - log_probs).exp() - (rows["ref_log_prob"] - log_probs) - 1
    total = loss - 0.01 * entropy + 0.05 * kl
    mean = (total * mask).sum() / counts.tokens
    return mean, {"kl": (kl.detach() * mask).sum() / counts.tokens}


def weighted_loss(log_probs, entropy, rows, counts):
    """Minus the mean of the responses' log-probs, weighted by the advantages."""
    weighted = log_probs * rows["advantages"] * rows["response_mask"]
    return -weighted.sum() / counts.tokens, {}


def gradients(
    rank: int,
    layout: dict,
    directories: dict[str, str],
    batch: dict,
    out: str,
    **options: Any,
) -> None:
    """The gradients of ``weighted_loss``, saved as models below ``out``: of packed rows that share
    prompts, and of rows apart. ``options`` are the models'."""
    groups = start(layout)
    mine = {k: v[groups.place.dp :: groups.layout.data] for k, v in batch.items()}
    optimizer = {"lr": 1e-3, "total_steps": 10, "clip_grad": 1e9}
    for family, directory in directories.items():
        for way, shared in (("shared", True), ("apart", False)):
            given = {"token_budget": 64, **options, "shared_prefix": shared}
            policy = make_policy(groups, directory, optimizer=optimizer, **given)
            policy.step(mine, weighted_loss)
            save_gradients(policy, f"{out}/{way}/{family}", directory)


def replayed(
    rank: int,
    layout: dict,
    directories: dict[str, str],
    batch: dict,
    routes: dict[str, torch.Tensor],
    recompute: bool,
    out: str,
) -> dict[str, Any]:
    """Per family: the log-probs by the routers' own choices, those recorded, and the log-probs when
    these and the ``routes`` are replayed; and the rates of an update on the latter, whose gradients
    are saved as models below ``out``."""
    groups, results = start(layout), {}
    optimizer = {"lr": 1e-3, "total_steps": 10, "clip_grad": 1e9}
    options = {"token_budget": 40, "logprob_chunk": 7}
    if recompute:
        options["build"] = {"recompute_granularity": "full"}
    for family, directory in directories.items():
        policy = make_policy(groups, directory, optimizer=optimizer, **options)
        own, _ = policy.log_probs(batch)
        # In other micro-batches than those in which they are replayed.
        again, _, recorded = policy.log_probs_and_routes(batch, 1.0, 60)
        same, _ = policy.log_probs({**batch, "expert_routes": recorded})
        given = {**batch, "expert_routes": routes[family]}
        other, _ = policy.log_probs(given)
        mine = {k: v[groups.place.dp :: groups.layout.data] for k, v in given.items()}
        stepped = policy.step(mine, weighted_loss)
        rates = {name: value for name, value in stepped.items() if name.startswith("moe/replay")}
        save_gradients(policy, f"{out}/{family}", directory)
        results[family] = (own, again, recorded, same, other, rates)
    return results


def replayed_engine(
    rank: int, layout: dict, directory: str, prompts: list[list[int]], tokens: int, dtype: str
) -> dict[str, Any]:
    """Texts that the engine hf draws, and the log-probs of engine and trainer, the latter by its
    routers' own choices and by the engine's; with the choices of both."""
    from ctrl_megatron.rollout.engine import EngineSpec
    from ctrl_megatron.rollout.hf_engine import HfEngine
    from ctrl_megatron.steps.batch import pad_rows
    from ctrl_megatron.steps.routes import route_tensor
    from ctrl_megatron.types import SamplingParams

    groups = start(layout)
    drawn: list[Any] = []
    if rank == 0:

        async def draw() -> list[Any]:
            spec = EngineSpec(name="hf", model_path=directory, dtype=dtype, returns_routes=True)
            engine = await HfEngine.build(spec)
            answers = await engine.generate(prompts, SamplingParams(max_tokens=tokens, seed=3))
            await engine.close()
            return [answer for (answer,) in answers]

        drawn = asyncio.run(draw())
    drawn = groups.all_gather(drawn)[0]
    batch = dict(pad_rows(prompts, [c.token_ids for c in drawn], pad_token_id=0).items())
    policy = make_policy(groups, directory, dtype=dtype, token_budget=1024)
    own, _, chosen = policy.log_probs_and_routes(batch, 1.0)
    routes = torch.full_like(chosen, -1)
    for row, completion in enumerate(drawn):
        columns = batch["attention_mask"][row].nonzero().flatten()
        ids = route_tensor(completion.routes)
        assert len(ids) == len(columns) - 1
        routes[row, columns[:-1]] = ids
    replayed, _ = policy.log_probs({**batch, "expert_routes": routes})
    theirs = torch.zeros_like(own)
    for row, completion in enumerate(drawn):
        theirs[row, : len(completion.log_probs)] = torch.tensor(completion.log_probs)
    return {
        **{"own": own, "replayed": replayed, "engine": theirs, "mask": batch["response_mask"]},
        **{"chosen": chosen, "routes": routes, "attended": batch["attention_mask"].bool()},
    }


def taught_gradients(
    rank: int,
    layout: dict,
    student: str,
    teacher: str,
    batch: dict,
    other: dict,
    cases: dict[str, dict[str, Any]],
    apart: tuple[str, ...],
    temperature: float,
    strategy: str,
    out: str,
) -> None:
    """The gradients of the divergences of ``batch``, weighted by its advantages, from a teacher
    that reads the rows ``other``; saved as models below ``out``, per case. Those named in ``apart``
    are computed a second time, without shared prompts."""
    from ctrl_megatron.config.distillation import Distillation
    from ctrl_megatron.models.teaching import StudentHead

    def loss(log_probs, entropy, divergence, rows, counts):
        return (divergence * rows["advantages"]).sum() / counts.tokens, {}

    groups = start(layout)
    # Tokens that were drawn with the weights that learn have no other log-probs.
    drawn = {name: values for name, values in batch.items() if name != "old_log_probs"}
    mine, read = (
        {name: values[groups.place.dp :: groups.layout.data] for name, values in rows.items()}
        for rows in (drawn, other)
    )
    optimizer = {"lr": 1e-3, "total_steps": 10, "clip_grad": 1e9}
    frozen = make_policy(groups, teacher, strategy=strategy, token_budget=80, logprob_chunk=7)
    for case, given in cases.items():
        keys = Distillation(teacher="reference", **given)
        fields = frozen.teacher_pass(read, keys, temperature)
        weight = frozen.output_weight() if keys.estimator == "full" else None
        for shared in (True, False) if case in apart else (True,):
            policy = make_policy(
                groups,
                student,
                strategy=strategy,
                optimizer=optimizer,
                token_budget=64,
                logprob_chunk=7,
                shared_prefix=shared,
            )
            rows = {**mine, **fields}
            head = StudentHead(
                strategy=policy.strategy,
                keys=keys,
                temperature=temperature,
                rows=rows,
                teacher_weight=weight,
            )
            if strategy == "fsdp":
                _keep_gradients(policy)
            policy.step(rows, loss, temperature, head=head)
            save_gradients(policy, f"{out}/{'shared' if shared else 'apart'}/{case}", student)


def coupled(
    rank: int,
    layout: dict,
    directories: dict[str, str],
    batch: dict,
    temperature: float,
    out: str,
    **options: Any,
) -> dict[str, Any]:
    """Per model the coupled scores and mean entropies of the batch, and below ``out`` the model
    itself and the gradients of ``weighted_loss`` on its scores. ``options`` are the models'."""
    from ctrl_megatron.checkpoint.hf import save_hf

    groups, results = start(layout), {}
    mine = {k: v[groups.place.dp :: groups.layout.data] for k, v in batch.items()}
    optimizer = {"lr": 1e-3, "total_steps": 10, "clip_grad": 1e9}
    for name, directory in directories.items():
        given = {"token_budget": 70, "logprob_chunk": 7, **options}
        policy = make_policy(groups, directory, optimizer=optimizer, **given)
        results[name] = policy.log_probs(batch, temperature)
        for one, many in zip(
            policy.log_probs(batch, temperature, token_budget=10**6), results[name], strict=True
        ):
            torch.testing.assert_close(one, many, atol=1e-5, rtol=0)
        with pytest.raises(ValueError, match="the masks of its rows"):
            policy.log_probs({k: v for k, v in batch.items() if k != "masked"})
        save_hf(policy, f"{out}/{name}", side_files=directory)
        policy.step(mine, weighted_loss, temperature)
        save_gradients(policy, f"{out}/{name}_gradients", directory)
    return results


def _keep_gradients(policy: Any) -> None:
    """Keep the gradients of the next step of a model that frees them."""
    norm = policy.optimization.grad_norm

    def kept() -> float:
        for weight in policy.models[0].parameters():
            weight.main_grad = weight.grad.clone()
        return norm()

    policy.optimization.grad_norm = kept


def save_gradients(policy: Any, out: str, directory: str) -> None:
    """Export the gradients of the last step in the place of the weights."""
    from ctrl_megatron.checkpoint.hf import save_hf

    with torch.no_grad():
        for model in policy.models:
            for weight in model.parameters():
                weight.copy_(weight.main_grad)
    save_hf(policy, out, side_files=directory)


def no_loss(log_probs, entropy, rows, counts):
    """A loss without a gradient."""
    return 0.0 * log_probs.sum(), {}


def router_gradients(
    rank: int, layout: dict, directory: str, batch: dict, options: dict[str, float], out: str
) -> dict[str, float]:
    """The metrics of a step with no other losses than the routers'; its gradients are exported
    in the place of parameters.
    Every data rank has one micro-batch."""
    from ctrl_megatron.models.router import RouterOptions

    groups = start(layout)
    mine = {k: v[groups.place.dp :: groups.layout.data] for k, v in batch.items()}
    policy = make_policy(
        groups,
        directory,
        optimizer={"lr": 1e-3, "total_steps": 10, "clip_grad": 1e9},
        token_budget=4096,
        shared_prefix=False,
        router=RouterOptions(**options),
    )
    metrics = policy.step(mine, no_loss)
    save_gradients(policy, out, directory)
    return metrics


def buffer_bytes(chunk: Any) -> int:
    """Bytes that the gradient buffers of Megatron's DistributedDataParallel hold."""
    return sum(buffer.grad_data.untyped_storage().size() for buffer in chunk.buffers)


def train(
    rank: int,
    layout: dict,
    directory: str,
    batch: dict,
    out: str,
    variants: dict[str, dict[str, Any]],
    te: bool = False,
) -> dict[str, Any]:
    """Three optimizer steps for every variant of options, each from the same weights.

    With the option ``return_memory_if_scarce`` everything that can leave the device does so between
    the steps. The global batch is dealt out to the data-parallel ranks; the weights are exported.
    ``te``: with stand-ins for Transformer Engine.
    """
    from ctrl_megatron.checkpoint.hf import save_hf
    from ctrl_megatron.models.offload import storages_of

    groups, results = start(layout), {}
    mine = {k: v[groups.place.dp :: groups.layout.data] for k, v in batch.items()}
    with te_stand_ins.installed(te):
        for name, options in variants.items():
            # A key bias has almost no gradient; at Adam's usual eps its step would be rounding
            # noise divided by itself.
            defaults = {"lr": 1e-3, "total_steps": 10, "clip_grad": 0.5, "eps": 1e-4}
            optimizer = defaults | options.pop("optimizer", {})
            make_room = options.pop("make_room", False)
            policy = make_policy(groups, directory, optimizer=optimizer, **options)
            results[name] = []
            for _ in range(3):
                if make_room:
                    policy.offload("weights", "gradients", "optimizer")
                    assert all(buffer_bytes(chunk) == 0 for chunk in policy.strategy.chunks)
                    assert (
                        storages_of(p for model in policy.models for p in model.parameters()) == {}
                    )
                    policy.log_probs(mine)
                results[name].append(policy.step(mine, policy_loss))
                assert all(buffer_bytes(chunk) > 0 for chunk in policy.strategy.chunks)
            save_hf(policy, f"{out}/{name}", side_files=directory)
    return results


def _constant_loss(log_probs, entropy, rows, counts):
    total, scalars = policy_loss(log_probs, entropy, rows, counts)
    return total.detach(), scalars


def reduced(
    rank: int, layout: dict, directory: str, batch: dict, settings: dict[str, dict], out: str
) -> dict[str, Any]:
    """For every setting of Megatron's gradient reduction: the metrics of three steps without
    clipping, this rank's weights afterwards, and how many reductions were under way when the
    backward pass of each step had ended.
    """
    groups, found = start(layout), {}
    mine = {k: v[groups.place.dp :: groups.layout.data] for k, v in batch.items()}
    optimizer = {"lr": 1e-3, "total_steps": 10, "clip_grad": 1e9, "eps": 1e-4}
    for name, setting in settings.items():
        with ddp_options(**setting):
            policy = make_policy(groups, directory, optimizer=optimizer, token_budget=64)
        found[name] = {"under_way": []}
        finish = policy.strategy.config.finalize_model_grads_func

        def finalise(
            chunks: list[Any],
            *given: Any,
            finish: Any = finish,
            under_way: list[int] = found[name]["under_way"],
            **named: Any,
        ) -> None:
            reducing = [group for chunk in chunks for group in chunk.bucket_groups]
            under_way.append(sum(group.grad_reduce_handle is not None for group in reducing))
            finish(chunks, *given, **named)

        policy.strategy.config.finalize_model_grads_func = finalise
        # The last step of all data ranks but the first has a loss without a gradient.
        losses = [policy_loss, policy_loss, _constant_loss if groups.place.dp else policy_loss]
        found[name]["metrics"] = [policy.step(mine, loss) for loss in losses]
        weights = [p.detach().clone() for model in policy.models for p in model.parameters()]
        found[name]["weights"] = weights
    return found


def ragged_groups(rank: int, directory: str, examples: int) -> int:
    """Log-probs, loss and gradient norm of drawn groups with their prompts shared and repeated; how
    many of the examples had something to share."""
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st
    from tiny_models import random_batch

    groups, shared = start({}), 0
    options = {"lr": 0.0, "total_steps": 10**6, "weight_decay": 0.0}
    policy = make_policy(groups, directory, optimizer=options, logprob_chunk=7)

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        st.integers(0, 10**6),
        st.integers(1, 3),
        st.integers(1, 5),
        st.tuples(st.integers(1, 30), st.integers(1, 12)),
        st.integers(0, 90),
    )
    def compare(seed: int, count: int, size: int, widths: tuple[int, int], room: int) -> None:
        nonlocal shared
        batch = random_batch(seed, count * size, *widths, group=size)
        batch["loss_mask"] = batch["response_mask"].clone()
        batch["response_mask"][1:2] = batch["loss_mask"][1:2] = False  # a row that was not judged
        found = []
        for on in (True, False):
            policy.options = replace(
                policy.options, shared_prefix=on, token_budget=sum(widths) + room
            )
            vectors = policy.log_probs(batch)
            flops, _ = policy.take_flops()
            found.append((vectors, policy.step(batch, policy_loss), flops))
        (left, one, least), (right, other, most) = found
        for a, b in zip(left, right, strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)
        assert one == pytest.approx(other, rel=1e-5, abs=1e-7)
        assert least <= most
        shared += least < most

    compare()
    return shared


def filtered_step(
    rank: int, layout: dict[str, Any], directory: str, batch: dict, kept: list[bool], out: str
) -> dict[str, Any]:
    """An update behind a node that lets rows stay, in other numbers on every rank; the metrics, and
    the weights in ``out``."""
    from types import SimpleNamespace

    from tensordict import TensorDict

    from ctrl_megatron.checkpoint.hf import save_hf
    from ctrl_megatron.config import Actor
    from ctrl_megatron.graph.executor import Executor
    from ctrl_megatron.metrics import Timeline
    from ctrl_megatron.parallel.stop import StopFlag
    from ctrl_megatron.pipeline import NodeOutput, NodeType, Pipeline
    from ctrl_megatron.steps.batch import tensor_fields
    from ctrl_megatron.steps.losses import ActorLoss, mini_batches

    groups = start(layout)
    mine = {k: v[groups.place.dp :: groups.layout.data] for k, v in batch.items()}
    optimizer = {"lr": 1.0, "eps": 1.0, "weight_decay": 0.0, "total_steps": 10}
    policy = make_policy(groups, directory, optimizer=optimizer, token_budget=24)

    def log_probs(worker: Any, batch: Any) -> NodeOutput:
        found, _ = policy.log_probs(tensor_fields(batch), 1.0)
        return NodeOutput(fields={"old_log_probs": found})

    def update(worker: Any, batch: Any) -> NodeOutput:
        loss = ActorLoss(Actor(), response_limit=9)
        steps = [policy.step(rows, loss) for rows in mini_batches(batch, groups)]
        numbered = {f"{i}/{k}": v for i, step in enumerate(steps) for k, v in step.items()}
        return NodeOutput(metrics=numbered)

    pipeline = Pipeline("filtering")
    pipeline.add_node("old", log_probs, node_type=NodeType.MODEL_TRAIN, only_forward_compute=True)
    pipeline.add_node(
        "update", update, ["old"], node_type=NodeType.MODEL_TRAIN, filter_plugin=lambda b: b["kept"]
    )
    rows = TensorDict(mine, batch_size=[len(mine["response_mask"])])
    rows["kept"] = torch.tensor(kept)[groups.place.dp :: groups.layout.data]
    worker: Any = SimpleNamespace(
        groups=groups, timeline=Timeline(), stop=StopFlag(), background=None
    )
    _, metrics = Executor(pipeline.build(), worker).run_step(rows)
    save_hf(policy, out, side_files=directory)
    return metrics


def objectives(
    rank: int,
    layout: dict,
    directory: str,
    batch: dict,
    actors: dict[str, dict],
    budget: int,
    out: str,
) -> dict[str, Any]:
    """Loss, gradient norm and scalars of the trainer's own loss for every configuration.

    The weights after the step are exported: each has moved by g / (|g| + 1), with g its gradient.
    ``given`` and ``own`` are one step, with the old log-probs given and left to the step.
    """
    from types import SimpleNamespace

    from ctrl_megatron.checkpoint.hf import save_hf
    from ctrl_megatron.config import Actor
    from ctrl_megatron.steps.losses import ActorLoss, select_tokens

    groups, results = start(layout), {}
    mine = {k: v[groups.place.dp :: groups.layout.data] for k, v in batch.items()}
    numbers = range(groups.place.dp, len(batch["response_mask"]), groups.layout.data)
    named: Any = {"uid": [f"row {number}" for number in numbers]}
    # A rank's batch is as wide as its own longest response.
    width = batch["response_mask"].shape[1]
    unused = width - int(mine["attention_mask"][:, -width:].sum(1).max())
    mine = {k: v[:, : v.shape[1] - unused] for k, v in mine.items()}
    for name, keys in actors.items():
        actor = Actor(**keys)
        worker: Any = SimpleNamespace(
            groups=groups,
            step=3,
            config=SimpleNamespace(
                actor_rollout_ref=SimpleNamespace(actor=actor), trainer=SimpleNamespace(seed=1)
            ),
        )
        rows = {**mine, "place": torch.arange(len(numbers))}
        rows |= select_tokens(worker, named, rows, draw=0)
        optimizer = {"lr": 1.0, "eps": 1.0, "weight_decay": 0.0, "total_steps": 10}
        policy = make_policy(groups, directory, optimizer=optimizer, token_budget=budget)
        results[name] = policy.step(rows, ActorLoss(actor, response_limit=11))
        save_hf(policy, f"{out}/{name}", side_files=directory)
    # The step's own log-probs in the place of those of a pass before it.
    loss = ActorLoss(Actor(use_kl_loss=True, kl_loss_coef=0.1), response_limit=11)
    policy = make_policy(groups, directory, optimizer=optimizer, token_budget=budget)
    expected = policy.log_probs(mine, 0.7)
    results["given"] = policy.step({**mine, "old_log_probs": expected[0]}, loss, 0.7)
    save_hf(policy, f"{out}/given", side_files=directory)
    policy = make_policy(groups, directory, optimizer=optimizer, token_budget=budget)
    rows = {name: value for name, value in mine.items() if name != "old_log_probs"}
    vectors = policy.allocate_results(rows, 2)
    results["own"] = policy.step(rows, loss, 0.7, results=vectors)
    own = [*policy.broadcast_results(vectors)]
    for found, wanted in zip(own, expected, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)
    assert results["own"]["actor/ppo_kl"] == 0.0
    save_hf(policy, f"{out}/own", side_files=directory)
    return results


def value_parity(
    rank: int,
    layout: dict,
    directories: dict[str, str],
    batch: dict,
    out: str,
    strategy: str = "megatron",
) -> dict[str, Any]:
    """Per model its values of the batch; every model exported below ``out``."""
    from ctrl_megatron.checkpoint.hf import save_hf

    groups, results = start(layout), {}
    for name, directory in directories.items():
        model = make_value_model(groups, directory, strategy=strategy, token_budget=64)
        results[name] = model.values(batch)
        model.options = replace(model.options, shared_prefix=False)
        torch.testing.assert_close(model.values(batch), results[name], atol=5e-6, rtol=1e-5)
        save_hf(model, f"{out}/{name}", side_files=directory)
    return results


def reward_parity(
    rank: int,
    layout: dict,
    directories: dict[str, str],
    rows: list[tuple[list[dict[str, str]], str]],
    out: str,
    strategy: Any = "megatron",
    longest: int = 1000,
) -> dict[str, list[float | None]]:
    """Per model its rewards of the answers; every model exported below ``out``."""
    from ctrl_megatron.checkpoint.hf import save_hf
    from ctrl_megatron.data.tokens import TextCodec
    from ctrl_megatron.models.hf_config import read_shape
    from ctrl_megatron.models.value import RewardModel
    from ctrl_megatron.steps.reward_reader import RankRewardModel

    groups, results = start(layout), {}
    options = _model_options(None, {"token_budget": 256})
    for name, directory in directories.items():
        shape = read_shape(directory, strategy)
        model = _filled(RewardModel(shape, groups, options), directory)
        reader = RankRewardModel(
            model=model, codec=TextCodec(directory), padding=0, longest=longest
        )
        results[name] = reader.score_conversations(
            [reader.conversation_tokens(prompt, answer) for prompt, answer in rows]
        )
        save_hf(model, f"{out}/{name}", side_files=directory)
    return results


def value_loss(values, rows, counts):
    """A clipped value loss, normalised by sequences."""
    mask, old = rows["response_mask"].float(), rows["values"]
    held = old + (values - old).clamp(-0.2, 0.2)
    worst = torch.maximum((values - rows["returns"]) ** 2, (held - rows["returns"]) ** 2)
    return 0.5 * (worst * mask).sum() / counts.sequences, {}


def value_steps(
    rank: int,
    layout: dict,
    directory: str,
    batch: dict,
    steps: int,
    out: str,
    resume_at: int | None,
    strategy: str = "megatron",
) -> dict[str, Any]:
    """Optimizer steps; before step ``resume_at`` a new model continues from a checkpoint."""
    from ctrl_megatron.checkpoint.hf import save_hf
    from ctrl_megatron.checkpoint.sharded import load_sharded, save_sharded

    groups = start(layout)
    mine = {k: v[groups.place.dp :: groups.layout.data] for k, v in batch.items()}
    options = {"lr": 1e-3, "total_steps": steps, "clip_grad": 0.5, "eps": 1e-4}
    make = partial(
        make_value_model,
        *(groups, directory),
        **{"strategy": strategy, "optimizer": options, "token_budget": 64},
    )
    model, metrics = make(), []
    for step in range(steps):
        if step == resume_at:
            folder = Path(out) / "checkpoint"
            if groups.is_first:
                folder.mkdir(parents=True)
            groups.barrier()
            save_sharded(model, folder)
            model = make()
            load_sharded(model, folder)
        metrics.append(model.step(mine, value_loss))
    save_hf(model, f"{out}/value", side_files=directory)
    head = {
        name: value.detach().clone()
        for name, value in model.models[-1].named_parameters()
        if name.startswith("output_layer")
    }
    return {"metrics": metrics, "head": head}


def value_learns(rank: int, layout: dict, directory: str, batch: dict, steps: int) -> list[float]:
    """The explained variance before every step of the trainer's own loss on the same returns."""
    from ctrl_megatron.algorithms import explained_variance, explained_variance_sums
    from ctrl_megatron.steps.losses import ValueLoss

    groups, found = start(layout), []
    mine = {k: v[groups.place.dp :: groups.layout.data] for k, v in batch.items()}
    options = {"lr": 3e-3, "total_steps": steps}
    model = make_value_model(groups, directory, optimizer=options, token_budget=64)
    loss = ValueLoss(0.5, loss_agg_mode="token-mean", response_limit=9)
    for _ in range(steps):
        values = model.values(mine)
        sums = explained_variance_sums(values, mine["returns"], mine["response_mask"])
        found.append(explained_variance(groups.sum_over_data(sums)))
        model.step({**mine, "values": values}, loss)
    return found


def long_waits(rank: int, directory: str, log: str, limit: float) -> dict[str, Any]:
    """Seconds that an engine's start and a generation took whose collectives may last ``limit``,
    what the generation gave, and how long a stop took that the other rank was asked for.

    The engine is a real one, suspended for longer than the limit in the middle of its work.
    """
    import os
    import signal
    import threading
    import time
    from types import SimpleNamespace

    from preloaded import reserve

    from ctrl_megatron.background import BackgroundLoop
    from ctrl_megatron.parallel.groups import initialize_groups
    from ctrl_megatron.parallel.layout import Layout
    from ctrl_megatron.parallel.stop import StopFlag, StopRequested
    from ctrl_megatron.parallel.waiting import WaitRules
    from ctrl_megatron.rollout.engine import EngineSpec
    from ctrl_megatron.rollout.launch import EngineProcess
    from ctrl_megatron.steps.worker import RolloutWorker
    from ctrl_megatron.types import SamplingParams

    if rank == 0:
        reserve(1)  # the engine's process
    groups = initialize_groups(Layout(tensor=2), seed=1, timeout_seconds=limit)
    background, found = BackgroundLoop(), dict[str, Any]()
    unused: Any = None
    config: Any = SimpleNamespace(trainer=SimpleNamespace(wait_timeout=60.0))
    spec = EngineSpec(name="hf", model_path=directory, dtype="float32", threads=1, log_path=log)
    process: Any = EngineProcess(spec) if groups.is_leader else None
    began = time.monotonic()

    async def start() -> None:
        await asyncio.to_thread(process.wait_ready)
        await asyncio.sleep(max(0.0, began + 1.2 * limit - time.monotonic()))

    try:
        stop = StopFlag().install()
        waiting = WaitRules(groups=groups, stop=stop, limit=60.0)
        waiting.wait_together(
            background.submit(start()) if process else None, "the engine to start"
        )
        found["start"] = time.monotonic() - began
        engine: Any = process.connect() if process else None
        worker = RolloutWorker(
            config=config,
            groups=groups,
            background=background,
            stop=stop,
            codec=unused,
            engine=engine,
            owner=None,
            max_model_len=64,
            rewards=None,
            reward_weights={},
            validation=None,
        )
        began = time.monotonic()
        if process:
            os.kill(process.pid, signal.SIGSTOP)
            threading.Timer(1.4 * limit, os.kill, (process.pid, signal.SIGCONT)).start()
        prompts, params = [[1, 2], [3]], SamplingParams(max_tokens=5, seed=1)
        answers = worker.run_on_leader(lambda: engine.generate(prompts, params))
        found["generation"] = time.monotonic() - began
        found["answers"] = [len(completion.token_ids) for (completion,) in answers]
        began = time.monotonic()
        if rank == 1:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        with pytest.raises(StopRequested):
            worker.run_on_leader(lambda: asyncio.sleep(100))
        found["stop"] = time.monotonic() - began
        if engine:
            background.run(engine.close())
    finally:
        if process:
            process.stop()
        background.close()
    return found


def hang_in_users_code(rank: int, run_dir: Path, holds_the_lock: bool) -> None:
    """Rank 1 never comes to a barrier; rank 0 reports what it sees of that and ends."""
    import ctypes
    import threading
    import time

    from ctrl_megatron.parallel.failure import FailureWatch
    from ctrl_megatron.parallel.groups import initialize_groups
    from ctrl_megatron.parallel.layout import Layout
    from ctrl_megatron.parallel.stacks import StackFile

    groups = initialize_groups(
        Layout(tensor=2), seed=1, timeout_seconds=60 if holds_the_lock else 3
    )

    def wait_for_stacks() -> None:
        # ``run_world`` kills the others once a rank has ended.
        deadline = time.monotonic() + 10
        while "a_users" not in (run_dir / "stacks/rank_1.txt").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)

    limit = 3 if holds_the_lock else 60
    watch = FailureWatch(groups, timeout=limit, clean_up=wait_for_stacks)
    watch.set_stack_file(StackFile(run_dir, rank))
    groups.barrier()

    def a_users_loss() -> None:
        library = ctypes.PyDLL(None)  # whose functions keep Python's lock
        while True:
            library.sleep(60) if holds_the_lock else time.sleep(60)

    try:
        if rank == 1:
            a_users_loss()
        groups.barrier()
    except RuntimeError as error:
        watch.report_failure(error)
        threading.Event().wait()  # the watch ends the process


def lose_a_host(rank: int) -> None:
    """Ranks 1 and 2, as if on a host of their own, vanish; rank 0 reports what it sees."""
    import os
    from dataclasses import replace

    from ctrl_megatron.parallel.failure import FailureWatch
    from ctrl_megatron.parallel.groups import initialize_groups
    from ctrl_megatron.parallel.hosts import Hosts
    from ctrl_megatron.parallel.layout import Layout

    groups = initialize_groups(Layout(data=3), seed=1, timeout_seconds=60)
    groups = replace(groups, hosts=Hosts(names=("here", "there"), of_rank=(0, 1, 1)))
    watch = FailureWatch(groups, timeout=60, clean_up=lambda: None)
    groups.barrier()
    if rank:
        os._exit(0)
    try:
        groups.barrier()
    except RuntimeError as error:
        watch.exit_process(watch.report_failure(error))


def vocab_log_probs(
    rank: int, cases: list[tuple[int, int]], temperature: float, chunk: int
) -> list[dict[str, torch.Tensor | None]]:
    """Per (vocabulary, tensor size) what the first ``tensor size`` ranks compute together."""
    import torch.distributed as dist

    from ctrl_megatron.parallel.divergence import OutputLayer
    from ctrl_megatron.parallel.vocab import linear_log_probs, vocab_range

    dist.init_process_group("gloo")
    found: list[dict[str, torch.Tensor | None]] = []
    for vocab, size in cases:
        group = dist.new_group(list(range(size)))
        generator = torch.Generator().manual_seed(vocab)
        hidden = torch.randn(10, 6, generator=generator)
        whole = torch.randn(vocab, 6, generator=generator)
        targets = torch.randint(0, vocab, (10,), generator=generator)
        upstream = torch.randn(2, 10, generator=generator)
        if rank >= size:
            found.append({})
            continue
        first, real, share = vocab_range(vocab, rank, size)
        # The content of the padding must not matter.
        weight = torch.full((share, 6), 1e3)
        weight[:real] = whole[first : first + real]
        own_hidden, weight = hidden.clone().requires_grad_(), weight.requires_grad_()
        log_probs, entropy = linear_log_probs(
            own_hidden,
            weight,
            targets,
            vocab_size=vocab,
            temperature=temperature,
            chunk=chunk,
            tensor_rank=rank,
            tensor_size=size,
            group=group,
        )
        (log_probs * upstream[0] + entropy * upstream[1]).sum().backward()
        split = {"tensor_rank": rank, "tensor_size": size, "group": group, "chunk": chunk}
        of_teacher = OutputLayer(hidden=hidden.flip(0), weight=weight, vocab_size=vocab, **split)
        divergences: dict[str, torch.Tensor | None] = {}
        for name in ("reverse_kl", "forward_kl", "jsd"):
            leaf = hidden.clone().requires_grad_()
            student = OutputLayer(hidden=leaf, weight=weight.detach(), vocab_size=vocab, **split)
            divergence = student.divergence_from(of_teacher, name, temperature)
            (divergence * upstream[0]).sum().backward()
            divergences |= {name: divergence.detach(), f"grad_{name}": leaf.grad}
        likeliest, highest = of_teacher.likeliest(3, temperature)
        found.append(
            {
                "hidden": hidden,
                "likeliest": likeliest,
                "highest": highest,
                **divergences,
                "weight": whole,
                "targets": targets,
                "upstream": upstream,
                "log_probs": log_probs.detach(),
                "entropy": entropy.detach(),
                "grad_hidden": own_hidden.grad,
                "grad_weight": weight.grad,
            }
        )
    return found


def _named(function: str) -> Any:
    module, _, name = function.rpartition(":")
    return getattr(importlib.import_module(module or __name__), name)


def run(function: str, folder: str, rank: int) -> None:
    """A rank's whole life; the result is left in ``folder``. ``function`` may name its module."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    arguments = torch.load(f"{folder}/arguments.pt", weights_only=False)
    result = _named(function)(rank, **arguments)
    torch.save(result, f"{folder}/result{rank}.pt")
    if torch.distributed.is_initialized():
        # A rank that leaves while others still talk to it can make their threads abort.
        from ctrl_megatron.parallel.groups import shutdown_groups

        torch.distributed.barrier()
        shutdown_groups()

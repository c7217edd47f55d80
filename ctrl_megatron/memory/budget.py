"""The memory of a run on every GPU and every host, phase by phase. Pure.

The order of phases is that of ``pipeline``: the engine starts alone and sleeps, models are built;
in every step the engine wakes and the trainer frees memory as configured, or the reverse.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ctrl_megatron.config import Config, Purpose
from ctrl_megatron.config.adapters import pushes_adapters
from ctrl_megatron.memory.activations import (
    Kernels,
    PassShape,
    inference_workspace,
    update_activations_and_workspace,
)
from ctrl_megatron.memory.engine import (
    COMMUNICATOR,
    CUDA_CONTEXT,
    GIB,
    EngineMemoryUse,
    actor_engine_memory,
    proxy_engine_memory,
)
from ctrl_megatron.memory.model_state import (
    DTYPE_SIZE,
    ModelMemory,
    frozen_model_memory,
    largest_layer_parameter,
    largest_trained_parameter,
    trained_model_memory,
)
from ctrl_megatron.memory.module_passes import (
    fsdp_inference_bytes,
    fsdp_update_activations_and_workspace,
)
from ctrl_megatron.memory.pushes import push_bucket_bytes
from ctrl_megatron.memory.shapes import ModelShapes
from ctrl_megatron.models.host_state import PART_BYTES
from ctrl_megatron.models.shape import AnyShape, ModelShape, TransformersShape
from ctrl_megatron.models.shards import check_split
from ctrl_megatron.parallel.layout import Layout, World, layout_for, world_of_role, worlds_of
from ctrl_megatron.resharding.plan import hf_specs, place_in_buckets
from ctrl_megatron.resharding.schedule import IN_FLIGHT
from ctrl_megatron.rollout.weight_chunks import spec_bytes

RESERVE = 0.08
"""Share of a GPU that must stay free, for fragmentation and errors of the estimates."""
_RANK_PROCESS, _ENGINE_PROCESS = 6 * GIB, 5 * GIB
"""Host memory of a rank and of an engine's worker, libraries included; estimates."""
_WRITE_BUFFER = 1 << 30
"""Host memory of a rank that writes its part of a checkpoint file by file."""

Items = Mapping[str, int]
"""Item -> bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseMemory:
    """Memory of one phase on the fullest GPU."""

    phase: str
    """With the world's name before it where that is not the actor's."""
    stage: int
    """The pipeline stage of that GPU."""
    rank: int
    """The run's number of the first such rank."""
    items: Items

    @property
    def total(self) -> int:
        """Bytes."""
        return sum(self.items.values())

    def describe_largest_items(self, count: int = 3) -> str:
        order = sorted(self.items.items(), key=lambda item: -item[1])[:count]
        return ", ".join(f"{name} {format_gib(size)}" for name, size in order)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """The memory of a run on equal GPUs."""

    gpu_memory: int
    """Bytes of one GPU."""
    phases: tuple[PhaseMemory, ...]
    """The fullest GPU of each phase of each world, in the order of a run."""
    engine: EngineMemoryUse | None
    proxy: EngineMemoryUse | None
    """The proxy's own engine, on GPUs of its own; None without one, and where its model has no
    shape here."""
    host: Items
    """Host memory of the fullest host."""
    host_number: int
    checkpoint_per_rank: int
    """Bytes that the fullest rank writes into a checkpoint."""

    @property
    def limit_bytes(self) -> int:
        """Bytes of a GPU that the plan may use."""
        return int(self.gpu_memory * (1 - RESERVE))

    @property
    def fullest_phase(self) -> PhaseMemory:
        return max(self.phases, key=lambda use: use.total)


def format_gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


def memory_budget(
    config: Config,
    shapes: ModelShapes,
    *,
    gpu_memory: int,
    purpose: Purpose = "rl",
    kernels: Kernels = "te",
) -> MemoryBudget:
    """The budget of a checked configuration; ``gpu_memory`` in bytes. Raises ValueError if a model
    does not divide over the layout of its ranks.
    """
    trainer, actor = config.trainer, config.actor_rollout_ref.actor
    ranks = trainer.nnodes * trainer.n_gpus_per_node
    worlds = (World(ranks=tuple(range(ranks)), layout=layout_for(ranks, actor)),)
    if purpose == "rl":
        worlds = worlds_of(ranks, config)
    engine = proxy = None
    others = list[EngineMemoryUse]()
    if purpose == "rl":
        engine = actor_engine_memory(config, shapes.actor, gpu_memory)
        agents = enumerate(zip(config.agents[1:], shapes.further, strict=True), 1)
        others = [
            actor_engine_memory(own, theirs.actor, gpu_memory)
            for number, (own, theirs) in agents
            if config.engine_owners[number] == number
            and own.actor_rollout_ref.rollout.placement == "colocated"
        ]
    if shapes.proxy is not None:
        proxy = proxy_engine_memory(config, shapes.proxy, gpu_memory)
    # A dedicated engine has its GPUs to itself.
    beside = engine if config.actor_rollout_ref.rollout.placement == "colocated" else None
    together = others if beside is None else [*others, beside]
    together = sorted(together, key=lambda one: one.awake_bytes)
    beside = together[-1] if together else None
    stages = {
        world: [
            _Stage(
                config,
                _models_of(world, worlds, shapes),
                world.layout,
                pp,
                beside if world is worlds[0] else None,
                purpose,
                kernels,
                # One of several engines is awake at a time.
                asleep=sum(one.asleep_bytes for one in together[:-1]) * (world is worlds[0]),
            )
            for pp in range(world.layout.pipeline)
        ]
        for world in worlds
        if not world.serves
    }
    shared = _shared_by_ranks(config, shapes) if engine is not None else {}
    with_engines = world_of_role(worlds, "rollout")
    hosts = [
        shared | _host(config, stages, host, engine, with_engines, others)
        for host in range(trainer.nnodes)
    ]
    number = max(range(len(hosts)), key=lambda host: sum(hosts[host].values()))
    return MemoryBudget(
        gpu_memory=gpu_memory,
        phases=tuple(use for world, of in stages.items() for use in _fullest(world, of)),
        engine=engine,
        proxy=proxy,
        host=hosts[number],
        host_number=number,
        checkpoint_per_rank=max(stage.checkpoint for of in stages.values() for stage in of),
    )


def _fullest(world: World, stages: list[_Stage]) -> Iterator[PhaseMemory]:
    per_stage = [stage.phases() for stage in stages]
    for name in per_stage[0]:
        pp = max(range(len(stages)), key=lambda pp: sum(per_stage[pp][name].values()))
        yield PhaseMemory(
            phase=name if stages[0].has_actor else f"{world.name}: {name}",
            stage=pp,
            rank=world.ranks[world.layout.rank(pp=pp)],
            items=per_stage[pp][name],
        )


_TRAINED = {"actor": "actor", "critic": "value model"}
_FROZEN = {"reference": "reference", "reward_model": "reward model"}
"""Role -> name of a model that does not learn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Models:
    """The models of a world."""

    trained: Mapping[str, AnyShape]
    frozen: Mapping[str, AnyShape]


def _models_of(world: World, worlds: Sequence[World], shapes: ModelShapes) -> _Models:
    """ValueError if one of them does not divide over the world's layout."""
    given = {"actor": shapes.actor, "critic": shapes.value}
    given |= {"reference": shapes.reference, "reward_model": shapes.reward_model}
    here = {
        role: shape
        for role, shape in given.items()
        if shape is not None and world_of_role(worlds, role) is world
    }
    for shape in here.values():
        if isinstance(shape, ModelShape):
            world.layout.check_layers(shape.num_layers)
            check_split(shape, world.layout)
    trained, frozen = (
        {name: here[role] for role, name in names.items() if role in here}
        for names in (_TRAINED, _FROZEN)
    )
    for number, own in enumerate(shapes.further, 1) if "actor" in here else ():
        # Each policy that learns has models of its own.
        models = {"": own.actor, "value model of ": own.value}
        trained |= {f"{name}agent{number}": s for name, s in models.items() if s is not None}
        if own.reference is not None:
            frozen[f"reference of agent{number}"] = own.reference
    return _Models(trained=trained, frozen=frozen)


class _Stage:
    """A rank of one pipeline stage; ``engine`` is the engine on its GPU, beside others that take
    ``asleep`` bytes."""

    def __init__(
        self,
        config: Config,
        models: _Models,
        layout: Layout,
        pp: int,
        engine: EngineMemoryUse | None,
        purpose: Purpose,
        kernels: Kernels,
        *,
        asleep: int = 0,
    ) -> None:
        self.config, self.layout, self.pp, self.engine = config, layout, pp, engine
        self.asleep = asleep
        self.purpose = purpose
        self.kernels: Kernels = kernels
        self.family = config.actor_rollout_ref
        self.megatron, self.compute = self.family.actor.megatron, self.family.actor.compute
        dtype = self.family.model_dtype
        self.has_actor = "actor" in models.trained
        self.shapes = {**models.trained}
        """The models that make passes; the actor's are like those of a reference beside it."""
        self.shapes |= {
            name: shape
            for name, shape in models.frozen.items()
            if not (self.has_actor and name.startswith("reference"))
        }
        layouts = {
            f"agent{number}": layout_for(layout.world_size, own.actor_rollout_ref.actor)
            for number, own in enumerate(config.agents[1:] if self.has_actor else (), 1)
        }

        def place(name: str) -> tuple[Layout, int]:
            """The layout of the model's policy, and this rank's pipeline stage in it."""
            own = layouts.get(name.rpartition(" ")[2], layout)
            return own, min(pp, own.pipeline - 1)

        self.trained = {
            name: trained_model_memory(
                shape,
                place(name)[0],
                pp=place(name)[1],
                dtype=dtype,
                distributed=self.megatron.use_distributed_optimizer,
            )
            for name, shape in models.trained.items()
        }
        self.frozen: dict[str, ModelMemory] = {
            name: frozen_model_memory(shape, place(name)[0], pp=place(name)[1], dtype=dtype)
            for name, shape in models.frozen.items()
        }
        self.dtype_size = DTYPE_SIZE[dtype]
        self.buckets = 0
        """Bytes of a push's buckets on this GPU, which are kept from the first push on."""
        if purpose == "rl" and self.has_actor:
            self.buckets = push_bucket_bytes(config, self.shapes["actor"], layout.rank(pp=pp))

    @property
    def checkpoint(self) -> int:
        """Bytes that this rank writes."""
        frozen, reference = 0, self.frozen.get("reference")
        if reference is not None and self.config.refreshes_reference:
            frozen = reference.parameters // self.layout.data
        return sum(state.saved for state in self.trained.values()) + frozen

    def phases(self) -> dict[str, dict[str, int]]:
        """Phase -> item -> bytes, in the order of a run."""
        rl = self.purpose == "rl"
        pushes = rl and self.has_actor
        phases: dict[str, dict[str, int]] = {}
        if self.engine is not None:
            phases["start: engine"] = self._process() | self._engine_awake()
        phases["start: models"] = self._building()
        if pushes:
            phases["generate"] = self._generating()
            if self.config.shares_engines_with_frozen_proxy:
                phases["sync proxy"] = self._pushing_awake()
            if len(self.config.agents) > 1 and not self.compute.param_offload:
                phases["sync of further policies"] = self._pushing_awake()
        if rl:
            phases["log-probs"] = self._log_probs()
        if self.trained:
            phases["update"] = self._updating()
        if pushes:
            phases["sync"] = self._pushing()
        if self.trained:
            phases["save"] = self._saving(gradients=not (pushes and self.compute.grad_offload))
            # During a generation: offloaded parts are saved from host memory.
            phases["save-on-stop"] = self._generating() if pushes else self._saving(gradients=True)
            largest = max(
                largest_layer_parameter(self.shapes[name], self.layout) for name in self.trained
            )
            phases["resume"] = self._saving(gradients=True) | {"tensor being loaded": 4 * largest}
        return {
            name: {item: size for item, size in items.items() if size}
            for name, items in phases.items()
        }

    # Parts

    def _process(self) -> dict[str, int]:
        layout = self.layout
        groups = (layout.tensor > 1) + 2 * (layout.pipeline > 1) + (layout.replicas("dense") > 1)
        # The ranks of a model copy; context ranks, and with them those of the same data.
        groups += (layout.model_parallel_size > 1) + (layout.context > 1)
        groups += self.has_actor and self.family.rollout.weight_transport == "nccl"
        own = [shape for shape in self.shapes.values() if isinstance(shape, ModelShape)]
        if any(shape.expert_kinds for shape in own):
            sizes = dict(layout.mesh("expert").sizes)
            groups += sum(sizes[axis] > 1 for axis in ("etp", "ep", "edp"))
            groups += layout.ranks_per_expert_layer > 1
        return {
            "trainer's CUDA context and NCCL": CUDA_CONTEXT + groups * COMMUNICATOR,
            "weight buckets": self.buckets,
            "other engines asleep": self.asleep,
        }

    def _engine_at_rest(self) -> dict[str, int]:
        if self.engine is None or not self.family.rollout.free_cache_engine:
            return self._engine_awake()
        return {"engine asleep": self.engine.asleep_bytes}

    def _engine_awake(self) -> dict[str, int]:
        engine = self.engine
        if engine is None:
            return {}
        return {
            "engine's CUDA context and buffers": engine.outside,
            "engine's weights": engine.weights,
            "engine's key-value cache": max(0, engine.kv_cache_bytes),
            "engine's graphs, workspace and states": engine.graphs
            + engine.workspace
            + engine.states,
        }

    def _states(self, *, weights: bool, gradients: bool, optimizer: bool) -> dict[str, int]:
        """Parts of the trained models on the device."""
        items: dict[str, int] = {}
        for name, state in self.trained.items():
            if weights:
                items[f"{name}'s parameters"] = state.parameters
            if gradients:
                items[f"{name}'s gradients"] = state.gradients
            if optimizer and not self.compute.optimizer_cpu_offload:
                items[f"{name}'s master weights"] = state.master
                items[f"{name}'s moments"] = state.moments
        return items

    def _unchanged(self, *, used: str = "") -> dict[str, int]:
        """The frozen models on the device, of which one is ``used``."""
        away = self.compute.param_offload and self.has_actor
        return {
            f"{name}'s parameters": state.parameters
            for name, state in self.frozen.items()
            if not away or name == used
        }

    def _one_used(self) -> dict[str, int]:
        """The same while one of them is used that takes most of the device."""
        each = [self._unchanged(used=name) for name in self.frozen] or [{}]
        return max(each, key=lambda items: sum(items.values()))

    def _staying(self, *, weights: bool = False) -> dict[str, int]:
        """Parts that stay on the device while the engine generates, if it is the engines' too."""
        if not self.has_actor:
            return self._states(weights=True, gradients=True, optimizer=True)
        return self._states(
            weights=weights or not self.compute.param_offload,
            gradients=not self.compute.grad_offload,
            optimizer=not self.compute.optimizer_offload,
        )

    # Phases

    def _building(self) -> dict[str, int]:
        """The peak while models are built one after the other."""
        before = self._process() | self._engine_at_rest()
        moments = []
        for name, state in self.trained.items():
            moved = state.parameters - state.untrained
            has_buffer = self.family.actor.strategy == "megatron"
            copied = moved if has_buffer and self.megatron.use_distributed_optimizer else 0
            moments.append(
                before
                | {
                    f"{name}'s parameters": state.parameters,
                    f"{name}'s parameters before they move into Megatron's buffer": copied,
                    f"{name}'s gradients": state.gradients,
                }
            )
            before = before | {f"{name}'s parameters": state.parameters}
            master = {f"{name}'s master weights": state.master}
            if self.compute.optimizer_cpu_offload:
                # Gradients leave before, and master weights afterwards.
                moments.append(before | master | self._visiting(name))
                master = {}
            before = before | {f"{name}'s gradients": state.gradients} | master
            if name == "actor":
                moments.append(before | self._one_used())
                before = before | self._unchanged()
        moments.append(before | self._unchanged(used="reward model"))
        return max(moments, key=lambda items: sum(items.values()))

    def _generating(self) -> dict[str, int]:
        staying = self._staying() | self._unchanged()
        return self._process() | self._engine_awake() | staying

    def _log_probs(self) -> dict[str, int]:
        workspace = max(
            fsdp_inference_bytes(self._forward(name), shape)
            if isinstance(shape, TransformersShape)
            else inference_workspace(self._forward(name), pp=self.pp)
            for name, shape in self.shapes.items()
        )
        return (
            self._process()
            | self._engine_at_rest()
            | self._staying(weights=True)
            | self._one_used()
            | {"workspace": workspace}
        )

    def _updating(self) -> dict[str, int]:
        resident = (
            self._process()
            | self._engine_at_rest()
            | self._states(weights=True, gradients=True, optimizer=True)
            | self._unchanged()
        )
        passes = []
        for name in self.trained:
            shape = self.shapes[name]
            if isinstance(shape, TransformersShape):
                kept, workspace = fsdp_update_activations_and_workspace(self._backward(name), shape)
            else:
                largest = largest_layer_parameter(shape, self.layout)
                kept, workspace = update_activations_and_workspace(
                    self._backward(name), pp=self.pp, largest=largest
                )
            own = {f"{name}'s gradients": self.trained[name].passing}
            if name == "actor" and self.family.rollout.router_replay != "off":
                own["recorded experts"] = self._recorded_experts(shape)
            passes.append({"activations": kept, "workspace": workspace} | own)
        for name, state in self.trained.items():
            visiting, stepped = {}, state.moments // 2
            if self.compute.optimizer_cpu_offload:
                visiting = self._visiting(name)
                stepped = min(stepped, sum(visiting.values()) // 3)
            # torch's AdamW steps all parameters together and needs their size once more.
            passes.append(
                visiting | ({"optimizer's workspace": stepped} if self.kernels == "torch" else {})
            )
        most = max(passes, key=lambda items: sum(items.values()))
        # Megatron's buffers of gradients are resident.
        return resident | {name: size for name, size in most.items() if size}

    def _recorded_experts(self, shape: AnyShape) -> int:
        """The replayed choices (int16) of a data rank's rows of one mini-batch."""
        layers, top_k = shape.expert_choices
        rows = self.family.actor.ppo_mini_batch_size * self.family.rollout.n // self.layout.data
        return 2 * layers * top_k * rows * self.config.max_training_row_tokens

    def _visiting(self, name: str) -> dict[str, int]:
        """Optimizer state that is on the device at one time if it rests on the host."""
        shape, state = self.shapes[name], self.trained[name]
        largest = 12 * largest_trained_parameter(shape, self.layout, pp=self.pp)
        visiting = min(state.optimizer_bytes, max(PART_BYTES, largest))
        return {f"{name}'s optimizer state of one part": visiting}

    def _pushing(self) -> dict[str, int]:
        held, engine = self._engine_awake(), self.engine
        if engine is not None and self.family.rollout.free_cache_engine:
            held = {
                "engine's CUDA context and buffers": engine.outside,
                "engine's weights": engine.weights,
                "engine's graphs": engine.graphs,
            }
        if engine is not None:
            held["engine's tensors on arrival"] = engine.reload
        sent = {"actor's parameters": self.trained["actor"].parameters}
        return self._process() | held | self._staying() | sent | self._unchanged()

    def _pushing_awake(self) -> dict[str, int]:
        """The push of weights that are read from files, or are on the device anyway, while the
        engine is awake with its cache: the cache stays between critiques and revisions."""
        arriving = 0 if self.engine is None else self.engine.reload
        return self._generating() | {"engine's tensors on arrival": arriving}

    def _saving(self, *, gradients: bool) -> dict[str, int]:
        states = self._states(weights=True, gradients=gradients, optimizer=True)
        return self._process() | self._engine_at_rest() | states | self._unchanged()

    # Passes

    def _backward(self, name: str) -> PassShape:
        config, actor = self.config, self.family.actor
        budget = self.family.update_token_budget
        if self.purpose == "sft":
            rows = config.sft.train_batch_size // self.layout.data
            return self._pass(name, budget, groups=rows, size=1, own=config.sft.max_length)
        return self._rl_pass(name, budget, actor.ppo_mini_batch_size)

    def _forward(self, name: str) -> PassShape:
        family = self.family
        budget = family.log_prob_token_budget
        if name == "value model":
            budget = family.update_token_budget
        return self._rl_pass(name, budget, self.config.data.train_batch_size)

    @property
    def _divergence_matrices(self) -> int:
        """``PassShape.divergence_matrices`` of the actor's update."""
        keys = self.config.algorithm.distillation
        if self.purpose != "rl" or not keys.is_on or keys.estimator != "full":
            return 0
        return 4 if keys.divergence == "jsd" else 3

    def _rl_pass(self, name: str, budget: int, prompts: int) -> PassShape:
        data, n = self.config.data, self.family.rollout.n
        if not self.config.shares_prefixes or n == 1:
            groups, own = prompts * n // self.layout.data, self.config.max_training_row_tokens
            return self._pass(name, budget, groups=groups, size=1, own=own)
        return self._pass(
            name,
            budget,
            groups=prompts // self.layout.data,
            size=n,
            own=data.max_response_length,
            shared=data.max_prompt_length,
        )

    def _pass(
        self, name: str, budget: int, *, groups: int, size: int, own: int, shared: int = 0
    ) -> PassShape:
        """The pass over this many groups of ``size`` rows with ``own`` tokens each and ``shared``
        common ones."""
        compute, overrides = self.compute, self.megatron.override_transformer_config
        modules = overrides.get("recompute_modules") or ["core_attn"]
        whole = shared + size * own
        tokens = min(budget, groups * whole)
        if whole <= budget:
            micro_batches = math.ceil(groups / (budget // whole))
        else:
            micro_batches = groups * math.ceil(size / max(1, (budget - shared) // own))
        # The shorter the responses, the more of them copy their prompt's keys: at most all rows.
        copies = min(groups * size, size * tokens // (shared + size)) if shared else 0
        return PassShape(
            shape=self.shapes[name],
            layout=self.layout,
            kernels=self.kernels,
            dtype_size=self.dtype_size,
            tokens=-(-tokens // self.layout.context),
            micro_batches=micro_batches,
            logprob_chunk=compute.logprob_chunk_size,
            recompute_granularity=compute.recompute_granularity,
            recompute_num_layers=compute.recompute_num_layers,
            recompute_modules=tuple(modules),
            gathered_keys=(tokens + copies * shared) // self.layout.context if shared else 0,
            fused_softmax=True,
            divergence_matrices=self._divergence_matrices if name == "actor" else 0,
            grouped_experts=overrides.get("moe_grouped_gemm", True),
        )


def _shared_by_ranks(config: Config, shapes: ModelShapes) -> dict[str, int]:
    """Host memory that the ranks of a host share."""
    family = config.actor_rollout_ref
    sends = "trained" if pushes_adapters(config) else "merged"
    quantised = family.rollout.quantization is not None
    specs = hf_specs(shapes.actor, family.rollout_dtype, sends, quantised=quantised)
    places = place_in_buckets(specs, family.rollout.update_bucket_megabytes << 20)
    items = {"weight buckets": IN_FLIGHT * max(place.end for place in places)}
    proxy = family.proxy
    if config.shares_engines_with_frozen_proxy and proxy.keep_in_host_memory and sends == "merged":
        items["proxy's weights"] = sum(spec_bytes(spec) for spec in specs)
    return items


def _host(
    config: Config,
    stages: Mapping[World, list[_Stage]],
    host: int,
    engine: EngineMemoryUse | None,
    with_engines: World,
    others: Sequence[EngineMemoryUse],
) -> dict[str, int]:
    """Host memory of one host by item; its ranks are neighbours. ``others`` are the engines of
    further policies beside ``engine``."""
    each, family = config.trainer.n_gpus_per_node, config.actor_rollout_ref
    compute = family.actor.compute
    here = [
        of_world[world.layout.coordinates(number).pp]
        for world, of_world in stages.items()
        for number, rank in enumerate(world.ranks)
        if rank // each == host
    ]
    # Written as it is copied to the host, or copied as a whole first.
    whole = config.trainer.async_save
    saved = sum(s.checkpoint if whole else min(s.checkpoint, _WRITE_BUFFER) for s in here)
    items = {"ranks": each * _RANK_PROCESS, "checkpoint": saved}
    if engine is None:
        return items
    shared = [stage for stage in here if stage.has_actor]
    if any(rank // each == host for rank in with_engines.ranks):
        proxies = family.proxy.engine.n_gpus_per_node or 0 if config.has_proxy_engines else 0
        own = each - proxies if with_engines.serves else len(shared)
        engine_gpus = family.rollout.n_gpus_per_node or own
        items["engines"] = (engine_gpus + len(others) * len(shared)) * _ENGINE_PROCESS
        items["proxy's engines"] = proxies * _ENGINE_PROCESS
        keys = config.trainer
        same = keys.critic_warmup or keys.turn_steps or pushes_adapters(config)
        if same and family.rollout.engine_sleeps:
            # The engine needs the same weights again, so it keeps them while it sleeps.
            items["engines' weights asleep"] = engine_gpus * engine.weights
        if others:
            # They keep them while another policy's engines draw.
            every = sum(one.weights for one in (engine, *others))
            items["engines' weights asleep"] = len(shared) * every
    if compute.param_offload:
        items["weights away"] = sum(
            state.parameters
            for stage in shared
            for state in (*stage.trained.values(), *stage.frozen.values())
        )
    if compute.optimizer_offload or compute.optimizer_cpu_offload:
        away = here if compute.optimizer_cpu_offload else shared
        items["optimizer away"] = sum(
            state.optimizer_bytes for stage in away for state in stage.trained.values()
        )
    return {name: size for name, size in items.items() if size}

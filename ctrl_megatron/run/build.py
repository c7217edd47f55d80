"""Builds the parts of a run from its configuration: worker, models, rewards, engine weights."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ctrl_megatron.algorithms import AdaptiveKLController, FixedKLController, get_kl_controller
from ctrl_megatron.checkpoint.hf import load_hf
from ctrl_megatron.config import Config
from ctrl_megatron.config.actor_rollout_ref import ProxyServer
from ctrl_megatron.config.adapters import pushes_adapters
from ctrl_megatron.config.environment import read_openai_key
from ctrl_megatron.config.keys import value_at_key
from ctrl_megatron.data.prompt_table import PromptTable
from ctrl_megatron.data.sampler import MixtureSampler, ResumableSampler, Sampler
from ctrl_megatron.engine_kinds import ENGINES
from ctrl_megatron.errors import convert_input_errors
from ctrl_megatron.generation.openai_client import OpenAIChat, TokenBudget
from ctrl_megatron.graph.world_link import WorldLink
from ctrl_megatron.models.build import BuildOptions
from ctrl_megatron.models.hf_config import read_shape
from ctrl_megatron.models.lora import lora_of_config, shape_with_adapters
from ctrl_megatron.models.optimizer import OptimizerOptions
from ctrl_megatron.models.parallel_model import OffloadPart
from ctrl_megatron.models.policy import BasePolicy, Policy
from ctrl_megatron.models.router import RouterOptions
from ctrl_megatron.models.shape import value_model_shape
from ctrl_megatron.models.strategy import ModelOptions
from ctrl_megatron.models.value import RewardModel, ValueModel
from ctrl_megatron.parallel.groups import ProcessGroups
from ctrl_megatron.parallel.stop import StopRequested
from ctrl_megatron.parallel.waiting import WaitRules
from ctrl_megatron.resharding.device import DeviceOwner, Role, policy_role
from ctrl_megatron.resharding.plan import EngineLayout, engine_cut
from ctrl_megatron.resharding.proof import PushProof
from ctrl_megatron.resharding.transports import sender_class
from ctrl_megatron.rewards import RewardSum
from ctrl_megatron.rewards.build import build_reward_sum
from ctrl_megatron.rollout.engine import CountedEngine
from ctrl_megatron.rollout.engine_specs import actor_shape, proxy_path
from ctrl_megatron.rollout.fleet import Services
from ctrl_megatron.rollout.weight_update import read_model_config
from ctrl_megatron.run.inputs import RunInputs
from ctrl_megatron.run.session import Session
from ctrl_megatron.steps.draws import DrawsAhead, LeftoverGroups
from ctrl_megatron.steps.guide_worker import GuideWorker
from ctrl_megatron.steps.performance import peak_flops_per_device
from ctrl_megatron.steps.proxy import ApiProxy, EngineProxy, SharedProxy, answer_cache
from ctrl_megatron.steps.reward_reader import RankRewardModel, max_conversation_tokens
from ctrl_megatron.steps.worker import DAGWorker, Proxy, RolloutWorker


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PolicyEngines:
    """The engines that a policy draws with, as a rank of the actor's world uses them."""

    services: Services
    client: CountedEngine | None
    """A client of all of them; None on ranks that lead no policy."""
    owner: DeviceOwner


def start_engines(run: Session, inputs: RunInputs, link: WorldLink) -> list[PolicyEngines]:
    """Start the services of the run and the engines of every policy, the first one's first; empty
    on ranks of a world without the actor, as ``link`` says. Collective over all ranks of the run.

    Engines that share devices start while those that have started sleep, because an engine measures
    free memory when it starts.
    """
    started, found = list[Services](), list[PolicyEngines]()
    for number, owner in enumerate(run.config.engine_owners):
        if number != owner:
            if found:
                found.append(found[owner])
            continue
        if started:
            # A stop that one world has seen meanwhile ends all of them here.
            link.synchronize_worlds()
        own = inputs.of_policy(number)
        services = run.start_services(
            max_model_len=own.max_model_len,
            proxy_model_len=own.proxy_model_len,
            judges=inputs.rewards.runs_programs and not number,
            policy=number,
            beside=started,
        )
        started.append(services)
        if not link.has_rank_zero:
            continue
        config = run.config.agents[number]
        try:
            device = device_owner(
                run,
                services,
                {} if number else shared_proxy_directory(config),
                config=config,
                shared=config.actor_rollout_ref.rollout.engine_sleeps,
                offloaded_parts=parts_to_offload(config),
                learns=config.learns_in,
                probe=own.train.prompts[0],
                beside=found[0].owner if found else None,
            )
        except StopRequested as why:
            link.propagate_error(why, weights_changed=False)
            raise
        client = services.connect() if leads(run) else None
        found.append(PolicyEngines(services=services, client=client, owner=device))
    return found


def sum_of_restarts(services: Sequence[Services]) -> dict[str, float]:
    """``Services.restarts`` of all of them."""
    total = Counter[str]()
    for one in dict.fromkeys(services):
        total.update(one.restarts())  # type: ignore[arg-type]
    return dict(total)


def leads(run: Session) -> bool:
    """Whether this rank calls engines and sandboxes for a model copy of any policy."""
    return any(run.groups_of_policy(n).is_leader for n in range(len(run.config.agents)))


def build_worker(
    run: Session, engines: Sequence[PolicyEngines], inputs: RunInputs
) -> tuple[DAGWorker, Sampler, int]:
    """(the worker of the nodes, the sampler of its rows, training steps of the run). ``engines``
    are those of each policy. Collective.
    """
    config, groups = run.config, run.groups
    codec, train, validation = inputs.codec, inputs.train, inputs.validation
    sampler, steps = row_sampler(config, train), total_steps(config, len(train.rows))
    services, device = engines[0].services, engines[0].owner
    rewards = build_rank_reward_sum(run, services, inputs)
    built = [
        build_learning_models(run, own, steps, engines[number].owner)
        for number, own in enumerate(config.agents)
    ]
    reward_model = None
    if run.has_role("reward_model"):
        reward_model = build_reward_model(config, groups, inputs, device.free_for_trainer)
        if reward_model is not None:
            device.register_model(reward_model.model)
            if config.actor_rollout_ref.actor.compute.param_offload:
                reward_model.model.offload("weights")
    worker = GuideWorker(
        config=config,
        groups=groups,
        background=run.background,
        stop=run.stop,
        codec=codec,
        train=train,
        validation=validation,
        draw=sampler.next_batch,
        peek=sampler.peek,
        total_steps=steps,
        engine=engines[0].client if groups.is_leader else None,
        owner=device,
        max_model_len=services.max_model_len,
        proxy=build_proxy(config, engines, inputs),
        rewards=rewards if groups.is_leader else None,
        reward_weights=inputs.rewards.weights,
        actor=built[0].policy,
        reference=built[0].reference,
        value=built[0].value,
        reward_model=reward_model,
        kl_controller=build_kl_controller(config),
        restarts=partial(sum_of_restarts, [used.services for used in engines]),
        peak_flops=peak_flops_per_device(config, groups),
    )
    further = [
        dataclasses.replace(
            worker,
            config=own,
            role=policy_role(number),
            groups=(theirs := run.groups_of_policy(number)),
            codec=inputs.of_policy(number).codec,
            train=inputs.of_policy(number).train,
            validation=inputs.of_policy(number).validation,
            engine=engines[number].client if theirs.is_leader else None,
            owner=engines[number].owner,
            max_model_len=engines[number].services.max_model_len,
            actor=built[number].policy,
            reference=built[number].reference,
            value=built[number].value,
            # The share of samples that were judged is reported for each policy.
            rewards=rewards.with_own_counts() if rewards and theirs.is_leader else None,
            kl_controller=build_kl_controller(own),
            ahead=DrawsAhead(),
            leftover=LeftoverGroups(),
            agents=(),
        )
        for number, own in enumerate(config.agents[1:], 1)
    ]
    agents = (worker, *further)
    for agent in agents:
        agent.agents = agents
    return worker, sampler, steps


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LearningModels:
    """A policy that learns and the models beside it, as far as they are on this rank."""

    policy: Policy
    reference: Policy | BasePolicy | None
    value: ValueModel | None


def build_learning_models(
    run: Session, config: Config, steps: int, device: DeviceOwner
) -> LearningModels:
    """The models of the policy whose configuration is ``config``. Collective."""
    number = config.number
    groups, role = run.groups_of_policy(number), policy_role(number)
    # Only the first policy's may be on ranks of their own.
    policy, reference = build_policies(
        config, groups, steps, device, role, with_reference=number > 0 or run.has_role("reference")
    )
    value = None
    if number > 0 or run.has_role("critic"):
        value = build_value_model(config, groups, steps, device.free_for_trainer)
        if value is not None:
            device.register_model(value)
    return LearningModels(policy=policy, reference=reference, value=value)


def build_worker_without_actor(run: Session, inputs: RunInputs) -> tuple[DAGWorker, Sampler, int]:
    """As ``build_worker`` for a rank of a world without actor. Collective over the ranks of its
    world.
    """
    config, train, groups = run.config, inputs.train, run.groups
    sampler = row_sampler(config, train)
    steps = total_steps(config, len(train.rows))
    reference = value = None
    if run.has_role("reference"):
        reference = build_reference(config, groups)
    if run.has_role("critic"):
        value = build_value_model(config, groups, steps)
    reward_model = None
    if run.has_role("reward_model"):
        reward_model = build_reward_model(config, groups, inputs)
    worker = GuideWorker(
        config=config,
        groups=groups,
        background=run.background,
        stop=run.stop,
        codec=inputs.codec,
        train=train,
        validation=inputs.validation,
        draw=sampler.next_batch,
        total_steps=steps,
        engine=None,
        owner=None,
        max_model_len=inputs.max_model_len,
        rewards=None,
        reward_weights=inputs.rewards.weights,
        actor=None,
        reference=reference,
        value=value,
        reward_model=reward_model,
        kl_controller=build_kl_controller(config),
        # Only the world of rank 0 reports performance.
        peak_flops=1.0,
    )
    return worker, sampler, steps


def rollout_worker(
    run: Session, services: Services, critic: str, inputs: RunInputs
) -> RolloutWorker:
    """A worker that generates with the critic of an HF directory and trains nothing. Collective."""
    config, groups = run.config, run.groups
    codec, table = inputs.codec, inputs.validation
    engine = services.connect() if groups.is_leader else None
    device = device_owner(run, services, {"actor": critic, **shared_proxy_directory(config)})
    engines = PolicyEngines(services=services, client=engine, owner=device)
    return RolloutWorker(
        config=config,
        groups=groups,
        background=run.background,
        stop=run.stop,
        codec=codec,
        validation=table,
        engine=engine,
        owner=device,
        max_model_len=services.max_model_len,
        proxy=build_proxy(config, [engines], inputs),
        rewards=build_rank_reward_sum(run, services, inputs),
        reward_weights=inputs.rewards.weights,
    )


def build_rank_reward_sum(run: Session, services: Services, inputs: RunInputs) -> RewardSum | None:
    """The reward functions of the run; None on ranks that lead no policy, and if no node of the
    pipeline reads rewards.
    """
    if not leads(run) or not inputs.rewards.functions:
        return None
    validated = inputs.validation.rows if inputs.validation else ()
    return build_reward_sum(
        run.config,
        inputs.rewards,
        sandbox_endpoint=services.sandbox_endpoint,
        sandbox_token=services.sandbox_token,
        rows=[*inputs.train.rows, *validated],
        tokenizer=inputs.codec.tokenizer,
    )


def build_proxy(
    config: Config, engines: Sequence[PolicyEngines], inputs: RunInputs
) -> Proxy | None:
    """The configured source of revisions; None for a pipeline without revisions. ``engines`` are
    those of each policy.
    """
    if not config.writes_revisions:
        return None
    proxy = config.actor_rollout_ref.proxy
    if proxy.kind == "api":
        with convert_input_errors("actor_rollout_ref.proxy.api.cache_path"):
            cache = answer_cache(proxy.api.cache_path)
        servers, extra = build_proxy_clients(proxy.api), proxy.api.extra_body
        return ApiProxy(servers, proxy.api.model, cache=cache, extra=extra)
    if config.has_proxy_engines:
        services = engines[0].services
        assert inputs.proxy_codec is not None and services.proxy_model_len is not None
        return EngineProxy(
            engines[0].client and services.connect("proxy"),
            inputs.proxy_codec,
            max_model_len=services.proxy_model_len,
            joins_calls=ENGINES[proxy.engine.name].joins_calls,
            patient=config.trainer.service_restarts > 0,
        )
    number = 0 if config.shares_engines_with_frozen_proxy else 1
    asked = engines[number]
    return SharedProxy(
        asked.client,
        asked.owner,
        inputs.of_policy(number).codec,
        max_model_len=asked.services.max_model_len,
        role=policy_role(number) if number else "proxy",
    )


def build_proxy_clients(keys: ProxyServer) -> dict[str, OpenAIChat]:
    """A client of every configured server, by its address; they share the budget of tokens."""
    budget = None if keys.token_budget is None else TokenBudget(keys.token_budget)
    with convert_input_errors("actor_rollout_ref.proxy.api"):
        return {
            url: OpenAIChat(
                url,
                keys.model,
                api_key=read_openai_key(),
                max_concurrency=keys.max_concurrency,
                attempts=keys.attempts,
                timeout=keys.timeout,
                total=keys.request_timeout,
                budget=budget,
                extra_body=keys.extra_body,
            )
            for url in keys.base_url
        }


def row_sampler(config: Config, train: PromptTable) -> Sampler:
    """The order in which the rows of ``train`` are drawn (``data.mixture``). UserError where a file
    has fewer rows than its share of a batch.
    """
    seed, data = config.trainer.seed, config.data
    parts, taken = list[list[int]](), set[str]()
    for ids in train.sets.values():
        # A row that several files contain is drawn as one of the first.
        parts.append(sorted(train.row_number_by_id[id_] for id_ in ids - taken))
        taken |= ids
    sampler: Sampler = (
        MixtureSampler(parts, data.mixture, seed=seed, shuffle=data.shuffle)
        if data.mixture
        else ResumableSampler(len(train.rows), seed=seed, shuffle=data.shuffle)
    )
    # A batch is tried before the engines, which take minutes to start.
    sampler.peek(config.gen_batch_size, 1)
    return sampler


def total_steps(config: Config, rows: int) -> int:
    """Training steps of the run, whose data has so many ``rows``."""
    epochs = config.trainer.total_epochs * (rows // config.data.train_batch_size)
    wanted = config.trainer.total_training_steps
    return epochs if wanted is None else wanted


# Models


def build_kl_controller(config: Config) -> FixedKLController | AdaptiveKLController:
    """The controller of the KL coefficient that ``algorithm.kl_ctrl`` describes."""
    control = config.algorithm.kl_ctrl
    return get_kl_controller(control.type, control.kl_coef, control.target_kl, control.horizon)


def _nothing() -> None: ...


def build_policies(
    config: Config,
    groups: ProcessGroups,
    steps: int,
    device: DeviceOwner | None,
    role: Role = "actor",
    *,
    with_reference: bool = True,
) -> tuple[Policy, Policy | BasePolicy | None]:
    """The policy of a ``role`` for ``steps`` training steps, and its reference if the objective has
    a KL and ``with_reference`` it is to be here. ``config`` is the policy's
    (``Config.agents``). ``device`` is None where no engines share it.
    """
    family = config.actor_rollout_ref
    take_device = _nothing if device is None else device.free_for_trainer
    policy = build_policy(
        config,
        groups,
        path=family.model.path,
        optimizer=policy_optimizer(config, steps),
        budget=family.update_token_budget,
        take_device=take_device,
        canvas=config.data.max_response_length,
    )
    if device is not None:
        device.register_policy(policy, role)
    if config.reference_is_base:
        return policy, BasePolicy(policy)
    reference = build_reference(config, groups, take_device) if with_reference else None
    if reference is not None:
        if device is not None:
            device.register_model(reference)
        if family.actor.compute.param_offload:
            reference.offload("weights")
    return policy, reference


def build_reference(
    config: Config, groups: ProcessGroups, take_device: Callable[[], None] = _nothing
) -> Policy | None:
    """The frozen reference; None if the objective has no KL."""
    family = config.actor_rollout_ref
    if not config.needs_reference:
        return None
    return build_policy(
        config,
        groups,
        path=family.ref.model.path or family.model.path,
        optimizer=None,
        budget=family.log_prob_token_budget,
        take_device=take_device,
        canvas=config.data.max_response_length,
    )


def build_policy(
    config: Config,
    groups: ProcessGroups,
    *,
    path: str,
    optimizer: OptimizerOptions | None,
    budget: int,
    take_device: Callable[[], None] = _nothing,
    canvas: int = 0,
) -> Policy:
    """A policy with the weights of the HF directory ``path``; frozen without an optimizer.
    ``canvas`` as in ``ModelOptions``.
    """
    options = _model_options(config, optimizer=optimizer, budget=budget, canvas=canvas)
    shape = read_shape(path, config.actor_rollout_ref.actor.strategy)
    shape = shape_with_adapters(shape, lora_of_config(config) if optimizer else None)
    policy = Policy(shape, groups, options, take_device)
    load_hf(policy, path)
    if optimizer is not None:
        policy.start_optimizer()
    return policy


def build_value_model(
    config: Config,
    groups: ProcessGroups,
    steps: int,
    take_device: Callable[[], None] = _nothing,
) -> ValueModel | None:
    """The value model for ``steps`` training steps; None if nothing reads its values."""
    if not config.needs_value_model:
        return None
    options = _model_options(
        config,
        optimizer=value_optimizer(config, steps),
        budget=config.actor_rollout_ref.update_token_budget,
    )
    path = config.critic.model.path or config.actor_rollout_ref.model.path
    shape = value_model_shape(read_shape(path, config.actor_rollout_ref.actor.strategy))
    shape = shape_with_adapters(shape, lora_of_config(config, value=True))
    model = ValueModel(shape, groups, options, take_device)
    load_hf(model, path)
    model.start_optimizer()
    return model


def build_reward_model(
    config: Config,
    groups: ProcessGroups,
    inputs: RunInputs,
    take_device: Callable[[], None] = _nothing,
) -> RankRewardModel | None:
    """The frozen reward model with its tokenizer; None if no model rewards texts."""
    codec = inputs.reward_codec
    if codec is None:
        return None
    path = config.reward_model.model.path
    assert path is not None  # whose tokenizer it is
    options = _model_options(
        config, optimizer=None, budget=config.actor_rollout_ref.log_prob_token_budget
    )
    shape = read_shape(path, config.actor_rollout_ref.actor.strategy)
    model = RewardModel(shape, groups, options, take_device)
    load_hf(model, path)
    return RankRewardModel(
        model=model,
        codec=codec,
        padding=read_model_config(path).get("pad_token_id"),
        longest=max_conversation_tokens(config, shape),
    )


def parts_to_offload(config: Config) -> tuple[OffloadPart, ...]:
    """The parts of the models that go to host memory while the engine generates."""
    compute = config.actor_rollout_ref.actor.compute
    flags: dict[OffloadPart, bool] = {
        "weights": compute.param_offload,
        "gradients": compute.grad_offload,
        "optimizer": compute.optimizer_offload,
    }
    return tuple(part for part, leaves in flags.items() if leaves)


def policy_optimizer(config: Config, steps: int) -> OptimizerOptions:
    """The policy's optimizer for ``steps`` training steps."""
    actor = config.actor_rollout_ref.actor
    per_step = actor.ppo_epochs * (config.data.train_batch_size // actor.ppo_mini_batch_size)
    learning = max(1, sum(map(config.learns_in, range(steps))))
    return optimizer_options(config, "actor_rollout_ref.actor.optim.lr", learning * per_step)


def value_optimizer(config: Config, steps: int) -> OptimizerOptions:
    """The value model's optimizer: the actor's with another learning rate, in every step."""
    size = config.actor_rollout_ref.actor.ppo_mini_batch_size
    per_step = config.value_epochs * (config.data.train_batch_size // size)
    return optimizer_options(config, "critic.optim.lr", steps * per_step)


def _model_options(
    config: Config, *, optimizer: OptimizerOptions | None, budget: int, canvas: int = 0
) -> ModelOptions:
    compute = config.actor_rollout_ref.actor.compute
    megatron = config.actor_rollout_ref.actor.megatron
    return ModelOptions(
        build=BuildOptions(
            dtype=config.actor_rollout_ref.model_dtype,
            recompute_granularity=compute.recompute_granularity if optimizer else None,
            recompute_num_layers=compute.recompute_num_layers,
            overrides=megatron.override_transformer_config,
        ),
        token_budget=budget,
        shared_prefix=config.shares_prefixes,
        canvas=canvas,
        logprob_chunk=compute.logprob_chunk_size,
        router=RouterOptions(
            balance=megatron.moe_aux_loss_coeff,
            z=megatron.moe_z_loss_coeff,
            bias_rate=megatron.moe_router_bias_update_rate,
        ),
        optimizer=optimizer,
    )


def optimizer_options(config: Config, lr_key: str, steps: int) -> OptimizerOptions:
    """The actor's optimizer with the learning rate of ``lr_key``, for ``steps`` optimizer steps."""
    actor = config.actor_rollout_ref.actor
    optim = actor.optim
    return OptimizerOptions(
        lr=value_at_key(config, lr_key),
        lr_key=lr_key,
        total_steps=steps,
        weight_decay=optim.weight_decay,
        betas=optim.betas,
        eps=optim.eps,
        warmup_steps=int(optim.lr_warmup_steps_ratio * steps),
        schedule=optim.lr_scheduler_type,
        min_lr_ratio=optim.min_lr_ratio,
        clip_grad=actor.grad_clip,
        distributed=actor.megatron.use_distributed_optimizer,
        on_host=actor.compute.optimizer_cpu_offload,
    )


# The engine's weights


def device_owner(
    run: Session,
    services: Services,
    directories: Mapping[Role, str],
    *,
    config: Config | None = None,
    shared: bool = False,
    offloaded_parts: Sequence[OffloadPart] = (),
    learns: Callable[[int], bool] = lambda step: True,
    probe: Sequence[int] = (),
    beside: DeviceOwner | None = None,
) -> DeviceOwner:
    """The owner of the devices, which pushes to the configured engines. ``probe`` are the tokens of
    a row by which pushes of a trained policy are verified. ``config`` is that of a policy, by
    default the first, and ``beside`` is the owner for another's engines. Collective."""
    config = config or run.config
    groups = run.groups_of_policy(config.number)
    family = config.actor_rollout_ref
    kind, quantised = ENGINES[family.rollout.name], family.rollout.quantization is not None
    adapters_alone = pushes_adapters(config)
    drawing = [
        own
        for own, of in zip(run.config.agents, run.config.engine_owners, strict=True)
        if run.config.agents[of] is config
    ]
    sender = sender_class(family.rollout.weight_transport)(groups)
    run.at_end.append(sender.close)
    layout = EngineLayout(
        dtype=family.rollout_dtype,
        bucket_bytes=family.rollout.update_bucket_megabytes << 20,
        placement=services.placement.of_role("rollout"),
        cut=engine_cut(
            family.rollout.name,
            family.rollout.tensor_model_parallel_size,
            family.rollout.engine_kwargs,
            on_cpu=groups.device.type == "cpu",
        ),
        sends="trained" if adapters_alone else "merged",
        quantised=quantised,
    )
    return DeviceOwner(
        services.connect_to_host_engines(),
        run.background,
        sender,
        layout,
        WaitRules(groups=groups, stop=run.stop, limit=config.trainer.wait_timeout),
        directories=directories,
        strategy=family.actor.strategy,
        shared=shared,
        offloaded_parts=offloaded_parts,
        learns=learns,
        keep_proxy=family.proxy.kind == "shared" and family.proxy.keep_in_host_memory,
        adapter_shape=actor_shape(config) if adapters_alone else None,
        proof=PushProof(
            config.trainer.verify_weight_sync,
            groups,
            checksums=not (quantised and kind.rearranges_quantised),
            probe=() if kind.denoises else probe,
            merges=any(own.actor_rollout_ref.model.lora_rank for own in drawing)
            and not adapters_alone,
        ),
        restarts=services if config.trainer.service_restarts else None,
        beside=beside,
    )


def shared_proxy_directory(config: Config) -> dict[Role, str]:
    """{"proxy": directory} of a frozen proxy without engines of its own, whose weights are pushed
    to the actor's engines when it answers; else {}."""
    return {"proxy": proxy_path(config)} if config.shares_engines_with_frozen_proxy else {}

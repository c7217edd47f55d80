"""Training, from a checked configuration to the end of the run."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from ctrl_megatron.algorithms import (
    ESTIMATOR_INPUTS,
    LOSS_INPUTS,
    POLICY_LOSS_REGISTRY,
    get_adv_estimator,
)
from ctrl_megatron.checkpoint.store import (
    DRAWN_AHEAD,
    POLICY_FOLDER,
    REFERENCE_FOLDER,
    VALUE_FOLDER,
    CheckpointStore,
    read_state,
)
from ctrl_megatron.config import COMPLETION_PIPELINES, CTRL_PIPELINE, Config
from ctrl_megatron.config.checks import loss_hint
from ctrl_megatron.config.import_path import imported
from ctrl_megatron.config.keys import value_of
from ctrl_megatron.config.options import named_parameters, own_options
from ctrl_megatron.data.prompt_table import PromptTable
from ctrl_megatron.errors import UserError, users_code, users_input
from ctrl_megatron.models.kernels import kernels_line
from ctrl_megatron.parallel.layout import World, worlds_of
from ctrl_megatron.parallel.placement import EngineRole
from ctrl_megatron.parallel.stop import StopRequested
from ctrl_megatron.pipeline.ahead import SavedDraws
from ctrl_megatron.pipeline.build import apart_worker, build_worker, row_sampler, total_steps
from ctrl_megatron.pipeline.checked_rows import checked_inputs
from ctrl_megatron.pipeline.ctrl import ctrl_pipeline
from ctrl_megatron.pipeline.dump import StepDump
from ctrl_megatron.pipeline.dynamic_sampling import check_sampling
from ctrl_megatron.pipeline.executor import check_calls
from ctrl_megatron.pipeline.graph import StepReport, TaskGraph
from ctrl_megatron.pipeline.inputs import (
    RunInputs,
    check_checkpoint,
    check_disk,
    check_gpu,
    check_loggers,
    check_models,
    check_place,
    check_proxy,
    check_temporary_directory,
    check_together,
    check_tokenizers,
    is_finished,
    read_inputs,
)
from ctrl_megatron.pipeline.loop import Resumable, Schedule, TrainingLoop
from ctrl_megatron.pipeline.node_fields import check_fields
from ctrl_megatron.pipeline.node_keys import check_read
from ctrl_megatron.pipeline.performance import device_memory, passes, weights_gauges
from ctrl_megatron.pipeline.profile import check_profile, profiles
from ctrl_megatron.pipeline.recorder import Recorder, banner
from ctrl_megatron.pipeline.reward_reader import check_reward_model
from ctrl_megatron.pipeline.services import Services, engine_keys
from ctrl_megatron.pipeline.session import Session, session
from ctrl_megatron.pipeline.siirl_names import NodeRole
from ctrl_megatron.pipeline.worker import DAGWorker, RolloutWorker
from ctrl_megatron.pipeline.worlds import Between, News, OneWorld, Worlds, check_worlds
from ctrl_megatron.resharding.device import AGENTS, Role
from ctrl_megatron.resharding.transports import sender_class
from ctrl_megatron.rewards.build import check_rewards
from ctrl_megatron.rewards.plan import RewardPlan, plan_rewards
from ctrl_megatron.rollout.engine import require_engine
from ctrl_megatron.sandbox import SandboxClient, SandboxError
from ctrl_megatron.sandbox.limits import LEVELS

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_PARTS = ("kl_controller", "reserve")
"""Parts of the state in a checkpoint beside the sampler."""


def check_run(config: Config) -> tuple[TaskGraph, RewardPlan]:
    """The pipeline and the rewards of an RL run, once all but its rows has been checked.

    Raises UserError, with a line per problem.
    """
    graphs: list[TaskGraph] = []
    plans: list[RewardPlan] = []
    rollout = config.actor_rollout_ref.rollout
    check_together(
        lambda: graphs.append(pipeline_of(config)),
        lambda: check_names(config),
        lambda: check_rewards(config),
        lambda: plans.extend(plan_rewards(config, graph.required_rewards) for graph in graphs),
        lambda: [check_sampling(config, plan.weights) for plan in plans],
        lambda: check_models(config, "rl"),
        lambda: require_engine(rollout.name, rollout.python),
        lambda: sender_class(rollout.weight_transport),
        lambda: check_tokenizers(config, "rl"),
        lambda: check_proxy(config),
        lambda: check_reward_model(config),
        lambda: check_loggers(config),
        lambda: check_profile(config),
        lambda: check_place(config),
        lambda: check_temporary_directory(config),
        lambda: check_checkpoint(
            config,
            saved_folders(config),
            ("sampler", *saved_parts(config)),
        ),
    )
    check_gpu(config, "rl")
    check_disk(config, "rl")
    return graphs[0], plans[0]


def train(config: Config) -> bool:
    """A whole RL run on this rank; False if it was stopped by a signal.

    Raises UserError, before anything starts, for input that cannot be used.
    """
    (graph, rewards), trainer, finished = check_run(config), config.trainer, False
    rollout = config.actor_rollout_ref.rollout
    inputs = read_inputs(
        config,
        rewards,
        validates=graph.report.validate is not None,
        revises=graph.revises,
    )
    steps = planned_steps(config, inputs.train)
    stage = "after RL" if graph.report.validate else None
    if is_finished(config, steps, models=saved_folders(config), stage=stage):
        return True
    with session(config, apart=True) as run:
        inputs = checked_inputs(run, inputs)
        steps, before = planned_steps(config, inputs.train), steps
        if steps < before and is_finished(config, steps, models=saved_folders(config), stage=stage):
            run.watch.quiet()
            return True
        between = between_worlds(run, inputs)
        told, isolation = "", dict[str, float]()
        if between.is_home:
            try:
                services = run.start_services(
                    max_model_len=inputs.max_model_len,
                    proxy_model_len=inputs.proxy_model_len,
                    judges=rewards.runs_programs,
                )
                worker, sampler, steps = build_worker(run, services, inputs)
                run.check_stop()
                isolation = worker.ask(lambda: isolation_level(worker), "the sandboxes to answer")
                proxy = worker.proxy
                told = engines_and_sandbox(config, services, isolation)
                if answering := "" if proxy is None else worker.ask(proxy.greet, "the proxy"):
                    told += f"; {answering}"
            except StopRequested as why:
                between.tell(why, changed=False)
                raise
        else:
            worker, sampler, steps = apart_worker(run, inputs)
            graph.report = StepReport()
        between.meet()
        if run.served is not None:
            run.served.add(lambda: weights_gauges(worker.device))
        recorder = Recorder(
            config, active=run.everyone.is_first, total_steps=steps, served=run.served
        )
        memory = device_memory(run.groups)
        timeline = recorder.timeline(memory)
        for agent in worker.agents:
            agent.timeline = timeline
        dump = StepDump(worker, steps)
        loop = TrainingLoop(
            worker=worker,
            graph=graph,
            sampler=sampler,
            store=CheckpointStore(
                Path(trainer.run_dir) / "checkpoints",
                keep=trainer.max_ckpt_to_keep,
                side_files=Path(config.actor_rollout_ref.model.path),
                asynchronous=trainer.async_save,
                everyone=run.everyone,
            ),
            recorder=recorder,
            schedule=Schedule(
                batch_size=config.gen_batch_size,
                total_steps=steps,
                total_epochs=counted_epochs(config),
                save_freq=trainer.save_freq,
                save_hf_freq=trainer.save_hf_freq,
                test_freq=trainer.test_freq,
                val_before_train=trainer.val_before_train,
                resume_mode=trainer.resume_mode,
                max_bad_steps=trainer.max_bad_steps,
            ),
            memory=memory,
            between=between,
            everyone=run.everyone,
            passes=None if between.is_home else lambda: passes(worker),
            hear=partial(_hear, worker),
            watchers=(dump, *profiles(config, worker)) if between.is_home else (),
            # A dump holds the batch of one policy.
            keep_batch=dump.keep if between.is_home and len(worker.agents) == 1 else None,
            parts=_saved_parts(worker),
            late={DRAWN_AHEAD: SavedDraws(worker)} if rollout.staleness and between.is_home else {},
            constants=isolation,
        )
        bound = "" if counted_epochs(config) is None else " at most"
        for line in banner(
            config,
            run.groups.layout,
            steps=f"{steps} steps{bound} of {config.data.train_batch_size} prompts x "
            f"{config.actor_rollout_ref.rollout.n}",
            rows=len(inputs.train.rows),
            dropped={
                "prompt above data.max_prompt_length": inputs.train.dropped,
                "data.bad_rows=drop": len(inputs.train.bad),
            },
            validation=len(inputs.validation.rows) if inputs.validation else 0,
            services=told + "".join(map(world_line, run.worlds[1:])),
        ):
            recorder.say(line)
        for line in inputs.left_out():
            recorder.say(line)
        dtype, on_gpu = config.actor_rollout_ref.model.dtype, run.groups.device.type == "cuda"
        recorder.say(kernels_line(on_gpu=on_gpu, dtype=dtype))
        loop.resume()
        finished = loop.run()
        report = recorder.close(report=True)
        if report is not None:
            print(f"report: {report}")
        run.watch.quiet()
        worker.close()
    return finished


def saved_folders(config: Config) -> tuple[str, ...]:
    """The folders of models in a checkpoint of the run."""
    others = {VALUE_FOLDER: config.needs_values, REFERENCE_FOLDER: config.refreshes_reference}
    saved = (folder for folder, is_saved in others.items() if is_saved)
    return (POLICY_FOLDER, *saved, *_further_policies(config))


def saved_parts(config: Config) -> tuple[str, ...]:
    """The parts of the state in a checkpoint beside the sampler."""
    others = (f"{agent}/{part}" for agent in _further_policies(config) for part in _PARTS)
    return (*_PARTS, *others)


def _further_policies(config: Config) -> tuple[Role, ...]:
    """The policies that learn beside the actor."""
    return AGENTS[1 : len(config.agents)]


def _saved_parts(worker: DAGWorker) -> dict[str, Resumable]:
    """The same with their names in a checkpoint."""
    parts = [part for agent in worker.agents for part in (agent.kl_controller, agent.leftover)]
    return dict(zip(saved_parts(worker.config), parts, strict=True))


def world_line(world: World) -> str:
    """For the banner: roles on ranks of their own."""
    layout, ranks = world.layout, ", ".join(map(str, world.ranks))
    sizes = f"tensor {layout.tensor} x pipeline {layout.pipeline} x data {layout.data}"
    return f"; {' and '.join(world.roles)} on ranks {ranks}: {sizes}"


def between_worlds(run: Session, inputs: RunInputs) -> Between:
    """The way from this rank's world to the others."""
    if len(run.worlds) == 1:
        return OneWorld()
    return Worlds(run.joined, run.worlds, run.config, run.stop, inputs.codec.pad_token_id)


def _hear(worker: DAGWorker, others: Sequence[News]) -> None:
    worker.elsewhere = [news.passes for news in others]


def counted_epochs(config: Config) -> int | None:
    """The epochs after which dynamic sampling begins no further step. A step of it draws several
    batches of rows, so the number of steps does not follow from the rows. None if the number of
    steps is fixed.
    """
    counted = config.algorithm.filter_groups.enable and config.trainer.total_training_steps is None
    return config.trainer.total_epochs if counted else None


def planned_steps(config: Config, train: PromptTable) -> int:
    """Training steps of the run. If epochs are counted, this is the largest number, or the number
    of the checkpoint's steps if that has drawn all rows.
    """
    steps, epochs = total_steps(config, len(train.rows)), counted_epochs(config)
    trainer = config.trainer
    store = CheckpointStore(
        Path(trainer.run_dir) / "checkpoints", keep=-1, side_files=Path(trainer.run_dir)
    )
    models = saved_folders(config)
    checkpoint = None if epochs is None else store.find(trainer.resume_mode, models)
    if epochs is None or checkpoint is None:
        return steps
    with users_input():
        state = read_state(checkpoint, models, ("sampler", *saved_parts(config)))
        sampler = row_sampler(config, train)
        sampler.load_state_dict(state["sampler"])
    through = sampler.is_through(epochs, config.gen_batch_size)
    return min(steps, checkpoint.step) if through else steps


def engines_and_sandbox(config: Config, services: Services, level: Mapping[str, float]) -> str:
    """For the banner: the engines, and the isolation of programs."""
    counts: Counter[EngineRole] = Counter(engine.role for engine in services.placement.engines)
    engines = ", ".join(
        f"{count} {engine_keys(config, role).name} engine{'s' if count > 1 else ''}"
        + (" of the proxy" if role == "proxy" else "")
        for role, count in counts.items()
    )
    if "sandbox/isolation" not in level:
        return f"{engines}; no sandbox of this run"
    held = LEVELS[len(LEVELS) - 1 - int(level["sandbox/isolation"])]
    return f"{engines}; sandbox isolation: {held}"


def pipeline_of(config: Config) -> TaskGraph:
    """The graph that the function ``dag.custom_pipeline_fn`` builds, or CTRL's.

    The function's first parameter, if it has one, is the configuration; the others are the options
    of the pipeline (``dag.options``).
    """
    reference, key = config.dag.custom_pipeline_fn, "dag.custom_pipeline_fn"
    with users_code(f"{key}={reference}") if reference else nullcontext():
        function = imported(reference, key) if reference else ctrl_pipeline
        parameters = named_parameters(function).items()
        first = [name for name, p in parameters if p.kind in _POSITIONAL][:1]
        options = own_options(
            function,
            config.dag.options,
            "dag.options",
            inputs=first,
            place=config.written.get("dag.options"),
        )
        graph = function(*(config for _ in first), **options)
    if not isinstance(graph, TaskGraph):
        raise UserError(
            f"{key}={reference} returned {type(graph).__name__}, not the TaskGraph that "
            "Pipeline.build() returns"
        )
    check_calls(graph)
    check_fields(config, graph)
    check_worlds(graph, worlds_of(config.trainer.nnodes * config.trainer.n_gpus_per_node, config))
    if config.algorithm.filter_groups.enable and not graph.draws_rows:
        raise UserError(
            f"algorithm.filter_groups.enable=true has no effect on the pipeline {graph.graph_id}: "
            f"none of its nodes has the role {NodeRole.DYNAMIC_SAMPLING.value}; turn it off, or "
            "add such a node (ctrl_pipeline(config) and grpo_pipeline(config) have one)"
        )
    if reference not in (None, CTRL_PIPELINE, *COMPLETION_PIPELINES):
        check_read(config, graph)
    return graph


def check_names(config: Config) -> None:
    """UserError for an estimator or a loss that is not registered, and for options that it does not
    have. The module of ``dag.custom_pipeline_fn`` must have been imported, which may register some.
    """
    check_together(
        lambda: _check_function(
            config, "algorithm.adv_estimator", get_adv_estimator, ESTIMATOR_INPUTS
        ),
        lambda: _check_function(
            config,
            "actor_rollout_ref.actor.policy_loss",
            lambda name: POLICY_LOSS_REGISTRY.get(name).function,
            LOSS_INPUTS,
        ),
    )


def _check_function(
    config: Config,
    key: str,
    look_up: Callable[[str], Callable[..., object]],
    inputs: tuple[str, ...],
) -> None:
    name, options = value_of(config, key), f"{key}_options"
    try:
        function = look_up(name)
    except ValueError as error:
        raise UserError(
            f"{key}={name}: {error}; "
            + (
                loss_hint(key, config)
                or "correct the name, or register it in the module of dag.custom_pipeline_fn"
            )
        ) from None
    own_options(
        function,
        value_of(config, options),
        options,
        inputs=inputs,
        place=config.written.get(options),
    )


async def isolation_level(worker: RolloutWorker) -> dict[str, float]:
    """``sandbox/isolation``: the lowest level among the run's services, 0 none, 1 standard, 2
    strict; empty if no sandbox of this package judges (leaders only). UserError for a service of
    the user's that does not answer.
    """
    judge = None if worker.rewards is None else worker.rewards.judge
    if not isinstance(judge, SandboxClient):
        return {}
    # From the strictest to none; a service that reports no level is not from this package.
    try:
        levels = await judge.ping()
    except SandboxError as error:
        if not worker.config.sandbox.endpoint:
            raise
        raise UserError(
            str(error),
            key="sandbox.endpoint",
            remedy="correct the address, or start a service there (ctrl-serve-sandbox)",
        ) from error
    reached = [LEVELS.index(level) for level in levels.values() if level in LEVELS]
    return {"sandbox/isolation": float(len(LEVELS) - 1 - max(reached))} if reached else {}

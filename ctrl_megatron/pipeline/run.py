"""Builds everything a training run needs from its configuration, runs it, takes it down."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ctrl_megatron.algorithms import (
    get_adv_estimator,
    get_kl_controller,
    get_policy_loss_terms,
)
from ctrl_megatron.checkpoint.store import CheckpointStore
from ctrl_megatron.config import Config
from ctrl_megatron.config.environment import Launch, read_launch
from ctrl_megatron.data.sampler import ResumableSampler
from ctrl_megatron.data.tokens import TextCodec
from ctrl_megatron.metrics import device_peak, measure_peak_flops
from ctrl_megatron.models.policy import Policy
from ctrl_megatron.models.value import ValueModel
from ctrl_megatron.parallel.background import BackgroundLoop
from ctrl_megatron.parallel.groups import Groups, initialize, shutdown
from ctrl_megatron.parallel.layout import layout_for
from ctrl_megatron.pipeline.assembly import (
    engine_layout,
    engine_weights,
    further_rewards,
    isolation_metrics,
    reward_model,
)
from ctrl_megatron.pipeline.builtin import ctrl_pipeline
from ctrl_megatron.pipeline.executor import Executor
from ctrl_megatron.pipeline.failure import EXIT_CODE, FailureWatch
from ctrl_megatron.pipeline.interrupt import StopFlag
from ctrl_megatron.pipeline.loop import LoopOptions, TrainingLoop
from ctrl_megatron.pipeline.models import build_policies, build_value_model
from ctrl_megatron.pipeline.node import resolve
from ctrl_megatron.pipeline.prompts_table import PromptTable, load_prompt_table
from ctrl_megatron.pipeline.recorder import Recorder
from ctrl_megatron.pipeline.services import Services, ServiceStart
from ctrl_megatron.pipeline.step_metrics import examples_of, performance
from ctrl_megatron.pipeline.task_graph import TaskGraph
from ctrl_megatron.pipeline.validation import validate
from ctrl_megatron.pipeline.worker import DAGWorker
from ctrl_megatron.resharding.shared_memory import remove_segments
from ctrl_megatron.resharding.sources import MegatronSource


def join(config: Config, launch: Launch | None = None) -> Groups:
    """Meet the other ranks that the launcher started, in the configured layout."""
    launch, megatron = launch or read_launch(), config.actor_rollout_ref.actor.megatron
    layout = layout_for(
        launch.world_size,
        tensor=megatron.tensor_model_parallel_size,
        pipeline=megatron.pipeline_model_parallel_size,
        virtual_pipeline=megatron.virtual_pipeline_model_parallel_size,
        sequence_parallel=megatron.sequence_parallel,
    )
    return initialize(
        layout,
        seed=config.trainer.seed,
        timeout_seconds=config.trainer.distributed_timeout,
        launch=launch,
    )


@contextmanager
def guarded(
    groups: Groups, config: Config
) -> Iterator[tuple[FailureWatch, list[Callable[[], None]]]]:
    """A run's body: a failure on any rank ends all ranks, printing the first cause.

    Yields the watch and a list of clean-up functions, called last to first whatever happens.
    """
    pids = set(groups.from_here(os.getpid()).values())
    clean_up: list[Callable[[], None]] = [lambda: remove_segments(pids.__contains__)]
    one_at_a_time = threading.Lock()

    def clean() -> None:
        # The watch and the main thread may both get here; whoever is second waits for the first,
        # since it ends the process afterwards.
        with one_at_a_time:
            while clean_up:
                clean_up.pop()()

    watch = FailureWatch(groups, timeout=config.trainer.failure_timeout, clean_up=clean)
    try:
        yield watch, clean_up
        watch.close()
    except BaseException as error:
        watch.report(error)
        clean()
        sys.stdout.flush()
        sys.stderr.flush()
        # Destructors of a broken process group can hang; nothing of value is left in this process.
        watch.exit(EXIT_CODE)
    clean()
    shutdown()


def task_graph(config: Config) -> TaskGraph:
    """The built-in pipeline, or what ``dag.custom_pipeline_fn`` returns."""
    reference = config.dag.custom_pipeline_fn
    if reference:
        return resolve(reference, "dag.custom_pipeline_fn")()
    return ctrl_pipeline(
        values=config.needs_values,
        dynamic_sampling=config.algorithm.filter_groups.enable,
        greedy_baseline=config.algorithm.adv_estimator == "remax",
    )


def check_names(config: Config) -> None:
    """ValueError naming the key of an estimator or a loss that nothing has registered.

    The module of ``dag.custom_pipeline_fn`` must have been imported, which may register some.
    """
    named: tuple[tuple[str, str, Callable[[str], object]], ...] = (
        ("algorithm.adv_estimator", config.algorithm.adv_estimator, get_adv_estimator),
        (
            "actor_rollout_ref.actor.policy_loss",
            config.actor_rollout_ref.actor.policy_loss,
            get_policy_loss_terms,
        ),
    )
    for key, name, look_up in named:
        try:
            look_up(name)
        except ValueError as error:
            raise ValueError(
                f"{key}={name}: {error}; correct the name, or register it in the module of "
                "dag.custom_pipeline_fn"
            ) from None


def train(config: Config) -> bool:
    """A whole RL run on this rank; False if it was stopped by a signal."""
    stop = StopFlag().install()
    groups = join(config)
    with guarded(groups, config) as (watch, clean_up):
        graph = task_graph(config)
        check_names(config)
        further_rewards(config, None)  # a wrong name shows before the models are built
        background = BackgroundLoop()
        starting = ServiceStart(config, groups, Path(config.trainer.run_dir))
        clean_up.append(starting.stop)
        for service in starting.guarded():
            watch.guard(service)
        codec = TextCodec(config.actor_rollout_ref.model.tokenizer)
        train_table, validation = prompt_tables(config, codec)
        total = _total_steps(config, len(train_table.rows))
        sampler = ResumableSampler(
            len(train_table.rows), seed=config.data.seed, shuffle=config.data.shuffle
        )
        policy, reference = build_policies(config, groups, total)
        value = build_value_model(config, groups, total)
        services = starting.wait()
        if services.engine is not None:
            watch.guard(services.guarded()[0])
        worker = _worker(
            config,
            groups,
            background,
            stop,
            codec,
            services,
            policy=policy,
            reference=reference,
            value=value,
            draw=sampler.next_batch,
            train=train_table,
            validation=validation,
        )
        recorder = Recorder(config, active=groups.is_first, total_steps=total)
        worker.timeline = recorder.timeline()
        loop = _loop(config, worker, Executor(graph, worker), sampler, recorder, total)
        if train_table.dropped:
            recorder.say(f"{train_table.dropped} rows have overlong prompts and are left out")
        loop.resume()
        worker.weights.actor_changed(worker.step)
        finished = loop.run()
        report = recorder.close(report=True)
        if report is not None:
            print(f"report: {report}")
        watch.quiet()
        worker.close()
    stop.restore()
    return finished


def _loop(
    config: Config,
    worker: DAGWorker,
    executor: Executor,
    sampler: ResumableSampler,
    recorder: Recorder,
    total: int,
) -> TrainingLoop:
    """The loop over ``total`` steps. Collective."""
    trainer = config.trainer
    peak, isolation = device_peak_of(config, worker.groups), isolation_metrics(worker)
    return TrainingLoop(
        worker=worker,
        executor=executor,
        sampler=sampler,
        store=CheckpointStore(
            Path(trainer.run_dir) / "checkpoints",
            keep=trainer.max_ckpt_to_keep,
            side_files=Path(config.actor_rollout_ref.model.path),
        ),
        recorder=recorder,
        options=LoopOptions(
            # Dynamic sampling draws its rows itself, as many as it needs.
            batch_size=0 if config.algorithm.filter_groups.enable else config.data.train_batch_size,
            total_steps=total,
            save_freq=trainer.save_freq,
            test_freq=trainer.test_freq,
            val_before_train=trainer.val_before_train,
            resume_mode=trainer.resume_mode,
        ),
        measure=lambda batch: (
            performance(worker, batch, peak_flops=peak) | isolation,
            examples_of(worker, batch) if worker.groups.is_first else [],
        ),
        validate=(lambda: _validate(worker)) if worker.validation else None,
        parts={"kl_controller": worker.kl_controller, "reserve": worker.reserve},
    )


def _validate(worker: DAGWorker) -> dict[str, float]:
    worker.make_room()
    return validate(worker)


def prompt_tables(config: Config, codec: TextCodec) -> tuple[PromptTable, PromptTable | None]:
    """Training rows and, where there are any, validation rows."""
    data = config.data

    def load(files: tuple[str, ...]) -> PromptTable:
        return load_prompt_table(
            files,
            codec,
            max_prompt_length=data.max_prompt_length,
            filter_overlong=data.filter_overlong_prompts,
            prompt_key=data.prompt_key,
        )

    return load(data.train_files), load(data.val_files) if data.val_files else None


def _total_steps(config: Config, rows: int) -> int:
    size = config.data.train_batch_size
    if rows < size:
        raise ValueError(
            f"data.train_files has {rows} usable rows, fewer than data.train_batch_size={size}"
        )
    epochs = config.trainer.total_epochs * (rows // size)
    wanted = config.trainer.total_training_steps
    return epochs if wanted is None else wanted


def _worker(
    config: Config,
    groups: Groups,
    background: BackgroundLoop,
    stop: StopFlag,
    codec: TextCodec,
    services: Services,
    *,
    policy: Policy,
    reference: Policy | None,
    value: ValueModel | None,
    draw: Callable[[int], list[int]],
    train: PromptTable,
    validation: PromptTable | None,
) -> DAGWorker:
    control = config.algorithm.kl_ctrl
    engine = services.connect() if groups.is_leader else None
    reward = reward_model(config, services, codec) if groups.is_leader else None
    actor = MegatronSource(policy, engine_layout(config), groups.engine_hosts)
    return DAGWorker(
        config=config,
        groups=groups,
        background=background,
        stop=stop,
        codec=codec,
        policy=policy,
        reference=reference,
        value=value,
        draw=draw,
        engine=engine,
        reward=reward,
        further_rewards=further_rewards(config, reward),
        weights=engine_weights(
            config,
            groups,
            actor,
            engine,
            background,
            may_sleep=config.actor_rollout_ref.rollout.free_cache_engine,
        ),
        kl_controller=get_kl_controller(
            control.type, control.kl_coef, control.target_kl, control.horizon
        ),
        train=train,
        validation=validation,
    )


def device_peak_of(config: Config, groups: Groups) -> float:
    """Peak flop/s of one device; a CPU is measured by every rank at once, as it will be used.

    Warns where a CPU lacks instructions for the configured type.
    """
    cuda, dtype = groups.device.type == "cuda", config.actor_rollout_ref.model.dtype
    name = torch.cuda.get_device_name() if cuda else "cpu"
    groups.barrier()
    peak = device_peak(name, configured_tflops=config.trainer.peak_tflops_per_device, dtype=dtype)
    if not cuda and dtype != "float32" and groups.is_first:
        plain = measure_peak_flops("float32")
        if plain > 2 * peak:
            print(
                f"warning: this CPU multiplies {plain / peak:.0f} times faster in float32 than in "
                f"{dtype}; set actor_rollout_ref.model.dtype=float32",
                file=sys.stderr,
            )
    return sum(groups.from_all(peak)) / groups.layout.world_size

"""Training, from a checked configuration to the end of the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from ctrl_megatron.checkpoint.store import DRAWN_AHEAD, CheckpointStore
from ctrl_megatron.config import Config
from ctrl_megatron.errors import UserError
from ctrl_megatron.graph.graph import StepReport
from ctrl_megatron.graph.world_link import SingleWorld, WorldLink, WorldReport
from ctrl_megatron.models.kernels import kernels_line
from ctrl_megatron.parallel.layout import World
from ctrl_megatron.parallel.stop import StopRequested
from ctrl_megatron.record.dump import StepDump
from ctrl_megatron.record.profile import step_profile_watchers
from ctrl_megatron.record.recorder import Recorder, banner
from ctrl_megatron.resharding.device import policy_role
from ctrl_megatron.rollout.engine_specs import engine_config
from ctrl_megatron.run.build import (
    PolicyEngines,
    build_kl_controller,
    build_worker,
    build_worker_without_actor,
    start_engines,
)
from ctrl_megatron.run.checked_rows import inputs_with_checked_tests
from ctrl_megatron.run.checks.rewards import inert_reward_warnings
from ctrl_megatron.run.checks.rl import check_rl_run
from ctrl_megatron.run.inputs import RunInputs, is_finished, read_inputs
from ctrl_megatron.run.loop import Resumable, Schedule, TrainingLoop
from ctrl_megatron.run.planning import (
    checkpoint_model_folders,
    checkpoint_state_parts,
    epoch_limit,
    planned_steps,
)
from ctrl_megatron.run.session import Session, session
from ctrl_megatron.run.worlds import MultiWorldLink
from ctrl_megatron.sandbox import SandboxClient, SandboxError
from ctrl_megatron.sandbox.limits import LEVELS
from ctrl_megatron.steps.ahead import SavedDraws
from ctrl_megatron.steps.draws import LeftoverGroups
from ctrl_megatron.steps.performance import device_memory, pass_flops_and_seconds, weights_gauges
from ctrl_megatron.steps.worker import DAGWorker, RolloutWorker


def train(config: Config) -> bool:
    """A whole RL run on this rank; False if it was stopped by a signal.

    Raises UserError, before anything starts, for input that cannot be used.
    """
    (graph, rewards), trainer, finished = check_rl_run(config), config.trainer, False
    rollout = config.actor_rollout_ref.rollout
    inputs = read_inputs(
        config,
        rewards,
        validates=graph.report.validate is not None,
        revises="proxy" in graph.services,
    )
    steps = planned_steps(config, inputs.train)
    stage = "after RL" if graph.report.validate else None
    if is_finished(config, steps, models=checkpoint_model_folders(config), stage=stage):
        return True
    with session(config, apart=True) as run:
        inputs = inputs_with_checked_tests(run, inputs)
        steps, before = planned_steps(config, inputs.train), steps
        if steps < before and is_finished(
            config, steps, models=checkpoint_model_folders(config), stage=stage
        ):
            run.watch.stop_watching_others()
            return True
        link = world_link(run, inputs)
        described, isolation = "", dict[str, float]()
        engines = start_engines(run, inputs, link)
        if link.has_rank_zero:
            try:
                worker, sampler, steps = build_worker(run, engines, inputs)
                run.raise_if_stop_requested_on_any_rank()
                isolation = worker.run_on_leader(
                    lambda: isolation_metric(worker), "the sandboxes to answer"
                )
                proxy = worker.proxy
                described = banner_services_line(config, engines, isolation)
                servers = (
                    "" if proxy is None else worker.run_on_leader(proxy.probe_servers, "the proxy")
                )
                described += f"; {servers}" if servers else ""
            except StopRequested as why:
                link.propagate_error(why, weights_changed=False)
                raise
        else:
            worker, sampler, steps = build_worker_without_actor(run, inputs)
            graph.report = StepReport()
        link.synchronize_worlds()
        if run.served is not None:
            run.served.add_gauges(lambda: weights_gauges(worker.device_owner))
        recorder = Recorder(
            config, active=run.all_ranks.is_first, total_steps=steps, served=run.served
        )
        memory = device_memory(run.groups)
        timeline = recorder.timeline(memory)
        for agent in worker.agents:
            agent.timeline = timeline
        dumps = [StepDump(agent, steps) for agent in worker.agents]
        loop = TrainingLoop(
            worker=worker,
            graph=graph,
            sampler=sampler,
            store=CheckpointStore(
                Path(trainer.run_dir) / "checkpoints",
                keep=trainer.max_ckpt_to_keep,
                side_files=Path(config.actor_rollout_ref.model.path),
                further={
                    policy_role(number): Path(own.actor_rollout_ref.model.path)
                    for number, own in enumerate(config.agents[1:], 1)
                },
                asynchronous=trainer.async_save,
                everyone=run.all_ranks,
            ),
            recorder=recorder,
            schedule=Schedule(
                batch_size=config.gen_batch_size,
                total_steps=steps,
                total_epochs=epoch_limit(config),
                save_freq=trainer.save_freq,
                save_hf_freq=trainer.save_hf_freq,
                test_freq=trainer.test_freq,
                val_before_train=trainer.val_before_train,
                resume_mode=trainer.resume_mode,
                max_bad_steps=trainer.max_bad_steps,
            ),
            memory=memory,
            link=link,
            everyone=run.all_ranks,
            passes=None if link.has_rank_zero else lambda: pass_flops_and_seconds(worker),
            on_world_reports=partial(_keep_flops, worker),
            watchers=(*dumps, *step_profile_watchers(config, worker)) if link.has_rank_zero else (),
            keep_batch=dumps[0].write_step if link.has_rank_zero else None,
            checkpointed=_saved_parts(worker),
            optional_state={DRAWN_AHEAD: SavedDraws(worker)}
            if rollout.staleness and link.has_rank_zero
            else {},
            constant_metrics=isolation,
        )
        bound = "" if epoch_limit(config) is None else " at most"
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
            services=described + "".join(map(banner_world_line, run.worlds[1:])),
        ):
            recorder.show_line(line)
        for line in (*inputs.bad_row_warnings(), *inert_reward_warnings(config)):
            recorder.show_line(line)
        dtype, on_gpu = config.actor_rollout_ref.model_dtype, run.groups.device.type == "cuda"
        recorder.show_line(kernels_line(on_gpu=on_gpu, dtype=dtype))
        recorder.show_graph(graph)
        loop.resume()
        finished = loop.run()
        report = recorder.close(report=True)
        if report is not None:
            print(f"report: {report}")
        run.watch.stop_watching_others()
        worker.close()
    return finished


def _saved_parts(worker: DAGWorker) -> dict[str, Resumable]:
    """The same with their names in a checkpoint."""
    parts: list[Resumable] = [
        part for agent in worker.agents for part in (agent.kl_controller, agent.leftover)
    ]
    # Ranks without the actor have the first policy's worker alone, and save nothing.
    for own in worker.config.agents[len(worker.agents) :]:
        parts += [build_kl_controller(own), LeftoverGroups()]
    return dict(zip(checkpoint_state_parts(worker.config), parts, strict=True))


def banner_world_line(world: World) -> str:
    """For the banner: roles on ranks of their own."""
    layout, ranks = world.layout, ", ".join(map(str, world.ranks))
    if world.serves:
        return f"; {' and '.join(world.roles)} on ranks {ranks}"
    sizes = f"tensor {layout.tensor} x pipeline {layout.pipeline} x data {layout.data}"
    return f"; {' and '.join(world.roles)} on ranks {ranks}: {sizes}"


def world_link(run: Session, inputs: RunInputs) -> WorldLink:
    """The way from this rank's world to the others."""
    if len(run.worlds) == 1:
        return SingleWorld()
    return MultiWorldLink(run.joined, run.worlds, run.config, run.stop, inputs.codec.pad_token_id)


def _keep_flops(worker: DAGWorker, others: Sequence[WorldReport]) -> None:
    worker.elsewhere = [report.passes for report in others]


def banner_services_line(
    config: Config, engines: Sequence[PolicyEngines], level: Mapping[str, float]
) -> str:
    """For the banner: the engines, and the isolation of programs."""
    counts: Counter[tuple[str, str]] = Counter()
    for number, (own, used) in enumerate(zip(config.agents, engines, strict=True)):
        if config.engine_owners[number] == number:
            whose = f" of {policy_role(number)}" if number else ""
            for one in used.services.placement.engines:
                of = " of the proxy" if one.role == "proxy" else whose
                counts[engine_config(own, one.role).name, of] += 1
    named = ", ".join(
        f"{count} {name} engine{'s' if count > 1 else ''}{of}"
        for (name, of), count in counts.items()
    )
    if "sandbox/isolation" not in level:
        return f"{named}; no sandbox of this run"
    held = LEVELS[len(LEVELS) - 1 - int(level["sandbox/isolation"])]
    return f"{named}; sandbox isolation: {held}"


async def isolation_metric(worker: RolloutWorker) -> dict[str, float]:
    """``sandbox/isolation``: the lowest level among the run's services, 0 none, 1 standard, 2
    strict; empty if no sandbox of this package judges (leaders only). UserError for a service of
    the user's that does not answer.
    """
    judge = None if worker.rewards is None else worker.rewards.judge
    if not isinstance(judge, SandboxClient):
        return {}
    # From the strictest to none; a service that reports no level is not from this package.
    try:
        levels = await judge.isolation_levels()
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

"""Repeat a training step from its dump, and report where it differs.

``ctrl-replay runs/mine/dumps/global_step_3 --update`` repeats what follows the rewards: log-probs,
advantages, the update. It runs on any layout: ``--nproc-per-node 2
actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2``, or under torchrun or srun.
``--judge`` judges the recorded texts anew. ``trainer.dump_steps`` writes dumps.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ctrl_megatron.commands.hub import pinned_models
from ctrl_megatron.commands.launcher import ranks_to_start, start_ranks
from ctrl_megatron.commands.start import add_run_arguments, command_entry_point, load_checked_config
from ctrl_megatron.config import Config, check_world_size, load_config
from ctrl_megatron.config.actor_rollout_ref import CO_TRAIN_PIPELINE
from ctrl_megatron.config.agents import has_own_engines
from ctrl_megatron.config.environment import read_launch, set_device_variables
from ctrl_megatron.config.flags import CommandParser, existing_path, float_flag
from ctrl_megatron.errors import STOPPED, UserError

DIFFERS = 1


@command_entry_point("replay")
def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 the step agrees, 1 it differs, 2 wrong input, 13 a process failed, 130 stopped
    by a signal.
    """
    parser = CommandParser(__doc__)
    parser.add_argument("dump", type=existing_path, help="directory RUN/dumps/global_step_N")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--update", action="store_true", help="repeat log-probs and update")
    what.add_argument("--judge", action="store_true", help="judge the recorded texts anew")
    parser.add_argument(
        "--weights",
        type=existing_path,
        metavar="DIR",
        help="weights before the step: a checkpoint or a Hugging Face directory",
    )
    parser.add_argument(
        "--tolerance",
        type=float_flag(0, 1),
        default=1e-4,
        help="largest difference that agrees, relative to max(1, size); default 1e-4",
    )
    add_run_arguments(parser)
    options = parser.parse_intermixed_args(arguments)
    launch, ranks = read_launch(), ranks_to_start(options)
    world = launch.world_size if ranks is None else ranks
    if options.judge and (world > 1 or options.weights):
        raise UserError("--judge needs one process and no weights: leave the other flags out")
    file = options.dump / "config.yaml"
    if not file.is_file():
        raise UserError(
            f"{options.dump} is not a dump: it has no config.yaml",
            remedy="name a directory RUN/dumps/global_step_N",
        )
    recorded = load_config(str(file), [], "none")
    pipeline, engines = recorded.dag.custom_pipeline_fn, "actor_rollout_ref.rollout."
    if options.judge and pipeline == CO_TRAIN_PIPELINE:
        raise UserError(
            "co_train_pipeline rewards a critique by several revisions, of which a dump has one",
            key="--judge",
            remedy="repeat the update (--update)",
        )
    here = [] if pipeline is None else [f"dag.custom_pipeline_fn={pipeline}"]
    here += [
        f"policies.{name}.{engines}tensor_model_parallel_size=1"
        for name, own in recorded.policies.items()
        if has_own_engines(own)
    ]
    here += _settings(options.dump, world, launch.local_world_size if ranks is None else ranks)
    config = load_checked_config(str(file), [*here, *options.overrides], "rl")
    check_world_size(config, world)
    if ranks is not None:
        further = ["--weights", str(options.weights)] if options.weights else []
        again = [str(options.dump), "--update", *further, f"--tolerance={options.tolerance}"]
        return start_ranks(
            "replay",
            ranks,
            [*again, *options.overrides, *pinned_models(config)],
            expected=(DIFFERS,),
        )
    set_device_variables(config.most_tensor_ranks)
    return _replay(config, options.dump, options.weights, options.judge, options.tolerance)


def _settings(dump: Path, world: int, local_world: int) -> list[str]:
    """Settings that go before the user's own: data and run directory are those of the dump, no
    engine's layout counts, no verdict comes from a cache, and nothing is validated.
    """
    return [
        *(f"data.train_files={dump / 'rows.parquet'}", "data.prompt_key=prompt"),
        *("data.val_files=[]", "trainer.test_freq=-1", "trainer.val_before_train=false"),
        *(f"trainer.default_local_dir={dump}", "trainer.experiment_name=replay"),
        *(f"trainer.nnodes={world // local_world}", f"trainer.n_gpus_per_node={local_world}"),
        *("trainer.dump_steps=[]", "trainer.profile_steps=[]"),
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        *("actor_rollout_ref.proxy.model.path=null", "reward.cache_path=null"),
    ]


def _replay(
    config: Config, directory: Path, weights: Path | None, judges: bool, tolerance: float
) -> int:
    from ctrl_megatron.record.dump import read_dump
    from ctrl_megatron.run.checks.models import check_model_files
    from ctrl_megatron.run.checks.rl import check_estimator_and_loss, configured_pipeline
    from ctrl_megatron.run.replay import (
        find_start_weights,
        replay_judging,
        replay_update,
        sample_names,
    )

    graph, dump = configured_pipeline(config), read_dump(directory)
    check_estimator_and_loss(config)
    if judges:
        comparison = replay_judging(config, graph, dump)
        print(f"step {dump.step}: {len(dump.batch)} samples judged anew")
    else:
        check_model_files(config, "rl")
        start = find_start_weights(dump, config.agents[dump.policy], weights)
        if read_launch().rank == 0:
            recorded = " x ".join(f"{name} {size}" for name, size in dump.layout.items())
            print(
                f"step {dump.step}: {len(dump.batch)} samples, recorded on {recorded} "
                f"({dump.device}); replayed from {start}",
                flush=True,
            )
        comparison = replay_update(config, graph, dump, start)
        if comparison is None:
            return STOPPED
    if read_launch().rank > 0:
        return 0
    for line in comparison.report_lines(tolerance, sample_names(dump)):
        print(line)
    if dump.metrics is None and not judges:
        print("the recorded update did not end, so there are no recorded metrics")
        return 0
    return 0 if comparison.agrees(tolerance) else DIFFERS


if __name__ == "__main__":
    raise SystemExit(main())

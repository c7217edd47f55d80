"""Print how much memory a run needs on each GPU and host in each phase, without starting it.

``ctrl-plan --config FILE --gpu-memory 80 key=value`` needs no GPU and no weights: it reads the
shape of the models from config.json in actor_rollout_ref.model.path, or from --model-config.
With --push it prints instead how long a push from shard to shard takes, and over which links; with
--placement which ranks to give to the models beside the actor, and how long they would wait.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ctrl_megatron.commands.hub import SHAPE_FILES, with_hub_models
from ctrl_megatron.commands.start import (
    CommandParser,
    add_config_arguments,
    command_entry_point,
    config_overrides,
)
from ctrl_megatron.config import Config, Purpose, check_world_size, load_config
from ctrl_megatron.config.elastic import max_fitting_hosts
from ctrl_megatron.config.flags import count_flag, existing_file, float_flag
from ctrl_megatron.errors import UserError

if TYPE_CHECKING:
    from ctrl_megatron.memory.shapes import ModelShapes
    from ctrl_megatron.models.shape import ModelShape


@command_entry_point("plan")
def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 it fits, 2 wrong input or it does not fit."""
    parser = CommandParser(__doc__)
    add_config_arguments(parser)
    parser.add_argument("--nodes", type=count_flag(), help="machines; defaults to trainer.nnodes")
    parser.add_argument(
        "--gpus-per-node",
        type=count_flag(),
        help="GPUs per machine; defaults to trainer.n_gpus_per_node and the engines' own",
    )
    parser.add_argument(
        "--gpu-memory",
        type=float_flag(above=0, most=1e6),
        default=80.0,
        help="memory of one GPU, GiB",
    )
    parser.add_argument(
        "--model-config",
        type=existing_file,
        help="config.json of all models, in place of their directories",
    )
    parser.add_argument(
        "--proxy-config", type=existing_file, help="config.json of a proxy on engines of its own"
    )
    parser.add_argument(
        "--ranks",
        action="store_true",
        help="print instead how many GPUs of a machine the trainer's ranks use",
    )
    parser.add_argument("--purpose", choices=("rl", "sft"), default="rl", help="which training")
    parser.add_argument(
        "--left",
        type=count_flag(),
        metavar="N",
        help="print instead on how many of N machines the run goes on after it has lost others",
    )
    parser.add_argument("--push", action="store_true", help="the time of a push, not the memory")
    for flag, speed, words in (
        ("--network-speed", 50.0, "a GPU's share of its host's network cards"),
        ("--host-speed", 200.0, "a GPU to another of its host"),
        ("--copy-speed", 1000.0, "inside a GPU's memory"),
    ):
        parser.add_argument(
            flag,
            type=float_flag(above=0, most=1e6),
            default=speed,
            help=f"{words}, GB/s, with --push",
        )
    parser.add_argument(
        "--placement", action="store_true", help="a proposal for placement, not the memory"
    )
    parser.add_argument(
        "--generation",
        type=float_flag(0.0, below=1.0),
        default=0.5,
        metavar="SHARE",
        help="share of a step of one world that generates, with --placement; read it off a run",
    )
    parser.add_argument("overrides", nargs="*", help="key=value, e.g. trainer.nnodes=4")
    options = parser.parse_args(arguments)
    overrides = config_overrides(options)
    if options.nodes is not None:
        overrides.append(f"trainer.nnodes={options.nodes}")
    config, purpose = load_config(options.config, overrides, options.purpose), options.purpose
    if config.actor_rollout_ref.model.dtype == "auto":
        # What auto is on GPUs; only the machine of a run can measure a CPU.
        overrides.append("actor_rollout_ref.model.dtype=bfloat16")
        config = load_config(options.config, overrides, purpose)
    if options.gpus_per_node is not None:
        each = _ranks_of(options.gpus_per_node, config, purpose)
        config = load_config(
            options.config, [*overrides, f"trainer.n_gpus_per_node={each}"], purpose
        )
    trainer = config.trainer
    if options.ranks:
        print(trainer.n_gpus_per_node)
        return 0
    if options.left is not None:
        print(max_fitting_hosts(config, options.left, purpose))
        return 0
    check_world_size(config, trainer.nnodes * trainer.n_gpus_per_node, purpose)

    sharded = config.actor_rollout_ref.actor.strategy == "fsdp"
    if sharded and (options.push or options.placement):
        raise UserError(
            "plans the tensors of strategy megatron",
            key="--push" if options.push else "--placement",
            remedy="leave it out, or set actor_rollout_ref.actor.strategy=megatron",
        )
    # These import torch, which would slow down the refusal of wrong arguments.
    from ctrl_megatron.memory.budget import memory_budget
    from ctrl_megatron.memory.engine import GIB
    from ctrl_megatron.memory.fit import describe_misfit
    from ctrl_megatron.memory.proposal import with_auto_placement
    from ctrl_megatron.memory.shapes import model_shapes
    from ctrl_megatron.memory.table import memory_table
    from ctrl_megatron.models.shape import ModelShape

    if options.model_config is None:
        config = with_hub_models(config, purpose, SHAPE_FILES)
    shapes = model_shapes(
        config, purpose, single_file=options.model_config, proxy_file=options.proxy_config
    )
    if options.push:
        assert isinstance(shapes.actor, ModelShape)
        print(_push(config, shapes.actor, options))
        return 0
    memory = int(options.gpu_memory * GIB)
    if options.placement:
        print(_placement(config, shapes, memory, options.generation))
        return 0
    if config.placement.auto:
        config, _ = with_auto_placement(config, shapes, gpu_memory=memory)
    budget = memory_budget(config, shapes, gpu_memory=memory, purpose=purpose)
    print(memory_table(config, budget, proxy_is_unknown=shapes.proxy_is_unknown))
    if wrong := describe_misfit(config, shapes, gpu_memory=memory, purpose=purpose):
        raise UserError(wrong)
    return 0


def _ranks_of(gpus: int, config: Config, purpose: Purpose) -> int:
    """How many of a machine's GPUs are the ranks', beside those that belong to engines alone."""
    own = config.engine_gpus_per_node if purpose == "rl" else 0
    if gpus <= own:
        raise UserError(
            f"--gpus-per-node={gpus} leaves no GPU for ranks beside {own} of engines",
            remedy="lower n_gpus_per_node of the actor's or the proxy's engines",
        )
    return gpus - own


def _placement(config: Config, shapes: ModelShapes, memory: int, generation: float) -> str:
    """The placements of roles that are possible, and the best one."""
    from ctrl_megatron.memory.proposal import choose_placement, placement_candidates, proposal_table

    found = placement_candidates(config, shapes, gpu_memory=memory, generation=generation)
    return proposal_table(found, choose_placement(found), generation=generation)


def _push(config: Config, shape: ModelShape, options: Namespace) -> str:
    """The simulated push of the actor to the engines of the configuration."""
    from ctrl_megatron.memory.pushes import push_plan
    from ctrl_megatron.resharding.schedule import RankBandwidths, push_table, simulate_push

    plan = push_plan(config, shape)
    speeds = RankBandwidths(
        network=options.network_speed * 1e9,
        host=options.host_speed * 1e9,
        copy=options.copy_speed * 1e9,
    )
    bucket = config.actor_rollout_ref.rollout.update_bucket_megabytes << 20
    return push_table(plan, simulate_push(plan, bucket, speeds), speeds)


if __name__ == "__main__":
    raise SystemExit(main())

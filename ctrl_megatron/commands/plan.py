"""Print how much memory a run needs on each GPU and host in each phase, without starting it.

``ctrl-plan --config FILE --gpu-memory 80 key=value`` needs no GPU and no weights: it reads the
shape of the models from config.json in actor_rollout_ref.model.path, or from --model-config.
"""

from __future__ import annotations

from collections.abc import Sequence

from ctrl_megatron.commands.start import CommandParser, command
from ctrl_megatron.config import check_world_size, load_config
from ctrl_megatron.config.flags import count, given_file, number


@command("plan")
def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 it fits, 2 wrong input or it does not fit."""
    parser = CommandParser(__doc__)
    parser.add_argument("--config", required=True, help="YAML file, e.g. examples/ctrl_7b.yaml")
    parser.add_argument("--nodes", type=count(), help="machines; defaults to trainer.nnodes")
    parser.add_argument(
        "--gpus-per-node",
        type=count(),
        help="GPUs per machine; defaults to trainer.n_gpus_per_node",
    )
    parser.add_argument(
        "--gpu-memory", type=number(above=0, most=1e6), default=80.0, help="memory of one GPU, GiB"
    )
    parser.add_argument(
        "--model-config",
        type=given_file,
        help="config.json of all models, in place of their directories",
    )
    parser.add_argument("--purpose", choices=("rl", "sft"), default="rl", help="which training")
    parser.add_argument("overrides", nargs="*", help="key=value, e.g. trainer.nnodes=4")
    options = parser.parse_args(arguments)
    overrides = list(options.overrides)
    if options.nodes is not None:
        overrides.append(f"trainer.nnodes={options.nodes}")
    if options.gpus_per_node is not None:
        overrides.append(f"trainer.n_gpus_per_node={options.gpus_per_node}")
    config, purpose = load_config(options.config, overrides, options.purpose), options.purpose
    trainer = config.trainer
    check_world_size(config, trainer.nnodes * trainer.n_gpus_per_node, purpose)

    # These import torch, which would slow down the refusal of wrong arguments.
    from ctrl_megatron.memory.budget import memory_budget
    from ctrl_megatron.memory.engine import GIB
    from ctrl_megatron.memory.fit import require_fit
    from ctrl_megatron.memory.shapes import model_shapes
    from ctrl_megatron.memory.table import table

    shapes = model_shapes(config, purpose, same=options.model_config)
    memory = int(options.gpu_memory * GIB)
    budget = memory_budget(config, shapes, gpu_memory=memory, purpose=purpose)
    print(table(config, budget))
    require_fit(config, shapes, gpu_memory=memory, purpose=purpose)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""``ctrl-replay`` on ranks that are forked from a process which has imported Megatron already."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from forked_ranks import fork_context
from free_port import free_port
from patience import PATIENCE
from tiny_run import REPOSITORY


def replay(
    arguments: list[str], log: Path, *, ranks: int = 1, tensor: int = 1
) -> tuple[tuple[int | None, ...], str]:
    """(exit codes of the ranks, what they printed); no rank outlives the call."""
    launch = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    launch |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    given = [*arguments]
    if tensor > 1:
        given.append(f"actor_rollout_ref.actor.megatron.tensor_model_parallel_size={tensor}")
    processes = [
        fork_context().Process(target=_rank, args=(rank, launch, given, str(log)))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + PATIENCE
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    for process in processes:
        if process.is_alive():
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            process.join()
    return tuple(p.exitcode for p in processes), log.read_text(errors="replace")


def _rank(rank: int, launch: dict[str, str], arguments: list[str], log: str) -> None:
    os.environ |= launch | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(REPOSITORY)
    import torch

    from ctrl_megatron.commands.replay import main

    torch.set_num_threads(1)
    raise SystemExit(main(arguments))

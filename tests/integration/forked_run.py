"""A training run whose ranks are forked from a process that has imported Megatron already.

For tests that look at what a run computes. What the launcher does is for ``launched_run``.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forked_ranks import fork_context
from free_port import free_port
from launched_run import Job
from patience import PATIENCE
from preloaded import reserve
from tiny_run import REPOSITORY

from ctrl_megatron.metrics import read_json_lines


@dataclass(frozen=True, kw_only=True)
class ForkedRun:
    """A run that has ended."""

    codes: tuple[int | None, ...]
    """Exit codes of the ranks."""
    output: str
    folder: Path

    def metrics(self) -> list[dict[str, Any]]:
        """The finished steps, oldest first."""
        return read_json_lines(self.folder / "metrics.jsonl")


def run_forked(
    job: Job,
    name: str,
    *,
    steps: int,
    extra: tuple[str, ...] = (),
    timeout: float = PATIENCE,
    purpose: str = "rl",
    reads: str = "",
    phases: Path | None = None,
    stop_at: int = 0,
    without: tuple[str, ...] = (),
    te: bool = False,
    draws: bool = False,
    ranks: int = 2,
    config: str = "examples/ctrl_smollm2_cpu.yaml",
) -> ForkedRun:
    """All ranks from start to end; none outlives the call. ``purpose`` is ``rl`` or ``sft``.

    The keys that the first rank reads are written to the file ``reads``, one a line; what
    ``record_phases(stop_at)`` notes on rank N to the file ``phases``/N; ``without`` names keys of
    the job that are left out; ``te`` puts stand-ins in Transformer Engine's place. The report's
    plots, which take as long as five steps, are only made for those who look (``draws``).
    """
    job.folder.mkdir(parents=True, exist_ok=True)
    log = job.folder / f"{name}.{time.monotonic_ns()}.log"
    launch = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    launch |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    settings = job.sft_overrides(name, steps) if purpose == "sft" else job.overrides(name, steps)
    kept = [setting for setting in settings if setting.partition("=")[0] not in without]
    # Left out, every rank measures it.
    overrides = [*kept, "trainer.peak_tflops_per_device=0.1", *extra]
    forks = fork_context()
    given = (launch, [config, *overrides], str(log), purpose, reads, phases, stop_at, te, draws)
    processes = [forks.Process(target=_rank, args=(rank, *given)) for rank in range(ranks)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + timeout
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    for process in processes:
        if process.is_alive():
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            process.join()
    codes = tuple(process.exitcode for process in processes)
    return ForkedRun(codes=codes, output=log.read_text(errors="replace"), folder=job.folder / name)


def _rank(
    rank: int,
    launch: dict[str, str],
    words: list[str],
    log: str,
    purpose: str,
    reads: str,
    phases: Path | None,
    stop_at: int,
    te: bool,
    draws: bool,
) -> None:
    os.environ |= launch | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(REPOSITORY)
    if rank == 0:
        # The engine's process.
        reserve(1)
    import te_stand_ins
    import torch
    from recorded_phases import record_phases
    from recorded_reads import record_reads

    from ctrl_megatron.config import check_world_size, load_config, require_files_exist
    from ctrl_megatron.metrics.report import page
    from ctrl_megatron.run.train import train
    from ctrl_megatron.sft.run import train_sft

    torch.set_num_threads(1)
    if not draws:
        page.render_report = lambda run: run.name
    config = load_config(words[0], words[1:], purpose)
    seen = record_reads(config) if reads and rank == 0 else set()
    require_files_exist(config, purpose)
    check_world_size(config, int(launch["WORLD_SIZE"]), purpose)
    events = record_phases(stop_at if rank == 0 else 0) if phases else []
    run = train_sft if purpose == "sft" else train
    with te_stand_ins.installed(te):
        finished = run(config)
    if seen:
        Path(reads).write_text("\n".join(sorted(seen)))
    if phases:
        phases.mkdir(exist_ok=True)
        (phases / str(rank)).write_text("\n".join(events))
    raise SystemExit(0 if finished else 130)

"""Notes by which functions of the package a step of a real run reaches a place, in any process."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from forked_ranks import fork_context
from launched_run import Job
from patience import PATIENCE
from preloaded import reserve
from tiny_run import REPOSITORY

PACKAGE = str(REPOSITORY / "ctrl_megatron") + os.sep
Call = tuple[str, str]
"""A function's qualified name and its file in the repository."""


def traced(job: Job, places: tuple[Call, ...], folder: Path) -> dict[str, list[Call]]:
    """A step of ``ctrl-train-rl`` on one rank. For each of ``places``, which are functions, by its
    name: the functions of the package that were being called when it was first reached, outermost
    first, and itself."""
    process = fork_context().Process(target=_run, args=(job, places, folder))
    process.start()
    process.join(PATIENCE)
    if process.is_alive():
        process.kill()
    assert process.exitcode == 0, (folder / "log").read_text(errors="replace")[-6000:]
    found = (json.loads(file.read_text()) for file in folder.glob("*.json"))
    return {place: [(name, file) for name, file in calls] for place, calls in found}


def _run(job: Job, places: tuple[Call, ...], folder: Path) -> None:
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(REPOSITORY)
    launch = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}
    launch |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1")
    os.environ |= launch | dict.fromkeys(("RANK", "LOCAL_RANK"), "0")
    hook = _hook(places, folder)
    # A process that is forked from now on, the engine's, inherits both.
    threading.setprofile(hook)
    sys.setprofile(hook)
    reserve(1)
    from ctrl_megatron.commands.train_rl import main

    settings = [*job.overrides("traced", 1), "trainer.n_gpus_per_node=1"]
    code = main(["--config", "examples/ctrl_smollm2_cpu.yaml", *settings])
    sys.setprofile(None)
    raise SystemExit(code)


def _hook(places: tuple[Call, ...], folder: Path) -> Any:
    names, left = {name.rpartition(".")[2] for name, _ in places}, {*places}

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or frame.f_code.co_name not in names:
            return
        if (place := _call(frame.f_code)) in left:
            left.discard(place)
            calls, at = list[Call](), frame
            while at is not None:
                # Comprehensions are no calls to a reader.
                if (call := _call(at.f_code)) and not at.f_code.co_name.startswith("<"):
                    calls.insert(0, call)
                at = at.f_back
            (folder / f"{place[0]}.json").write_text(json.dumps((place[0], calls)))

    return note


def _call(code: CodeType) -> Call | None:
    if not code.co_filename.startswith(PACKAGE):
        return None
    file = Path(code.co_filename).relative_to(REPOSITORY).as_posix()
    return code.co_qualname.replace(".<locals>", ""), file

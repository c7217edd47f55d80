"""Kill processes of tiny runs at random moments and say how each run ended: ``python
tools/check/kill_drill.py --kills 60``.

Every drill starts a run of two ranks with the launcher of ``ctrl-train-rl``, waits until a random
moment of it, and kills one process with SIGKILL: an engine (with ``vllm`` and ``sglang`` one of its
processes), the sandbox, a rank or the launcher. One moment in eight (``--starting``) lies in the
start of the run, the others in its steps. Three outcomes are possible:

- ``recovered``: the run ended by itself, with exit code 0 and all steps;
- ``ended``: it ended with another exit code and left no process and no shared memory behind, and
  the same command, given again, finished it;
- ``wrong``: anything else, with the reason.

In both of the first two the metrics of every step must be those of a run that nobody disturbed:
equal to the last bit with ``--engines hf``; with others the largest relative difference is
reported. Engine, victim, moment and way of saving follow from ``--seed`` and the drill's number.

``--hosts 2`` starts a rank on each of two hosts in network namespaces, under torchrun, which may
start the ranks three times again (as root). A launcher of the second host that is killed is started
again at once; one of the first, where the others meet, ends the run.

Every result is a line of ``results.jsonl`` in ``--out``; the command, given again, goes on after
the last one. ``--launcher=--max-restarts=2`` passes a further flag to the launcher of one host.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/integration")]

import psutil
from launched_run import PRELOADED, Job, Run
from tiny_run import JUDGMENTS, PROGRAM, chain_model, smollm2, write_problems

from ctrl_megatron.config.flags import ToolParser
from ctrl_megatron.metrics import read_json_lines
from ctrl_megatron.rollout.engine import available_engines

VICTIMS = ("engine", "sandbox", "rank", "launcher")
COMPARED = ("actor/loss", "actor/grad_norm", "reward/mean", "critique/length", "pass_rate/after")
RANKS = 2
_LONGEST = 600.0
"""Seconds of a run, and of its end after a kill."""
_GONE_SECONDS = 30.0
_FIRST_STEP = "[step 1/"
_SANDBOX = "ctrl_megatron.sandbox"
_ENGINE = r"^engine|rollout\.server|EngineCore|sglang::(scheduler|detokenizer)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Drill:
    """What one drill does."""

    number: int
    engine: str
    victim: str
    asynchronous: bool
    starting: bool
    """Whether the kill comes before the first step."""
    moment: float
    """The time of the kill, as a share of the time that an undisturbed run takes for its start or
    for its steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How one drill ended."""

    outcome: str
    detail: str
    killed: str
    """The victim's process id and name."""
    steps: int
    """Steps that were finished when it was killed."""
    seconds: float
    """From the kill to the end of the run."""
    difference: float
    """The largest relative difference of ``COMPARED`` from an undisturbed run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """An undisturbed run."""

    starting: float
    """Seconds until its first step began."""
    stepping: float
    """Seconds from there to its end."""
    metrics: dict[int, dict[str, float]]


def drill_of(
    number: int,
    seed: int,
    engines: Sequence[str],
    victims: Sequence[str],
    saves: Sequence[str],
    starting: float,
) -> Drill:
    """The drill with this number; its parts go round, so that all come up equally often."""
    draw = random.Random(f"{seed}/{number}")
    return Drill(
        number=number,
        engine=engines[number % len(engines)],
        victim=victims[number // len(engines) % len(victims)],
        asynchronous=draw.choice(saves) == "async",
        starting=draw.random() < starting,
        moment=draw.random(),
    )


class Range:
    """The place of the drills: models, rows and runs in one folder."""

    def __init__(
        self, folder: Path, steps: int, launcher: Sequence[str] = (), *, hosts: int = 1
    ) -> None:
        self._launcher, self._steps, self._hosts = launcher, steps, hosts
        model, models = smollm2(folder), folder / "models"
        for name, texts, probability in (("actor", JUDGMENTS, 0.8), ("proxy", [PROGRAM], 0.9)):
            if not (models / name / "model.safetensors").is_file():
                chain_model(models / name, model, texts, probability)
        self._job = Job(
            actor=models / "actor",
            proxy=models / "proxy",
            data=write_problems(folder / "train.parquet"),
            folder=folder / "runs",
        )
        self._whole: dict[str, Whole] = {}

    def undisturbed(self, engine: str) -> Whole:
        """A run that nothing is killed in."""
        if engine not in self._whole:
            name, began = f"whole_{engine}_{time.time_ns()}", time.monotonic()
            with self.started(name, engine, asynchronous=False) as run:
                run.wait_for(lambda: _FIRST_STEP in run.output(), within=_LONGEST)
                first = time.monotonic()
                code = run.ends(_LONGEST)
            if code:
                raise RuntimeError(f"a run that is left alone ends with {code}:\n{run.output()}")
            self._whole[engine] = Whole(
                starting=first - began,
                stepping=time.monotonic() - first,
                metrics=metrics_of(run),
            )
        return self._whole[engine]

    def run(self, drill: Drill) -> Result:
        """Do the drill."""
        whole = self.undisturbed(drill.engine)
        name = f"drill_{drill.number}_{time.time_ns()}"
        with self.started(name, drill.engine, asynchronous=drill.asynchronous) as run:
            if drill.starting:
                wait = drill.moment * whole.starting
            else:
                # Counted in steps, because other work makes some runs slower than others.
                passed, rest = divmod(drill.moment * self._steps, 1)
                run.wait_for(lambda: _FIRST_STEP in run.output(), within=_LONGEST)
                run.wait_for(lambda: len(metrics_of(run)) >= passed, pause=0.02, within=_LONGEST)
                wait = rest * whole.stepping / self._steps
            victim = self._victim(run, drill, time.monotonic() + wait)
            if victim is not None:
                killed, steps = f"{victim.pid} {victim.name()}", len(metrics_of(run))
                victim.kill()
                at = time.monotonic()
                outcome, detail = self._outcome(run)
                taken = time.monotonic() - at
        if victim is None:
            # Other work on the machine made the undisturbed run slower than this one.
            return self.run(replace(drill, moment=0.7 * drill.moment))
        if outcome == "ended":
            with self.started(name, drill.engine, asynchronous=drill.asynchronous) as again:
                if code := again.ends(_LONGEST):
                    outcome, detail = "wrong", f"given again, it ends with {code}"
                    print(again.output()[-4000:], file=sys.stderr)
        done = metrics_of(run)
        differing = difference(done, whole.metrics)
        if outcome != "wrong" and len(done) != self._steps:
            outcome, detail = "wrong", f"{len(done)} of {self._steps} steps"
        elif outcome != "wrong" and drill.engine == "hf" and differing:
            outcome, detail = "wrong", f"a metric differs by {differing:.1e}"
        return Result(
            outcome=outcome,
            detail=detail,
            killed=killed,
            steps=steps,
            seconds=round(taken, 1),
            difference=differing,
        )

    @contextmanager
    def started(
        self, name: str, engine: str, *, asynchronous: bool, extra: Sequence[str] = ()
    ) -> Iterator[Run]:
        """A run of which nothing outlives the block."""
        rollout = "actor_rollout_ref.rollout."
        cache = () if engine == "hf" else (rollout + "kv_cache_gib=0.1",)
        settings = (
            *(f"{rollout}name={engine}", *cache, "trainer.save_freq=1"),
            *(f"trainer.async_save={str(asynchronous).lower()}", "trainer.failure_timeout=15"),
            *extra,
        )
        if self._hosts > 1:
            settings += (f"trainer.nnodes={self._hosts}", "trainer.n_gpus_per_node=1")
            self._job.folder.mkdir(parents=True, exist_ok=True)
            (self._job.folder / f"{name}.back").touch()
            with self._job.launch(
                name,
                steps=self._steps,
                extra=settings,
                hosts=self._hosts,
                ranks=1,
                restarts=3,
                least=self._hosts,
                preloaded=True,
            ) as run:
                yield run
            return
        settings += (f"trainer.n_gpus_per_node={RANKS}",)
        command = [sys.executable, str(PRELOADED), str(RANKS), "1"]
        command += ["-m", "ctrl_megatron.commands.train_rl", "--nproc-per-node", str(RANKS)]
        command += [*self._launcher, "--config", "examples/ctrl_smollm2_cpu.yaml"]
        command += [*self._job.overrides(name, self._steps), *settings]
        self._job.folder.mkdir(parents=True, exist_ok=True)
        log = self._job.folder / f"{name}.{time.monotonic_ns()}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        run = Run(process=process, log=log, folder=self._job.folder / name)
        try:
            yield run
        finally:
            run.kill()

    def _victim(self, run: Run, drill: Drill, at: float) -> psutil.Process | None:
        """The process to kill, once the moment has come and it runs."""
        draw, deadline = random.Random(drill.moment), time.monotonic() + _LONGEST
        while run.process.poll() is None and time.monotonic() < deadline:
            found = run.look() if time.monotonic() >= at else []
            if candidates := [p for p in found if is_victim(p, drill.victim)]:
                return draw.choice(candidates)
            if found and drill.victim == "launcher" and self._hosts == 1:
                return psutil.Process(run.process.pid)
            time.sleep(0.02)
        return None

    def _outcome(self, run: Run) -> tuple[str, str]:
        try:
            code = run.ends(_LONGEST)
        except AssertionError:
            return "wrong", f"it still runs after {_LONGEST:.0f} s"
        if self._hosts > 1 and len(metrics_of(run)) == self._steps:
            # The exit code is that of a launcher that was killed, if one was.
            code = 0
        deadline = time.monotonic() + _GONE_SECONDS
        while run.look() and time.monotonic() < deadline:
            time.sleep(0.1)
        if left := run.look():
            return "wrong", f"processes are left: {left}"
        if left := run.shared_memory():
            return "wrong", f"shared memory is left: {left}"
        return ("recovered" if code == 0 else "ended"), f"exit code {code}"


def is_victim(process: psutil.Process, kind: str) -> bool:
    """Whether it is a process of that kind; of an engine, any of its processes that computes.

    A rank is known by its name or its environment, from which engines and sandboxes get no rank,
    and a sandbox's workers, which it replaces itself, by their parent. Of one of several hosts the
    launcher is the child of a shell; its forks have its command line.
    """
    try:
        words, above = " ".join([process.name(), *process.cmdline()]), process.parent()
        environment = process.environ() if kind == "rank" else {}
        of = " ".join([above.name(), *above.cmdline()]) if above else ""
    except psutil.NoSuchProcess:
        return False
    if kind == "rank":
        return re.match(r"rank \d", words) is not None or (
            "RANK" in environment
            and re.search(r"commands\.train_rl|tools/train_rl", words) is not None
        )
    if kind == "sandbox":
        return _SANDBOX in words and _SANDBOX not in of
    if kind == "launcher":
        return "torch.distributed.run" in words and of.startswith("sh ")
    return re.search(_ENGINE, words) is not None


def metrics_of(run: Run) -> dict[int, dict[str, float]]:
    """The compared metrics of every step that has been recorded."""
    path = run.folder / "metrics.jsonl"
    records = read_json_lines(path) if path.is_file() else []
    return {
        r["step"]: {n: r["metrics"][n] for n in COMPARED if n in r["metrics"]}
        for r in records
        if "time/step" in r["metrics"]
    }


def difference(ours: dict[int, dict[str, float]], theirs: dict[int, dict[str, float]]) -> float:
    """The largest difference of a metric of the steps that both have, relative to its size."""
    return max(
        (
            abs(ours[step][name] - value) / max(abs(value), 1e-12)
            for step in ours.keys() & theirs.keys()
            for name, value in theirs[step].items()
        ),
        default=0.0,
    )


def table(results: Sequence[dict[str, Any]]) -> str:
    """Outcomes by engine and victim, in Markdown."""
    rows = ["| engine | killed | kills | recovered | ended | wrong | longest end | difference |"]
    rows.append("|---|---|---|---|---|---|---|---|")
    for engine, victim in sorted({(r["engine"], r["victim"]) for r in results}):
        mine = [r for r in results if (r["engine"], r["victim"]) == (engine, victim)]
        counts = Counter(r["outcome"] for r in mine)
        parts = [engine, victim, len(mine), *(counts[o] for o in ("recovered", "ended", "wrong"))]
        parts.append(f"{max(r['seconds'] for r in mine):.0f} s")
        parts.append(f"{max(r['difference'] for r in mine):.0e}".replace("0e+00", "0"))
        rows.append("| " + " | ".join(map(str, parts)) + " |")
    return "\n".join(rows)


def main() -> int:
    """Entry point; see the module's docstring. Exit code 1 if an outcome is wrong."""
    parser = ToolParser(__doc__)
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engines", nargs="+", default=["hf"], choices=["hf", "vllm", "sglang"])
    parser.add_argument("--victims", nargs="+", default=list(VICTIMS), choices=VICTIMS)
    parser.add_argument("--saves", nargs="+", default=["sync", "async"], choices=["sync", "async"])
    parser.add_argument("--starting", type=float, default=1 / 8, help="share of kills in the start")
    parser.add_argument("--steps", type=int, default=8, help="of every run")
    parser.add_argument("--hosts", type=int, default=1, help="in network namespaces")
    parser.add_argument("--launcher", default="", help="further flags of ctrl-train-rl")
    parser.add_argument("--out", type=Path, default=Path("runs/kill_drill"))
    options = parser.parse_args()
    if missing := set(options.engines) - set(available_engines()):
        parser.error(f"not installed: {', '.join(sorted(missing))}")
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    file = out / "results.jsonl"
    done = read_json_lines(file) if file.is_file() else []
    place = Range(out, options.steps, options.launcher.split(), hosts=options.hosts)
    for number in range(len(done), options.kills):
        given = options.engines, options.victims, options.saves, options.starting
        drill = drill_of(number, options.seed, *given)
        record = asdict(drill) | asdict(place.run(drill))
        with file.open("a") as lines:
            lines.write(json.dumps(record) + "\n")
        done.append(record)
        print({k: v for k, v in record.items() if v != ""}, flush=True)
    print(table(done))
    return int(any(record["outcome"] == "wrong" for record in done))


if __name__ == "__main__":
    raise SystemExit(main())

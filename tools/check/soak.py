"""Run many steps with a fault every few, and say whether memory, descriptors and files grow:
``python tools/check/soak.py --steps 300 --every 20``.

The run is that of ``kill_drill.py`` with the engine ``hf`` and a save per step. The processes
of ``--victims`` are killed in turn, each time that ``--every`` more steps are done. After a step
the anonymous memory and the open descriptors of all processes are a line of ``samples.jsonl`` in
``--out``, with the sizes of the run's files. A table has, for each kind of process, what one has
gained in the last third of its life: of several lives the one with the least gain.

Exit code 1 if the run does not end with all its steps, if a process gains more than 5 MiB or two
descriptors per hundred steps, or if a file grows by more than 1.2 times as much in the second half
of the steps as in the first.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/integration")]

import psutil
from launched_run import Run

from ctrl_megatron.config.flags import ToolParser
from tools.check.kill_drill import Range, is_victim, metrics_of

_SHORTEST = 30
"""Steps of a life that is looked at: buffers and caches reach their sizes in its first part."""
_MOST_MIB, _MOST_DESCRIPTORS, _MOST_SECOND_HALF = 5.0, 2.0, 1.2


def kind_of(process: psutil.Process) -> str:
    """The kind of a process of the run; workers of a sandbox come and go and are one kind."""
    for kind in ("sandbox", "engine", "rank"):
        if is_victim(process, kind):
            number = process.environ().get("RANK", process.name()[-1:])
            return f"rank {number}" if kind == "rank" else kind
    return "sandbox worker" if "ctrl_megatron.sandbox" in " ".join(process.cmdline()) else "other"


def sample(run: Run, step: int) -> dict[str, Any]:
    """Memory (MiB), descriptors and threads of every process, and bytes of every file."""
    found = []
    for process in [psutil.Process(run.process.pid), *run.look()]:
        try:
            first = process.pid == run.process.pid
            with process.oneshot():
                found.append(
                    {
                        "kind": "launcher" if first else kind_of(process),
                        "pid": process.pid,
                        "mib": anonymous(process.pid),
                        "descriptors": process.num_fds(),
                        "threads": process.num_threads(),
                    }
                )
        except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            continue  # a program of the sandbox, or a victim
    files = {p.name: p.stat().st_size for p in sorted(run.folder.iterdir()) if p.is_file()}
    return {"step": step, "processes": found, "files": files | {"log": run.log.stat().st_size}}


def anonymous(pid: int) -> float:
    """MiB of a process's own memory, which neither other processes nor the page cache change."""
    status = Path(f"/proc/{pid}/status").read_text()
    return sum(int(kib) for kib in re.findall(r"^RssAnon:\s+(\d+)", status, re.M)) / 1024


def watched(run: Run, victims: Sequence[str], every: int, file: Path) -> list[dict[str, Any]]:
    """Samples of a run until it ends, in which processes are killed."""
    samples: list[dict[str, Any]] = []
    kills = 0
    while run.process.poll() is None:
        step = max(metrics_of(run), default=0)
        if step and (not samples or step > samples[-1]["step"]):
            samples.append(sample(run, step))
            with file.open("a") as lines:
                lines.write(json.dumps(samples[-1]) + "\n")
        if step >= every * (kills + 1):
            kind = victims[kills % len(victims)]
            if candidates := [p for p in run.look() if is_victim(p, kind)]:
                candidates[0].kill()
                kills += 1
                print(f"step {step}: killed {kind} {candidates[0].pid}", flush=True)
        time.sleep(0.05)
    return samples


def gained(samples: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By kind: the steps of a life, and the gains per hundred steps in its last third.

    Of several lives of a kind the one that gains the least memory counts: what leaks does so in
    every life, and a buffer that grew once, late, is no leak.
    """
    lives: dict[tuple[str, int], list[tuple[int, dict[str, Any]]]] = defaultdict(list)
    for one in samples:
        for process in one["processes"]:
            lives[process["kind"], process["pid"]].append((one["step"], process))
    found: dict[str, dict[str, float]] = {}
    for (kind, _), life in lives.items():
        lasts = life[-1][0] - life[0][0]
        if lasts < _SHORTEST:
            continue
        late = [(step, p) for step, p in life if step >= life[-1][0] - lasts / 3]
        steps = [step for step, _ in late]
        one = {"steps": float(lasts)}
        for name in ("mib", "descriptors", "threads"):
            values = [p[name] for _, p in late]
            one |= {name: values[-1], f"{name}/100": 100 * slope(steps, values)}
        if one["mib/100"] < found.get(kind, one)["mib/100"] or kind not in found:
            found[kind] = one
    return found


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Of the least-squares line."""
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    square = sum((a - x) ** 2 for a in xs)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / square


def growth(samples: Sequence[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """Bytes per step of every file, in the first and in the second half of the steps."""
    first, middle, last = samples[0], samples[len(samples) // 2], samples[-1]

    def rate(name: str, a: dict[str, Any], b: dict[str, Any]) -> float:
        return (b["files"][name] - a["files"].get(name, 0)) / max(b["step"] - a["step"], 1)

    names = first["files"].keys() & middle["files"].keys() & last["files"].keys()
    return {n: (rate(n, first, middle), rate(n, middle, last)) for n in sorted(names)}


def main() -> int:
    """Entry point; see the module's docstring."""
    parser = ToolParser(__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=20, help="steps between two kills")
    victims = ["engine", "sandbox", "engine", "sandbox", "rank"]
    parser.add_argument("--victims", nargs="+", default=victims, choices=sorted(set(victims)))
    parser.add_argument("--out", type=Path, default=Path("runs/soak"))
    options = parser.parse_args()
    out: Path = options.out.resolve()
    out.mkdir(parents=True)
    place = Range(out, options.steps, ["--max-restarts=2"])
    extra = ("trainer.service_restarts=100", "trainer.max_ckpt_to_keep=2")
    with place.started("soak", "hf", asynchronous=True, extra=extra) as run:
        samples = watched(run, options.victims, options.every, out / "samples.jsonl")
        code = run.ends(60)
    steps, bad = len(metrics_of(run)), []
    print("| process | steps | MiB at the end | per 100 steps | descriptors | per 100 | threads |")
    print("|---|---|---|---|---|---|---|")
    for kind, one in sorted(gained(samples).items()):
        print(
            f"| {kind} | {one['steps']:.0f} | {one['mib']:.0f} | {one['mib/100']:+.2f} | "
            f"{one['descriptors']:.0f} | {one['descriptors/100']:+.2f} | {one['threads']:.0f} |"
        )
        if one["mib/100"] > _MOST_MIB or one["descriptors/100"] > _MOST_DESCRIPTORS:
            bad.append(kind)
    print("| file | bytes per step, first half | second half |\n|---|---|---|")
    for name, (first, second) in growth(samples).items():
        print(f"| {name} | {first:.0f} | {second:.0f} |")
        if second > _MOST_SECOND_HALF * max(first, 1.0):
            bad.append(name)
    print(
        f"{steps} of {options.steps} steps, exit code {code}" + (f"; grows: {bad}" if bad else "")
    )
    return int(bool(code or bad or steps != options.steps))


if __name__ == "__main__":
    raise SystemExit(main())

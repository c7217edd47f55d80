"""The study: what a critic of 135M parameters learns, in nine arms on two test sets.

``python tools/study.py`` makes every missing piece, ``--piece grpo.seed1`` makes one and the pieces
that it needs, ``--list`` lists all, ``--tables`` only rewrites tables and plots from the
transcripts beside the configuration. A killed piece continues where it was.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ctrl_megatron.checkpoint.files import write_whole
from ctrl_megatron.commands.start import CommandParser, command, run_child
from ctrl_megatron.data.json_lines import read_placed_lines
from ctrl_megatron.data.rows import read_rows
from ctrl_megatron.errors import UserError
from ctrl_megatron.eval.resampling import Estimate
from ctrl_megatron.eval.results import CriticResult, evaluate_turns
from ctrl_megatron.eval.transcripts import Turn, part_file, turn_from
from ctrl_megatron.metrics.json_lines import read_json_lines

HOME = Path("examples/study_smollm2")
CONFIG, KEPT = HOME / "mutants.yaml", HOME / "transcripts"
RUNS, DATA, MODEL = Path("runs/study"), Path("runs/study/data"), Path("runs/models/smollm2")
SEEDS, TESTS = (1, 2, 3), ("unseen_mutants", "unseen_problems")
STEPS = 10
"""Steps of RL, and of the control: further fine-tuning instead."""
SAMPLES = 4
"""Critiques of each first solution, each with its revision."""
TESTED = 100
"""Most first solutions of each test set."""
_PYTHON = sys.executable
_RATES = ("pass_rate", "pass@1", f"pass@{SAMPLES}", "f1_macro", "valid_critique_rate")
_SECONDS, _GAIN = "time/step", "group/reward_minus_first"
Work = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One piece of the study."""

    name: str
    product: Path
    """The file that appears when the piece is finished."""
    needs: tuple[str, ...]
    work: Work


def pieces() -> dict[str, Piece]:
    """All pieces by name, each after the pieces that it needs."""
    found: dict[str, Piece] = {}

    def add(name: str, product: Path, work: Work, *needs: str) -> None:
        found[name] = Piece(name=name, product=product, needs=needs, work=work)

    data = [_PYTHON, "tools/prepare_mutants.py", "--out", str(DATA), "--overwrite"]
    data += ["--test-size", str(TESTED)]
    add("data", DATA / "bland.jsonl", lambda: _run(data))
    for test in TESTS:
        product = DATA / f"{test}.feedback.jsonl"
        add(f"feedback.{test}", product, lambda t=test, p=product: _feedback(t, p), "data")
    proxy = _model("proxy")
    add("proxy", proxy / _WEIGHTS, lambda: _run(_sft("proxy", MODEL, 1, "proxy_sft", 12)), "data")
    for seed in SEEDS:
        sft, more = f"sft.seed{seed}", f"more_sft.seed{seed}"
        start = _model(sft)
        first, then = (
            _sft(sft, MODEL, seed, "critic_sft", 12),
            _sft(more, start, seed + 100, "critic_sft", STEPS),
        )
        add(sft, start / _WEIGHTS, lambda c=first: _run(c), "data")
        add(more, _model(more) / _WEIGHTS, lambda c=then: _run(c), sft)
        for arm, estimator in (("grpo", "grpo"), ("ppo", "gae")):
            name = f"{arm}.seed{seed}"
            train = _rl(name, start, seed, estimator)
            add(name, _model(name) / _WEIGHTS, lambda c=train: _run(c), sft, "proxy")
            curve = curve_file(KEPT, arm, seed)
            add(f"curve.{name}", curve, lambda n=name, p=curve: _keep_curve(n, p), name)
    for test in TESTS:
        feedback = f"feedback.{test}"
        told = found[feedback].product
        critics = (DATA / "bland.jsonl", MODEL, proxy, told, DATA / "oracle.jsonl")
        for arm, critic in zip(LINES, critics, strict=True):
            need = [feedback] if critic == told else []
            _add_measure(add, test, arm, critic, SEEDS[0], "data", "proxy", *need)
    for arm, name in ARMS.items():
        for seed in SEEDS:
            run = f"{name}.seed{seed}"
            for test in TESTS:
                _add_measure(add, test, arm, _model(run), seed, run, "data", "proxy")
    return found


_WEIGHTS = "model.safetensors"
LINES = ("bland", "zero-shot", "self-critique", "execution feedback", "oracle")
"""Arms without training, from the lower baseline to the upper one."""
ARMS = {"SFT": "sft", "SFT + GRPO": "grpo", "SFT, more steps": "more_sft", "SFT + PPO": "ppo"}
"""Trained arm -> prefix of its runs' names, in the order of measurement."""


def _add_measure(
    add: Callable[..., None], test: str, arm: str, critic: Path, seed: int, *needs: str
) -> None:
    plain = part_file(Path(), arm, seed).name.removesuffix(f".seed{seed}.jsonl")
    product = KEPT / f"{test}.{plain}.seed{seed}.jsonl.gz"
    name = f"measure.{test}.{plain}.seed{seed}"
    work = lambda: _measure(test, arm, critic, seed, product)  # noqa: E731
    add(name, product, work, *dict.fromkeys(needs))


def _model(run: str) -> Path:
    """The directory of the weights that a run exports."""
    last = f"hf_exports/global_step_{STEPS}"
    return RUNS / run / (last if run.startswith(("grpo", "ppo")) else "hf")


def _common(run: str, model: Path, seed: int) -> list[str]:
    return [
        f"trainer.default_local_dir={RUNS}",
        f"trainer.experiment_name={run}",
        f"trainer.seed={seed}",
        f"actor_rollout_ref.model.path={model}",
        f"actor_rollout_ref.model.tokenizer_path={MODEL}",
    ]


def _sft(run: str, model: Path, seed: int, data: str, steps: int) -> list[str]:
    return [
        *(_PYTHON, "tools/train_sft.py", "--nproc-per-node", "2", "--config", str(CONFIG)),
        *_common(run, model, seed),
        f"sft.train_files={DATA / data}.parquet",
        f"sft.total_training_steps={steps}",
    ]


def _rl(run: str, model: Path, seed: int, estimator: str) -> list[str]:
    # Differences within a group count as they are: that of a repair more than that of a mishap.
    scale = ["algorithm.norm_adv_by_std_in_grpo=false"] if estimator == "grpo" else []
    return [
        *(_PYTHON, "tools/train_rl.py", "--nproc-per-node", "2", "--config", str(CONFIG)),
        *_common(run, model, seed),
        f"actor_rollout_ref.proxy.model.path={_model('proxy')}",
        f"actor_rollout_ref.rollout.seed={seed}",
        f"algorithm.adv_estimator={estimator}",
        *scale,
        *(f"data.train_files={DATA / 'rl'}.parquet", "data.val_files=[]"),
        f"trainer.total_training_steps={STEPS}",
        f"trainer.save_hf_freq={STEPS}",
    ]


def _run(words: Sequence[str]) -> None:
    code = run_child(words, ROOT)
    if code:
        raise UserError(
            f"{' '.join(words[1:])} ended with exit code {code}",
            remedy="see above; the same command goes on",
        )


def _feedback(test: str, product: Path) -> None:
    """Write the critiques of templates, from execution feedback, for every first solution."""
    from ctrl_megatron.generation.solutions import judge_attempts
    from ctrl_megatron.preparation.synthesis import synthesise_critique
    from ctrl_megatron.sandbox import EmbeddedSandbox, SandboxClient

    attempts = [row.attempt() for row in read_rows([str(DATA / f"{test}.parquet")])]

    async def judge(endpoint: str) -> list[str]:
        async with SandboxClient(endpoint) as client:
            judged = await judge_attempts(client, attempts)
        said = [(a.id, synthesise_critique(a, verdict, n)) for n, (a, verdict) in enumerate(judged)]
        return [json.dumps({"id": name, "critique": text}) + "\n" for name, text in said]

    with EmbeddedSandbox.start() as sandbox:
        write_whole(product, "".join(asyncio.run(judge(sandbox.endpoint))))


def _measure(test: str, arm: str, critic: Path, seed: int, product: Path) -> None:
    """Evaluate one arm and keep the transcript, compressed reproducibly."""
    written = critic.suffix == ".jsonl"
    out = RUNS / f"{product.name.removesuffix('.jsonl.gz')}"
    _run(
        [
            *(_PYTHON, "-m", "ctrl_megatron.commands.evaluate"),
            *("--config", str(CONFIG), f"{arm}={critic}"),
            *("--out", str(out), "--seeds", str(seed)),
            *([] if written else ["--samples", str(SAMPLES), "--temperature", "1.0"]),
            "--set",
            *(f"data.train_files={DATA / 'rl'}.parquet", f"data.val_files={DATA / test}.parquet"),
            f"actor_rollout_ref.model.path={MODEL}",
            f"actor_rollout_ref.proxy.model.path={_model('proxy')}",
        ]
    )
    product.parent.mkdir(parents=True, exist_ok=True)
    part = product.with_name(product.name + ".part")
    part.write_bytes(gzip.compress(part_file(out, arm, seed).read_bytes(), mtime=0))
    part.rename(product)


def curve_file(folder: Path, arm: str, seed: int) -> Path:
    """The file with the steps of an RL run."""
    return folder / f"curve.{arm}.seed{seed}.jsonl"


def _keep_curve(run: str, product: Path) -> None:
    """Write the seconds and the reward of each step."""
    from ctrl_megatron.metrics.report.run_files import read_run_files

    series = read_run_files(RUNS / run).series or {}
    lines = [
        json.dumps({"step": step, _SECONDS: seconds, _GAIN: gain}) + "\n"
        for (step, seconds), (_, gain) in zip(series[_SECONDS], series[_GAIN], strict=True)
    ]
    write_whole(product, "".join(lines))


# Tables


def kept_turns(folder: Path, test: str) -> list[Turn]:
    """All transcripts of a test set: baselines first, then SFT and the arms compared with it."""
    turns = []
    for path in sorted(folder.glob(f"{test}.*.jsonl.gz")):
        turns += [turn_from(record, place) for place, record in read_placed_lines(path)]
    return turns


def results_of(turns: Sequence[Turn]) -> list[CriticResult]:
    """Results of all arms; gains of trained arms are over SFT, for the seeds of both."""
    trained = [t for t in turns if t.critic in ARMS]
    order = {arm: place for place, arm in enumerate(ARMS)}
    trained.sort(key=lambda t: order[t.critic])
    found: list[CriticResult] = []
    for name in LINES:
        line = [t for t in turns if t.critic == name]
        found += evaluate_turns(line, ks=(1, SAMPLES)) if line else []
    return found + (evaluate_turns(trained, ks=(1, SAMPLES)) if trained else [])


def markdown(test: str, turns: Sequence[Turn]) -> str:
    """The tables of a test set, without columns for rates that no arm has."""
    results = results_of(turns)
    known = [name for name in _RATES if any(name in r.last for r in results)]
    heads = ("arm", "seeds", *known, "pass_rate over SFT")
    lines = [f"## {test.replace('_', ' ').capitalize()}", "", _counted(turns), "", _row(heads)]
    lines.append(_row(["---"] * len(heads)))
    before = results[0].curves[0]
    lines.append(_row(["first solutions", "", *(_told(before.get(name)) for name in known), ""]))
    for r in results:
        rates = [_told(r.last.get(name)) for name in known]
        seeds = ", ".join(map(str, r.seeds))
        lines.append(_row([r.critic, seeds, *rates, _told(r.gains.get("pass_rate"))]))
    lines += ["", "Gains by seed:", "", _row(("arm", *(f"seed {s}" for s in SEEDS)))]
    lines.append(_row(["---"] * (1 + len(SEEDS))))
    for arm in [arm for arm in ARMS if arm != "SFT"]:
        gains = [_gain(turns, arm, seed) for seed in SEEDS]
        lines.append(_row([arm, *("open" if gain is None else _told(gain) for gain in gains)]))
    return "\n".join(lines) + "\n"


def _counted(turns: Sequence[Turn]) -> str:
    """The sentence that says what the rates count."""
    attempts = {turn.attempt for turn in turns}
    problems = {turn.problem_id for turn in turns}
    return (
        f"{len(attempts)} first solutions of {len(problems)} problems; every problem counts the "
        f"same. pass@{SAMPLES} is shown if every problem has {SAMPLES} chains, F1 if some first "
        "solutions are right and some wrong."
    )


def _gain(turns: Sequence[Turn], arm: str, seed: int) -> Estimate | None:
    both = [t for name in ("SFT", arm) for t in turns if (t.critic, t.seed) == (name, seed)]
    found = {r.critic: r for r in evaluate_turns(both)} if both else {}
    return found[arm].gains.get("pass_rate") if len(found) == 2 else None


def _told(rate: Estimate | None) -> str:
    if rate is None:
        return ""
    around = "" if rate.low is None else f" [{rate.low:.3f}, {rate.high:.3f}]"
    return f"{rate.value:.3f}{around}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def plot(test: str, results: Sequence[CriticResult], path: Path) -> None:
    """Draw the share of tests that revisions pass, one bar per arm with its 90 % interval, from the
    highest to the lowest. A vertical line marks the pass rate before any critique.
    """
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = test
    from matplotlib import pyplot

    ordered = sorted(results, key=lambda result: result.last["pass_rate"].value)
    figure, axes = pyplot.subplots(figsize=(7, 0.38 * len(ordered) + 1.6))
    for place, result in enumerate(ordered):
        rate = result.last["pass_rate"]
        low = rate.value if rate.low is None else rate.low
        high = rate.value if rate.high is None else rate.high
        color = "#1f5fa8" if result.critic in ARMS else "#a8b4c2"
        axes.barh(place, rate.value, height=0.62, color=color)
        axes.plot([low, high], [place, place], color="#222222", linewidth=1.2)
        axes.annotate(
            f"{rate.value:.0%}", (high, place), (5, 0), textcoords="offset points", va="center"
        )
    before = ordered[0].curves[0]["pass_rate"].value
    axes.axvline(before, color="#b3261e", linestyle="--", linewidth=1.2)
    axes.annotate(
        f"before critique: {before:.0%}",
        (before, len(ordered) - 0.4),
        (4, 0),
        textcoords="offset points",
        color="#b3261e",
        va="bottom",
    )
    axes.set_ylim(-0.6, len(ordered) + 0.2)
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter("{x:.0%}")
    axes.set_yticks(range(len(ordered)), [result.critic for result in ordered])
    axes.set_xlabel("share of tests passed after revision, with 90 % intervals")
    axes.set_title(f"What the critique is worth: {test.replace('_', ' ')}")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def kept_curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Seconds of reinforcement and what critiques earn beyond the first solutions, step by step:
    the means of the seeds that are kept, by estimator.
    """
    curves: dict[str, list[tuple[int, float]]] = {}
    for arm, name in (("grpo", "GRPO"), ("ppo", "PPO")):
        seeds = [seed for seed in SEEDS if curve_file(folder, arm, seed).exists()]
        runs = [read_json_lines(curve_file(folder, arm, seed)) for seed in seeds]
        ended = [accumulate(step[_SECONDS] for step in run) for run in runs]
        earned = [[step[_GAIN] for step in run] for run in runs]
        if runs:
            label = f"{name}, seeds {', '.join(map(str, seeds))}"
            seconds = [round(fmean(at)) for at in zip(*ended, strict=True)]
            gains = [fmean(at) for at in zip(*earned, strict=True)]
            curves[label] = list(zip(seconds, gains, strict=True))
    return curves


def write_tables(folder: Path, out: Path) -> None:
    """``tables.md`` and a plot of each test set in ``out``, and one of the RL runs where their
    steps are kept. UserError without any transcript.
    """
    parts = []
    for test in TESTS:
        turns = kept_turns(folder, test)
        if turns:
            parts.append(markdown(test, turns))
            plot(test, results_of(turns), out / f"{test}.svg")
    if not parts:
        raise UserError(f"{folder} holds no transcript yet", remedy="run tools/study.py first")
    if curves := kept_curves(folder):
        from ctrl_megatron.metrics.report.figures import curve_svg

        label = "seconds; reward beyond the first solutions'"
        write_whole(out / "curves.svg", curve_svg(curves, x_label=label))
    write_whole(out / "tables.md", "# Tables of the study\n\n" + "\n".join(parts))


def in_order(wanted: str, known: dict[str, Piece]) -> Iterator[Piece]:
    """The pieces that a piece needs, then itself; pieces may repeat."""
    for need in known[wanted].needs:
        yield from in_order(need, known)
    yield known[wanted]


@command("study", stopped="the same command goes on")
def main(arguments: Sequence[str] | None = None) -> int:
    """Make the missing pieces. Exit codes: 0 done, 2 wrong input or a failed piece, 130."""
    parser = CommandParser(__doc__)
    parser.add_argument("--piece", help="make this one and what it needs")
    parser.add_argument("--list", action="store_true", help="say which pieces are there")
    parser.add_argument("--tables", action="store_true", help="only tables and plots, of what is")
    options = parser.parse_args(arguments)
    known = pieces()
    if options.piece is not None and options.piece not in known:
        raise UserError(f"--piece: there is no {options.piece!r}", remedy="see --list")
    if options.list:
        for piece in known.values():
            print(f"{'there' if piece.product.exists() else 'open':<6} {piece.name}")
        return 0
    if not options.tables:
        measured = [name for name in known if name.startswith(("measure.", "curve."))]
        for wanted in [options.piece] if options.piece else measured:
            for piece in in_order(wanted, known):
                if not piece.product.exists():
                    print(f"study: {piece.name}", flush=True)
                    piece.work()
    if options.piece is None:
        write_tables(KEPT, HOME)
        print(f"wrote {HOME / 'tables.md'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

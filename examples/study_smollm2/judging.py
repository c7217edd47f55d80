"""The study of judging: can a critic of 135M parameters tell right programs from wrong ones?

``python examples/study_smollm2/judging.py`` makes data, fine-tunes one model for critic and proxy,
trains every arm of ``ARMS``, evaluates all of them on test sets of as many right programs as wrong
ones, and writes ``runs/judging/tables.md`` and curves. Pieces that are there are not made again;
``--people FILE`` adds a test set of people's programs (``right_and_wrong.parquet`` of
``prepare_real_faults.py``). The setting is ``examples/ctrl_judge.yaml``; docs/judging.md has the
tables.

Beside the critics stand a logistic regression on the length and the surface of the programs, fitted
to the critic's fine-tuning rows, and a critic that always says "Correct".
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from ctrl_megatron.checkpoint.files import write_text_atomically
from ctrl_megatron.commands.demo import command_words
from ctrl_megatron.commands.start import CommandParser, command_entry_point, run_child
from ctrl_megatron.config.flags import existing_file
from ctrl_megatron.eval.results import CriticResult, evaluate_turns
from ctrl_megatron.eval.tables import (
    rate_and_interval_text,
    rate_difference_text,
    rate_in_words,
)
from ctrl_megatron.eval.transcripts import Turn, read_evaluation
from ctrl_megatron.prompts import extract_code, parse_judgment
from ctrl_megatron.sft.examples import read_examples

CONFIG = "examples/ctrl_judge.yaml"
MODEL, DATA, TUNED = "runs/models/smollm2", "runs/judge_data", "runs/judge_sft/hf"
RUNS, SFT_STEPS, STEPS, SAMPLES = Path("runs/judging"), 64, 12, 2
_STAGES = (
    "[{from_step: 1, weights: {critic: 0, judge: 1}}, "
    "{from_step: 5, weights: {critic: 1, judge: 0.5}}]"
)
ARMS: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "repair": ((1, 2, 3), ("reward.judge.weight=0",)),
    "gdpo": ((1, 2, 3), ("algorithm.adv_estimator=gdpo",)),
    "repair and judge": ((1,), ()),
    "two stages": ((1,), (f"reward.schedule={_STAGES}",)),
}
"""Arm -> its seeds, and the keys in which it differs from the configuration."""
RATES = (
    *("pass_rate", "f1_macro", "auc", "ece", "brier", "judged_correct_rate"),
    *("gain_after_true_judgment", "gain_after_false_judgment"),
)
GAINS = ("pass_rate", "f1_macro", "auc")
_OPERATORS = re.compile(r"[-+*/%<>=!&|^~]+")
_NUMBERS = re.compile(r"\b\d+\b")


def pieces(people: Path | None) -> Iterator[tuple[Path, list[str]]]:
    """(product, command) of every piece, in their order."""
    launch = ["--nproc-per-node", "2", "--config", CONFIG]
    prepare, sizes = command_words("prepare_mutants"), ("--longest-attempt", "90")
    shares = ("--right-share", "0.5", "--sft-right-share", "0.5", "--balanced-tests")
    yield Path(MODEL, "model.safetensors"), [*command_words("prepare_smollm2"), "--out", MODEL]
    yield (
        Path(DATA, "rl.parquet"),
        [*prepare, "--out", DATA, *sizes, "--test-size", "80", *shares],
    )
    yield (
        Path(TUNED, "model.safetensors"),
        [
            *(*command_words("train_sft"), *launch, "trainer.experiment_name=judge_sft"),
            f"actor_rollout_ref.model.path={MODEL}",
            f"sft.total_training_steps={SFT_STEPS}",
        ],
    )
    for arm, (seeds, keys) in ARMS.items():
        for seed in seeds:
            yield (
                _weights(arm, seed) / "model.safetensors",
                [
                    *(*command_words("train_rl"), *launch),
                    f"trainer.experiment_name={_run(arm, seed)}",
                    *(f"trainer.seed={seed}", f"actor_rollout_ref.rollout.seed={seed}"),
                    *(f"trainer.total_training_steps={STEPS}", f"trainer.save_hf_freq={STEPS}"),
                    *keys,
                ],
            )
    critics = [f"SFT={TUNED}"]
    critics += [f"{arm}.{s}={_weights(arm, s)}" for arm, (seeds, _) in ARMS.items() for s in seeds]
    for name, file in test_sets(people).items():
        out = RUNS / name
        yield (
            out / "report.html",
            [
                *(*command_words("evaluate"), "--config", CONFIG, "--out", str(out), *critics),
                *("--samples", str(SAMPLES), "--temperature", "1", "--confidence", "logprob"),
                *("--set", f"data.val_files={file}", "actor_rollout_ref.model.path=" + TUNED),
                *(
                    "data.max_prompt_length=608",
                    "actor_rollout_ref.rollout.revision_max_tokens=256",
                ),
            ],
        )


def test_sets(people: Path | None) -> dict[str, str]:
    """Name -> file of first solutions."""
    own = {name: f"{DATA}/{name}.parquet" for name in ("unseen_problems", "unseen_mutants")}
    return own if people is None else {**own, "people": str(people)}


def _run(arm: str, seed: int) -> str:
    return f"judging_{arm.replace(' ', '_')}.seed{seed}"


def _weights(arm: str, seed: int) -> Path:
    return Path("runs") / _run(arm, seed) / "hf_exports" / f"global_step_{STEPS}"


# Baselines


def surface(program: str) -> list[float]:
    """Numbers about a program that need no understanding of it."""
    lines = program.splitlines()
    found = [
        *(len(program), len(lines), max(map(len, lines), default=0)),
        *(len(_OPERATORS.findall(program)), len(_NUMBERS.findall(program))),
        *(program.count(word) for word in ("<", ">", "==", "+", "-", "*", "//", "%", "not", "if")),
        *(
            program.count(word)
            for word in ("range", "return", "[", "(", "0", "1", "2", "and", "or")
        ),
    ]
    return [float(number) for number in found]


class SurfaceRegression:
    """Logistic regression on ``surface``, ridge 1, by Newton's method."""

    def __init__(self, programs: Sequence[str], right: Sequence[bool]) -> None:
        raw = np.array([surface(program) for program in programs])
        self._mean, self._scale = raw.mean(axis=0), raw.std(axis=0) + 1e-9
        inputs, wanted = self._inputs(programs), np.array(right, dtype=float)
        self._weights = np.zeros(inputs.shape[1])
        ridge = np.eye(inputs.shape[1])
        ridge[0, 0] = 0.0
        for _ in range(50):
            said = self._said(inputs)
            curvature = inputs.T @ (inputs * (said * (1 - said))[:, None]) + ridge
            slope = inputs.T @ (said - wanted) + ridge @ self._weights
            self._weights -= np.linalg.solve(curvature, slope)

    def _inputs(self, programs: Sequence[str]) -> np.ndarray:
        raw = (np.array([surface(program) for program in programs]) - self._mean) / self._scale
        return np.hstack([np.ones((len(raw), 1)), raw])

    def _said(self, inputs: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-inputs @ self._weights))

    def probability(self, program: str) -> float:
        return float(self._said(self._inputs([program]))[0])


def baseline_turns(firsts: Sequence[Turn]) -> Iterator[Turn]:
    """What the regression, and a critic that always says "Correct", say of the programs that the
    SFT critic judged; nothing is revised."""
    rows = read_examples([f"{DATA}/critic_sft.parquet"])
    fitted = SurfaceRegression(
        [_program(row.prompt[-1]["content"]) for row in rows],
        [bool(parse_judgment(row.response)) for row in rows],
    )
    for turn in firsts:
        said = {"surface": fitted.probability(extract_code(turn.solution)), "always correct": 1.0}
        for critic, probability in said.items():
            yield replace(
                turn,
                critic=critic,
                judgment=probability > 0.5,
                confidence=probability,
                revision=turn.solution,
                after=turn.before,
            )


def _program(request: str) -> str:
    """The program in a request for a critique."""
    return extract_code(request.partition("<answer>")[2].partition("</answer>")[0])


# Curves


def write_curves(folder: Path) -> None:
    """``judgment.svg`` and ``repair.svg``: the rewards by training step of the first seed of every
    arm that rewards judgments."""
    from ctrl_megatron.metrics import read_json_lines
    from ctrl_megatron.metrics.report.figures import curve_svg

    for picture, metric in (("judgment", "reward/judge"), ("repair", "reward/mean")):
        curves = {}
        for arm, (seeds, keys) in ARMS.items():
            if "reward.judge.weight=0" in keys:
                continue
            records = read_json_lines(Path("runs", _run(arm, seeds[0]), "metrics.jsonl"))
            points = [(r["step"], r["metrics"][metric]) for r in records if metric in r["metrics"]]
            curves[arm] = points
        write_text_atomically(folder / f"{picture}.svg", curve_svg(curves))


# Tables


def turns_by_critic(name: str) -> dict[str, list[Turn]]:
    """What SFT, every arm's seeds (ARM.SEED) and the baselines said on a test set. Seeds stay
    apart: scores of models that were trained differently have no common scale."""
    found: dict[str, list[Turn]] = {}
    for turn in read_evaluation(RUNS / name).turns:
        found.setdefault(turn.critic, []).append(turn)
    for turn in baseline_turns([turn for turn in found["SFT"] if turn.sample == 0]):
        found.setdefault(turn.critic, []).append(turn)
    return found


def compare(turns: dict[str, list[Turn]], base: str, critics: Sequence[str]) -> list[CriticResult]:
    """The results of ``base`` and of the critics, with their gains over it."""
    return evaluate_turns([t for c in (base, *critics) for t in turns[c]], confidence="logprob")


def table_head(names: Sequence[str]) -> str:
    """The first two lines of a table in Markdown."""
    head = ["critic", *map(rate_in_words, names)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head)))


def table(
    results: Sequence[CriticResult], names: Sequence[str], *, gains: bool, bare: bool = False
) -> str:
    """Markdown: a row for every result, with intervals; ``bare`` without a head."""
    told = rate_difference_text if gains else rate_and_interval_text
    rows = [
        [r.critic, *(told((r.gains if gains else r.last_turn_rates).get(n), n) for n in names)]
        for r in (results[1:] if gains else results)
    ]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([*([] if bare else [table_head(names)]), *lines])


@command_entry_point("judging", stopped="the same command goes on with this piece")
def main(arguments: Sequence[str] | None = None) -> int:
    """Make what is missing, and the tables; return the exit code of the first piece that fails."""
    parser = CommandParser(__doc__)
    parser.add_argument("--people", type=existing_file, help="rows of people's programs")
    options = parser.parse_args(arguments)
    for product, words in pieces(options.people):
        if not product.exists():
            print(f"making {product}", flush=True)
            if code := run_child(words, Path.cwd()):
                print(f"{product}: exit code {code}", flush=True)
                return code
    parts = []
    for name in test_sets(options.people):
        turns = turns_by_critic(name)
        others = [critic for critic in turns if critic != "SFT"]
        trained = [critic for critic in others if "." in critic]
        every = compare(turns, "SFT", others)
        parts += [f"## {name}", table(every, RATES, gains=False)]
        over = [every[0], *(result for result in every if result.critic in trained)]
        parts += ["Gains over SFT.", table(over, GAINS, gains=True)]
        for base in ("repair", "surface"):
            rows = [table_head(GAINS)]
            for critic in trained:
                arm, _, seed = critic.rpartition(".")
                if arm != base:
                    against = f"repair.{seed}" if base == "repair" else base
                    rows.append(
                        table(compare(turns, against, [critic]), GAINS, gains=True, bare=True)
                    )
            parts += [f"Gains over {base}, of the same seed.", "\n".join(rows)]
    RUNS.mkdir(parents=True, exist_ok=True)
    write_text_atomically(RUNS / "tables.md", "\n\n".join(parts) + "\n")
    write_curves(RUNS)
    print(f"wrote {RUNS / 'tables.md'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Train a small masked-diffusion model to write programs on one machine without a GPU: SmolLM2 sees
all tokens and predicts masked ones, is fine-tuned on short programs, and then trained by coupled
GRPO on the tests that its programs pass.

Finished stages are not repeated, and a stage that was stopped goes on from its last checkpoint;
``--fresh`` removes earlier runs of this demo.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rich.console import Console
from rich.table import Table

from ctrl_megatron.checkpoint.files import (
    remove_tool_files,
    tool_output_files,
    write_text_atomically,
)
from ctrl_megatron.commands.start import CommandParser, command_entry_point, run_child
from ctrl_megatron.config import load_config
from ctrl_megatron.config.flags import count_flag, output_path
from ctrl_megatron.data.rows import Row, row_of_attempt, write_rows
from ctrl_megatron.data.tokens import TextCodec
from ctrl_megatron.eval.resampling import Estimate, Resampling, ratio_of_columns, sum_into_cells
from ctrl_megatron.metrics import read_json_lines
from ctrl_megatron.metrics.report.figures import curve_svg
from ctrl_megatron.metrics.report.run_files import read_run_files
from ctrl_megatron.preparation.problem_files import read_problems
from ctrl_megatron.record.dump import FOLDER
from ctrl_megatron.sft.examples import SftExample, write_examples
from ctrl_megatron.types import Attempt, Message, Problem

_TOOL, CONFIG = "demo_diffusion", "examples/diffusion_smollm2_cpu.yaml"
MODEL = "runs/models/smollm2"
FILES = ("sft.parquet", "rl.parquet", "unseen.parquet")
SYSTEM = "Write a program."
EVERY = 6
"""One of so many problems is kept for validation alone."""
RANKS, SFT_STEPS, STEPS = "2", 120, 20
SFT_SAVE, SAVE = 40, 5
"""Steps of fine-tuning and of RL between two checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What a run of the demo is made of."""

    folder: Path
    """Parent of all files; below the repository."""
    sft_steps: int
    steps: int

    @property
    def start(self) -> Path:
        """The model that sees all tokens and has learned nothing."""
        return self.folder / "diffusion_start"

    @property
    def data(self) -> Path:
        """The folder of the rows."""
        return self.folder / "diffusion_data"

    @property
    def tuned(self) -> Path:
        """The fine-tuned model."""
        return self.folder / "diffusion_sft/hf"

    @property
    def run(self) -> Path:
        """The directory of the RL run."""
        return self.folder / "diffusion"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A program of the demo."""

    title: str
    words: list[str]
    """The program and its arguments; Python runs it."""
    product: Path | None = None
    """The file that its end makes: the stage is skipped where it exists."""


def stages(sizes: Sizes) -> list[Stage]:
    """The stages in their order."""

    def trained(program: str, name: str, model: Path, *more: str) -> list[str]:
        return [
            *(program, "--nproc-per-node", RANKS, "--config", CONFIG),
            *(f"trainer.default_local_dir={sizes.folder}", f"trainer.experiment_name={name}"),
            *(f"actor_rollout_ref.model.path={model}", *more),
        ]

    sft, rl, unseen = (str(sizes.data / name) for name in FILES)
    return [
        Stage(
            title="prepare SmolLM2-135M",
            words=["tools/prepare_smollm2.py", "--out", MODEL],
        ),
        Stage(
            title="let every token see all others, and add a mask token",
            words=[
                *("tools/make_diffusion_start.py", "--hf", MODEL, "--out", str(sizes.start)),
                "--overwrite",
            ],
            product=sizes.start / "model.safetensors",
        ),
        Stage(
            title="make rows of short programs",
            words=["tools/demo_diffusion.py", "--folder", str(sizes.folder), "--only-rows"],
            product=sizes.data / FILES[-1],
        ),
        Stage(
            title=f"learn to fill in masked programs ({sizes.sft_steps} steps of SFT)",
            words=trained(
                *("tools/train_sft.py", "diffusion_sft", sizes.start),
                *(f"sft.train_files={sft}", f"sft.total_training_steps={sizes.sft_steps}"),
                f"trainer.save_freq={SFT_SAVE}",
            ),
            product=sizes.tuned / "model.safetensors",
        ),
        Stage(
            title=f"reward programs that pass tests ({sizes.steps} steps of coupled GRPO)",
            words=trained(
                *("tools/train_rl.py", "diffusion", sizes.tuned),
                *(f"data.train_files={rl}", f"data.val_files=[{rl},{unseen}]"),
                *(f"trainer.total_training_steps={sizes.steps}", "trainer.dump_steps=all"),
                f"trainer.save_freq={SAVE}",
            ),
            # The last validation follows the last checkpoint; a finished run ends at once.
        ),
    ]


def write_files(folder: Path, tokenizer: Path, canvas: int) -> None:
    """Write the examples of fine-tuning and the rows of RL and of validation, of all function
    problems whose programs fit in ``canvas`` tokens with the end-of-text token.
    """
    codec = TextCodec(tokenizer)
    short = [
        problem
        for problem in read_problems(ROOT / "examples/problems")
        if problem.entry_point and len(codec.encode(answer(problem))) < canvas
    ]
    Random(0).shuffle(short)
    unseen, seen = short[::EVERY], [p for n, p in enumerate(short) if n % EVERY]
    with tool_output_files(folder, FILES, _TOOL, overwrite=True) as work:
        examples = [
            SftExample(id=problem.id, prompt=messages(problem), response=answer(problem))
            for problem in seen
        ]
        write_examples(work / FILES[0], examples)
        for name, problems in zip(FILES[1:], (seen, unseen), strict=True):
            write_rows(work / name, map(asked, problems))
    print(f"{folder}: {len(seen)} problems to learn, {len(unseen)} for validation alone")


def messages(problem: Problem) -> tuple[Message, ...]:
    """The request for a program."""
    return (
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": problem.statement},
    )


def answer(problem: Problem) -> str:
    """The reference in the form that ``code_format`` rewards."""
    return f"```python\n{problem.reference.strip()}\n```\n"


def asked(problem: Problem) -> Row:
    """The row that asks for a program."""
    return row_of_attempt(Attempt(id=problem.id, problem=problem, solution=""), messages(problem))


def groups_by_step(run: Path) -> list[list[tuple[float, int]]]:
    """Of every step, from its dump, the (sum of rewards, samples) of each group."""
    steps = []
    for step in range(1, 1 + len(list((run / FOLDER).glob("global_step_*")))):
        groups = defaultdict[str, list[float]](list)
        for file in sorted((run / FOLDER / f"global_step_{step}").glob("texts_*.jsonl")):
            for sample in read_json_lines(file):
                groups[sample["problem_id"]].append(sample["score"])
        steps.append([(sum(own), len(own)) for own in groups.values()])
    return steps


def mean_reward(groups: Sequence[tuple[float, int]]) -> Estimate:
    """The mean reward and its 90 % interval over groups, each of another problem."""
    cells = sum_into_cells([(0, number, own) for number, own in enumerate(groups)], 1, len(groups))
    estimate = Resampling(len(groups)).estimate(cells, ratio_of_columns)
    assert estimate is not None
    return estimate


@command_entry_point(_TOOL, stopped="the same command goes on with this stage")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages in order; return the exit code of the first that fails."""
    parser = CommandParser(__doc__)
    parser.add_argument("--fresh", action="store_true", help="remove earlier runs of this demo")
    parser.add_argument(
        "--folder", type=output_path, default=Path("runs"), help="parent of all files"
    )
    parser.add_argument("--sft-steps", type=count_flag(), default=SFT_STEPS)
    parser.add_argument("--steps", type=count_flag(), default=STEPS, help="steps of coupled GRPO")
    parser.add_argument("--only-rows", action="store_true", help="make the rows, and nothing else")
    options = parser.parse_args(arguments)
    sizes = Sizes(folder=options.folder, sft_steps=options.sft_steps, steps=options.steps)
    if options.only_rows:
        config = load_config(ROOT / CONFIG, [], "none")
        write_files(ROOT / sizes.data, ROOT / MODEL, config.data.max_response_length)
        return 0
    if options.fresh:
        remove_tool_files(ROOT / sizes.data, _TOOL)
        for folder in (sizes.tuned.parent, sizes.run):
            shutil.rmtree(ROOT / folder, ignore_errors=True)
    console, took = Console(), {}
    todo = stages(sizes)
    for number, stage in enumerate(todo, start=1):
        console.rule(f"{number}/{len(todo)} {stage.title}")
        if stage.product is not None and (ROOT / stage.product).exists():
            console.print(f"{stage.product} is there already")
            continue
        start = time.monotonic()
        if code := run_child([sys.executable, *stage.words], ROOT):
            console.print(f"stage {number} ended with exit code {code}", style="bold red")
            return code
        took[stage.title] = time.monotonic() - start
    _summary(console, sizes)
    for title, seconds in took.items():
        console.print(f"{seconds:6.0f} s  {title}")
    return 0


def _summary(console: Console, sizes: Sizes) -> None:
    run = ROOT / sizes.run
    series = read_run_files(run).series or {}
    table = Table(title="greedy programs: tests passed, and share in the right form")
    for column in ("problems", "before RL", "after RL"):
        table.add_column(column, justify="left" if column == "problems" else "right")
    for title, name in (("of SFT and RL", "rl"), ("of neither", "unseen")):
        values = [series[f"val/{name}/reward/{reward}"] for reward in ("code", "code_format")]
        ends = (" and ".join(f"{points[end][1]:.3f}" for points in values) for end in (0, -1))
        table.add_row(title, *ends)
    console.print(table)
    steps = groups_by_step(run)
    half = len(steps) // 2
    for title, part in (("first half", steps[:half]), ("second half", steps[half:])):
        if part:
            told = _told(mean_reward([group for step in part for group in step]))
            console.print(f"reward of the samples, {title} of the steps: {told} (of 2.5)")
    curve = [mean_reward(groups) for groups in steps]
    bands = [None if e.low is None or e.high is None else (e.low, e.high) for e in curve]
    points = [(step, estimate.value) for step, estimate in enumerate(curve, start=1)]
    figure = run / "reward.svg"
    write_text_atomically(figure, curve_svg({"reward": points}, bands={"reward": bands}))
    console.print(f"reward by step with 90 % intervals: {figure}")
    console.print(f"report: {run / 'report.html'}")


def _told(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.3f}"
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"


if __name__ == "__main__":
    raise SystemExit(main())

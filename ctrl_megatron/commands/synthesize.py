"""Make the training files of a critic from problems: first solutions, verdicts and critiques.

``ctrl-synthesize --problems problems.jsonl --solver DIR --out runs/data`` generates first solutions
(or reads ``--solutions``), judges them in the sandbox, and writes critiques for fine-tuning and its
validation: with the model ``--critic`` from execution feedback, or from templates. The files are
``sft_train.parquet`` and ``sft_val.parquet`` (critiques), ``train.parquet`` and ``val.parquet``
(first solutions to criticise), ``solve.parquet`` (problems to solve), ``solutions.jsonl`` and
``synthesis.json`` (counts of what was kept and dropped). Fine-tuning, reinforcement learning and
validation share no problem. A model is an HF directory, or the model's name on the server at
``--...-url``.

Finished work is kept in the folder .synthesis of --out: after a kill the same command continues
from it and writes the same files.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from ctrl_megatron.checkpoint.files import (
    require_replaceable_files,
    tool_files_unchanged,
    tool_output_files,
)
from ctrl_megatron.commands.chat_flags import (
    DTYPES,
    MOST_THREADS,
    SERVERS,
    add_tensor_parallel_flag,
    convert_service_faults,
    model_source,
)
from ctrl_megatron.commands.start import CommandParser, command_entry_point
from ctrl_megatron.config.flags import (
    count_flag,
    existing_file,
    existing_path,
    float_flag,
    integer_flag,
    output_path,
    temperature,
)
from ctrl_megatron.config.secrets import hide_credentials_in_flags
from ctrl_megatron.engine_kinds import ENGINES
from ctrl_megatron.errors import UserError, convert_input_errors
from ctrl_megatron.preparation.checked_problems import select_judgeable_problems
from ctrl_megatron.preparation.journal import StageJournal
from ctrl_megatron.preparation.problem_files import problem_record, read_problems
from ctrl_megatron.preparation.published import DroppedItems
from ctrl_megatron.preparation.selection import SplitShares
from ctrl_megatron.preparation.solution_files import read_solutions
from ctrl_megatron.preparation.stages import SynthesisStages, chat_opener
from ctrl_megatron.preparation.training_files import (
    FILES,
    TrainingFileRecipe,
    check_split_sizes,
    make_training_files,
)
from ctrl_megatron.types import Attempt, Problem, SamplingParams

if TYPE_CHECKING:
    from ctrl_megatron.generation.sources import ChatSource, EngineOptions

_TOOL, _JOURNAL = "synthesize", ".synthesis"
_RULES = 2
"""Version of the order and content of journal parts; raised with every change of either."""
_ROLES = ("solver", "critic", "reviser")


@command_entry_point(_TOOL, stopped="what is finished is kept; the same command goes on from there")
def main(arguments: Sequence[str] | None = None) -> int:
    """Check, run what is left, write. Exit codes: 0 done, 2 wrong input, 130 stopped."""
    options = _parse(arguments)
    with convert_input_errors("--problems"):
        problems = read_problems(options.problems)
    known = {problem.id for problem in problems}
    hardest = 4 if options.max_difficulty is None else options.max_difficulty
    problems = [problem for problem in problems if problem.difficulty <= hardest]
    shares = SplitShares(val=options.val_share, sft=options.sft_share)
    check_split_sizes(problems, shares)
    attempts, dropped = list[Attempt](), DroppedItems()
    if options.solutions:
        attempts, dropped = read_solutions(options.solutions, problems, known)
    sources, engines = _sources(options)
    journal = _open_journal(options, _settings(options, problems, attempts, sources))
    if journal is None:
        print(f"{options.out}: everything is finished, nothing to do")
        return 0
    with convert_service_faults(options.out):
        problems, left_out = select_judgeable_problems(problems, options.problems, options.out)
    for text in left_out:
        print(f"left out: {text}", file=sys.stderr)
    check_split_sizes(problems, shares)
    usable = {problem.id: problem for problem in problems}
    attempts = [
        replace(a, problem=usable[a.problem.id]) for a in attempts if a.problem.id in usable
    ]
    with _bars() as progress, convert_service_faults(options.out):
        stages = SynthesisStages(
            journal=journal,
            chats={role: chat_opener(source, engines) for role, source in sources.items()},
            seed=options.seed,
            progress=progress,
        )
        recipe = _recipe(options, shares)
        files = asyncio.run(make_training_files(stages, problems, attempts, dropped, recipe))
        with tool_output_files(options.out, FILES, _TOOL, overwrite=True) as folder:
            files.write(folder)
    if shares.val and not files.val:
        print(
            f"there is no val.parquet, because no first solution of {len(problems)} problems is "
            "held out: raise --val-share (a problem's part depends on its id), add problems, or "
            "train with data.val_files=[]",
            file=sys.stderr,
        )
    counts = {"problems": {"kept": len(problems), "left out": len(left_out)}, **files.counts}
    _show(options.out, counts)
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser(__doc__)
    parser.add_argument("--problems", type=existing_path, default=Path("examples/problems"))
    parser.add_argument("--out", type=output_path, default=Path("runs/data"))
    parser.add_argument(
        "--overwrite", action="store_true", help="start over and replace this command's files"
    )
    parser.add_argument(
        "--solutions", type=existing_file, help="a .jsonl file of existing first solutions"
    )
    for role, does in zip(
        _ROLES,
        (
            "generates first solutions",
            "writes critiques from hints; without it templates do",
            "revises; critiques whose revision fails are dropped",
        ),
        strict=True,
    ):
        parser.add_argument(f"--{role}", metavar="MODEL", help=does)
        parser.add_argument(f"--{role}-url", metavar="URL", default="", help=SERVERS)
    parser.add_argument("--engine", choices=list(ENGINES))
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="of an engine")
    parser.add_argument("--max-model-len", type=count_flag(), default=2048)
    parser.add_argument(
        "--threads", type=integer_flag(1, MOST_THREADS), help="CPU threads of an engine"
    )
    add_tensor_parallel_flag(parser)
    parser.add_argument("--n", type=count_flag(), default=2, help="solutions per problem")
    parser.add_argument("--temperature", type=temperature, default=0.7, help="of the solver")
    parser.add_argument(
        "--max-tokens", type=count_flag(), default=256, help="of a solution or revision"
    )
    parser.add_argument(
        "--critique-draws", type=count_flag(), default=2, help="the first good one is kept"
    )
    parser.add_argument("--critique-temperature", type=temperature, default=0.7)
    parser.add_argument("--critique-tokens", type=count_flag(), default=256)
    parser.add_argument("--val-share", type=float_flag(0, 1), default=0.2, help="of all problems")
    parser.add_argument(
        "--sft-share", type=float_flag(0, 1), default=0.5, help="of the other problems"
    )
    parser.add_argument(
        "--val-size", type=count_flag(0), default=40, help="held-out attempts at most"
    )
    parser.add_argument("--balance", action="store_true", help="as many right as wrong in SFT")
    parser.add_argument(
        "--right-share",
        type=float_flag(0, 1),
        help="share of right first solutions in train.parquet and val.parquet, by problem: those "
        "with a right and a wrong one come first; by default all are kept",
    )
    parser.add_argument("--max-difficulty", type=int, help="hardest level used")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    if bool(options.solver) == bool(options.solutions):
        raise UserError("give either --solver or --solutions as the source of first solutions")
    for role in _ROLES:
        if getattr(options, f"{role}_url") and not getattr(options, role):
            raise UserError(f"--{role}-url needs --{role}, the model's name there")
    return options


def _settings(
    options: argparse.Namespace,
    problems: Sequence[Problem],
    given: Sequence[Attempt],
    sources: Mapping[str, ChatSource],
) -> dict[str, object]:
    """Everything that the files depend on, by flag."""
    kept = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(options).items()
        if name
        not in ("out", "overwrite", "problems", "solutions", "threads", "tensor_parallel_size")
    }
    texts = {
        "problems": json.dumps([problem_record(problem) for problem in problems]),
        "solutions": json.dumps([(a.id, a.solution) for a in given]),
    }
    digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
    shown = {**hide_credentials_in_flags(kept), **digests}
    flags = {f"--{name.replace('_', '-')}": value for name, value in shown.items()}
    weights = {
        f"weights of --{role}": source.weights_fingerprint() for role, source in sources.items()
    }
    return {**flags, **weights, "rules": _RULES}


def _recipe(options: argparse.Namespace, shares: SplitShares) -> TrainingFileRecipe:
    drawn = SamplingParams(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        n=options.n,
        seed=options.seed,
        log_probs=False,
    )
    return TrainingFileRecipe(
        shares=shares,
        solutions=drawn if options.solver else None,
        critiques=SamplingParams(
            max_tokens=options.critique_tokens,
            temperature=options.critique_temperature,
            n=options.critique_draws,
            seed=options.seed,
            log_probs=False,
        ),
        revisions=replace(drawn, temperature=0.0, n=1),
        balance=options.balance,
        val_size=options.val_size,
        right_share=options.right_share,
        seed=options.seed,
    )


def _sources(
    options: argparse.Namespace,
) -> tuple[dict[str, ChatSource], EngineOptions]:
    """The source of each role that has a model, checked, and how its engine is started."""
    from ctrl_megatron.generation.sources import EngineOptions, check_source

    engines = EngineOptions(
        engine=options.engine,
        dtype=options.dtype,
        max_model_len=options.max_model_len,
        threads=options.threads,
        tensor_parallel_size=options.tensor_parallel_size,
    )
    sources = {
        role: model_source(f"--{role}", model, getattr(options, f"{role}_url"))
        for role in _ROLES
        if (model := getattr(options, role))
    }
    for role, source in sources.items():
        check_source(f"--{role}", source, engines)
    return sources, engines


def _open_journal(
    options: argparse.Namespace, settings: Mapping[str, object]
) -> StageJournal | None:
    """The journal of ``--out``; None where an earlier call has finished everything."""
    folder = options.out / _JOURNAL
    begun = folder.is_dir()
    require_replaceable_files(options.out, FILES, _TOOL, overwrite=options.overwrite or begun)
    if options.overwrite:
        shutil.rmtree(folder, ignore_errors=True)
    for left in options.out.glob(f".{_TOOL}.*"):  # of a call that was killed while it wrote files
        shutil.rmtree(left)
    journal = StageJournal(folder, settings)
    done = not options.overwrite and begun and tool_files_unchanged(options.out, _TOOL)
    return None if done else journal


@contextmanager
def _bars() -> Iterator[Callable[[str, int, int], None]]:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, TimeRemainingColumn()) as bars:
        tasks = dict[str, TaskID]()

        def progress(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage.replace("_", " "))
            bars.update(tasks[stage], completed=done, total=total)

        yield progress


def _show(out: Path, table: Mapping[str, Mapping[str, int]]) -> None:
    shown = Table(title=str(out))
    for column in ("stage", "what", "number"):
        shown.add_column(column, justify="right" if column == "number" else "left")
    for stage, counts in table.items():
        for what, times in counts.items():
            shown.add_row(stage, what, str(times))
            stage = ""
    Console().print(shown)


if __name__ == "__main__":
    raise SystemExit(main())

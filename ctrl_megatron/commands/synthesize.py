"""Make training files for a critic: first solutions, their verdicts, critiques, what is kept.

``ctrl-synthesize --problems problems.jsonl --solver DIR --out runs/data`` lets a model solve the
problems (or takes ``--solutions``), judges the answers in the sandbox and has critiques written for
fine-tuning and its validation: by ``--critic`` from what execution says, or by templates. It writes
``sft_train.parquet`` and ``sft_val.parquet`` (critiques), ``train.parquet`` and ``val.parquet``
(attempts to criticise), ``solve.parquet`` (problems to solve), ``solutions.jsonl`` and
``synthesis.json`` (what was dropped). No problem stands in two of the three parts. A model is an HF
directory, or the name by which the server at ``--...-url`` knows it.

Whatever is finished is kept in the folder .synthesis of --out: after a kill at any moment the same
command goes on from there and ends in the same files.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import shutil
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ctrl_megatron.checkpoint.files import new_files, own_files_whole, require_own_files
from ctrl_megatron.commands.chat_flags import DTYPES, MOST_THREADS, service_faults
from ctrl_megatron.commands.start import CommandParser, command
from ctrl_megatron.config.flags import (
    count,
    given_file,
    given_path,
    new_path,
    number,
    temperature,
    whole,
)
from ctrl_megatron.data.json_lines import read_placed_lines
from ctrl_megatron.data.rows import row_of, write_rows
from ctrl_megatron.errors import UserError, users_input
from ctrl_megatron.generation.chat import Chat
from ctrl_megatron.preparation.journal import StageJournal
from ctrl_megatron.preparation.problem_files import own_record, read_problems
from ctrl_megatron.preparation.published import Dropped
from ctrl_megatron.preparation.selection import (
    Part,
    Shares,
    choose_examples,
    distinct_attempts,
    problems_in_turn,
)
from ctrl_megatron.preparation.stages import OpenChat, SynthesisStages
from ctrl_megatron.prompts import critique_messages, fenced, generation_messages, settle_answer
from ctrl_megatron.sandbox import EmbeddedSandbox, SandboxClient
from ctrl_megatron.sft.examples import write_examples
from ctrl_megatron.types import Attempt, Problem, SamplingParams

if TYPE_CHECKING:
    from ctrl_megatron.generation.sources import ChatSource, EngineOptions

_TOOL, _JOURNAL = "synthesize", ".synthesis"
_PARQUET = [f"{name}.parquet" for name in ("train", "val", "sft_train", "sft_val", "solve")]
_FILES = [*_PARQUET, "solutions.jsonl", "synthesis.json"]
_SFT_VAL_SIZE = 64
_RULES = 2
"""What else the kept parts depend on, order above all; raised with every change of it."""
_ROLES = ("solver", "critic", "reviser")


@command(_TOOL, stopped="what is finished is kept; the same command goes on from there")
def main(arguments: Sequence[str] | None = None) -> int:
    """Check, run what is left, write. Exit codes: 0 done, 2 wrong input, 130 stopped."""
    options = _parse(arguments)
    from ctrl_megatron.generation.sources import ChatSource, EngineOptions, check_source

    with users_input("--problems"):
        problems = read_problems(options.problems)
    known = {problem.id for problem in problems}
    hardest = 4 if options.max_difficulty is None else options.max_difficulty
    problems = [problem for problem in problems if problem.difficulty <= hardest]
    shares = Shares(val=options.val_share, sft=options.sft_share)
    _check_parts(problems, shares)
    given, dropped = (
        _read_solutions(options.solutions, problems, known)
        if options.solutions
        else ([], Dropped())
    )
    engines = EngineOptions(
        engine=options.engine,
        dtype=options.dtype,
        max_model_len=options.max_model_len,
        threads=options.threads,
    )
    sources = {
        role: ChatSource(model, getattr(options, f"{role}_url"))
        for role in _ROLES
        if (model := getattr(options, role))
    }
    for role, source in sources.items():
        check_source(f"--{role}", source, engines)
    opened = {role: _opener(source, engines) for role, source in sources.items()}
    journal_folder = options.out / _JOURNAL
    begun = journal_folder.is_dir()
    require_own_files(options.out, _FILES, _TOOL, overwrite=options.overwrite or begun)
    if options.overwrite:
        shutil.rmtree(journal_folder, ignore_errors=True)
    for left in options.out.glob(f".{_TOOL}.*"):  # of a kill while the files were written
        shutil.rmtree(left)
    journal = StageJournal(journal_folder, _settings(options, problems, given, sources))
    if not options.overwrite and begun and own_files_whole(options.out, _TOOL):
        print(f"{options.out}: everything is finished, nothing to do")
        return 0
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, TimeRemainingColumn()) as bars:
        tasks = {}

        def progress(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage.replace("_", " "))
            bars.update(tasks[stage], completed=done, total=total)

        stages = SynthesisStages(
            journal=journal,
            open_judge=_open_judge,
            solver=opened.get("solver"),
            critic=opened.get("critic"),
            reviser=opened.get("reviser"),
            seed=options.seed,
            progress=progress,
        )
        with service_faults(options.out):
            table = asyncio.run(_run(options, stages, problems, given, dropped, shares))
    _show(options.out, table)
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser(__doc__)
    parser.add_argument("--problems", type=given_path, default=Path("examples/problems"))
    parser.add_argument("--out", type=new_path, default=Path("runs/data"))
    parser.add_argument("--overwrite", action="store_true", help="begin anew, replace own files")
    parser.add_argument(
        "--solutions", type=given_file, help="a .jsonl of first solutions drawn before"
    )
    for role, does in zip(
        _ROLES,
        (
            "draws the first solutions",
            "writes critiques from hints; templates without it",
            "revises: critiques whose revision fails are left out",
        ),
        strict=True,
    ):
        parser.add_argument(f"--{role}", metavar="MODEL", help=does)
        parser.add_argument(f"--{role}-url", metavar="URL", default="")
    parser.add_argument("--engine", choices=["vllm", "sglang", "hf"])
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="of an engine")
    parser.add_argument("--max-model-len", type=count(), default=2048)
    parser.add_argument("--threads", type=whole(1, MOST_THREADS), help="CPU threads of an engine")
    parser.add_argument("--n", type=count(), default=2, help="solutions per problem")
    parser.add_argument("--temperature", type=temperature, default=0.7, help="of the solver")
    parser.add_argument("--max-tokens", type=count(), default=256, help="of a solution or revision")
    parser.add_argument(
        "--critique-draws", type=count(), default=2, help="the first good one is kept"
    )
    parser.add_argument("--critique-temperature", type=temperature, default=0.7)
    parser.add_argument("--critique-tokens", type=count(), default=256)
    parser.add_argument("--val-share", type=number(0, 1), default=0.2, help="of all problems")
    parser.add_argument("--sft-share", type=number(0, 1), default=0.5, help="of the other problems")
    parser.add_argument("--val-size", type=count(0), default=40, help="held-out attempts at most")
    parser.add_argument("--balance", action="store_true", help="as many right as wrong in SFT")
    parser.add_argument("--max-difficulty", type=int, help="hardest level used")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    if bool(options.solver) == bool(options.solutions):
        raise UserError("give either --solver or --solutions: where first solutions come from")
    for role in _ROLES:
        if getattr(options, f"{role}_url") and not getattr(options, role):
            raise UserError(f"--{role}-url needs --{role}, the model's name there")
    return options


def _check_parts(problems: Sequence[Problem], shares: Shares) -> None:
    parts = {shares.part_of(problem.id) for problem in problems}
    for part, wanted, what in (
        ("rl", shares.sft < 1, "reinforcement learning; lower --sft-share or --val-share"),
        ("sft", shares.sft > 0, "fine-tuning; raise --sft-share or lower --val-share"),
    ):
        if wanted and part not in parts:
            raise UserError(f"none of {len(problems)} problems falls to {what}, or add problems")


def _read_solutions(
    path: Path, problems: Sequence[Problem], known: Collection[str]
) -> tuple[list[Attempt], Dropped]:
    """Attempts at ``problems``; a solution of another one that is ``known`` is counted."""
    used, seen = {problem.id: problem for problem in problems}, dict[str, str]()
    attempts, dropped = [], Dropped()
    for place, entry in read_placed_lines(path):
        for key in ("id", "problem_id", "solution"):
            if not isinstance(entry.get(key), str):
                raise UserError(f"{place}: key {key!r} is missing or no text")
        if entry["id"] in seen:
            raise UserError(f"{place}: key 'id' repeats {entry['id']!r} of {seen[entry['id']]}")
        seen[entry["id"]] = place
        settled = settle_answer(entry["solution"])
        if entry["problem_id"] not in known:
            raise UserError(
                f"{place}: problem {entry['problem_id']!r} is not in --problems",
                remedy="draw the solutions anew with --solver",
            )
        if entry["problem_id"] not in used:
            dropped.add("solution of a harder problem", entry["id"])
        elif settled.kind == "unreadable":
            dropped.add("unreadable solution", entry["id"])
        else:
            if settled.kind == "normalised":
                dropped.add("(kept) fence put right", entry["id"])
            problem = used[entry["problem_id"]]
            attempts.append(Attempt(id=entry["id"], problem=problem, solution=settled.text))
    if not attempts:
        raise UserError(
            f"{path} has no readable solution of a problem in use", remedy="draw some with --solver"
        )
    return attempts, dropped


def _settings(
    options: argparse.Namespace,
    problems: Sequence[Problem],
    given: Sequence[Attempt],
    sources: Mapping[str, ChatSource],
) -> dict[str, object]:
    """All that the files depend on, by the flag that says it."""
    kept = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(options).items()
        if name not in ("out", "overwrite", "problems", "solutions", "threads")
    }
    texts = {
        "problems": json.dumps([own_record(problem) for problem in problems]),
        "solutions": json.dumps([(a.id, a.solution) for a in given]),
    }
    digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
    flags = {f"--{name.replace('_', '-')}": value for name, value in {**kept, **digests}.items()}
    weights = {f"weights of --{role}": source.weights() for role, source in sources.items()}
    return {**flags, **weights, "rules": _RULES}


def _opener(source: ChatSource, engines: EngineOptions) -> OpenChat:
    from ctrl_megatron.generation.sources import open_chats

    @asynccontextmanager
    async def opened() -> AsyncIterator[Chat]:
        with open_chats({"": source}, engines) as chats:
            try:
                yield chats[""]
            finally:
                await chats[""].close()

    return opened


@asynccontextmanager
async def _open_judge() -> AsyncIterator[SandboxClient]:
    with EmbeddedSandbox.start() as sandbox:
        async with SandboxClient(sandbox.endpoint) as client:
            yield client


async def _run(
    options: argparse.Namespace,
    stages: SynthesisStages,
    problems: Sequence[Problem],
    given: Sequence[Attempt],
    dropped: Dropped,
    shares: Shares,
) -> dict[str, dict[str, int]]:
    """All stages and the files; what was kept and dropped, by stage."""
    drawn = list(given)
    if options.solver:
        params = SamplingParams(
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            n=options.n,
            seed=options.seed,
        )
        for attempt, fate in await stages.solutions(problems, params):
            if fate in ("unreadable", "no room"):
                reason = f"{fate} solution" if fate == "unreadable" else "no room for a solution"
                dropped.add(reason, attempt.id)
                continue
            if fate == "normalised":
                dropped.add("(kept) fence put right", attempt.id)
            drawn.append(attempt)
    table = {"solutions": {"kept": len(drawn), **dropped.counts()}}
    attempts, again = distinct_attempts(drawn)
    written = _written(problems, shares)
    judged = await stages.verdicts([*attempts, *written])
    for attempt, verdict in judged:
        if attempt.id.endswith("/reference") and not verdict.accepted:
            again.add("reference that fails its own tests", attempt.id)
    bad = set(again.reasons.get("reference that fails its own tests", ()))
    table["attempts"] = {
        "solved": sum(v.accepted for _, v in judged[: len(attempts)]),
        "kept": len(judged) - len(bad),
        **again.counts(),
    }
    judged = [(a, v) for a, v in judged if a.id not in bad]
    names = {attempt.id for attempt in attempts}
    of = {
        part: [(a, v) for a, v in judged if shares.part_of(a.problem.id) == part]
        for part in get_args(Part)
    }
    # Of what is held out, only as much as validation shows: every problem before any again.
    of["val"] = problems_in_turn(of["val"], options.seed)
    own = {part: [a for a, _ in of[part] if a.id in names] for part in ("rl", "val")}
    told = of["sft"] + of["val"][:_SFT_VAL_SIZE]
    drafts = await stages.critiques(
        told,
        SamplingParams(
            max_tokens=options.critique_tokens,
            temperature=options.critique_temperature,
            n=options.critique_draws,
            seed=options.seed,
        ),
    )
    greedy = SamplingParams(max_tokens=options.max_tokens, temperature=0.0, seed=options.seed)
    drafts = await stages.revisions(drafts, greedy)
    parts = {"sft": [], "val": []}
    for draft in drafts:
        parts[shares.part_of(draft.attempt.problem.id)].append(draft)
    examples = {}
    for part, name in (("sft", "SFT critiques"), ("val", "SFT validation")):
        examples[part], less = choose_examples(
            parts[part], balance=options.balance, seed=options.seed
        )
        right = {d.attempt.id for d in parts[part] if d.right}
        kept = len(examples[part])
        table[name] = {
            "kept": kept,
            "of them right": sum(e.id in right for e in examples[part]),
            **less.counts(),
        }
        if part == "sft" and shares.sft > 0 and not kept:
            reasons = ", ".join(f"{count} {reason}" for reason, count in less.counts().items())
            raise UserError(f"no critique is left for fine-tuning ({reasons or 'no attempts'})")
    if not own["rl"] and not examples["sft"]:
        reasons = ", ".join(
            f"{times} {what}"
            for stage in ("solutions", "attempts")
            for what, times in table[stage].items()
            if what not in ("kept", "solved")
        )
        raise UserError(f"no row to train on is left ({reasons or 'no solutions'})")
    table["RL rows"] = {"kept": len(own["rl"]), "held out": len(own["val"][: options.val_size])}
    with new_files(options.out, _FILES, _TOOL, overwrite=True) as folder:
        rows = {
            part: [row_of(a, critique_messages(a.problem, a.solution)) for a in attempts]
            for part, attempts in own.items()
        }
        if rows["rl"]:
            write_rows(folder / "train.parquet", rows["rl"])
        if rows["val"] and options.val_size:
            write_rows(folder / "val.parquet", rows["val"][: options.val_size])
        solve = [p for p in problems if shares.part_of(p.id) == "rl"]
        if solve:
            write_rows(
                folder / "solve.parquet",
                [
                    row_of(Attempt(id=p.id, problem=p, solution=""), generation_messages(p))
                    for p in solve
                ],
            )
        for part, name in (("sft", "sft_train"), ("val", "sft_val")):
            if examples[part]:
                write_examples(folder / f"{name}.parquet", examples[part])
        lines = [
            json.dumps(
                {
                    "id": a.id,
                    "problem_id": a.problem.id,
                    "solution": a.solution,
                    "pass_rate": a.pass_rate,
                },
                ensure_ascii=False,
            )
            for a, _ in judged
            if a.id in names
        ]
        (folder / "solutions.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        (folder / "synthesis.json").write_text(json.dumps(table, indent=1) + "\n")
    return table


def _written(problems: Sequence[Problem], shares: Shares) -> list[Attempt]:
    """References and known wrong programs, as further attempts of fine-tuning."""
    return [
        Attempt(id=f"{problem.id}/{kind}", problem=problem, solution=fenced(code))
        for problem in problems
        if shares.part_of(problem.id) != "rl"
        for kind, code in [
            *([("reference", problem.reference)] if problem.reference.strip() else []),
            *((f"buggy{i}", code) for i, code in enumerate(problem.buggy)),
        ]
    ]


def _show(out: Path, table: dict[str, dict[str, int]]) -> None:
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

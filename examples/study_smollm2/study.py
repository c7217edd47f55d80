"""The study: what a critic of 135M parameters learns (docs/study.md).

``python examples/study_smollm2/study.py`` makes every missing piece, ``--piece grpo.seed1`` makes
one and the pieces that it needs (``--piece 'measure.*.SFT_PPO.*'`` several), ``--list`` lists all,
``--tables`` only rewrites tables and figures from the files beside the configuration. A killed
piece continues where it was.

Arms, test sets and proxies are records in ``plan.py``; ``tables.py`` makes the tables.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from ctrl_megatron.checkpoint.files import write_text_atomically
from ctrl_megatron.commands.start import CommandParser, command_entry_point, run_child
from ctrl_megatron.data.json_lines import read_json_lines_with_places
from ctrl_megatron.data.rows import read_rows
from ctrl_megatron.errors import UserError
from ctrl_megatron.eval.transcripts import Turn, transcript_part_file, turn_from_json
from ctrl_megatron.types import Problem
from examples.study_smollm2.plan import (
    ARMS,
    CONFIG,
    DATA,
    HOME,
    KEPT,
    MODEL,
    ORACLE,
    OTHER_FAMILY,
    PROXIES,
    REAL,
    ROUNDS,
    RUNS,
    SAMPLES,
    SEEDS,
    TASKS,
    TEACHER,
    TESTED,
    TESTS,
    UNSEEN_MUTANTS,
    Arm,
    Proxy,
    TestSet,
)
from examples.study_smollm2.tables import (
    KEPT_METRICS,
    ROUNDS_SETTING,
    TASK,
    curve_file,
    kept_file,
    public_file,
    setting_of,
    write_tables,
)

SOLUTIONS = Path("../shared/data/initial_solutions/initial_solutions.jsonl.gz")
HUMANEVALPACK = Path("../shared/data/humanevalpack/humanevalpack_python.jsonl")
_PYTHON = sys.executable
_WEIGHTS = "model.safetensors"
_TASK_ROWS = RUNS / "task_rows"


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One piece of the study."""

    name: str
    product: Path
    """The file that appears when the piece is finished."""
    needs: tuple[str, ...]
    work: Callable[[], None]
    given: tuple[Path, ...] = ()
    """Files of the user's that it reads and no piece makes."""


class _Pieces:
    """Collects pieces, each after the pieces that it needs."""

    def __init__(self) -> None:
        self.found: dict[str, Piece] = {}

    def add(
        self,
        name: str,
        product: Path,
        work: Callable[[], None],
        *needs: str,
        given: Sequence[Path] = (),
    ) -> str:
        """Add a piece and return its name."""
        self.found[name] = Piece(
            name=name,
            product=product,
            work=work,
            needs=tuple(dict.fromkeys(needs)),
            given=tuple(given),
        )
        return name


def pieces(solutions: Path = SOLUTIONS, humanevalpack: Path = HUMANEVALPACK) -> dict[str, Piece]:
    """All pieces by name, each after the pieces that it needs."""
    every = _Pieces()
    _add_inputs(every, solutions, humanevalpack)
    for test in TESTS:
        if not test.judged:
            product = test.folder / f"{test.name}.feedback.jsonl"
            data = _maker_of(product)
            work = lambda t=test, p=product: _feedback(t, p)  # noqa: E731
            every.add(f"feedback.{test.name}", product, work, data)
    for arm in ARMS.values():
        for seed in SEEDS:
            _add_run(every, arm, seed)
    for test in TESTS:
        for name in test.untrained:
            _add_measure(every, test, name, SEEDS[0], test.proxy)
        for proxy in test.others:
            _add_measure(every, test, ORACLE, SEEDS[0], proxy)
    for arm in ARMS.values():
        for seed in SEEDS:
            for test in arm.tests:
                _add_measure(every, test, arm.name, seed, test.proxy)
    for arm in ARMS.values():
        for seed in SEEDS:
            for proxy in arm.proxies:
                _add_measure(every, UNSEEN_MUTANTS, arm.name, seed, proxy)
            if arm.rounds:
                _add_rounds(every, arm, seed)
    return every.found


def _add_inputs(every: _Pieces, solutions: Path, humanevalpack: Path) -> None:
    model = [_PYTHON, "tools/prepare_smollm2.py", "--out", str(MODEL)]
    every.add("model.smollm2", MODEL / "prepared_from.json", lambda: _run(model))
    other = OTHER_FAMILY.path / "config.json"
    every.add(OTHER_FAMILY.piece, other, lambda: None, given=(other,))
    mutants = [_PYTHON, "tools/prepare_mutants.py", "--overwrite"]
    data = [*mutants, "--out", str(DATA), "--test-size", str(TESTED)]
    every.add("data", DATA / "bland.jsonl", lambda: _run(data))
    mixed = [*mutants, "--out", str(_TASK_ROWS), "--right-share", "0.5"]
    every.add("data.tasks", TASKS / "solving.parquet", lambda: _task_rows(mixed))
    faults = "examples/study_smollm2/prepare_real_faults.py"
    real = [_PYTHON, faults, "--out", str(REAL), "--overwrite"]
    real += ["--solutions", str(solutions), "--humanevalpack", str(humanevalpack)]
    real += ["--tokenizer", str(MODEL), "--test-size", str(TESTED)]
    given = (solutions, humanevalpack)
    every.add("data.real", REAL / "bland.jsonl", lambda: _run(real), "model.smollm2", given=given)
    rows, told = TEACHER / "sft.parquet", (DATA / "critic_sft.parquet", REAL / "critic_sft.parquet")
    every.add("data.teacher", rows, lambda: _teacher_rows(told, rows), "data", "data.real")
    learned = _sft("teacher", MODEL, SEEDS[0], (rows,), 36)
    learned += ["sft.max_length=768"]
    needs = "model.smollm2", "data.teacher"
    every.add("teacher", TEACHER / "hf" / _WEIGHTS, lambda: _run(learned), *needs)
    for proxy in (proxy for proxy in PROXIES if proxy.files):
        words = _sft(proxy.piece, MODEL, SEEDS[0], proxy.files, proxy.steps)
        needs = "model.smollm2", *map(_maker_of, proxy.files)
        every.add(proxy.piece, proxy.path / _WEIGHTS, lambda w=words: _run(w), *needs)


def _maker_of(file: Path) -> str:
    """The piece that makes a file of rows or critiques."""
    return {DATA: "data", TASKS: "data.tasks", REAL: "data.real"}[file.parent]


def _add_run(every: _Pieces, arm: Arm, seed: int) -> None:
    run = f"{arm.run}.seed{seed}"
    needs = ["model.smollm2", *map(_maker_of, arm.files)]
    needs += [f"{arm.start}.seed{seed}"] if arm.start else []
    if not arm.reinforced:
        words = _sft(run, _start(arm, seed), arm.seed_of(seed), arm.files, arm.steps)
    else:
        words = _rl(arm, seed)
        needs += [arm.proxy.piece, *(["teacher"] if arm.taught else [])]
    every.add(run, model_of(arm, seed) / _WEIGHTS, lambda: _run(words), *needs)
    if arm.reinforced:
        curve = curve_file(KEPT, arm.run, seed)
        every.add(f"curve.{run}", curve, lambda: _keep_curve(run, curve), run)


def _add_measure(every: _Pieces, test: TestSet, name: str, seed: int, proxy: Proxy) -> None:
    product = kept_file(KEPT, setting_of(test.name, proxy.name), name, seed)
    critic, needs = _critic(test, name, seed)
    work = lambda: _measure(test, name, critic, seed, proxy, product)  # noqa: E731
    every.add(_measured(product), product, work, *needs, proxy.piece)


def _add_rounds(every: _Pieces, arm: Arm, seed: int) -> None:
    product = kept_file(KEPT, ROUNDS_SETTING, arm.name, seed)
    test, turns = UNSEEN_MUTANTS, ("--turns", str(ROUNDS))
    critic, needs = _critic(test, arm.name, seed)
    work = lambda: _measure(test, arm.name, critic, seed, test.proxy, product, *turns)  # noqa: E731
    name = every.add(_measured(product), product, work, *needs, test.proxy.piece)
    public = public_file(KEPT, ROUNDS_SETTING, arm.name, seed)
    judge = lambda: _judge_public(test, product, public)  # noqa: E731
    every.add(name.replace("measure.", "public.", 1), public, judge, name)


def _measured(product: Path) -> str:
    return f"measure.{product.name.removesuffix('.jsonl.gz')}"


def _critic(test: TestSet, name: str, seed: int) -> tuple[Path, list[str]]:
    """The critic of an arm (a model's directory or a file of critiques), and the pieces that it
    and the rows need.
    """
    data = _maker_of(test.folder / "any")
    if name in ARMS:
        return model_of(ARMS[name], seed), [data, f"{ARMS[name].run}.seed{seed}"]
    feedback = test.folder / f"{test.name}.feedback.jsonl"
    critics = {
        "bland": (test.folder / "bland.jsonl", data),
        "oracle": (test.folder / "oracle.jsonl", data),
        "zero-shot": (MODEL, "model.smollm2"),
        "self-critique": (test.proxy.path, test.proxy.piece),
        "execution feedback": (feedback, f"feedback.{test.name}"),
    }
    critic, needed = critics[name]
    return critic, [data, needed]


def model_of(arm: Arm, seed: int) -> Path:
    """The directory of the weights that a run exports."""
    last = f"hf_exports/global_step_{arm.steps}" if arm.reinforced else "hf"
    return RUNS / f"{arm.run}.seed{seed}" / last


def _start(arm: Arm, seed: int) -> Path:
    """The directory of the weights that a run starts from."""
    if arm.start is None:
        return MODEL
    (before,) = (a for a in ARMS.values() if a.run == arm.start)
    return model_of(before, seed)


def _common(run: str, model: Path, seed: int) -> list[str]:
    return [
        f"trainer.default_local_dir={RUNS}",
        f"trainer.experiment_name={run}",
        f"trainer.seed={seed}",
        f"actor_rollout_ref.model.path={model}",
        f"actor_rollout_ref.model.tokenizer_path={MODEL}",
    ]


def _sft(run: str, model: Path, seed: int, files: Sequence[Path], steps: int) -> list[str]:
    return [
        *(_PYTHON, "tools/train_sft.py", "--nproc-per-node", "2", "--config", str(CONFIG)),
        *_common(run, model, seed),
        f"sft.train_files={_listed(files)}",
        f"sft.total_training_steps={steps}",
    ]


def _rl(arm: Arm, seed: int) -> list[str]:
    return [
        *(_PYTHON, "tools/train_rl.py", "--nproc-per-node", "2", "--config", str(CONFIG)),
        *_common(f"{arm.run}.seed{seed}", _start(arm, seed), seed),
        *arm.proxy.settings,
        f"actor_rollout_ref.rollout.seed={seed}",
        *arm.settings,
        *(f"data.train_files={_listed(arm.files)}", "data.val_files=[]"),
        f"trainer.total_training_steps={arm.steps}",
        f"trainer.save_hf_freq={arm.steps}",
    ]


def _listed(files: Sequence[Path]) -> str:
    return str(files[0]) if len(files) == 1 else f"[{','.join(map(str, files))}]"


# The work of pieces


def _run(words: Sequence[str]) -> None:
    code = run_child(words, ROOT)
    if code:
        raise UserError(
            f"{' '.join(words[1:])} ended with exit code {code}",
            remedy="see above; the same command goes on",
        )


def _task_rows(mutants: Sequence[str]) -> None:
    """Write rows of judging and solving, from mutants and as many right programs."""
    _run(mutants)
    for task in ("judging", "solving"):
        words = [_PYTHON, "tools/make_task_rows.py", "--rows", str(_TASK_ROWS / "rl.parquet")]
        _run([*words, "--task", task, "--out", str(TASKS / f"{task}.parquet")])


def _teacher_rows(told: Sequence[Path], product: Path) -> None:
    """Write the critiques of the fine-tuning files ``told`` behind prompts with the lines that
    repair the program."""
    from ctrl_megatron.prompts import hint_messages
    from ctrl_megatron.sft.examples import SftExample, read_examples, write_examples
    from ctrl_megatron.steps.teaching import hint_of_row

    said = {example.id: example.response for example in read_examples(list(map(str, told)))}
    rows = read_rows([str(DATA / "rl.parquet"), str(REAL / "rl_all_mutants.parquet")])
    examples = [
        SftExample(
            id=row.id,
            prompt=tuple(hint_messages(row.attempt().problem, row.solution, hint)),
            response=said[row.id],
        )
        for row in rows
        if row.id in said and (hint := hint_of_row("diff", row, None))
    ]
    product.parent.mkdir(parents=True, exist_ok=True)
    write_examples(product, examples)
    print(f"{product}: {len(examples)} examples")


def _feedback(test: TestSet, product: Path) -> None:
    """Write the critiques of templates, from execution feedback, for every first solution."""
    from ctrl_megatron.generation.solutions import judge_attempts
    from ctrl_megatron.preparation.synthesis import synthesise_critique
    from ctrl_megatron.sandbox import EmbeddedSandbox, SandboxClient

    rows = read_rows([str(test.folder / f"{test.name}.parquet")])
    attempts = [row.attempt() for row in rows]

    async def judge(endpoint: str) -> list[str]:
        async with SandboxClient(endpoint) as client:
            judged = await judge_attempts(client, attempts)
        said = [(a.id, synthesise_critique(a, verdict, n)) for n, (a, verdict) in enumerate(judged)]
        return [json.dumps({"id": name, "critique": text}) + "\n" for name, text in said]

    with EmbeddedSandbox.start() as sandbox:
        write_text_atomically(product, "".join(asyncio.run(judge(sandbox.endpoint))))


def _measure(
    test: TestSet, arm: str, critic: Path, seed: int, proxy: Proxy, product: Path, *turns: str
) -> None:
    """Evaluate one arm and keep the transcript, compressed reproducibly."""
    out = RUNS / product.name.removesuffix(".jsonl.gz")
    samples = ROUNDS if turns else SAMPLES
    drawn = ["--samples", str(samples), "--temperature", "1.0", *turns]
    _run(
        [
            *(_PYTHON, "-m", "ctrl_megatron.commands.evaluate"),
            *("--config", str(CONFIG), f"{arm}={critic}"),
            *("--out", str(out), "--seeds", str(seed)),
            *([] if critic.suffix == ".jsonl" else drawn),
            "--set",
            f"data.train_files={DATA / 'rl.parquet'}",
            f"data.val_files={test.folder / test.name}.parquet",
            f"actor_rollout_ref.model.path={MODEL}",
            *proxy.settings,
        ]
    )
    _keep(product, transcript_part_file(out, arm, seed).read_bytes())


def _keep(product: Path, content: bytes) -> None:
    product.parent.mkdir(parents=True, exist_ok=True)
    part = product.with_name(product.name + ".part")
    part.write_bytes(gzip.compress(content, mtime=0))
    part.rename(product)


def _judge_public(test: TestSet, transcript: Path, product: Path) -> None:
    """Keep which revisions of the first round pass the public test."""
    from ctrl_megatron.generation.solutions import judge_attempts
    from ctrl_megatron.sandbox import EmbeddedSandbox, SandboxClient

    turns = [
        turn_from_json(record, place) for place, record in read_json_lines_with_places(transcript)
    ]
    first = [turn for turn in turns if turn.turn == 1]
    rows = read_rows([str(test.folder / f"{test.name}.parquet")])
    attempts = {row.id: row.attempt() for row in rows}

    async def judge(endpoint: str) -> list[bool]:
        asked = []
        for turn in first:
            attempt = attempts[turn.attempt]
            public = with_first_test(attempt.problem)
            asked.append(replace(attempt, problem=public, solution=turn.revision))
        async with SandboxClient(endpoint) as client:
            return [verdict.accepted for _, verdict in await judge_attempts(client, asked)]

    with EmbeddedSandbox.start() as sandbox:
        passed = asyncio.run(judge(sandbox.endpoint))
    _keep(product, "".join(map(public_line, first, passed)).encode())


def with_first_test(problem: Problem) -> Problem:
    """The problem with its first test only."""
    tests = problem.selected_uts
    first = json.dumps(json.loads(tests)[:1]) if isinstance(tests, str) else tests[:1]
    return replace(problem, selected_uts=first)


def public_line(turn: Turn, passed: bool) -> str:
    """The line that keeps whether a revision passes the public test."""
    place = {"critic": turn.critic, "attempt": turn.attempt, "seed": turn.seed}
    return json.dumps({**place, "sample": turn.sample, "passed": passed}) + "\n"


def _keep_curve(run: str, product: Path) -> None:
    """Write ``KEPT_METRICS`` and those of tasks of every step that has been made."""
    from ctrl_megatron.metrics.report.run_files import read_run_files

    series = read_run_files(RUNS / run).series or {}
    steps: dict[int, dict[str, float]] = {}
    for name, points in series.items():
        if name in KEPT_METRICS or name.startswith(TASK):
            for step, value in points:
                steps.setdefault(step, {"step": step})[name] = value
    lines = [json.dumps(steps[step]) + "\n" for step in sorted(steps)]
    write_text_atomically(product, "".join(lines))


# The command


def in_order(wanted: str, known: dict[str, Piece]) -> Iterator[Piece]:
    """The pieces that a piece needs, then itself; pieces may repeat."""
    for need in known[wanted].needs:
        yield from in_order(need, known)
    yield known[wanted]


def lacking(pieces: Iterable[Piece]) -> list[Path]:
    """The user's files that unfinished pieces read and that are not there."""
    given = (file for p in pieces if not p.product.exists() for file in p.given)
    return list(dict.fromkeys(file for file in given if not file.exists()))


@command_entry_point("study", stopped="the same command goes on")
def main(arguments: Sequence[str] | None = None) -> int:
    """Make the missing pieces. Exit codes: 0 done, 2 wrong input or a failed piece, 130."""
    parser = CommandParser(__doc__)
    parser.add_argument("--piece", help="make this one and what it needs; * matches any text")
    parser.add_argument("--list", action="store_true", help="say which pieces are there")
    parser.add_argument("--tables", action="store_true", help="only tables and plots, of what is")
    parser.add_argument(
        "--solutions", type=Path, default=SOLUTIONS, help="programs that models wrote, with tests"
    )
    parser.add_argument(
        "--humanevalpack", type=Path, default=HUMANEVALPACK, help="HumanEvalPack's Python file"
    )
    options = parser.parse_args(arguments)
    known = pieces(options.solutions, options.humanevalpack)
    named = [name for name in known if options.piece and fnmatchcase(name, options.piece)]
    if options.piece is not None and not named:
        raise UserError(f"--piece: there is no {options.piece!r}", remedy="see --list")
    if options.list:
        for piece in known.values():
            print(f"{'there' if piece.product.exists() else 'open':<6} {piece.name}")
        return 0
    if not options.tables:
        kept = [name for name in known if name.startswith(("measure.", "curve.", "public."))]
        for wanted in named or kept:
            _make(list(in_order(wanted, known)), required=bool(named))
    if options.piece is None:
        write_tables(KEPT, HOME)
        print(f"wrote {HOME / 'tables.md'}")
    return 0


def _make(order: Sequence[Piece], *, required: bool) -> None:
    """Make the missing ones of ``order``. Where a file of the user's is not there, the last piece
    is left out, or UserError is raised if it is ``required``.
    """
    wanted = order[-1]
    if wanted.product.exists():
        return
    if missing := lacking(order):
        files = ", ".join(map(str, missing))
        if required:
            raise UserError(
                f"{wanted.name} reads {files}, which is not there",
                remedy="docs/study.md says where it comes from; --solutions and --humanevalpack "
                "name other places",
            )
        print(f"study: {wanted.name} is left out: {files} is not there", flush=True)
        return
    for piece in order:
        if not piece.product.exists():
            print(f"study: {piece.name}", flush=True)
            piece.work()


if __name__ == "__main__":
    raise SystemExit(main())

"""Generate first solutions of problems, and revise them in turns with a critic.

``ctrl-generate --problems FILE --out DIR --generator MODEL --critic MODEL --widths 1 5 1 1``

A model is an HF directory or, with --generator-url or --critic-url, the model's name on a server
with OpenAI's protocol (OPENAI_API_KEY is its key). --out keeps every finished part, and the same
command continues from it. At the end it contains nodes.parquet, best.parquet and summary.json.
Flags may be in YAML files, such as examples/generation/critic.yaml (--config FILE).
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ctrl_megatron.checkpoint.files import write_text_atomically
from ctrl_megatron.commands.chat_flags import (
    add_chat_flags,
    chat_sources,
    convert_service_faults,
    open_flagged_sandbox,
)
from ctrl_megatron.commands.start import CommandParser, command_entry_point
from ctrl_megatron.config import parse_yaml
from ctrl_megatron.config.flags import (
    count_flag,
    existing_file,
    existing_path,
    float_flag,
    output_path,
    temperature,
)
from ctrl_megatron.config.secrets import hide_credentials_in_flags
from ctrl_megatron.data.rows import read_rows, require_columns
from ctrl_megatron.errors import STOPPED, UserError, convert_input_errors, read_text
from ctrl_megatron.preparation.problem_files import read_problems
from ctrl_megatron.types import Problem, SamplingParams

if TYPE_CHECKING:
    from ctrl_megatron.generation.search_tree import SearchTree, TreeOptions
    from ctrl_megatron.generation.sources import ChatSource, EngineOptions

_SETTINGS, _LOCK = "settings.json", "generate.lock"
_TEXTS = {"solution": (0.7, 1024), "critique": (0.7, 768), "revision": (0.0, 1024)}
"""Kind of text -> temperature and most tokens, as in the CTRL paper."""


@command_entry_point("generate")
def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, check, grow. Exit codes: 0 done, 2 wrong input or a service failed, 130 stopped."""
    given = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args([*flags_of_files(given), *given])
    with convert_input_errors("--problems"):
        problems = _read(options.problems)[: options.limit]
    tree = _tree_options(options)
    sources, engines = chat_sources(options, required="generator")
    settings = _settings(options, problems, sources)
    with _directory(options.out, settings):
        try:
            _grow(options, problems, tree, sources, engines)
        except KeyboardInterrupt:
            print(f"generate: stopped; {options.out} keeps what is finished", file=sys.stderr)
            return STOPPED
    return 0


def _parser() -> CommandParser:
    parser = CommandParser(__doc__)
    parser.add_argument(
        "--config",
        action="append",
        type=existing_file,
        metavar="FILE",
        help="YAML with flags by name, which those of the command precede; may be repeated",
    )
    parser.add_argument(
        "--problems",
        required=True,
        type=existing_path,
        help=".jsonl, a folder of it, or rows (.parquet)",
    )
    parser.add_argument("--limit", type=count_flag(), help="use only the first problems")
    parser.add_argument("--out", required=True, type=output_path, help="directory of the tree")
    add_chat_flags(parser, required="generator")
    parser.add_argument(
        "--widths",
        type=count_flag(),
        nargs="+",
        default=[1, 5, 1, 1],
        metavar="W",
        help="1, first solutions per problem, then revisions per solution for every turn",
    )
    parser.add_argument(
        "--critiques",
        type=count_flag(),
        default=1,
        help="critiques per solution; the majority decides",
    )
    parser.add_argument(
        "--stop-when-correct",
        action="store_true",
        help="do not revise a solution that is judged correct",
    )
    parser.add_argument(
        "--best-of-n", action="store_true", help="let the critic choose a solution at the end"
    )
    for name, (default, max_tokens) in _TEXTS.items():
        flag = "--" if name == "solution" else f"--{name}-"
        about = {"dest": f"{name}_temperature", "type": temperature, "default": default}
        parser.add_argument(flag + "temperature", **about, help=f"of a {name}")
        about = {"dest": f"{name}_max_tokens", "type": count_flag(), "default": max_tokens}
        parser.add_argument(flag + "max-tokens", **about, help=f"of a {name}")
    parser.add_argument("--top-p", type=float_flag(above=0, most=1), default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    return parser


def flags_of_files(arguments: Sequence[str]) -> list[str]:
    """The flags that the files of ``--config`` in ``arguments`` stand for: a name with its value, a
    list with its values, a true alone; false and null are left out. UserError for a file that is no
    mapping of names to such values.
    """
    words = list[str]()
    for file in _files_of(arguments):
        tree, places = parse_yaml(read_text(file), str(file))
        if not isinstance(tree, dict):
            raise UserError(
                "must hold flags with their values", file=file, remedy="write NAME: VALUE"
            )
        for name, value in tree.items():
            if isinstance(value, dict):
                raise UserError(
                    f"{name} is a group of keys, not a value", file=places[str(name)].text
                )
            if value is not None and value is not False:
                values = value if isinstance(value, list) else [] if value is True else [value]
                words += [f"--{str(name).replace('_', '-')}", *map(str, values)]
    return words


def _files_of(arguments: Sequence[str]) -> Iterator[Path]:
    """The files of ``--config``, which may be shortened, that exist; the parser names others."""
    for place, word in enumerate(arguments):
        flag, equals, text = word.partition("=")
        if len(flag) > len("--c") and "--config".startswith(flag):
            value = text if equals else next(iter(arguments[place + 1 :]), "")
            if os.path.isfile(value):
                yield Path(value)


def _read(path: Path) -> list[Problem]:
    """The problems of problem files, or the distinct problems of rows."""
    if path.suffix != ".parquet":
        return read_problems(path)
    problems: dict[str, Problem] = {}
    for row in read_rows(path, prompt_key=None):
        require_columns([row], ("problem", "prompter_type", "selected_uts"), "a tree")
        problems.setdefault(row.problem_id, row.attempt().problem)
    return list(problems.values())


def _tree_options(options: argparse.Namespace) -> TreeOptions:
    from ctrl_megatron.generation.search_tree import TreeOptions

    drawn = {}
    for name in _TEXTS:
        heat = getattr(options, f"{name}_temperature")
        limit = getattr(options, f"{name}_max_tokens")
        if limit >= options.max_model_len:
            raise UserError(
                f"{limit} tokens of a {name} leave no room for its prompt in --max-model-len="
                f"{options.max_model_len}"
            )
        drawn[name] = SamplingParams(
            max_tokens=limit, temperature=heat, top_p=options.top_p, log_probs=False
        )
    return TreeOptions(
        widths=tuple(options.widths),
        critiques=options.critiques,
        stop_when_correct=options.stop_when_correct,
        seed=options.seed,
        **drawn,
    )


def _settings(
    options: argparse.Namespace, problems: Sequence[Problem], sources: Mapping[str, ChatSource]
) -> dict[str, Any]:
    """Everything that the saved parts depend on, except the widths, which their names contain."""
    from ctrl_megatron.generation.search_tree import problem_fingerprint
    from ctrl_megatron.rollout.engine import default_engine

    names = ("generator", "generator_url", "critic", "critic_url", "critiques", "top_p", "seed")
    names += ("stop_when_correct", "max_model_len")
    names += tuple(f"{name}_{what}" for name in _TEXTS for what in ("temperature", "max_tokens"))
    judged = {"judged": options.sandbox != "none", "problems": problem_fingerprint(problems)}
    own: dict[str, Any] = {
        f"{role}_weights": source.weights_fingerprint()
        for role, source in sources.items()
        if not source.url
    }
    if own:
        own |= {"engine": options.engine or default_engine(), "dtype": options.dtype}
    return (
        hide_credentials_in_flags({name: getattr(options, name) for name in names}) | judged | own
    )


def _read_settings(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_bytes())
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise UserError(
            f"--out: {file} was not written by ctrl-generate", remedy="name another directory"
        )
    return found


@contextmanager
def _directory(out: Path, settings: Mapping[str, Any]) -> Iterator[None]:
    """Lock ``out`` for this process. Raises UserError if it is in use or has other content."""
    file = out / _SETTINGS
    if os.path.lexists(out) and not out.is_dir():
        raise UserError(f"--out: {out} is there and is no directory")
    if not file.exists() and out.is_dir() and any(p.name != _LOCK for p in out.iterdir()):
        raise UserError(f"--out: {out} is not empty", remedy="name a new or empty directory")
    out.mkdir(parents=True, exist_ok=True)
    with (out / _LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(f"--out: {out} is in use by another ctrl-generate") from error
        if file.exists():
            before = _read_settings(file)
            names = dict.fromkeys((*before, *settings))
            different = [
                f"{name}: {before.get(name)}, now {settings.get(name)}"
                for name in names
                if before.get(name) != settings.get(name)
            ]
            if different:
                raise UserError(
                    f"--out: {out} holds a tree that was made with other settings "
                    f"({'; '.join(different)})",
                    remedy="name another directory",
                )
        else:
            write_text_atomically(file, json.dumps(settings, indent=1) + "\n")
        yield


def _grow(
    options: argparse.Namespace,
    problems: Sequence[Problem],
    tree_options: TreeOptions,
    sources: Mapping[str, ChatSource],
    engines: EngineOptions,
) -> None:
    from ctrl_megatron.generation.search_tree import SearchTree
    from ctrl_megatron.generation.sources import open_chats
    from ctrl_megatron.sandbox import SandboxClient

    columns = (TextColumn("{task.description:16}"), BarColumn(), MofNCompleteColumn())
    bars = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True))

    with (
        open_flagged_sandbox(options.sandbox) as judge,
        open_chats(sources, engines) as chats,
        bars,
    ):

        async def run() -> None:
            tree = SearchTree(
                options.out, problems, tree_options, **chats, judge=judge, progress=bars
            )
            try:
                await _finish(options, tree)
            finally:
                for chat in chats.values():
                    await chat.close()
                if isinstance(judge, SandboxClient):
                    await judge.close()

        with convert_service_faults(options.out):
            asyncio.run(run())


async def _finish(options: argparse.Namespace, tree: SearchTree) -> None:
    """Grow the tree, choose solutions, write the files and print the table."""
    from ctrl_megatron.generation.search_nodes import (
        SearchNode,
        best_leaves,
        layer_statistics,
        leaves_of,
        sum_if_known,
        write_records,
    )

    nodes = await tree.grow()
    write_records(options.out / "nodes.parquet", nodes, SearchNode)
    summary: dict[str, Any] = {
        "problems": sum(node.node_type == "root" for node in nodes),
        "nodes": len(nodes),
        "turns": layer_statistics(nodes, options.widths),
    }
    if options.best_of_n:
        leaves = leaves_of(nodes)
        scores = await tree.score_leaves(leaves)
        chosen = best_leaves(leaves, scores)
        write_records(options.out / "best.parquet", chosen, SearchNode)
        known = [leaf.success for leaf in chosen if leaf.success is not None]
        summary["best_of_n"] = {
            "solved": sum(known) / len(chosen) if len(known) == len(chosen) else None,
            "completion_tokens": sum_if_known(s.completion_tokens for s in scores.values()),
            "prompt_tokens": sum_if_known(s.prompt_tokens for s in scores.values()),
        }
    summary["sandbox_seconds"] = tree.sandbox_seconds
    write_text_atomically(options.out / "summary.json", json.dumps(summary, indent=1) + "\n")
    _show(summary["turns"], summary.get("best_of_n", {}))
    print(f"{options.out}/nodes.parquet: {len(nodes)} nodes of {summary['problems']} problems")


def _show(turns: Sequence[Mapping[str, Any]], best: Mapping[str, Any]) -> None:
    names = [name for name in turns[0] if name != "layer"]
    # Narrow, so that every figure is visible in 80 columns.
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    table.add_column(no_wrap=True)
    for name in names:
        table.add_column(name.replace("_", " "), justify="right")
    for row in (*turns, *([{"layer": "best of n", **best}] if best else [])):
        values = (row.get(name) for name in names)
        shown = (
            "" if v is None else f"{v:.3f}" if isinstance(v, float) else str(v) for v in values
        )
        table.add_row(row["layer"], *shown)
    Console().print(table)


if __name__ == "__main__":
    raise SystemExit(main())

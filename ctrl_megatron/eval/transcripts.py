"""What an evaluation keeps of every critique and revision, and the files that hold it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import count
from pathlib import Path
from typing import Any

from ctrl_megatron.checkpoint.files import write_whole
from ctrl_megatron.errors import UserError, read_json
from ctrl_megatron.eval.pairwise import JudgedPair
from ctrl_megatron.metrics.json_lines import cut_line, read_json_lines
from ctrl_megatron.types import Verdict

SETTINGS_FILE, TURNS_FOLDER, PAIRS_FOLDER = "evaluation.json", "transcripts", "pairs"
_OUTDATED = "outdated"
_TOOL = "ctrl-evaluate"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainPlan:
    """What is drawn for every first solution and seed."""

    samples: int = 1
    """Chains."""
    turns: int = 1
    """Critiques of a chain, each followed by a revision."""
    temperature: float = 0.0
    """Of critiques; 0 is greedy. Revisions are always greedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramResult:
    """What is kept of a program's verdict."""

    pass_rate: float
    """Share of tests passed, in [0, 1]."""
    accepted: bool
    """Every test passed."""
    timed_out: bool
    """A test ran into its time limit."""

    @staticmethod
    def of(verdict: Verdict | None) -> ProgramResult | None:
        """None where the judge failed."""
        if verdict is None:
            return None
        return ProgramResult(
            pass_rate=verdict.pass_rate, accepted=verdict.accepted, timed_out=verdict.timed_out
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One critique and the revision that followed it, in a chain that began with a first solution.

    Turn t criticises what turn t-1 revised.
    """

    critic: str
    """Name of the critic, or of whatever wrote the critique."""
    seed: int
    """Of the draw of the whole chain."""
    problem_id: str
    attempt: str
    """Id of the row, which is one first solution of the problem."""
    difficulty: int
    sample: int
    """Number of the chain among those of the same attempt and seed, from 0."""
    turn: int
    """From 1."""
    solution: str
    """The answer that is criticised."""
    critique: str | None
    """None where the request would have been too long: ``solution`` then stays as it is."""
    judgment: bool | None
    """What the critique says of the solution; None where it does not say."""
    revision: str
    before: ProgramResult | None
    """Of ``solution``; None where the judge failed."""
    after: ProgramResult | None
    """Of ``revision``; None where the judge failed."""
    critique_tokens: int = 0
    revision_tokens: int = 0


def turn_from(record: Mapping[str, Any], place: str) -> Turn:
    """A line of a transcript. UserError naming ``place`` and what is wrong."""
    names = {f.name for f in fields(Turn)}
    if record.keys() != names:
        wrong = ", ".join(sorted(names ^ record.keys()))
        raise UserError(f"{place}: not the fields of a transcript: {wrong}")
    programs = {}
    for name in ("before", "after"):
        try:
            programs[name] = None if record[name] is None else ProgramResult(**record[name])
        except TypeError as error:
            raise UserError(f"{place}: field {name!r}: {error}") from None
    return Turn(**{**record, **programs})


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A directory that ``ctrl-evaluate`` wrote, read."""

    name: str
    """Of the directory."""
    settings: dict[str, Any]
    """``{"settings": what all critics share, "critics": {name: {"path", "weights"}}}``."""
    turns: list[Turn]
    pairs: list[JudgedPair]
    left_out: tuple[str, ...] = ()
    """What of it is missing or cut off, a sentence each."""
    written: float = 0.0
    """When its newest transcript was written, in seconds since the epoch."""


def is_evaluation(folder: Path) -> bool:
    """Whether ``ctrl-evaluate`` wrote the directory."""
    return (folder / SETTINGS_FILE).is_file()


def read_evaluation(folder: Path) -> Evaluation:
    """Settings and transcripts. UserError for files that are none, naming file and line."""
    settings = read_settings(folder)
    turns: list[Turn] = []
    for path in _all_parts(folder, TURNS_FOLDER):
        for number, record in enumerate(read_json_lines(path), start=1):
            turns.append(turn_from(record, f"{path} line {number}"))
    pairs: list[JudgedPair] = []
    for path in _all_parts(folder, PAIRS_FOLDER):
        for number, record in enumerate(read_json_lines(path), start=1):
            pairs.append(JudgedPair.read(record, f"{path} line {number}"))
    if not turns:
        raise UserError(f"{folder} holds no transcript yet; run ctrl-evaluate to its end")
    paths = [path for kind in (TURNS_FOLDER, PAIRS_FOLDER) for path in _all_parts(folder, kind)]
    order = {name: place for place, name in enumerate(settings["critics"])}
    turns.sort(key=lambda t: order.get(t.critic, len(order)))
    pairs.sort(key=lambda p: order.get(p.critic, len(order)))
    return Evaluation(
        name=folder.resolve().name,
        settings=settings,
        turns=turns,
        pairs=pairs,
        left_out=tuple(_left_out(settings, turns, paths)),
        written=max(path.stat().st_mtime for path in paths),
    )


def _all_parts(folder: Path, kind: str) -> list[Path]:
    return sorted((folder / kind).glob("*.jsonl"))


def _left_out(
    settings: Mapping[str, Any], turns: Sequence[Turn], paths: Sequence[Path]
) -> Iterator[str]:
    for path in paths:
        if number := cut_line(path):
            yield f"{path.parent.name}/{path.name}: line {number} is cut off"
    chains = {(t.critic, t.seed, t.attempt, t.sample) for t in turns}
    seeds = sorted({seed for _, seed, *_ in chains})
    attempts = {attempt for _, _, attempt, _ in chains}
    for critic in settings["critics"]:
        drawn = Counter(seed for name, seed, *_ in chains if name == critic)
        if not drawn:
            yield f"{critic} has no transcript"
            continue
        most = max(drawn.values())
        for seed in seeds:
            if drawn[seed] == 0:
                yield f"{critic} has no transcript of seed {seed}"
            elif drawn[seed] < most:
                yield f"{critic} has {drawn[seed]} chains of seed {seed}, {most} of others"
        missing = len(attempts - {attempt for name, _, attempt, _ in chains if name == critic})
        if missing:
            yield f"{critic} has no chain of {missing} of {len(attempts)} first solutions"


def read_settings(folder: Path) -> dict[str, Any]:
    """The content of ``evaluation.json``. UserError where it is not this tool's."""
    path = folder / SETTINGS_FILE
    try:
        found = read_json(path)
        own = found["tool"] == _TOOL and {"settings", "critics"} <= found.keys()
    except (OSError, ValueError, KeyError, TypeError):
        own = False
    if not own:
        raise UserError(f"{path} is not that of an evaluation", remedy="name another directory")
    return found


def part_file(folder: Path, critic: str, seed: int, kind: str = TURNS_FOLDER) -> Path:
    """Where the transcript of a critic's chains of one seed stands."""
    plain = re.sub(r"[^\w.-]+", "_", critic).strip("_.")
    return folder / kind / f"{plain}.seed{seed}.jsonl"


def write_part(path: Path, records: Iterable[Turn | JudgedPair]) -> None:
    """The file of one critic and seed, whole or not at all."""
    write_whole(path, "".join(json.dumps(asdict(record)) + "\n" for record in records))


def open_evaluation(
    folder: Path,
    settings: Mapping[str, Any],
    critics: Mapping[str, Mapping[str, Any]],
    *,
    overwrite: bool,
) -> list[str]:
    """Check that an evaluation may write ``folder``; returns the critics to be drawn anew because
    their weights have changed. Writes nothing.

    ``folder`` must be new, empty or an evaluation with the same ``settings``, to which critics may
    be added; with ``overwrite`` any evaluation. UserError otherwise, and where two critics' files
    would have one name. What stands under ``path`` in settings and critics is for the reader: a
    file or directory is known by its content, however it is spelled.
    """
    _check_names(folder, critics)
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return []
    if not folder.is_dir() or not is_evaluation(folder):
        raise UserError(
            f"--out: {folder} is there and holds no evaluation", remedy="name a new directory"
        )
    found = read_settings(folder)
    if overwrite:
        return []
    _check_names(folder, {**found["critics"], **critics})
    before, now = found["settings"], dict(settings)
    changed = [
        key
        for key in {**before, **now}
        if _without_paths(before.get(key)) != _without_paths(now.get(key))
    ]
    if changed:
        told = (f"{key}: {before.get(key)} -> {now.get(key)}" for key in changed)
        raise UserError(
            f"--out: {folder} holds an evaluation with other settings ({'; '.join(told)})",
            remedy="name another directory, or replace it with --overwrite",
        )
    known = {name: _without_paths(critic) for name, critic in found["critics"].items()}
    return [
        name for name in critics if name in known and known[name] != _without_paths(critics[name])
    ]


def _check_names(folder: Path, critics: Iterable[str]) -> None:
    of_file: dict[Path, str] = {}
    for critic in critics:
        other = of_file.setdefault(part_file(folder, critic, 0), critic)
        if other != critic:
            raise UserError(
                f"the critics {other!r} and {critic!r} would have one file: their names differ in "
                "signs only",
                remedy="name one of them differently",
            )


def _without_paths(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_paths(one) for key, one in value.items() if key != "path"}
    return [_without_paths(one) for one in value] if isinstance(value, list) else value


def begin_evaluation(
    folder: Path,
    settings: Mapping[str, Any],
    critics: Mapping[str, Mapping[str, Any]],
    *,
    anew: Sequence[str],
    overwrite: bool,
) -> Path | None:
    """Write the settings. The transcripts that are to be drawn ``anew`` are moved to a new folder,
    which is returned and is an evaluation too; with ``overwrite`` all transcripts are removed.
    """
    kept: dict[str, Any] = {}
    aside = None
    if is_evaluation(folder):
        old = read_settings(folder)
        kept = {} if overwrite else old["critics"]
        found = [
            path
            for critic in (old["critics"] if overwrite else anew)
            for kind in (TURNS_FOLDER, PAIRS_FOLDER)
            for path in _parts(folder, critic, kind)
        ]
        if overwrite:
            for path in found:
                path.unlink()
        elif found:
            aside = _new_folder(folder / _OUTDATED)
            for path in found:
                moved = aside / path.relative_to(folder)
                moved.parent.mkdir(exist_ok=True)
                path.rename(moved)
            named = {name: old["critics"][name] for name in anew}
            text = json.dumps({**old, "critics": named}, indent=1) + "\n"
            write_whole(aside / SETTINGS_FILE, text)
    # In the order in which they were given last: gains are over the first.
    named = {**critics, **{name: kept[name] for name in kept if name not in critics}}
    content = {"tool": _TOOL, "settings": dict(settings), "critics": named}
    write_whole(folder / SETTINGS_FILE, json.dumps(content, indent=1) + "\n")
    return aside


def _parts(folder: Path, critic: str, kind: str) -> list[Path]:
    plain = part_file(folder, critic, 0, kind).name.removesuffix("0.jsonl")
    of_seed = re.compile(re.escape(plain) + r"-?\d+\.jsonl")
    return [path for path in (folder / kind).glob("*.jsonl") if of_seed.fullmatch(path.name)]


def _new_folder(parent: Path) -> Path:
    """The first of ``parent``/1, ``parent``/2, ... that is not there, made."""
    folder = next(there for n in count(1) if not (there := parent / str(n)).exists())
    folder.mkdir(parents=True)
    return folder

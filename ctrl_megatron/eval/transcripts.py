"""What an evaluation keeps of every critique and revision, and the files that hold it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ctrl_megatron.checkpoint.files import write_whole
from ctrl_megatron.errors import UserError
from ctrl_megatron.eval.pairwise import JudgedPair
from ctrl_megatron.metrics.json_lines import read_json_lines
from ctrl_megatron.types import Verdict

SETTINGS_FILE, TURNS_FOLDER, PAIRS_FOLDER = "evaluation.json", "transcripts", "pairs"
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


def is_evaluation(folder: Path) -> bool:
    """Whether ``ctrl-evaluate`` wrote the directory."""
    return (folder / SETTINGS_FILE).is_file()


def read_evaluation(folder: Path) -> Evaluation:
    """Settings and transcripts. UserError for files that are none, naming file and line."""
    settings = read_settings(folder)
    turns: list[Turn] = []
    for path in sorted((folder / TURNS_FOLDER).glob("*.jsonl")):
        for number, record in enumerate(read_json_lines(path), start=1):
            turns.append(turn_from(record, f"{path} line {number}"))
    pairs: list[JudgedPair] = []
    for path in sorted((folder / PAIRS_FOLDER).glob("*.jsonl")):
        for number, record in enumerate(read_json_lines(path), start=1):
            pairs.append(JudgedPair.read(record, f"{path} line {number}"))
    if not turns:
        raise UserError(f"{folder} holds no transcript yet; run ctrl-evaluate to its end")
    order = {name: place for place, name in enumerate(settings["critics"])}
    turns.sort(key=lambda t: order.get(t.critic, len(order)))
    pairs.sort(key=lambda p: order.get(p.critic, len(order)))
    return Evaluation(name=folder.resolve().name, settings=settings, turns=turns, pairs=pairs)


def read_settings(folder: Path) -> dict[str, Any]:
    """The content of ``evaluation.json``. UserError where it is not this tool's."""
    path = folder / SETTINGS_FILE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
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
    would have one name.
    """
    named = {part_file(folder, critic, 0) for critic in critics}
    if len(named) < len(critics):
        raise UserError("two critics have names that differ in signs only: name them differently")
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return []
    if not folder.is_dir() or not is_evaluation(folder):
        raise UserError(
            f"--out: {folder} is there and holds no evaluation", remedy="name a new directory"
        )
    found = read_settings(folder)
    if overwrite:
        return []
    before, now = found["settings"], dict(settings)
    changed = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    if changed:
        told = (f"{key}: {before.get(key)} -> {now.get(key)}" for key in changed)
        raise UserError(
            f"--out: {folder} holds an evaluation with other settings ({'; '.join(told)})",
            remedy="name another directory, or replace it with --overwrite",
        )
    return [name for name in critics if found["critics"].get(name, critics[name]) != critics[name]]


def begin_evaluation(
    folder: Path,
    settings: Mapping[str, Any],
    critics: Mapping[str, Mapping[str, Any]],
    *,
    anew: Sequence[str],
    overwrite: bool,
) -> None:
    """Write the settings and remove the transcripts that are to be drawn anew."""
    kept: dict[str, Any] = {}
    if is_evaluation(folder):
        old = read_settings(folder)
        kept = {} if overwrite else old["critics"]
        for critic in old["critics"] if overwrite else anew:
            for kind in (TURNS_FOLDER, PAIRS_FOLDER):
                plain = part_file(folder, critic, 0, kind).name.removesuffix("0.jsonl")
                for path in (folder / kind).glob("*.jsonl"):
                    if re.fullmatch(re.escape(plain) + r"-?\d+\.jsonl", path.name):
                        path.unlink()
    # In the order in which they were given last: gains are over the first.
    named = {**critics, **{name: kept[name] for name in kept if name not in critics}}
    content = {"tool": _TOOL, "settings": dict(settings), "critics": named}
    write_whole(folder / SETTINGS_FILE, json.dumps(content, indent=1) + "\n")

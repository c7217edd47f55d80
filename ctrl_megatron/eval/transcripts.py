"""Transcripts: the critiques and revisions of an evaluation, and the files that store them."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

from ctrl_megatron.checkpoint.files import write_text_atomically
from ctrl_megatron.errors import UserError, read_json
from ctrl_megatron.eval.pairwise import JudgedPair
from ctrl_megatron.metrics.json_lines import incomplete_last_line, read_json_lines
from ctrl_megatron.types import Verdict

SETTINGS_FILE, TURNS_FOLDER, PAIRS_FOLDER = "evaluation.json", "transcripts", "pairs"
LABELLED_FOLDER = "labelled"
KINDS = (TURNS_FOLDER, PAIRS_FOLDER, LABELLED_FOLDER)
"""Folders of an evaluation's transcripts."""
_OUTDATED = "outdated"
_TOOL = "ctrl-evaluate"
_VERDICT = ("pass_rate", "accepted", "timed_out")
"""Keys of a verdict in a transcript."""
_MOST_TESTS = 10_000
"""Most tests of a problem whose pass rate a transcript stores exactly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainPlan:
    """The chains that are drawn for every first solution and seed."""

    samples: int = 1
    """Number of chains."""
    turns: int = 1
    """Number of critiques in a chain, each followed by a revision."""
    temperature: float = 0.0
    """Temperature of critiques; 0 is greedy. Revisions are always greedy."""
    top_p: float | None = None
    """Nucleus size of critiques; None for the rollout's."""
    top_k: int | None = None
    """The k most likely tokens that critiques are drawn from; None for the rollout's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One critique and the revision that followed it, in a chain that began with a first solution.

    Turn t criticises what turn t-1 revised.
    """

    critic: str
    """Name of the critic, or of the other author of the critique."""
    seed: int
    """Seed of the draw of the whole chain."""
    problem_id: str
    attempt: str
    """Id of the row, which is one first solution of the problem."""
    difficulty: int
    sample: int
    """Number of the chain among those of the same attempt and seed, from 0."""
    turn: int
    """Number of the turn in its chain, from 1."""
    solution: str
    """The answer that is criticised."""
    critique: str | None
    """None where the request was too long: ``revision`` is then ``solution``."""
    judgment: bool | None
    """The critique's judgment of the solution; None where it has none."""
    revision: str
    before: Verdict | None
    """Verdict on ``solution``; None where the sandbox failed. In a transcript that was read, it has
    the fewest tests with the same pass rate, because the file does not store single tests."""
    after: Verdict | None
    """Verdict on ``revision``, as ``before``."""
    critique_tokens: int = 0
    revision_tokens: int = 0
    confidence: float | None = None
    """Probability that the critic gives to "Correct" at the place of its judgment; None without a
    judgment, for written critiques, and in transcripts of before version 0.2."""


def require_verdict(verdict: Verdict | None) -> Verdict:
    """``verdict``, which is known in every judged chain."""
    assert verdict is not None
    return verdict


def turn_from_json(record: Mapping[str, Any], place: str) -> Turn:
    """The turn in a line of a transcript. Raises UserError that names ``place`` and the mistake."""
    names = {f.name for f in fields(Turn)}
    if record.keys() | {"confidence"} != names:
        wrong = ", ".join(sorted(names ^ record.keys()))
        raise UserError(f"{place}: not the fields of a transcript: {wrong}")
    verdicts = {name: _read_verdict(record[name], place, name) for name in ("before", "after")}
    return Turn(**{**record, **verdicts})


def turn_to_json(turn: Turn) -> dict[str, Any]:
    """The line of a transcript that stores ``turn``, as a JSON object."""
    verdicts = {"before": turn.before, "after": turn.after}
    return asdict(turn) | {
        name: None if verdict is None else {key: getattr(verdict, key) for key in _VERDICT}
        for name, verdict in verdicts.items()
    }


def _read_verdict(record: Any, place: str, name: str) -> Verdict | None:
    if record is None:
        return None
    if not isinstance(record, Mapping) or record.keys() != {*_VERDICT}:
        raise UserError(f"{place}: field {name!r} must have the keys {', '.join(_VERDICT)}")
    try:
        return _verdict(*(record[key] for key in _VERDICT))
    except (TypeError, ValueError) as error:
        raise UserError(f"{place}: field {name!r}: {error}") from None


@cache
def _verdict(pass_rate: float, accepted: bool, timed_out: bool) -> Verdict:
    """The verdict in a line of a transcript. Raises ValueError for an impossible one."""
    share = Fraction(pass_rate).limit_denominator(_MOST_TESTS)
    if not 0 <= share <= 1 or float(share) != pass_rate or accepted != (share == 1):
        raise ValueError(f"no tests give pass_rate={pass_rate} and accepted={accepted}")
    failed = share.denominator - share.numerator
    passed = (True,) * share.numerator + (False,) * failed
    return Verdict(passed=passed, total=share.denominator, timed_out=timed_out)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The content of a directory that ``ctrl-evaluate`` wrote."""

    name: str
    """Name of the directory."""
    settings: dict[str, Any]
    """``{"settings": those that all critics share, "critics": {name: {"path", "weights"}}}``."""
    turns: list[Turn]
    pairs: list[JudgedPair]
    labelled: list[Turn]
    """Judged answers with a known verdict (``eval.labelled``)."""
    left_out: tuple[str, ...] = ()
    """A sentence for every part that is missing or cut off."""
    written: float = 0.0
    """Time of the newest transcript, in seconds since the epoch."""


def is_evaluation(folder: Path) -> bool:
    return (folder / SETTINGS_FILE).is_file()


def read_evaluation(folder: Path) -> Evaluation:
    """Read settings and transcripts. Raises UserError that names file and line of a malformed
    one.
    """
    settings = read_settings(folder)
    turns, labelled = (_read_turns(folder, kind) for kind in (TURNS_FOLDER, LABELLED_FOLDER))
    pairs: list[JudgedPair] = []
    for path in _all_parts(folder, PAIRS_FOLDER):
        for number, record in enumerate(read_json_lines(path), start=1):
            pairs.append(JudgedPair.from_json(record, f"{path} line {number}"))
    if not turns:
        raise UserError(f"{folder} has no transcript yet; run ctrl-evaluate to its end")
    paths = [path for kind in KINDS for path in _all_parts(folder, kind)]
    order = {name: place for place, name in enumerate(settings["critics"])}
    for part in (turns, labelled):
        part.sort(key=lambda t: order.get(t.critic, len(order)))
    pairs.sort(key=lambda p: order.get(p.critic, len(order)))
    return Evaluation(
        name=folder.resolve().name,
        settings=settings,
        turns=turns,
        pairs=pairs,
        labelled=labelled,
        left_out=tuple(_left_out(settings, turns, paths)),
        written=max(path.stat().st_mtime for path in paths),
    )


def _read_turns(folder: Path, kind: str) -> list[Turn]:
    return [
        turn_from_json(record, f"{path} line {number}")
        for path in _all_parts(folder, kind)
        for number, record in enumerate(read_json_lines(path), start=1)
    ]


def _all_parts(folder: Path, kind: str) -> list[Path]:
    return sorted((folder / kind).glob("*.jsonl"))


def _left_out(
    settings: Mapping[str, Any], turns: Sequence[Turn], paths: Sequence[Path]
) -> Iterator[str]:
    for path in paths:
        if number := incomplete_last_line(path):
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
    """The content of ``evaluation.json``. Raises UserError where ctrl-evaluate did not write it."""
    path = folder / SETTINGS_FILE
    try:
        found = read_json(path)
        own = found["tool"] == _TOOL and {"settings", "critics"} <= found.keys()
    except (OSError, ValueError, KeyError, TypeError):
        own = False
    if not own:
        raise UserError(f"{path} is no file of ctrl-evaluate", remedy="name another directory")
    return found


def transcript_part_file(folder: Path, critic: str, seed: int, kind: str = TURNS_FOLDER) -> Path:
    """The path of the transcript of a critic's chains of one seed."""
    plain = re.sub(r"[^\w.-]+", "_", critic).strip("_.")
    return folder / kind / f"{plain}.seed{seed}.jsonl"


def write_transcript_part(path: Path, records: Iterable[Turn | JudgedPair]) -> None:
    """Write the file of one critic and seed, whole or not at all."""
    lines = (turn_to_json(r) if isinstance(r, Turn) else asdict(r) for r in records)
    write_text_atomically(path, "".join(json.dumps(line) + "\n" for line in lines))


def check_evaluation_folder(
    folder: Path,
    settings: Mapping[str, Any],
    critics: Mapping[str, Mapping[str, Any]],
    *,
    overwrite: bool,
) -> list[str]:
    """Check that an evaluation may write ``folder``, and return the critics that must be drawn anew
    because their weights have changed. Writes nothing.

    ``folder`` must be new, empty or an evaluation with the same ``settings``, to which critics may
    be added; with ``overwrite`` it may be any evaluation. Raises UserError otherwise, and where two
    critics' files would have one name. Values of ``path`` in settings and critics are not compared:
    files and directories are compared by their content.
    """
    _check_names(folder, critics)
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return []
    if not folder.is_dir() or not is_evaluation(folder):
        raise UserError(
            f"--out: {folder} exists and is no evaluation", remedy="name a new directory"
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
        shown = (f"{key}: {before.get(key)} -> {now.get(key)}" for key in changed)
        raise UserError(
            f"--out: {folder} is an evaluation with other settings ({'; '.join(shown)})",
            remedy="name another directory, or replace it with --overwrite",
        )
    known = {name: _without_paths(critic) for name, critic in found["critics"].items()}
    return [
        name for name in critics if name in known and known[name] != _without_paths(critics[name])
    ]


def _check_names(folder: Path, critics: Iterable[str]) -> None:
    of_file: dict[Path, str] = {}
    for critic in critics:
        other = of_file.setdefault(transcript_part_file(folder, critic, 0), critic)
        if other != critic:
            raise UserError(
                f"the critics {other!r} and {critic!r} would have one file: their names differ in "
                "punctuation only",
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
    """Write the settings. The transcripts of the critics in ``anew`` are moved to a new folder,
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
            for kind in KINDS
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
            write_text_atomically(aside / SETTINGS_FILE, text)
    # In the order of the newest command: gains are relative to the first critic.
    named = {**critics, **{name: kept[name] for name in kept if name not in critics}}
    content = {"tool": _TOOL, "settings": dict(settings), "critics": named}
    write_text_atomically(folder / SETTINGS_FILE, json.dumps(content, indent=1) + "\n")
    return aside


def _parts(folder: Path, critic: str, kind: str) -> list[Path]:
    plain = transcript_part_file(folder, critic, 0, kind).name.removesuffix("0.jsonl")
    of_seed = re.compile(re.escape(plain) + r"-?\d+\.jsonl")
    return [path for path in (folder / kind).glob("*.jsonl") if of_seed.fullmatch(path.name)]


def _new_folder(parent: Path) -> Path:
    """The first of ``parent``/1, ``parent``/2, ... that did not exist, created."""
    folder = next(there for n in count(1) if not (there := parent / str(n)).exists())
    folder.mkdir(parents=True)
    return folder

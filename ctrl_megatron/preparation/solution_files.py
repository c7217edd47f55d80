"""Files of first solutions: a JSON object per line with ``id``, ``problem_id`` and ``solution``."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from ctrl_megatron.data.json_lines import read_json_lines_with_places
from ctrl_megatron.errors import UserError
from ctrl_megatron.generation.solutions import Fate
from ctrl_megatron.preparation.published import DroppedItems
from ctrl_megatron.prompts import normalise_answer
from ctrl_megatron.types import Attempt, Problem


def read_solutions(
    path: Path, problems: Sequence[Problem], known: Collection[str]
) -> tuple[list[Attempt], DroppedItems]:
    """Attempts at ``problems``; a solution of another problem whose id is in ``known`` is counted
    as dropped. Raises ``ValueError`` naming the line and the key of what is wrong.
    """
    used, seen = {problem.id: problem for problem in problems}, dict[str, str]()
    attempts, dropped = list[Attempt](), DroppedItems()
    for place, entry in read_json_lines_with_places(path):
        keys = ("id", "problem_id", "solution")
        if wrong := [key for key in keys if not isinstance(entry.get(key), str)]:
            raise UserError(
                f"{place}: of the keys {', '.join(keys)}, {' and '.join(wrong)} "
                f"{'is' if len(wrong) == 1 else 'are'} missing or no text"
            )
        name, problem_id = entry["id"], entry["problem_id"]
        if name in seen:
            raise UserError(f"{place}: key 'id' repeats {name!r} of {seen[name]}")
        seen[name] = place
        if problem_id not in known:
            raise UserError(
                f"{place}: problem {problem_id!r} is not in --problems",
                remedy="draw the solutions anew with --solver",
            )
        if problem_id not in used:
            dropped.add("solution of a harder problem", name)
            continue
        settled = normalise_answer(entry["solution"])
        if keep_or_count_dropped(settled.kind, name, dropped):
            attempts.append(Attempt(id=name, problem=used[problem_id], solution=settled.text))
    if not attempts:
        raise UserError(
            f"{path} has no readable solution of a problem in use", remedy="draw some with --solver"
        )
    return attempts, dropped


def keep_or_count_dropped(fate: Fate, name: str, dropped: DroppedItems) -> bool:
    """Whether a solution with this fate is kept. ``dropped`` counts it where it is not, or where
    its code fence was corrected.
    """
    if fate == "normalised":
        dropped.add("(kept) code fence corrected", name)
    elif fate == "unreadable":
        dropped.add("unreadable solution", name)
    elif fate == "no room":
        dropped.add("no room for a solution", name)
    return fate in ("as written", "normalised")

"""Critiques that are written already: a rule's, another model's, those of who knows the fault."""

from __future__ import annotations

from pathlib import Path

from ctrl_megatron.data.json_lines import read_placed_lines
from ctrl_megatron.errors import UserError

_FIELDS = ("id", "critique")


def is_written(critic: str) -> bool:
    """Whether a critic is named by a file of critiques instead of a model's directory."""
    return critic.endswith(".jsonl")


def read_critiques(path: Path) -> dict[str, str]:
    """Critiques by the id of the first solution, from lines ``{"id": ..., "critique": ...}``.

    Raises UserError naming line and field for what is none.
    """
    found: dict[str, str] = {}
    for place, record in read_placed_lines(path):
        for name in _FIELDS:
            if not isinstance(record.get(name), str) or not record[name].strip():
                raise UserError(f"{place}: field {name!r} must be a text that is not empty")
        if record["id"] in found:
            raise UserError(f"{place}: {record['id']} has a critique already")
        found[record["id"]] = record["critique"]
    return found

"""Critiques from a file: those of a rule, of another model, or of an oracle."""

from __future__ import annotations

from pathlib import Path

from ctrl_megatron.data.json_lines import read_json_lines_with_places
from ctrl_megatron.errors import UserError

_FIELDS = ("id", "critique")


def is_critique_file(critic: str) -> bool:
    """True where a critic is a file of critiques and not a model's directory."""
    return critic.endswith(".jsonl")


def read_critiques(path: Path) -> dict[str, str]:
    """Critiques by the id of the first solution, from lines ``{"id": ..., "critique": ...}``.

    Raises UserError that names line and field of a mistake.
    """
    found: dict[str, str] = {}
    for place, record in read_json_lines_with_places(path):
        for name in _FIELDS:
            if not isinstance(record.get(name), str) or not record[name].strip():
                raise UserError(f"{place}: field {name!r} must be a text that is not empty")
        if record["id"] in found:
            raise UserError(f"{place}: {record['id']} has a critique already")
        found[record["id"]] = record["critique"]
    return found

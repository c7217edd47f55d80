"""What a long job has finished, on disk: after a kill the same call goes on from there."""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ctrl_megatron.checkpoint.files import write_whole
from ctrl_megatron.errors import UserError

Item = TypeVar("Item")
Records = list[dict[str, Any]]
_SETTINGS = "settings.json"


class StageJournal:
    """Stages of parts in a folder: a file per stage, a line per finished part, in order.

    ``settings`` (plain values) are whatever the records depend on. A line is on disk before the
    next part begins; one that a kill has cut is forgotten. Raises UserError naming the settings in
    which an earlier call differs.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self._folder, settings = folder, json.loads(json.dumps(settings))
        file = folder / _SETTINGS
        if not file.exists():
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(file, json.dumps(settings, indent=1) + "\n")
        before = json.loads(file.read_text(encoding="utf-8"))
        differ = [n for n in (*before, *settings) if before.get(n) != settings.get(n)]
        if differ:
            raise UserError(
                f"{folder} was begun with other {', '.join(dict.fromkeys(differ))}",
                remedy="give the same again, name another --out, or begin anew with --overwrite",
            )

    def finished(self, stage: str) -> list[Records]:
        """The records of every finished part of ``stage``."""
        file = self._folder / f"{stage}.jsonl"
        if not file.exists():
            return []
        whole = file.read_bytes()
        kept = whole[: whole.rfind(b"\n") + 1]
        if len(kept) < len(whole):
            os.truncate(file, len(kept))
        return [json.loads(line) for line in kept.splitlines()]

    async def run(
        self,
        stage: str,
        parts: Sequence[Item],
        work: Callable[[Item], Awaitable[Records]],
        advance: Callable[[int], None] = lambda _: None,
    ) -> list[Records]:
        """``work`` of every part that is not finished yet; the records of all parts in order.

        ``advance`` is told how many parts are finished.
        """
        done = self.finished(stage)
        advance(len(done))
        with (self._folder / f"{stage}.jsonl").open("ab") as file:
            for part in parts[len(done) :]:
                records = await work(part)
                file.write(json.dumps(records, ensure_ascii=False).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
                # As a later call would read them.
                done.append(json.loads(json.dumps(records)))
                advance(len(done))
        return done

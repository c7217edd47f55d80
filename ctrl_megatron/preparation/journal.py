"""A journal of the finished parts of a long job: after a kill, the same call continues from it."""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ctrl_megatron.checkpoint.files import write_text_atomically
from ctrl_megatron.errors import UserError

Item = TypeVar("Item")
Records = list[dict[str, Any]]
_SETTINGS = "settings.json"


class StageJournal:
    """A folder with one file per stage and one line per finished part, in order.

    ``settings`` (JSON values) is everything that the records depend on. A line is on disk before
    the next part begins; a line that a kill truncated is ignored. Raises UserError naming the
    settings that differ from those of an earlier call.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self._folder, settings = folder, json.loads(json.dumps(settings))
        file = folder / _SETTINGS
        if not file.exists():
            folder.mkdir(parents=True, exist_ok=True)
            write_text_atomically(file, json.dumps(settings, indent=1) + "\n")
        before = json.loads(file.read_text(encoding="utf-8"))
        differ = [n for n in (*before, *settings) if before.get(n) != settings.get(n)]
        if differ:
            raise UserError(
                f"{folder} was begun with other {', '.join(dict.fromkeys(differ))}",
                remedy="give the same again, name another --out, or start over with --overwrite",
            )

    def finished_records(self, stage: str) -> list[Records]:
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
        """Run ``work`` on every part that is not finished; return the records of all parts in
        order.

        ``advance`` is called with the number of finished parts.
        """
        done = self.finished_records(stage)
        advance(len(done))
        with (self._folder / f"{stage}.jsonl").open("ab") as file:
            for part in parts[len(done) :]:
                records = await work(part)
                file.write(json.dumps(records, ensure_ascii=False).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
                # Equal to what a later call reads from the file.
                done.append(json.loads(json.dumps(records)))
                advance(len(done))
        return done

"""The rows of a parquet file with their critique prompts as tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ctrl_megatron.data.rows import Row, read_rows
from ctrl_megatron.data.tokens import TextCodec
from ctrl_megatron.errors import UserError


@dataclass(frozen=True, kw_only=True)
class PromptTable:
    """Rows whose prompt is short enough, in file order. Sampler and checkpoint identify a row by
    its position here.
    """

    rows: tuple[Row, ...]
    prompts: tuple[tuple[int, ...], ...]
    dropped: int
    """Rows left out because their prompt is too long."""
    bad: tuple[str, ...] = ()
    """Why other rows were left out, one message per row with its file and number."""
    sets: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Name of each file that is reported separately -> ids of its rows (at least one)."""

    @cached_property
    def row_number_by_id(self) -> Mapping[str, int]:
        return {row.id: number for number, row in enumerate(self.rows)}

    def of_rows(self, rows: Sequence[Row]) -> PromptTable:
        """The prompts for ``rows`` alone, in their order; KeyError for one that has none here."""
        numbers, ids = [self.row_number_by_id[row.id] for row in rows], {row.id for row in rows}
        return replace(
            self,
            rows=tuple(rows),
            prompts=tuple(self.prompts[number] for number in numbers),
            sets={name: own & ids for name, own in self.sets.items()},
        )

    def row(self, row_id: str) -> Row:
        """The row with this id; KeyError if there is none."""
        return self.rows[self.row_number_by_id[row_id]]


def load_prompt_table(
    files: str | Sequence[str],
    codec: TextCodec,
    *,
    max_prompt_length: int,
    filter_overlong: bool,
    prompt_key: str = "prompt",
    sets: Sequence[str] = (),
    check: Callable[[Row], object] | None = None,
    drop_bad: bool = False,
) -> PromptTable:
    """Read and tokenise ``files``. Every rank reads the same table.

    Column ``prompt_key`` has the messages. ``sets`` has one name per file if the files are
    reported separately; a row that several files contain belongs to the set of each. ``drop_bad``
    leaves out rows that cannot be read and those at which ``check`` raises ValueError.

    Raises ValueError for a prompt of more than ``max_prompt_length`` tokens unless
    ``filter_overlong``, and if no row remains, in all files or in one of ``sets``.
    """
    named = files if isinstance(files, str) else ", ".join(files)
    rows, prompts, dropped = [], [], 0
    bad: list[str] | None = [] if drop_bad else None
    for row in read_rows(files, prompt_key=prompt_key, check=check, left_out=bad):
        tokens = tuple(codec.encode_chat(row.prompt, add_generation_prompt=True))
        if len(tokens) <= max_prompt_length:
            rows.append(row)
            prompts.append(tokens)
        elif filter_overlong:
            dropped += 1
        else:
            raise UserError(
                f"{named}: row {row.id} has a prompt of {len(tokens)} tokens, more than "
                f"data.max_prompt_length={max_prompt_length}; raise it or set "
                "data.filter_overlong_prompts=true"
            )
    if not rows:
        raise UserError(
            f"{named}: no row has a prompt of at most "
            f"data.max_prompt_length={max_prompt_length} tokens"
        )
    kept, of_sets = {row.id for row in rows}, dict[str, frozenset[str]]()
    for name, file in zip(sets, files if sets else (), strict=True):
        left_out = list[str]() if drop_bad else None
        own = {row.id for row in read_rows(file, prompt_key=prompt_key, left_out=left_out)}
        of_sets[name] = frozenset(own & kept)
        if not of_sets[name]:
            raise UserError(
                f"{file}: no row has a prompt of at most "
                f"data.max_prompt_length={max_prompt_length} tokens"
            )
    return PromptTable(
        rows=tuple(rows),
        prompts=tuple(prompts),
        dropped=dropped,
        bad=tuple(bad or ()),
        sets=of_sets,
    )

"""Compare checkpoints and exported models with the hashes that were saved with them.

``ctrl-check-checkpoint DIR ...``: DIR is a checkpoint (``runs/NAME/checkpoints/global_step_N``), a
Hugging Face directory that a run or a conversion wrote, or a run with any number of both.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from ctrl_megatron.checkpoint.manifest import (
    MARKER,
    DamagedFiles,
    Manifest,
    find_added_files,
    verify_manifest,
)
from ctrl_megatron.commands.start import CommandParser, command_entry_point
from ctrl_megatron.config.flags import existing_path
from ctrl_megatron.errors import UserError

_AGAIN = "copy it anew"
_STATE = "trainer_state.json"


@command_entry_point("check_checkpoint")
def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each directory. Exit codes: 0 all are whole, 1 one is damaged or has no
    hashes, 2 wrong input.
    """
    parser = CommandParser(__doc__)
    parser.add_argument(
        "directories", nargs="+", type=existing_path, metavar="DIR", help="checkpoint, model or run"
    )
    options = parser.parse_args(arguments)
    found = [
        place for given in options.directories for place in find_checkpoints_and_exports(given)
    ]
    return max([_report(place) for place in found])


def find_checkpoints_and_exports(directory: Path) -> list[Path]:
    """The checkpoints and exported models in ``directory``, which may be one itself; those that a
    run has set aside are left out. UserError if there are none.
    """
    if _is_written(directory):
        return [directory]
    places = [directory, directory / "hf"]
    for folder in (directory, directory / "checkpoints", directory / "hf_exports"):
        places += sorted(folder.glob("global_step_*"), key=lambda path: (len(path.name), path.name))
    found = [place for place in places if _is_written(place)]
    if not found:
        raise UserError(
            f"{directory} holds no checkpoint and no model with a manifest",
            remedy="name a run, a checkpoint (runs/NAME/checkpoints/global_step_N), or a Hugging "
            "Face directory that this package wrote",
        )
    return found


def _is_written(directory: Path) -> bool:
    return (directory / MARKER).is_file() or (directory / _STATE).is_file()


def _report(directory: Path) -> int:
    start = time.monotonic()
    try:
        manifest = _verified(directory)
    except DamagedFiles as error:
        print(f"damaged     {directory}: {error}", flush=True)
        return 1
    if manifest is None:
        print(f"unverified  {directory}: an older version saved it, without hashes", flush=True)
        return 1
    print(f"whole       {directory}: {_facts(directory, manifest, start)}", flush=True)
    return 0


def _verified(directory: Path) -> Manifest | None:
    """The manifest, with which all files agree; None without hashes."""
    if (directory / _STATE).is_file():
        from ctrl_megatron.checkpoint.store import verify_in_one_process

        return verify_in_one_process(directory)
    return verify_manifest(directory, remedy=_AGAIN)


def _facts(directory: Path, manifest: Manifest, start: float) -> str:
    origin, size = manifest.origin, sum(manifest.sizes.values())
    seconds = time.monotonic() - start
    who = f"step {origin.step} of run {origin.run}" if origin else f"by {manifest.tool}"
    others = find_added_files(directory, manifest)
    beside = f"; it also holds {', '.join(others)}" if others else ""
    return f"{who}, {len(manifest.hashes)} files, {size / 2**20:.1f} MiB in {seconds:.1f} s{beside}"


if __name__ == "__main__":
    raise SystemExit(main())

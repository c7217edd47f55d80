"""Files of one JSON object per line that a user wrote: every error names the file and the line."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from pathlib import Path
from typing import Any

from ctrl_megatron.errors import UserError, decode_text, read_bytes
from ctrl_megatron.problems.long_integers import allow_long_integers, load_long_integer_json

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""The JSON escape of a surrogate. An unpaired one can be neither written to a file nor tokenised.
"""


def read_json_lines_with_places(file: Path) -> list[tuple[str, dict[str, Any]]]:
    """``(place, object)`` for each non-empty line; ``place`` names file and line for messages.

    A file named ``*.gz`` is decompressed. Raises ``ValueError`` for a file that cannot be read, a
    line that is not a JSON object, and text that UTF-8 cannot encode.
    """
    try:
        data = read_bytes(file)
        data = gzip.decompress(data) if file.suffix == ".gz" else data
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"cannot read {file}: {error}") from error
    text = decode_text(data, file)
    found = []
    # Not splitlines(): JSON strings may contain U+2028 and similar, which do not end a line.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        location = f"{file}: line {number}"
        try:
            record = load_long_integer_json(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{location} is not JSON: {error}") from error
        if not isinstance(record, dict):
            raise UserError(f"{location} is not a JSON object")
        if _SURROGATE.search(line):
            try:
                with allow_long_integers():
                    json.dumps(record, ensure_ascii=False).encode()
            except UnicodeEncodeError as error:
                half = f"\\u{ord(error.object[error.start]):x}"
                raise UserError(f"{location} has half of a character, {half} alone") from error
        found.append((location, record))
    return found

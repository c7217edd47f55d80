"""Check that texts produce no control tokens: ``python tools/check/control_tokens.py DIRECTORY...``
with directories of tokenizers that have chat templates.

For each tokenizer: ordinary conversations get the template's own tokens; conversations that spell
out each added token of the vocabulary get no more control tokens than ordinary ones, and decode to
the same text. Exit status 1 if one of these fails.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from ctrl_megatron.data.tokens import TextCodec
from ctrl_megatron.types import Message


def main(argv: list[str] | None = None) -> int:
    """Check every directory; returns 0 if all pass."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directories", nargs="+", type=Path)
    failed = False
    for path in parser.parse_args(argv).directories:
        started = time.monotonic()
        faults = list(faults_of(TextCodec(path)))
        failed |= bool(faults)
        print(f"{path}: {faults or 'holds'} ({time.monotonic() - started:.1f} s)", flush=True)
    return int(failed)


def faults_of(codec: TextCodec) -> Iterator[str]:
    """One sentence per fault."""
    tokenizer = codec.tokenizer
    for number, text in enumerate(honest_texts()):
        asked: list[Message] = [{"role": "user", "content": text}]
        for chat, open_end in (
            (asked, True),
            ([*asked, {"role": "assistant", "content": text}, *asked], True),
            ([*asked, {"role": "assistant", "content": text}], False),
        ):
            rendered = tokenizer.apply_chat_template(
                chat,
                tokenize=False,
                add_generation_prompt=open_end,
                strftime_now=codec.template_date,
            )
            own = tokenizer.encode(rendered, add_special_tokens=False)
            if codec.encode_chat(chat, open_end) != own:
                yield f"honest text {number} has other tokens in a conversation"
        if codec.encode(text) != tokenizer.encode(text, add_special_tokens=False):
            yield f"honest text {number} has other tokens"
    special = set(tokenizer.all_special_ids) | {
        number for number, token in tokenizer.added_tokens_decoder.items() if token.special
    }

    def counted(content: str) -> tuple[int, str]:
        ids = codec.encode_chat([{"role": "user", "content": content}])
        return sum(i in special for i in ids), codec.decode(ids, skip_special_tokens=False)

    expected, _ = counted("x")
    for token in tokenizer.added_tokens_decoder.values():
        text = f"a{token.content}b\n{token.content} {token.content * 2}c"
        found, decoded = counted(text)
        if token.special and found != expected:
            yield f"{token.content!r} becomes {found - expected} special tokens"
        if token.special and text not in decoded:
            yield f"{token.content!r} is not what it decodes to"


def honest_texts() -> Iterator[str]:
    """Prose, programs and odd spacing, none of which spells a control token."""
    yield from (
        "hi",
        " two  spaces\n\n\tand a tab ",
        "naïve 数学 🙂 x<y>z [a] {b} </p>",
        "1234 + 5.60",
    )
    for file in sorted((ROOT / "ctrl_megatron" / "algorithms").glob("*.py")):
        yield file.read_text()
    yield (ROOT / "README.md").read_text()


if __name__ == "__main__":
    raise SystemExit(main())

"""Keep of the fat binaries in a shared object only what a GPU of one compute capability loads.

``python strip_fatbin.py FILE`` counts the entries by kind and architecture. With ``--arch 90 --out
FILE`` each container keeps the machine code for 9.0, else of the same generation, else the newest
PTX that the driver can compile; the rest becomes zeros, so that offsets stay and a compressor
removes it. A container without any of these keeps its smallest entry.

NVIDIA does not document the format; read from files of CUDA 13.0: a container is <u32 magic, u16
version, u16 header size, u64 size>, then entries <u16 kind, u16, u32 header size, u64 payload,
..., u32 architecture at 28, u64 flags at 40>.
"""

from __future__ import annotations

import argparse
import collections
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_MAGIC = struct.pack("<I", 0xBA55ED50)
_CONTAINER, _ENTRY = 16, 64
_PTX, _CODE = 1, 2


@dataclass(frozen=True, slots=True)
class Entry:
    """One kernel's code or PTX for one architecture."""

    start: int
    header: int
    payload: int
    kind: int
    arch: int
    flags: int

    @property
    def end(self) -> int:
        return self.start + self.header + self.payload


def containers(data: bytes) -> Iterator[tuple[int, list[Entry]]]:
    """The offset of each container, and its entries."""
    at = data.find(_MAGIC)
    while at >= 0:
        version, head, size = struct.unpack_from("<HHQ", data, at + 4)
        end, found = at + _CONTAINER + size, list[Entry]()
        if version == 1 and head == _CONTAINER and end <= len(data):
            found = _entries(data, at + _CONTAINER, end)
        if found:
            yield at, found
        at = data.find(_MAGIC, end if found else at + 4)


def _entries(data: bytes, at: int, end: int) -> list[Entry]:
    """The entries between two offsets; none if what is there is no container's content."""
    found = []
    while at + _ENTRY <= end:
        kind, _, header, payload = struct.unpack_from("<HHIQ", data, at)
        (arch,), (flags,) = (
            struct.unpack_from("<I", data, at + 28),
            struct.unpack_from("<Q", data, at + 40),
        )
        entry = Entry(at, header, payload, kind, arch, flags)
        if not 48 <= header < 200 or entry.end > end:
            return []
        found.append(entry)
        at = entry.end
    return found


def loaded(found: Sequence[Entry], arch: int, *, ptx: bool) -> list[Entry]:
    """The entries that a GPU of ``arch`` loads or compiles; none where it can do neither."""
    code = [entry for entry in found if entry.kind == _CODE]
    exact = [entry for entry in code if entry.arch == arch]
    near = [e for e in code if e.arch // 10 == arch // 10 and e.arch < arch]
    texts = [e for e in found if e.kind == _PTX and e.arch <= arch] if ptx else []
    newest = max((entry.arch for entry in texts), default=0)
    return exact or near or [entry for entry in texts if entry.arch == newest]


def strip(data: bytes, arch: int, *, ptx: bool, without: Sequence[bytes]) -> tuple[bytes, str]:
    """``data`` with the entries that ``loaded`` keeps, and what was kept in words.

    Without ``ptx`` a container that would be compiled keeps the header of an entry and no code: its
    kernels must not be launched. So does a container whose uncompressed code has one of the words
    ``without``.
    """
    result, number, emptied, kept = bytearray(data), 0, 0, 0
    for at, found in containers(data):
        number += 1
        own = loaded(found, arch, ptx=ptx)
        named = any(word in data[e.start : e.end] for e in own for word in without)
        bare = named or not (own or ptx)
        own = (own or [min(found, key=lambda entry: entry.payload)])[: 1 if bare else None]
        parts = [bytes(result[entry.start : entry.end]) for entry in own]
        if bare:
            emptied += 1
            parts = [parts[0][: own[0].header] + bytes(own[0].payload)]
        whole = b"".join(parts)
        begin, end = at + _CONTAINER, found[-1].end
        result[begin:end] = whole + bytes(end - begin - len(whole))
        struct.pack_into("<Q", result, at + 8, len(whole))
        kept += len(whole)
    text = f"{number} containers, {kept / 2**20:.1f} MiB kept, {emptied} without their code"
    return bytes(result), text


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--arch", type=int, help="compute capability, 90 for 9.0")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--no-ptx", action="store_true", help="keep nothing that is compiled")
    parser.add_argument("--without", nargs="*", default=[], help="words of code that is left out")
    options = parser.parse_args()
    data = options.file.read_bytes()
    if options.arch is None or options.out is None:
        count, size = collections.Counter[str](), collections.Counter[str]()
        for _, found in containers(data):
            for entry in found:
                kind = {_PTX: "ptx", _CODE: "code"}.get(entry.kind, str(entry.kind))
                key = f"{kind} {entry.arch} {entry.flags:#x}"
                count[key], size[key] = count[key] + 1, size[key] + entry.payload
        for key in sorted(count):
            print(f"{key}: {count[key]} entries, {size[key] / 2**20:.1f} MiB")
        return
    words = [word.encode() for word in options.without]
    stripped, text = strip(data, options.arch, ptx=not options.no_ptx, without=words)
    options.out.write_bytes(stripped)
    print(f"{options.file.name}: {text}")


if __name__ == "__main__":
    main()

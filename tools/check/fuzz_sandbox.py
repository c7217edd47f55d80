"""Fuzz the readers of untrusted bytes in the sandbox, guided by coverage: ``python
tools/check/fuzz_sandbox.py requests -max_total_time=60``.

An exception other than a clear refusal ends the run and leaves the input in a file ``crash-...``.
Needs the extra ``fuzz``; further options are libFuzzer's.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

try:
    atheris: Any = importlib.import_module("atheris")
except ImportError:
    raise SystemExit("fuzz_sandbox: atheris is not installed: pip install '.[fuzz]'") from None

with atheris.instrument_imports(include=["ctrl_megatron"]):
    from ctrl_megatron.problems.comparison import RULES, output_difference
    from ctrl_megatron.sandbox.datasets import READERS
    from ctrl_megatron.sandbox.datasets.payload import read_payload
    from ctrl_megatron.sandbox.jail import data as crossing
    from ctrl_megatron.sandbox.jail import frames
    from ctrl_megatron.sandbox.languages import LANGUAGES, extract_program
    from ctrl_megatron.sandbox.wire import RunCodeRequest, SubmitRequest

CASE = {"input": {"stdin": "a"}, "output": {"stdout": "a"}}
RECORDS = {
    "MBPPDataset": {"test_list": ["assert f(1) == 1"], "test_setup_code": ""},
    "HumanEvalDataset": {"test": "def check(g):\n    assert g(1) == 1", "entry_point": "f"},
    "CommonOJDataset": {"test": [CASE]},
    "CodeContestsDataset": {"public_tests": {"input": ["a"], "output": ["a"]}, "time_limit": 1},
    "APPSDataset": {"input_output": {"inputs": [[1]], "outputs": [[1]], "fn_name": "f"}},
    "LiveCodeBenchDataset": {"test": {"inputs": ["1"], "outputs": ["1"], "fn_name": None}},
    "IOIDataset": {
        "tests": {"t": {"input": "1", "output": "1"}},
        "subtasks": [{"name": "s", "points": 1, "tests": ["t"]}],
        "checker": {"code": "print(1)", "language": "python"},
    },
}
KINDS = sorted(READERS)
PROGRAM = "```python\ndef f(x):\n    return x\n```"


def text_of(data: bytes) -> str:
    """Any text, also one with lone surrogates."""
    return data.decode("utf-8", errors="surrogateescape")


def requests(data: bytes) -> None:
    """Read a body of /submit or /run_code."""
    with suppress(ValueError):
        RunCodeRequest.model_validate_json(data)
    SubmitRequest.model_validate_json(data)


def records(data: bytes) -> None:
    """Read a problem; the first byte selects its kind."""
    record = json.loads(data[1:])
    if isinstance(record, dict):
        READERS[KINDS[data[0] % len(KINDS)]](record)


def payloads(data: bytes) -> None:
    """Read hidden tests in LiveCodeBench's packed form."""
    read_payload(text_of(data), "test")


def completions(data: bytes) -> None:
    """Extract the program of a completion, in every language."""
    for language in LANGUAGES:
        extract_program(text_of(data), language)


def outputs(data: bytes) -> None:
    """Compare an output with the expected one."""
    half = len(data) // 2
    for rule in RULES.values():
        output_difference(text_of(data[:half]), text_of(data[half:]), rule)


def no_object(_: Any) -> Any:
    """The other side has no objects here."""
    raise crossing.DataError("an object")


def answers(data: bytes) -> None:
    """Read a message of the candidate to the judge."""
    reader, writer = os.pipe()
    try:
        os.write(writer, data[: 1 << 15])
        os.close(writer)
        lines = frames.FrameReader(reader, limit=1 << 15)
        while True:
            message = lines.receive()
            value = message.get("value") if isinstance(message, dict) else message
            crossing.encode_value(crossing.decode_value(value, no_object), no_object)
    except frames.PeerGone:
        pass
    finally:
        os.close(reader)


TARGETS: dict[str, tuple[Callable[[bytes], None], list[bytes]]] = {
    "requests": (
        requests,
        [
            json.dumps(
                {
                    "dataset": "d",
                    "id": 0,
                    "completion": PROGRAM,
                    "config": {"dataset_type": kind, "provided_data": record, "extra": {}},
                }
            ).encode()
            for kind, record in RECORDS.items()
        ],
    ),
    "records": (
        records,
        [bytes([KINDS.index(k)]) + json.dumps(record).encode() for k, record in RECORDS.items()],
    ),
    "payloads": (payloads, [b"eJwDAAAAAAE=", b'[{"input": "1", "output": "1"}]']),
    "completions": (completions, [PROGRAM.encode(), b"def f(x):\n    return x"]),
    "outputs": (outputs, [b"1.0 2\n1 2.00000001\n", b"yes\nYES\n"]),
    "answers": (
        answers,
        [
            frames.encode_frame({"id": "a", "value": ["list", [1, ["float", "0x1p+0"]]]}),
            frames.encode_frame(1),
        ],
    ),
}


def main() -> None:
    """Parse the target; libFuzzer parses the other options and never returns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=sorted(TARGETS))
    known, rest = parser.parse_known_args()
    target, seeds = TARGETS[known.target]

    def once(data: bytes) -> None:
        try:
            target(data)
        except (ValueError, frames.FrameError):
            return  # a refusal

    corpus = tempfile.mkdtemp(prefix=f"fuzz-{known.target}-")
    for number, seed in enumerate(seeds):
        Path(corpus, f"seed-{number}").write_bytes(seed)
    atheris.Setup([sys.argv[0], *rest, corpus], once)
    atheris.Fuzz()


if __name__ == "__main__":
    main()

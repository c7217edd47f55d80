"""Anything at all as a request, record, payload or completion: an answer or a clear refusal."""

from __future__ import annotations

import base64
import json
import pickle
import urllib.error
import urllib.request
import zlib
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ctrl_megatron.problems.comparison import RULES, ComparisonRule, output_difference
from ctrl_megatron.sandbox import EmbeddedSandbox
from ctrl_megatron.sandbox.datasets import READERS
from ctrl_megatron.sandbox.datasets.payload import read_payload
from ctrl_megatron.sandbox.datasets.problems import FunctionProblem, ScoredProblem, StdioProblem
from ctrl_megatron.sandbox.languages import LANGUAGES, extract_program

LIVE = settings(
    max_examples=settings().max_examples // 2,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

# Every key that some reader looks at, and texts that lead far into one of them.
_NAMES = """
test test_list test_setup_code entry_point input_output inputs outputs fn_name input output stdin
stdout checker code language order public_tests private_tests generated_tests seconds time_limit
nanos tests subtasks points name grader_files public_test_cases metadata func_name testtype a b
private_test_cases
"""
KEYS = st.sampled_from(_NAMES.split())
TEXTS = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        [
            *("assert f(1) == 1", "def check(candidate):\n    assert candidate(1) == 1", "f", "a"),
            *("1\n2", "[1]", "{}", "[]", "null", "NaN", "\ud800", "\x00", "import *", "stdin"),
            *("functional", "eJwDAAAAAAE=", '{"inputs": ["1"], "outputs": ["1"], "fn_name": "f"}'),
        ]
    ),
)
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**20), 10**20), st.floats(), TEXTS, st.just([])
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(KEYS, st.text(max_size=3)), inner, max_size=4),
    ),
    max_leaves=12,
)
RECORDS = st.dictionaries(KEYS, VALUES, max_size=6)
CODE = st.one_of(
    st.text(max_size=30),
    st.sampled_from(
        [
            *("def f(x): return x", "print(input())", "def f(x): return '\\ud800'", "x = 1\x00"),
            "def f(x): raise ValueError('\\ud800')",
            "def f(x): raise type('\\ud800', (Exception,), {})",
            "import sys; sys.stdout.buffer.write(b'\\xff\\xed\\xa0')",
            "raise ValueError('\\ud800')",
        ]
    ),
)
GOOD: list[tuple[str, Any]] = [
    ("MBPPDataset", {"test_list": ["assert f(1) == 1", "assert f('\\ud800') == '\\ud800'"]}),
    ("HumanEvalDataset", {"test": "def check(g):\n    assert g(1) == 1", "entry_point": "f"}),
    ("CommonOJDataset", {"test": [{"input": {"stdin": "a"}, "output": {"stdout": "a"}}]}),
    ("CodeContestsDataset", {"public_tests": {"input": ["a"], "output": ["a"]}, "time_limit": 1}),
    ("APPSDataset", {"input_output": {"inputs": [[1]], "outputs": [[1]], "fn_name": "f"}}),
    ("LiveCodeBenchDataset", {"test": {"inputs": ["1"], "outputs": ["1"], "fn_name": "f"}}),
    ("LiveCodeBenchDataset", {"test": {"inputs": ["1"], "outputs": ["1"], "fn_name": None}}),
    (
        "IOIDataset",
        {
            "tests": {"t": {"input": "1", "output": "1"}},
            "subtasks": [{"name": "s", "points": 1, "tests": ["t"]}],
            "checker": {"code": "print(1)", "language": "python"},
        },
    ),
]


@st.composite
def damaged(draw: st.DrawFn) -> tuple[str, Any]:
    """A record that can be judged, mostly with one part of it replaced by anything."""
    kind, record = draw(st.sampled_from(GOOD))
    place: Any = json.loads(json.dumps(record))
    record = place
    while True:
        key = draw(st.sampled_from(list(place) if isinstance(place, dict) else range(len(place))))
        if isinstance(place[key], (dict, list)) and place[key] and draw(st.booleans()):
            place = place[key]
            continue
        if draw(st.booleans()):
            place[key] = draw(VALUES)
        return kind, record


def post(service: EmbeddedSandbox, path: str, body: bytes) -> tuple[int, Any]:
    request = urllib.request.Request(
        service.endpoint + path, body, {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def answered(service: EmbeddedSandbox, path: str, body: bytes) -> None:
    status, answer = post(service, path, body)
    assert status in (200, 400, 422), (status, answer)
    assert answer["detail"] if status != 200 else answer
    if status == 200 and path == "/run_code":
        assert answer["status"] in ("Success", "Failed")


@LIVE
@given(body=st.one_of(st.binary(max_size=40), VALUES.map(lambda v: json.dumps(v).encode())))
def test_any_body(service: EmbeddedSandbox, body: bytes) -> None:
    answered(service, "/submit", body)
    answered(service, "/run_code", body)


@LIVE
@given(
    problem=st.one_of(damaged(), st.tuples(st.sampled_from(sorted(READERS)), RECORDS)),
    code=CODE,
    extra=st.dictionaries(
        st.sampled_from(["lax", "run_all_cases", "max_cases", "cpp_standard"]),
        st.one_of(st.booleans(), st.integers(-1, 3), st.just("compare"), VALUES),
        max_size=2,
    ),
    language=st.sampled_from(["python", "Python", None, "rust", ""]),
)
def test_any_submission(
    service: EmbeddedSandbox, problem: Any, code: str, extra: Any, language: Any
) -> None:
    kind, record = problem
    config = {
        "dataset_type": kind,
        "provided_data": record,
        "language": language,
        "run_timeout": 1.0,
        "extra": extra,
    }
    body = {"dataset": "d", "id": 0, "completion": f"```python\n{code}\n```", "config": config}
    answered(service, "/submit", json.dumps(body).encode())


@LIVE
@given(
    code=CODE, stdin=st.one_of(st.none(), TEXTS), files=st.dictionaries(TEXTS, TEXTS, max_size=2)
)
def test_any_program(service: EmbeddedSandbox, code: str, stdin: Any, files: Any) -> None:
    body = {"code": code, "language": "python", "stdin": stdin, "run_timeout": 1.0}
    answered(service, "/run_code", json.dumps(body).encode())
    body |= {"files": files, "fetch_files": list(files)}
    answered(service, "/run_code", json.dumps(body).encode())


@given(kind=st.sampled_from(sorted(READERS)), record=RECORDS)
def test_any_record_is_read_or_refused(kind: str, record: Any) -> None:
    try:
        problem = READERS[kind](record)
    except ValueError as error:
        assert str(error)
        return
    assert isinstance(problem, (FunctionProblem, StdioProblem, ScoredProblem))


@given(st.one_of(st.text(max_size=40), st.binary(max_size=60).map(lambda raw: packed(raw))))
def test_any_payload_is_read_or_refused(text: str) -> None:
    try:
        read_payload(text, "test")
    except ValueError as error:
        assert str(error).startswith("test ")


@given(
    data=st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3), max_leaves=6),
    protocol=st.integers(0, 5),
    cut=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=3),
)
def test_damaged_pickles_are_read_or_refused(data: Any, protocol: int, cut: Any) -> None:
    raw = bytearray(pickle.dumps(data, protocol))
    for place, byte in cut:
        raw[place % len(raw)] = byte
    try:
        read_payload(packed(bytes(raw)), "test")
    except ValueError as error:
        assert str(error).startswith("test ")


def test_pickles_that_would_exhaust_memory_or_time() -> None:
    laughs: Any = []
    for _ in range(40):
        laughs = [laughs, laughs]
    cyclic: list[Any] = []
    cyclic.append(cyclic)
    reserve = b"\x80\x04]r\xff\xff\xff\x7f."  # an index of the memo far beyond its end
    huge = b"\x80\x04\x8e" + (1 << 60).to_bytes(8, "little") + b"x."
    for raw in (pickle.dumps(laughs), pickle.dumps(cyclic), reserve, huge):
        try:
            value = read_payload(packed(raw), "test")
        except ValueError:
            continue
        assert value in ([], b"x")


def test_a_payload_that_unpacks_to_too_much_is_refused() -> None:
    bomb = base64.b64encode(zlib.compress(b"0" * (300 << 20), 1)).decode()
    try:
        read_payload(bomb, "test")
    except ValueError as error:
        assert "more than 256 MiB" in str(error)
    else:
        raise AssertionError("it was read")


@given(st.sampled_from(tuple(RULES.values())), st.text(max_size=60), st.text(max_size=60))
def test_any_two_outputs_compare(rule: ComparisonRule, got: str, want: str) -> None:
    assert output_difference(got, got, rule) is None
    result = output_difference(got, want, rule)
    assert result is None or result


@given(st.text(st.sampled_from("`\n+#!cpbashython{}=: "), max_size=60), st.sampled_from(LANGUAGES))
def test_any_completion_is_searched(text: str, language: Any) -> None:
    found = extract_program(text, language)
    assert (found.found_by == "none") <= (found.code == "")


def packed(raw: bytes) -> str:
    return base64.b64encode(zlib.compress(raw)).decode()

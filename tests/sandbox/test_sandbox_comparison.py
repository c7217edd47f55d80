"""The outputs that each rule accepts as equal: as pure functions, then through a service."""

from __future__ import annotations

import ast
import json
import re
import time
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sandbox_talk import BackgroundLoop, submission

from ctrl_megatron.problems.comparison import (
    RESULT_CHECK,
    RULES,
    output_difference,
    output_prefix_difference,
    rule_named,
)
from ctrl_megatron.sandbox.client import SandboxClient
from ctrl_megatron.sandbox.wire import EvalResult
from tools.check import format_mutations as formats

DOCS = Path(__file__).parents[2] / "docs" / "sandbox.md"
TOLERANT = ("float:1e-6", "absolute:0.001", "relative:1e-9")
NAMES = (*RULES, *TOLERANT)
HONEST = [name for name in NAMES if name != "sandbox_fusion"]
"""All but the one that has known holes."""


def accepts(name: str, got: str, want: str) -> bool:
    return output_difference(got, want, rule_named(name)) is None


NEVER = [
    # Another value.
    ("37", "37.35"),
    ("99999", "99999.99"),
    ("100000.90", "99999.99"),
    ("1000009000", "1000000007"),
    ("9007199254740992", "9007199254740993"),
    ("1" * 308 + "2", "1" * 309),
    ("9" * 400, "1" + "0" * 602),
    ("1e400", "5"),
    ("100001", "100000.5"),
    ("-7", "7"),
    ("0.5", "1/2"),
    # No number, whatever Python makes of it.
    ("inf", "1e999"),
    ("inf", str(2**2000)),
    ("Infinity", "inf"),
    ("nan", "1.0"),
    ("1_000", "1000"),
    ("1,000", "1000"),
    ("\N{ARABIC-INDIC DIGIT SEVEN}", "7"),
    ("\N{FULLWIDTH DIGIT SEVEN}", "7"),
    ("\N{MINUS SIGN}7", "-7"),
    ("0", "0e462097"),
    ("0x10", "16"),
    ("0b101", "5"),
    ("50%", "0.5"),
    ("5", "5 cm"),
    ("2024-1-2", "2024-01-02"),
    ("7\N{NO-BREAK SPACE}", "7"),
    # Capitals, order, parts.
    ("yes", "YES"),
    ("aBC", "Abc"),
    ("b\na", "a\nb"),
    ("2 1", "1 2"),
    ("1", "1\n2"),
    ("1\n2\n3", "1\n2"),
    ("", "1"),
    ("1", ""),
]


@pytest.mark.parametrize("name", HONEST)
@pytest.mark.parametrize(("got", "want"), NEVER)
def test_no_rule_accepts(name: str, got: str, want: str) -> None:
    assert not accepts(name, got, want)


ALWAYS = ["", "1", "nan", "inf", "0021", "3e2", "a  b", "  *\n ***", "1\n\n2", "é\u2028x"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", ALWAYS)
def test_every_rule_accepts_expected_output_and_white_space_at_ends(name: str, text: str) -> None:
    for got in (text, f"{text}\n", f"{text} \t\n\n", text.replace("\n", " \r\n")):
        assert accepts(name, got, text) and accepts(name, text, got), got


ONLY_STRICT_REFUSES = [
    # In all of these the format may be the task.
    ("0021", "21"),
    ("+5", "5"),
    ("-0", "0"),
    ("7.5", "7.50"),
    ("7.500", "7.50"),
    ("5.0", "5"),
    ("5", "5.0"),
    (".5", "0.5"),
    ("1e2", "100"),
    ("300", "3e2"),
    ("1e+20", "100000000000000000000"),
    ("1.0E2", "100"),
    ("*\n***", "  *\n ***"),
    ("1  2", "1 2"),
    ("1\t2", "1 2"),
    ("1 2", "1\n2"),
    ("1\n2", "1\n\n2"),
    ("\n1", "1"),
    (" 1", "1"),
    ("0.30000000000000004", "0.3"),
]


@pytest.mark.parametrize(("got", "want"), ONLY_STRICT_REFUSES)
def test_strict_is_about_the_format(got: str, want: str) -> None:
    assert not accepts("strict", got, want)


EQUAL = {
    "tokens": [("1\n2", "1 2"), ("1  2", "1 2"), (" a\tb\n", "a\n\nb")],
    "livecodebench": [
        *[("5.0", "5"), ("5", "5.0"), ("1  2", "1 2"), ("1e2", "100"), ("05", "5"), ("-0", "0")],
        *[("+5", "5"), ("5.", "5"), (".5", "0.5"), ("1E2 3.0", "100 3"), (" 1\n  2", "1\n2")],
        ("1" * 500 + ".0", "1" * 500),
    ],
    "code_contests": [
        *[("5.0", "5"), ("+5", "5"), ("-0.00", "0"), ("0.30000000000000004", "0.3")],
        *[("1.000009", "1.0"), ("1e+06", "1000000"), ("1.5E10", "15000000000"), ("1e-05", "0.0")],
        ("x 2.500001 y\n", "x\n2.5 y"),
    ],
    "apps": [("1\n\n2\n", "1\n2"), ("1.000009  a", "1.0 a"), ("5.0", "5")],
    "float:1e-6": [("1.9999999", "2"), ("1e-7", "0.0"), ("1000000.5", "1000000.0")],
    "absolute:0.001": [("1.0009", "1.0"), ("3", "3.001")],
    "relative:1e-9": [("1000000000.5", "1000000000.0")],
    "sandbox_fusion": [("yes", "YES"), ("100000.90", "99999.99"), ("inf", str(2**2000))],
}
DIFFERENT = {
    "tokens": [("1.0", "1"), ("12", "1 2"), ("+1", "1")],
    "livecodebench": [
        *[("5.5", "5"), ("0.30000000000000004", "0.3"), ("1 2", "1\n2"), ("1\n\n2", "1\n2")],
        *[("a  b", "a b"), ("1  x", "1 x"), ("1e1000", "1e999"), ("5.0000001", "5")],
        ("1" * 500 + ".0", "1" * 500 + ".5"),
    ],
    "code_contests": [
        *[("0021", "21"), ("21", "0021"), ("300", "3e2"), ("1.00002", "1.0"), ("00.5", "0.5")],
        *[("9007199254740992.0", "9007199254740993"), ("1000000000000.1", "1000000000000.0")],
        *[("5.00002", "5"), ("1" * 500 + ".0", "1" * 500 + ".5")],
    ],
    "apps": [("1 2", "1\n2"), ("2 1.0", "1.0 2"), ("1.0\n1.0", "1.0"), ("21", "0021")],
    "float:1e-6": [("1000001", "1000000"), ("1.9999", "2"), ("1.00001", "1.0")],
    "absolute:0.001": [("1000000.01", "1000000.0"), ("3.0011", "3.0")],
    "relative:1e-9": [("1e-7", "0.0"), ("1.00000001", "1.0")],
    "sandbox_fusion": [("1.0 2.0", "1 2"), ("1e-12", "0"), ("1.0001", "1")],
}


@pytest.mark.parametrize(
    ("name", "got", "want", "same"),
    [
        (name, *pair, same)
        for same, table in ((True, EQUAL), (False, DIFFERENT))
        for name, pairs in table.items()
        for pair in pairs
    ],
)
def test_rules(name: str, got: str, want: str, same: bool) -> None:
    assert accepts(name, got, want) is same


@pytest.mark.parametrize(
    "name",
    [
        *("lax", "Strict", "", 3, None, "float", "float:", "float:0", "float:1", "float:nan"),
        *("float:-1e-6", "float:1e6", "float:0.2", "float:1e-6 ", "absolute:inf", "tokens:1e-6"),
    ],
)
def test_an_unknown_rule_is_refused_with_all_names(name: Any) -> None:
    with pytest.raises(ValueError, match=r"is unknown: use strict, tokens, .* float:1e-6$"):
        rule_named(name)


def test_the_table_of_the_docs_agrees_with_the_code() -> None:
    lines = [line for line in DOCS.read_text().splitlines() if line.startswith("| `")]
    heads = re.findall(r"^\| expected \| got \| (.*) \|$", DOCS.read_text(), re.MULTILINE)
    (names,) = [re.findall(r"`([^`]+)`", head) for head in heads]
    assert set(RULES) <= set(names)
    cells = r" \| ".join(["(yes|no)"] * len(names))
    rows = [
        found
        for line in lines
        if (found := re.fullmatch(rf"\| `(.*)` \| `(.*)` \| {cells} \|", line))
    ]
    assert len(rows) > 20
    for row in rows:
        want, got = (ast.literal_eval(f'"{row[i]}"') for i in (1, 2))
        verdicts = ["yes" if accepts(name, got, want) else "no" for name in names]
        assert verdicts == list(row.groups()[2:]), (want, got)


@pytest.mark.parametrize("rule", formats.RULES)
def test_other_formats_of_right_outputs(rule: str) -> None:
    """A service judges them, as in ``tools/check/mutations.py``."""
    wrong = [
        (change, got, want)
        for want in formats.right_outputs(60)
        for change, mutate in formats.MUTATIONS.items()
        for got in [mutate(want)]
        if accepts(rule, got, want) is not formats.means_the_same(got, want, rule)
    ]
    assert not wrong


spelled = st.builds(
    "{}{}{}{}".format,
    st.sampled_from(["", "+", "-"]),
    st.integers(0, 10**18),
    st.sampled_from(["", "", ".0", ".5", ".30", ".000001", ".00001", ".333333333333"]),
    st.sampled_from(["", "", "", "e+00", "e-05", "e+20", "e-12"]),
)


@given(spelled, spelled, st.integers(-30, 30), st.integers(1, 12))
def test_numbers_against_fractions(want: str, other: str, steps: int, digits: int) -> None:
    """Near values as well: some steps in a decimal place off."""
    value = Fraction(want)
    near = value + Fraction(steps, 10**digits)
    scaled = near * 10**30
    found = [other] if scaled.denominator != 1 else [other, _text(int(scaled), 30)]
    for got in found:
        off = abs(Fraction(got) - value)
        whole = all(re.fullmatch(r"[+-]?[0-9]+", word) for word in (got, want))
        assert accepts("livecodebench", got, want) is (off == 0)
        for name, most in (
            ("code_contests", Fraction("1e-5")),
            ("apps", Fraction("1e-5")),
            ("absolute:0.001", Fraction("0.001")),
            ("relative:1e-9", abs(value) * Fraction("1e-9")),
            ("float:1e-6", max(abs(value), 1) * Fraction("1e-6")),
        ):
            assert accepts(name, got, want) is (off <= (0 if whole else most)), (name, got)


def _text(digits: int, places: int) -> str:
    text = str(abs(digits)).zfill(places + 1)
    return f"{'-' * (digits < 0)}{text[:-places]}.{text[-places:]}"


@given(st.sampled_from(NAMES), *[st.text(st.sampled_from("017.e+- \n\r\ta"), max_size=12)] * 3)
def test_a_beginning_differs_only_if_no_ending_makes_it_right(
    name: str, got: str, rest: str, want: str
) -> None:
    rule = rule_named(name)
    if output_prefix_difference(got, want, rule) is not None:
        assert output_difference(got + rest, want, rule) is not None
    assert output_prefix_difference(got, got + rest, rule) is None
    assert output_difference(got, got, rule) is None


@pytest.mark.parametrize(
    ("name", "got", "want"),
    [
        ("strict", "1\n3\n", "1\n2\n"),
        ("strict", "1\n2\n3\n", "1\n2\n"),
        ("tokens", "1 3 ", "1\n2\n"),
        ("tokens", "1 2 3 ", "1\n2\n"),
        ("livecodebench", "1.0\n3\n", "1\n2"),
        ("code_contests", "1.00001 5 ", "1.0 4 7"),
        ("apps", "\n\n1\n\n3\n", "1\n2"),
        ("sandbox_fusion", "YES\n1\n", "yes\n2"),
    ],
)
def test_the_message_for_a_wrong_beginning(name: str, got: str, want: str) -> None:
    assert output_prefix_difference(got, want, rule_named(name))


@pytest.mark.parametrize("name", HONEST)
def test_a_megabyte_that_is_hard_to_read_takes_no_time(name: str) -> None:
    size = 1 << 20
    started = time.process_time()
    for got, want in (
        ("9" * size + "x", "9" * size),
        ("9" * size + ".5", "9" * size + ".50001"),
        ("9" * size + "e999", "0.5"),
        ("1." * (size // 2), "1" * size),
        (" " * size + "x", "1" + " " * size),
    ):
        output_difference(got, want, rule_named(name))
        output_prefix_difference(got, want, rule_named(name))
    assert time.process_time() - started < 5


RESULTS: list[tuple[Any, Any, str, bool]] = [
    (0.1 + 0.2, 0.3, "absolute=1e-5", True),
    ([0.1 + 0.2], [0.3], "absolute=1e-5", True),
    ({"a": [(0.1 + 0.2,)]}, {"a": [[0.3]]}, "absolute=1e-5", True),
    (0.31, 0.3, "absolute=1e-5", False),
    ([0.3, 0.31], [0.3, 0.3], "absolute=1e-5", False),
    ([0.3], [0.3, 0.3], "absolute=1e-5", False),
    (0.1 + 0.2, 0.3, "", False),
    (3, 3.0, "absolute=1e-5", True),
    (3.000001, 3, "absolute=1e-5", False),
    (1e6 + 0.5, 1e6, "relative=1e-6", True),
    (1e6 + 2, 1e6, "relative=1e-6", False),
    (float("nan"), 0.5, "absolute=1e-5", False),
    (float("inf"), 1e308, "absolute=1e-5", False),
    (float("inf"), float("inf"), "absolute=1e-5", True),
    (10**400, 0.5, "absolute=1e-5", False),
    (True, 1.0, "absolute=0.1", True),
    (True, 1.05, "absolute=0.1", False),
    ("0.3", 0.3, "absolute=1e-5", False),
    ((1, (2, 3)), [1, [2, 3]], "", True),
    (1, [1, 2], "", False),
    (1, [1, 2], "first=True", True),
    ([1, 2], [1, 2], "first=True", True),
    (Counter("aab"), {"a": 2, "b": 1}, "", True),
    (Counter("aab"), {"a": 2}, "", False),
    ({1: 2}, {1: 3}, "", False),
    ({1: 2, 2: 3}, {1: 2}, "", False),
    (None, [], "", False),
]


@pytest.mark.parametrize(("got", "wanted", "options", "same"), RESULTS)
def test_results_of_functions(got: Any, wanted: Any, options: str, same: bool) -> None:
    names: dict[str, Any] = {}
    exec(RESULT_CHECK, names)
    given = eval(f"dict({options})")
    assert names["_matches"](got, wanted, **given) is same


@pytest.mark.parametrize("rule", formats.RESULT_RULES)
def test_other_forms_of_right_results(rule: str) -> None:
    names: dict[str, Any] = {}
    exec(RESULT_CHECK, names)
    absolute, relative = rule_named(rule).result_tolerance
    wrong = [
        (change, got, want)
        for want in formats.right_results(80)
        for change, mutate in formats.RESULT_MUTATIONS.items()
        for got in [mutate(want)]
        if names["_matches"](got, want, absolute, relative)
        is not formats.results_the_same(got, want, rule)
    ]
    assert not wrong


Submit = Callable[..., EvalResult]


@pytest.fixture(scope="module")
def submit(client: SandboxClient, on_loop: BackgroundLoop) -> Submit:
    def call(kind: str, code: str, data: Any) -> EvalResult:
        request = submission(code, dataset_type=kind, provided_data=data)
        return on_loop(client.submit(request))

    return call


def cases(want: str, **rest: Any) -> dict[str, dict[str, Any]]:
    """One case with an empty input as every kind writes it."""
    return {
        "CommonOJDataset": {
            "test": [{"input": {"stdin": ""}, "output": {"stdout": want}}],
            **rest,
        },
        "CodeContestsDataset": {"public_tests": {"input": [""], "output": [want]}, **rest},
        "APPSDataset": {"input_output": {"inputs": [""], "outputs": [want]}, **rest},
        "TACODataset": {"input_output": {"inputs": [""], "outputs": [want]}, **rest},
        "LiveCodeBenchDataset": {
            "test": json.dumps({"inputs": [""], "outputs": [want]}),
            **rest,
        },
        "IOIDataset": {
            "tests": {"a": {"input": "", "output": want}},
            "subtasks": [{"points": 1, "tests": ["a"]}],
            **rest,
        },
    }


def test_the_kind_names_the_rule_and_the_record_another(submit: Submit) -> None:
    def accepted(got: str, want: str, kind: str, **rest: Any) -> bool:
        data = cases(want, **rest)[kind]
        return submit(kind, f"print({got!r})", data).accepted

    kinds = list(cases(""))
    assert [kind for kind in kinds if accepted("5.0", "5", kind)] == [
        *("CodeContestsDataset", "APPSDataset", "TACODataset", "LiveCodeBenchDataset")
    ]
    assert [kind for kind in kinds if accepted("1  2", "1 2", kind)] == kinds[1:]
    assert all(accepted("7.5", "7.50", kind, comparison="float:1e-6") for kind in kinds)
    assert not any(accepted("7.5", "7.50", kind, comparison="strict") for kind in kinds)
    for kind in kinds:
        with pytest.raises(ValueError, match=r"provided_data\.comparison 'lax' is unknown"):
            accepted("1", "1", kind, comparison="lax")


def called(out: str, **rest: Any) -> dict[str, Any]:
    problem = {"inputs": ["[0.1, 0.2]"], "outputs": [out], "fn_name": "total"}
    return {"test": json.dumps(problem), **rest}


def test_floats_that_functions_return(submit: Submit) -> None:
    def accepted(result: str, out: str, **rest: Any) -> bool:
        code = f"class Solution:\n    def total(self, a):\n        return {result}"
        data = called(out, **rest)
        return submit("LiveCodeBenchDataset", code, data).accepted

    assert accepted("sum(a)", "0.30000") and accepted("[[sum(a)], 1]", "[[0.30000], 1]")
    assert accepted("3", "3.00000") and accepted("3.0", "3")
    assert not accepted("0.31", "0.30000") and not accepted("[sum(a), 0.31]", "[0.3, 0.3]")
    assert not accepted("float('nan')", "0.3") and not accepted("3.000001", "3")
    assert accepted("0.31", "0.30000", comparison="absolute:0.05")
    assert not accepted("sum(a)", "0.30000", comparison="strict")
    apps = {"input_output": {"inputs": [[[0.1, 0.2]]], "outputs": [0.3], "fn_name": "total"}}
    exact = submit("APPSDataset", "def total(a): return sum(a)", apps)
    assert not exact.accepted


@pytest.mark.parametrize(
    ("body", "decorator", "size"),
    [
        ("    return 0 if n == 0 else 1 + depth(n - 1)", "", 49_000),
        ("    return 0 if n == 0 else 1 + depth(n - 1)", "@lru_cache(None)\n", 16_000),
        ("    if n: sorted([n - 1], key=depth)\n    return n", "", 16_000),
        ("    return n if n == 0 else min(map(depth, [n - 1])) + 1", "", 16_000),
    ],
)
def test_live_code_bench_recurses_deeply(
    submit: Submit, body: str, decorator: str, size: int
) -> None:
    code = f"{decorator}def depth(n):\n{body}\n"
    for program, name in ((f"{code}print(depth(int(input())))", None), (code, "depth")):
        problem = {"inputs": [str(size)], "outputs": [str(size)], "fn_name": name}
        data = {"test": json.dumps(problem)}
        result = submit("LiveCodeBenchDataset", program, data)
        assert result.accepted, result.tests[0].test_info


def test_an_endless_recursion_ends_in_its_own_error(submit: Submit) -> None:
    """The stack is large enough for what the limit allows: nothing crashes."""
    code = "def depth(n):\n    return sorted([n], key=lambda m: depth(m + 1))\n"
    for program, name in ((f"{code}depth(0)", None), (code, "depth")):
        problem = {"inputs": ["0", "0"], "outputs": ["0", "0"], "fn_name": name}
        data = {"test": json.dumps(problem)}
        result = submit("LiveCodeBenchDataset", program, data)
        assert not result.accepted and "RecursionError" in str(result.tests[0].test_info)


def test_live_code_bench_names(submit: Submit) -> None:
    names = (
        "date(2020, 1, 2).year, datetime.date.min.year, gcd(4, 6), fmean([1, 2]), dumps([1]), "
        "StringIO('a').read(), deepcopy([1]), findall('a', 'aa'), len(argv), maxsize > 0, "
        "Counter('a')['a'], heappop([1]), ascii_lowercase[0], add(1, 2), reduce(add, [1, 2]), "
        "bisect_left([1], 1), os.sep, List[int] is not None"
    )
    program = f"values = [{names}]\nprint(stdin.readline().strip())"
    head = "class Solution:\n    def f(self, n: Optional[List[int]]) -> int:\n"
    function = f"{head}        return [{names}] and n"
    for code, name in ((program, None), (function, "f")):
        data = {"test": json.dumps({"inputs": ["7"], "outputs": ["7"], "fn_name": name})}
        result = submit("LiveCodeBenchDataset", code, data)
        assert result.accepted, result.tests[0].test_info


def test_rows_made_of_live_code_bench_have_its_preamble(submit: Submit) -> None:
    """In the kinds that the trainer judges them by."""
    deep = "def depth(n):\n    return 0 if n == 0 else 1 + depth(n - 1)\n"
    program = f"{deep}print(depth(int(stdin.readline())))"
    test = [{"input": {"stdin": "3000"}, "output": {"stdout": "3000"}}]
    asserts = ["assert depth(3000) == 3000"]
    for code, kind, data in (
        (program, "CommonOJDataset", {"test": test}),
        (deep, "MBPPDataset", {"test_list": asserts, "entry_point": "depth"}),
        (deep, "HumanEvalDataset", {"test_list": asserts, "entry_point": "depth"}),
    ):
        for comparison in ("", "livecodebench"):
            named = {**data, "comparison": comparison}
            result = submit(kind, code, named)
            assert result.accepted is bool(comparison), kind
    with pytest.raises(ValueError, match="comparison 'tokens' does not apply to asserts"):
        named = {"test_list": asserts, "entry_point": "depth", "comparison": "tokens"}
        submit("MBPPDataset", deep, named)


WRONG: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "digits reversed as text": ("print(input()[::-1])", [("1200", "21"), ("500", "5")]),
    "leading zeros lost": ("print(int(input()))", [("0021", "0021"), ("007", "007")]),
    "cents cut off": (
        "p, n = map(int, input().split())\nprint(p * n // 100)",
        [("12345678 3", "370370.34"), ("99999999 1", "999999.99")],
    ),
    "mean of integers": (
        "a = list(map(int, input().split()))\nprint(sum(a) // len(a) + 1)",
        [("100000 100001", "100000.5"), ("300000 300000 300001", "300000.333333")],
    ),
    "a hash read as a number": ("print(int(float(input())))", [("3e2", "3e2"), ("1e5", "1e5")]),
    "a pyramid without its margin": (
        "n = int(input())\nfor i in range(n): print('*' * (2 * i + 1))",
        [("2", " *\n***"), ("3", "  *\n ***\n*****")],
    ),
    "one decimal for two": ("print(float(input()))", [("7.5", "7.50"), ("2", "2.00")]),
    "columns that are not aligned": ("print('a 1\\nbbb 22')", [("", "a    1\nbbb 22")]),
    "a float for a sum in cents": ("print(100000.90)", [("", "99999.99")]),
    "capitals": ("print(input())", [("aBc", "AbC")]),
    "blank lines lost": ("print('a\\nb')", [("", "a\n\nb")]),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_programs_that_looser_rules_pay(judge_stdio: Submit, name: str) -> None:
    code, pairs = WRONG[name]
    assert not any(case.passed for case in judge_stdio(code, pairs).tests)

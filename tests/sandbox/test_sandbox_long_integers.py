"""Records and tests may contain integers beyond CPython's 4,300 digits, up to a
documented limit.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sandbox_talk import BackgroundLoop, submission

from ctrl_megatron.data.json_lines import read_json_lines_with_places
from ctrl_megatron.data.rows import row_from_record
from ctrl_megatron.data.verl_form import columns_of_verl_row
from ctrl_megatron.problems.long_integers import (
    INTEGER_DIGITS,
    LONG_DIGITS,
    allow_long_integers,
    count_long_run_digits,
    load_long_integer_json,
)
from ctrl_megatron.problems.tests import decode_tests
from ctrl_megatron.rewards.hints import execution_hint
from ctrl_megatron.rewards.leaks import find_leak
from ctrl_megatron.sandbox import SandboxClient
from ctrl_megatron.sandbox.datasets.functions import read_function_tests
from ctrl_megatron.sandbox.wire import EvalResult
from ctrl_megatron.types import Verdict

LONG = "7" * 5000


def number(digits: str) -> int:
    with allow_long_integers():
        return int(digits)


@pytest.mark.parametrize("size", [1, 4300, 4301, 5000, 50_000, INTEGER_DIGITS])
def test_integers_of_json_may_be_long(size: int) -> None:
    text = (
        json.dumps({"a": "1" * size, "b": [0.5, None]})[:-1] + f', "c": [{"9" * size}, -{LONG}]}}'
    )
    read = load_long_integer_json(text)
    assert read == {"a": "1" * size, "b": [0.5, None], "c": [number("9" * size), -number(LONG)]}
    assert load_long_integer_json(text.encode()) == read
    assert sys.get_int_max_str_digits() == 4300, "the limit is lifted meanwhile only"


@pytest.mark.parametrize(
    "text",
    [
        "9" * (INTEGER_DIGITS + 1),
        f"[{','.join(['9' * 20_000] * (LONG_DIGITS // 20_000 + 1))}]",
        f'{{"a": "{"1" * 9000}", "b": {"2" * 500_000}}}',
        f"[{'9' * 5000}",
    ],
)
def test_text_that_would_take_long_is_refused_at_once(text: str) -> None:
    began = time.perf_counter()
    with pytest.raises(json.JSONDecodeError):
        load_long_integer_json(text)
    assert time.perf_counter() - began < 5


def test_text_of_digits_is_no_integer() -> None:
    text = json.dumps(["5" * (LONG_DIGITS + 1), "6" * (2 * INTEGER_DIGITS)])
    assert load_long_integer_json(text) == json.loads(text)


@given(st.lists(st.tuples(st.integers(0, 9000), st.sampled_from(["", "x", ", ", "a b"]))))
def test_every_long_run_is_found(parts: list[tuple[int, str]]) -> None:
    text = "".join("8" * size + between for size, between in parts)
    runs = "".join(c if c.isdigit() else " " for c in text).split()
    assert count_long_run_digits(text) == sum(len(run) for run in runs if len(run) > 4300)


def test_rows_and_problems_of_long_integers_are_read(tmp_path: Path) -> None:
    cases = f'[{{"input": {{"stdin": "{LONG}"}}, "output": {{"stdout": "7"}}, "more": {LONG}}}]'
    assert decode_tests("code_contests", cases) == cases
    assert decode_tests("mbppplus", f'["assert f({LONG}) == 1"]') == (f"assert f({LONG}) == 1",)
    file = tmp_path / "lines.jsonl"
    file.write_text(f'{{"x": {LONG}}}\n')
    assert read_json_lines_with_places(file) == [(f"{file}: line 1", {"x": number(LONG)})]
    file.write_text(f'{{"x": {"9" * (INTEGER_DIGITS + 1)}}}\n')
    with pytest.raises(ValueError, match="line 1 is not JSON: an integer has more than 100000"):
        read_json_lines_with_places(file)
    assert read_function_tests({"test_list": [f"assert f({LONG}) == 1"]}).stubs == ("f",)


def test_a_test_whose_numbers_take_long_to_read_is_refused() -> None:
    tests = [f"assert f({'9' * 90_000}) == 1"] * (LONG_DIGITS // 90_000 + 1)
    with pytest.raises(ValueError, match="long numbers have more than"):
        read_function_tests({"test_list": tests, "entry_point": "f"})


def test_a_service_reads_them_in_every_form(
    client: SandboxClient, on_loop: BackgroundLoop, judge: Callable[..., EvalResult]
) -> None:
    assert judge("def f(x): return x + 1", [f"assert f({LONG}) == {LONG[:-1]}8"]).accepted
    with allow_long_integers():
        functions = {"inputs": [[int(LONG)]], "outputs": [int(LONG) + 1], "fn_name": "f"}
        for data in (functions, json.dumps(functions)):
            request = submission(
                "def f(x):\n    return x + 1",
                dataset_type="APPSDataset",
                provided_data={"input_output": data},
            )
            assert on_loop(client.submit(request)).accepted
    many = {"input_output": {"inputs": [[1]], "outputs": [2], "fn_name": "f", "spare": 0}}
    with allow_long_integers():
        many["input_output"]["spare"] = [int("9" * 9000)] * (LONG_DIGITS // 9000 + 1)  # type: ignore[assignment]
        request = submission("def f(x): return 2", dataset_type="APPSDataset", provided_data=many)
        with pytest.raises(ValueError, match="digits"):
            on_loop(client.submit(request))


@pytest.mark.parametrize(
    "ground_truth",
    [
        f'{{"fn_name": "f", "inputs": [[{LONG}]], "outputs": [{LONG}]}}',
        json.dumps({"fn_name": "f", "inputs": [LONG], "outputs": [LONG]}),
        f'{{"fn_name": "f", "inputs": [[1]], "outputs": [{LONG}]}}',
    ],
)
def test_rows_of_functions_hold_them(ground_truth: str) -> None:
    prompt = [{"role": "user", "content": "Write f."}]
    record = {
        "data_source": "d",
        "prompt": prompt,
        "reward_model": {"ground_truth": ground_truth},
        "extra_info": {"index": 1},
    }
    (test,) = row_from_record(columns_of_verl_row(record), "a row", "prompt").selected_uts
    assert f", {LONG})" in test and f"'{LONG}'" not in test, test[-80:]


def test_rows_of_programs_hold_them_in_any_column() -> None:
    for case in (
        f'{{"input": "{LONG}", "output": "7", "more": {LONG}}}',
        f'{{"input": {{"stdin": "{LONG}"}}, "output": {{"stdout": "7"}}, "more": {LONG}}}',
    ):
        record = {
            **{"id": "a", "problem": "p", "solution": "```python\nprint(7)\n```"},
            **{"prompter_type": "code_contests", "selected_uts": f"[{case}]"},
        }
        attempt = row_from_record(record, "a row", None).attempt()
        verdict = Verdict(passed=(False,), total=1, detail=("wrong",))
        assert "7777" in execution_hint(attempt, verdict).text
        assert not find_leak("It prints nothing.", attempt)


def test_an_exception_carries_them(judge: Callable[..., EvalResult]) -> None:
    test = f"try:\n    f({LONG})\n    assert False\nexcept ValueError as e:\n"
    right = f"{test}    assert e.args == ({LONG},)"
    result = judge("def f(x): raise ValueError(x)", [right, right.replace("7,)", "8,)")])
    assert [case.passed for case in result.tests] == [True, False]

"""Published problem sets in their own formats: small samples made here, and real files if they are
available. The sandbox accepts every reference and refuses a wrong program.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import pickle
import zlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from ctrl_megatron.commands.prepare_data import main
from ctrl_megatron.data.rows import row_of_attempt
from ctrl_megatron.preparation.evalplus import unrolled_tests
from ctrl_megatron.preparation.near_duplicates import NearDuplicates
from ctrl_megatron.preparation.problem_files import problem_record, read_problems
from ctrl_megatron.preparation.published import (
    ProblemLimits,
    number_of_tests,
    read_published,
    select_problems,
)
from ctrl_megatron.prompts import fence_code
from ctrl_megatron.rewards.grading import grading_job, request_verdict
from ctrl_megatron.sandbox import EmbeddedSandbox, SandboxClient
from ctrl_megatron.types import Attempt, Problem

SHARED = Path(__file__).parents[2].parent / "shared" / "data"
needs_data = pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data sets are not here")

TWICE = "def twice(x):\n    return 2 * x\n"
LOOP = """import numpy as np

def assertion(out, exp, atol):
    assert out == exp

inputs = [[1], [2.5], ["inp"]]
results = [2, 5.0, "inpinp"]
for i, (inp, exp) in enumerate(zip(inputs, results)):
    assertion(twice(*inp), exp, 0)
"""
CHECK = "def check(candidate):\n    assert candidate(1) == 2\n    assert candidate(2) == 4\n"
ADDER = "a, b = map(int, input().split())\nprint(a + b)\n"
SUMS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
METHOD = "class Solution:\n    def twice(self, x: int) -> int:\n"
HIDDEN = json.dumps([{"input": "[3, 4]", "output": "7", "testtype": "functional"}])
SAMPLES: dict[str, list[dict[str, Any]]] = {
    "mbpp": [
        {
            "task_id": 601,
            "text": "Write a function to find the chain.",
            "code": "class Pair:\r\n    def __init__(self, a, b):\r\n        self.a = a\r\n"
            "def chain(pairs):\r\n    return len(pairs)",
            "test_setup_code": "",
            "test_list": ["assert chain([Pair(1, 2), Pair(3, 4)]) == 2"],
        }
    ],
    "mbppplus": [
        {"task_id": 2, "prompt": "Double it.", "code": TWICE, "test": LOOP, "test_list": []},
        {
            "task_id": "Mbpp/3",
            "prompt": '"""\nDouble a number.\nassert twice(1) == 2\n"""\n',
            "entry_point": "twice",
            "canonical_solution": f"\n{TWICE}",
            "base_input": [[1], [2]],
            "plus_input": [[[3]], [0.1]],
            "atol": 0,
        },
    ],
    "humaneval": [
        {
            "task_id": "HumanEval/0",
            "prompt": 'def twice(x):\n    """Double x."""\n',
            "entry_point": "twice",
            "canonical_solution": "    return 2 * x\n",
            "test": CHECK,
        }
    ],
    "humanevalplus": [
        {
            "task_id": "HumanEval/1",
            "prompt": 'def twice(x):\n    """Double x."""\n',
            "entry_point": "twice",
            "canonical_solution": "    return 2 * x\n",
            "test": CHECK,
            "base_input": [[1], [2]],
            "plus_input": [["ab"], [[]]],
            "atol": 0,
        },
        {
            "task_id": "HumanEval/2",
            "prompt": 'def twice(x):\n    """Give x doubled."""\n',
            "entry_point": "twice",
            "canonical_solution": "    return 2 * x\n",
            "test": "def assertion(a, b, t):\n    assert a == b\n\ndef check(candidate):\n"
            "    inputs = [[1], ['candidate']]\n    results = [2, 'candidatecandidate']\n"
            "    for i, (inp, exp) in enumerate(zip(inputs, results)):\n"
            "        assertion(candidate(*inp), exp, 0)\n",
        },
    ],
    "apps": [
        {
            "problem_id": 7,
            "question": "Add two numbers.",
            "solutions": json.dumps([ADDER, "x"]),
            "input_output": json.dumps(SUMS),
            "difficulty": "interview",
            "starter_code": "",
        },
        {
            "problem_id": 8,
            "question": "Double a number with a method.",
            "solutions": json.dumps([f"{METHOD}        return 2 * x\n"]),
            "input_output": json.dumps(
                {"fn_name": "twice", "inputs": [[1], [2]], "outputs": [[2], [4]]}
            ),
            "difficulty": "introductory",
            "starter_code": METHOD,
        },
    ],
    "taco": [
        {
            "question": "Add two numbers, please.",
            "solutions": json.dumps([ADDER]),
            "input_output": json.dumps(SUMS),
            "difficulty": "VERY_HARD",
            "starter_code": "",
            "time_limit": "2.5 seconds",
        }
    ],
    "code_contests": [
        {
            "name": "1_A. Sum",
            "description": "Add the two.",
            "public_tests": {"input": ["1 2\n"], "output": ["3\n"]},
            "private_tests": {"input": ["3 4\n"], "output": ["7\n"]},
            "generated_tests": {"input": [], "output": []},
            "solutions": {"language": [2, 3], "solution": ["int main", ADDER]},
            "cf_rating": 1300,
            "time_limit": {"seconds": 3, "nanos": 500000000},
            "input_file": "",
            "output_file": "",
        }
    ],
    "livecodebench": [
        {
            "question_id": "abc301_a",
            "question_content": "Add both numbers.",
            "starter_code": "",
            "difficulty": "easy",
            "public_test_cases": json.dumps([{"input": "1 2", "output": "3", "testtype": "stdin"}]),
            "private_test_cases": base64.b64encode(
                zlib.compress(
                    pickle.dumps('[{"input": "3 4", "output": "7", "testtype": "stdin"}]')
                )
            ).decode(),
            "metadata": "{}",
        },
        {
            "question_id": "2727",
            "question_content": "Add all.",
            "starter_code": "class Solution:\n    def total(self, v: List[int]) -> int:\n        ",
            "difficulty": "hard",
            "public_test_cases": HIDDEN,
            "private_test_cases": "[]",
            "metadata": json.dumps({"func_name": "total"}),
        },
    ],
    "open_r1": [
        {
            "problem_id": "vcp_1",
            "problem": "Solve the following coding problem using the programming language python:"
            "\n\nAdd two numbers.\n\nThe input will be stdin and you should print your solution to "
            "stdout\n\n\nNow solve the problem and return the code.",
            "gold_standard_solution": f"```python\n{ADDER}```",
            "verification_info": {
                "language": "python",
                "test_cases": [
                    {"fn_name": None, "input": i, "output": o, "type": "stdin_stdout"}
                    for i, o in zip(SUMS["inputs"], SUMS["outputs"], strict=True)
                ],
            },
        },
        {
            "problem_id": "vcp_2",
            "prompt": "Double a number.",
            "gold_standard_solution": f"```python\n{TWICE}```",
            "verification_info": json.dumps(
                {
                    "language": "python",
                    "test_cases": [
                        {"fn_name": "twice", "input": "1", "output": "2", "type": "function_call"},
                        {"fn_name": "twice", "input": "[3]", "output": "[3, 3]"},
                    ],
                }
            ),
        },
    ],
    "codeforces": [
        {
            "id": "4/A",
            "title": "Sum",
            "description": "Add both.",
            "input_format": "Two numbers.",
            "output_format": "Their sum.",
            "interaction_format": None,
            "note": "",
            "examples": [{"input": "1 2", "output": "3"}],
            "official_tests": [
                {"input": "1 2\n", "output": "3\n"},
                {"input": "4 4", "output": "8"},
            ],
            "input_mode": "stdio",
            "generated_checker": None,
            "time_limit": 1.5,
            "rating": 1300,
        }
    ],
    "eurus": [
        {
            "data_source": "taco",
            "prompt": [
                {"role": "system", "content": "Think in steps."},
                {
                    "role": "user",
                    "content": "Add two.\n\nWrite Python code to solve the problem. Present the "
                    "code in \n```python\nYour code\n```\nat the end.",
                },
            ],
            "ability": "code",
            "reward_model": {"ground_truth": json.dumps(SUMS), "style": "rule"},
            "extra_info": {"index": 0, "split": "dummy"},
        },
        {
            "data_source": "apps",
            "prompt": [{"role": "user", "content": "Double a number."}],
            "ability": "code",
            "reward_model": {
                "ground_truth": json.dumps(
                    {"fn_name": "twice", "inputs": [[1], [2]], "outputs": [2, 4]}
                ),
                "style": "rule",
            },
            "extra_info": {"index": 0, "split": "dummy"},
        },
    ],
}
ANSWERS = {
    "verl/taco/1": ADDER,
    "verl/apps/2": TWICE,
    "codeforces/4/A": ADDER,
    "livecodebench/abc301_a": ADDER,
    "livecodebench/2727": "class Solution:\n    def total(self, v: List[int]) -> int:\n"
    "        return sum(v)\n",
}
"""References for sets that have none."""


def write(folder: Path, kind: str, suffix: str = ".jsonl") -> Path:
    file = folder / f"{kind}{suffix}"
    if suffix == ".json":
        file.write_text(json.dumps(SAMPLES[kind]))
    elif suffix == ".jsonl":
        file.write_text("".join(json.dumps(record) + "\n" for record in SAMPLES[kind]))
    elif suffix == ".jsonl.gz":
        lines = "".join(json.dumps(record) + "\n" for record in SAMPLES[kind])
        file.write_bytes(gzip.compress(lines.encode()))
    elif suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(SAMPLES[kind]), file)
    else:
        table = pa.Table.from_pylist(SAMPLES[kind])
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    return file


@pytest.fixture
def problems(tmp_path: Path) -> dict[str, Problem]:
    found = [p for kind in SAMPLES for p in read_published(kind, [write(tmp_path, kind)])[0]]
    return {problem.id: problem for problem in found}


def judged(programs: list[tuple[Problem, str]]) -> list[float]:
    async def run(endpoint: str) -> list[float]:
        async with SandboxClient(endpoint) as client:
            jobs = [
                grading_job(
                    fence_code(code),
                    row_of_attempt(
                        Attempt(id=problem.id, problem=problem, solution=fence_code(code))
                    ),
                    run_all_cases=True,
                )
                for problem, code in programs
            ]
            return [(await request_verdict(client, job)).pass_rate for job in jobs]

    with EmbeddedSandbox.start(workers=1) as service:
        return asyncio.run(run(service.endpoint))


HELPED = {
    "task_id": "HumanEval/3",
    "prompt": "import math\nfrom typing import List\n\n\ndef root(x: float) -> float:\n"
    "    return math.sqrt(x)\n\n\ndef roots(xs: List[float]) -> List[float]:\n"
    '    """The root of each."""\n',
    "entry_point": "roots",
    "canonical_solution": "    return [root(x) for x in xs]\n",
    "test": "def check(candidate):\n    assert candidate([4.0, 9.0]) == [2.0, 3.0]\n",
}


@pytest.mark.parametrize(
    "record",
    [HELPED, {key: HELPED[key] for key in HELPED if key != "test"} | {"base_input": [[[4.0]]]}],
    ids=["tests", "inputs only"],
)
def test_an_answer_need_not_repeat_what_its_statement_gives(
    record: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "one.jsonl"
    file.write_text(json.dumps(record) + "\n")
    (problem,) = read_published("humanevalplus", [file])[0]
    answer = "def roots(xs: List[float]):\n    return [root(x) for x in xs]"
    wrong = "def root(x): return x\ndef roots(xs: List[float]):\n    return [root(x) for x in xs]"
    assert judged([(problem, answer), (problem, wrong)]) == [1.0, 0.0]


def test_every_format_becomes_problems_that_are_judged_rightly(
    problems: dict[str, Problem], tmp_path: Path
) -> None:
    assert list(problems) == [
        *("mbpp/601", "mbppplus/2", "mbppplus/3", "HumanEval/0", "HumanEval/1", "HumanEval/2"),
        *("apps/7", "apps/8", "taco/1", "code_contests/1_A. Sum"),
        *("livecodebench/abc301_a", "livecodebench/2727", "open_r1/vcp_1", "open_r1/vcp_2"),
        *("codeforces/4/A", "verl/taco/1", "verl/apps/2"),
    ]
    counts = [number_of_tests(problem) for problem in problems.values()]
    assert counts == [1, 3, 4, 2, 4, 2, 2, 2, 2, 2, 2, 1, 2, 2, 2, 2, 2]
    assert problems["mbpp/601"].entry_point == "chain, Pair"
    assert problems["apps/8"].entry_point == "Solution().twice"
    assert [problems[n].difficulty for n in ("apps/7", "taco/1", "code_contests/1_A. Sum")] == [
        *(2, 4, 2)
    ]
    assert problems["taco/1"].time_limit == 2.5
    # A set's texts around its statements are left out; our prompts have their own words.
    assert problems["open_r1/vcp_1"].statement == "Add two numbers."
    assert problems["verl/taco/1"].statement == "Add two."
    assert problems["codeforces/4/A"].statement == (
        "Add both.\n\nInput\n\nTwo numbers.\n\nOutput\n\nTheir sum.\n\nExample 1\n\nInput:\n1 2"
        "\n\nOutput:\n3"
    )
    assert problems["code_contests/1_A. Sum"].time_limit == 3.5
    # A rule for outputs by the set; asserts have none but for LiveCodeBench's preamble.
    assert {p.id: p.comparison for p in problems.values() if p.comparison} == {
        **dict.fromkeys(("apps/7", "taco/1", "verl/taco/1"), "apps"),
        "open_r1/vcp_1": "tokens",
        **dict.fromkeys(("code_contests/1_A. Sum", "codeforces/4/A"), "code_contests"),
        **dict.fromkeys(("livecodebench/abc301_a", "livecodebench/2727"), "livecodebench"),
    }
    # Our own file holds all of it.
    out = tmp_path / "own.jsonl"
    out.write_text("".join(json.dumps(problem_record(p)) + "\n" for p in problems.values()))
    assert read_problems(out) == list(problems.values())
    right = [(p, ANSWERS.get(p.id, p.reference)) for p in problems.values()]
    wrong = [
        (p, code.replace("2 * x", "3 * x").replace("a + b", "a - b").replace("sum", "max"))
        for p, code in right
        if p.id != "mbpp/601"
    ]
    rates = judged([*right, *wrong])
    assert rates[: len(right)] == [1.0] * len(right)
    # 2 * x and 3 * x are equal where x is empty.
    assert max(rates[len(right) :]) < 1


def test_a_function_may_be_a_method_of_the_class_solution(problems: dict[str, Problem]) -> None:
    """As the judges of the sets with arguments and results have it. A method counts before a
    function, and a class without it does not.
    """
    method = METHOD + "        return 2 * x\n"
    beside = "class Solution:\n    def other(self): return 0\n" + TWICE
    wrong = TWICE + method.replace("2 * x", "3 * x")
    called = [problems[name] for name in ("apps/8", "open_r1/vcp_2", "verl/apps/2")]
    answers = (TWICE, method, beside, wrong)
    rates = judged([(problem, answer) for problem in called for answer in answers])
    assert rates == [1.0, 1.0, 1.0, 0.0] * len(called)


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".json", ".parquet", ".arrow"])
def test_a_set_is_the_same_in_every_kind_of_file(suffix: str, tmp_path: Path) -> None:
    (tmp_path / "as_lines").mkdir()
    lines = write(tmp_path / "as_lines", "apps")
    assert read_published("apps", [write(tmp_path, "apps", suffix)]) == (
        read_published("apps", [lines.parent])
    )


KODCODE = {
    "style": "instruct",
    "question_id": "Prefill_1_I",
    "question": "Write twice(x), which doubles x.",
    "solution": TWICE,
    "test": "import pytest\nfrom solution import twice\n\n"
    "def test_one():\n    assert twice(1) == 2\n\n"
    "def test_text():\n    assert twice('a') == 'aa'\n",
    "test_info": [{"function_name": "twice", "parameter_list": "(x)"}],
    "gpt_difficulty": "easy",
}
CASE = {"input": "1", "output": "2"}
FIRST = {**{kind: rows[0] for kind, rows in SAMPLES.items()}, "kodcode": KODCODE}
FIRST["verl"] = FIRST["eurus"]
MALFORMED: dict[str, tuple[str, dict[str, Any], str]] = {
    "mbpp": ("mbpp", {"test_list": ["assert other(1)"]}, "0 functions"),
    "no code": ("mbpp", {"code": None}, "code"),
    "loop": ("mbppplus", {"test": "for i in ("}, "test"),
    "no loop": ("mbppplus", {"test": "assert True"}, "test"),
    "entry point": ("humaneval", {"entry_point": None}, "entry_point"),
    "no check": ("humaneval", {"test": "x = 1"}, "check"),
    "no JSON": ("apps", {"input_output": "{"}, "input_output"),
    "uneven": ("taco", {"input_output": '{"inputs": ["1"], "outputs": ["1", "2"]}'}, "2 outputs"),
    "no name": ("code_contests", {"name": None}, "name"),
    "uneven cases": ("code_contests", {"public_tests": {"input": ["1"], "output": []}}, "inputs"),
    "no outputs": ("open_r1", {"verification_info": {"test_cases": [{"input": "1"}]}}, "output"),
    "no verification": ("open_r1", {"verification_info": None}, "verification_info"),
    "two functions": (
        "open_r1",
        {"verification_info": {"test_cases": [{**CASE, "fn_name": n} for n in ("f", "g")]}},
        "f, g",
    ),
    "no statement": ("open_r1", {"problem": None}, "problem"),
    "no id": ("codeforces", {"id": None}, "id"),
    "tests of another kind": ("codeforces", {"official_tests": ["1"]}, "official_tests"),
    "no output": ("codeforces", {"official_tests": [{"input": "1"}]}, "outputs"),
    "no ground truth": ("eurus", {"reward_model": {"style": "rule"}}, "ground_truth"),
    "no reward model": ("verl", {"reward_model": "rule"}, "reward_model"),
    "prompt of numbers": ("verl", {"prompt": [1]}, "'prompt' must be a list of messages"),
    "nobody asks": ("verl", {"prompt": [{"role": "system", "content": "?"}]}, "of a user"),
    "no source": ("verl", {"data_source": None}, "data_source"),
    "uneven truth": (
        "verl",
        {"reward_model": {"ground_truth": '{"inputs": ["1"], "outputs": ["1", "2"]}'}},
        "2 outputs",
    ),
    "no import": (
        "kodcode",
        {"test": "def test_it():\n    assert True", "test_info": []},
        "imports nothing from solution",
    ),
    "no Python": ("kodcode", {"test": "def test_it(:"}, "invalid syntax"),
    "blank statement": ("apps", {"question": " "}, "'statement' is empty"),
    # What training would refuse, with the whole file that holds it.
    "too long": ("taco", {"time_limit": "1000 seconds"}, "run_timeout must be in"),
    "no solution": ("kodcode", {"solution": None}, "solution"),
    "broken payload": ("livecodebench", {"private_test_cases": "!"}, "private_test_cases"),
}


@pytest.mark.parametrize(("kind", "change", "named"), MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_row_is_named_by_file_and_row(
    kind: str, change: dict[str, Any], named: str, tmp_path: Path
) -> None:
    right, wrong = FIRST[kind], {**FIRST[kind], **change}
    file = tmp_path / "set.jsonl"
    file.write_text(f"{json.dumps(right)}\n\n{json.dumps(wrong)}\n")
    with pytest.raises(ValueError, match=rf"set\.jsonl: line 3: .*{named}"):
        read_published(kind, [file])
    read, dropped = read_published(kind, [file], skip_malformed=True)
    assert len(read) == 1
    (place,) = dropped.reasons["malformed"]
    assert "set.jsonl: line 3" in place and named in place


@pytest.mark.parametrize(
    ("kind", "change", "why"),
    [
        ("codeforces", {"interaction_format": "Ask."}, "is interactive"),
        ("codeforces", {"generated_checker": "print(1)"}, "has several right outputs"),
        ("codeforces", {"input_mode": "file"}, "reads or writes a file"),
        ("codeforces", {"official_tests": []}, "has no tests"),
        ("open_r1", {"verification_info": {"language": "cpp"}}, "requires a program in cpp"),
        ("open_r1", {"verification_info": {"test_cases": []}}, "has no tests"),
        ("verl", {"reward_model": {"ground_truth": "72"}}, "has an answer in place of tests"),
        ("eurus", {"reward_model": {"ground_truth": "x + 1"}}, "has an answer in place of tests"),
        ("kodcode", {"test": ""}, "has no tests"),
    ],
)
def test_what_cannot_be_judged_is_counted(
    kind: str, change: dict[str, Any], why: str, tmp_path: Path
) -> None:
    file = tmp_path / "set.jsonl"
    file.write_text("".join(json.dumps({**FIRST[kind], **c}) + "\n" for c in ({}, change)))
    read, dropped = read_published(kind, [file])
    assert len(read) == 1 and dropped.counts() == {why: 1}


def test_what_a_file_of_pytest_functions_imports_are_the_entry_points(tmp_path: Path) -> None:
    file = tmp_path / "set.jsonl"
    both = KODCODE["test"].replace("import twice", "import twice, Pair as P")  # type: ignore[attr-defined]
    whole = KODCODE["test"].replace("from solution import twice", "from solution import *")  # type: ignore[attr-defined]
    older = {k: v for k, v in KODCODE.items() if k not in ("test", "test_info", "question_id")}
    rows = [
        KODCODE,
        {**KODCODE, "question_id": "two", "test": both},
        {**KODCODE, "question_id": "all", "test": whole},
        {**older, "test_code": KODCODE["test"], "conversation_id": "older"},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    read, _ = read_published("kodcode", [file])
    assert [(p.id, p.entry_point) for p in read] == [
        ("kodcode/Prefill_1_I", "twice"),
        ("kodcode/two", "twice, Pair"),
        ("kodcode/all", "twice"),
        ("kodcode/older", "twice"),
    ]
    assert read[0].selected_uts == (KODCODE["test"],) and read[0].difficulty == 1


def test_pytest_functions_are_judged_one_by_one(tmp_path: Path) -> None:
    file = tmp_path / "set.jsonl"
    file.write_text(json.dumps(KODCODE) + "\n")
    (problem,) = read_published("kodcode", [file])[0]
    half = "def twice(x):\n    return 2 if x == 1 else 0\n"
    programs = [problem.reference, half, TWICE.replace("2 *", "3 *"), "x = 1"]
    assert judged([(problem, code) for code in programs]) == [1.0, 0.5, 0.0, 0.0]


def test_rows_without_tests_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "apps.jsonl"
    empty = {**SAMPLES["apps"][0], "problem_id": 9, "input_output": ""}
    file.write_text("".join(json.dumps(r) + "\n" for r in [*SAMPLES["apps"], empty]))
    read, dropped = read_published("apps", [file])
    assert len(read) == 2 and dropped.counts() == {"has no tests": 1}


def numbered(number: int, statement: str, **fields: Any) -> Problem:
    return Problem(
        id=f"p/{number}",
        statement=statement,
        prompter_type="mbppplus",
        selected_uts=("assert f()", "assert f(1)", "assert f(2)"),
        entry_point="f",
        **fields,
    )


def test_selection_counts_every_reason() -> None:
    text = "Write a function that returns the sum of all even numbers of a list {}."
    kept, dropped = select_problems(
        [
            numbered(0, text.format("")),
            numbered(1, text.format("given")),
            numbered(2, "Return the largest element of the given tuple of tuples."),
            numbered(3, "x" * 99),
            numbered(4, "Another one, hard.", difficulty=4),
            numbered(5, "Reverse it.", reference="y" * 50),
            numbered(6, "Sort it."),
        ],
        ProblemLimits(max_statement=90, max_difficulty=3, max_reference=40, max_tests=2),
        against=[numbered(9, "return the LARGEST element of the given tuple of tuples")],
    )
    assert [(p.id, len(p.selected_uts)) for p in kept] == [("p/0", 2), ("p/6", 2)]
    assert dropped.reasons == {
        "nearly an earlier problem": ["p/1 (p/0)"],
        "nearly a problem of a test set": ["p/2 (p/9)"],
        "statement longer than 90 characters": ["p/3"],
        "harder than level 3": ["p/4"],
        "reference longer than 40 characters": ["p/5"],
    }
    assert [p.id for p in select_problems(kept, ProblemLimits(min_tests=3))[0]] == []


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_test_sets_that_share_ids_leave_out_what_each_does(copies: int) -> None:
    text = "return the sum of all even numbers in a list of integers given by the user"
    # 8 and 11 shingles, 3 of them shared: 3 / 16, far below 0.7.
    other = "return the sum of all even numbers in a tuple of floats"
    tests = [numbered(9, text)] * copies + [numbered(9, "Reverse the order of the words of it.")]
    kept, dropped = select_problems(
        [numbered(0, text), numbered(1, other)], ProblemLimits(), against=tests
    )
    assert [p.id for p in kept] == ["p/1"]
    assert dropped.reasons == {"nearly a problem of a test set": ["p/0 (p/9)"]}


def test_near_duplicates_are_those_of_the_definition() -> None:
    index = NearDuplicates(words=2, least=0.5)
    index.add("a", "one two three four")
    index.add("b", "one two three four five")
    assert index.find("One, two: three FOUR five") == "b"
    assert index.find("one two three") == "a"  # 2 of 3 shingles, and 2 of 4
    assert index.find("two one") is None and index.find("") is None
    with pytest.raises(ValueError, match="'a'"):
        index.add("a", "six seven eight")


def test_a_loop_is_unrolled_and_other_programs_are_not() -> None:
    entry, tests, setup = unrolled_tests(LOOP, "twice") or ("", (), "")
    assert entry == "twice"
    assert tests[0] == "assertion(twice(*[1]), (2), 0)"
    assert tests[2] == "assertion(twice(*['inp']), ('inpinp'), 0)" or '"inp"' in tests[2]
    assert "def assertion" in setup and "inputs" not in setup
    assert unrolled_tests("assert twice(1) == 2", "twice") is None


def test_the_tool_writes_the_same_file_again_and_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = write(tmp_path, "humanevalplus"), tmp_path / "out" / "problems.jsonl"
    arguments = ["--format", "humanevalplus", "--input", str(file), "--out", str(out)]
    assert main(arguments) == 0
    said, before = capsys.readouterr().out, out.read_bytes()
    assert "2 │ kept" in said
    assert main(arguments) == 0 and out.read_bytes() == before
    fewer = [*arguments, "--max-tests", "1"]
    assert main(fewer) == 2 and out.read_bytes() == before
    assert "--overwrite replaces it" in capsys.readouterr().err
    assert main([*fewer, "--overwrite"]) == 0 and out.read_bytes() != before
    against = ["--against", f"humaneval={write(tmp_path, 'humaneval')}"]
    assert main([*arguments, *against, "--overwrite"]) == 0
    assert "HumanEval/1 (HumanEval/0)" in capsys.readouterr().out


def test_an_id_may_stand_in_one_input_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / f"{name}.jsonl" for name in "ab"]
    for file, statement in zip(files, ("Add two numbers.", "Sort a list of words."), strict=True):
        file.write_text(json.dumps(problem_record(numbered(1, statement))) + "\n")
    out = tmp_path / "out.jsonl"
    arguments = ["--format", "ctrl", "--input", *map(str, files), "--out", str(out)]
    assert main(arguments) == 2 and not out.exists()
    told = capsys.readouterr().err
    told = told.replace("\n", "")
    assert f"{files[1]}: line 1: key 'id' repeats 'p/1' of {files[0]}: line 1" in told


REAL = {
    "mbpp": ("mbpp/mbpp.jsonl", 974),
    "mbppplus": ("mbppplus/MbppPlus-OriginFmt.jsonl.gz", 378),
    "humaneval": ("humaneval/HumanEval.jsonl.gz", 164),
    "humanevalplus": ("humanevalplus/HumanEvalPlus.jsonl.gz", 164),
}


@needs_data
@pytest.mark.parametrize("kind", REAL)
def test_all_rows_of_the_real_sets_load(kind: str, tmp_path: Path) -> None:
    """``tools/check/sandbox_data.py`` judges all their references."""
    file, count = REAL[kind]
    read, dropped = read_published(kind, [SHARED / file], check=False)
    assert len(read) == count and not dropped.reasons
    assert all(number_of_tests(problem) >= 1 and problem.reference for problem in read)
    few = select_problems(read[:: count // 8], ProblemLimits(max_tests=8))[0]
    assert judged([(p, p.reference) for p in few]) == [1.0] * len(few)
    own = tmp_path / "own.jsonl"
    own.write_text(json.dumps(problem_record(read[0])) + "\n")
    assert read_problems(own) == [read[0]]

"""Reward functions and their registry, over a scripted judge."""

from __future__ import annotations

import asyncio
import math
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reward_samples import (
    CORRECT,
    ScriptedSandbox,
    block,
    function_record,
    function_row,
    stdio_row,
    write,
)

from ctrl_megatron.config import load_config
from ctrl_megatron.data.rows import Row
from ctrl_megatron.errors import UserError
from ctrl_megatron.rewards import (
    RewardItem,
    RewardModelForCritic,
    get_reward_factory,
    make_reward,
    register_reward,
    registry,
)
from ctrl_megatron.rewards.build import make_row_check
from ctrl_megatron.rewards.cache import VerdictCache
from ctrl_megatron.rewards.code_rewards import IoiSubtask, code_format_score, ioi_score, subtasks_of
from ctrl_megatron.rewards.grading import row_tests
from ctrl_megatron.rewards.plan import plan_rewards
from ctrl_megatron.run.checks.rewards import check_rows_rewardable
from ctrl_megatron.sandbox.wire import SubmitRequest

ROW = function_row()
WELL = "```python\nx = 1\n```\n"


def rewards(function: Any, *items: RewardItem) -> list[float | None]:
    return asyncio.run(function(list(items)))


def item(text: str = block("pass"), **fields: Any) -> RewardItem:
    return RewardItem(**{"text": text, "row": ROW, **fields})


def by_code(**passes: list[bool]) -> Callable[[SubmitRequest], list[bool | None]]:
    """Verdicts by a word that the program contains."""

    def answer(request: SubmitRequest) -> list[bool | None]:
        return next(list(v) for word, v in passes.items() if word in request.completion)

    return answer


@pytest.mark.parametrize(
    ("text", "score"),
    [
        (WELL, 1.0),
        (f"Some words.\n\n{WELL}", 1.0),
        ("```python\ndef f(x)\n    return x\n```\n", 0.5),
        ("```python\nx = '\\0'\ny = \x00\n```\n", 0.5),
        ("```python\nx = 1\n", 0.0),
        (WELL + WELL, 0.0),
        (f"{WELL}The end.", 0.0),
        (f"{WELL}\n", 0.0),
        ("```\nx = 1\n```\n", 0.0),
        ("```cpp\nint x;\n```\n", 0.0),
        ("words ```python\nx = 1\n```\n", 1.0),
        ("words ```python\nx =\n```\n", 0.5),
        ("```python x = 1\n```\n", 0.0),
        ("```python\nx = 1```\n", 0.0),
        ("````python\nx = 1\n````\n", 0.0),
        ("x = 1", 0.0),
        ("", 0.0),
        ("```python\n```\n", 0.0),
    ],
)
def test_code_format(text: str, score: float) -> None:
    assert code_format_score(text) == score
    assert rewards(make_reward("code_format"), item(text, row=None)) == [score]


def test_the_final_newline_is_required_unless_it_is_not() -> None:
    assert code_format_score(WELL.rstrip()) == 0.0
    assert code_format_score(WELL.rstrip(), final_newline=False) == 1.0
    assert code_format_score(WELL, final_newline=False) == 1.0
    bare = item(WELL.rstrip(), row=None)
    assert rewards(make_reward("code_format", final_newline=False), bare) == [1.0]


@pytest.mark.parametrize(
    "code",
    [
        *("", "# TODO", "pass", "yes", "...", '"""A docstring."""', "1 + 1", "yes, no", "a.b < c"),
        *("def f(x): pass", "def f(x):\n    ...", 'def f(x):\n    """Doc."""', "class A: pass"),
        *("if True:\n    pass", "for _ in ():\n    ...", "while 0: 1", "lambda: f()", "f'{x}'"),
        *(
            "class A:\n    def f(self): ...",
            "try: pass\nexcept E: pass",
            "global x",
            "-" * 900 + "1",
        ),
    ],
)
def test_a_block_that_does_nothing_earns_nothing(code: str) -> None:
    assert code_format_score(f"```python\n{code}\n```\n") == 0.0


@pytest.mark.parametrize(
    "code",
    [
        *("x = 1", "print()", "import os", "def f(x): return x", "class E(Exception): pass"),
        *("if x:\n    y = 1", "(n := 1)", "def f():\n    yield", "for _ in f(): pass", "raise E"),
    ],
)
def test_a_block_that_does_something_is_paid_for(code: str) -> None:
    assert code_format_score(f"```python\n{code}\n```\n") == 1.0


@given(st.text(alphabet="`python\n x=(", max_size=60))
def test_code_format_gives_one_of_three_scores(text: str) -> None:
    assert code_format_score(text) in (0.0, 0.5, 1.0)


def test_code_is_the_pass_rate_and_binary_code_wants_all() -> None:
    judge = ScriptedSandbox(by_code(good=[True] * 3, half=[True, False, True], bad=[False] * 3))
    items = [item(block(word)) for word in ("good", "half", "bad")]
    assert rewards(make_reward("code", provider=judge), *items) == [1.0, pytest.approx(2 / 3), 0.0]
    assert rewards(make_reward("binary_code", provider=judge), *items) == [1.0, 0.0, 0.0]


def test_binary_code_passes_above_its_threshold() -> None:
    row = function_row(selected_uts=[f"assert f({n}) == 1" for n in range(200)])
    judge = ScriptedSandbox(by_code(one=[True] * 199 + [False], two=[True] * 198 + [False] * 2))
    items = [item(block(word), row=row) for word in ("one", "two")]
    assert rewards(make_reward("binary_code", provider=judge), *items) == [1.0, 0.0]  # 0.995, 0.99


def test_a_fault_of_the_provider_is_none_never_zero(caplog: pytest.LogCaptureFixture) -> None:
    judge = ScriptedSandbox(lambda request: [True] * 3)
    for name in ("code", "binary_code"):
        judge.faults_left = 1
        function = make_reward(name, provider=judge)
        assert rewards(function, item(), item(block("x = 2"))) == [None, 1.0]
        assert "1 of 2 programs were not judged: the service is gone" in caplog.text
        # Not remembered either.
        assert rewards(function, item()) == [1.0]


def test_a_setup_error_ends_the_batch() -> None:
    class Refusing:
        async def identity(self) -> str:
            return "refusing"

        async def submit(self, request: SubmitRequest) -> Any:
            raise ValueError("refused")

    with pytest.raises(ValueError, match="refused"):
        rewards(make_reward("code", provider=Refusing()), item(), item(block("x = 2")))


def test_code_may_require_the_format() -> None:
    judge = ScriptedSandbox(lambda request: [True] * 3)
    function = make_reward("code", provider=judge, require_format=True)
    texts = [WELL, WELL.rstrip(), WELL + WELL, "```python\nx =\n```\n"]
    assert rewards(function, *map(item, texts)) == [1.0, 1.0, 0.0, 0.0]
    assert len(judge.requests) == 1


def test_functions_that_share_a_cache_run_a_program_once() -> None:
    judge, cache = ScriptedSandbox(lambda request: [True, True, False]), VerdictCache()
    for name, reward in (("code", pytest.approx(2 / 3)), ("binary_code", 0.0)):
        assert rewards(make_reward(name, provider=judge, cache=cache), item()) == [reward]
    assert len(judge.requests) == 1


@pytest.mark.parametrize(("normalised", "runs"), [(False, 4), (True, 2)])
def test_programs_of_one_normal_form_can_share_a_verdict(normalised: bool, runs: int) -> None:
    judge = ScriptedSandbox(lambda request: [True, "wrong" not in request.completion, True])
    function = make_reward("code", provider=judge, cache=VerdictCache(normalised=normalised))
    texts = [
        "def add(a, b):\n    total = a + b  # sum\n    return total",
        "def add(a, b):\n    result = a+b\n    return result",
        "def add(a, b):\n    wrong = a - b\n    return wrong",
        "def add(a, b):\n    v = a - b  # wrong\n    return v",
    ]
    found = rewards(function, *(item(block(text)) for text in texts))
    assert found == [1.0, 1.0, pytest.approx(2 / 3), pytest.approx(2 / 3)]
    assert len(judge.requests) == runs


def ioi_row(**fields: Any) -> Row:
    subtasks = [{"points": 10, "tests": [0]}, {"points": 30.5, "tests": [0, 1]}]
    return stdio_row(**{"subtasks": subtasks, **fields})


def test_a_subtask_is_worth_its_weakest_test() -> None:
    judge = ScriptedSandbox(
        by_code(both=[True, True], first=[True, False], last=[False, True], none=[False, False])
    )
    items = [item(block(w), row=ioi_row()) for w in ("both", "first", "last", "none")]
    function = make_reward("ioi_code", provider=judge)
    assert rewards(function, *items) == [40.5, 10.0, 0.0, 0.0]
    assert {r.config.language for r in judge.requests} == {"cpp"}
    program = "Python:\n```python\npass\n```\nC++:\n```cpp\n// both\n```\nDone."
    assert rewards(function, item(program, row=ioi_row())) == [40.5]
    assert judge.requests[-1].completion == "```cpp\n// both\n```"
    assert rewards(function, item("// both: no fence", row=ioi_row(language="bash"))) == [40.5]
    assert judge.requests[-1].completion == "```bash\n// both: no fence\n```"
    share = make_reward("ioi_code", provider=judge, normalise=True)
    assert rewards(share, items[1]) == [pytest.approx(10 / 40.5)]


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=6),
    st.lists(st.tuples(st.floats(1, 100), st.sets(st.integers(0, 5), min_size=1)), max_size=5),
)
def test_ioi_score_against_a_plain_loop(
    scores: list[float], groups: list[tuple[float, set[int]]]
) -> None:
    groups = [(points, {test % len(scores) for test in tests}) for points, tests in groups]
    total = 0.0
    for points, tests in groups:
        worst = 1.0
        for test in tests:
            worst = scores[test] if scores[test] < worst else worst
        total += points * worst
    subtasks = [IoiSubtask(points=points, tests=tuple(tests)) for points, tests in groups]
    assert ioi_score(subtasks, scores) == pytest.approx(total, rel=1e-12)


@pytest.mark.parametrize(
    ("subtasks", "told"),
    [
        (None, "subtasks"),
        ([], "subtasks"),
        ("[", "subtasks"),
        ([{"points": 1}], "subtasks"),
        ([{"points": 1, "tests": []}], "tests 0 to 1"),
        ([{"points": 1, "tests": [2]}], "tests 0 to 1"),
        ([{"points": -1, "tests": [0]}], "positive"),
    ],
)
def test_wrong_subtasks_name_the_sample(subtasks: Any, told: str) -> None:
    row = ioi_row(subtasks=subtasks)
    with pytest.raises(ValueError, match=told) as caught:
        subtasks_of(row, 2)
    assert row.id in str(caught.value)
    judge = ScriptedSandbox(lambda request: [True])
    with pytest.raises(ValueError, match=told):
        rewards(make_reward("ioi_code", provider=judge), item(row=row))
    assert not judge.requests


def test_graders_in_the_programs_process_need_permission(caplog: pytest.LogCaptureFixture) -> None:
    """``puts("OK"); exit(0);`` passes for a right program there."""
    rows = [ioi_row(grader_files='{"grader.cpp": "int main() {}"}')]
    apart = ioi_row(checker='{"code": "print(1)"}', grader_files="")
    judge, key = ScriptedSandbox(lambda request: [True, True]), "reward.shared_process_graders"
    for name in ("ioi_code", "code"):
        with pytest.raises(UserError, match=rf"{key}=false: .*print what they would print"):
            rewards(make_reward(name, provider=judge), item(row=rows[0]))
        chosen = [f"reward.reward_funcs=[{name}]"]
        config = load_config(None, chosen, "none")
        with pytest.raises(UserError, match=key):
            make_row_check(config, plan_rewards(config))(rows[0])
        make_row_check(config, plan_rewards(config))(apart)
    config = load_config(None, ["reward.reward_funcs=[ioi_code]", f"{key}=true"], "none")
    make_row_check(config, plan_rewards(config))(rows[0])
    check_rows_rewardable(plan_rewards(config), rows)
    assert "the grader_files of 1 rows" in caplog.text
    assert not judge.requests and row_tests(apart, run_all_cases=True).total == 2
    assert row_tests(rows[0], run_all_cases=True, shared_process_graders=True).total == 2


def test_the_critic_is_a_reward_function(tmp_path: Path) -> None:
    judge = ScriptedSandbox(lambda request: [True, True, False])
    file = write(tmp_path / "rows.parquet", function_record())
    function = make_reward("critic", file=file, tokenizer=None, sandbox=judge, show_progress=False)
    assert isinstance(function, RewardModelForCritic)
    items = [item(critique=CORRECT), item(critique="no judgment")]
    assert rewards(function, *items) == [pytest.approx(2 / 3), 0.0]
    judge.faults_left = 1
    assert rewards(function, item(block("other"), critique=CORRECT)) == [None]


async def halves(items: Sequence[RewardItem], *, scale: float = 1.0) -> list[float | None]:
    return [None if not i.text else 0.5 * scale for i in items]


def lengths(items: Sequence[RewardItem]) -> list[float]:
    return [float(len(i.text)) for i in items]


def patient(items: Sequence[RewardItem], *, heard: threading.Event) -> list[float]:
    """Waits for what the loop does meanwhile."""
    return [float(heard.wait(10.0)) for _ in items]


def wrong(items: Sequence[RewardItem], *, give: Any) -> Any:
    return give


def test_functions_by_import_path() -> None:
    assert rewards(make_reward(f"{__name__}:halves", scale=3.0), item(), item("")) == [1.5, None]
    assert rewards(make_reward(f"{__name__}:lengths"), item("abc")) == [3.0]


def test_a_slow_function_does_not_hold_the_loop() -> None:
    """On which engine and sandbox are asked whether they live."""
    heard = threading.Event()
    reward = make_reward(f"{__name__}:patient", heard=heard)

    async def beside() -> list[float | None]:
        running = asyncio.create_task(reward([item()]))
        await asyncio.sleep(0)
        heard.set()
        return list(await running)

    assert asyncio.run(beside()) == [1.0]


@pytest.mark.parametrize("give", [None, [], [1.0, 2.0], ["1"], [math.nan], [math.inf], [object()]])
def test_a_function_that_gives_nonsense_is_named(give: Any) -> None:
    with pytest.raises(ValueError, match=f"{__name__}:wrong"):
        rewards(make_reward(f"{__name__}:wrong", give=give), item())


NONSENSE = [1e300, -1e300, 1e30, 10**400, "x", b"x", 1j, [1.0], {}]


@pytest.mark.parametrize("value", NONSENSE, ids=repr)
def test_a_value_that_is_no_reward_is_named_with_the_functions_file(value: Any) -> None:
    place = rf"{__name__}:wrong' \(wrong \({__file__} line \d+\)\) returned "
    with pytest.raises(UserError, match=place):
        rewards(make_reward(f"{__name__}:wrong", give=[value]), item())


@pytest.mark.parametrize("answer", [None, 1.0, "ab", {1: 2}, {1.0}, iter([1.0]), torch.ones(2)])
def test_an_answer_that_is_no_list_is_named(answer: Any) -> None:
    with pytest.raises(UserError, match=rf"(?s){__name__}:wrong'.*returned .*a list of 2 rewards"):
        rewards(make_reward(f"{__name__}:wrong", give=answer), item(), item())


def leaves(items: Sequence[RewardItem], *, how: str) -> list[float]:
    if how == "exit":
        sys.exit(3)
    raise ZeroDivisionError("by nothing")


async def leaves_later(items: Sequence[RewardItem], *, how: str) -> list[float]:
    await asyncio.sleep(0)
    return leaves(items, how=how)


def returns_later(items: Sequence[RewardItem], *, how: str) -> Any:
    return leaves_later(items, how=how)


@pytest.mark.parametrize("function", ["leaves", "leaves_later", "returns_later"])
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("exit", r"sys\.exit\(3\)"),
        ("raise", "ZeroDivisionError: by nothing"),
    ],
)
def test_a_function_that_exits_is_reported_with_its_line(
    function: str, how: str, said: str
) -> None:
    """And the event loop, on which engine and sandbox are asked, goes on."""
    reward = make_reward(f"{__name__}:{function}", how=how)
    loop = asyncio.new_event_loop()
    with pytest.raises(UserError, match=rf"{__name__}:{function}'.*{said}.*{__file__} line \d+"):
        loop.run_until_complete(reward([item()]))
    assert loop.run_until_complete(asyncio.sleep(0, "alive")) == "alive"
    loop.close()


async def holds(items: Sequence[RewardItem], *, heard: threading.Event) -> list[float]:
    return [float(heard.wait(10.0)) for _ in items]


def test_a_coroutine_that_blocks_does_not_hold_the_loop() -> None:
    heard = threading.Event()
    reward = make_reward(f"{__name__}:holds", heard=heard)

    async def beside() -> list[float | None]:
        running = asyncio.create_task(reward([item()]))
        await asyncio.sleep(0.01)
        heard.set()
        return list(await running)

    assert asyncio.run(beside()) == [1.0]


def nothing_at_all() -> list[float]:
    return []


def scored(data_source: str, solution: str) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("function", "options", "said"),
    [
        ("nothing_at_all", {}, "too many positional"),
        ("scored", {}, "'solution'"),
        ("lengths", {"scale": 2}, "'scale'"),
        ("halves", {"scales": 2}, "'scales'"),
        ("wrong", {}, "'give'"),
    ],
)
def test_a_signature_that_does_not_fit_is_refused_before_anything_runs(
    function: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=rf"{__name__}:{function}'.*{__file__} line.*{said}"):
        make_reward(f"{__name__}:{function}", **options)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import sys; sys.exit(0)", r"it calls sys\.exit\(0\)"),
        ("raise SystemExit", r"it calls sys\.exit\(\)"),
        ("import no_such_library_here", "no_such_library_here"),
        ("1 / 0", "ZeroDivisionError"),
        ("def f(:", "SyntaxError"),
    ],
)
def test_a_module_that_cannot_be_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, said: str
) -> None:
    (tmp_path / "breaks_when_imported.py").write_text(f"x = 1\n{source}\n")
    monkeypatch.syspath_prepend(tmp_path)
    line = rf"{tmp_path}/breaks_when_imported.py line 2"
    with pytest.raises(UserError, match=rf"breaks_when_imported:f'.*{said}.*{line}"):
        make_reward("breaks_when_imported:f")


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], str]:
    monkeypatch.setattr(registry, "_FACTORIES", dict(registry._FACTORIES))

    def register(factory: Any) -> str:
        register_reward("of_a_project")(factory)
        return "of_a_project"

    return register


def test_a_registered_factory_is_held_to_the_same(registered: Callable[[Any], str]) -> None:
    class Giving:
        def __init__(self, give: Any) -> None:
            if give == "exit":
                sys.exit(1)
            self.give = give

        async def __call__(self, items: Sequence[RewardItem]) -> Any:
            return leaves(items, how=self.give) if isinstance(self.give, str) else self.give

    name = registered(Giving)
    assert rewards(make_reward(name, give=[2]), item()) == [2.0]
    with pytest.raises(UserError, match=r"'of_a_project' cannot be made by .*sys\.exit"):
        make_reward(name, give="exit")
    with pytest.raises(UserError, match=r"'of_a_project' .*Giving.* failed: ZeroDivisionError"):
        rewards(make_reward(name, give="raise"), item())
    for give in (None, [1e300], [1.0, 2.0]):
        with pytest.raises(UserError, match=r"'of_a_project' .*Giving.* returned"):
            rewards(make_reward(name, give=give), item())


@pytest.mark.parametrize(
    "path", ["nowhere:f", f"{__name__}:nothing", ":f", "m:", ".m:f", "math:pi"]
)
def test_an_import_path_that_leads_nowhere_is_named(path: str) -> None:
    with pytest.raises(ValueError, match=path.replace(".", r"\.")):
        make_reward(path)


def test_names_and_options_that_do_not_exist() -> None:
    with pytest.raises(ValueError, match=r"did you mean 'binary_code'.*soft_overlong_punishment"):
        get_reward_factory("binary_cod")
    with pytest.raises(ValueError, match="colour"):
        make_reward("code_format", colour="red")
    with pytest.raises(ValueError, match="provider"):
        make_reward("code")
    with pytest.raises(ValueError, match="item 1"):
        judge = ScriptedSandbox(lambda request: [True] * 3)
        rewards(make_reward("code", provider=judge), item(), item(row=None))


def test_registry() -> None:
    assert get_reward_factory("critic") is RewardModelForCritic
    with pytest.raises(ValueError, match=r"'critics'.*'critic'"):
        get_reward_factory("critics")
    with pytest.raises(ValueError, match="already registered"):
        register_reward("critic")(RewardModelForCritic)

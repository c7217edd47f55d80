"""verl's ``compute_score`` is a reward without changes: by import path and by file."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from typing import Any

import pytest

from ctrl_megatron.data.rows import Row, require_columns
from ctrl_megatron.rewards import RewardItem
from ctrl_megatron.rewards.registry import columns_read_by, make_reward

WHOLE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str.strip() == ground_truth) + extra_info["index"]
"""
FORMS: dict[str, tuple[str, dict[str, Any], list[float]]] = {
    "as verl has it": (WHOLE, {}, [1.0, 2.0]),
    "coroutine": (WHOLE.replace("def", "import asyncio\nasync def"), {}, [1.0, 2.0]),
    "dict": (
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'score': solution_str == ground_truth, 'acc': 1.0, 'pred': solution_str}",
        {},
        [1.0, 0.0],
    ),
    "only what it needs": (
        "def compute_score(solution_str, ground_truth): return len(solution_str + ground_truth)",
        {},
        [2.0, 2.0],
    ),
    "everything that comes": (
        "def compute_score(ground_truth, solution_str, **more):\n"
        "    return len(more['extra_info']) + (more['data_source'] == 'mine/sums')",
        {},
        [2.0, 2.0],
    ),
    "with options": (
        WHOLE.replace("extra_info=None", "extra_info, *, add").replace(
            'extra_info["index"]', "add"
        ),
        {"add": 3},
        [4.0, 3.0],
    ),
    "an object": (
        "class Scorer:\n"
        "    def __call__(self, data_source, solution_str, ground_truth, extra_info):\n"
        "        return 0.5\n"
        "compute_score = Scorer()",
        {},
        [0.5, 0.5],
    ),
    "an object with a coroutine": (
        "class Scorer:\n"
        "    async def __call__(self, data_source, solution_str, ground_truth, extra_info):\n"
        "        return 0.5\n"
        "compute_score = Scorer()",
        {},
        [0.5, 0.5],
    ),
}


def row(number: int, **changes: Any) -> Row:
    extra = {
        "data_source": "mine/sums",
        "reward_model": {"style": "rule", "ground_truth": "7"},
        "extra_info": {"index": number},
    }
    extra = {name: value for name, value in {**extra, **changes}.items() if value is not None}
    return Row(id=f"sums/{number}", extra=extra, place=f"train.parquet: row {number + 1}")


ITEMS = [RewardItem(text="7", row=row(0)), RewardItem(text="8", row=row(2))]


def scores(name: str, items: list[RewardItem], **options: Any) -> list[float | None]:
    async def run() -> list[float | None]:
        return list(await make_reward(name, **options)(items))

    return asyncio.run(run())


def written(folder: Path, text: str) -> str:
    """The name of the function in a file of its own."""
    file = folder / "my_reward.py"
    file.write_text(text)
    return f"{file}:compute_score"


@pytest.mark.parametrize(("text", "options", "wanted"), FORMS.values(), ids=FORMS)
def test_every_form_gives_its_scores(
    text: str, options: dict[str, Any], wanted: list[float], tmp_path: Path
) -> None:
    name = written(tmp_path, text)
    assert scores(name, ITEMS, **options) == wanted
    assert columns_read_by(name) == ("data_source", "reward_model")


def test_a_file_is_named_from_where_the_command_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, WHOLE)
    monkeypatch.chdir(tmp_path)
    for name in ("my_reward.py:compute_score", "./my_reward.py:compute_score"):
        assert scores(name, ITEMS) == [1.0, 2.0]


def test_a_file_may_hold_a_function_of_all_items(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def lengths(items): return [len(i.text) for i in items]")
    assert scores(f"{tmp_path}/own.py:lengths", ITEMS) == [1.0, 1.0]


def test_coroutines_run_at_once(tmp_path: Path) -> None:
    text = (
        "import asyncio\nheard = asyncio.Event()\n"
        "async def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    if extra_info['index']:\n        heard.set()\n"
        "    await asyncio.wait_for(heard.wait(), 10)\n"
        "    return 1.0\n"
    )
    assert scores(written(tmp_path, text), ITEMS) == [1.0, 1.0]


RAISES = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    {0}\n"
WRONG = {
    "raises": ("return 1 / 0", "ZeroDivisionError: division by zero"),
    "None": ("return None", "returned None for row sums/0"),
    "nothing": ("pass", "returned None for row sums/0"),
    "dict without a score": ("return {'acc': 1.0}", "a dict with the keys acc for row sums/0"),
    "score of None": ("return {'score': None}", "a dict with the keys score for row sums/0"),
    "text": ("return 'good'", "'good'"),
    "nan": ("return float('nan')", "nan"),
    "key of another set": ("return extra_info['answer']", "KeyError: 'answer'"),
}


@pytest.mark.parametrize("form", ["{0}", "async {0}"], ids=["plain", "coroutine"])
@pytest.mark.parametrize(("body", "said"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_named_by_file_and_row(
    body: str, said: str, form: str, tmp_path: Path
) -> None:
    name = written(tmp_path, form.format(RAISES.format(body)))
    with pytest.raises(ValueError, match=r"my_reward\.py") as raised:
        scores(name, ITEMS)
    text = str(raised.value)
    assert said in text and "\n" not in text, text
    if "Error" in said:
        assert "my_reward.py line 2" in text and "row sums/0" in text


def test_a_row_without_a_ground_truth_is_named(tmp_path: Path) -> None:
    name = written(tmp_path, WHOLE)
    with pytest.raises(ValueError, match=r"parquet: row 1: column 'reward_model' is missing"):
        require_columns([row(0, reward_model=None)], columns_read_by(name), "the reward")
    bare = RewardItem(text="7", row=row(0, reward_model={"style": "rule"}))
    with pytest.raises(ValueError, match="row 1: column 'reward_model' has no ground_truth"):
        scores(name, [bare])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def other(): pass", "has no attribute 'compute_score'"),
        ("def compute_score(:", "SyntaxError"),
        ("import nowhere", "No module named 'nowhere'"),
        ("compute_score = 1", "is not callable"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(text: str, said: str, tmp_path: Path) -> None:
    name = written(tmp_path, text)
    for _ in range(2):  # what failed once is not there the second time
        with pytest.raises(ValueError, match=said) as raised:
            make_reward(name)
        assert str(tmp_path / "my_reward.py") in str(raised.value)
    with pytest.raises(ValueError, match=r"none\.py.*No such file"):
        make_reward(f"{tmp_path}/none.py:compute_score")


def test_its_further_parameters_are_its_options(tmp_path: Path) -> None:
    """So that who makes it can check them."""
    from ctrl_megatron.rewards.registry import _imported

    name = written(tmp_path, WHOLE.replace("extra_info=None", "extra_info, *, scale, bonus=0"))
    assert str(inspect.signature(_imported(name))) == "(items, /, *, scale, bonus=0)"

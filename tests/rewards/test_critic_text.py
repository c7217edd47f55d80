"""The text side of RewardModelForCritic, and what importing the room costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from reward_samples import function_record, stdio_record, write

from ctrl_megatron.prompts import REVISION_SENTENCE
from ctrl_megatron.rewards import RewardModelForCritic


class LetterTokenizer:
    """Token n is the n-th letter, 0 the end of a sequence."""

    eos_token = "<|end|>"

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens is False
        return "".join(self.eos_token if token == 0 else chr(96 + token) for token in ids)


def mixed(tmp_path: Path) -> RewardModelForCritic:
    files = [
        write(tmp_path / "a.parquet", function_record("add/0")),
        write(tmp_path / "b.parquet", stdio_record("sum/0")),
    ]
    return RewardModelForCritic(files, LetterTokenizer())


def batch() -> dict[str, Any]:
    # Prompts of width 2 (the second row's is padded), responses of width 4.
    return {
        "prompts": [[9, 9], [0, 9]],
        "responses": [[1, 2, 0, 0], [3, 4, 5, 6]],
        "attention_mask": [[1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1]],
        "problem_id": ["add/0", "sum/0"],
    }


def test_parse_response_cuts_at_the_mask_and_deletes_every_end_token(tmp_path: Path) -> None:
    expected = (["add/0", "sum/0"], ["ab", "cdef"], [3, 4])
    assert mixed(tmp_path).parse_response(batch()) == expected


def test_parse_response_takes_tensordicts(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    tensordict = pytest.importorskip("tensordict")
    data = batch()
    tensors = {
        name: torch.tensor(data[name]) for name in ("prompts", "responses", "attention_mask")
    }
    batched = tensordict.TensorDict(tensors, batch_size=[2])
    batched["problem_id"] = tensordict.NonTensorStack(*data["problem_id"])
    assert mixed(tmp_path).parse_response(batched) == (["add/0", "sum/0"], ["ab", "cdef"], [3, 4])


def test_parse_response_prints_as_many_as_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reward_model = mixed(tmp_path)
    reward_model.parse_response(batch())
    assert capsys.readouterr().out == ""
    reward_model.num_examine = 1
    reward_model.parse_response(batch())
    shown = capsys.readouterr().out
    assert "ab" in shown
    assert "cdef" not in shown


def test_parse_query_gives_the_dialogue_with_the_raw_answer(tmp_path: Path) -> None:
    dialogues, rows = mixed(tmp_path).parse_query(["sum/0", "add/0"])
    assert [row.id for row in rows] == ["sum/0", "add/0"]
    assert [message["role"] for message in dialogues[1]] == ["user", "assistant"]
    assert "Add two numbers." in dialogues[1][0]["content"]
    assert dialogues[1][1]["content"] == function_record()["solution"]
    assert "standard input" in dialogues[0][0]["content"]


def test_parse_query_knows_only_its_ids(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="add/7"):
        mixed(tmp_path).parse_query(["add/0", "add/7"])


def test_revision_messages_sanitize_in_place_and_return_a_new_list() -> None:
    reward_model = RewardModelForCritic.__new__(RewardModelForCritic)
    messages = [
        {"role": "user", "content": "Add."},
        {"role": "assistant", "content": "Sure:\n```python\nx = 1\n```\nOk?"},
    ]
    result = reward_model.build_revision_messages(messages, "  <format>\nfix it\n</format> ")
    assert len(messages) == 2
    assert messages[1]["content"] == "```python\nx = 1\n```"
    assert result == [*messages, {"role": "user", "content": f"fix it\n\n{REVISION_SENTENCE}"}]


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        (({"role": "assistant", "content": "x"},), AssertionError),
        ([{"role": "user", "content": "x"}], AssertionError),
        ([], IndexError),
    ],
)
def test_revision_messages_refuse_other_dialogues(messages: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        RewardModelForCritic.__new__(RewardModelForCritic).build_revision_messages(messages, "c")


def test_importing_rewards_prompts_and_synthesis_loads_no_heavy_library() -> None:
    heavy = (
        "torch",
        "transformers",
        "vllm",
        "megatron",
        "tensordict",
        "pandas",
        "pyarrow",
        "numpy",
    )
    code = (
        "import sys, ctrl_megatron.rewards, ctrl_megatron.prompts\n"
        "import ctrl_megatron.preparation.synthesis\n"
        "from ctrl_megatron.rewards import RewardModelForCritic, sanitize, desanitize\n"
        "from ctrl_megatron.rewards import normalize_code, MAX_REQUESTS, RUN_TIMEOUT\n"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

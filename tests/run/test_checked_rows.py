"""The check of a run's rows: what is refused, left out, sent, and shared between ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ctrl_megatron.background import BackgroundLoop
from ctrl_megatron.config import load_config
from ctrl_megatron.data.prompt_table import PromptTable
from ctrl_megatron.data.rows import Row, row_from_record
from ctrl_megatron.errors import ServiceFault, UserError
from ctrl_megatron.parallel.stop import StopFlag
from ctrl_megatron.rewards.plan import plan_rewards
from ctrl_megatron.run.checked_rows import inputs_with_checked_tests
from ctrl_megatron.run.inputs import RunInputs
from ctrl_megatron.sandbox import EmbeddedSandbox

GOOD = ("assert add(1, 2) == 3", "assert add(4, 4) is not None")
EMPTY = ("assert add(1, 2) is not None",)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with EmbeddedSandbox.start(workers=2) as service:
        yield service.endpoint


def row(folder: Path, number: int, tests: tuple[str, ...] = GOOD, **fields: Any) -> Row:
    record = {"id": f"r{number}", "problem": "Add.", "solution": "pass", "entry_point": "add"}
    record |= {"prompter_type": "mbppplus", "selected_uts": list(tests), "time_limit": 2.0}
    return row_from_record(record | fields, f"{folder}/train.parquet: row {number}", None)


def started(folder: Path, endpoint: str, rows: list[Row], *keys: str, rank: Any = None) -> Any:
    """The inputs after the check on rank 0, or on another one that gets what ``rank`` was told."""
    overrides = ["data.train_files=a.parquet", *keys]
    overrides += [f"sandbox.endpoint={endpoint}"] if endpoint else []
    overrides += [f"trainer.default_local_dir={folder}/runs"]
    config = load_config(None, overrides, "none")
    table = PromptTable(rows=tuple(rows), prompts=((1,),) * len(rows), dropped=0)
    plan = plan_rewards(config, ("critic",))
    inputs: Any = RunInputs(
        codec=None,  # type: ignore[arg-type]
        train=table,
        validation=table,
        rewards=plan,
        max_model_len=8,
    )
    told: list[Any] = []

    def from_first(value: Any) -> Any:
        told.append(value if rank is None else rank)
        return told[0]

    everyone = SimpleNamespace(
        is_first=rank is None, broadcast_from_first=from_first, any_rank=lambda *flags: flags
    )
    loop = BackgroundLoop()
    run: Any = SimpleNamespace(
        config=config, all_ranks=everyone, background=loop, stop=StopFlag(), at_end=[]
    )
    try:
        return inputs_with_checked_tests(run, inputs), told
    finally:
        loop.close()


def test_a_row_without_a_test_that_counts_is_refused_or_left_out(
    endpoint: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [row(tmp_path, 1), row(tmp_path, 2, EMPTY), row(tmp_path, 3, reference="add = max")]
    with pytest.raises(UserError, match=r"row 2: 'r2': none of its tests counts") as refused:
        started(tmp_path, endpoint, rows)
    assert "data.bad_rows=drop" in str(refused.value)
    inputs, told = started(tmp_path, endpoint, rows, "data.bad_rows=drop")
    assert [(r.id, r.uncounted) for r in inputs.train.rows] == [("r1", (1,))]
    assert inputs.validation is inputs.train and len(inputs.train.prompts) == 1
    assert [text.split("'")[1] for text in inputs.train.bad] == ["r2", "r3"]
    assert "2 rows of data.val_files are left out" in inputs.bad_row_warnings()[0]
    assert caplog.text.count("a test does not count") >= 1

    # The other ranks get the results and judge nothing; a second start needs no service.
    (elsewhere, _) = started(
        tmp_path, "http://127.0.0.1:9", rows, "data.bad_rows=drop", rank=told[0]
    )
    assert elsewhere.train.rows == inputs.train.rows
    (again, _) = started(tmp_path, "http://127.0.0.1:9", rows, "data.bad_rows=drop")
    assert again.train.rows == inputs.train.rows


def test_too_few_rows_for_a_step_are_refused(endpoint: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no row is left to use"):
        started(tmp_path, endpoint, [row(tmp_path, 1, EMPTY)], "data.bad_rows=drop")


def test_a_provider_has_no_such_check_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = ("reward.provider=sandbox_fusion", "reward.provider_options={url: 'http://127.0.0.1:9'}")
    inputs, _ = started(tmp_path, "", [row(tmp_path, 1, EMPTY)], *keys)
    assert [r.id for r in inputs.train.rows] == ["r1"]
    assert "left out with reward.provider=sandbox_fusion" in capsys.readouterr().out


def test_a_sandbox_that_fails_ends_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "ctrl_megatron.sandbox.client.sandbox_client.backoff_seconds", lambda *_: 0.0
    )
    with pytest.raises(ServiceFault, match=r"row 1: 'r1' is not checked: sandbox http"):
        started(tmp_path, "http://127.0.0.1:9", [row(tmp_path, 1)])

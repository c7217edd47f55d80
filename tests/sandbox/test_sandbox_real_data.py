"""Samples of real solutions with known verdicts; tools/check/sandbox_data.py checks all of them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from sandbox_talk import BackgroundLoop

from ctrl_megatron.sandbox import SandboxClient
from tools.check.sandbox_data import (
    SETS,
    SOLUTIONS_LEFT_OUT,
    Known,
    Outcome,
    check,
    human_eval_pack,
    human_eval_pack_buggy,
    main,
    samples,
    solutions,
)

mbpp, human_eval = SETS["mbpp"][0], SETS["humaneval"][0]
# They pass objects of the program or types, or measure values.
OBJECTS_MBPP = {f"mbpp/{number}" for number in (367, 533, 596, 601, 927)}

Check = Callable[..., Outcome]


def sampled(nth: int) -> pytest.MarkDecorator:
    """Run a test with every ``nth`` program, and with all of them in ``make test-long``."""
    everything = pytest.param(1, id="all", marks=pytest.mark.long)
    return pytest.mark.parametrize("nth", [pytest.param(nth, id="sample"), everything])


@pytest.fixture
def agreement(client: SandboxClient, on_loop: BackgroundLoop) -> Check:
    def call(known: Sequence[Known], seconds: float = 20.0) -> Outcome:
        return on_loop(check(client, known, seconds=seconds, at_once=4))

    return call


@sampled(16)
def test_mbpp_references_pass(agreement: Check, shared_data: Path, nth: int) -> None:
    everything = list(mbpp(shared_data))
    assert len(everything) == 974
    chosen = everything[::nth] + [known for known in everything if known.name in OBJECTS_MBPP]
    assert all(known.verdicts is True for known in everything)
    assert agreement(chosen).differences == ()


@sampled(8)
@pytest.mark.parametrize("read", [human_eval, human_eval_pack])
def test_human_eval_references_pass(
    agreement: Check, shared_data: Path, read: Callable[..., object], nth: int
) -> None:
    everything = list(read(shared_data))  # type: ignore[call-overload]
    assert len(everything) == 164
    assert agreement(everything[::nth]).differences == ()


def test_human_eval_answers_without_the_prompts_imports_and_helpers_pass(
    agreement: Check, shared_data: Path
) -> None:
    """The function alone, as models write it."""
    alone = []
    for known in human_eval_pack(shared_data):
        body = ast.parse(known.code).body
        entry = known.data["entry_point"]
        function = [node for node in body if getattr(node, "name", None) == entry]
        if len(function) < len(body):
            alone.append(replace(known, code="\n".join(map(ast.unparse, function))))
    assert len(alone) == 26
    assert agreement(alone).differences == ()


@sampled(8)
def test_buggy_versions_do_not_pass(agreement: Check, shared_data: Path, nth: int) -> None:
    everything = list(human_eval_pack_buggy(shared_data))
    assert len(everything) == 164
    # A loop that never ends is wrong after a second too.
    assert agreement(everything[::nth], seconds=1.0).differences == ()


def test_samples_in_the_request_formats_of_other_services(
    agreement: Check, shared_data: Path
) -> None:
    everything = list(samples(shared_data))
    assert len(everything) == 23
    assert agreement(everything).differences == ()


@sampled(32)
def test_known_verdicts_are_reproduced(agreement: Check, shared_data: Path, nth: int) -> None:
    everything = list(solutions(shared_data))
    assert len(everything) == 3496 - len(SOLUTIONS_LEFT_OUT)
    chosen = everything[::nth]
    outcome = agreement(chosen, seconds=5.0)
    assert outcome.total > 4 * len(chosen)
    assert outcome.share >= 0.995, outcome.differences


def test_a_wrong_expectation_is_reported(client: SandboxClient, on_loop: BackgroundLoop) -> None:
    data = {"test_list": ["assert f(1) == 1", "assert f(2) == 1"]}
    known = [
        Known(name="right", code="f = abs", kind="MBPPDataset", data=data, verdicts=(True, False)),
        Known(name="wrong", code="f = abs", kind="MBPPDataset", data=data, verdicts=(True, True)),
        Known(name="loose", code="f = abs", kind="MBPPDataset", data=data, verdicts=True),
    ]
    outcome = on_loop(check(client, known, seconds=5.0, at_once=2))
    assert (outcome.agreed, outcome.total) == (3, 5)
    assert outcome.differences == (
        "wrong: test 1: AssertionError: f(2) returned 2",
        "loose: test 1: AssertionError: f(2) returned 2",
    )


def test_the_command_ends_with_one_when_a_set_misses_its_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mbpp").mkdir()
    row = '{"task_id": 1, "text": "f", "code": "def f(): return 1", "test_setup_code": "", '
    row += '"test_list": %s}\n'
    file = tmp_path / "mbpp" / "mbpp.jsonl"
    arguments = ["check", "--data", str(tmp_path), "--sets", "mbpp", "--workers", "1"]
    monkeypatch.setattr("sys.argv", arguments)
    for test, status in (("assert f() == 1", 0), ("assert f() == 2", 1)):
        file.write_text(row % f'["{test}"]')
        assert main() == status
    assert "mbpp: 0 of 1 (0.00%)\n  mbpp/1: test 0: AssertionError" in capsys.readouterr().out

"""The study's tables follow from kept files: every table from small made ones, with numbers by
hand."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from ctrl_megatron.errors import UserError
from ctrl_megatron.eval.transcripts import Turn, turn_to_json
from ctrl_megatron.preparation.mutants import BLAND, oracle_critique
from ctrl_megatron.types import Verdict
from examples.study_smollm2 import study
from examples.study_smollm2 import tables as study_tables
from examples.study_smollm2.plan import HOME, KEPT, ROUNDS

RIGHT, WRONG = Verdict(passed=(True,), total=1), Verdict(passed=(False,), total=1)


def verdict(rate: float) -> Verdict:
    return Verdict(passed=tuple(n < 4 * rate for n in range(4)), total=4)


def turn(arm: str, problem: int, **changed: object) -> Turn:
    fields: dict[str, object] = {
        **{"critic": arm, "seed": 1, "problem_id": f"p{problem}", "difficulty": 0, "sample": 0},
        **{"attempt": f"p{problem}/0", "turn": 1, "solution": "a", "revision": "b"},
        **{"critique": "Overall judgment: Incorrect", "judgment": False},
        **{"before": WRONG, "after": RIGHT, "critique_tokens": 10, "revision_tokens": 5},
    }
    return Turn(**fields | changed)  # type: ignore[arg-type]


def write(folder: Path, setting: str, turns: Iterable[Turn]) -> None:
    turns = list(turns)
    path = study_tables.kept_file(folder, setting, turns[0].critic, turns[0].seed)
    text = "".join(json.dumps(turn_to_json(turn)) + "\n" for turn in turns)
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def passing(arm: str, seed: int, rate: float, **changed: object) -> list[Turn]:
    before, after = verdict(0.25), verdict(rate)
    return [turn(arm, n, seed=seed, before=before, after=after, **changed) for n in range(4)]


def rows_of(text: str) -> dict[str, list[str]]:
    """First cell -> the other cells of its last row."""
    lines = [line[2:-2].split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {cells[0]: cells[1:] for cells in lines}


def test_tables_and_plots_come_from_transcripts_alone(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no transcript yet"):
        study_tables.write_tables(tmp_path, tmp_path)
    write(tmp_path, "unseen_mutants", passing("oracle", 1, 1.0))
    for seed in (1, 2):
        write(tmp_path, "unseen_mutants", passing("SFT", seed, 0.5))
        write(tmp_path, "unseen_mutants", passing("SFT + GRPO", seed, 0.75))
    write(tmp_path, "unseen_mutants", passing("SFT + PPO", 3, 0.75))
    study_tables.write_tables(tmp_path, tmp_path)
    files = [tmp_path / "tables.md", tmp_path / "unseen_mutants.svg"]
    before = [file.read_bytes() for file in files]
    text = files[0].read_text()
    rates = rows_of(text.partition("Gains by seed")[0])
    assert rates["first solutions"][1] == "0.250 [0.250, 0.250]"
    assert rates["oracle"][:2] == ["1", "1.000 [1.000, 1.000]"] and rates["oracle"][-1] == ""
    assert rates["SFT"][:2] == ["1, 2", "0.500 [0.500, 0.500]"] and rates["SFT"][-1] == ""
    assert rates["SFT + GRPO"][1] == "0.750 [0.750, 0.750]"
    assert rates["SFT + GRPO"][-1] == "0.250 [0.250, 0.250]"
    # A gain for each seed that both have; what was not run is open.
    gains = rows_of(text.partition("Gains by seed")[2].partition("Critiques")[0])
    assert gains["SFT + GRPO"] == ["0.250 [0.250, 0.250]", "0.250 [0.250, 0.250]", "open"]
    assert rates["SFT + PPO"][-1] == "open" and gains["SFT + PPO"] == ["open"] * 3
    study_tables.write_tables(tmp_path, tmp_path)
    assert [file.read_bytes() for file in files] == before


def test_a_kept_table_is_that_of_its_transcripts() -> None:
    turns = study_tables.arms_of(study_tables.kept_turns(KEPT, "unseen_problems"))["oracle"]
    edits = study_tables.edits_table({"oracle": turns}).splitlines()[-1]
    rate = study_tables.told(study_tables.result_of(turns).last_turn_rates["pass_rate"])
    kept = (HOME / "tables.md").read_text()
    assert f"\n{edits}\n" in kept and f"\n| oracle | 1 | {rate} |" in kept
    assert sum(file.stat().st_size for file in KEPT.iterdir()) <= 5e6


@pytest.mark.long
def test_all_kept_tables_and_figures_are_those_of_the_kept_files(tmp_path: Path) -> None:
    study_tables.write_tables(KEPT, tmp_path)
    made = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert made.keys() >= {"tables.md", "unseen_mutants.svg"}
    assert made == {name: (HOME / name).read_bytes() for name in made}


def test_gains_are_shown_by_the_tests_that_the_first_solution_passes(tmp_path: Path) -> None:
    # Programs 0 to 2 pass none, a quarter and all but one of four tests; GRPO repairs the first
    # and breaks the last.
    for arm, after in {"SFT": (0, 0.25, 0.75), "SFT + GRPO": (1, 0.25, 0.5)}.items():
        firsts = zip((0, 0.25, 0.75), after, strict=True)
        turns = [
            turn(arm, n, before=verdict(first), after=verdict(rate))
            for n, (first, rate) in enumerate(firsts)
        ]
        write(tmp_path, "unseen_mutants", turns)
    arms = study_tables.arms_of(study_tables.kept_turns(tmp_path, "unseen_mutants"))
    lines = study_tables.firsts_table(arms).splitlines()[2:]
    rows = [[cell.partition(" [")[0] for cell in line[2:-2].split(" | ")] for line in lines]
    assert rows == [
        ["SFT + GRPO", "none", "1", "0.000", "0.000", "1.000", "1.000"],
        ["SFT + GRPO", "up to a quarter", "1", "0.250", "0.250", "0.250", "0.000"],
        ["SFT + GRPO", "more", "1", "0.750", "0.750", "0.500", "-0.250"],
    ]
    low = {arm: [t for t in turns if t.attempt == "p0/0"] for arm, turns in arms.items()}
    assert study_tables.firsts_table(low) == ""


def test_critiques_that_contain_the_program_are_counted_and_cut_out(tmp_path: Path) -> None:
    program = "def f(number):\n    total = number + 1\n    return total * number"
    told = f"Write this:\n```python\n{program}\n```"
    half = "Write `def f(number):` and `total = number + 1`."
    for arm, critiques in {"SFT": ["no"] * 4, "SFT + GRPO": [told, half, "no", None]}.items():
        turns = [
            turn(arm, n, critique=text, revision=program, critique_tokens=0 if text is None else 10)
            for n, text in enumerate(critiques)
        ]
        write(tmp_path, "unseen_mutants", turns)
    arms = study_tables.arms_of(study_tables.kept_turns(tmp_path, "unseen_mutants"))
    rows = rows_of(study_tables.critiques_table(arms))
    starts = [cell.partition(" ")[0] for cell in rows["SFT + GRPO"]]
    # Two of four contain most lines (3 of 3 and 2 of 3), one all of them; two repairs are left.
    assert starts == ["10.0", "0.500", "0.250", "0.500", "-0.500"]
    assert [cell.partition(" ")[0] for cell in rows["SFT"]] == [
        "10.0",
        "0.000",
        "0.000",
        "1.000",
        "",
    ]


def test_edits_that_critiques_ask_for_are_compared_with_the_oracles(tmp_path: Path) -> None:
    def asking(wrong: str, right: str) -> str:
        return f"Analysis: no.\nImprovement suggestions: Use `{right}` instead of `{wrong}`.\n"

    code, repaired = "def f(a, b):\n    return a - b + 1", "def f(a, b):\n    return a + b + 1"
    oracle = "Improvement suggestions: Replace `a - b` with `a + b`.\nOverall judgment: Incorrect"
    said = (
        # The repair, done; another edit at the fault, not done; an edit elsewhere, done; nothing.
        (asking("a - b + 1", "a + b + 1"), repaired),
        (asking("a - b", "b - a"), code),
        (asking("def f(a, b)", "def f(b, a)"), code.replace("(a, b)", "(b, a)")),
        (asking("x", "y"), code),
    )
    turns = [turn("oracle", n, solution=code, critique=oracle, revision=code) for n in range(4)]
    write(tmp_path, "unseen_mutants", turns)
    turns = [
        turn("SFT", n, solution=code, critique=critique, revision=revision)
        for n, (critique, revision) in enumerate(said)
    ]
    write(tmp_path, "unseen_mutants", turns)
    arms = study_tables.arms_of(study_tables.kept_turns(tmp_path, "unseen_mutants"))
    rows = rows_of(study_tables.edits_table(arms))
    assert [cell[:5] for cell in rows["oracle"]] == ["1.000", "1.000", "1.000", "0.000"]
    assert [cell[:5] for cell in rows["SFT"]] == ["0.750", "0.500", "0.250", "0.667"]
    del arms["oracle"]
    assert study_tables.edits_table(arms) == ""


@pytest.mark.parametrize("wording", range(3))
def test_every_wording_of_an_edit_is_read(wording: int) -> None:
    critique = oracle_critique("a < b", "a <= b", wording)
    assert study_tables.asked_edit(critique) == ("a < b", "a <= b")
    assert study_tables.asked_edit(BLAND) is None is study_tables.asked_edit(None)


def test_critics_are_compared_over_the_proxies_that_revised(tmp_path: Path) -> None:
    write(tmp_path, "unseen_mutants", passing("SFT", 1, 0.5))
    write(tmp_path, "unseen_mutants", passing("SFT + GRPO", 1, 0.75))
    assert study_tables.proxies_part(tmp_path) == ""
    write(tmp_path, "unseen_mutants-untuned", passing("SFT + GRPO", 1, 0.25))
    rows = rows_of(study_tables.proxies_part(tmp_path))
    exact = {rate: f"{rate:.3f} [{rate:.3f}, {rate:.3f}]" for rate in (0.25, 0.75)}
    assert rows["SFT + GRPO"] == [
        *("tuned", f"{exact[0.75]} ({exact[0.25]})", "open", f"{exact[0.25]} (open)", "open")
    ]
    write(tmp_path, "unseen_mutants-untuned", passing("SFT", 1, 0.25))
    rows = rows_of(study_tables.proxies_part(tmp_path))
    assert rows["SFT + GRPO"][3] == f"{exact[0.25]} (0.000 [0.000, 0.000])"
    assert rows["SFT"][3] == exact[0.25] and rows["SFT"][0] == ""


def test_rounds_are_compared_with_as_many_critiques_at_random_chosen_and_any() -> None:
    # Samples 0 and 1 solve in the first round, sample 1 loses it in the second; only 1 and 2 pass
    # the public test.
    solved = {(0, 1), (1, 1), (0, 2), (0, 3), (0, 4), (0, 5)}
    turns = [
        turn("SFT", 0, sample=s, turn=t, after=RIGHT if (s, t) in solved else WRONG)
        for s in range(ROUNDS)
        for t in range(1, ROUNDS + 1)
    ]
    public = {("p0/0", 1, s): s in (1, 2) for s in range(ROUNDS)}
    rows = study_tables.rounds_rows(turns, public)
    assert rows[0] == ["0.400", "15", "0.400", "0.400", "0.400", "15"]
    # Of 10 pairs one is {1, 2} (1/2), three have only 1 (1), three only 2 (0), three neither:
    # {0, 3} and {0, 4} solve half of the time, {3, 4} never.
    chosen = (0.5 + 3 + 0 + 2 * 0.5) / 10
    assert rows[1] == ["0.200", "30", "0.400", f"{chosen:.3f}", f"{1 - 3 / 10:.3f}", "30"]
    assert rows[4] == ["0.200", "75", "0.400", "0.500", "1.000", "75"]
    assert study_tables.rounds_rows(turns, None)[0][3] == ""


def test_what_the_public_test_says_is_kept_and_read(tmp_path: Path) -> None:
    turns = [turn("SFT", 0, sample=s, seed=2) for s in range(2)]
    product = study_tables.public_file(tmp_path, study_tables.ROUNDS_SETTING, "SFT", 2)
    text = "".join(map(study.public_line, turns, (True, False)))
    study._keep(product, text.encode())
    kept = study_tables.kept_public(tmp_path, study_tables.ROUNDS_SETTING)
    assert kept == {"SFT": {("p0/0", 2, 0): True, ("p0/0", 2, 1): False}}
    assert study_tables.kept_turns(tmp_path, study_tables.ROUNDS_SETTING) == []


def test_judgments_are_rated_and_their_shares_calibrated(tmp_path: Path) -> None:
    # A wrong program that 3 of 4 critiques call incorrect, and a right one that 1 of 4 do.
    turns = [
        turn("SFT", n, sample=s, before=before, after=before, judgment=not incorrect)
        for n, (before, votes) in enumerate([(WRONG, 3), (RIGHT, 1)])
        for s, incorrect in enumerate([True] * votes + [False] * (4 - votes))
    ]
    turns.append(turn("SFT", 2, before=RIGHT, after=RIGHT, judgment=None))
    brier, error = study_tables.calibration(turns)
    assert brier is not None and brier.value == pytest.approx(0.25**2)
    assert error == "0.250"
    write(tmp_path, "right_and_wrong-tuned_on_models", turns)
    text = study_tables.judging_part(tmp_path)
    assert "3 programs, 1 of them wrong" in text
    assert study_tables.calibration([turns[-1]]) == (None, "")


def test_curves_are_means_of_seeds_with_intervals_of_three(tmp_path: Path) -> None:
    for seed, gains in ((1, (0.1, 0.4)), (2, (0.2, 0.5)), (3, (0.3, 0.6))):
        lines = [
            {"step": step, "time/step": 10.0 * seed, "group/reward_minus_first": gain}
            for step, gain in enumerate(gains, start=1)
        ]
        lines[1]["critic/explained_variance"] = 0.1 * seed
        text = "".join(json.dumps(line) + "\n" for line in lines)
        study_tables.curve_file(tmp_path, "ppo", seed).write_text(text)
    gain = study_tables.GAIN
    curves, bands = study_tables.kept_curves(tmp_path, gain, "critiques")
    (label,) = curves
    assert label == "SFT + PPO, seeds 1, 2, 3"
    assert curves[label] == [(96, pytest.approx(0.2)), (192, pytest.approx(0.5))]
    half = 2.920 * 0.1 / 3**0.5
    assert bands[label] == [pytest.approx((m - half, m + half)) for m in (0.2, 0.5)]
    curves, _ = study_tables.kept_curves(tmp_path, gain, "seconds")
    assert [at for at, _ in curves[label]] == [20, 40]
    curves, _ = study_tables.kept_curves(tmp_path, study_tables.EXPLAINED, "step")
    assert curves[label] == [(2, pytest.approx(0.2))]
    rows = rows_of(study_tables.training_part(tmp_path))
    assert rows["SFT + PPO"][:2] == ["1, 2, 3", "20 [3, 37]"]
    write(tmp_path, "unseen_mutants", passing("SFT", 1, 0.5))
    study_tables.write_tables(tmp_path, tmp_path)
    names = "curves", "curves_seconds", "explained_variance"
    assert all((tmp_path / f"{name}.svg").read_bytes() for name in names)


def test_the_tasks_of_a_mixture_are_shown_one_by_one(tmp_path: Path) -> None:
    assert study_tables.tasks_part(tmp_path) == ""
    lines = [
        {
            **{"step": step, "time/step": 1.0, "task/solving/share": 0.1},
            **{"task/solving/reward": 0.1 * step, "task/solving/length": 50.0},
        }
        for step in range(1, 13)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    study_tables.curve_file(tmp_path, "mixture", 1).write_text(text)
    rows = rows_of(study_tables.tasks_part(tmp_path))
    cells = ["solving", "1", "0.100", "0.350", "0.950", "50.000", "50.000"]
    assert rows["SFT + GRPO, mixture of tasks"] == cells

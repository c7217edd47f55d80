"""The report shows what was recorded, says what was not, and never runs what a model wrote."""

from __future__ import annotations

import base64
import json
import math
import os
import re
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ctrl_megatron.commands.report import main as report_command
from ctrl_megatron.metrics.names import describe_metric
from ctrl_megatron.metrics.report import write_comparison, write_report
from ctrl_megatron.metrics.report.charts import build_charts, headline_metrics
from ctrl_megatron.metrics.report.figures import axis_range, trailing_mean
from ctrl_megatron.metrics.report.run_files import read_run_files

EXAMPLE = {
    "step": 2,
    "reward": 1.0,
    "judgment_right": True,
    "question": "add <two> numbers & stop\nwithout a loop",
    "answer": "<script>alert(1)</script> def add(a, b):\n    return a + b",
    "tests": ["passed", "wrong answer"],
}
PHASES = [
    {"name": "sandbox", "kind": "host", "start": 0.5, "end": 2.0},
    {"name": "old_log_probs", "kind": "main", "start": 0.0, "end": 1.0},
    {"name": "reward", "kind": "wait", "start": 1.0, "end": 2.0},
    {"name": "update_actor", "kind": "main", "start": 2.5, "end": 4.0},
]


class Page(HTMLParser):
    """Tags, visible text and images of a page; fails on unbalanced tags."""

    VOID = ("meta", "img", "br")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.words: list[str] = []
        self.images: list[tuple[str, str]] = []
        self.feed(html)
        assert self.open == []
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "img":
            values = dict(attrs)
            self.images.append((values["alt"] or "", values["src"] or ""))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def full_run(run_dir: Path, steps: int = 3) -> Path:
    names = (
        *("reward/mean", "style/kept_rate", "style/cut_rate", "length/words"),
        *("actor/ppo_kl", "actor/pg_clipfrac", "actor/entropy", "actor/grad_norm"),
        *("perf/tokens_per_second", "rollout/probs_diff_mean", "perf/overlap_seconds"),
        *("sync/gigabytes_per_second", "time/step", "time/generate"),
    )
    run_dir.mkdir(exist_ok=True)
    rows = [{"step": s, "metrics": dict.fromkeys(names, s / steps)} for s in range(1, steps + 1)]
    write_lines(run_dir / "metrics.jsonl", rows)
    write_lines(run_dir / "timeline.jsonl", [{"step": 3, "rank": 0, "phases": PHASES}])
    write_lines(run_dir / "examples.jsonl", [EXAMPLE])
    table = [{"stage": "before SFT", "right_rate": 0.125, "problems": 40}]
    (run_dir / "summary.json").write_text(json.dumps({"table": table}))
    (run_dir / "config.yaml").write_text("trainer:\n  seed: 1\n")
    return run_dir


def report(run_dir: Path) -> Page:
    return Page(write_report(run_dir).read_text())


@pytest.mark.parametrize("steps", [1, 3, 80])
def test_a_full_run_gives_a_full_page(tmp_path: Path, steps: int) -> None:
    page = report(full_run(tmp_path / "demo", steps))
    assert "not recorded" not in page.text
    drawn = [alt for alt, _ in page.images]
    assert drawn == [
        *("Reward by step", "Style, shares by step", "Length: words by step"),
        *("KL of the update by step", "Clipped tokens by step", "Entropy by step"),
        *("Gradient norm by step", "Engine against trainer by step", "Throughput by step"),
        *("Time by step", "Phases of one step"),
    ]
    for fragment in ("demo", "before SFT", "12.5%", "2: wrong answer", "seed: 1"):
        assert fragment in page.text
    assert "sandbox took 1.50 s, of which 0.50 s ran beside old_log_probs." in page.text
    assert [p.name for p in (tmp_path / "demo").iterdir() if p.name.startswith(".")] == []


def test_the_page_works_offline_and_every_drawing_is_valid(tmp_path: Path) -> None:
    page = report(full_run(tmp_path / "demo"))
    assert not {"script", "link", "iframe"} & set(page.tags)
    for _, source in page.images:
        prefix = "data:image/svg+xml;base64,"
        assert source.startswith(prefix)
        svg = base64.b64decode(source.removeprefix(prefix)).decode()
        assert ElementTree.fromstring(svg).tag.endswith("svg")
        assert not re.search(r'href="(?!#)', svg)


def test_text_of_models_is_shown_and_not_interpreted(tmp_path: Path) -> None:
    page = report(full_run(tmp_path / "demo"))
    assert "<script>alert(1)</script> def add(a, b):" in page.text
    assert "add <two> numbers & stop" in page.text


def test_an_example_shows_its_own_fields_in_their_order(tmp_path: Path) -> None:
    long = "word " * 20
    examples = [
        {"step": 1, "score": 0.25, "essay": "short", "grade_of_judge": None, "seen": False},
        {"step": 2, "score": 0.5, "essay": long, "grade_of_judge": "B", "seen": True},
        {"step": 2, "score": 0.75, "essay": "also short", "grade_of_judge": "C", "seen": True},
    ]
    write_lines(tmp_path / "examples.jsonl", examples)
    page = report(tmp_path)
    words = page.text[page.text.index("step 2") :]
    for card in (
        f"step 2 score: 0.5 grade of judge: B seen: yes essay {long}",
        "step 2 score: 0.75 grade of judge: C seen: yes essay also short",
        "step 1 score: 0.25 grade of judge: not recorded seen: no essay short",
    ):
        assert words.startswith(card.strip()), words
        words = words[len(card) :].strip()
    assert page.tags.count("pre") == 3


def test_examples_of_an_abandoned_attempt_are_left_out(tmp_path: Path) -> None:
    steps = [(1, "a"), (2, "b"), (3, "c"), (2, "d")]
    write_lines(tmp_path / "examples.jsonl", [{"step": s, "field": v} for s, v in steps])
    examples = read_run_files(tmp_path).examples or []
    assert [(e["step"], e["field"]) for e in examples] == [(1, "a"), (2, "d")]


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(text=st.text(st.characters(exclude_characters="\r")), number=st.floats() | st.none())
def test_any_text_and_any_number_keep_the_page_whole(
    tmp_path: Path, text: str, number: float | None
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir(exist_ok=True)
    record = dict.fromkeys(EXAMPLE, text) | {"step": 1, "reward": number, text: [text, number]}
    record["step"] = 1
    (run_dir / "examples.jsonl").write_text(json.dumps(record) + "\n")
    (run_dir / "summary.json").write_text(json.dumps({"table": [{text: text, "b": number}]}))
    assert set(report(run_dir).tags) >= {"table", "main"}


@pytest.mark.parametrize(
    ("file", "note"),
    [
        ("metrics.jsonl", "metrics.jsonl: not recorded"),
        ("timeline.jsonl", "timeline.jsonl: not recorded"),
        ("examples.jsonl", "examples.jsonl: not recorded"),
        ("summary.json", "summary.json: not recorded"),
        ("config.yaml", "config.yaml: not recorded"),
    ],
)
def test_a_missing_file_is_said(tmp_path: Path, file: str, note: str) -> None:
    run_dir = full_run(tmp_path / "demo")
    (run_dir / file).unlink()
    assert note in report(run_dir).text


def test_a_section_without_content_is_none(tmp_path: Path) -> None:
    run_dir = full_run(tmp_path / "demo")
    for file in ("timeline.jsonl", "summary.json"):
        (run_dir / file).unlink()
    page = report(run_dir)
    assert "One step in time" not in page.text and "Stages" not in page.text
    assert "Left out: timeline.jsonl: not recorded; summary.json: not recorded." in page.text


@pytest.mark.parametrize("file", ["metrics.jsonl", "timeline.jsonl", "examples.jsonl"])
def test_a_file_that_is_cut_off_is_named_by_page_and_command(
    tmp_path: Path, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = full_run(tmp_path / "demo")
    lines = (run_dir / file).read_text().count("\n")
    with (run_dir / file).open("a") as opened:
        opened.write('{"step": 4, "metr')
    told = f"{file}: line {lines + 1} is cut off and left out"
    assert told in report(run_dir).text
    assert report_command([str(run_dir)]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [f"left out of {run_dir}: {told}"]


def test_data_model_and_date_are_at_the_top(tmp_path: Path) -> None:
    run_dir = full_run(tmp_path / "demo")
    config = {
        "actor_rollout_ref": {"model": {"path": "models/mine"}},
        "data": {"train_files": ["a.parquet", "b.parquet"], "val_files": []},
    }
    (run_dir / "config.yaml").write_text(json.dumps(config))
    for path in run_dir.iterdir():
        os.utime(path, (0, 86_400))
    text = report(run_dir).text
    assert (
        "demo data a.parquet, b.parquet · model models/mine · written 1970-01-02 00:00 UTC" in text
    )


def test_an_example_shows_how_it_ended_and_what_changed(tmp_path: Path) -> None:
    shared = "def f(n):\n    total = 0"
    examples = [
        {
            **{"step": 1, "solution": f"{shared}\n    return n < 1", "reward": rate},
            **{"revision": f"{shared}\n    return n <= 1", "passed_before": 0.0},
            "passed_after": rate,
        }
        for rate in (1.0, 0.5, 0.0, None)
    ]
    write_lines(tmp_path / "examples.jsonl", examples)
    html = write_report(tmp_path).read_text()
    cards = re.findall(r'<div class="card example ?([\w-]*)">', html)
    assert cards == ["pass", "part-pass", "fail", ""]
    assert html.count('<span class="removed">-    return n &lt; 1') == 4
    assert html.count('<span class="added">+    return n &lt;= 1') == 4
    assert 'class="chip fail">passed before: 0<' in html
    assert 'class="chip pass">passed after: 1<' in html


def test_what_is_declared_to_matter_is_at_the_top() -> None:
    names = ("reward/mean", "time/step", "pass_rate/before", "pass_rate/after", "val/solved_after")
    series = {name: [(1, 0.5)] for name in (*names, "critique/length", "reward/cached_rate")}
    assert (
        set(headline_metrics(series)) == set(names) and headline_metrics(series)[0] == "reward/mean"
    )


def test_runs_side_by_side_say_what_is_not_compared(tmp_path: Path) -> None:
    runs = [full_run(tmp_path / name) for name in ("a", "b")]
    write_metrics(runs[1], (1, {"reward/mean": 0.5, "own/one": 1.0, "own/two": 2.0}))
    write_comparison(runs, tmp_path / "both.html")
    text = Page((tmp_path / "both.html").read_text()).text
    assert "metrics that only b recorded (own/one, own/two)" in text
    assert "metrics that only a recorded (style/kept_rate" in text
    assert "which each run's own report has" in text


def write_metrics(run_dir: Path, *records: tuple[int, Mapping[str, float | str]]) -> None:
    write_lines(run_dir / "metrics.jsonl", [{"step": s, "metrics": m} for s, m in records])


def test_a_step_that_validated_keeps_its_training_metrics(tmp_path: Path) -> None:
    write_metrics(
        tmp_path,
        (0, {"val/right_rate": 0.25}),
        *((step, {"reward/mean": step / 10, "time/step": 9.0}) for step in range(1, 6)),
        (5, {"val/right_rate": 0.5}),
    )
    series = read_run_files(tmp_path).series
    assert series is not None
    assert [step for step, _ in series["reward/mean"]] == [1, 2, 3, 4, 5]
    assert series["val/right_rate"] == [(0, 0.25), (5, 0.5)]
    text = report(tmp_path).text
    assert "Steps 5 last is 5" in text
    assert "Reward 0.5 first step 0.1" in text


def test_a_pipeline_of_another_shape_gets_its_own_tiles_and_curves() -> None:
    names = (
        *("actor/entropy", "actor/kl_coef", "reward/mean", "reward/style", "reward/cached_rate"),
        *("judge/right_rate", "judge/seconds", "sync/pushes", "time/step", "time/judge"),
    )
    series = {name: [(1, 0.5), (2, 0.75)] for name in names}
    assert [(c.title, c.metrics, c.percent) for c in build_charts(series)] == [
        ("Reward", ("reward/mean",), False),
        ("Reward: cached rate", ("reward/cached_rate",), True),
        ("Judge: right rate", ("judge/right_rate",), True),
        ("Reward: style", ("reward/style",), False),
        ("Judge: seconds", ("judge/seconds",), False),
        ("Entropy", ("actor/entropy",), False),
        ("Time", ("time/step", "time/judge"), False),
    ]
    own = ["judge/right_rate", "reward/cached_rate", "judge/seconds", "reward/style"]
    assert headline_metrics(series) == ["reward/mean", *own, "time/step"]


def test_shares_of_a_group_are_drawn_together_four_at_a_time() -> None:
    names = [f"test/{letter}_rate" for letter in "abcdef"]
    series = {name: [(1, 0.5)] for name in names}
    assert [c.metrics for c in build_charts(series)] == [tuple(names[:4]), tuple(names[4:])]
    series["test/b_rate"] = [(1, 7.0)]  # called a rate and none
    assert [c.metrics for c in build_charts(series)][-1] == ("test/b_rate",)


def test_a_rate_of_several_validation_files_is_one_chart() -> None:
    rates = ("solved_after", "reward/m:f", "pass_rate")
    files = ("", "gsm8k/", "math_test/")
    series = {f"val/{f}{rate}": [(1, 0.5)] for f in files for rate in rates}
    assert sorted(c.metrics for c in build_charts(series)) == sorted(
        tuple(f"val/{f}{rate}" for f in files) for rate in rates
    )
    told = {name: describe_metric(f"val/math_test/{name}") for name in rates[:2]}
    assert told == {name: describe_metric(f"val/{name}") for name in told}
    assert None not in told.values()
    # One file's rates have charts as they had: shares together, the others alone.
    alone = {f"val/{rate}": [(1, 0.5)] for rate in (*rates, "valid_rate")}
    assert [c.metrics for c in build_charts(alone)] == [
        ("val/pass_rate", "val/valid_rate"),
        ("val/solved_after",),
        ("val/reward/m:f",),
    ]


def test_the_second_policy_is_drawn_beside_the_first() -> None:
    names = ("reward/mean", "actor/grad_norm", "actor/pg_loss", "mine/length")
    series = {f"{agent}{n}": [(1, 0.5)] for agent in ("", "agent1/") for n in names}
    # What is not drawn of the first one is not drawn of the second.
    assert [c.metrics for c in build_charts(series)] == [
        ("reward/mean", "agent1/reward/mean"),
        ("mine/length",),
        ("agent1/mine/length",),
        ("actor/grad_norm", "agent1/actor/grad_norm"),
    ]


def test_what_every_trainer_logs_is_drawn_by_name_and_nothing_twice() -> None:
    names = (
        *("reward/mean", "actor/lr", "advantage/zero_std_rate", "memory/host_gib", "perf/mfu"),
        *("memory/actor_update_device_gib", "memory/sync_device_gib", "memory/sync_peak_gib"),
        *("reward_share/zero", "reward_share/one", "reward_share/below_one", "val/pass_rate"),
        *("sandbox/isolation", "checkpoint/seconds", "actor/kl_to_reference"),
    )
    series = {name: [(1, 0.5), (2, 0.75)] for name in names}
    series["reward_share/below_one"] = [(1, 0.0), (2, 0.0)]
    found = build_charts(series)
    assert {chart.title for chart in found} == {
        *("Reward", "Learning rate", "Groups without signal", "Host memory", "MFU", "GPU memory"),
        *("Reward histogram", "Val: pass rate", "KL to the reference"),
    }
    (histogram,) = (chart for chart in found if chart.stacked)
    assert histogram.metrics == ("reward_share/zero", "reward_share/one")
    drawn = [name for chart in found for name in chart.metrics]
    assert len(drawn) == len(set(drawn))


@pytest.mark.parametrize("steps", [1, 3])
def test_a_histogram_is_drawn_of_one_step_too(tmp_path: Path, steps: int) -> None:
    shares = {"reward_share/zero": 0.25, "reward_share/one": 0.75}
    write_metrics(tmp_path, *((step, shares) for step in range(1, steps + 1)))
    assert len(report(tmp_path).images) == 1


def test_zero_is_a_value(tmp_path: Path) -> None:
    write_metrics(tmp_path, (1, {"reward/mean": 0.0}))
    assert "Reward 0 first step 0" in report(tmp_path).text


def test_a_resumed_run_counts_the_later_line_of_a_step_and_none_that_it_went_back_behind(
    tmp_path: Path,
) -> None:
    # Steps 2 to 4 were left behind for the checkpoint of step 1; step 3 is not there yet.
    steps = (1, 2, 3, 4, 2)
    write_metrics(
        tmp_path,
        *((step, {"reward/mean": n / 10}) for n, step in enumerate(steps[:4])),
        (4, {"val/nll": 0.5}),
        (2, {"reward/mean": 0.4}),
    )
    write_lines(
        tmp_path / "timeline.jsonl",
        [{"step": s, "rank": 0, "phases": PHASES[: n + 1]} for n, s in enumerate(steps[1:])],
    )
    write_lines(
        tmp_path / "warnings.jsonl",
        [{"step": step, "warning": "flat", "text": f"line {n}"} for n, step in enumerate(steps)],
    )
    found = read_run_files(tmp_path)
    assert found.series == {"reward/mean": [(1, 0.0), (2, 0.4)]}
    assert found.timelines is not None and found.timelines.keys() == {(2, 0)}
    assert len(found.timelines[2, 0]) == 4
    assert [w["text"] for w in found.warnings or ()] == ["line 0", "line 4"]


def test_a_checkpoint_that_is_validated_once_more_keeps_its_training(tmp_path: Path) -> None:
    trained = ((step, {"reward/mean": step / 10}) for step in (1, 2, 3))
    write_metrics(tmp_path, *trained, (2, {"val/nll": 0.5}))
    assert read_run_files(tmp_path).series == {
        "reward/mean": [(1, 0.1), (2, 0.2)],
        "val/nll": [(2, 0.5)],
    }


def test_non_finite_values_do_not_break_the_drawing(tmp_path: Path) -> None:
    values = [0.5, "nan", "inf", "nan"]
    records = ((i, {"actor/grad_norm": value}) for i, value in enumerate(values, start=1))
    write_metrics(tmp_path, *records)
    assert len(report(tmp_path).images) == 1


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("metrics.jsonl", "oops\n", "metrics.jsonl line 1 is not JSON"),
        ("metrics.jsonl", '{"step": 1}\n', "without the field 'metrics'"),
        ("summary.json", "[]", "must be JSON of the form"),
        ("summary.json", '{"table": [1]}', "every row of the table"),
    ],
)
def test_a_malformed_file_is_an_error(tmp_path: Path, file: str, text: str, message: str) -> None:
    (tmp_path / file).write_text(text)
    with pytest.raises(ValueError, match=message):
        write_report(tmp_path)


def test_a_directory_that_is_no_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is it a run's directory"):
        write_report(tmp_path)


@given(values=st.lists(st.floats(-100, 100), max_size=20), window=st.integers(1, 8))
def test_trailing_mean(values: list[float], window: int) -> None:
    smooth = trailing_mean(values, window)
    assert len(smooth) == len(values)
    for i, value in enumerate(smooth):
        seen = [values[j] for j in range(len(values)) if i - window < j <= i]
        assert value == pytest.approx(sum(seen) / len(seen))


@given(
    values=st.lists(st.floats(-100, 100) | st.just(math.nan), max_size=20), percent=st.booleans()
)
def test_an_axis_holds_every_value_and_begins_at_0_where_none_is_negative(
    values: list[float], percent: bool
) -> None:
    bottom, top = axis_range([abs(v) % 1 for v in values] if percent else values, percent)
    finite = [abs(v) % 1 if percent else v for v in values if math.isfinite(v)]
    assert bottom <= top and all(bottom <= v <= top for v in finite)
    if finite and min(finite) >= 0:
        assert -0.1 * max(top, 1e-300) <= bottom <= 0
    if percent and finite and max(finite) > 0.3:
        assert (bottom, top) == (-0.03, 1.03)

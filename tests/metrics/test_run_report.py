"""The report shows what was recorded, says what was not, and never runs what a model wrote."""

from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ctrl_megatron.metrics.report import write_report
from ctrl_megatron.metrics.report.examples import choose
from ctrl_megatron.metrics.report.figures import trailing_mean
from ctrl_megatron.metrics.report.run_files import read_run_files

EXAMPLE = {
    "step": 2,
    "problem": "add <two> numbers & stop",
    "solution": "def add(a, b): return a - b",
    "critique": "<script>alert(1)</script> Overall judgment: Incorrect",
    "judgment": "Incorrect",
    "revision": "def add(a, b): return a + b",
    "reward": 1.0,
    "passed_before": False,
    "passed_after": True,
    "detail": ["", "wrong answer"],
    "versions": {"critique": "actor@1", "revision": "proxy"},
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
        *("reward/mean", "critique/valid_rate", "pass_rate/before", "pass_rate/after"),
        *("actor/ppo_kl", "actor/pg_clipfrac", "actor/entropy", "actor/grad_norm"),
        *("perf/tokens_per_second", "rollout/probs_diff_mean", "perf/overlap_seconds"),
        "sync/gigabytes_per_second",
    )
    run_dir.mkdir(exist_ok=True)
    rows = [{"step": s, "metrics": dict.fromkeys(names, s / steps)} for s in range(1, steps + 1)]
    write_lines(run_dir / "metrics.jsonl", rows)
    write_lines(run_dir / "timeline.jsonl", [{"step": 3, "rank": 0, "phases": PHASES}])
    write_lines(run_dir / "examples.jsonl", [EXAMPLE])
    table = [{"stage": "before SFT", "valid_critique_rate": 0.125, "problems": 40}]
    (run_dir / "summary.json").write_text(json.dumps({"table": table}))
    (run_dir / "config.yaml").write_text("trainer:\n  seed: 1\n")
    return run_dir


def report(run_dir: Path) -> Page:
    return Page(write_report(run_dir).read_text())


@pytest.mark.parametrize("steps", [1, 3, 80])
def test_a_full_run_gives_a_full_page(tmp_path: Path, steps: int) -> None:
    page = report(full_run(tmp_path / "demo", steps))
    assert "not recorded" not in page.text
    assert [alt for alt, _ in page.images].count("Phases of one step") == 1
    assert len(page.images) == 10
    for fragment in ("demo", "before SFT", "12.5%", "actor@1", "wrong answer", "seed: 1"):
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
    assert "<script>alert(1)</script> Overall judgment: Incorrect" in page.text
    assert "add <two> numbers & stop" in page.text


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(text=st.text(st.characters(exclude_characters="\r")), number=st.floats() | st.none())
def test_any_text_and_any_number_keep_the_page_whole(
    tmp_path: Path, text: str, number: float | None
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir(exist_ok=True)
    record = dict.fromkeys(EXAMPLE, text) | {"step": 1, "reward": number}
    record |= {"passed_before": None, "passed_after": None}
    (run_dir / "examples.jsonl").write_text(json.dumps(record) + "\n")
    (run_dir / "summary.json").write_text(json.dumps({"table": [{text: text, "b": number}]}))
    assert set(report(run_dir).tags) >= {"table", "pre"}


@pytest.mark.parametrize(
    ("file", "note"),
    [
        ("metrics.jsonl", "reward/mean: not recorded"),
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


def test_a_missing_metric_is_said_and_zero_is_not_missing(tmp_path: Path) -> None:
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "metrics": {"reward/mean": 0.0}}])
    text = report(tmp_path).text
    assert "reward/mean: not recorded" not in text
    assert "actor/entropy: not recorded" in text
    assert "pass_rate/before, pass_rate/after: not recorded" in text


def test_a_resumed_run_counts_the_later_line_of_a_step(tmp_path: Path) -> None:
    rows = [(1, 0.1), (2, 0.2), (3, 0.3), (2, 0.9)]
    write_lines(
        tmp_path / "metrics.jsonl", [{"step": s, "metrics": {"reward/mean": v}} for s, v in rows]
    )
    series = read_run_files(tmp_path).series
    assert series == {"reward/mean": [(1, 0.1), (2, 0.9), (3, 0.3)]}


def test_non_finite_values_do_not_break_the_drawing(tmp_path: Path) -> None:
    values = [0.5, "nan", "inf", "nan"]
    write_lines(
        tmp_path / "metrics.jsonl",
        [{"step": i, "metrics": {"actor/grad_norm": v}} for i, v in enumerate(values, start=1)],
    )
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


def test_examples_show_different_outcomes_and_the_newest_first() -> None:
    def example(step: int, before: float, after: float) -> dict[str, Any]:
        return {"step": step, "passed_before": before, "passed_after": after}

    ups = [example(step, 0, 1) for step in range(10)]
    shown = choose([*ups, example(3, 1, 0.5), example(2, 0, 0)], 4)
    outcomes = [(e["step"], e["passed_before"], e["passed_after"]) for e in shown]
    assert outcomes == [(9, 0, 1), (3, 1, 0.5), (2, 0, 0), (8, 0, 1)]


@given(values=st.lists(st.floats(-100, 100), max_size=20), window=st.integers(1, 8))
def test_trailing_mean(values: list[float], window: int) -> None:
    smooth = trailing_mean(values, window)
    assert len(smooth) == len(values)
    for i, value in enumerate(smooth):
        seen = [values[j] for j in range(len(values)) if i - window < j <= i]
        assert value == pytest.approx(sum(seen) / len(seen))

"""The directory of an evaluation: what goes in comes out, others' files stay, pages are whole."""

from __future__ import annotations

import base64
import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from xml.etree import ElementTree

import pytest
from evaluated import TWO_TURNS, chain, pair
from hypothesis import given
from hypothesis import strategies as st

from ctrl_megatron.commands.report import main as report
from ctrl_megatron.errors import UserError
from ctrl_megatron.eval.rates import RATES
from ctrl_megatron.eval.report import write_evaluation_report
from ctrl_megatron.eval.tables import report_tables
from ctrl_megatron.eval.transcripts import (
    begin_evaluation,
    check_evaluation_folder,
    read_evaluation,
    transcript_part_file,
    turn_from_json,
    write_transcript_part,
)
from ctrl_megatron.types import Verdict

SETTINGS = {"samples": 2}
HOSTILE = "</pre><script>alert('x')</script>\n| & <b>"


class Tags(HTMLParser):
    """The tags of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.append(tag)


def made(folder: Path, *, critics: tuple[str, ...] = ("ours",)) -> Path:
    begin_evaluation(folder, SETTINGS, _weights(*critics), anew=[], overwrite=False)
    for critic in critics:
        turns = [dataclasses.replace(turn, critic=critic) for turn in TWO_TURNS]
        write_transcript_part(transcript_part_file(folder, critic, 0), turns)
    return folder


def _weights(*critics: str, written: str = "1") -> dict[str, dict[str, str]]:
    return {critic: {"path": critic, "weights": written} for critic in critics}


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    turns = [*TWO_TURNS, *chain("p5", "-", (1, 4), critique=HOSTILE, after=None)]
    lost = dataclasses.replace(turns[-1], critique=None)
    begin_evaluation(tmp_path / "e", SETTINGS, _weights("ours"), anew=[], overwrite=False)
    write_transcript_part(transcript_part_file(tmp_path / "e", "ours", 0), [*turns[:-1], lost])
    pairs = [pair("A>B", ("first", None), "C-", "II")]
    write_transcript_part(transcript_part_file(tmp_path / "e", "ours", 0, "pairs"), pairs)
    found = read_evaluation(tmp_path / "e")
    assert found.turns == [*turns[:-1], lost] and found.pairs == pairs
    assert found.settings["settings"] == SETTINGS


@given(st.integers(1, 10_000), st.data(), st.booleans())
def test_a_verdict_keeps_its_rates_in_a_file(total: int, data: st.DataObject, late: bool) -> None:
    count = data.draw(st.integers(0, total))
    ran = data.draw(st.integers(count, total))
    passed = (True,) * count + (False,) * (ran - count)
    verdict = Verdict(passed=passed, total=total, timed_out=late)
    turn = dataclasses.replace(TWO_TURNS[0], before=verdict, after=None)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "turns.jsonl"
        write_transcript_part(path, [turn])
        record = json.loads(path.read_text())
    rates = {"pass_rate": count / total, "accepted": count == total, "timed_out": late}
    assert record["before"] == rates and record["after"] is None
    read = turn_from_json(record, "a line").before
    assert read is not None
    assert {name: getattr(read, name) for name in rates} == rates


def test_a_line_that_is_no_turn_is_named(tmp_path: Path) -> None:
    folder = made(tmp_path / "e")
    file = transcript_part_file(folder, "ours", 0)
    line = json.loads(file.read_text().splitlines()[0])
    for record, message in (
        ({**line, "extra": 1}, "line 1: not the fields of a transcript: extra"),
        ({**line, "before": {"pass_rate": 1.0}}, "line 1: field 'before'"),
        *(
            ({**line, "after": {"pass_rate": rate, "accepted": ok, "timed_out": False}}, "'after'")
            for rate, ok in (
                (0.5, True),
                (1.0, False),
                (1.5, True),
                (-0.5, False),
                (0.12345678, False),
            )
        ),
    ):
        file.write_text(json.dumps(record) + "\n")
        with pytest.raises(UserError, match=message):
            read_evaluation(folder)


def test_a_directory_is_continued_only_with_its_settings(tmp_path: Path) -> None:
    folder = made(tmp_path / "e", critics=("a", "b"))
    assert check_evaluation_folder(folder, SETTINGS, _weights("a", "c"), overwrite=False) == []
    changed = _weights("a", written="2")
    assert check_evaluation_folder(folder, SETTINGS, changed, overwrite=False) == ["a"]
    with pytest.raises(UserError, match="samples: 2 -> 3"):
        check_evaluation_folder(folder, {"samples": 3}, _weights("a"), overwrite=False)
    assert check_evaluation_folder(folder, {"samples": 3}, _weights("a"), overwrite=True) == []
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/mine.md").touch()
    for overwrite in (False, True):
        with pytest.raises(UserError, match="exists and is no evaluation"):
            check_evaluation_folder(
                tmp_path / "notes", SETTINGS, _weights("a"), overwrite=overwrite
            )
    with pytest.raises(UserError, match="differ in punctuation only"):
        check_evaluation_folder(
            tmp_path / "new", SETTINGS, _weights("x y", "x-y!", "x y!"), overwrite=True
        )


def test_a_file_or_directory_is_known_by_its_content(tmp_path: Path) -> None:
    def settings(path: str, digest: str = "1") -> dict[str, Any]:
        file = {"path": path, "digest": digest}
        return {"rows": [file], "pairs": file, "proxy": {"path": path, "weights": digest}}

    folder = tmp_path / "e"
    begin_evaluation(folder, settings("x"), _weights("a"), anew=[], overwrite=False)
    spelled = {"a": {"path": f"{tmp_path}/./a", "weights": "1"}}
    assert check_evaluation_folder(folder, settings("./x"), spelled, overwrite=False) == []
    with pytest.raises(UserError, match=r"rows: .*; pairs: .*; proxy: "):
        check_evaluation_folder(folder, settings("x", "2"), _weights("a"), overwrite=False)


def test_names_that_make_one_file_are_reported_over_several_commands(tmp_path: Path) -> None:
    folder = made(tmp_path / "e", critics=("after SFT",))
    with pytest.raises(UserError, match="'after SFT' and 'after_SFT'"):
        check_evaluation_folder(folder, SETTINGS, _weights("after_SFT"), overwrite=False)
    assert check_evaluation_folder(folder, SETTINGS, _weights("after_SFT"), overwrite=True) == []


def test_only_what_is_drawn_anew_is_moved_aside(tmp_path: Path) -> None:
    folder = made(tmp_path / "e", critics=("a", "a.seed", "b"))
    before = transcript_part_file(folder, "a", 0).read_bytes()
    write_transcript_part(
        transcript_part_file(folder, "a", 1, "pairs"), [pair("A>B", ("first", None))]
    )
    (folder / "transcripts/a.seedless.jsonl").touch()
    (folder / "notes.md").touch()
    changed = _weights("a", written="2")
    aside = begin_evaluation(folder, SETTINGS, changed, anew=["a"], overwrite=False)
    assert aside is not None and aside == folder / "outdated/1"
    assert not list((folder / "pairs").iterdir())
    assert transcript_part_file(aside, "a", 0).read_bytes() == before
    outdated = read_evaluation(aside)
    assert len(outdated.turns) == len(TWO_TURNS)
    assert outdated.settings["critics"] == _weights("a") and len(outdated.pairs) == 1
    names = {path.name for path in (folder / "transcripts").iterdir()}
    assert names == {"a.seed.seed0.jsonl", "b.seed0.jsonl", "a.seedless.jsonl"}
    settings = json.loads((folder / "evaluation.json").read_text())
    assert list(settings["critics"]) == ["a", "a.seed", "b"]
    assert begin_evaluation(folder, SETTINGS, changed, anew=["a"], overwrite=False) is None
    write_transcript_part(transcript_part_file(folder, "a", 0), TWO_TURNS)
    again = begin_evaluation(folder, SETTINGS, _weights("a"), anew=["a"], overwrite=False)
    assert (
        again == folder / "outdated/2"
        and transcript_part_file(aside, "a", 0).read_bytes() == before
    )
    begin_evaluation(folder, {"samples": 5}, _weights("c"), anew=[], overwrite=True)
    assert {path.name for path in (folder / "transcripts").iterdir()} == {"a.seedless.jsonl"}
    assert (folder / "notes.md").exists()
    assert json.loads((folder / "evaluation.json").read_text())["critics"] == _weights("c")


def test_the_page_shows_every_number_and_runs_nothing(tmp_path: Path) -> None:
    folder = made(tmp_path / "e")
    turns = [dataclasses.replace(t, critic=HOSTILE, critique=HOSTILE) for t in TWO_TURNS]
    write_transcript_part(transcript_part_file(folder, "hostile", 0), turns)
    write_evaluation_report(folder, ks=(1, 2))
    html, text = (folder / "report.html").read_text(), (folder / "report.md").read_text()
    assert not {"script", "b", "link", "iframe"} & set(Tags(html).seen)
    images = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', html)
    assert len(images) >= 6
    for image in images:
        svg = base64.b64decode(image).decode()
        assert ElementTree.fromstring(svg).tag.endswith("svg")
        assert not re.search(r'href="(?!#)', svg)
    # No judgment of these chains is false.
    for name in {*RATES} - {"gain_after_false_judgment"}:
        words = name.replace("_", " ")
        assert words in html and f"- {words}: " in text, name
    solved = "| ours | 33.3% [0.0%, 66.7%] | 50.0% [16.7%, 83.3%] | 66.7% [33.3%, 100.0%] |"
    assert solved in text
    found = json.loads((folder / "results.json").read_text())
    last = found["critics"][0]["last"]["pass@1"]
    assert last == pytest.approx({"value": 1 / 2, "low": 1 / 6, "high": 5 / 6})


def test_several_evaluations_share_a_folder_and_keep_other_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = made(tmp_path / "a"), made(tmp_path / "b")
    for folder in (a, b):
        one_turn = [turn for turn in TWO_TURNS if turn.turn == 1]
        write_transcript_part(transcript_part_file(folder, "ours", 0), one_turn)
    page = tmp_path / "both.html"
    (tmp_path / "both.json").write_text("mine")
    assert report([str(a), str(b), "--out", str(page)]) == 2
    assert "both.json is there" in capsys.readouterr().err
    (tmp_path / "both.json").unlink()
    for _ in range(2):  # its own it replaces
        assert report([str(a), str(b), "--out", str(page)]) == 0
    text = page.with_suffix(".md").read_text()
    assert "| a: ours |" in text and "| b: ours |" in text
    assert "+0.0% [0.0%, 0.0%]" in text  # the same transcripts
    critics = json.loads(page.with_suffix(".json").read_text())["critics"]
    assert [critic["critic"] for critic in critics] == ["a: ours", "b: ours"]


def test_a_report_keeps_its_pass_at_k(tmp_path: Path) -> None:
    folder = made(tmp_path / "e")
    write_transcript_part(transcript_part_file(folder, "ours", 0), TWO_TURNS)

    def told() -> list[int]:
        assert "pass@2" in (folder / "report.md").read_text()
        return json.loads((folder / "results.json").read_text())["pass_at"]

    assert report([str(folder), "--pass-at", "2", "3"]) == 0 and told() == [1, 2, 3]
    assert report([str(folder)]) == 0 and told() == [1, 2, 3]
    (folder / "results.json").unlink()
    settings = json.loads((folder / "evaluation.json").read_text())
    settings["settings"]["samples"] = 2
    (folder / "evaluation.json").write_text(json.dumps(settings))
    assert report([str(folder)]) == 0 and told() == [1, 2]


def test_what_is_missing_of_an_evaluation_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = made(tmp_path / "e")
    settings = json.loads((folder / "evaluation.json").read_text())
    settings["critics"] = {name: {"path": name} for name in ("ours", "cut", "never")}
    (folder / "evaluation.json").write_text(json.dumps(settings))
    one_turn = [turn for turn in TWO_TURNS if turn.turn == 1]
    write_transcript_part(transcript_part_file(folder, "ours", 0), one_turn)
    write_transcript_part(
        transcript_part_file(folder, "ours", 1), [dataclasses.replace(t, seed=1) for t in one_turn]
    )
    cut = transcript_part_file(folder, "cut", 0)
    write_transcript_part(cut, [dataclasses.replace(t, critic="cut") for t in one_turn])
    cut.write_bytes(cut.read_bytes()[:-20])
    capsys.readouterr()
    assert report([str(folder)]) == 0
    out, page = capsys.readouterr().out, (folder / "report.html").read_text()
    for told in (
        f"transcripts/{cut.name}: line {len(one_turn)} is cut off",
        "cut has no transcript of seed 1",
        "never has no transcript",
    ):
        assert f"left out of {folder}: {told}" in out and told in page
        assert told in (folder / "report.md").read_text()
    assert json.loads((folder / "results.json").read_text())["left_out"]


def test_a_page_without_examples_or_judgments_has_no_section_for_them(tmp_path: Path) -> None:
    folder = made(tmp_path / "e")
    right = Verdict(passed=(True,), total=1)
    turns = [
        dataclasses.replace(t, critique=None, judgment=None, before=right, after=right)
        for t in TWO_TURNS
        if t.turn == 1
    ]
    write_transcript_part(transcript_part_file(folder, "ours", 0), turns)
    write_evaluation_report(folder)
    html = (folder / "report.html").read_text()
    assert "<h2>Solved after revision</h2>" in html
    assert "<h2>Examples</h2>" not in html and "<h2>Judgments</h2>" not in html


def test_every_table_of_rates_has_the_first_solutions_beside(tmp_path: Path) -> None:
    folder = made(tmp_path / "e")
    for name in ("ours", "theirs"):
        turns = [dataclasses.replace(t, critic=name) for t in TWO_TURNS]
        write_transcript_part(transcript_part_file(folder, name, 0), turns)
    found = {
        title: (note, head)
        for title, note, head, _ in report_tables(write_evaluation_report(folder))
    }
    for title in ("Solved after revision", "Judgments", "By difficulty"):
        assert "pass@1 before" in found[title][1]
    assert "pass@1 of these before: 33.3%" in found["Gains"][0]

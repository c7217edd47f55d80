"""Every sink receives what was logged, and says what is wrong when it cannot be built."""

from __future__ import annotations

import io
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from ctrl_megatron.config import load_config
from ctrl_megatron.errors import UserError
from ctrl_megatron.metrics import Display, JsonlWriter, build_sinks, read_json_lines
from ctrl_megatron.metrics.display import eta_seconds, format_number, format_seconds
from ctrl_megatron.metrics.sinks import ExampleSink, step_table
from ctrl_megatron.record.recorder import Recorder
from ctrl_megatron.run.checks.machine import check_loggers

CONFIG = {"trainer": {"project_name": "project", "experiment_name": "run"}}
METRICS = {"reward/mean": 0.25, "actor/ppo_kl": 1e-5, "perf/tokens_per_second": 240.0}


def plain_display(steps: int = 3) -> tuple[Display, io.StringIO]:
    buffer = io.StringIO()
    return Display(steps, console=Console(file=buffer, width=100)), buffer


def test_jsonl_appends_whole_lines(tmp_path: Path) -> None:
    for step in (1, 2):  # the second start continues the file
        (sink,) = build_sinks(["jsonl"], tmp_path, CONFIG)
        sink.log(step, METRICS)
        sink.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert text.endswith("\n")
    assert [json.loads(line) for line in text.splitlines()] == [
        {"step": 1, "metrics": METRICS},
        {"step": 2, "metrics": METRICS},
    ]


def test_non_finite_numbers_stay_valid_json(tmp_path: Path) -> None:
    lines = JsonlWriter(tmp_path / "x.jsonl")
    lines.append({"a": math.nan, "b": [math.inf, -math.inf, 1.5]})
    lines.close()
    lines.close()

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    record = json.loads((tmp_path / "x.jsonl").read_text(), parse_constant=refuse)
    assert math.isnan(float(record["a"]))
    assert [float(v) for v in record["b"]] == [math.inf, -math.inf, 1.5]


@pytest.mark.parametrize("tail", ['{"step": 3, "met', "x" * 200_000])
def test_a_killed_writer_does_not_spoil_the_next_line(tmp_path: Path, tail: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n' + tail)
    assert read_json_lines(path) == [{"step": 1}, {"step": 2}]
    lines = JsonlWriter(path)
    lines.append({"step": 3})
    lines.close()
    assert read_json_lines(path) == [{"step": 1}, {"step": 2}, {"step": 3}]


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"step": 1}\nnot json\n')
    with pytest.raises(ValueError, match=r"x\.jsonl line 2 is not JSON"):
        read_json_lines(path)
    path.write_text("[1]\n")
    with pytest.raises(ValueError, match="line 1 must be an object"):
        read_json_lines(path)


def test_tensorboard_events_can_be_read_back(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (sink,) = build_sinks(["tensorboard"], tmp_path, CONFIG)
    sink.log(1, METRICS)
    sink.log(2, {"reward/mean": 0.5})
    sink.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(events.Tags()["scalars"]) == set(METRICS)
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]


def test_tensorboard_shows_examples_as_texts(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (sink,) = build_sinks(["tensorboard"], tmp_path, CONFIG)
    assert isinstance(sink, ExampleSink)
    sink.log(3, METRICS)
    sink.show(3, [{"critique": "two\nlines \ud800", "reward": 0.5}, {"critique": "other"}])
    sink.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Tags()["tensors"] == ["examples/1", "examples/2"]
    assert events.SummaryMetadata("examples/1").plugin_data.plugin_name == "text"
    ((found,),) = [events.Tensors("examples/1")]
    (text,) = found.tensor_proto.string_val
    assert found.step == 3 and b"    two\n    lines \\ud800" in text and b"**reward**" in text


def test_console_prints_one_table_with_every_metric() -> None:
    display, buffer = plain_display()
    (sink,) = build_sinks(["console"], Path("."), CONFIG, display)
    sink.log(2, METRICS)
    text = buffer.getvalue()
    assert "step 2/3" in text
    for fragment in ("reward", "mean", "0.25", "ppo_kl", "1e-05", "tokens_per_second", "240"):
        assert fragment in text


@given(
    metrics=st.dictionaries(
        st.from_regex(r"[a-z]{1,8}(/[a-z_]{1,30})?", fullmatch=True), st.floats(), max_size=20
    ),
    width=st.integers(60, 200),
)
def test_a_table_of_anything_fits_any_width(metrics: dict[str, float], width: int) -> None:
    buffer = io.StringIO()
    Console(file=buffer, width=width).print(step_table(1, 0, metrics))
    assert all(len(line) <= width for line in buffer.getvalue().splitlines())


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (12.0, "12"), (0.12345, "0.1235"), (1e-6, "1e-06"), (12345.678, "12346")],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert format_number(value) == text


def test_a_share_is_shown_as_a_percentage() -> None:
    assert [format_number(v, percent=True) for v in (0.125, 1.0)] == ["12.5%", "100.0%"]


def test_display_writes_plain_lines_without_a_terminal() -> None:
    display, buffer = plain_display()
    display.start()
    display.begin_step(1)
    display.begin_phase("sandbox")
    display.begin_phase("old_log_probs")
    display.end_phase("old_log_probs")
    display.end_phase("sandbox")
    display.end_step(1)
    display.close()
    first, second, third = buffer.getvalue().splitlines()
    assert first.startswith("[step 1/3]") and first.endswith("sandbox")
    assert second.endswith("old_log_probs (beside sandbox)")
    assert third.startswith("[step 1/3] done in")
    assert third.endswith("to go")
    assert re.search(r"\(.*sandbox \d+\.\ds.*\)", third)
    assert "\x1b" not in buffer.getvalue()


def test_display_shows_phases_on_a_terminal() -> None:
    buffer = io.StringIO()
    display = Display(3, console=Console(file=buffer, width=100, force_terminal=True)).start()
    display.begin_step(1)
    display.begin_phase("critiques")
    assert display._bar is not None
    display._bar.refresh()
    display.console.print("above the bar")
    display.end_phase("critiques")
    display.end_step(1)
    display.close()
    text = buffer.getvalue()
    for fragment in ("step 1", "critiques", "0/3", "above the bar", "done in", "to go"):
        assert fragment in text


def test_eta_follows_the_recent_steps() -> None:
    assert eta_seconds([1000.0, *[2.0] * 10], 5) == 10.0
    assert eta_seconds([3.0], 0) == 0.0
    assert [format_seconds(s) for s in (4.4, 65, 7620)] == ["4s", "1m05s", "2h07m"]


class WandbRun:
    """With the arguments of wandb 0.31's ``Run``."""

    def __init__(self, calls: list[tuple[str, dict[str, Any]]]) -> None:
        self.calls = calls

    def log(
        self, data: dict[str, Any], step: int | None = None, commit: bool | None = None
    ) -> None:
        assert all(isinstance(key, str) for key in data)
        self.calls.append(("log", {"data": data, "step": step}))

    def finish(self, exit_code: int | None = None) -> None:
        self.calls.append(("finish", {}))


def wandb_stand_in(calls: list[tuple[str, dict[str, Any]]]) -> ModuleType:
    def init(
        entity: str | None = None,
        project: str | None = None,
        dir: str | None = None,
        id: str | None = None,
        name: str | None = None,
        notes: str | None = None,
        tags: Any = None,
        config: dict[str, Any] | None = None,
        *,
        resume: str | bool | None = None,
    ) -> WandbRun:
        # Values that wandb refuses.
        assert id is not None and not set(id) & set(":;,#?/'")
        told = {"project": project, "dir": dir, "id": id, "name": name, "resume": resume}
        calls.append(("init", {**told, "config": config}))
        return WandbRun(calls)

    module = ModuleType("wandb")
    vars(module).update(init=init)
    return module


def mlflow_stand_in(calls: list[tuple[str, dict[str, Any]]]) -> ModuleType:
    """With the arguments of mlflow 3.17's functions."""

    def set_experiment(experiment_name: str | None = None) -> None:
        calls.append(("set_experiment", {"project": experiment_name}))

    def start_run(run_id: str | None = None, *, run_name: str | None = None) -> None:
        calls.append(("start_run", {"name": run_name}))

    def log_dict(dictionary: dict[str, Any], artifact_file: str) -> None:
        calls.append(("log_dict", {"config": dictionary, "file": artifact_file}))

    def set_tag(key: str, value: Any) -> None:
        calls.append(("set_tag", {key: value}))

    def log_metrics(metrics: dict[str, float], step: int | None = None) -> None:
        calls.append(("log", {"data": metrics, "step": step}))

    def end_run(status: str = "FINISHED") -> None:
        calls.append(("finish", {}))

    module = ModuleType("mlflow")
    for function in (set_experiment, start_run, log_dict, set_tag, log_metrics, end_run):
        setattr(module, function.__name__, function)
    return module


class TrackioRun:
    """With the arguments of trackio 0.43's ``Run``."""

    def __init__(self, calls: list[tuple[str, dict[str, Any]]]) -> None:
        self.calls = calls

    def log(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.calls.append(("log", {"data": metrics, "step": step}))

    def finish(self) -> None:
        self.calls.append(("finish", {}))


def trackio_stand_in(calls: list[tuple[str, dict[str, Any]]]) -> ModuleType:
    def init(
        project: str,
        name: str | None = None,
        group: str | None = None,
        config: dict[str, Any] | None = None,
        resume: str = "never",
    ) -> TrackioRun:
        if project.endswith("_system"):
            raise ValueError(f"Project name {project!r} is not allowed")
        calls.append(("init", {"project": project, "name": name, "resume": resume}))
        calls.append(("config", {"config": config}))
        return TrackioRun(calls)

    module = ModuleType("trackio")
    vars(module).update(init=init)
    return module


class SwanlabRun:
    """With the arguments of swanlab 0.10's ``Run``."""

    def __init__(self, calls: list[tuple[str, dict[str, Any]]]) -> None:
        self.calls = calls

    def log(self, data: dict[str, Any], step: int | None = None) -> None:
        self.calls.append(("log", {"data": data, "step": step}))

    def finish(self, state: str = "success", error: str | None = None) -> None:
        self.calls.append(("finish", {}))


def swanlab_stand_in(calls: list[tuple[str, dict[str, Any]]]) -> ModuleType:
    def init(
        *,
        log_dir: str | None = None,
        mode: str | None = None,
        project: str | None = None,
        name: str | None = None,
        id: str | None = None,
        resume: str | bool | None = None,
        config: dict[str, Any] | None = None,
    ) -> SwanlabRun:
        assert id is not None and not set(id) & set('<>:"/\\|?* ')
        if project is not None and not re.fullmatch(r"[0-9a-zA-Z_\-+.]+", project):
            raise ValueError(f"project.name: {project!r} should match a pattern")
        assert log_dir is not None and log_dir.endswith("/swanlab")
        told = {"project": project, "dir": log_dir.removesuffix("/swanlab"), "id": id}
        calls.append(("init", {**told, "name": name, "resume": resume, "config": config}))
        return SwanlabRun(calls)

    module = ModuleType("swanlab")
    vars(module).update(init=init)
    return module


STAND_INS = [wandb_stand_in, mlflow_stand_in, trackio_stand_in, swanlab_stand_in]


@pytest.mark.parametrize("stand_in", STAND_INS)
def test_trackers_get_project_run_metrics_and_an_end(
    stand_in: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []
    module = stand_in(calls)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    config = {"trainer": {"project_name": "project", "experiment_name": "tries/7b: first"}}
    (sink,) = build_sinks([module.__name__], tmp_path, config)
    sink.log(4, METRICS)
    sink.log(4, {"val/pass_rate": 0.5})
    sink.close()
    began, said = [told for name, told in calls if name not in ("log", "finish")], calls[-3:]
    given = {key: value for told in began for key, value in told.items()}
    assert given["project"] == "project" and given["name"] == "tries/7b: first"
    assert given["config"] == config
    if module.__name__ != "trackio":  # which has a folder for all projects
        assert str(tmp_path) in (given.get("dir"), given.get("run_dir"))
    assert said == [
        ("log", {"data": METRICS, "step": 4}),
        ("log", {"data": {"val/pass_rate": 0.5}, "step": 4}),
        ("finish", {}),
    ]
    # A run that is resumed goes on under its name.
    ids = {"wandb": "tries-7b- first", "swanlab": "tries-7b--first"}
    assert given.get("id") == ids.get(module.__name__)
    assert given.get("resume") == (None if module.__name__ == "mlflow" else "allow")


@pytest.mark.parametrize(
    ("stand_in", "project"), [(trackio_stand_in, "my_system"), (swanlab_stand_in, "my project")]
)
def test_a_project_that_a_tracker_refuses_is_an_error_of_the_key(
    stand_in: Any, project: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = stand_in([])
    monkeypatch.setitem(sys.modules, module.__name__, module)
    config = {"trainer": {"project_name": project, "experiment_name": "run"}}
    with pytest.raises(UserError, match=rf"^trainer\.project_name: .*{project}"):
        build_sinks([module.__name__], tmp_path, config)


OWN_SINK = """
class Paper:
    def __init__(self, run_dir, config):
        self.lines = [config["trainer"]["experiment_name"]]
        self.file = run_dir / "paper.txt"

    def log(self, step, metrics):
        self.lines += [f"{step} {name} {value}" for name, value in metrics.items()]

    def close(self):
        self.file.write_text("\\n".join(self.lines))


class Torn(Paper):
    def log(self, step, metrics):
        raise OSError("no paper left")


class Blank:
    def log(self, step, metrics): ...


def paper(run_dir, config): ...
"""


def test_a_class_of_the_users_is_a_sink(tmp_path: Path) -> None:
    file = tmp_path / "papers.py"
    file.write_text(OWN_SINK)
    sinks = build_sinks(["jsonl", f"{file}:Paper"], tmp_path, CONFIG)
    for sink in sinks:
        sink.log(4, {"reward/mean": 0.25})
        sink.close()
    assert (tmp_path / "paper.txt").read_text() == "run\n4 reward/mean 0.25"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Blank", "has no method close; name a class"),
        ("paper", "has no method log and no close; name a class"),
        ("Scissors", "cannot import .*Scissors"),
    ],
)
def test_what_is_no_sink_is_refused_before_the_run(tmp_path: Path, name: str, said: str) -> None:
    file = tmp_path / "papers.py"
    file.write_text(OWN_SINK)
    config = load_config(None, [f"trainer.logger=[{file}:{name}]"], "none")
    with pytest.raises(UserError, match=rf"^trainer\.logger: .*{said}"):
        check_loggers(config)


def test_an_error_of_the_users_sink_names_key_and_line(tmp_path: Path) -> None:
    file = tmp_path / "papers.py"
    file.write_text(OWN_SINK)
    (sink,) = build_sinks([f"{file}:Torn"], tmp_path, CONFIG)
    with pytest.raises(UserError, match=r"^trainer\.logger: .*no paper left .*papers\.py line 16"):
        sink.log(1, METRICS)


@pytest.mark.parametrize("stand_in", STAND_INS)
def test_trackers_get_no_secret(
    stand_in: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []
    module = stand_in(calls)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setenv("TEAM", "our-team")
    overrides = (
        *("data.train_files=rows", "actor_rollout_ref.model.path=model", "reward.provider=e2b"),
        *(
            "reward.provider_options={api_key: correct-horse}",
            f"trainer.logger=[{module.__name__}]",
        ),
        "actor_rollout_ref.rollout.engine_kwargs={hf_token: correct-horse}",
        *("trainer.project_name=${oc.env:TEAM}", f"trainer.default_local_dir={tmp_path}"),
    )
    recorder = Recorder(load_config(None, overrides), active=True, total_steps=1)
    recorder.record_config()
    recorder.close(report=False)
    said = str(calls)
    assert "'***'" in said and "correct-horse" not in said and "'project': 'our-team'" in said
    assert "correct-horse" not in (tmp_path / "run/config.yaml").read_text()


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio", "swanlab", "tensorboard"])
def test_a_missing_library_is_a_clear_error(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = "tensorboard.compat.proto" if name == "tensorboard" else name
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ValueError, match=rf"trainer\.logger.*{name}.*pip install {name}"):
        build_sinks(["jsonl", name], tmp_path, CONFIG)


def test_metrics_load_without_heavy_libraries() -> None:
    code = (
        "import sys; import ctrl_megatron.metrics, ctrl_megatron.metrics.report;"
        "heavy = {'torch', 'matplotlib', 'tensorboard', 'wandb', 'mlflow', 'trackio', 'swanlab'};"
        "heavy &= set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_resumed_run_counts_on_and_long_lines_stay_whole() -> None:
    display, buffer = plain_display(steps=7)
    line = f"saved /runs/{'x' * 200}/[red]"
    display.start().print_line(line)
    display.begin_step(5)
    display.begin_phase("generate")
    display.close()
    first, second = buffer.getvalue().splitlines()
    assert first == line
    assert second.startswith("[step 5/7]") and second.endswith("generate")

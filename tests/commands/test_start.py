"""Wrong input is refused once and without a traceback; ranks start and end as they should."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ctrl_megatron.commands import start
from ctrl_megatron.commands.launcher import LaunchResult
from ctrl_megatron.errors import UserError

ROOT = Path(__file__).parents[2]
CONFIG = "examples/ctrl_smollm2_cpu.yaml"
TORCHRUN = (
    *(sys.executable, "-m", "torch.distributed.run"),
    *("--standalone", "--nproc-per-node", "2"),
)
MISSPELT = ("--config", CONFIG, "data.train_bach_size=4")

PROGRAM = f"""
import os, signal, subprocess, sys, time
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from ctrl_megatron.commands import launcher
from ctrl_megatron.commands.start import command_entry_point, load_config_or_launch
from ctrl_megatron.config.environment import read_restart_count
from ctrl_megatron.errors import STOPPED, open_user_code_note, convert_user_code_errors

launcher._LEFT_SECONDS = 1.0
launcher._FROZEN_SECONDS = 2.0
launcher._FIRST_PAUSE = 60.0 if "trainer.experiment_name=pausing" in sys.argv else 0.1

asked = []

def on_signal(number, frame):
    print("asked to stop", flush=True)
    asked.append(number)

def meet(how):
    # Rank 1 never arrives.
    import torch.distributed
    from ctrl_megatron.parallel import stop as stops
    from ctrl_megatron.parallel.stop import StopFlag

    stops._MEETING_SECONDS = 1.0
    stop = StopFlag().install()
    met = Path(__file__).with_name("meets")
    if os.environ["RANK"] == "1":
        while not met.exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGSTOP if how == "meeting_frozen" else signal.SIGKILL)
    print("meets", flush=True)
    met.touch()
    with stop.end_on_stop(lambda: os._exit(STOPPED)):
        torch.distributed.init_process_group("gloo")

def restarted(run_dir):
    # The first start and the first restart save a step each, the second restart saves none.
    rank, restarts = os.environ["RANK"], read_restart_count()
    if rank == "0":  # ends in silence, however soon rank 1 is killed
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ready = run_dir / f"{{restarts}}.ready"
    if rank == "0":
        none = subprocess.DEVNULL
        left = subprocess.Popen(["sleep", "600"], stdout=none, stderr=none, start_new_session=True)
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "left").open("a").write(f"{{left.pid}} ")
        (run_dir / f"checkpoints/global_step_{{min(restarts, 1) + 3}}").mkdir(
            parents=True, exist_ok=True
        )
        ready.touch()
        time.sleep(60)
    while not ready.exists():
        time.sleep(0.02)
    os.kill(os.getpid(), 9)

def train(config):
    how = config.trainer.experiment_name
    if how == "restarted":
        restarted(config.trainer.run_dir)
    if how == "waiting":
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, on_signal)
    if how.startswith("meeting"):
        meet(how)
    print(f"rank {{os.environ['RANK']}} of {{os.environ['WORLD_SIZE']}}", flush=True)
    if how == "killed":
        os.kill(os.getpid(), 9)
    if how in ("failed", "pausing"):
        os._exit(13)
    if how == "user":
        # A rank that still starts would say that it was stopped.
        folder = Path(__file__).parent
        (folder / f"there.{{os.environ['RANK']}}").touch()
        while len(list(folder.glob("there.*"))) < 2:
            time.sleep(0.02)
        open_user_code_note()
        with convert_user_code_errors("reward 'mine.py:score' failed"):
            os._exit(7)
    if how == "faulty":
        raise RuntimeError("ours")
    if how == "waiting":
        while not asked:
            time.sleep(0.02)
    return how == "finished"


@command_entry_point("program")
def main(arguments):
    config = load_config_or_launch("program", "sft", arguments, None, lambda config: None)
    return config if isinstance(config, int) else 0 if train(config) else STOPPED

if __name__ == "__main__":
    raise SystemExit(main())
"""


def run(*command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True)


def test_a_misspelt_key_under_torchrun_is_printed_once() -> None:
    done = run(*TORCHRUN, "tools/train_rl.py", *MISSPELT)
    assert done.returncode != 0
    assert (done.stdout + done.stderr).count("unknown key 'data.train_bach_size'") == 1
    assert "exitcode  : 2" in done.stderr


def test_the_launcher_of_jobs_has_the_exit_code_of_a_rank() -> None:
    launcher = ("-m", "ctrl_megatron.commands.launcher", *TORCHRUN[3:])
    done = run(sys.executable, *launcher, "tools/train_rl.py", *MISSPELT)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("train_rl: ") and "did you mean 'data.train_batch_size'?" in line


@pytest.mark.parametrize("name", ["train_rl", "train_sft"])
def test_a_misspelt_key_is_refused_before_ranks_are_started(name: str) -> None:
    module = ("-m", f"ctrl_megatron.commands.{name}", "--nproc-per-node", "2")
    done = run(sys.executable, *module, *MISSPELT)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{name}: ") and "did you mean 'data.train_batch_size'?" in line


@pytest.mark.parametrize(
    ("tool", "arguments", "words"),
    [
        ("train_rl", (), "required: --config"),
        ("train_rl", ("--config", "none.yaml"), "none.yaml"),
        ("train_rl", ("--config", CONFIG, "--nproc-per-node", "0"), "must be at least 1"),
        ("plan", ("--config", CONFIG, "data.sead=1"), "'data.sead'"),
    ],
)
def test_a_tool_refuses_from_a_checkout(
    tmp_path: Path, tool: str, arguments: tuple[str, ...], words: str
) -> None:
    given = [str(ROOT / word) if word == CONFIG else word for word in arguments]
    done = run(sys.executable, str(ROOT / "tools" / f"{tool}.py"), *given, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"{tool}: ") and words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("evaluate", ("--config", CONFIG, "no_equals_sign"), "STAGE=DIR"),
        ("evaluate", ("--config", CONFIG, "a=b", "--set", "data.sead=1"), "'data.sead'"),
        (
            "evaluate",
            ("--config", CONFIG, "a=b", "--proxy", "own=shared", "big=/nowhere"),
            "--proxy big: '/nowhere' is no directory",
        ),
        (
            "evaluate",
            ("--config", CONFIG, "a=b", "--proxy", "own=shared", "--rows", "x=y"),
            "--rows: 'x=y' must be NAME=FILE",
        ),
        ("convert_hf_to_megatron", ("--hf", "nowhere"), "required: --out"),
        ("convert_megatron_to_hf", ("--model", "both"), "invalid choice: 'both'"),
    ],
)
def test_a_command_refuses_as_a_module(name: str, arguments: tuple[str, ...], words: str) -> None:
    done = run(sys.executable, "-m", f"ctrl_megatron.commands.{name}", *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(f"{name}: ") and words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def program(tmp_path: Path) -> list[str]:
    """A command whose ``train`` ends as trainer.experiment_name says, and its configuration."""
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "model").mkdir()
    for name in (
        "model/config.json",
        "model/tokenizer.json",
        "model/tokenizer_config.json",
        "rows",
    ):
        (tmp_path / name).touch()
    model, rows = tmp_path / "model", tmp_path / "rows"
    return [
        *(sys.executable, str(tmp_path / "program.py"), "--config", str(ROOT / CONFIG)),
        *(f"actor_rollout_ref.model.path={model}", f"sft.train_files=[{rows}]"),
        *(f"sft.val_files=[{rows}]", f"trainer.default_local_dir={tmp_path}"),
        "actor_rollout_ref.model.dtype=float32",
    ]


@pytest.mark.parametrize(
    ("how", "code"), [("finished", 0), ("stopped", 130), ("failed", 13), ("killed", 137)]
)
def test_started_ranks_end_the_command_with_their_code(
    program: list[str], how: str, code: int
) -> None:
    done = run(*program, f"trainer.experiment_name={how}", "--nproc-per-node", "2")
    assert done.returncode == code, done.stderr
    assert "of 2" in done.stdout and "Traceback" not in done.stderr
    assert ("program: rank" in done.stderr) == (how in ("failed", "killed"))


def test_ranks_are_started_again_until_there_is_no_progress(
    program: list[str], tmp_path: Path
) -> None:
    command = [*program, "trainer.experiment_name=restarted", "--nproc-per-node", "2"]
    done = run(*command, "--max-restarts", "1")
    assert done.returncode == 137
    # Step 4 was saved after the first restart, so that another one followed.
    killed = "program: rank 1 was killed by signal 9"
    assert done.stderr.splitlines() == [
        f"{killed}; restart 1 of at most 1 from the checkpoint of step 3 in 0 s",
        f"{killed}; restart 1 of at most 1 from the checkpoint of step 4 in 0 s",
        "program: given up: the last restart (1 of 1 in a row) has brought no new checkpoint",
        killed,
    ]
    # What the ranks of a start have left ends before the next one.
    left = (tmp_path / "restarted/left").read_text().split()
    assert len(left) == 3 and not [pid for pid in left[:2] if psutil.pid_exists(int(pid))]
    os.kill(int(left[2]), signal.SIGKILL)


def test_a_signal_ends_the_pause_before_a_restart(program: list[str]) -> None:
    command = [*program, "trainer.experiment_name=pausing", "--nproc-per-node", "2"]
    with subprocess.Popen(
        [*command, "--max-restarts", "1"], cwd=ROOT, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        if "stopped" in line:
            # The other rank was ended while it raised its own error.
            line = process.stderr.readline()
        assert "exit code 13; restart 1 of at most 1 from the start, without a checkpoint" in line
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 130
        assert process.stderr.read() == ""


@pytest.mark.parametrize(
    ("end", "restarts"),
    [
        (LaunchResult(0), False),
        (LaunchResult(2), False),
        (LaunchResult(130), False),
        (LaunchResult(7, 1, ", while this ran: mine"), False),
        (LaunchResult(-9, 1, ", while this ran: mine"), True),
        (LaunchResult(-11), True),
        (LaunchResult(1), True),
        (LaunchResult(13), True),
        (LaunchResult(14), True),
    ],
    ids=str,
)
def test_a_restart_repairs_no_wrong_input_and_follows_no_stop(
    end: LaunchResult, restarts: bool
) -> None:
    assert end.may_restart == restarts


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "add --nproc-per-node; under torchrun, give --max-restarts to torchrun"),
        (
            ("--nproc-per-node", "2", "trainer.resume_mode=disable"),
            "trainer.resume_mode=disable lets every restart begin with step 1",
        ),
        (("--nproc-per-node", "2", "--max-restarts", "-1"), "must be at least 0"),
    ],
)
def test_restarts_that_would_not_resume_are_refused(
    program: list[str], arguments: tuple[str, ...], words: str
) -> None:
    given = ["--max-restarts", "1", *arguments, *program[2:]]
    with pytest.raises(UserError, match=f"--max-restarts.*{re.escape(words)}"):
        start.load_config_or_launch("program", "sft", given, None, lambda config: None)


def test_users_code_that_ends_a_rank_is_named(program: list[str]) -> None:
    done = run(*program, "trainer.experiment_name=user", "--nproc-per-node", "2")
    assert done.returncode == 7
    # The other rank may have been about to start when the launcher stopped it.
    ended = (
        r"(program: stopped; nothing was changed\n)?"
        r"program: rank [01] ended with exit code 7, while this ran: reward 'mine.py:score'\n"
    )
    assert re.fullmatch(ended, done.stderr), done.stderr


@pytest.mark.parametrize("launcher", [pytest.param("torchrun", marks=pytest.mark.long), "own"])
def test_a_fault_of_ours_has_one_traceback(program: list[str], launcher: str) -> None:
    command = [*program, "trainer.experiment_name=faulty"]
    if launcher == "own":
        done = run(*command, "--nproc-per-node", "2")
        assert done.returncode == 1 and done.stderr.count("Traceback") == 1, done.stderr
        assert done.stderr.splitlines()[-1].startswith("program: rank ")
    else:
        done = run(*TORCHRUN, *command[1:])
        assert done.returncode != 0
    assert done.stderr.count("RuntimeError: ours") == 1, done.stderr


def test_ranks_are_not_started_twice(program: list[str]) -> None:
    done = run(*TORCHRUN, *program[1:], "--nproc-per-node", "2")
    text = "torchrun has started this one; leave it out"
    assert (done.stdout + done.stderr).count(text) == 1


@pytest.mark.parametrize(
    ("local_rank", "printed", "seconds"),
    [(0, "program: wrong\n", 10), (1, "", 60)],
    ids=["first", "other"],
)
def test_a_machine_whose_launcher_leaves_it_alone_speaks_once(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    local_rank: int,
    printed: str,
    seconds: float,
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    monkeypatch.setattr(time, "monotonic", lambda: sum(waited))
    launched = {"RANK": 4 + local_rank, "WORLD_SIZE": 8, "LOCAL_RANK": local_rank}
    launched |= {"LOCAL_WORLD_SIZE": 4, "MASTER_ADDR": "first", "MASTER_PORT": 1}
    for variable, value in launched.items():
        monkeypatch.setenv(variable, str(value))
    assert start.report_refusal("program", UserError("wrong"), os.getppid()) == 2
    assert capsys.readouterr().err == printed
    assert sum(waited) == pytest.approx(seconds, abs=1)
    # Nobody waits for a launcher that has ended.
    waited.clear()
    assert start.report_refusal("program", UserError("wrong"), os.getpid()) == 2
    assert capsys.readouterr().err == printed and not waited


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.long)]
)
def test_a_signal_reaches_the_ranks_and_ends_the_command(program: list[str], number: int) -> None:
    command = [*program, "trainer.experiment_name=waiting", "--nproc-per-node", "2"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for _ in range(2):
            process.stdout.readline()
        process.send_signal(number)
        output, errors = process.communicate(timeout=60)
    assert output.count("asked to stop") == 2
    assert process.returncode == 130, errors
    assert "Traceback" not in errors


def test_under_nohup_the_end_of_a_terminal_ends_nothing(program: list[str]) -> None:
    command = [*program, "trainer.experiment_name=waiting", "--nproc-per-node", "2"]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    ) as process:
        assert process.stdout is not None
        for _ in range(2):
            process.stdout.readline()
        ranks = psutil.Process(process.pid).children()
        for one in (process.pid, *(rank.pid for rank in ranks)):
            os.kill(one, signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    assert output.count("asked to stop") == 2 and process.returncode == 130


@pytest.mark.parametrize(
    ("how", "code"), [("frozen", 130), pytest.param("killed", 137, marks=pytest.mark.long)]
)
def test_ranks_that_wait_for_a_missing_one_end(program: list[str], how: str, code: int) -> None:
    command = [*program, f"trainer.experiment_name=meeting_{how}", "--nproc-per-node", "2"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "meets\n"
        if how == "frozen":
            ranks = psutil.Process(process.pid).children()
            while not any(rank.status() == psutil.STATUS_STOPPED for rank in ranks):
                time.sleep(0.1)
            process.send_signal(signal.SIGTERM)
        assert process.wait(30) == code


DISCARDED = f"""
import signal, sys, time
sys.path.insert(0, {str(ROOT)!r})
from ctrl_megatron.commands.start import command_entry_point

class Destroyed:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)

@command_entry_point("program")
def main(arguments=None):
    Destroyed()  # what its destructor raises is discarded
    time.sleep(60)
    return 0

raise SystemExit(main())
"""


def test_an_interrupt_that_python_discards_is_raised_again() -> None:
    done = subprocess.run(
        [sys.executable, "-c", DISCARDED], capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stderr) == (130, "program: stopped; nothing was changed\n")


SLOW_TO_STOP = """
import signal, sys, time

def on_signal(number, frame):
    time.sleep(1)  # ranks end, a state is saved
    print(f"saved after signal {number}", flush=True)
    sys.exit(130)

signal.signal(signal.SIGINT, on_signal)
signal.signal(signal.SIGTERM, on_signal)
print("works", flush=True)
time.sleep(60)
"""
PARENT = f"""
import pathlib, sys
sys.path.insert(0, {str(ROOT)!r})
from ctrl_megatron.commands.start import command_entry_point, run_child

@command_entry_point("parent", stopped="the same command goes on")
def main(arguments=None):
    code = run_child([sys.executable, "-c", {SLOW_TO_STOP!r}], pathlib.Path())
    raise AssertionError(f"went on after {{code}}")

raise SystemExit(main())
"""


def default_interrupt() -> None:
    """In a child before it starts: a job in a shell's background inherits an ignored SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("whole_group", [True, False], ids=["from the terminal", "kill"])
def test_a_signal_waits_until_the_other_command_has_ended(number: int, whole_group: bool) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
        preexec_fn=default_interrupt,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "works\n"
        for _ in range(2):  # an impatient hand
            (os.killpg if whole_group else os.kill)(process.pid, number)
            time.sleep(0.1)
        output, errors = process.communicate(timeout=60)
    assert output == f"saved after signal {number}\n"
    assert errors == "parent: stopped; the same command goes on\n"
    assert process.returncode == 130


def test_another_command_ends_with_its_code(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    words = [sys.executable, "-c", "import os, sys; sys.exit(len(os.listdir()))"]
    assert start.run_child(words, tmp_path) == 0
    (tmp_path / "a").touch()
    assert start.run_child(words, tmp_path) == 1
    assert signal.getsignal(signal.SIGINT) is before

"""The training scripts of slurm/ with stand-ins for SLURM's commands, torchrun and Python.

``tests/integration/test_slurm_cluster.py`` runs them in a real SLURM.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from ctrl_megatron.config import load_config

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "slurm/ctrl_70b.sh"
SCRIPTS = {
    # name -> (machines, seconds of notice, program, configuration, what it trains)
    "ctrl_70b": (8, 1800, "tools/train_rl.py", "examples/ctrl_70b.yaml", "rl"),
    "ctrl_7b": (1, 600, "tools/train_rl.py", "examples/ctrl_7b.yaml", "rl"),
    "sft_70b": (8, 1800, "tools/train_sft.py", "examples/ctrl_70b.yaml", "sft"),
}
SECONDS = 60
ENVIRONMENTS = ("vllm.env", "torchrun.env")

# Runs its command once, as the first machine would; the step's own options stand in a file.
SRUN = """
printf '%s\\n' "$@" >> "$STUBS/srun.args"
echo -- >> "$STUBS/srun.args"
while [[ $1 == --* ]]; do shift; done
SLURM_NODEID=0 exec "$@"
"""
SCONTROL = """
echo "$*" >> "$STUBS/scontrol.calls"
[[ $1 != show ]] || printf 'gpu%02d\\n' $(seq 1 "${!3}")
"""
SQUEUE = """
[[ $* != *format=%N ]] || { echo LEFT; exit; }
echo "$STATE"
"""
SINFO = """
echo idle; [[ -e "$STUBS/asked" ]] || echo 'mix*'; touch "$STUBS/asked"
"""
PYTHON = """
[[ $1 != -m ]] || { shift 2; exec "${0%/*}/torchrun" "$@"; }
printf '%s\\n' "$@" >> "$STUBS/${1##*/}.args"
[[ $1 != *check_env.py ]] || exit "$HEALTH"
[[ $* != *--left* ]] || { echo "$USED"; exit; }
[[ $* != *--ranks* ]] || { echo "$RANKS"; exit; }
[[ $1 != *plan.py ]] || exit "$PLAN"
[[ $1 != -c ]] || echo "$STUBS/run"
"""
TORCHRUN = """
printf '%s\\n' "$@" > "$STUBS/torchrun.args"
env > "$STUBS/torchrun.env"
ulimit -S -n > "$STUBS/torchrun.files"
exit "$STATUS"
"""
FAILING_TORCHRUN = """
echo "$*" >> "$STUBS/starts"
env > "$STUBS/torchrun.env"
touch "$STUBS/up"
(($(wc -l < "$STUBS/starts") > FAILS)) || exit 1
"""
WAITING_TORCHRUN = """
trap 'touch "$STUBS/asked"; exit 1' TERM
touch "$STUBS/up"
while true; do sleep 0.1; done
"""
SLOW_PYTHON = """
touch "$STUBS/up"
sleep 3
"""


def write_program(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\nset -eu\n{body}")
    path.chmod(0o755)


@pytest.fixture
def job(tmp_path: Path) -> dict[str, str]:
    """The environment of a job of 8 machines; programs and their records lie in STUBS."""
    slurm = {"srun": SRUN, "scontrol": SCONTROL, "squeue": SQUEUE, "sinfo": SINFO}
    for name, body in slurm.items():
        write_program(tmp_path / "bin" / name, body)
    write_program(tmp_path / "venv/bin/torchrun", TORCHRUN)
    write_program(tmp_path / "venv/bin/python", PYTHON)
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    for name in ("slurm", "tools", "examples"):
        (checkout / name).symlink_to(ROOT / name)
    return {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "STUBS": str(tmp_path),
        "HOSTS": "8",
        "LEFT": "8",
        "MAX_RESTARTS": "0",
        "RESTART_SECONDS": "0",
        "SLURM_RETRY_SECONDS": "0",
        "STATUS": "0",
        "HEALTH": "0",
        "PLAN": "0",
        "RANKS": "8",
        "STATE": "RUNNING",
        "CTRL_VENV": str(tmp_path / "venv"),
        "SLURM_JOB_ID": "31234",
        # The stand-in for scontrol takes the number of machines from the variable of that name.
        "SLURM_JOB_NODELIST": "HOSTS",
        "SLURM_JOB_NUM_NODES": "8",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_CPUS_ON_NODE": "192",
        "SLURM_SUBMIT_DIR": str(checkout),
    }


def submit(
    job: Mapping[str, str], *arguments: str, script: Path = SCRIPT
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(script), *arguments],
        env=dict(job),
        cwd="/",
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


def signalled(job: Mapping[str, str], *signals: signal.Signals) -> tuple[int, str]:
    """(exit code, errors) of a script that gets signals as soon as STUBS/up is there."""
    with subprocess.Popen(
        ["bash", str(SCRIPT)],
        env=job,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            deadline = time.monotonic() + SECONDS
            while not (Path(job["STUBS"]) / "up").exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            for number in signals:
                process.send_signal(number)
            errors = process.communicate(timeout=SECONDS)[1]
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, errors


def lines(job: Mapping[str, str], name: str) -> list[str]:
    file = Path(job["STUBS"]) / name
    return file.read_text().splitlines() if file.exists() else []


def requeued(job: Mapping[str, str]) -> bool:
    return lines(job, "scontrol.calls")[-1] == "requeue 31234"


def crashes(job: Mapping[str, str]) -> str | None:
    file = Path(job["SLURM_SUBMIT_DIR"], "ctrl_70b-31234.crashes")
    return file.read_text().strip() if file.exists() else None


@pytest.mark.parametrize("name", [*SCRIPTS, "common"])
def test_bash_and_shellcheck_accept_the_scripts(name: str) -> None:
    script = ROOT / "slurm" / f"{name}.sh"
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert os.access(script, os.X_OK) == (name != "common")
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "-x", str(script)], check=True, cwd=ROOT)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_asks_for_whole_machines_and_a_signal_before_the_end(name: str) -> None:
    machines, notice, *_ = SCRIPTS[name]
    text = (ROOT / "slurm" / f"{name}.sh").read_text()
    asked = dict(re.findall(r"^#SBATCH (--[\w-]+)(?:=(\S+))?$", text, re.M))
    assert asked["--job-name"] == name and asked["--nodes"] == str(machines)
    assert asked["--gpus-per-node"] == "8" and asked["--ntasks-per-node"] == "1"
    assert asked["--mem"] == "0" and {"--exclusive", "--requeue"} <= set(asked)
    assert asked["--signal"] == f"B:USR1@{notice}"


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_starts_torchrun_on_every_machine(job: dict[str, str], name: str) -> None:
    *_, program, config, purpose = SCRIPTS[name]
    given = ("trainer.total_epochs=1", "trainer.logger=[console, jsonl]")
    done = submit(job, *given, script=ROOT / "slurm" / f"{name}.sh")
    assert done.returncode == 0, done.stderr
    text = "\n".join(lines(job, "srun.args"))
    health, run = (part.strip().splitlines() for part in text.split("\n--\n")[:2])
    names = ",".join(f"gpu{number:02}" for number in range(1, 9))
    everywhere = [
        *("--nodes=8", f"--nodelist={names}", "--ntasks=8", "--ntasks-per-node=1"),
        *("--cpus-per-task=192", "--cpu-bind=none", "--mem=0"),
    ]
    assert health[:8] == [*everywhere, "--label"]
    assert run[:9] == [*everywhere, "--kill-on-bad-exit=0", "--wait=120"]
    assert f"{job['CTRL_VENV']}/bin/python\n-m\nctrl_megatron.commands.launcher\n--nnodes" in text
    assert lines(job, "check_env.py.args") == [
        *("tools/check_env.py", "--config", config, "--purpose", purpose),
        *("--nproc-per-node", "8", *given),
    ]
    assert lines(job, "torchrun.args") == [
        *("--nnodes", "8", "--nproc-per-node", "8"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "gpu01:21234", "--rdzv-id", "31234-0-0"),
        *("--max-restarts", "0", "--shutdown-timeout", "3600"),
        *(program, "--config", config, *given),
    ]
    environment = {
        name: value for name, _, value in (x.partition("=") for x in lines(job, "torchrun.env"))
    }
    # A rank sets it for itself, so that engines and sandboxes do not get it.
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in environment
    assert environment["PATH"].startswith(f"{job['CTRL_VENV']}/bin:")
    ours = [name for name in environment if name.startswith("CTRL_") or name == "CONFIG"]
    assert ours == ["CTRL_RUN_KEY"] and len(environment["CTRL_RUN_KEY"]) == 64
    assert lines(job, "scontrol.calls") == ["show hostnames HOSTS"]
    hard = subprocess.run(["bash", "-c", "ulimit -H -n"], capture_output=True, text=True)
    assert lines(job, "torchrun.files") == [hard.stdout.strip()]


def test_gpus_of_engines_get_no_ranks(job: dict[str, str]) -> None:
    assert submit(job | {"RANKS": "6"}, "actor_rollout_ref.proxy.kind=engine").returncode == 0
    for file in ("torchrun.args", "check_env.py.args"):
        words = lines(job, file)
        assert words[words.index("--nproc-per-node") + 1] == "6"
    asked = lines(job, "plan.py.args")
    assert asked.count("--ranks") == 1 and asked.count("actor_rollout_ref.proxy.kind=engine") == 2


def test_the_last_machines_serve_the_proxy_and_have_no_ranks(job: dict[str, str]) -> None:
    stubs = Path(job["STUBS"])
    server = 'echo "$@" > "$STUBS/asked"; env > "$STUBS/vllm.env"; mv "$STUBS/asked" "$STUBS/vllm"'
    write_program(stubs / "venv/bin/vllm", f"{server}; kill $PPID")
    waits = 'until [[ -e $STUBS/vllm ]]; do sleep 0.1; done; echo "${@: -1}" >> "$STUBS/health"'
    write_program(stubs / "bin/curl", waits)
    job |= {"PROXY_NODES": "2", "PROXY_MODEL": "/models/big"}
    done = submit(job | {"PROXY_ARGS": "--tensor-parallel-size 8"}, "trainer.total_epochs=1")
    assert done.returncode == 0, done.stderr
    assert lines(job, "vllm") == ["serve /models/big --port 31234 --tensor-parallel-size 8"]
    assert lines(job, "health") == [f"http://gpu0{i}:31234/health" for i in (7, 8)]
    words = lines(job, "torchrun.args")
    assert words[1] == "6" and words[-4:] == [
        "trainer.total_epochs=1",
        "actor_rollout_ref.proxy.kind=api",
        "actor_rollout_ref.proxy.api.model=/models/big",
        "actor_rollout_ref.proxy.api.base_url=[http://gpu07:31234/v1,http://gpu08:31234/v1]",
    ]
    config = "actor_rollout_ref.proxy.model.path=null"
    load_config(ROOT / "examples/ctrl_70b.yaml", [*words[-3:], config], "none")
    # Nobody else on the network may use the servers.
    keys = [dict(x.split("=", 1) for x in lines(job, f) if "API_KEY=" in x) for f in ENVIRONMENTS]
    assert len(keys[0]["VLLM_API_KEY"]) == 48
    assert keys[0]["VLLM_API_KEY"] == keys[1]["OPENAI_API_KEY"]
    assert not [x for x in lines(job, "torchrun.env") if x.startswith("PROXY_")]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"PROXY_NODES": "8", "PROXY_MODEL": "m"}, "leaves no machine of 8 for ranks"),
        ({"PROXY_NODES": "1"}, "needs PROXY_MODEL"),
    ],
)
def test_machines_of_the_proxy_that_cannot_be_are_named(
    job: dict[str, str], given: dict[str, str], said: str
) -> None:
    done = submit(job | given)
    assert done.returncode == 2 and said in done.stderr


def test_another_configuration_and_a_requeued_job(job: dict[str, str]) -> None:
    job |= {"CONFIG": "examples/ctrl_7b.yaml", "SLURM_RESTART_COUNT": "2"}
    assert submit(job).returncode == 0
    words = lines(job, "torchrun.args")
    assert words[words.index("--config") + 1] == "examples/ctrl_7b.yaml"
    assert words[words.index("--rdzv-id") + 1] == "31234-2-0"


def test_everything_runs_in_the_container_where_there_is_one(job: dict[str, str]) -> None:
    apptainer = 'until [[ $1 == *.sif ]]; do shift; done; echo "${3##*/}" >> "$STUBS/inside"'
    write_program(Path(job["STUBS"], "bin/apptainer"), f'{apptainer}; shift; exec "$@"')
    done = submit(job | {"CONTAINER": "apptainer exec --nv --bind /shared image.sif"})
    assert done.returncode == 0, done.stderr
    assert lines(job, "inside") == ["plan.py", "plan.py", "check_env.py", "-m"]


NEEDED = (
    "CTRL_VENV SLURM_JOB_ID SLURM_JOB_NODELIST SLURM_JOB_NUM_NODES SLURM_GPUS_ON_NODE "
    "SLURM_CPUS_ON_NODE SLURM_SUBMIT_DIR"
)


@pytest.mark.parametrize("name", NEEDED.split())
def test_a_missing_variable_is_named(job: dict[str, str], name: str) -> None:
    del job[name]
    done = submit(job)
    assert done.returncode != 0
    assert f"{name}" in done.stderr and "is not set" in done.stderr
    assert not (Path(job["STUBS"]) / "srun.args").exists()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("CTRL_VENV", "/nowhere", "/nowhere/bin/torchrun is missing"),
        ("CONFIG", "examples/none.yaml", "CONFIG=examples/none.yaml does not exist"),
        ("SLURM_SUBMIT_DIR", "/", "submit from the root of the checkout"),
        ("HOSTS", "7", "scontrol lists 7 hosts"),
    ],
)
def test_a_wrong_value_is_named(job: dict[str, str], name: str, value: str, words: str) -> None:
    done = submit({**job, name: value})
    assert done.returncode == 2
    assert words in done.stderr
    assert not (Path(job["STUBS"]) / "srun.args").exists()


def test_wrong_input_ends_the_job(job: dict[str, str]) -> None:
    done = submit(job | {"HEALTH": "2"})
    assert done.returncode == 2 and "wrong input" in done.stderr
    assert not lines(job, "torchrun.args") and not requeued(job) and crashes(job) is None


def test_wrong_input_that_a_rank_finds_ends_the_job_too(job: dict[str, str]) -> None:
    done = submit(job | {"STATUS": "2", "MAX_RESTARTS": "2"})
    assert done.returncode == 2 and "wrong input, see above; not requeued" in done.stderr
    assert "restart" not in done.stderr and not requeued(job) and crashes(job) is None


def test_a_configuration_that_does_not_fit_ends_the_job(job: dict[str, str]) -> None:
    done = submit(job | {"PLAN": "1"})
    assert done.returncode == 2 and "the memory plan refuses" in done.stderr
    assert not lines(job, "srun.args") and not requeued(job)


def test_a_bad_machine_is_a_crash(job: dict[str, str]) -> None:
    done = submit(job | {"HEALTH": "1"})
    assert done.returncode == 1 and "sbatch --exclude=HOST" in done.stderr
    assert not lines(job, "torchrun.args") and requeued(job) and crashes(job) == "1"


def test_a_crash_is_requeued_until_the_limit_and_success_forgets_it(job: dict[str, str]) -> None:
    job |= {"MAX_CRASHES": "2"}
    for count in ("1", "2"):
        assert submit(job | {"STATUS": "13"}).returncode == 13
        assert requeued(job) and crashes(job) == count
        (Path(job["STUBS"]) / "scontrol.calls").unlink()
    done = submit(job | {"STATUS": "13"})
    assert done.returncode == 13 and not requeued(job)
    assert "crash 3 in a row (exit code 13); given up after 2" in done.stderr
    assert submit(job).returncode == 0 and crashes(job) is None


def test_a_checkpoint_between_two_crashes_begins_the_count_anew(job: dict[str, str]) -> None:
    crash = job | {"STATUS": "13", "MAX_CRASHES": "1"}
    saved = Path(job["STUBS"]) / "run/checkpoints/global_step_1"
    saved.mkdir(parents=True)
    os.utime(saved, (1, 1))
    assert submit(crash).returncode == 13 and crashes(job) == "1"
    later = Path(job["SLURM_SUBMIT_DIR"], "ctrl_70b-31234.crashes").stat().st_mtime + 1
    os.utime(saved, (later, later))
    assert submit(crash).returncode == 13 and crashes(job) == "1"
    os.utime(saved, (1, 1))
    assert "given up after 1" in submit(crash).stderr


def starts(job: Mapping[str, str], option: str) -> list[str]:
    """The option's value in every start of torchrun."""
    found = (line.split() for line in lines(job, "starts"))
    return [words[words.index(option) + 1] for words in found]


def test_a_crash_starts_the_ranks_again_in_the_job(job: dict[str, str]) -> None:
    write_program(Path(job["STUBS"], "venv/bin/torchrun"), FAILING_TORCHRUN)
    done = submit(job | {"MAX_RESTARTS": "2", "FAILS": "2"})
    assert done.returncode == 0, done.stderr
    assert starts(job, "--rdzv-id") == ["31234-0-0", "31234-0-1", "31234-0-2"]
    assert starts(job, "--rdzv-endpoint") == ["gpu01:21234", "gpu01:22234", "gpu01:23234"]
    assert "CTRL_RESTARTS=2" in lines(job, "torchrun.env")
    assert not requeued(job) and crashes(job) is None
    Path(job["STUBS"], "starts").unlink()
    done = submit(job | {"MAX_RESTARTS": "2", "FAILS": "9"})
    assert done.returncode == 1 and len(lines(job, "starts")) == 3
    assert requeued(job) and crashes(job) == "1"


def test_a_checkpoint_begins_the_count_of_restarts_anew(job: dict[str, str]) -> None:
    save = 'mkdir -p "$STUBS/run/checkpoints/global_step_$(wc -l < "$STUBS/starts")"; sleep 0.02\n'
    body = FAILING_TORCHRUN.replace("touch", save + "touch")
    write_program(Path(job["STUBS"], "venv/bin/torchrun"), body)
    done = submit(job | {"MAX_RESTARTS": "1", "FAILS": "3"})
    assert done.returncode == 0 and len(lines(job, "starts")) == 4, done.stderr
    assert done.stderr.count("restart 1 of at most 1 in a row, on 8 machines") == 3


def test_a_job_that_has_lost_machines_goes_on_where_the_run_fits(job: dict[str, str]) -> None:
    write_program(Path(job["STUBS"], "venv/bin/torchrun"), FAILING_TORCHRUN)
    lost = {"MAX_RESTARTS": "1", "FAILS": "1", "LEFT": "7"}
    done = submit(job | lost | {"USED": "6"})
    assert done.returncode == 0, done.stderr
    assert "7 of 8 machines are left: gpu01 gpu02 gpu03 gpu04 gpu05 gpu06 gpu07" in done.stderr
    assert "on 6 machines" in done.stderr
    assert starts(job, "--nnodes") == ["8", "6"]
    last = "\n".join(lines(job, "srun.args")).split("\n--\n")[-1]
    assert "--nodelist=gpu01,gpu02,gpu03,gpu04,gpu05,gpu06\n--ntasks=6\n" in last
    # A run that fits nowhere waits in the queue for as many machines as it had.
    Path(job["STUBS"], "starts").unlink()
    refuse = '[[ $* != *--left* ]] || { echo "does not fit" >&2; exit 2; }\n'
    write_program(Path(job["STUBS"], "venv/bin/python"), refuse + PYTHON)
    done = submit(job | lost)
    assert done.returncode == 1 and len(lines(job, "starts")) == 1 and requeued(job)


def test_a_stop_between_two_starts_prevents_the_second(job: dict[str, str]) -> None:
    crash = FAILING_TORCHRUN.replace("up", "crashed")
    write_program(Path(job["STUBS"], "venv/bin/torchrun"), crash)
    write_program(
        Path(job["STUBS"], "bin/squeue"), f'[[ $* != *%N* ]] || touch "$STUBS/up"{SQUEUE}'
    )
    job |= {"MAX_RESTARTS": "1", "FAILS": "9", "RESTART_SECONDS": "60"}
    code, errors = signalled(job, signal.SIGUSR1)
    assert code == 1 and len(lines(job, "starts")) == 1 and requeued(job), errors


def test_a_job_that_is_being_cancelled_is_not_requeued(job: dict[str, str]) -> None:
    done = submit(job | {"STATUS": "13", "STATE": "COMPLETING"})
    assert done.returncode == 13 and not requeued(job)
    assert "is not requeued" in done.stderr


@pytest.mark.parametrize("program", ["squeue", "scontrol requeue"])
@pytest.mark.parametrize(("deaf", "again"), [("3", True), ("99", False)])
def test_a_controller_that_is_away_is_asked_again(
    job: dict[str, str], program: str, deaf: str, again: bool
) -> None:
    """Five minutes of it lose no requeue; afterwards the job says what to do."""
    name, *words = program.split()
    path = Path(job["STUBS"], "bin", name)
    away = (
        f'if [[ "${{1:-}}" == "{(words or ["--noheader"])[0]}" ]]; then echo x >> "$STUBS/asked";\n'
        f'(($(wc -l < "$STUBS/asked") > {deaf})) || {{ echo "no contact" >&2; exit 1; }}; fi\n'
    )
    write_program(path, away + (SQUEUE if name == "squeue" else SCONTROL))
    done = submit(job | {"STATUS": "13", "SLURM_RETRY_SECONDS": "0"})
    assert done.returncode == 13 and requeued(job) == again, done.stderr
    assert ("submit again" in done.stderr) != again
    assert "ended from outside" not in done.stderr


@pytest.mark.parametrize(
    ("signals", "again"),
    [
        ((signal.SIGUSR1,), True),
        ((signal.SIGUSR1, signal.SIGTERM), False),
        ((signal.SIGTERM,), False),
    ],
    ids=["time limit", "time limit, then cancelled", "asked to end"],
)
def test_a_stop_reaches_torchrun(
    job: dict[str, str], signals: tuple[signal.Signals, ...], again: bool
) -> None:
    write_program(Path(job["STUBS"], "venv/bin/torchrun"), WAITING_TORCHRUN)
    Path(job["SLURM_SUBMIT_DIR"], "ctrl_70b-31234.crashes").write_text("2\n")
    code, errors = signalled(job, *signals)
    assert lines(job, "asked") == [] and (Path(job["STUBS"]) / "asked").exists(), errors
    assert code == 1 and requeued(job) == again
    assert crashes(job) == (None if again else "2")


def test_a_stop_before_the_run_is_up_requeues_without_starting_it(job: dict[str, str]) -> None:
    write_program(Path(job["STUBS"], "venv/bin/python"), SLOW_PYTHON)
    code, _ = signalled(job, signal.SIGUSR1)
    assert code == 1 and requeued(job) and not lines(job, "torchrun.args")

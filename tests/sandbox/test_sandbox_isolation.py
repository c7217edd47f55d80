"""Levels of isolation: what each reaches and refuses, and what the lower tiers still guarantee."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from sandbox_talk import IDLE, descendants, submission, wait_until

from ctrl_megatron.sandbox import EmbeddedSandbox, SandboxClient, SandboxLimits
from ctrl_megatron.sandbox.client.embedded import SandboxStartError
from ctrl_megatron.sandbox.jail import landlock, seccomp
from ctrl_megatron.sandbox.wire import EvalResult, RunCodeRequest, RunCodeResponse

ROOT = Path(__file__).parents[2]


def readable_python() -> str | None:
    """An interpreter that the user who runs programs can read: not in root's home."""
    own = Path(sys.executable).resolve()
    if os.getuid() != 0 or all(folder.stat().st_mode & 0o005 == 0o005 for folder in own.parents):
        return str(own)
    return shutil.which("python3.11", path="/usr/bin:/usr/local/bin")


def run(service: EmbeddedSandbox, code: str, seconds: float = 5.0) -> RunCodeResponse:
    return run_at(service.endpoint, code, seconds)


def run_at(endpoint: str, code: str, seconds: float = 30.0) -> RunCodeResponse:
    async def call() -> RunCodeResponse:
        async with SandboxClient(endpoint, attempts=1) as client:
            return await client.run_code(
                RunCodeRequest(code=code, language="python", run_timeout=seconds)
            )

    return asyncio.run(call())


def judge(service: EmbeddedSandbox, code: str) -> EvalResult:
    return judge_at(service.endpoint, code)


TESTS = ("assert f(1) == 1", "assert f(2) == 2")


def judge_at(endpoint: str, code: str, tests: Sequence[str] = TESTS) -> EvalResult:
    async def call() -> EvalResult:
        async with SandboxClient(endpoint, attempts=1) as client:
            data = {"test_list": list(tests)}
            return await client.submit(
                submission(code, dataset_type="MBPPDataset", provided_data=data)
            )

    return asyncio.run(call())


def stdout(response: RunCodeResponse) -> str:
    assert response.run_result is not None
    return response.run_result.stdout or ""


def test_strict_refuses_a_kernel_without_a_mechanism() -> None:
    with pytest.raises(SandboxStartError, match="isolation strict needs namespaces and seccomp"):
        EmbeddedSandbox.start(workers=1, isolation="strict", without=("namespaces",))
    with pytest.raises(SandboxStartError, match="missing: seccomp"):
        EmbeddedSandbox.start(workers=1, isolation="strict", without=("seccomp",))


@pytest.mark.parametrize("without", [("namespaces", "landlock"), ("namespaces", "seccomp")])
def test_standard_refuses_a_kernel_that_keeps_no_files(without: tuple[str, ...]) -> None:
    with pytest.raises(SandboxStartError) as refused:
        EmbeddedSandbox.start(workers=2, isolation="standard", without=without)
    (line,) = str(refused.value).splitlines()
    assert "isolation standard needs namespaces, or Landlock and seccomp" in line
    assert "or ask for isolation=none" in line


def test_the_service_reports_its_isolation(service: EmbeddedSandbox) -> None:
    reached = service.isolation
    assert reached["requested"] == "standard"
    assert (reached["tier"] == "namespaces") == (
        not any("namespaces" in m for m in reached["missing"])
    )
    assert reached["uid"] != 0


@pytest.mark.parametrize("without", [(), ("namespaces",)])
def test_the_services_umask_hides_nothing_from_programs(without: tuple[str, ...]) -> None:
    python = readable_python()
    if python is None:
        pytest.skip("started as root without an interpreter that an unprivileged user can read")
    before = os.umask(0o077)
    try:
        with EmbeddedSandbox.start(workers=1, without=without, python=python) as running:
            assert judge(running, "import json\ndef f(x): return json.loads(str(x))").accepted
            code = "import os\nopen('own', 'w').close()\nprint(oct(os.stat('own').st_mode))"
            assert stdout(run_at(running.endpoint, code)) == "0o100644\n"
    finally:
        os.umask(before)


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(SandboxStartError, match="invalid choice: 'safe'"):
        EmbeddedSandbox.start(workers=1, isolation="safe")  # type: ignore[arg-type]


def readable_by_all(path: Path) -> bool:
    return all(folder.stat().st_mode & 0o005 == 0o005 for folder in (path, *path.parents))


NOBODY = 65534


@contextmanager
def ordinary_users_service(level: str) -> Iterator[dict[str, Any]]:
    """The announcement of a service with one worker that an unprivileged user started."""
    python, libraries = readable_python(), Path(aiohttp.__file__).parents[1]
    if os.getuid() != 0:
        pytest.skip("another user's processes need root to start")
    if python is None or not (readable_by_all(ROOT) and readable_by_all(libraries)):
        pytest.skip("an ordinary user cannot read the interpreter, the checkout or its libraries")
    process = subprocess.Popen(
        [
            *(python, "-m", "ctrl_megatron.sandbox", "--port", "0", "--workers", "1"),
            *("--isolation", level, "--log-level", "error"),
        ],
        cwd="/",
        env={"PATH": os.defpath, "PYTHONPATH": f"{ROOT}:{libraries}"},
        stdout=subprocess.PIPE,
        text=True,
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
    )
    try:
        assert process.stdout is not None
        note = json.loads(process.stdout.readline())
        yield {**note, "endpoint": f"http://127.0.0.1:{note['port']}"}
    finally:
        process.terminate()
        status = process.wait(30)
        process.stdout.close()  # type: ignore[union-attr]
    assert status == 0 and not Path(note["scratch"]).exists()


def test_an_ordinary_user_gets_the_same_isolation() -> None:
    """A service started by an unprivileged user: nothing of it needs root."""
    with ordinary_users_service("strict") as note:
        assert (note["isolation"]["level"], note["isolation"]["uid"]) == ("strict", NOBODY)
        code = "import os\ntry: os.fork()\nexcept OSError: print(os.getuid(), os.listdir('.'))"
        assert stdout(run_at(note["endpoint"], code)) == f"{NOBODY} ['main.py']\n"
        forged = "class E:\n  def __eq__(s, o): return True\ndef f(x): return E()"
        assert judge_at(note["endpoint"], "def f(x): return x").accepted
        assert not judge_at(note["endpoint"], forged).accepted


@pytest.mark.parametrize("folder", [".", "..", "../.."])
def test_a_program_that_closes_the_services_directory_costs_no_other(folder: str) -> None:
    """A program can if it runs as the service's user without isolation."""
    with ordinary_users_service("none") as note:
        run_at(note["endpoint"], f"import os; os.chmod({folder!r}, 0)")
        for _ in range(2):
            assert judge_at(note["endpoint"], "def f(x): return x").accepted


def test_programs_are_the_first_to_go_when_memory_ends(service: EmbeddedSandbox) -> None:
    def score(pid: int) -> int:
        return int(Path(f"/proc/{pid}/oom_score_adj").read_text())

    assert {score(child.pid) for child in psutil.Process(service.pid).children(recursive=True)} == {
        1000
    }
    assert score(service.pid) < 1000


def test_a_program_does_not_learn_the_machines_name(service: EmbeddedSandbox) -> None:
    if service.isolation["tier"] != "namespaces":
        pytest.skip("the name is hidden by a namespace")
    assert stdout(run(service, "import os; print(os.uname().nodename)")) == "sandbox\n"


TIERS: dict[str, dict[str, Any]] = {
    "namespaces": {"isolation": "standard"},
    "landlock": {"isolation": "standard", "without": ("namespaces",)},
    "limits": {"isolation": "none"},
}


@pytest.fixture(scope="module", params=TIERS)
def tier(request: pytest.FixtureRequest) -> Iterator[EmbeddedSandbox]:
    python = readable_python()
    if python is None:
        pytest.skip("started as root without an interpreter that an unprivileged user can read")
    with EmbeddedSandbox.start(
        workers=1,
        python=python,
        limits=SandboxLimits(processes=20),
        **TIERS[request.param],
    ) as running:
        if running.isolation["tier"] != request.param:
            pytest.skip(f"this kernel gives no {request.param}: {running.isolation['missing']}")
        yield running


def test_every_tier_judges(tier: EmbeddedSandbox) -> None:
    assert judge(tier, "def f(x): return x").accepted
    assert not judge(tier, "import os\ndef f(x): os._exit(0)").accepted
    assert not judge(
        tier, "class E:\n  def __eq__(s, o): return True\ndef f(x): return E()"
    ).accepted


def test_every_tier_has_a_private_directory(tier: EmbeddedSandbox) -> None:
    code = (
        "import os, tempfile\nprint(os.listdir('.'), dict(os.environ))\n"
        "tempfile.TemporaryFile().write(b'x')\nopen('x', 'w')"
    )
    for _ in range(2):
        assert stdout(run(tier, code)) == "['main.py'] {}\n"


def test_every_tier_starts_each_job_in_an_empty_directory(tier: EmbeddedSandbox) -> None:
    """A process that died is replaced; what it has written stays until the end of its job, as
    files do in plain Python.
    """
    code = (
        "import os\ndef f(x):\n    left = sorted(os.listdir('.'))\n"
        "    open(f'seen-{x}', 'w').close()\n    os.mkdir(f'hidden-{x}', 0o300)\n"
        "    os.mkdir(f'hidden-{x}/inner', 0)\n"
        "    if x == 1: os._exit(0)\n    return left"
    )
    tests = ["assert f(0) == []", "assert f(1) == []", "assert 'seen-1' in f(2)"]
    for _ in range(2):
        judged = judge_at(tier.endpoint, code, tests)
        assert [case.passed for case in judged.tests] == [True, False, True], judged.tests


def test_every_tier_removes_a_programs_files(tier: EmbeddedSandbox) -> None:
    code = (
        "import os\nos.mkdir('a', 0o300)\nos.mkdir('a/b', 0o300)\nopen('a/b/c', 'w')\n"
        "os.mkdir('a/d', 0)\nprint(1)"
    )
    assert stdout(run(tier, code)) == "1\n"
    assert stdout(run(tier, "import os; print(os.listdir('.'))")) == "['main.py']\n"


OWNER_CAN = {
    "chmod": "os.chmod(path, 0)",
    "fchmod of a file open for nothing": "os.fchmod(os.open(path, 3), 0)",
    "chown": "os.chown(path, os.getuid(), os.getgid())",
    "utime": "os.utime(path, (0, 0))",
    "setxattr": "os.setxattr(path, 'user.x', b'x')",
    "truncate": "os.truncate(path, 0)",
    "open to truncate": "os.open(path, os.O_RDONLY | os.O_TRUNC)",
}
"""Operations of a file's owner; newer versions of Landlock control the last two."""


@pytest.mark.parametrize("what", OWNER_CAN)
def test_no_program_changes_another_file_of_its_user(tier: EmbeddedSandbox, what: str) -> None:
    """A file of the user that runs programs, beside the job's directory."""
    if tier.isolation["tier"] != "landlock":
        pytest.skip("no such file is there (namespaces), or nothing keeps it (limits)")
    uid = tier.isolation["uid"]
    folder = Path(tempfile.mkdtemp(prefix="canary-"))
    try:
        file = folder / "file"
        file.write_text("kept")
        for path in (folder, file):
            os.chown(path, uid, uid if os.getuid() == 0 else -1)
        os.chmod(file, 0o600)
        before = file.stat()
        code = (
            f"import os\npath = {str(file)!r}\n"
            f"try: {OWNER_CAN[what]}\nexcept PermissionError: print('refused')"
        )
        assert stdout(run(tier, code)) == "refused\n"
        after = file.stat()
        assert file.read_text() == "kept" and not os.listxattr(file)
        assert (after.st_mode, after.st_mtime_ns) == (before.st_mode, before.st_mtime_ns)
    finally:
        shutil.rmtree(folder)


def test_no_program_gets_a_socket_that_sends_anywhere(tier: EmbeddedSandbox) -> None:
    """One of a pair of datagram sockets could send to the machine's log without connecting."""
    if tier.isolation["tier"] == "limits":
        pytest.skip("the network is free there")
    code = (
        "import socket\n"
        "left, right = socket.socketpair()\nleft.send(b'x')\nprint(right.recv(1))\n"
        "for kind in (socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):\n"
        "    try: socket.socketpair(socket.AF_UNIX, kind)\n"
        "    except PermissionError: print('refused')"
    )
    assert stdout(run(tier, code)) == "b'x'\nrefused\nrefused\n"


def test_every_tier_lets_programs_use_files_of_their_own(tier: EmbeddedSandbox) -> None:
    code = (
        "import os, pathlib, shutil, tempfile, zipfile\n"
        "open('a', 'w').write('text')\nopen('a', 'r+').truncate(2)\n"
        "shutil.copyfile('a', 'b')\nos.truncate('b', 1)\nshutil.move('b', 'c')\n"
        "pathlib.Path('a').touch()\n"
        "with zipfile.ZipFile('z', 'w') as z: z.write('a')\n"
        "with tempfile.TemporaryDirectory() as d: zipfile.ZipFile('z').extractall(d)\n"
        "with tempfile.NamedTemporaryFile('w+') as f: f.write('x')\n"
        "print(open('a').read(), open('c').read(), sorted(os.listdir('.')))"
    )
    assert stdout(run(tier, code)) == "te t ['a', 'c', 'main.py', 'z']\n"


def test_every_tier_ends_the_whole_tree(tier: EmbeddedSandbox) -> None:
    code = (
        "import os, time\n"
        "try:\n    for _ in range(3):\n        if os.fork() == 0:\n"
        "            os.setsid(); os.fork(); time.sleep(600)\n"
        "except OSError: pass\n"
        "print('out', flush=True)\ntime.sleep(600)"
    )
    assert stdout(run(tier, code, seconds=0.5)).startswith("out\n")
    assert wait_until(lambda: len(descendants(tier.pid)) <= IDLE), descendants(tier.pid)


def test_every_tier_bounds_a_fork_bomb(tier: EmbeddedSandbox) -> None:
    code = "import os, time\nwhile True:\n    try: os.fork()\n    except OSError: time.sleep(0.05)"
    run(tier, code, seconds=0.7)
    assert wait_until(lambda: len(descendants(tier.pid)) <= IDLE), descendants(tier.pid)
    assert stdout(run(tier, "print(1)")) == "1\n"


def test_no_tier_lets_a_program_into_the_judge(tier: EmbeddedSandbox) -> None:
    code = (
        "import os\ndef f(x):\n    for p in range(1, 99999):\n"
        "        if p == os.getpid(): continue\n"
        "        try: fds = os.listdir(f'/proc/{p}/fd')\n        except OSError: continue\n"
        "        try: open(f'/proc/{p}/mem', 'rb+'); return x\n        except OSError: pass\n"
        "    return 0"
    )
    assert not judge(tier, code).accepted


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("version", [None, 2, 3])
def test_the_filter_is_a_well_formed_program(machine: str, version: int | None) -> None:
    program = seccomp.compile_filter(machine, landlock=version)
    assert len(program) < 4096
    for index, (code, if_true, if_false, _) in enumerate(program):
        assert code in (0x20, 0x15, 0x35, 0x45, 0x54, 0x06)
        if code != 0x06:
            assert index + 1 + max(if_true, if_false) < len(program)
    assert program[-1] == (0x06, 0, 0, 0x7FFF0000)
    assert len(set(seccomp.DENIED[machine])) == len(seccomp.DENIED[machine])


def run_filter(
    machine: str,
    number: int,
    argument: int = 0,
    *,
    pid: int = 77,
    second: int = 0,
    third: int = 0,
    version: int | None = None,
) -> int:
    """An interpreter of the filter, written from the kernel's definition of the instructions."""
    architecture = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[machine]
    words = {0: number, 4: architecture, 16: argument, 24: second, 32: third}
    accumulator, at = 0, 0
    program = seccomp.compile_filter(machine, landlock=version)
    while True:
        code, if_true, if_false, constant = program[at]
        constant = pid if code == 0x15 and constant == 0xFFFFFFFF else constant
        at += 1
        if code == 0x06:
            return constant
        if code == 0x20:
            accumulator = words[constant]
            continue
        if code == 0x54:
            accumulator &= constant
            continue
        taken = {
            0x15: accumulator == constant,
            0x35: accumulator >= constant,
            0x45: bool(accumulator & constant),
        }
        at += if_true if taken[code] else if_false


ALLOW, REFUSE, ABSENT = 0x7FFF0000, 0x00050001, 0x00050026


@pytest.mark.parametrize(
    ("machine", "number", "argument", "outcome"),
    [
        ("x86_64", 0, 0, ALLOW),  # read
        ("x86_64", 41, 2, REFUSE),  # socket
        ("x86_64", 56, 0x00010F00, ALLOW),  # clone of a thread
        ("x86_64", 56, 17, REFUSE),  # clone of a process
        ("x86_64", 57, 0, REFUSE),  # fork
        ("x86_64", 59, 0, REFUSE),  # execve
        *(("x86_64", number, 0, REFUSE) for number in (206, 209, 333)),  # asynchronous I/O
        ("x86_64", 222, 0, REFUSE),  # timer_create
        ("x86_64", 435, 0, ABSENT),  # clone3
        ("x86_64", 62, 77, ALLOW),  # kill itself
        ("x86_64", 62, 1, REFUSE),  # kill another
        ("x86_64", 62, 0xFFFFFFFF, REFUSE),  # kill every process
        ("x86_64", 302, 0, ALLOW),  # prlimit of itself
        ("x86_64", 302, 1, REFUSE),
        ("x86_64", 0x40000000 + 41, 0, ABSENT),  # the x32 table
        ("x86_64", 9999, 0, ABSENT),
        ("aarch64", 198, 2, REFUSE),
        *(("aarch64", number, 0, REFUSE) for number in (0, 2, 292, 107)),
        ("aarch64", 220, 17, REFUSE),
        ("aarch64", 220, 0x00010F00, ALLOW),
        ("aarch64", 129, 1, REFUSE),
        ("aarch64", 129, 77, ALLOW),
        ("aarch64", 63, 0, ALLOW),
    ],
)
def test_the_filters_answer(machine: str, number: int, argument: int, outcome: int) -> None:
    assert run_filter(machine, number, argument) == outcome


@pytest.mark.parametrize(
    ("machine", "number", "second", "outcome"),
    [
        *(("x86_64", 72, command, REFUSE) for command in (8, 10, 15)),  # owner of a descriptor
        *(("x86_64", 72, command, REFUSE) for command in (5, 6, 7, 36, 37, 38, 1024, 1026)),
        *(("x86_64", 72, command, ALLOW) for command in (1, 2, 3, 4, 9, 1030, 1031)),
        *(("x86_64", 16, request, REFUSE) for request in (0x8901, 0x8902)),
        ("x86_64", 16, 0x5401, ALLOW),  # isatty
        ("x86_64", 73, 2, REFUSE),  # flock
        *(("x86_64", 53, kind, ALLOW) for kind in (1, 0x801, 0x80801)),  # socketpair of streams
        *(("x86_64", 53, kind, REFUSE) for kind in (2, 0x80002, 3, 5)),
        ("aarch64", 199, 0x80001, ALLOW),
        ("aarch64", 199, 2, REFUSE),
        ("aarch64", 25, 8, REFUSE),
        ("aarch64", 25, 3, ALLOW),
        ("aarch64", 29, 0x8901, REFUSE),
        ("aarch64", 32, 2, REFUSE),
    ],
)
def test_the_filters_answer_to_second_arguments(
    machine: str, number: int, second: int, outcome: int
) -> None:
    assert run_filter(machine, number, argument=1, second=second) == outcome


@pytest.mark.parametrize(("machine", "socketpair"), [("x86_64", 53), ("aarch64", 199)])
def test_pairs_of_sockets_are_local(machine: str, socketpair: int) -> None:
    assert run_filter(machine, socketpair, argument=1, second=1) == ALLOW
    for family in (2, 10, 16, 30):  # the last is TIPC's, whose sockets come in pairs too
        assert run_filter(machine, socketpair, argument=family, second=1) == REFUSE


METADATA = {
    "x86_64": (90, 91, 92, 93, 94, 132, 188, 189, 190, 197, 198, 199, 235, 260, 261, 268, 280, 452),
    "aarch64": (5, 6, 7, 14, 15, 16, 52, 53, 54, 55, 88, 452),
}
READ, WRITE, BOTH, NEITHER, TRUNCATE = 0, 1, 2, 3, 0o1000


@pytest.mark.parametrize("machine", METADATA)
def test_where_landlock_guards_files_metadata_stays(machine: str) -> None:
    for number in METADATA[machine]:
        assert run_filter(machine, number, version=7) == REFUSE
        assert run_filter(machine, number) == ALLOW
    for number in (463, 466, 469):  # setxattrat removexattrat file_setattr
        assert run_filter(machine, number, version=7) == ABSENT
    ioctl = {"x86_64": 16, "aarch64": 29}[machine]
    for request in (0x40086602, 0x401C5820, 0x40806685):  # flags of a file, its project, verity
        assert run_filter(machine, ioctl, second=request, version=7) == REFUSE
    assert run_filter(machine, ioctl, second=0x5401, version=7) == ALLOW


@pytest.mark.parametrize(
    ("version", "flags", "outcome"),
    [
        *((version, flags, ALLOW) for version in (None, 2, 3) for flags in (READ, WRITE, BOTH)),
        *((version, WRITE | TRUNCATE, ALLOW) for version in (None, 2, 3)),
        *((version, NEITHER, REFUSE) for version in (2, 3)),
        (2, READ | TRUNCATE, REFUSE),  # Landlock 2 sees a file that is only read
        (3, READ | TRUNCATE, ALLOW),
        (None, NEITHER, ALLOW),
    ],
)
def test_where_landlock_guards_files_it_sees_every_way_to_open(
    version: int | None, flags: int, outcome: int
) -> None:
    for machine, number in (("x86_64", 257), ("aarch64", 56)):
        assert run_filter(machine, number, third=flags, version=version) == outcome
    assert run_filter("x86_64", 2, second=flags, version=version) == outcome


@pytest.mark.parametrize(("machine", "truncate"), [("x86_64", 76), ("aarch64", 45)])
def test_where_landlock_is_too_old_to_see_it_nothing_is_truncated_by_name(
    machine: str, truncate: int
) -> None:
    outcomes = [run_filter(machine, truncate, version=version) for version in (None, 2, 3)]
    assert outcomes == [ALLOW, REFUSE, ALLOW]
    assert run_filter(machine, 437, version=2) == ABSENT  # openat2 hides its flags


def test_landlock_version_is_a_number() -> None:
    assert landlock.landlock_version() >= 0

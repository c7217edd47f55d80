"""C++ and Bash: programs and stdin/stdout problems in the same jail as Python."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from typing import Any

import pytest
from sandbox_talk import BackgroundLoop, submission

from ctrl_megatron.sandbox import EmbeddedSandbox, SandboxClient, SandboxLimits
from ctrl_megatron.sandbox.jail import seccomp
from ctrl_megatron.sandbox.jail.job import Job, JobReport
from ctrl_megatron.sandbox.languages import (
    BASH,
    CPP,
    PYTHON,
    extract_program,
    language_named,
    require_isolation,
)
from ctrl_megatron.sandbox.service import compiler as compiling
from ctrl_megatron.sandbox.wire import (
    CommandRunStatus,
    EvalResult,
    RunCodeRequest,
    RunCodeResponse,
    RunStatus,
)

Run = Callable[..., RunCodeResponse]
Judge = Callable[[str, str], EvalResult]

needs_gpp = pytest.mark.skipif(not shutil.which("g++"), reason="this machine has no g++")
ADD_CPP = '#include <cstdio>\nint main(){int a,b;scanf("%d %d",&a,&b);printf("%d\\n",a+b);}'
ADD_BASH = "read -r a b\nprintf '%s\\n' $((a + b)) | cat"


@pytest.fixture(scope="module")
def run_in(service: EmbeddedSandbox, client: SandboxClient, on_loop: BackgroundLoop) -> Run:
    if service.isolation["tier"] != "namespaces":
        pytest.skip(f"this kernel gives no namespaces: {service.isolation['missing']}")

    def run(language: str, code: str, **options: Any) -> RunCodeResponse:
        options = {"compile_timeout": 60.0, "run_timeout": 20.0, **options}
        request = RunCodeRequest(code=code, language=language, **options)
        return on_loop(client.run_code(request))

    return run


def stdout(response: RunCodeResponse) -> str:
    assert response.run_result is not None, response
    return response.run_result.stdout or ""


@needs_gpp
def test_cpp_compiles_and_runs(run_in: Run) -> None:
    response = run_in("cpp", ADD_CPP, stdin="3 4")
    assert (response.status, stdout(response)) == (RunStatus.SUCCESS, "7\n")
    assert response.compile_result is not None and response.compile_result.return_code == 0


@needs_gpp
def test_a_compile_error_is_the_programs_fault(run_in: Run) -> None:
    response = run_in("C++", "int main() { return nothing; }")
    assert response.status is RunStatus.FAILED and response.run_result is None
    assert response.compile_result is not None
    assert "nothing" in (response.compile_result.stderr or "")


@needs_gpp
def test_a_compilation_without_end_is_cut(run_in: Run) -> None:
    # g++ remembers a constant call by its arguments, and stops evaluating one expression after 33
    # million steps: arguments that differ, and many expressions, keep it busy for minutes.
    code = (
        "constexpr int f(int n) { int s = 0; for (int i = 0; i < n; ++i) s += i % 7; return s; }\n"
        "constexpr int g(int n) { int s = 0; while (n--) s += f(200000 + n); return s; }\n"
        + "static_assert(g(200) != 1);\n" * 100
        + "int main() {}"
    )
    response = run_in("cpp", code, compile_timeout=0.5)
    assert response.status is RunStatus.FAILED and response.compile_result is not None
    assert response.compile_result.status is CommandRunStatus.TIME_LIMIT_EXCEEDED


@needs_gpp
@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('printf("%d", (int)fork());', "-1"),
        ('printf("%d", execl("/usr/bin/id", "id", (char*)0));', "-1"),
        ('printf("%d", socket(AF_INET, SOCK_STREAM, 0));', "-1"),
        ('printf("%d", kill(1, 9));', "-1"),
        ('printf("%d", open("/etc/passwd", O_RDONLY));', "-1"),
        ('printf("%d", open("/usr/include/stdio.h", O_RDONLY));', "-1"),
        ('printf("%d", open("x", O_CREAT | O_WRONLY, 0600) >= 0);', "1"),
        ('printf("%d", getenv("HOME") != 0 && getenv("AWS_KEY") == 0);', "1"),
    ],
)
def test_a_binary_is_as_confined_as_python(run_in: Run, body: str, said: str) -> None:
    includes = ["stdio.h", "stdlib.h", "unistd.h", "signal.h", "fcntl.h", "sys/socket.h"]
    code = "".join(f"#include <{name}>\n" for name in includes) + f"int main() {{ {body} }}"
    assert stdout(run_in("cpp", code)) == said


@needs_gpp
def test_the_compiler_cannot_be_made_to_read_secrets(run_in: Run) -> None:
    response = run_in("cpp", '#include "/etc/passwd"\nint main() {}')
    assert response.status is RunStatus.FAILED and response.compile_result is not None
    assert "No such file" in (response.compile_result.stderr or "")


@needs_gpp
def test_a_crash_and_a_loop_are_results(run_in: Run) -> None:
    crashed = run_in("cpp", "#include <stdlib.h>\nint main() { abort(); }")
    assert crashed.run_result is not None and crashed.run_result.return_code == -6
    looping = run_in("cpp", "int main() { for (volatile int i = 0;;) i = 1; }", run_timeout=0.3)
    assert looping.run_result is not None and looping.run_result.return_code is None


@needs_gpp
def test_deep_recursion_and_threads(run_in: Run) -> None:
    code = (
        "#include <thread>\n#include <cstdio>\n"
        "int f(int n) { volatile char p[64]; p[0] = n; return n ? 1 + f(n - 1) + 0 * p[0] : 0; }\n"
        "int main() { int r = 0; std::thread t([&] { r = 1; }); t.join();\n"
        'printf("%d %d", r, f(200000)); }'
    )
    assert stdout(run_in("cpp", code)) == "1 200000"


def test_bash_runs_with_its_tools(run_in: Run) -> None:
    assert stdout(run_in("bash", ADD_BASH, stdin="3 4")) == "7\n"
    code = "printf 'b\\na\\n' | sort | awk '{print $1}' > out; wc -l < out; cat out; ls"
    assert stdout(run_in("sh", code)).split() == ["2", "a", "b", "main.sh", "out"]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("kill -9 1 2>/dev/null; echo $?", "1"),
        ("kill -INT 1 2>/dev/null; echo $?", "1"),
        ("cat /etc/passwd 2>/dev/null; echo $?", "1"),
        ("echo x > /usr/bin/x 2>/dev/null; echo $?", "1"),
        ("(exec 3<>/dev/tcp/127.0.0.1/80) 2>/dev/null; echo $?", "1"),
        ("ls /proc /home /root 2>/dev/null | wc -l", "0"),
        ("echo ${#SECRET}", "0"),
    ],
)
def test_bash_is_confined(run_in: Run, code: str, said: str) -> None:
    assert stdout(run_in("bash", code)).strip() == said


def test_a_fork_bomb_in_bash_ends_with_its_job(run_in: Run, service: EmbeddedSandbox) -> None:
    from sandbox_talk import IDLE, descendants, wait_until

    response = run_in("bash", "f() { f | f & }; f; sleep 30", run_timeout=1.0)
    assert response.status in (RunStatus.FAILED, RunStatus.SUCCESS)
    assert wait_until(lambda: len(descendants(service.pid)) <= 2 * IDLE)
    assert stdout(run_in("bash", "echo still here")) == "still here\n"


def judged(client: SandboxClient, on_loop: BackgroundLoop, language: str, code: str) -> EvalResult:
    cases = [{"input": {"stdin": f"{a} 1"}, "output": {"stdout": str(a + 1)}} for a in (1, 5)]
    request = submission(
        f"```{language}\n{code}\n```",
        fenced=False,
        language=language,
        dataset_type="CommonOJDataset",
        provided_data={"test": cases},
        compile_timeout=60.0,
    )
    return on_loop(client.submit(request))


@needs_gpp
@pytest.mark.usefixtures("run_in")
def test_stdio_problems_in_cpp(client: SandboxClient, on_loop: BackgroundLoop) -> None:
    assert judged(client, on_loop, "cpp", ADD_CPP).accepted
    wrong = judged(client, on_loop, "cpp", ADD_CPP.replace("a+b", "a+1+(a==5)"))
    assert [case.passed for case in wrong.tests] == [True, False]
    broken = judged(client, on_loop, "cpp", "int main() {")
    assert [case.passed for case in broken.tests] == [False, False]
    assert "compilation failed" in (broken.tests[0].test_info or {})["reason"]


@pytest.mark.usefixtures("run_in")
def test_stdio_problems_in_bash(client: SandboxClient, on_loop: BackgroundLoop) -> None:
    assert judged(client, on_loop, "bash", ADD_BASH).accepted
    assert not judged(client, on_loop, "bash", "echo 2").accepted


def test_other_languages_name_the_way_out(run_in: Run) -> None:
    with pytest.raises(ValueError, match="external SandboxFusion"):
        run_in("rust", "")


@pytest.mark.parametrize(("name", "found"), [("C++", CPP), ("PY", PYTHON), ("shell", BASH)])
def test_names_of_languages(name: str, found: object) -> None:
    assert language_named(name) is found


def test_without_namespaces_only_python() -> None:
    require_isolation(PYTHON, "landlock")
    require_isolation(CPP, "limits")
    for language in (CPP, BASH):
        with pytest.raises(ValueError, match="needs namespaces"):
            require_isolation(language, "landlock")


def test_without_a_compiler_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling.shutil, "which", lambda name, path: None)
    with pytest.raises(ValueError, match=r"needs g\+\+"):
        asyncio.run(
            compiling.Compiler(no_job).compile(SandboxLimits(), {"main.cpp": ""}, seconds=1)
        )


async def no_job(job: Job, seconds: float) -> JobReport:
    raise AssertionError("no job is wanted")


class FakeCompiler:
    """Answers compile jobs with a binary made of their number."""

    def __init__(self, *, stopped: str | None = None, size: int = 1) -> None:
        self.jobs: list[Job] = []
        self.stopped = stopped
        self.size = size

    async def run(self, job: Job, seconds: float) -> JobReport:
        self.jobs.append(job)
        await asyncio.sleep(0.01)
        empty = {"bytes": "", "truncated": False}
        made = {} if self.stopped else {"main": "A" * self.size}
        return JobReport(
            kind="end",
            verdicts=[],
            stopped=self.stopped,
            exit=0,
            wall=0.0,
            stdout=empty,
            stderr=empty,
            files=made,
        )


def test_equal_programs_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling.shutil, "which", lambda name, path: "/usr/bin/g++")
    fake = FakeCompiler()
    compiler = compiling.Compiler(fake.run)

    async def scenario() -> None:
        def once(code: str, standard: str = "c++17", **more: str) -> Any:
            sources = {"main.cpp": code, **more}
            return compiler.compile(SandboxLimits(), sources, standard=standard, seconds=1.0)

        await asyncio.gather(once("a"), once("a"), once("a"))
        await once("a")
        assert len(fake.jobs) == 1
        await once("a", standard="c++20")
        await once("b")
        await once("a", **{"grader.cpp": ""})
        await once("a", **{"grader.cpp": "x"})
        assert len(fake.jobs) == 5
        with pytest.raises(ValueError, match="unknown C\\+\\+ standard"):
            await once("a", standard="c++98; rm -rf /")

    asyncio.run(scenario())


def test_a_compilation_that_ran_out_of_time_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiling.shutil, "which", lambda name, path: "/usr/bin/g++")
    fake = FakeCompiler(stopped="timeout")
    compiler = compiling.Compiler(fake.run)
    for _ in range(2):
        asyncio.run(compiler.compile(SandboxLimits(), {"main.cpp": ""}, seconds=1.0))
    assert len(fake.jobs) == 2


def test_the_memory_of_binaries_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling.shutil, "which", lambda name, path: "/usr/bin/g++")
    monkeypatch.setattr(compiling, "COMPILATIONS_BYTES", 25_000)
    fake = FakeCompiler(size=8_000)
    compiler = compiling.Compiler(fake.run)

    async def scenario() -> None:
        for code in "abcaa":
            await compiler.compile(SandboxLimits(), {"main.cpp": code}, seconds=1.0)

    asyncio.run(scenario())
    assert len(fake.jobs) == 4, "the oldest had to go, the rest was kept"


def test_failures_are_kept_by_their_bytes_and_every_time_limit_compiles_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiling.shutil, "which", lambda name, path: "/usr/bin/g++")
    monkeypatch.setattr(compiling, "COMPILATIONS_BYTES", 10_000)
    fake = FakeCompiler(size=0)
    compiler = compiling.Compiler(fake.run)

    async def scenario() -> None:
        for number in range(50):
            await compiler.compile(SandboxLimits(), {"main.cpp": str(number)}, seconds=1.0)
        assert sum(kept.size for kept in compiler._kept.values()) <= 10_000
        same = (compiler.compile(SandboxLimits(), {"main.cpp": ""}, seconds=s) for s in (1.0, 9.0))
        await asyncio.gather(*same)

    asyncio.run(scenario())
    assert len(fake.jobs) == 52


@pytest.mark.parametrize(
    ("text", "language", "code"),
    [
        ("```python\n1\n```\n```c++\nint x;\n```", CPP, "int x;\n"),
        ("```\nint x;\n```", CPP, "int x;\n"),
        ("Here:\n#include <x>\nint main() {}\nDone.", CPP, "#include <x>\nint main() {}"),
        ("no program", CPP, ""),
        ("```sh\nls\n```", BASH, "ls\n"),
        ("So:\n#!/bin/bash\nls", BASH, "#!/bin/bash\nls"),
        ("ls", BASH, ""),
    ],
)
def test_extraction_by_language(text: str, language: Any, code: str) -> None:
    assert extract_program(text, language).code == code


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_filters_differ_only_where_they_should(machine: str) -> None:
    def refused(**permits: bool) -> set[int]:
        program = seccomp.compile_filter(machine, **permits)
        numbers = set(seccomp.DENIED[machine])
        return {k for code, _, _, k in program if code == 0x15 and k in numbers}

    execute = {"x86_64": {59}, "aarch64": {221}}[machine]
    start = {"x86_64": {57, 58}, "aarch64": set[int]()}[machine]
    assert refused() - refused(execute=True) == execute
    assert refused() - refused(execute=True, processes=True) == execute | start

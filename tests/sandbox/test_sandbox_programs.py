"""``/run_code``: whole programs."""

from __future__ import annotations

import base64
from collections.abc import Callable

import pytest

from ctrl_megatron.sandbox.wire import (
    CommandRunResult,
    CommandRunStatus,
    RunCodeResponse,
    RunStatus,
)

Run = Callable[..., RunCodeResponse]


def result_of(response: RunCodeResponse) -> CommandRunResult:
    assert response.run_result is not None
    return response.run_result


def test_prints_and_reads_stdin(run_code: Run) -> None:
    response = run_code("a, b = map(int, input().split()); print(a + b)", stdin="3 4\n")
    assert response.status is RunStatus.SUCCESS
    result = result_of(response)
    assert (result.status, result.return_code, result.stdout, result.stderr) == (
        CommandRunStatus.FINISHED,
        0,
        "7\n",
        "",
    )
    assert result.execution_time is not None and result.execution_time > 0


@pytest.mark.parametrize(
    ("code", "return_code", "stderr"),
    [
        ("assert 1 == 2", 1, "AssertionError"),
        ("def f(:\n pass", 1, "SyntaxError"),
        ("import nothing_of_that_name", 1, "ModuleNotFoundError"),
        ("raise SystemExit(3)", 3, ""),
        ("import os; os._exit(5)", 5, ""),
        ("import sys; sys.exit('bye')", 1, "bye"),
        ("x = 1\x00", 1, "null"),
        ("import os; os.kill(os.getpid(), 11)", -11, ""),
    ],
)
def test_failures_are_results(run_code: Run, code: str, return_code: int, stderr: str) -> None:
    response = run_code(code)
    assert response.status is RunStatus.FAILED
    assert result_of(response).return_code == return_code
    assert stderr in (result_of(response).stderr or "")


def test_traceback_shows_the_program_and_nothing_of_ours(run_code: Run) -> None:
    stderr = result_of(run_code("def f():\n    return 1 / 0\n\nf()")).stderr or ""
    assert "line 2, in f" in stderr and "return 1 / 0" in stderr
    assert "ctrl_megatron" not in stderr


def test_time_limit_keeps_partial_output_and_has_no_return_code(run_code: Run) -> None:
    response = run_code("print('before', flush=True)\nwhile True: pass", run_timeout=0.5)
    result = result_of(response)
    assert response.status is RunStatus.FAILED
    assert result.status is CommandRunStatus.TIME_LIMIT_EXCEEDED
    assert (result.return_code, result.stdout) == (None, "before\n")


def test_more_output_than_a_pipe_holds_arrives_whole(run_code: Run) -> None:
    result = result_of(run_code("print('x' * 500_000)"))
    assert result.stdout == "x" * 500_000 + "\n"


def test_large_stdin_arrives_whole(run_code: Run) -> None:
    code = "import sys; print(len(sys.stdin.buffer.read()))"
    assert result_of(run_code(code, stdin="y" * 3_000_000)).stdout == "3000000\n"


def test_stdin_that_is_not_read(run_code: Run) -> None:
    assert run_code("print(1)", stdin="y" * 3_000_000).status is RunStatus.SUCCESS


def test_files_travel_in_and_out(run_code: Run) -> None:
    code = "text = open('a/b.txt').read()\nopen('out.txt', 'w').write(text[::-1])"
    content = base64.b64encode(b"abc").decode()
    response = run_code(
        code,
        files={"a/b.txt": content, "ignored": None},
        fetch_files=["out.txt", "/tmp/a/b.txt", "absent"],
    )
    assert response.status is RunStatus.SUCCESS, response
    assert response.files == {
        "out.txt": base64.b64encode(b"cba").decode(),
        "/tmp/a/b.txt": content,
    }


def test_a_link_out_of_the_directory_is_not_fetched(run_code: Run) -> None:
    code = "import os; os.symlink('/etc/passwd', 'link'); os.symlink('/etc', 'folder')"
    response = run_code(code, fetch_files=["link", "folder/passwd"])
    assert response.status is RunStatus.SUCCESS
    assert response.files == {}


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../x", "."])
def test_paths_outside_are_refused(run_code: Run, path: str) -> None:
    with pytest.raises(ValueError, match="outside the program's directory"):
        run_code("", files={path: ""})
    with pytest.raises(ValueError, match="outside the program's directory"):
        run_code("", fetch_files=[path])


def test_memory_limit_is_honoured(run_code: Run) -> None:
    code = "x = bytearray(200 << 20); print(len(x))"
    assert run_code(code, memory_limit_MB=512).status is RunStatus.SUCCESS
    response = run_code(code, memory_limit_MB=100)
    assert response.status is RunStatus.FAILED
    assert "MemoryError" in (result_of(response).stderr or "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"run_timeout": 0}, "run_timeout must be in"),
        ({"run_timeout": -1}, "run_timeout must be in"),
        ({"run_timeout": 1e6}, "run_timeout must be in"),
        ({"memory_limit_MB": 10**6}, "memory_limit_MB may be at most"),
        ({"files": {"a": "?"}}, "is not base64"),
    ],
)
def test_limits_that_cannot_be_granted_are_refused(
    run_code: Run, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run_code("", **options)


def test_a_program_behaves_as_under_the_interpreter(run_code: Run) -> None:
    code = (
        "import atexit, sys, threading\n"
        "atexit.register(print, 'at exit')\n"
        "threading.Thread(target=lambda: print('thread')).start()\n"
        "def f(x: Undefined = 1): pass\n"
    )
    stderr = result_of(run_code(code)).stderr or ""
    assert "NameError" in stderr, "annotations are evaluated: no future import of ours leaks in"
    main = "import sys\nif __name__ == '__main__': print(sys.argv[0].endswith('main.py'))"
    assert result_of(run_code(main)).stdout == "True\n"


def test_exit_handlers_and_threads_finish(run_code: Run) -> None:
    code = (
        "import atexit, threading, time\n"
        "atexit.register(print, 'at exit')\n"
        "threading.Thread(target=lambda: (time.sleep(0.05), print('thread'))).start()\n"
    )
    assert result_of(run_code(code)).stdout == "thread\nat exit\n"


def test_asyncio_works(run_code: Run) -> None:
    code = "import asyncio\nasync def f(): return 3\nprint(asyncio.run(f()))"
    assert result_of(run_code(code)).stdout == "3\n"


def test_runs_share_nothing(run_code: Run) -> None:
    assert run_code("open('left.txt', 'w').write('x')").status is RunStatus.SUCCESS
    listing = "import os; print(sorted(os.listdir('.')), dict(os.environ))"
    for _ in range(3):
        assert result_of(run_code(listing)).stdout == "['main.py'] {}\n"
    draws = {result_of(run_code("import random; print(random.random())")).stdout for _ in range(3)}
    assert len(draws) == 3

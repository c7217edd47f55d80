"""Runs the tests of a program one by one, each in a fresh process, on a provider's machine.

This file is sent as text and imports the standard library only. Its input is one JSON job on stdin.
Its output is lines ``NONCE JSON``: first ``{"ready": number of tests}``, then one line per test, or
``{"fault": text}`` where the machine does not allow processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

STARTUP_SECONDS = 1.0


def main() -> None:
    job = json.loads(sys.stdin.buffer.read())
    write_message(job, {"ready": len(job["tests"])})
    deadline = time.monotonic() + job["job_seconds"]
    timeouts = 0
    for index, test in enumerate(job["tests"]):
        seconds = min(job["seconds"], deadline - time.monotonic())
        if timeouts >= job["max_timeouts"] or seconds <= 0:
            report = {"passed": False, "timeout": True, "error": "not run: out of time"}
        else:
            try:
                report = run_test(job, test, seconds)
            except OSError as error:
                # No code of the program has run yet, so the machine is at fault.
                if index == 0:
                    write_message(job, {"fault": f"{type(error).__name__}: {error}"})
                    return
                report = {"passed": False, "error": f"the machine refused a process: {error}"}
        timeouts += bool(report.get("timeout"))
        write_message(job, {**report, "index": index})
        if report.get("passed") is False and not job["run_all"]:
            break


def write_message(job: dict[str, Any], message: dict[str, Any]) -> None:
    print(job["nonce"], json.dumps(message), flush=True)


def run_test(job: dict[str, Any], test: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Run the test in a process of its own for at most ``seconds``. Returns its report; a failure
    where it sent none with the nonce of this run."""
    nonce = os.urandom(16).hex()
    reader, writer = os.pipe()
    keys = ("setup", "code", "names")
    order = {**{key: job[key] for key in keys}, **test, "nonce": nonce, "pipe": writer}
    with tempfile.TemporaryDirectory() as directory:
        child = subprocess.Popen(
            [sys.executable, "-c", job["child"]],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(writer,),
            cwd=directory,
            start_new_session=True,
        )
        os.close(writer)
        try:
            assert child.stdin is not None
            # The missing report shows that the child has ended.
            with contextlib.suppress(OSError):
                child.stdin.write(json.dumps(order).encode())
                child.stdin.close()
            data, in_time = read_report(reader, child, seconds + STARTUP_SECONDS, job["limit"])
        finally:
            os.close(reader)
            with contextlib.suppress(OSError):
                os.killpg(child.pid, signal.SIGKILL)
            status = child.wait()
    if not in_time:
        return {"passed": False, "timeout": True, "error": "time limit exceeded"}
    if len(data) > job["limit"]:
        return {"passed": False, "error": "the value is much larger than the expected one"}
    return parse_report(data, nonce, status)


def read_report(
    reader: int, child: subprocess.Popen[bytes], seconds: float, limit: int
) -> tuple[bytes, bool]:
    """(bytes from the pipe until it closed or the child ended, True where that was in time)."""
    data, deadline = b"", time.monotonic() + seconds
    while len(data) <= limit:
        left = deadline - time.monotonic()
        if left <= 0:
            return data, False
        if select.select([reader], [], [], min(left, 0.05))[0]:
            part = os.read(reader, 1 << 16)
            if not part:
                break
            data += part
        elif child.poll() is not None and not select.select([reader], [], [], 0)[0]:
            break
    return data, True


def parse_report(data: bytes, nonce: str, status: int) -> dict[str, Any]:
    try:
        report = json.loads(data)
    except ValueError:
        report = None
    if not isinstance(report, dict) or report.pop("nonce", None) != nonce:
        return {"passed": False, "error": f"ended without a verdict (exit status {status})"}
    return report


if __name__ == "__main__":
    main()

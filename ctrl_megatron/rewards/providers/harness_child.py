"""Runs one test of a program in a separate process on a provider's machine.

This file is sent as text after the text of ``ctrl_megatron/rewards/providers/codec.py``, whose
``encode`` it uses. It imports the standard library only. The report goes to a separate pipe and
contains the nonce of the job: the program's output and its exit status do not count.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def run(job: dict[str, Any], encode: Any) -> dict[str, Any]:
    """The report on one test: ``passed``, ``value`` or ``error``, with the nonce.

    Functions are bound to local names before the program runs, which may replace a module's.
    """
    dumps, nonce = json.dumps, job["nonce"]
    namespace: dict[str, Any] = {"__name__": "__main__", "__file__": "solution.py"}
    try:
        # Without the __future__ imports of this file.
        exec(compile(job["setup"], "setup.py", "exec", dont_inherit=True), namespace)
        exec(compile(job["code"], "solution.py", "exec", dont_inherit=True), namespace)
        # A test that expects an exception must not mistake this one for the function's.
        missing = [name for name in job["names"] if name not in namespace]
        if missing:
            raise NameError(f"name {missing[0]!r} is not defined")
        mode = "eval" if job["kind"] == "value" else "exec"
        test = compile(job["source"], "test.py", mode, dont_inherit=True)
        if mode == "eval":
            value = eval(test, namespace)
            return {"nonce": nonce, "value": dumps(encode(value))}
        exec(test, namespace)
    except BaseException as error:  # SystemExit too: a program that exits early has failed
        return {"nonce": nonce, "passed": False, "error": describe_error(error)}
    return {"nonce": nonce, "passed": True}


def describe_error(error: BaseException) -> str:
    """``Type: message`` of an exception whose methods may be hostile."""
    try:
        return f"{type(error).__name__}: {error}"[:400]
    except BaseException:
        return "an exception without a text"


def main() -> None:
    job = json.loads(sys.stdin.buffer.read())
    report = json.dumps(run(job, globals()["encode"])).encode()
    pipe = job["pipe"]
    while report:
        report = report[os.write(pipe, report) :]
    # Skip exit handlers, which the program may have registered.
    os._exit(0)


if __name__ == "__main__":
    main()

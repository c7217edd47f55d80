"""What benchmarks run before a Python program, so that it may take names and depth for granted."""

from __future__ import annotations

_MODULES = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random"),
    *("statistics", "itertools", "functools", "operator", "io", "sys", "json"),
)
_RECURSION_LIMIT = 50_000

LIVE_CODE_BENCH = "".join(
    [
        "import os\n",  # beyond the benchmark's own names: published solutions use it
        *(f"from {name} import *\n" for name in (*_MODULES, "builtins", "typing")),
        f"import {', '.join((*_MODULES, 'typing'))}\n",
        f"sys.setrecursionlimit({_RECURSION_LIMIT})\n",
    ]
)
"""LiveCodeBench's, for functions and programs: a name means here what it means there."""

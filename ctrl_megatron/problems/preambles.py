"""Python text that runs before a program, because published programs rely on its names."""

from __future__ import annotations

_STARRED = "typing collections heapq bisect itertools functools operator string math random"
FUNCTIONS = "".join(
    [
        *(f"from {name} import *\n" for name in _STARRED.split()),
        "import bisect, collections, copy, datetime, functools, heapq, itertools, json, math\n",
        "import operator, os, random, re, statistics, string, sys, time, typing\n",
        "from builtins import *\nfrom typing import List, Optional, Tuple, Dict, Set\n",
    ]
)
"""Imports that published solutions of function problems (APPS, TACO) use without writing them."""

_MODULES = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random"),
    *("statistics", "itertools", "functools", "operator", "io", "sys", "json"),
)
_RECURSION_LIMIT = 50_000
LIVE_CODE_BENCH = "".join(
    [
        "import os\n",  # not among the benchmark's own names, but published solutions use it
        *(f"from {name} import *\n" for name in (*_MODULES, "builtins", "typing")),
        f"import {', '.join((*_MODULES, 'typing'))}\n",
        f"sys.setrecursionlimit({_RECURSION_LIMIT})\n",
    ]
)
"""LiveCodeBench's own preamble, for functions and programs: a name means the same as there."""

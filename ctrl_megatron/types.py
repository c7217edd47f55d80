"""The records that flow through the trainer. No behaviour, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Message = dict[str, str]
"""One chat turn: ``{"role": "system" | "user" | "assistant", "content": text}``."""

PrompterType = Literal["mbppplus", "code_contests", "livecodebench"]
"""How a problem is asked and judged; the names are CTRL's. ``mbppplus`` covers every function
problem judged by asserts, ``code_contests`` every problem judged on stdin and stdout."""

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A programming task and the tests that judge it."""

    id: str
    """Unique name of the problem, e.g. ``builtin/sum_of_squares``."""
    statement: str
    """The text a solver reads."""
    prompter_type: PrompterType
    """Which prompt format and which grader the problem uses."""
    selected_uts: tuple[str, ...] | str
    """Asserts (function problems), or a JSON list of ``{"input": {"stdin"}, "output": {"stdout"}}``
    cases."""
    entry_point: str = ""
    """The function under test, or ``Solution().name`` for a method; then, after commas, classes
    that the tests build. Empty for stdin/stdout problems."""
    test_setup: str = ""
    """Code that the asserts need before they run (imports, helpers), without expected values."""
    comparison: str = ""
    """The rule by which outputs are compared, such as ``tokens`` or ``float:1e-6``; empty is
    ``strict``. Asserts say themselves what is equal."""
    time_limit: float = 10.0
    """Seconds of wall clock that one test may take."""
    reference: str = ""
    """A solution known to pass every test; empty where none is known."""
    buggy: tuple[str, ...] = ()
    """Programs known to be wrong."""
    difficulty: int = 0
    """0 (one line) to 4 (hard); only used to report and to split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One first solution of a problem: the thing that is criticised."""

    id: str
    """Unique name of the attempt, e.g. ``builtin/sum_of_squares/2``."""
    problem: Problem
    solution: str
    """The raw text of the solver's answer (prose and fenced code)."""
    pass_rate: float | None = None
    """Share of tests that the solution passes; None where it was never judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How an engine draws tokens. ``temperature == 0`` is greedy."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """Keep the k likeliest tokens; -1 keeps all."""
    n: int = 1
    """Completions per prompt."""
    seed: int | None = None
    """Base seed; an engine derives one stream per prompt row and completion from it."""
    first_row: int = 0
    """Row of the first prompt: a part of a request draws what it would draw in the whole."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a completion; the stop token itself is kept as the last token."""
    log_probs: bool = True
    """Whether completions carry log-probs, which an engine computes only if it is asked to."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens ``[start, end)`` of a completion were drawn from the weights called ``version``."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What an engine drew for one prompt."""

    token_ids: tuple[int, ...]
    """Generated tokens, the stop token included when there was one."""
    log_probs: tuple[float, ...]
    """Log-probability of each token under the distribution it was drawn from before truncation
    by top-p and top-k, at the sampling temperature (at temperature 1 when greedy); empty without
    ``SamplingParams.log_probs``."""
    finish_reason: FinishReason
    spans: tuple[VersionSpan, ...]
    """Which weights produced which tokens; the spans cover all tokens in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the sandbox says about one program."""

    passed: tuple[bool, ...]
    """One entry per test that was run, in the order of the tests."""
    total: int
    """Number of tests the problem has; ``len(passed)`` may be smaller after an early stop."""
    detail: tuple[str, ...] = ()
    """One short text per entry of ``passed``: what went wrong, empty where it passed."""
    timed_out: bool = False
    """A test ran out of time, which a busy machine can cause: another run may tell otherwise."""

    @property
    def pass_rate(self) -> float:
        """Passed tests over all tests of the problem, in [0, 1]."""
        return sum(self.passed) / self.total

    @property
    def accepted(self) -> bool:
        """True when every test passed."""
        return len(self.passed) == self.total and all(self.passed)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Name, dtype and shape of one HF-named tensor, as manifests and weight updates speak of it."""

    name: str
    dtype: str
    """torch's name without the prefix: ``float32``, ``bfloat16``."""
    shape: tuple[int, ...]

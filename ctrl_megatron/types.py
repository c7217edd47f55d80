"""The records that flow through the trainer. No behaviour, no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Message = dict[str, str]
"""One chat turn: ``{"role": "system" | "user" | "assistant", "content": text}``."""

PrompterType = Literal["mbppplus", "code_contests", "livecodebench"]
"""The format of a problem's prompt and tests, under CTRL's names: ``mbppplus`` for functions that
asserts test, ``code_contests`` for programs that read stdin and write stdout."""

FinishReason = Literal["stop", "length", "abort"]

StrategyName = Literal["megatron", "fsdp"]
"""The library that computes the trainer's models: ``models.megatron`` or ``models.fsdp``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A programming task and its tests."""

    id: str
    """Unique name of the problem, e.g. ``builtin/sum_of_squares``."""
    statement: str
    """The task in words, as a solver reads it."""
    prompter_type: PrompterType
    """The prompt format and the grader of the problem."""
    selected_uts: tuple[str, ...] | str
    """Asserts (function problems), or a JSON list of ``{"input": {"stdin"}, "output": {"stdout"}}``
    cases."""
    entry_point: str = ""
    """The function under test, or ``Solution().name`` for a method; then, after commas, classes
    that the tests build. Empty for stdin/stdout problems."""
    test_setup: str = ""
    """Code that the asserts need before they run (imports, helpers), without expected values."""
    comparison: str = ""
    """The rule that compares outputs, such as ``tokens`` or ``float:1e-6``; empty means ``strict``.
    Asserts need none."""
    time_limit: float = 10.0
    """Wall-clock limit of one test, in seconds."""
    reference: str = ""
    """A solution that passes every test; empty if none is known."""
    uncounted: tuple[int, ...] = ()
    """Positions of the verdicts that say nothing about a program and are left out."""
    buggy: tuple[str, ...] = ()
    """Wrong programs."""
    difficulty: int = 0
    """0 (one line) to 4 (hard); used only in reports and splits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A first solution of a problem, which a critique is about."""

    id: str
    """Unique name of the attempt, e.g. ``builtin/sum_of_squares/2``."""
    problem: Problem
    solution: str
    """The solver's whole answer (prose and fenced code)."""
    pass_rate: float | None = None
    """Share of tests that the solution passes; None if it was never run."""


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
    """Completion j of the prompt called ``name`` has a random stream of its own, derived from
    (seed, name, j). None leaves the draws to the engine."""
    rows: tuple[str | int, ...] = ()
    """Name of each prompt, such as the id of its row, so that a prompt's draws do not depend on the
    other prompts of the request. Empty: the prompts are numbered from 0."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a completion; the stop token is its last token."""
    log_probs: bool = True
    """Whether the engine computes log-probs of the generated tokens."""

    def prompt_names(self, num_prompts: int) -> tuple[str | int, ...]:
        return self.rows or tuple(range(num_prompts))

    def group_by_prompt(self, completions: Sequence[Completion]) -> list[list[Completion]]:
        """The completions of all prompts, in order, as ``n`` for each prompt."""
        return [list(completions[i : i + self.n]) for i in range(0, len(completions), self.n)]


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens ``[start, end)`` of a completion, drawn from the weights of ``version``."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRoutes:
    """The experts that an engine's routers chose for the tokens of a prompt and its completion, all
    but the last token, which no pass has read."""

    version: str
    """The weights that chose."""
    ids: bytes
    """Numbers of experts (tokens, layers with experts, ``top_k``), as uint8, or as little-endian
    int16 where ``wide``."""
    layers: int
    """Number of layers with experts."""
    top_k: int
    """Number of experts of a token."""
    wide: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The tokens that an engine drew for one prompt."""

    token_ids: tuple[int, ...]
    """Generated tokens, including the stop token if there is one."""
    log_probs: tuple[float, ...]
    """Log-probability of each token under the distribution it was drawn from before truncation
    by top-p and top-k, at the sampling temperature (at temperature 1 when greedy); empty without
    ``SamplingParams.log_probs``."""
    finish_reason: FinishReason
    spans: tuple[VersionSpan, ...]
    """The versions of the weights that drew the tokens; the spans cover all tokens in order."""
    order: tuple[int, ...] = ()
    """The step of the sampler that drew each token, counted from 0; empty where every token was
    drawn after the one before it."""
    routes: ExpertRoutes | None = None
    """With ``EngineSpec.returns_routes`` of a model with experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of running one program on its tests."""

    passed: tuple[bool, ...]
    """One entry per test that was run, in the order of the tests."""
    total: int
    """Number of tests the problem has; ``len(passed)`` may be smaller after an early stop. Unit
    tests are counted by the judge: after an early stop it is the number of those that were run."""
    detail: tuple[str, ...] = ()
    """A short text per entry of ``passed``: why the test failed; empty if it passed."""
    timed_out: bool = False
    """Whether a test ran out of time. A busy machine can cause this; another run may differ."""
    scores: tuple[float, ...] = ()
    """The share of each test's points, in [0, 1], one per entry of ``passed``; empty where a test
    only passes or fails."""
    tests: tuple[str, ...] = ()
    """The name of each unit test, one per entry of ``passed``; empty where the tests of the problem
    are one verdict each."""
    unjudgeable: bool = False
    """Whether a test could not be judged on this program, which counts as a failure."""

    @property
    def pass_rate(self) -> float:
        """Passed tests over all tests of the problem, in [0, 1]."""
        return sum(self.passed) / self.total

    @property
    def accepted(self) -> bool:
        return len(self.passed) == self.total and all(self.passed)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Name, dtype and shape of a tensor under its Hugging Face name."""

    name: str
    dtype: str
    """torch's name without the prefix: ``float32``, ``bfloat16``."""
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """Adapters beside linear layers (LoRA, arXiv 2106.09685): a layer computes W x + scale B A x,
    and only A (rank, in) and B (out, rank) are trained."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    """The last parts of the layers' names in Hugging Face's models, such as ``q_proj``."""
    seed: int = 0
    """Seed of the initial A; B is zero at first."""
    shared_outer: bool = False
    """The experts of a layer share the matrices at its input and at its output: A of the gate and
    the up projection, B of the down projection."""

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Lora:
        """The adapters whose fields were written as JSON. TypeError or KeyError for others."""
        return cls(**{**fields, "targets": tuple(fields["targets"])})

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

"""The training files of a critic: which attempts and critiques go into which file.

Source: CTRL (arXiv 2502.03492, section 3.1).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from ctrl_megatron.data.rows import row_of_attempt, write_rows
from ctrl_megatron.errors import UserError
from ctrl_megatron.preparation.published import DroppedItems
from ctrl_megatron.preparation.selection import (
    CritiqueDraft,
    DataPart,
    SplitShares,
    choose_by_right_share,
    choose_examples,
    distinct_attempts,
    round_robin_by_problem,
)
from ctrl_megatron.preparation.solution_files import keep_or_count_dropped
from ctrl_megatron.preparation.stages import SynthesisStages
from ctrl_megatron.prompts import fence_code, generation_messages
from ctrl_megatron.sft.examples import SftExample, write_examples
from ctrl_megatron.types import Attempt, Problem, SamplingParams, Verdict

FILES = (
    *(f"{name}.parquet" for name in ("train", "val", "sft_train", "sft_val", "solve")),
    *("solutions.jsonl", "synthesis.json"),
)
_SFT_VAL_SIZE = 64
_BAD_REFERENCE = "reference that fails its own tests"
Judged = tuple[Attempt, Verdict]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFileRecipe:
    """How the files are made from problems and first solutions."""

    shares: SplitShares
    solutions: SamplingParams | None
    """Sampling of first solutions; None if they exist already."""
    critiques: SamplingParams
    revisions: SamplingParams
    balance: bool
    """True: fine-tuning keeps as many right first solutions as wrong ones."""
    val_size: int
    """Most attempts in ``val.parquet``."""
    right_share: float | None
    """Share of right first solutions in ``train.parquet`` and ``val.parquet``; None keeps all."""
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFiles:
    """The content of the files."""

    train: Sequence[Attempt]
    val: Sequence[Attempt]
    solve: Sequence[Problem]
    sft_train: Sequence[SftExample]
    sft_val: Sequence[SftExample]
    solutions: Sequence[Attempt]
    """All judged attempts that are first solutions."""
    counts: Mapping[str, Mapping[str, int]]
    """For each stage, how much was kept and what was dropped, by reason."""

    def write(self, folder: Path) -> None:
        """Write each file that has content into ``folder``."""
        for name, attempts in (("train", self.train), ("val", self.val)):
            if attempts:
                write_rows(folder / f"{name}.parquet", map(row_of_attempt, attempts))
        if self.solve:
            asked = (
                row_of_attempt(Attempt(id=p.id, problem=p, solution=""), generation_messages(p))
                for p in self.solve
            )
            write_rows(folder / "solve.parquet", asked)
        for name, examples in (("sft_train", self.sft_train), ("sft_val", self.sft_val)):
            if examples:
                write_examples(folder / f"{name}.parquet", examples)
        lines = [
            json.dumps(
                {
                    "id": a.id,
                    "problem_id": a.problem.id,
                    "solution": a.solution,
                    "pass_rate": a.pass_rate,
                },
                ensure_ascii=False,
            )
            for a in self.solutions
        ]
        (folder / "solutions.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        (folder / "synthesis.json").write_text(json.dumps(self.counts, indent=1) + "\n")


def check_split_sizes(problems: Sequence[Problem], shares: SplitShares) -> None:
    """Raise ``UserError`` if a part with a positive share gets none of the problems."""
    parts = {shares.split_of(problem.id) for problem in problems}
    for part, wanted, what in (
        ("rl", shares.sft < 1, "reinforcement learning; lower --sft-share or --val-share"),
        ("sft", shares.sft > 0, "fine-tuning; raise --sft-share or lower --val-share"),
    ):
        if wanted and part not in parts:
            raise UserError(f"none of {len(problems)} problems falls to {what}, or add problems")


async def make_training_files(
    stages: SynthesisStages,
    problems: Sequence[Problem],
    given: Sequence[Attempt],
    dropped: DroppedItems,
    recipe: TrainingFileRecipe,
) -> TrainingFiles:
    """Run all stages. ``given`` are first solutions that exist already; ``dropped`` counts those
    that were not usable. Raises ``UserError`` if nothing is left to train on.
    """
    counts = dict[str, dict[str, int]]()
    drawn = [*given, *await _drawn(stages, problems, dropped, recipe.solutions)]
    counts["solutions"] = {"kept": len(drawn), **dropped.counts()}
    attempts, counts["attempts"], judged = await _judged(stages, drawn, problems, recipe.shares)
    names = {attempt.id for attempt in attempts}
    of = {
        part: [(a, v) for a, v in judged if recipe.shares.split_of(a.problem.id) == part]
        for part in get_args(DataPart)
    }
    # Held-out attempts are cut to the sizes of the files: every problem once before any twice.
    of["val"] = round_robin_by_problem(of["val"], recipe.seed)
    drafts = await stages.critiques(of["sft"] + of["val"][:_SFT_VAL_SIZE], recipe.critiques)
    drafts = await stages.revisions(drafts, recipe.revisions)
    examples = {}
    for part, name in (("sft", "SFT critiques"), ("val", "SFT validation")):
        chosen = [d for d in drafts if recipe.shares.split_of(d.attempt.problem.id) == part]
        examples[part], counts[name] = _examples(chosen, recipe)
    if recipe.shares.sft > 0 and not examples["sft"]:
        reasons = _reasons(counts["SFT critiques"])
        raise UserError(f"no critique is left for fine-tuning ({reasons or 'no attempts'})")
    train, val = ([a for a, _ in of[part] if a.id in names] for part in ("rl", "val"))
    if not train and not examples["sft"]:
        reasons = _reasons({**counts["solutions"], **counts["attempts"]})
        raise UserError(f"no row to train on is left ({reasons or 'no solutions'})")
    drawn_rows = len(train)
    if recipe.right_share is not None:
        train = _with_right_share(train, recipe, len(train))
        val = _with_right_share(val, recipe, recipe.val_size)
        if not train and drawn_rows:
            raise UserError(
                f"none of {drawn_rows} first solutions for reinforcement learning is left: all of "
                "them are right, or all are wrong",
                key=f"--right-share={recipe.right_share}",
                remedy="leave it out, draw more solutions (--n), or take easier or harder problems",
            )
    val = val[: recipe.val_size]
    counts["RL rows"] = {
        "kept": len(train),
        "of them right": sum(attempt.pass_rate == 1.0 for attempt in train),
        "held out": len(val),
    }
    return TrainingFiles(
        train=train,
        val=val,
        solve=[p for p in problems if recipe.shares.split_of(p.id) == "rl"],
        sft_train=examples["sft"],
        sft_val=examples["val"],
        solutions=[a for a, _ in judged if a.id in names],
        counts=counts,
    )


async def _drawn(
    stages: SynthesisStages,
    problems: Sequence[Problem],
    dropped: DroppedItems,
    params: SamplingParams | None,
) -> list[Attempt]:
    if params is None:
        return []
    drawn = await stages.solutions(problems, params)
    return [attempt for attempt, fate in drawn if keep_or_count_dropped(fate, attempt.id, dropped)]


async def _judged(
    stages: SynthesisStages,
    drawn: Sequence[Attempt],
    problems: Sequence[Problem],
    shares: SplitShares,
) -> tuple[list[Attempt], dict[str, int], list[Judged]]:
    """The distinct first solutions, the counts of the stage, and the verdicts of these and of the
    problems' own programs.
    """
    attempts, dropped = distinct_attempts(drawn)
    judged = await stages.verdicts([*attempts, *_own_programs(problems, shares)])
    kept = list[Judged]()
    for attempt, verdict in judged:
        if attempt.id.endswith("/reference") and not verdict.accepted:
            dropped.add(_BAD_REFERENCE, attempt.id)
        else:
            kept.append((attempt, verdict))
    solved = sum(verdict.accepted for _, verdict in judged[: len(attempts)])
    return attempts, {"solved": solved, "kept": len(kept), **dropped.counts()}, kept


def _own_programs(problems: Iterable[Problem], shares: SplitShares) -> list[Attempt]:
    """References and known wrong programs, as further attempts for fine-tuning."""
    return [
        Attempt(id=f"{problem.id}/{kind}", problem=problem, solution=fence_code(code))
        for problem in problems
        if shares.split_of(problem.id) != "rl"
        for kind, code in [
            *([("reference", problem.reference)] if problem.reference.strip() else []),
            *((f"buggy{i}", code) for i, code in enumerate(problem.buggy)),
        ]
    ]


def _examples(
    drafts: Sequence[CritiqueDraft], recipe: TrainingFileRecipe
) -> tuple[list[SftExample], dict[str, int]]:
    examples, dropped = choose_examples(drafts, balance=recipe.balance, seed=recipe.seed)
    right = {draft.attempt.id for draft in drafts if draft.right}
    of_right = sum(example.id in right for example in examples)
    return examples, {"kept": len(examples), "of them right": of_right, **dropped.counts()}


def _with_right_share(
    attempts: Sequence[Attempt], recipe: TrainingFileRecipe, most: int
) -> list[Attempt]:
    """At most ``most`` attempts of ``choose_by_right_share``, in the order that they have here."""
    assert recipe.right_share is not None
    right, wrong = ([a for a in attempts if (a.pass_rate == 1.0) is side] for side in (True, False))
    of_right = round(most * recipe.right_share)
    right, wrong = right[:of_right], wrong[: most - of_right]
    chosen = choose_by_right_share(
        right, wrong, recipe.right_share, recipe.seed, lambda attempt: attempt.problem.id
    )
    names = {attempt.id for attempt in chosen}
    return [attempt for attempt in attempts if attempt.id in names]


def _reasons(counts: Mapping[str, int]) -> str:
    """The numbers of dropped items and the reasons, for a message."""
    kept = ("kept", "of them right", "solved")
    return ", ".join(f"{times} {what}" for what, times in counts.items() if what not in kept)

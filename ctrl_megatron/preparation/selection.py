"""Selects the critiques that become supervised examples, and the order of attempts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar
from zlib import crc32

from ctrl_megatron.preparation.near_duplicates import NearDuplicates
from ctrl_megatron.preparation.published import DroppedItems
from ctrl_megatron.prompts import critique_messages, extract_code, parse_judgment
from ctrl_megatron.rewards.leaks import find_leak
from ctrl_megatron.rewards.normalize import normalize_code
from ctrl_megatron.sft.examples import SftExample
from ctrl_megatron.types import Attempt, Verdict

T = TypeVar("T")
DataPart = Literal["sft", "rl", "val"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitShares:
    """Shares of the problems: ``val`` of all are held out, ``sft`` of the rest are for
    fine-tuning.
    """

    val: float = 0.2
    sft: float = 0.5

    def split_of(self, problem_id: str) -> DataPart:
        """The part of a problem. It depends only on the id, so a problem never changes its part."""
        place = crc32(problem_id.encode()) % 1000 / 1000
        if place < self.val:
            return "val"
        # A second digest makes this choice independent of the first.
        rest = crc32(f"sft/{problem_id}".encode()) % 1000 / 1000
        return "sft" if rest < self.sft else "rl"


@dataclass(frozen=True, slots=True, kw_only=True)
class CritiqueDraft:
    """A critique that may become an example."""

    attempt: Attempt
    right: bool
    """Whether the attempt passes all tests."""
    text: str
    revised_right: bool | None = None
    """Whether the revision by this critique passes; None if it was not tried."""


def critique_fault(draft: CritiqueDraft) -> str:
    """The reason why a critique cannot be an example; empty if it can."""
    judged = parse_judgment(draft.text)
    if judged is None:
        return "no judgment"
    if judged != draft.right:
        return "judgment contradicts the sandbox"
    if not draft.text.rstrip().endswith(("Correct", "Incorrect")):
        return "has text after its judgment"
    if leak := find_leak(draft.text, draft.attempt):
        return leak
    return "its revision fails" if draft.revised_right is False else ""


def choose_examples(
    drafts: Iterable[CritiqueDraft], *, balance: bool, seed: int
) -> tuple[list[SftExample], DroppedItems]:
    """The examples in order, without the hint in their prompts, and what was dropped.

    Near duplicates (program and critique) within a problem are dropped. With ``balance`` equally
    many right and wrong attempts are kept, chosen by their ids and ``seed``.
    """
    dropped, kept = DroppedItems(), list[CritiqueDraft]()
    indices: defaultdict[str, NearDuplicates] = defaultdict(
        lambda: NearDuplicates(words=3, least=0.8)
    )
    for draft in drafts:
        name, index = draft.attempt.id, indices[draft.attempt.problem.id]
        program = normalize_code(extract_code(draft.attempt.solution))
        text = f"{program}\n{draft.text}"
        if reason := critique_fault(draft):
            dropped.add(reason, name)
        elif index.find(text) is not None:
            dropped.add("nearly another example of its problem", name)
        else:
            index.add(name, text)
            kept.append(draft)
    if balance:
        kept = _balanced(kept, seed, dropped)
    examples = [
        SftExample(
            id=draft.attempt.id,
            prompt=tuple(critique_messages(draft.attempt.problem, draft.attempt.solution)),
            response=draft.text.strip(),
        )
        for draft in kept
    ]
    return examples, dropped


def distinct_attempts(attempts: Sequence[Attempt]) -> tuple[list[Attempt], DroppedItems]:
    """The attempts without repeated programs of the same problem (in normal form), and the
    others.
    """
    seen, kept, dropped = set[tuple[str, str]](), list[Attempt](), DroppedItems()
    for attempt in attempts:
        key = attempt.problem.id, normalize_code(extract_code(attempt.solution))
        if key in seen:
            dropped.add("the same program again", attempt.id)
        else:
            kept.append(attempt)
        seen.add(key)
    return kept, dropped


def round_robin_by_problem(
    judged: Iterable[tuple[Attempt, Verdict]], seed: int
) -> list[tuple[Attempt, Verdict]]:
    """The attempts in rounds: one of each problem, then a second of each problem that has one, and
    so on. A prefix of the result therefore covers as many problems as possible. Within a round
    problems are ordered by their ids and ``seed``, independently of the order of the files.
    """
    numbers = Counter[str]()
    placed: list[tuple[int, int, str, tuple[Attempt, Verdict]]] = []
    for attempt, verdict in judged:
        name = attempt.problem.id
        drawn = crc32(f"{seed}/{name}".encode())
        placed.append((numbers[name], drawn, name, (attempt, verdict)))
        numbers[name] += 1
    return [found for *_, found in sorted(placed, key=lambda place: place[:3])]


def choose_by_right_share(
    right: Sequence[T], wrong: Sequence[T], share: float, seed: int, problem_of: Callable[[T], str]
) -> list[T]:
    """Items of both sides, so that right ones are the share ``share`` of all: the side that is too
    small is kept whole, and the other is cut.

    It keeps problems that both sides have before others, and one item of each problem before any
    second. Items of one problem keep their order; problems are ordered by their ids and ``seed``.
    """
    if share in (0.0, 1.0):
        return [*(right if share else wrong)]
    wanted = round(len(wrong) * share / (1 - share))
    if wanted <= len(right):
        counts = wanted, len(wrong)
    else:
        counts = len(right), min(len(wrong), round(len(right) * (1 - share) / share))
    both = {*map(problem_of, right)} & {*map(problem_of, wrong)}
    chosen = []
    for side, count in zip((right, wrong), counts, strict=True):
        numbers = Counter[str]()
        placed = []
        for place, item in enumerate(side):
            problem = problem_of(item)
            drawn = crc32(f"{seed}/{problem}".encode())
            placed.append((numbers[problem], problem not in both, drawn, problem, place))
            numbers[problem] += 1
        chosen += [side[place] for *_, place in sorted(placed)[:count]]
    return chosen


def _balanced(
    drafts: Sequence[CritiqueDraft], seed: int, dropped: DroppedItems
) -> list[CritiqueDraft]:
    sides = [[d for d in drafts if d.right is right] for right in (True, False)]
    least = min(map(len, sides))
    chosen: set[str] = set()
    for side in sides:
        order = sorted(d.attempt.id for d in side)
        order.sort(key=lambda name: crc32(f"{seed}/{name}".encode()))
        chosen |= set(order[:least])
    for draft in drafts:
        if draft.attempt.id not in chosen:
            dropped.add("right and wrong balanced", draft.attempt.id)
    return [draft for draft in drafts if draft.attempt.id in chosen]

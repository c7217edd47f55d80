"""The record of a step: one response, from its draw to its rewards, and the columns made of it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from ctrl_megatron.data.rows import CRITIQUE, Row
from ctrl_megatron.prompts import critique_messages
from ctrl_megatron.rewards import RewardItem, RewardOutcome, Scores
from ctrl_megatron.types import Completion, VersionSpan

Fields = Mapping[str, str | bool | int | float | None]
"""Values of one row of the batch beyond its tokens, by the name of the field."""
ColumnMaker = Callable[["Sample"], Fields]
"""From a record to values of its row of the batch."""
REVISION_COLUMNS = (
    *("revision", "revision_length", "revision_fits", "revision_failure", "revision_version"),
)
"""The names of ``revision_columns``."""
TURN_COLUMNS = ("turn", "parent", "program")
"""The names of ``turn_columns``."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SampleSize:
    """The facts of a sample that decide which data rank trains on it."""

    uid: str
    mini_batch: int
    prompt: int
    """Tokens of the prompt."""
    response: int
    """Tokens of the response."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """The proxy's answer to the request for a revision."""

    text: str = ""
    """Empty without an answer."""
    tokens: int | None = None
    """Its length; None without an answer, and where the proxy's server does not report it."""
    fits: bool = True
    """False where problem, program and critique left the proxy no room for an answer, so that the
    critique has no reward."""
    failure: str = ""
    """Message of the proxy's failure; empty unless it is the reason why there is no answer, so that
    the critique has no reward."""
    version: str = ""
    """Version of the weights that drew it; empty without an answer."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CriticisedProgram:
    """What a critique is about, where that is a revision and not the row's first solution."""

    text: str
    pass_rate: float | None = None
    """Share of the row's tests that it passes; None before it was judged, and where the judge
    failed."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SampleRewards:
    """The rewards of a sample; None where one is unknown."""

    total: float | None
    """The weighted sum of ``rewards``."""
    rewards: Mapping[str, float | None]
    """Name of a reward function -> its reward, not multiplied by its weight."""
    pass_rate: float | None = None
    """Passed tests over all tests of the revision."""
    copied: float | None = None
    """Share of the revision's program that is in the critique."""
    cached: bool = False
    """Whether no program ran for it."""
    detail: str = ""
    """The verdict in words, or the reason why there is none."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The record of a step: a row's response, from its draw to its rewards. Nodes fill it in, and
    the batch has it in the column ``sample``; the other columns of its values are for reports,
    dumps and nodes of the user's.
    """

    uid: str = ""
    """Unique id of the group: all samples of one row in one draw."""
    row_id: str
    """Id of the data's row that the prompt is about."""
    task: str = CRITIQUE
    """``Row.task``."""
    mini_batch: int = 0
    """Number of the optimizer step, within the training step, that trains on the sample."""
    prompt: tuple[int, ...] = ()
    completion: Completion
    """The response: in an episode the answers of the model and, between them, what it read."""
    drawn: tuple[bool, ...] = ()
    """Whether the model drew each token of the response; empty if it drew all of them."""
    text: str = ""
    """The response's text: the critique, or the completion."""
    judgment: bool | None = None
    """True for a critique that says "Correct", False for "Incorrect", None for one that says
    neither."""
    revision: Revision | None = None
    """None before the proxy was asked, and for a sample that is not revised."""
    outcome: SampleRewards | None = None
    """None before the sample was judged."""
    turn: int = 1
    """Number of the critique in its chain of critiques and revisions."""
    parent: str = ""
    """The critique whose revision this one is about: the uid of its group and its place in it, with
    a slash between them. Empty in the first turn."""
    program: CriticisedProgram | None = None
    """The program that the critique is about where it is not the row's: that revision, or a program
    of the solver (``co_train``)."""
    fields: Fields = dataclasses.field(default_factory=dict)
    """Further columns of the batch, of a pipeline's own."""

    @property
    def length(self) -> int:
        """The number of tokens that the model drew, which are those that it is trained on."""
        return sum(self.drawn) if self.drawn else len(self.completion.token_ids)

    @property
    def size(self) -> SampleSize:
        prompt, response = len(self.prompt), len(self.completion.token_ids)
        return SampleSize(
            uid=self.uid, mini_batch=self.mini_batch, prompt=prompt, response=response
        )

    @property
    def is_revised(self) -> bool:
        return self.judgment is not None and self.task == CRITIQUE

    @property
    def can_have_reward(self) -> bool:
        """False where the sample has no reward, whatever a judge would say."""
        return self.revision is None or (self.revision.fits and not self.revision.failure)

    def row_with_program(self, row: Row) -> Row:
        """The data's ``row`` with the program that the critique is about, and its request."""
        if (about := self.program) is None:
            return row
        prompt = critique_messages(row.attempt().problem, about.text)
        return dataclasses.replace(
            row, solution=about.text, pass_rate=about.pass_rate, prompt=tuple(prompt)
        )

    def reward_item(self, row: Row) -> RewardItem:
        """The sample as the reward functions get it: a critique with its revision; of another task
        the response."""
        is_critique, revision = self.task == CRITIQUE, self.revision or Revision()
        return RewardItem(
            text=revision.text if is_critique else self.text,
            critique=self.text if is_critique else "",
            judgment=self.judgment,
            row=row,
            length=self.length,
        )


Group = list[Sample]


def completion_from_state(state: Mapping[str, Any]) -> Completion:
    return Completion(
        token_ids=tuple(state["token_ids"]),
        log_probs=tuple(state["log_probs"]),
        finish_reason=state["finish_reason"],
        spans=tuple(VersionSpan(**span) for span in state["spans"]),
    )


def critique_columns(sample: Sample) -> Fields:
    """``task``, ``critique`` (the text of a response of any task), ``valid`` (whether it contains a
    judgment) and ``judged_correct``.
    """
    return {
        "task": sample.task,
        "critique": sample.text,
        "valid": sample.judgment is not None,
        "judged_correct": bool(sample.judgment),
    }


def revision_columns(sample: Sample) -> Fields:
    """``revision``, ``revision_length`` (NaN without one), ``revision_fits``, ``revision_failure``
    and ``revision_version`` of ``Sample.revision``.
    """
    revision = sample.revision or Revision()
    return {
        "revision": revision.text,
        "revision_length": revision.tokens,
        "revision_fits": revision.fits,
        "revision_failure": revision.failure,
        "revision_version": revision.version,
    }


def turn_columns(sample: Sample) -> Fields:
    """``turn``, ``parent`` and ``program`` (the text that the critique is about; empty for the
    row's first solution) of ``Sample``."""
    about = sample.program
    return {
        "turn": sample.turn,
        "parent": sample.parent,
        "program": "" if about is None else about.text,
    }


def reward_columns(sample: Sample) -> Fields:
    """``score`` (the weighted sum) and ``reward/NAME`` of every reward function; NaN where the
    reward is unknown.
    """
    assert sample.outcome is not None
    rewards = {f"reward/{name}": reward for name, reward in sample.outcome.rewards.items()}
    return {"score": sample.outcome.total, **rewards}


def verdict_columns(sample: Sample) -> Fields:
    """What the sandbox found for the revision: ``pass_rate``, ``copied``, ``cached`` and
    ``detail``."""
    outcome = sample.outcome
    assert outcome is not None
    return {name: getattr(outcome, name) for name in ("pass_rate", "copied", "cached", "detail")}


def outcomes_of(scores: Scores) -> list[SampleRewards]:
    """The rewards of every item, with the critic's verdict where the run has a critic."""
    verdicts = [one or RewardOutcome(reward=None) for one in scores.outcomes]
    return [
        SampleRewards(
            total=total,
            rewards={name: part[row] for name, part in scores.parts.items()},
            pass_rate=verdict.pass_rate,
            copied=verdict.copied,
            cached=verdict.cached,
            detail=verdict.detail,
        )
        for row, (total, verdict) in enumerate(zip(scores.totals, verdicts, strict=True))
    ]


def weight_versions_text(completion: Completion) -> str:
    """The version of the weights that drew the completion; if there are several, each with its
    tokens: ``actor@2[0:17]+actor@3[17:40]``.
    """
    if len(completion.spans) == 1:
        return completion.spans[0].version
    return "+".join(f"{span.version}[{span.start}:{span.end}]" for span in completion.spans)


def spans_from_versions_text(versions: str, tokens: int) -> list[VersionSpan]:
    """The spans of which ``weight_versions_text`` made ``versions``, for a completion of so many
    tokens."""
    found = _SPAN.findall(versions)
    if not found:
        return [VersionSpan(versions, 0, tokens)] if versions else []
    return [VersionSpan(version, int(start), int(end)) for version, start, end in found]


_SPAN = re.compile(r"([^+]*)\[(\d+):(\d+)\]")

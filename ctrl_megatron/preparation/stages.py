"""The stages of synthesis: first solutions, verdicts, critiques, revisions. A journal keeps every
finished part.

Source: CTRL (arXiv 2502.03492, section 3.1).
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from ctrl_megatron.generation.chat import Chat
from ctrl_megatron.generation.solutions import Fate, draw_first_solutions, judge_attempts
from ctrl_megatron.preparation.journal import Records, StageJournal
from ctrl_megatron.preparation.selection import CritiqueDraft, critique_fault
from ctrl_megatron.preparation.synthesis import synthesise_critique
from ctrl_megatron.prompts import (
    generation_messages,
    hint_messages,
    revision_request,
    sanitized_answer,
)
from ctrl_megatron.rewards.grading import Judge
from ctrl_megatron.rewards.hints import execution_hint
from ctrl_megatron.sandbox import EmbeddedSandbox, SandboxClient
from ctrl_megatron.types import Attempt, Message, Problem, SamplingParams, Verdict

if TYPE_CHECKING:
    from ctrl_megatron.generation.sources import ChatSource, EngineOptions

Item = TypeVar("Item")
OpenChat = Callable[[], AbstractAsyncContextManager[Chat]]
OpenJudge = Callable[[], AbstractAsyncContextManager[Judge]]
Progress = Callable[[str, int, int], None]
"""Called with the stage, the number of finished parts and the number of all parts."""


def chat_opener(source: ChatSource, engines: EngineOptions) -> OpenChat:
    """Opens the chat of ``source``, and its engine if it needs one, for the length of a block."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[Chat]:
        from ctrl_megatron.generation.sources import open_chats

        with open_chats({"": source}, engines) as chats:
            try:
                yield chats[""]
            finally:
                await chats[""].close()

    return opened


@asynccontextmanager
async def open_sandbox() -> AsyncIterator[SandboxClient]:
    token = secrets.token_urlsafe(32)
    with EmbeddedSandbox.start(token=token) as sandbox:
        async with SandboxClient(sandbox.endpoint, token=token) as client:
            yield client


@dataclass(frozen=True, slots=True, kw_only=True)
class SynthesisStages:
    """The stages over one journal. A chat or sandbox is opened only if its stage has work left."""

    journal: StageJournal
    chats: Mapping[str, OpenChat]
    """``solver`` draws first solutions. ``critic`` writes critiques from hints; without it they are
    written from templates. ``reviser`` revises by each critique, which is dropped if the revision
    fails; without it no critique is checked in this way.
    """
    open_judge: OpenJudge = open_sandbox
    seed: int
    part_size: int = 16
    """Problems or attempts of one line of the journal."""
    progress: Progress = lambda *_: None

    async def solutions(
        self, problems: Sequence[Problem], params: SamplingParams
    ) -> list[tuple[Attempt, Fate]]:
        """Attempts at ``problems`` and how each was read (``Fate``)."""
        known = {problem.id: problem for problem in problems}

        async def draw(chat: Chat, part: tuple[int, list[Problem]]) -> Records:
            first, some = part
            drawn = await draw_first_solutions(chat, some, _numbered(params, first, some))
            return [
                {"id": a.id, "problem_id": a.problem.id, "solution": a.solution, "fate": fate}
                for a, fate in drawn
            ]

        records = await self._stage("solutions", problems, self.chats["solver"], draw)
        return [
            (
                Attempt(id=r["id"], problem=known[r["problem_id"]], solution=r["solution"]),
                r["fate"],
            )
            for r in records
        ]

    async def verdicts(self, attempts: Sequence[Attempt]) -> list[tuple[Attempt, Verdict]]:
        """Each attempt with its pass rate set, and its verdict."""

        async def judge(judge: Judge, part: tuple[int, list[Attempt]]) -> Records:
            return [asdict(verdict) for _, verdict in await judge_attempts(judge, part[1])]

        records = await self._stage("verdicts", attempts, self.open_judge, judge)
        lists = ("passed", "detail", "scores", "tests")
        verdicts = [
            # Journals of earlier versions lack some.
            Verdict(**{**r, **{name: tuple(r.get(name, ())) for name in lists}})
            for r in records
        ]
        return [
            (replace(attempt, pass_rate=verdict.pass_rate), verdict)
            for attempt, verdict in zip(attempts, verdicts, strict=True)
        ]

    async def critiques(
        self, judged: Sequence[tuple[Attempt, Verdict]], params: SamplingParams
    ) -> list[CritiqueDraft]:
        """A critique of each attempt: the first of ``params.n`` draws without a fault, or the first
        draw if all have one. The text is empty if the prompt leaves no room for a critique.
        """
        if "critic" not in self.chats:
            texts = [synthesise_critique(a, v, self.seed) for a, v in judged]
        else:
            records = await self._stage(
                "critiques",
                judged,
                self.chats["critic"],
                lambda chat, part: _criticise(chat, part, params),
            )
            texts = [record["critique"] for record in records]
        return [
            CritiqueDraft(attempt=attempt, right=verdict.accepted, text=text)
            for (attempt, verdict), text in zip(judged, texts, strict=True)
        ]

    async def revisions(
        self, drafts: Sequence[CritiqueDraft], params: SamplingParams
    ) -> list[CritiqueDraft]:
        """The drafts with the result of their revision; unchanged without a reviser. A draft with
        a fault is not revised.
        """
        if "reviser" not in self.chats:
            return list(drafts)
        revised = [draft for draft in drafts if not critique_fault(draft)]
        drawn = await self._stage(
            "revisions",
            revised,
            self.chats["reviser"],
            lambda chat, part: _revise(chat, part, params),
        )
        attempts = [
            replace(draft.attempt, solution=record["revision"])
            for draft, record in zip(revised, drawn, strict=True)
        ]

        async def judge(judge: Judge, part: tuple[int, list[Attempt]]) -> Records:
            return [{"right": v.accepted} for _, v in await judge_attempts(judge, part[1])]

        found = await self._stage("revision_verdicts", attempts, self.open_judge, judge)
        right = {d.attempt.id: r["right"] for d, r in zip(revised, found, strict=True)}
        return [replace(d, revised_right=right.get(d.attempt.id)) for d in drafts]

    async def _stage(
        self,
        name: str,
        items: Sequence[Item],
        open_source: Callable[[], AbstractAsyncContextManager[Any]],
        work: Callable[[Any, tuple[int, list[Item]]], Any],
    ) -> Records:
        size = self.part_size
        parts = [(i, list(items[i : i + size])) for i in range(0, len(items), size)]
        left = len(parts) - len(self.journal.finished_records(name))
        async with open_source() if left else _nothing() as source:
            records = await self.journal.run(
                name,
                parts,
                lambda part: work(source, part),
                lambda done: self.progress(name, done, len(parts)),
            )
        return [record for part in records for record in part]


@asynccontextmanager
async def _nothing() -> AsyncIterator[None]:
    yield None


def _numbered(params: SamplingParams, first: int, part: Sequence[object]) -> SamplingParams:
    """The parameters for the items of a stage from number ``first`` on."""
    return replace(params, rows=tuple(range(first, first + len(part))))


async def _criticise(
    chat: Chat, part: tuple[int, list[tuple[Attempt, Verdict]]], params: SamplingParams
) -> Records:
    first, judged = part
    asked = [
        hint_messages(attempt.problem, attempt.solution, execution_hint(attempt, verdict).text)
        for attempt, verdict in judged
    ]
    answers = await chat.complete(asked, _numbered(params, first, asked))
    records: Records = []
    for (attempt, verdict), group in zip(judged, answers, strict=True):
        texts = [answer.text.strip() for answer in group] or [""]
        drafts = [CritiqueDraft(attempt=attempt, right=verdict.accepted, text=t) for t in texts]
        chosen = next((draft for draft in drafts if not critique_fault(draft)), drafts[0])
        records.append({"id": attempt.id, "critique": chosen.text})
    return records


async def _revise(
    chat: Chat, part: tuple[int, list[CritiqueDraft]], params: SamplingParams
) -> Records:
    first, drafts = part
    asked = [_revision_messages(draft) for draft in drafts]
    answers = await chat.complete(asked, replace(_numbered(params, first, asked), n=1))
    return [
        {"id": draft.attempt.id, "revision": group[0].text if group else ""}
        for draft, group in zip(drafts, answers, strict=True)
    ]


def _revision_messages(draft: CritiqueDraft) -> list[Message]:
    solution = {"role": "assistant", "content": sanitized_answer(draft.attempt.solution)}
    asked = generation_messages(draft.attempt.problem)
    return [*asked, solution, revision_request(draft.text)]

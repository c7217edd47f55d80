"""The chain of CTRL: the actor criticises a program, the frozen proxy revises it after the
critique, and the problem's tests judge the revision.

Source: CTRL (arXiv 2502.03492). Training's nodes, dynamic sampling, ReMax's baseline, validation
and evaluation all call the functions of this file, over records that carry their row.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain

from tensordict import TensorDict

from ctrl_megatron.background import gathered
from ctrl_megatron.data.rows import CRITIQUE, Row
from ctrl_megatron.graph.columns import texts
from ctrl_megatron.prompts import parse_judgment, revision_messages
from ctrl_megatron.rewards import Judging, RewardItem, RewardOutcome, RewardSum, Scores
from ctrl_megatron.rewards.registry import MODEL_REWARD
from ctrl_megatron.steps.batch import Fields, Sample, reward_fields, rows_of, with_fields
from ctrl_megatron.steps.sampling import (
    RowListener,
    answered,
    begin_judging,
    by_row,
    draw_samples,
    generate,
)
from ctrl_megatron.steps.worker import Answer, DAGWorker, Failure, RolloutWorker
from ctrl_megatron.types import Completion, Message, SamplingParams, Verdict

REVISION_FIELDS = (
    "revision_length",
    "revision_fits",
    "revision_failure",
    "revision_version",
)
"""Fields of ``Critique.revised`` beside ``revision``, the text."""
_LEFT_OUT = "no revision: problem, solution and critique are too long for the proxy"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Critique:
    """A critique of a row's program, with the revision that follows once there is one."""

    row: Row
    """The problem with its tests; ``row.solution`` is the program that is criticised."""
    text: str
    judgment: bool | None
    """True for "Correct", False for "Incorrect", None where the text contains no judgment."""
    tokens: int = 0
    """Length of the critique; 0 for ReMax's greedy critique, whose length is not rewarded."""
    revision: str = ""
    """The proxy's answer; empty without one."""
    revision_tokens: int | None = None
    """Length of the revision; None where there is none."""
    fits: bool = True
    """False where problem, program and critique left the proxy no room for a revision, so that
    the critique has no reward."""
    failure: str = ""
    """Message of the proxy's failure; empty unless it is the reason why there is no revision, so
    that the critique has no reward."""
    revised_by: str = ""
    """Version of the weights that drew the revision; empty without one."""

    @property
    def rewardable(self) -> bool:
        """False where the critique has no reward, whatever a judge would say."""
        return self.fits and not self.failure

    @property
    def item(self) -> RewardItem:
        """The revised critique as the reward functions get it; of another task the response."""
        is_critique = self.row.task == CRITIQUE
        return RewardItem(
            text=self.revision if is_critique else self.text,
            critique=self.text if is_critique else "",
            judgment=self.judgment,
            row=self.row,
            length=self.tokens,
        )

    @property
    def drawn(self) -> Fields:
        """Fields of the batch that are known once the critique is drawn."""
        return {
            "task": self.row.task,
            "critique": self.text,
            "valid": self.judgment is not None,
            "judged_correct": bool(self.judgment),
        }

    @property
    def is_revised(self) -> bool:
        """Whether a revision follows in training."""
        return self.judgment is not None and self.row.task == CRITIQUE

    @property
    def revised(self) -> Fields:
        """Fields of the batch that are known once the revision is drawn."""
        return {
            "revision": self.revision,
            "revision_length": self.revision_tokens,
            "revision_fits": self.fits,
            "revision_failure": self.failure,
            "revision_version": self.revised_by,
        }


def read_critique(worker: RolloutWorker, row: Row, completion: Completion) -> Critique:
    """The critique of ``row`` that the actor drew."""
    text = worker.codec.decode(completion.token_ids)
    tokens = len(completion.token_ids)
    return Critique(row=row, text=text, judgment=parse_judgment(text), tokens=tokens)


def critiques_of(worker: DAGWorker, batch: TensorDict, *, prefix: str = "") -> list[Critique]:
    """The critique of every row of the batch, read from the fields whose names begin with
    ``prefix``, with its revision where the batch has one.
    """
    valid, correct = batch[f"{prefix}valid"].tolist(), batch[f"{prefix}judged_correct"].tolist()
    sizes = [0] * len(valid) if prefix else batch["response_mask"].sum(dim=1).tolist()
    fit = f"{prefix}revision_fits"
    fits = batch[fit].tolist() if fit in batch else [True] * len(valid)
    revisions, failures, versions = (
        texts(batch[name]) if name in batch else [""] * len(valid)
        for name in (f"{prefix}revision{part}" for part in ("", "_failure", "_version"))
    )
    return [
        Critique(
            row=row,
            text=text,
            judgment=correct[i] if valid[i] else None,
            tokens=sizes[i],
            revision=revisions[i],
            fits=fits[i],
            failure=failures[i],
            revised_by=versions[i],
        )
        for i, (row, text) in enumerate(
            zip(rows_of(worker.train, batch), texts(batch[f"{prefix}critique"]), strict=True)
        )
    ]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Next:
    """The rest of the chain after a critique, which begins as soon as its input is there and not
    with the whole batch. ``revise`` and ``judge`` take the results, which do not depend on it.
    """

    without_judgment: bool = False
    """Whether critiques that contain no judgment are revised too."""
    judge: Callable[[RewardSum, Critique], None]
    """Starts to judge a revised critique."""

    def request(self, critique: Critique) -> tuple[str, list[Message]] | None:
        """(text that only an equal conversation has, the conversation that asks for a revision);
        None where the critique is not revised.
        """
        if not (critique.is_revised or self.without_judgment):
            return None
        row = critique.row
        messages = revision_messages(row.attempt().problem, row.solution, critique.text)
        return json.dumps(messages), messages

    def begin_judging(self, worker: RolloutWorker, critique: Critique) -> None:
        """Start to judge the revised critique, on the leader's event loop."""
        if critique.rewardable:
            begin_judging(worker, lambda rewards: self.judge(rewards, critique))

    def listener(self, worker: RolloutWorker) -> RowListener | None:
        """Asks for the revision of every critique that it hears of; None where that must wait for
        the batch, because the proxy cannot answer while the actor's engines draw.
        """
        streams, proxy = worker.config.actor_rollout_ref.rollout.streaming, worker.proxy
        if not streams or proxy is None or not proxy.beside:
            return None
        return lambda row, drawn: self._begin_revising(worker, read_critique(worker, row, drawn))

    def _begin_revising(self, worker: RolloutWorker, critique: Critique) -> None:
        if (request := self.request(critique)) is None:
            if critique.row.task != CRITIQUE:
                self.begin_judging(worker, critique)
            return
        name, messages = request
        if name not in worker.begun:
            worker.begun[name] = asyncio.ensure_future(_answer(worker, messages))

        def revised(task: asyncio.Task[Answer | Failure | None]) -> None:
            # An error is raised by ``revise``, which awaits the task.
            if not task.cancelled() and task.exception() is None:
                self.begin_judging(worker, _with_revision(critique, task.result()))

        worker.begun[name].add_done_callback(revised)


async def _answer(
    worker: RolloutWorker, conversation: Sequence[Message]
) -> Answer | Failure | None:
    assert worker.proxy is not None
    limit = worker.config.actor_rollout_ref.rollout.revision_max_tokens
    (answer,) = await worker.proxy.answer([conversation], limit, lambda place, answer: None)
    return answer


TRAINED = Next(judge=lambda rewards, critique: rewards.begin(critique.item))
"""What follows a critique that is trained on."""


def criticise(
    worker: RolloutWorker,
    rows: Sequence[Row],
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    then: Next | None,
) -> list[list[Critique]]:
    """The actor's ``params.n`` critiques of each row, for which ``prompts`` ask. Collective.
    ``then`` follows each of them; None where nothing does.
    """
    heard = None if then is None else then.listener(worker)
    finished = by_row(rows, params.n, heard)
    answers = generate(worker, worker.role, prompts, params, finished=finished)
    return [
        [read_critique(worker, row, completion) for completion in group]
        for row, group in zip(rows, answers, strict=True)
    ]


def criticise_samples(
    worker: DAGWorker, rows: Sequence[int], *, mini_batch_size: int, attempt: int = 0
) -> tuple[list[Sample], list[Critique]]:
    """The samples of ``draw_samples`` with the fields of ``Critique.drawn``, and their critiques.
    Collective.
    """
    drawn = draw_samples(
        worker,
        rows,
        mini_batch_size=mini_batch_size,
        attempt=attempt,
        heard=TRAINED.listener(worker),
    )
    critiques = [read_critique(worker, worker.train.row(s.row_id), s.completion) for s in drawn]
    return with_fields(drawn, [critique.drawn for critique in critiques]), critiques


def revise(
    worker: RolloutWorker, critiques: Sequence[Critique], then: Next = TRAINED
) -> list[Critique]:
    """The critiques with the frozen proxy's revisions, for those that ``then`` revises. Collective.

    Revisions are greedy, so that a critique's reward does not depend on luck; the proxy answers
    equal critiques of one program once.
    """
    requests = [then.request(critique) for critique in critiques]
    different = dict(filter(None, requests))

    alike: dict[str, list[Critique]] = {name: [] for name in different}
    for critique, request in zip(critiques, requests, strict=True):
        if request is not None:
            alike[request[0]].append(critique)

    def heard(name: str, answer: Answer | Failure | None) -> None:
        for critique in alike[name]:
            then.begin_judging(worker, _with_revision(critique, answer))

    async def ask() -> list[Answer | Failure | None]:
        return await _revisions(worker, different, heard)

    assert worker.proxy is not None
    prepare = partial(worker.proxy.prepare, worker.step)
    _, answers = answered(worker, prepare, ask, f"{len(different)} revisions from the proxy")
    drawn = dict(zip(different, answers, strict=True))
    return [
        critique if request is None else _with_revision(critique, drawn[request[0]])
        for critique, request in zip(critiques, requests, strict=True)
    ]


async def _revisions(
    worker: RolloutWorker,
    conversations: Mapping[str, list[Message]],
    heard: Callable[[str, Answer | Failure | None], None],
) -> list[Answer | Failure | None]:
    """The proxy's answers to the conversations, by their texts. ``heard`` is called with those that
    were not asked for before.
    """
    assert worker.proxy is not None
    begun = {name: worker.begun.pop(name) for name in conversations if name in worker.begun}
    new = [name for name in conversations if name not in begun]
    limit = worker.config.actor_rollout_ref.rollout.revision_max_tokens
    ask = partial(
        worker.proxy.answer,
        [conversations[name] for name in new],
        limit,
        lambda place, answer: heard(new[place], answer),
    )

    async def wait(task: asyncio.Task[Answer | Failure | None]) -> list[Answer | Failure | None]:
        return [await task]

    parts = await gathered([ask, *(partial(wait, task) for task in begun.values())])
    found = dict(zip([*new, *begun], chain.from_iterable(parts), strict=True))
    return [found[name] for name in conversations]


def _with_revision(critique: Critique, answer: Answer | Failure | None) -> Critique:
    if answer is None:
        return dataclasses.replace(critique, fits=False)
    if isinstance(answer, Failure):
        return dataclasses.replace(critique, failure=answer.error)
    return dataclasses.replace(
        critique,
        revision=answer.text,
        revision_tokens=answer.tokens,
        revised_by=answer.version,
    )


async def judge(worker: RolloutWorker, critiques: Sequence[Critique]) -> list[Fields]:
    """``score_fields`` of every critique; all None where no revision fitted, and where the proxy
    failed, which counts as a program that could not be judged. Leaders only.
    """
    count_failures(worker, critiques)
    items = [critique.item for critique in critiques if critique.rewardable]
    known = iter(score_fields(await worker.score(items)))
    names = (name for name in worker.reward_weights if name != MODEL_REWARD)
    nothing: dict[str, list[float | None]] = {name: [None] for name in names}
    (unknown,) = score_fields(Scores(parts=nothing, totals=[None], outcomes=[None]))
    return [
        next(known) if critique.rewardable else {**unknown, "detail": critique.failure or _LEFT_OUT}
        for critique in critiques
    ]


def count_failures(worker: RolloutWorker, critiques: Sequence[Critique]) -> None:
    """Count critiques without a revision, because the proxy failed, among the programs that could
    not be judged (``RolloutWorker.take_judging``), on leaders.
    """
    failures = [f"the proxy: {critique.failure}" for critique in critiques if critique.failure]
    if failures and worker.rewards is not None:
        worker.rewards.judging += Judging(
            asked=len(failures), failed=len(failures), error=failures[-1]
        )


def score_fields(scores: Scores) -> list[Fields]:
    """For each item ``reward_fields`` and, from the critic's verdict, ``pass_rate``, ``copied``,
    ``cached`` and ``detail``.
    """
    outcomes = [outcome or RewardOutcome(reward=None) for outcome in scores.outcomes]
    return [
        {
            **rewards,
            "pass_rate": outcome.pass_rate,
            "copied": outcome.copied,
            "cached": outcome.cached,
            "detail": outcome.detail,
        }
        for rewards, outcome in zip(reward_fields(scores), outcomes, strict=True)
    ]


def judge_programs(
    worker: RolloutWorker, programs: Sequence[str], rows: Sequence[Row]
) -> list[Verdict | None]:
    """The verdict on each program by every test of its row; None where the judge failed.
    Collective; raises ServiceFault where it failed too often.
    """

    async def run() -> list[RewardOutcome]:
        assert worker.rewards is not None
        return await worker.rewards.judge_solutions(programs, rows)

    verdicts = [outcome.verdict for outcome in worker.ask(run, "the judging of solutions")]
    worker.take_judging()
    return verdicts

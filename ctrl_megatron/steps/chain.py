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

from ctrl_megatron.background import gather_results
from ctrl_megatron.data.rows import CRITIQUE, Row
from ctrl_megatron.prompts import parse_judgment, revision_messages
from ctrl_megatron.rewards import JudgeCounts, RewardOutcome, RewardSum
from ctrl_megatron.rewards.registry import MODEL_REWARD
from ctrl_megatron.steps.sample import Revision, Sample, SampleRewards, outcomes_of
from ctrl_megatron.steps.sampling import (
    RowListener,
    begin_judging,
    generate,
    per_row_listener,
    prepare_and_ask,
)
from ctrl_megatron.steps.worker import ProxyAnswer, ProxyFailure, RolloutWorker
from ctrl_megatron.types import Completion, Message, SamplingParams, Verdict

_LEFT_OUT = "no revision: problem, solution and critique are too long for the proxy"


def read_response(worker: RolloutWorker, row: Row, completion: Completion) -> Sample:
    """The actor's response to the prompt of ``row``, with its text and judgment."""
    sample = Sample(row_id=row.id, task=row.task, completion=completion)
    return with_decoded_text(worker, sample)


def with_decoded_text(worker: RolloutWorker, sample: Sample) -> Sample:
    """The sample with its text, and the judgment in it."""
    text = worker.codec.decode(sample.completion.token_ids)
    return dataclasses.replace(sample, text=text, judgment=parse_judgment(text))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FollowUp:
    """The rest of the chain after a critique, which begins as soon as its input is there and not
    with the whole batch. ``revise`` and ``judge`` take the results, which do not depend on it.
    """

    without_judgment: bool = False
    """Whether critiques that contain no judgment are revised too."""
    keeps_correct: bool = False
    """Whether a program that its critique calls correct stays as it is, instead of being
    revised."""
    judge: Callable[[RewardSum, Sample, Row], None]
    """Starts to judge a revised critique."""

    def revision_request_of(self, sample: Sample, row: Row) -> tuple[str, list[Message]] | None:
        """(text that only an equal conversation has, the conversation that asks for a revision);
        None where the critique is not revised.
        """
        if self._keeps(sample) or not (sample.is_revised or self.without_judgment):
            return None
        messages = revision_messages(row.attempt().problem, row.solution, sample.text)
        return json.dumps(messages), messages

    def _keeps(self, sample: Sample) -> bool:
        return self.keeps_correct and bool(sample.judgment) and sample.task == CRITIQUE

    def without_request(self, sample: Sample, row: Row) -> Sample:
        """The sample, for which the proxy is not asked; with its own program as the revision where
        that is kept."""
        if not self._keeps(sample):
            return sample
        return dataclasses.replace(sample, revision=Revision(text=row.solution))

    def begin_judging(self, worker: RolloutWorker, sample: Sample, row: Row) -> None:
        """Start to judge the revised critique, on the leader's event loop."""
        if sample.can_have_reward:
            begin_judging(worker, lambda rewards: self.judge(rewards, sample, row))

    def revision_listener(self, worker: RolloutWorker) -> RowListener | None:
        """Asks for the revision of every critique that is drawn; None where that must wait for
        the batch, because the proxy cannot answer while the actor's engines draw.
        """
        streams, proxy = worker.config.actor_rollout_ref.rollout.streaming, worker.proxy
        if not streams or proxy is None or not proxy.can_overlap:
            return None
        return lambda row, drawn: self._begin_revising(
            worker, read_response(worker, row, drawn), row
        )

    def _begin_revising(self, worker: RolloutWorker, sample: Sample, row: Row) -> None:
        if (request := self.revision_request_of(sample, row)) is None:
            known = self.without_request(sample, row)
            if known.revision is not None or known.task != CRITIQUE:
                self.begin_judging(worker, known, row)
            return
        name, messages = request
        if name not in worker.pending:
            worker.pending[name] = asyncio.ensure_future(_answer(worker, messages))

        def revised(task: asyncio.Task[ProxyAnswer | ProxyFailure | None]) -> None:
            # An error is raised by ``revise``, which awaits the task.
            if not task.cancelled() and task.exception() is None:
                self.begin_judging(worker, _with_revision(sample, task.result()), row)

        worker.pending[name].add_done_callback(revised)


async def _answer(
    worker: RolloutWorker, conversation: Sequence[Message]
) -> ProxyAnswer | ProxyFailure | None:
    assert worker.proxy is not None
    limit = worker.config.actor_rollout_ref.rollout.revision_max_tokens
    (answer,) = await worker.proxy.answer([conversation], limit, lambda place, answer: None)
    return answer


TRAINED = FollowUp(judge=lambda rewards, sample, row: rewards.begin(sample.reward_item(row)))
"""The follow-up of a critique that is trained on."""


def criticise(
    worker: RolloutWorker,
    rows: Sequence[Row],
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    then: FollowUp | None,
) -> list[list[Sample]]:
    """The actor's ``params.n`` critiques of each row, for which ``prompts`` ask. Collective.
    ``then`` follows each of them; None where nothing does.
    """
    on_completion = None if then is None else then.revision_listener(worker)
    finished = per_row_listener(rows, params.n, on_completion)
    answers = generate(worker, worker.role, prompts, params, finished=finished)
    return [
        [read_response(worker, row, completion) for completion in group]
        for row, group in zip(rows, answers, strict=True)
    ]


def revise(
    worker: RolloutWorker, samples: Sequence[Sample], rows: Sequence[Row], then: FollowUp = TRAINED
) -> list[Sample]:
    """The critiques with the frozen proxy's revisions, for those that ``then`` revises. Collective.
    ``rows`` have the program that each is about.

    Revisions are greedy, so that a critique's reward does not depend on luck; the proxy answers
    equal critiques of one program once.
    """
    requests = [then.revision_request_of(*pair) for pair in zip(samples, rows, strict=True)]
    different = dict(filter(None, requests))

    alike: dict[str, list[tuple[Sample, Row]]] = {name: [] for name in different}
    for sample, row, request in zip(samples, rows, requests, strict=True):
        if request is not None:
            alike[request[0]].append((sample, row))

    def on_answer(name: str, answer: ProxyAnswer | ProxyFailure | None) -> None:
        for sample, row in alike[name]:
            then.begin_judging(worker, _with_revision(sample, answer), row)

    async def ask() -> list[ProxyAnswer | ProxyFailure | None]:
        return await _revisions(worker, different, on_answer)

    assert worker.proxy is not None
    prepare = partial(worker.proxy.prepare, worker.step)
    _, answers = prepare_and_ask(worker, prepare, ask, f"{len(different)} revisions from the proxy")
    drawn = dict(zip(different, answers, strict=True))
    return [
        then.without_request(sample, row)
        if request is None
        else _with_revision(sample, drawn[request[0]])
        for sample, row, request in zip(samples, rows, requests, strict=True)
    ]


async def _revisions(
    worker: RolloutWorker,
    conversations: Mapping[str, list[Message]],
    on_answer: Callable[[str, ProxyAnswer | ProxyFailure | None], None],
) -> list[ProxyAnswer | ProxyFailure | None]:
    """The proxy's answers to the conversations, by their texts. ``on_answer`` is called with those
    that were not asked for before.
    """
    assert worker.proxy is not None
    begun = {name: worker.pending.pop(name) for name in conversations if name in worker.pending}
    new = [name for name in conversations if name not in begun]
    limit = worker.config.actor_rollout_ref.rollout.revision_max_tokens
    ask = partial(
        worker.proxy.answer,
        [conversations[name] for name in new],
        limit,
        lambda place, answer: on_answer(new[place], answer),
    )

    async def wait(
        task: asyncio.Task[ProxyAnswer | ProxyFailure | None],
    ) -> list[ProxyAnswer | ProxyFailure | None]:
        return [await task]

    parts = await gather_results([ask, *(partial(wait, task) for task in begun.values())])
    found = dict(zip([*new, *begun], chain.from_iterable(parts), strict=True))
    return [found[name] for name in conversations]


def _with_revision(sample: Sample, answer: ProxyAnswer | ProxyFailure | None) -> Sample:
    if answer is None:
        revision = Revision(fits=False)
    elif isinstance(answer, ProxyFailure):
        revision = Revision(failure=answer.error)
    else:
        revision = Revision(text=answer.text, tokens=answer.tokens, version=answer.version)
    return dataclasses.replace(sample, revision=revision)


async def judge(
    worker: RolloutWorker, samples: Sequence[Sample], rows: Sequence[Row]
) -> list[Sample]:
    """The samples with their outcome, which is unknown where no revision fitted, and where the
    proxy failed, which counts as a program that could not be judged. Leaders only.
    """
    count_failures(worker, samples)
    pairs = list(zip(samples, rows, strict=True))
    items = [sample.reward_item(row) for sample, row in pairs if sample.can_have_reward]
    known = iter(outcomes_of(await worker.score(items)))

    def outcome(sample: Sample) -> SampleRewards:
        if sample.can_have_reward:
            return next(known)
        failure = sample.revision.failure if sample.revision else ""
        return unknown_rewards(worker, failure or _LEFT_OUT)

    return [dataclasses.replace(sample, outcome=outcome(sample)) for sample in samples]


def unknown_rewards(worker: RolloutWorker, detail: str) -> SampleRewards:
    """The outcome of a sample without rewards, because of ``detail``."""
    names = (name for name in worker.reward_weights if name != MODEL_REWARD)
    return SampleRewards(total=None, rewards=dict.fromkeys(names), detail=detail)


def count_failures(worker: RolloutWorker, samples: Sequence[Sample]) -> None:
    """Count critiques without a revision, because the proxy failed, among the programs that could
    not be judged (``RolloutWorker.judged_rate_metrics``), on leaders.
    """
    revisions = (sample.revision for sample in samples)
    failures = [f"the proxy: {r.failure}" for r in revisions if r is not None and r.failure]
    if failures and worker.rewards is not None:
        worker.rewards.judging += JudgeCounts(
            asked=len(failures), failed=len(failures), error=failures[-1]
        )


def judge_programs(
    worker: RolloutWorker, programs: Sequence[str], rows: Sequence[Row]
) -> list[Verdict | None]:
    """The verdict on each program by every test of its row; None where the judge failed.
    Collective; raises ServiceFault where it failed too often.
    """

    async def run() -> list[RewardOutcome]:
        assert worker.rewards is not None
        return await worker.rewards.judge_solutions(programs, rows)

    verdicts = [
        outcome.verdict for outcome in worker.run_on_leader(run, "the judging of solutions")
    ]
    worker.judged_rate_metrics()
    return verdicts

"""Judged chains of critiques and revisions, for validation and evaluation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ctrl_megatron.data.rows import Row, row_of_attempt
from ctrl_megatron.eval.labelled import LabelledAnswer
from ctrl_megatron.eval.pairwise import JudgedPair, ResponsePair
from ctrl_megatron.eval.transcripts import ChainPlan, Turn
from ctrl_megatron.eval.validation_rates import validation_rates
from ctrl_megatron.graph.declarations import node
from ctrl_megatron.prompts import choice_messages, critique_messages, parse_choice, parse_judgment
from ctrl_megatron.prompts.confidence import judgment_confidence
from ctrl_megatron.steps.chain import FollowUp, count_failures, criticise, judge_programs, revise
from ctrl_megatron.steps.sample import Revision, Sample
from ctrl_megatron.steps.sampling import (
    begin_judging,
    draw_seed,
    generate,
    greedy_params,
    rates_by_set,
    validation_batches,
)
from ctrl_megatron.steps.worker import RolloutWorker
from ctrl_megatron.types import Attempt, Completion, Message, Problem, SamplingParams, Verdict


def revised_text(sample: Sample) -> str:
    """The text of the sample's revision; empty without one."""
    return sample.revision.text if sample.revision else ""


VALIDATED = FollowUp(
    without_judgment=True,
    judge=lambda rewards, sample, row: rewards.begin_solution(revised_text(sample), row),
)
"""The follow-up of a critique that is not trained on."""


@dataclass(slots=True, kw_only=True)
class _Chain:
    """The turns that followed one first solution."""

    position: int
    """Place of the row in the validation table."""
    sample: int
    """Number of the chain among those of its row."""
    row: Row
    """The row; ``row.solution`` is what the next critique is about."""
    result: Verdict | None = None
    """The verdict on ``row.solution``; None before the first turn, and where the judge failed."""
    turns: list[Turn] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The name of the next prompt, which the chains of a row share in the first turn only."""
        return f"{self.row.id}:{self.sample}" if self.turns else self.row.id


@node(uses=("proxy", "rewards"))
def validate_critiques(worker: RolloutWorker) -> dict[str, float]:
    """Rates over the critiques of every validation row (``rollout.val_kwargs``) and a greedy
    revision of each. Rows that the sandbox failed to judge are counted as ``unjudged`` and left out
    of the rates. With several validation files, each has rates of its own too. Collective.
    """
    assert worker.validation is not None
    turns = validated_turns(worker, 1)
    return rates_by_set(worker.validation.sets, [(t.attempt, t) for t in turns], validation_rates)


def validated_turns(worker: RolloutWorker, turns: int) -> list[Turn]:
    """The chains of so many ``turns`` for every validation row, as ``rollout.val_kwargs`` say.
    Collective."""
    keys = worker.config.actor_rollout_ref.rollout.val_kwargs
    draws = {"temperature": keys.temperature, "top_p": keys.top_p, "top_k": keys.top_k}
    plan = ChainPlan(turns=turns)
    if keys.temperature:
        plan = ChainPlan(samples=keys.n, turns=turns, **draws)
    return run_conversations(worker, plan, critic="", seed=0)


def run_conversations(
    worker: RolloutWorker,
    plan: ChainPlan,
    *,
    critic: str,
    seed: int,
    written: Mapping[str, str] | None = None,
) -> list[Turn]:
    """The chains of ``plan`` for every validation row, in the order of the rows. Collective.

    Each turn's critique sees the problem and the latest solution alone, so that requests do not
    grow. A solution stays as it is where the request for its critique exceeds
    ``data.max_prompt_length`` or the request for its revision exceeds the engine's length.
    Unlike in training, critiques without a judgment are revised and judged too: the table compares
    what revisions are worth, not how often a format was kept.

    With ``written``, critiques by the rows' ids, only the proxy draws.
    """
    assert worker.validation is not None
    batches = [
        [
            _Chain(position=p, sample=n, row=worker.validation.rows[p])
            for p in batch
            for n in range(plan.samples)
        ]
        for batch in validation_batches(worker)
    ]
    chains = [chain for batch in batches for chain in batch]
    worker.background.submit(_begin_solutions(worker, chains))
    for turn in range(1, plan.turns + 1):
        # The chains of a row share their prompt in the first turn only.
        samples = plan.samples if turn == 1 else 1
        params = _params(worker, plan, draw_seed(seed, "evaluation", turn), samples)
        with worker.timeline.phase("validate_critiques"):
            if written is None:
                drawn = [_criticise(worker, batch, params) for batch in batches]
            else:
                drawn = [[_written(worker, written, c.row) for c in batch] for batch in batches]
        with worker.timeline.phase("validate_revisions"):
            revised = [
                sample
                for batch, critiques in zip(batches, drawn, strict=True)
                for sample in _revise(worker, batch, critiques)
            ]
        with worker.timeline.phase("validate_sandbox"):
            _judge(worker, chains, revised, critic, seed)
    mine = [(chain.position, chain.turns) for chain in chains]
    every = [part for rank in worker.groups.gather_data_ranks(mine) for part in rank]
    return [turn for _, turns in sorted(every, key=lambda part: part[0]) for turn in turns]


async def _begin_solutions(worker: RolloutWorker, chains: Sequence[_Chain]) -> None:
    """Start to judge the first solutions, which nothing needs to wait for."""
    for row in [chain.row for chain in chains]:
        begin_judging(worker, lambda rewards, row=row: rewards.begin_solution(row.solution, row))


def _criticise(
    worker: RolloutWorker, chains: Sequence[_Chain], params: SamplingParams
) -> list[Sample | None]:
    """A critique per chain; None where the prompt is too long. Collective."""
    longest = worker.config.data.max_prompt_length
    prompts = [_prompt(worker, chain) for chain in chains]
    # The ``n`` chains of a row follow each other, so that one request draws for all of them.
    heads = [i for i, prompt in enumerate(prompts) if len(prompt) <= longest][:: params.n]
    rows, names = [chains[i].row for i in heads], tuple(chains[i].name for i in heads)
    params = dataclasses.replace(params, rows=names)
    groups = criticise(worker, rows, [prompts[i] for i in heads], params, VALIDATED)
    answers = iter([critique for group in groups for critique in group])
    return [next(answers) if len(prompt) <= longest else None for prompt in prompts]


def _prompt(worker: RolloutWorker, chain: _Chain) -> Sequence[int]:
    if not chain.turns:
        assert worker.validation is not None
        return worker.validation.prompts[chain.position]
    messages = critique_messages(chain.row.attempt().problem, chain.row.solution)
    return worker.codec.encode_chat(messages, add_generation_prompt=True)


def _written(worker: RolloutWorker, written: Mapping[str, str], row: Row) -> Sample:
    text = written[row.id]
    tokens = tuple(worker.codec.encode(text))
    completion = Completion(token_ids=tokens, log_probs=(), finish_reason="stop", spans=())
    return Sample(row_id=row.id, completion=completion, text=text, judgment=parse_judgment(text))


def _params(worker: RolloutWorker, plan: ChainPlan, seed: int, samples: int) -> SamplingParams:
    limit, rollout = worker.config.data.max_response_length, worker.config.actor_rollout_ref.rollout
    if plan.temperature == 0:
        return dataclasses.replace(greedy_params(worker.codec, limit), log_probs=True)
    return SamplingParams(
        max_tokens=limit,
        temperature=plan.temperature,
        top_p=rollout.top_p if plan.top_p is None else plan.top_p,
        top_k=rollout.top_k if plan.top_k is None else plan.top_k,
        n=samples,
        seed=seed,
        stop_token_ids=tuple(worker.codec.eos_token_ids),
        log_probs=True,
    )


def _revise(
    worker: RolloutWorker, chains: Sequence[_Chain], critiques: Sequence[Sample | None]
) -> list[Sample | None]:
    """The critiques with their revisions. Collective."""
    both = zip(chains, critiques, strict=True)
    pairs = [(critique, chain.row) for chain, critique in both if critique is not None]
    drawn, rows = [critique for critique, _ in pairs], [row for _, row in pairs]
    revised = iter(revise(worker, drawn, rows, VALIDATED))
    return [None if critique is None else next(revised) for critique in critiques]


def _judge(
    worker: RolloutWorker,
    chains: Sequence[_Chain],
    critiques: Sequence[Sample | None],
    critic: str,
    seed: int,
) -> None:
    """Add a turn to every chain. Collective."""
    first = [chain for chain in chains if not chain.turns]
    count_failures(worker, [c for c in critiques if c is not None])
    both = list(zip(chains, critiques, strict=True))
    revised = [(chain, c) for chain, c in both if c is not None and c.can_have_reward]
    programs = [chain.row.solution for chain in first] + [revised_text(c) for _, c in revised]
    rows = [chain.row for chain in first] + [chain.row for chain, _ in revised]
    results = iter(judge_programs(worker, programs, rows))
    for chain in first:
        chain.result = next(results)
    for chain, critique in both:
        row, asked = chain.row, critique.revision if critique is not None else None
        failed = asked is not None and bool(asked.failure)
        judged = critique is not None and critique.can_have_reward
        revision = (asked or Revision()) if judged else None
        turn = Turn(
            critic=critic,
            seed=seed,
            problem_id=row.problem_id,
            attempt=row.id,
            difficulty=row.difficulty,
            sample=chain.sample,
            turn=len(chain.turns) + 1,
            solution=row.solution,
            critique=None if critique is None else critique.text,
            judgment=None if critique is None else critique.judgment,
            revision=row.solution if revision is None else revision.text,
            before=chain.result,
            after=None if failed else chain.result if revision is None else next(results),
            critique_tokens=0 if critique is None else critique.length,
            revision_tokens=0 if revision is None else revision.tokens or 0,
            confidence=None
            if critique is None
            else judgment_confidence(worker.codec, critique.completion, critique.text),
        )
        chain.turns.append(turn)
        chain.row, chain.result = dataclasses.replace(row, solution=turn.revision), turn.after


def judge_labelled(
    worker: RolloutWorker,
    plan: ChainPlan,
    *,
    answers: Sequence[LabelledAnswer],
    critic: str,
    seed: int,
) -> list[Turn]:
    """``plan.samples`` critiques of every answer, as turns whose verdicts are the labels.
    Collective."""
    place, ranks = worker.groups.place.dp, worker.groups.layout.data
    size, local = worker.config.data.val_batch_size, list[tuple[int, Turn]]()
    params = _params(worker, plan, draw_seed(seed, "labelled"), plan.samples)
    for start in range(0, len(answers), size):
        part = answers[start : start + size][place::ranks]
        rows = [row_of_labelled(answer) for answer in part]
        prompts = [
            worker.codec.encode_chat(list(row.prompt), add_generation_prompt=True) for row in rows
        ]
        named = dataclasses.replace(params, rows=tuple(answer.id for answer in part))
        groups = criticise(worker, rows, prompts, named, None)
        for n, (answer, critiques) in enumerate(zip(part, groups, strict=True)):
            turns = (
                Turn(
                    critic=critic,
                    seed=seed,
                    problem_id=answer.id,
                    attempt=answer.id,
                    difficulty=0,
                    sample=number,
                    turn=1,
                    solution=answer.answer,
                    critique=critique.text,
                    judgment=critique.judgment,
                    revision=answer.answer,
                    before=answer.verdict,
                    after=answer.verdict,
                    critique_tokens=critique.length,
                    confidence=judgment_confidence(
                        worker.codec, critique.completion, critique.text
                    ),
                )
                for number, critique in enumerate(critiques)
            )
            local += [(start + place + n * ranks, turn) for turn in turns]
    every = [part for rank in worker.groups.gather_data_ranks(local) for part in rank]
    return [turn for _, turn in sorted(every, key=lambda part: part[0])]


def row_of_labelled(answer: LabelledAnswer) -> Row:
    """The row that requests a critique of the answer."""
    problem = Problem(
        id=answer.id,
        statement=answer.question,
        prompter_type="code_contests",
        selected_uts="[]",
    )
    return row_of_attempt(
        Attempt(id=answer.id, problem=problem, solution=answer.answer),
        critique_messages(problem, answer.answer),
    )


# Pairs


def pair_prompts(pair: ResponsePair) -> list[list[Message]]:
    """The requests about a pair: which response is better in both orders, and a critique of each
    response.
    """
    question, a, b = pair.question, pair.response_a, pair.response_b
    critiques = [
        critique_messages(row.attempt().problem, row.solution) for row in _rows_of_pair(pair)
    ]
    return [choice_messages(question, a, b), choice_messages(question, b, a), *critiques]


def _rows_of_pair(pair: ResponsePair) -> list[Row]:
    problem = Problem(
        id=pair.pair_id,
        statement=pair.question,
        prompter_type="code_contests",
        selected_uts="[]",
    )
    return [
        row_of_attempt(Attempt(id=pair.pair_id, problem=problem, solution=response), ())
        for response in (pair.response_a, pair.response_b)
    ]


def judge_pairs(
    worker: RolloutWorker,
    plan: ChainPlan,
    *,
    pairs: Sequence[ResponsePair],
    critic: str,
    seed: int,
) -> list[JudgedPair]:
    """The critic's choices between the responses of every pair, and ``plan.samples`` critiques of
    each response. Collective.
    """
    place, ranks = worker.groups.place.dp, worker.groups.layout.data
    size, local = worker.config.data.val_batch_size, []
    params = _params(worker, plan, draw_seed(seed, "pairs"), plan.samples)
    for start in range(0, len(pairs), size):
        part = pairs[start : start + size][place::ranks]
        names = [[f"{pair.pair_id}:{number}" for number in range(4)] for pair in part]
        prompts = [
            [worker.codec.encode_chat(m, add_generation_prompt=True) for m in pair_prompts(pair)]
            for pair in part
        ]
        once = dataclasses.replace(params, n=1, rows=tuple(n for four in names for n in four[:2]))
        chosen = generate(worker, worker.role, [p for four in prompts for p in four[:2]], once)
        rows = [row for pair in part for row in _rows_of_pair(pair)]
        named = dataclasses.replace(params, rows=tuple(n for four in names for n in four[2:]))
        groups = criticise(worker, rows, [p for four in prompts for p in four[2:]], named, None)
        answers = [worker.codec.decode(completion.token_ids) for (completion,) in chosen]
        for n, pair in enumerate(part):
            straight, swapped = answers[2 * n : 2 * n + 2]
            a, b = groups[2 * n : 2 * n + 2]
            judged = JudgedPair(
                critic=critic,
                seed=seed,
                pair_id=pair.pair_id,
                source=pair.source,
                label=pair.label,
                choices=(parse_choice(straight), parse_choice(swapped)),
                answers=(straight, swapped),
                judgments_a=tuple(critique.judgment for critique in a),
                judgments_b=tuple(critique.judgment for critique in b),
                critiques_a=tuple(critique.text for critique in a),
                critiques_b=tuple(critique.text for critique in b),
            )
            local.append((start + place + n * ranks, judged))
    every = [part for rank in worker.groups.gather_data_ranks(local) for part in rank]
    return [judged for _, judged in sorted(every, key=lambda part: part[0])]

"""Chains of critiques and revisions, judged: what validation and evaluation draw."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ctrl_megatron.data.rows import Row
from ctrl_megatron.eval.pairwise import JudgedPair, ResponsePair
from ctrl_megatron.eval.transcripts import ChainPlan, ProgramResult, Turn
from ctrl_megatron.eval.validation_rates import summarise
from ctrl_megatron.pipeline.critique_revision import judgment_of, read_critique, revise
from ctrl_megatron.pipeline.node_keys import REVISIONS, REWARDS, reads
from ctrl_megatron.pipeline.sampling import (
    generate,
    greedy_params,
    rates_by_set,
    validation_batches,
)
from ctrl_megatron.pipeline.worker import RolloutWorker
from ctrl_megatron.prompts import choice_messages, critique_messages, parse_choice
from ctrl_megatron.rewards import RewardOutcome
from ctrl_megatron.types import Completion, Message, Problem, SamplingParams


@dataclass(slots=True, kw_only=True)
class _Chain:
    """One first solution on its way; ``row.solution`` is what the last revision made of it."""

    position: int
    sample: int
    row: Row
    result: ProgramResult | None = None
    prompt: list[int] = field(default_factory=list)
    """Of the next critique."""
    turns: list[Turn] = field(default_factory=list)


@reads(*REVISIONS, *REWARDS)
def validate(worker: RolloutWorker) -> dict[str, float]:
    """Rates over one greedy critique and one greedy revision of every validation row. Rows that the
    sandbox failed to judge are counted as ``unjudged`` and left out of the rates. Of several
    validation files each has rates of its own too. Collective.
    """
    assert worker.validation is not None
    turns = converse(worker, ChainPlan(), critic="", seed=0)
    return rates_by_set(worker.validation.sets, [(t.attempt, t) for t in turns], summarise)


def converse(
    worker: RolloutWorker,
    plan: ChainPlan,
    *,
    critic: str,
    seed: int,
    written: Mapping[str, str] | None = None,
) -> list[Turn]:
    """The chains of ``plan`` for every validation row, in the order of the rows. Collective.

    Each turn's critique sees the problem and the latest solution alone, so that requests do not
    grow; a solution that makes the request longer than ``data.max_prompt_length``, or the request
    for its revision longer than the engine takes, stays as it is.
    Unlike in training, critiques without a judgment are revised and judged too: the table compares
    what revisions are worth, not how often a format was kept.

    With ``written``, critiques by the rows' ids, the engine is asked for revisions only.
    """
    table = worker.validation
    assert table is not None
    batches = [
        [
            _Chain(position=p, sample=n, row=table.rows[p], prompt=list(table.prompts[p]))
            for p in batch
            for n in range(plan.samples)
        ]
        for batch in validation_batches(worker)
    ]
    for turn in range(1, plan.turns + 1):
        if turn > 1:
            _ask_again(worker, [chain for batch in batches for chain in batch])
        drawn: list[list[Completion | None]] = []
        with worker.timeline.phase("validate_critiques"):
            for number, batch in enumerate(batches):
                if written is not None:
                    drawn.append([_as_drawn(worker, written[chain.row.id]) for chain in batch])
                    continue
                params = _params(worker, plan, seed, turn, number)
                drawn.append(_criticise(worker, batch, params))
        revised: list[list[Completion | None]] = []
        with worker.timeline.phase("validate_revisions"):
            for batch, critiques in zip(batches, drawn, strict=True):
                revised.append(_revise(worker, batch, critiques))
        with worker.timeline.phase("validate_sandbox"):
            every = [chain for batch in batches for chain in batch]
            critiques = [critique for batch in drawn for critique in batch]
            revisions = [revision for batch in revised for revision in batch]
            _judge(worker, every, critiques, revisions, critic, seed)
    mine = [(c.position, c.turns) for batch in batches for c in batch]
    everybody = [part for rank in worker.groups.from_data_ranks(mine) for part in rank]
    return [turn for _, turns in sorted(everybody, key=lambda p: p[0]) for turn in turns]


def _ask_again(worker: RolloutWorker, chains: Sequence[_Chain]) -> None:
    """Prompts of critiques of what the chains' last revisions are."""
    for chain in chains:
        messages = critique_messages(chain.row.attempt().problem, chain.row.solution)
        chain.prompt = worker.codec.encode_chat(messages, add_generation_prompt=True)


def _params(
    worker: RolloutWorker, plan: ChainPlan, seed: int, turn: int, batch: int
) -> SamplingParams:
    limit, rollout = worker.config.data.max_response_length, worker.config.actor_rollout_ref.rollout
    if plan.temperature == 0:
        return greedy_params(worker, limit)
    draw = seed * 1_000_003 + turn * 1009 + worker.groups.place.dp + batch * 15_485_863
    return SamplingParams(
        max_tokens=limit,
        temperature=plan.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        # Chains of one row have one prompt in the first turn only.
        n=plan.samples if turn == 1 else 1,
        seed=draw % 2**31,
        stop_token_ids=tuple(worker.codec.eos_token_ids),
        log_probs=False,
    )


def _criticise(
    worker: RolloutWorker, batch: Sequence[_Chain], params: SamplingParams
) -> list[Completion | None]:
    """A critique per chain; None where the prompt is too long. Collective."""
    longest = worker.config.data.max_prompt_length
    asked = [chain for chain in batch if len(chain.prompt) <= longest]
    prompts = [chain.prompt for chain in asked[:: params.n]]
    answers = [one for group in generate(worker, "actor", prompts, params) for one in group]
    found = {id(chain): answer for chain, answer in zip(asked, answers, strict=True)}
    return [found.get(id(chain)) for chain in batch]


def _as_drawn(worker: RolloutWorker, text: str) -> Completion:
    tokens = tuple(worker.codec.encode(text))
    return Completion(token_ids=tokens, log_probs=(), finish_reason="stop", spans=())


def _revise(
    worker: RolloutWorker, batch: Sequence[_Chain], critiques: Sequence[Completion | None]
) -> list[Completion | None]:
    both = [(chain, c) for chain, c in zip(batch, critiques, strict=True) if c is not None]
    rows = [chain.row for chain, _ in both]
    texts = [str(read_critique(worker, critique)["critique"]) for _, critique in both]
    waiting = iter(revise(worker, rows, texts))  # None where one does not fit
    return [None if critique is None else next(waiting) for critique in critiques]


def _judge(
    worker: RolloutWorker,
    chains: Sequence[_Chain],
    critiques: Sequence[Completion | None],
    revisions: Sequence[Completion | None],
    critic: str,
    seed: int,
) -> None:
    """Add a turn to every chain. Collective."""
    first = [chain for chain in chains if not chain.turns]
    answers = {
        id(chain): worker.codec.decode(revision.token_ids)
        for chain, revision in zip(chains, revisions, strict=True)
        if revision is not None
    }
    asked = [chain for chain in chains if id(chain) in answers]
    programs = [chain.row.solution for chain in first] + [answers[id(chain)] for chain in asked]
    rows = [chain.row for chain in (*first, *asked)]

    async def run() -> list[RewardOutcome]:
        assert worker.rewards is not None and worker.rewards.critic is not None
        return await worker.rewards.critic.judge_solutions(programs, rows)

    results = [ProgramResult.of(outcome.verdict) for outcome in worker.ask(run)]
    for chain, result in zip(first, results[: len(first)], strict=True):
        chain.result = result
    after = {id(c): r for c, r in zip(asked, results[len(first) :], strict=True)}
    for chain, critique, revision in zip(chains, critiques, revisions, strict=True):
        said = None if critique is None else read_critique(worker, critique)
        row, before = chain.row, chain.result
        turn = Turn(
            critic=critic,
            seed=seed,
            problem_id=row.problem_id,
            attempt=row.id,
            difficulty=row.difficulty,
            sample=chain.sample,
            turn=len(chain.turns) + 1,
            solution=row.solution,
            critique=None if said is None else str(said["critique"]),
            judgment=None if said is None else judgment_of(said),
            revision=answers.get(id(chain), row.solution),
            before=before,
            after=after.get(id(chain), before),
            critique_tokens=0 if critique is None else len(critique.token_ids),
            revision_tokens=0 if revision is None else len(revision.token_ids),
        )
        chain.turns.append(turn)
        if revision is not None:
            chain.row = dataclasses.replace(row, solution=turn.revision)
        chain.result = turn.after


# Pairs


def pair_prompts(pair: ResponsePair) -> list[list[Message]]:
    """What is asked about a pair: which is better in both orders, and a critique of either."""
    a, b = pair.response_a, pair.response_b
    problem = Problem(
        id=pair.pair_id,
        statement=pair.question,
        prompter_type="code_contests",
        selected_uts="[]",
    )
    return [
        choice_messages(pair.question, a, b),
        choice_messages(pair.question, b, a),
        critique_messages(problem, a),
        critique_messages(problem, b),
    ]


def judge_pairs(
    worker: RolloutWorker,
    plan: ChainPlan,
    *,
    pairs: Sequence[ResponsePair],
    critic: str,
    seed: int,
) -> list[JudgedPair]:
    """What the critic says of every pair, with ``plan.samples`` critiques of each response.
    Collective.
    """
    place, ranks = worker.groups.place.dp, worker.groups.layout.data
    size, mine = worker.config.data.val_batch_size, []
    for number, start in enumerate(range(0, len(pairs), size)):
        part = pairs[start : start + size][place::ranks]
        asked = [
            [worker.codec.encode_chat(m, add_generation_prompt=True) for m in pair_prompts(pair)]
            for pair in part
        ]
        params = _params(worker, plan, seed, 1, number)
        once = dataclasses.replace(params, n=1)
        chosen = generate(worker, "actor", [p for four in asked for p in four[:2]], once)
        criticised = generate(worker, "actor", [p for four in asked for p in four[2:]], params)
        texts = [[worker.codec.decode(c.token_ids) for c in group] for group in chosen]
        said = [[read_critique(worker, c) for c in group] for group in criticised]
        for n, pair in enumerate(part):
            straight, swapped = texts[2 * n][0], texts[2 * n + 1][0]
            a, b = said[2 * n], said[2 * n + 1]
            judged = JudgedPair(
                critic=critic,
                seed=seed,
                pair_id=pair.pair_id,
                source=pair.source,
                label=pair.label,
                choices=(parse_choice(straight), parse_choice(swapped)),
                answers=(straight, swapped),
                judgments_a=tuple(judgment_of(one) for one in a),
                judgments_b=tuple(judgment_of(one) for one in b),
                critiques_a=tuple(str(one["critique"]) for one in a),
                critiques_b=tuple(str(one["critique"]) for one in b),
            )
            mine.append((start + place + n * ranks, judged))
    everybody = [part for rank in worker.groups.from_data_ranks(mine) for part in rank]
    return [judged for _, judged in sorted(everybody, key=lambda p: p[0])]

"""Rounds within a training step: the critic criticises a program, the proxy revises it, and the
critic criticises the revision, up to ``turns`` times.

Every critique is a sample that is trained on. Its group is either all critiques of one program
(``compare=state``: one revision of each group goes on), or the critiques of one turn in all chains
of a row (``compare=chain``). Sources: CTRL (arXiv 2502.03492) revises several times at
test time only; ECHO (2601.06794) rewards the gain of each revision; MT-GRPO (2505.11821) and GTPO
(2511.14846) give each turn a credit of its own. docs/rounds.md explains the choices.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal

import torch
from tensordict import TensorDict

from ctrl_megatron.config import Config
from ctrl_megatron.data.rows import CRITIQUE, Row
from ctrl_megatron.errors import UserError
from ctrl_megatron.eval.transcripts import Turn
from ctrl_megatron.eval.validation_rates import validation_rates
from ctrl_megatron.graph.declarations import DRAWN, VALIDATION, node
from ctrl_megatron.graph.graph import Pipeline, StepReport, TaskGraph
from ctrl_megatron.graph.node import NodeOutput
from ctrl_megatron.steps.ahead import begin_draws_ahead, report_staleness
from ctrl_megatron.steps.batch import data_rows_of, fields_of_samples, samples_of
from ctrl_megatron.steps.chain import TRAINED, FollowUp, criticise, judge, revise, unknown_rewards
from ctrl_megatron.steps.conversation import validated_turns
from ctrl_megatron.steps.critique_report import (
    critique_examples,
    critique_metrics,
    measure_critiques,
    revision_metrics,
)
from ctrl_megatron.steps.ctrl import (
    DRAWS,
    JUDGES,
    add_next_draw_and_balance,
    add_update_nodes,
    add_weight_sync,
    draw_critiques,
)
from ctrl_megatron.steps.dynamic_sampling import add_dynamic_sampling
from ctrl_megatron.steps.losses import row_names
from ctrl_megatron.steps.sample import (
    REVISION_COLUMNS,
    TURN_COLUMNS,
    CriticisedProgram,
    Sample,
    critique_columns,
    revision_columns,
    reward_columns,
    turn_columns,
    verdict_columns,
)
from ctrl_megatron.steps.sampling import (
    draw_seed,
    node_output_of_samples,
    rates_by_set,
    sampling_params,
)
from ctrl_megatron.steps.worker import DAGWorker, RolloutWorker

Compare = Literal["state", "chain"]
"""Which critiques are a group."""
Credit = Literal["own", "to_go", "final"]
"""Which rewards of its chain a critique gets."""
_COLUMNS = (critique_columns, revision_columns, turn_columns)
_PROGRAM_UNKNOWN = "the judge failed on the program that the critique is about"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """The options of ``ctrl_rounds_pipeline``, which describes them, and what follows from them."""

    turns: int
    stop: bool
    compare: Compare
    credit: Credit
    discount: float

    @property
    def follow_up(self) -> FollowUp:
        return dataclasses.replace(TRAINED, keeps_correct=self.stop)

    def ends_chain(self, sample: Sample) -> bool:
        """Whether the critique itself ends its chain: it calls its program correct, which stops the
        chain, or contains no judgment, so that nothing is revised."""
        if sample.task != CRITIQUE:
            return False
        return sample.judgment is None or (self.stop and sample.judgment)

    def goes_on(self, sample: Sample) -> bool:
        """Whether there is a revision that the next turn can criticise."""
        revised = sample.task == CRITIQUE and sample.revision is not None
        return revised and sample.can_have_reward and not self.ends_chain(sample)

    def choose_parents(
        self, samples: Sequence[Sample], *, seed: int, step: int
    ) -> list[tuple[str, str, Sample]]:
        """(uid of the next critiques' group, name of the parent, parent) for every revision of
        ``samples``, the critiques of one turn, that the next turn criticises: of each group a
        random one that goes on, or all of them.
        """
        names = names_of_samples(samples)
        going = [(n, s) for n, s in zip(names, samples, strict=True) if self.goes_on(s)]
        if self.compare == "chain":
            return [(f"{_root(s.uid)}/{s.turn + 1}", name, s) for name, s in going]
        groups: dict[str, list[tuple[str, Sample]]] = {}
        for name, sample in going:
            groups.setdefault(sample.uid, []).append((name, sample))
        chosen = []
        for members in groups.values():
            place = f"state/{draw_name(members[0][1].uid, members[0][1])}"
            name, parent = members[draw_seed(seed, place, step) % len(members)]
            chosen.append((name, name, parent))
        return chosen

    def with_credit(self, samples: Sequence[Sample]) -> list[Sample]:
        """The judged samples of whole chains with the rewards that ``credit`` gives them: every
        reward function's, and their sum. None where a reward of the chain that counts is unknown.
        """
        if self.credit == "own":
            return [*samples]
        child = {s.parent: number for number, s in enumerate(samples) if s.parent}
        names = names_of_samples(samples)
        credited: dict[int, Sample] = {}
        for number in sorted(range(len(samples)), key=lambda n: -samples[n].turn):
            sample, following = samples[number], child.get(names[number])
            later = None if following is None else credited[following]
            assert sample.outcome is not None
            left = self.turns - sample.turn if self.ends_chain(sample) else 0
            whole = None if later is None else later.outcome
            give = partial(self._credited, left=left, ends=whole is None)
            after: Mapping[str, float | None] = {} if whole is None else whole.rewards
            rewards = {
                name: give(own, after.get(name)) for name, own in sample.outcome.rewards.items()
            }
            total = give(sample.outcome.total, None if whole is None else whole.total)
            outcome = dataclasses.replace(sample.outcome, rewards=rewards, total=total)
            credited[number] = dataclasses.replace(sample, outcome=outcome)
        return [credited[number] for number in range(len(samples))]

    def _credited(
        self, own: float | None, after: float | None, *, left: int, ends: bool
    ) -> float | None:
        """The credit of a critique with the reward ``own``. ``after`` is the credit of the chain's
        next critique; if the chain ``ends``, ``left`` turns count as this one."""
        if ends:
            factor = sum(self.discount**n for n in range(left + 1))
            return own if own is None or self.credit == "final" else own * factor
        if after is None or self.credit == "final":
            return after
        return None if own is None else own + self.discount * after


def names_of_samples(samples: Sequence[Sample]) -> list[str]:
    """The name of every sample: the uid of its group, and its place in it. Groups are whole."""
    uids = [sample.uid for sample in samples]
    return row_names(uids, uids)


def _root(name: str) -> str:
    """The uid of the first turn's group in the name of one of its chains."""
    return name.partition("/")[0]


def draw_name(name: str, sample: Sample) -> str:
    """``name``, which begins with the uid of the first turn's group, with the row's id in its
    place, on which draws may depend: the uid has the name of the run."""
    return f"{sample.row_id}/{name.partition('/')[2]}"


# The later turns


def draw_later_turns(worker: DAGWorker, first: Sequence[Sample], rounds: Rounds) -> list[Sample]:
    """``first``, the revised critiques of this data rank's first turn, and the revised critiques of
    all later turns, with the policy's weights as they are now. Collective.
    """
    every, latest = [*first], [*first]
    for turn in range(2, rounds.turns + 1):
        asked = _next_requests(worker, latest, rounds, turn)
        if not worker.groups.any_rank(bool(asked))[0]:
            break
        rows = [row for _, row in asked]
        prompts = [sample.prompt for sample, _ in asked]
        names = [draw_name(sample.parent, sample) for sample, _ in asked]
        params = sampling_params(worker, names, step=worker.step)
        params = params if rounds.compare == "state" else dataclasses.replace(params, n=1)
        groups = criticise(worker, rows, prompts, params, rounds.follow_up)
        drawn = [
            dataclasses.replace(
                request,
                completion=answer.completion,
                text=answer.text,
                judgment=answer.judgment,
            )
            for (request, _), answers in zip(asked, groups, strict=True)
            for answer in answers
        ]
        about = [row for row, answers in zip(rows, groups, strict=True) for _ in answers]
        latest = revise(worker, drawn, about, rounds.follow_up)
        every += latest
    return every


def _next_requests(
    worker: DAGWorker, latest: Sequence[Sample], rounds: Rounds, turn: int
) -> list[tuple[Sample, Row]]:
    """(the sample as far as it is known, the row with the program to criticise) for every request
    of the turn. A chain ends where the prompt is too long.
    """
    seed = worker.config.actor_rollout_ref.rollout.seed
    found = []
    for uid, name, parent in rounds.choose_parents(latest, seed=seed, step=worker.step):
        assert parent.revision is not None
        given = worker.train.row(parent.row_id)
        if not given.has_built_in_prompt:
            raise UserError(
                f"{given.place or f'row {given.id!r}'}: the row's prompt differs from the built-in "
                "request for a critique, which later turns use",
                key="dag.options.turns",
                remedy="set it to 1 for rows with prompts of your own",
            )
        sample = dataclasses.replace(
            parent,
            uid=uid,
            parent=name,
            turn=turn,
            program=CriticisedProgram(text=parent.revision.text),
            revision=None,
        )
        row = sample.row_with_program(given)
        prompt = tuple(worker.codec.encode_chat(row.prompt, add_generation_prompt=True))
        if len(prompt) <= worker.config.data.max_prompt_length:
            found.append((dataclasses.replace(sample, prompt=prompt), row))
    return found


# Judging


async def judge_turns(
    worker: RolloutWorker, samples: Sequence[Sample], rows: Sequence[Row], rounds: Rounds
) -> list[Sample]:
    """The samples of all turns with their credit, and the programs that they are about with their
    pass rates, which ``rows`` must not have: rewards compare with them. Leaders only.

    A sample whose program could not be judged has no reward.
    """
    known = await _with_pass_rates(worker, samples, rows)
    about = [s.row_with_program(row) for s, row in zip(known, rows, strict=True)]
    asked = [(s, row) for s, row in zip(known, about, strict=True) if _is_comparable(s)]
    judged = iter(await judge(worker, [s for s, _ in asked], [row for _, row in asked]))
    unknown = unknown_rewards(worker, _PROGRAM_UNKNOWN)
    return rounds.with_credit(
        [
            next(judged) if _is_comparable(s) else dataclasses.replace(s, outcome=unknown)
            for s in known
        ]
    )


def _is_comparable(sample: Sample) -> bool:
    """Whether the program that the sample is about was judged, as first solutions are in the
    data."""
    return sample.program is None or sample.program.pass_rate is not None


async def _with_pass_rates(
    worker: RolloutWorker, samples: Sequence[Sample], rows: Sequence[Row]
) -> list[Sample]:
    """The samples with the pass rates of the programs that they are about. Most verdicts are in the
    cache: the programs are revisions that the turn before is rewarded for."""
    assert worker.rewards is not None
    pairs = zip(samples, rows, strict=True)
    programs = {(s.row_id, s.program.text): row for s, row in pairs if s.program is not None}
    texts = [text for _, text in programs]
    found = await worker.rewards.judge_solutions(texts, [*programs.values()]) if texts else []
    rates = {name: one.pass_rate for name, one in zip(programs, found, strict=True)}
    rated = []
    for sample in samples:
        if (program := sample.program) is not None:
            program = dataclasses.replace(program, pass_rate=rates[sample.row_id, program.text])
        rated.append(dataclasses.replace(sample, program=program))
    return rated


# Reports


def turn_metrics(
    samples: Sequence[Sample], rows: Sequence[Row], turns: int
) -> dict[str, torch.Tensor]:
    """Name -> (n,) float32, whose mean over all ranks is reported, for the critiques of each turn:
    their share of all, the pass rates of programs and revisions, the share of right revisions, of
    right programs that are wrong after it, and of critiques that call a right or a wrong program
    correct.
    """
    measured = dict[str, torch.Tensor]()
    pairs = zip(samples, rows, strict=True)
    critiques = [(sample, row.pass_rate) for sample, row in pairs if sample.task == CRITIQUE]
    for turn in range(1, turns + 1):
        here = [(sample, before) for sample, before in critiques if sample.turn == turn]
        rates = [(b, s.outcome.pass_rate) for s, b in here if s.outcome is not None]
        both = [(b, a) for b, a in rates if b is not None and a is not None]
        said = [(s.judgment, b) for s, b in here if b is not None]
        shown = {
            "share": [float(sample.turn == turn) for sample, _ in critiques],
            "pass_rate_before": [b for b, _ in rates if b is not None],
            "pass_rate_after": [a for _, a in rates if a is not None],
            "right": [float(a == 1) for _, a in rates if a is not None],
            "undone": [float(a < 1) for b, a in both if b == 1],
            "called_right_rightly": [float(bool(word) and b == 1) for word, b in said],
            "called_right_wrongly": [float(bool(word) and b < 1) for word, b in said],
        }
        measured |= {f"turn/{turn}/{name}": torch.tensor(v) for name, v in shown.items()}
    return measured


def rounds_rates(turns: Sequence[Turn]) -> dict[str, float]:
    """``validation_rates`` of the first turns, and for every turn the share of chains whose answer
    is right after it, without stops and where revising stops at the first "Correct".
    """
    chains: dict[tuple[str, int], list[Turn]] = {}
    for turn in turns:
        chains.setdefault((turn.attempt, turn.sample), []).append(turn)
    rates = validation_rates([turn for turn in turns if turn.turn == 1])
    judged = [c for c in chains.values() if all(t.before and t.after for t in c)]
    right, stopped = Counter[int](), Counter[int]()
    for chain in judged:
        kept: bool | None = None
        for turn in sorted(chain, key=lambda turn: turn.turn):
            assert turn.before is not None and turn.after is not None
            kept = turn.before.accepted if kept is None and turn.judgment else kept
            right[turn.turn] += turn.after.accepted
            stopped[turn.turn] += turn.after.accepted if kept is None else kept
    for number in sorted(right):
        rates[f"turn/{number}/solved"] = right[number] / len(judged)
        rates[f"turn/{number}/stopped_solved"] = stopped[number] / len(judged)
    return rates


# The pipeline


def ctrl_rounds_pipeline(
    config: Config,
    *,
    turns: int = 3,
    stop: bool = True,
    compare: Compare = "state",
    credit: Credit = "own",
    discount: float = 1.0,
) -> TaskGraph:
    """``ctrl_pipeline`` with up to ``turns`` critiques of a chain, each of the revision before.

    ``stop``: a critique that says "Correct" keeps its program and ends its chain. ``compare``: the
    critiques of a group have one program (``state``), or one turn in the ``rollout.n`` chains of a
    row (``chain``). ``credit``: a critique earns its own reward (``own``), with it those of the
    chain's later turns, each times ``discount`` (``to_go``), or that of the last one (``final``).
    Where a critique ends its chain, each remaining turn counts as that critique.

    UserError for options that exclude each other, and for settings that rounds do not support.
    """
    rounds = Rounds(turns=turns, stop=stop, compare=compare, credit=credit, discount=discount)
    if error := _error_of_options(config, rounds):
        raise error
    then = rounds.follow_up

    @node(writes=(*DRAWN, "sample", "task", "critique", "valid", "judged_correct", "problem_id"))
    def generate_critiques(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
        """The critiques of the rows' first solutions, as in ``ctrl_pipeline``."""
        samples = draw_critiques(worker, batch, then)
        return node_output_of_samples(worker, samples, measure_critiques, critique_columns)

    @node(writes=("sample", *REVISION_COLUMNS), uses=("proxy",))
    def generate_revisions(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
        """The revisions after the first critiques."""
        samples = revise(worker, samples_of(batch), data_rows_of(worker.train, batch), then)
        metrics = worker.global_means(revision_metrics(samples))
        return NodeOutput(fields=fields_of_samples(samples, revision_columns), metrics=metrics)

    @node(writes=("sample", *TURN_COLUMNS), uses=("proxy",))
    def generate_later_turns(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
        """The batch of all turns."""
        samples = draw_later_turns(worker, samples_of(batch), rounds)
        return node_output_of_samples(worker, samples, lambda _: {}, *_COLUMNS)

    @node(writes=("sample", "score", "pass_rate", "cached", "detail"), uses=("rewards",))
    async def judge_all_turns(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
        """The judged samples of all turns. Runs beside the log-probs."""
        rows = data_rows_of(worker.train, batch)
        judged = await judge_turns(worker, samples_of(batch), rows, rounds)
        return NodeOutput(fields=fields_of_samples(judged, reward_columns, verdict_columns))

    @node(reads=VALIDATION, uses=("proxy", "rewards"))
    def validate_rounds(worker: RolloutWorker) -> dict[str, float]:
        """``rounds_rates`` of the validation rows. Collective."""
        assert worker.validation is not None
        found = [(turn.attempt, turn) for turn in validated_turns(worker, rounds.turns)]
        return rates_by_set(worker.validation.sets, found, rounds_rates)

    def metrics(worker: DAGWorker, batch: TensorDict) -> dict[str, float]:
        """``critique_metrics``, and ``turn_metrics`` of the batch. Collective."""
        rows = data_rows_of(worker.train, batch)
        measured = turn_metrics(samples_of(batch), rows, rounds.turns)
        return {**critique_metrics(worker, batch), **worker.global_means(measured)}

    report = StepReport(
        metrics=metrics,
        examples=critique_examples,
        validate=validate_rounds if config.data.val_files else None,
        rewards=("critic",),
    )
    pipeline = Pipeline("ctrl_rounds_pipeline", "several critiques, update", report=report)
    if config.algorithm.filter_groups.enable:
        nodes = (generate_critiques, generate_revisions, generate_later_turns, judge_all_turns)
        columns = (*_COLUMNS, reward_columns, verdict_columns)
        drawn, judged = add_dynamic_sampling(pipeline, nodes, measure_critiques, columns)
    else:
        add, synced = pipeline.add_node, add_weight_sync(pipeline, config)
        add("generate_critiques", generate_critiques, synced, **DRAWS)
        add("generate_revisions", generate_revisions, ["generate_critiques"], **DRAWS)
        add("generate_later_turns", generate_later_turns, ["generate_revisions"], **DRAWS)
        add("sandbox", judge_all_turns, ["generate_later_turns"], **JUDGES)

        def begin_next(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
            begin_draws_ahead(worker, then.revision_listener(worker))
            return report_staleness(worker, batch)

        drawn = add_next_draw_and_balance(pipeline, config, "generate_later_turns", begin_next)
        judged = ["sandbox"]
    add_update_nodes(pipeline, config, drawn=drawn, judged=judged)
    return pipeline.build()


def _error_of_options(config: Config, rounds: Rounds) -> UserError | None:
    """The error of the first setting that rounds do not support; None if they support all."""
    if rounds.turns < 1:
        return UserError(f"is {rounds.turns}", key="dag.options.turns", remedy="give 1 or more")
    if not 0 <= rounds.discount <= 1:
        return UserError(
            f"is {rounds.discount:g}", key="dag.options.discount", remedy="give 0 to 1"
        )
    if config.algorithm.adv_estimator == "remax":
        return UserError(
            "rounds have no greedy baseline",
            key="algorithm.adv_estimator=remax",
            remedy="take another estimator",
        )
    if rounds.credit == "own":
        return None
    credit = f"dag.options.credit={rounds.credit}"
    if rounds.compare == "state":
        return UserError(
            "of the critiques of one program one alone goes on, so that the others have no later "
            "turns",
            key=credit,
            remedy="set dag.options.compare=chain, or credit=own",
        )
    if config.reward.judge.gate is not None:
        return UserError(
            "the gate replaces a sum of rewards, which later turns would be added to",
            key=f"reward.judge.gate with {credit}",
            remedy="leave the gate out, or set dag.options.credit=own",
        )
    if config.needs_reward_model:
        return UserError(
            "the reward of a model is known after those of the chain were added up",
            key=f"reward_model.enable=true with {credit}",
            remedy="set dag.options.credit=own",
        )
    return None

"""From critiques to judged revisions: what the nodes of CTRL's step and its validation share, the
nodes of ReMax's baseline, and what is reported of a step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict

from ctrl_megatron.data.rows import Row
from ctrl_megatron.pipeline.batch import Fields, Sample, columns, known, reward_fields, texts
from ctrl_megatron.pipeline.graph import NodeOutput
from ctrl_megatron.pipeline.node_fields import writes
from ctrl_megatron.pipeline.node_keys import REVISIONS, REWARDS, reads
from ctrl_megatron.pipeline.performance import step_performance
from ctrl_megatron.pipeline.sampling import (
    EXAMPLES_PER_STEP,
    draw_samples,
    generate,
    greedy_params,
    length_metrics,
)
from ctrl_megatron.pipeline.worker import DAGWorker, RolloutWorker
from ctrl_megatron.prompts import parse_judgment, revision_messages
from ctrl_megatron.rewards import RewardItem, RewardOutcome, Scores
from ctrl_megatron.types import Completion

_LEFT_OUT = "no revision: problem, solution and critique are too long for the engine"


def draw_critiques(
    worker: DAGWorker, rows: Sequence[int], *, mini_batch_size: int, attempt: int = 0
) -> list[Sample]:
    """Critiques by the actor with the fields of ``read_critique``."""
    drawn = draw_samples(worker, rows, mini_batch_size=mini_batch_size, attempt=attempt)
    return [dataclasses.replace(s, fields=read_critique(worker, s.completion)) for s in drawn]


def read_critique(worker: RolloutWorker, completion: Completion) -> Fields:
    """``critique`` (text), ``valid`` (it holds a judgment), ``judged_correct`` (which one)."""
    critique = worker.codec.decode(completion.token_ids)
    judgment = parse_judgment(critique)
    return {"critique": critique, "valid": judgment is not None, "judged_correct": bool(judgment)}


def judgment_of(fields: Fields) -> bool | None:
    """What a critique with these fields says of the solution; None without a judgment."""
    return bool(fields["judged_correct"]) if fields["valid"] else None


def judgments(batch: TensorDict, prefix: str = "") -> list[bool | None]:
    """``judgment_of`` every row (B), from fields whose names begin with ``prefix``."""
    valid, correct = batch[f"{prefix}valid"].tolist(), batch[f"{prefix}judged_correct"].tolist()
    return [judged if ok else None for ok, judged in zip(valid, correct, strict=True)]


def revise(
    worker: RolloutWorker, rows: Sequence[Row], critiques: Sequence[str]
) -> list[Completion | None]:
    """The frozen proxy's revision of each row's solution after its critique; None where problem,
    solution and critique leave the engine no room for one. Collective.

    Revisions are greedy, so that a critique's reward does not depend on luck; equal critiques of
    one solution are answered once.
    """
    limit = worker.config.actor_rollout_ref.rollout.revision_max_tokens
    longest = worker.max_model_len - limit
    prompts = [
        tuple(
            worker.codec.encode_chat(
                revision_messages(row.attempt().problem, row.solution, critique),
                add_generation_prompt=True,
            )
        )
        for row, critique in zip(rows, critiques, strict=True)
    ]
    different = list(dict.fromkeys(prompt for prompt in prompts if len(prompt) <= longest))
    answers = generate(worker, "proxy", different, greedy_params(worker, limit))
    revision = {prompt: answer[0] for prompt, answer in zip(different, answers, strict=True)}
    return [revision.get(prompt) for prompt in prompts]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Revised:
    """What became of some critiques, each a list with an entry for every one of them."""

    texts: list[str]
    """Revisions; "" where none was written."""
    lengths: list[int | None]
    """Of these in tokens; None where none was written."""
    fits: list[bool]
    """False where the engine had no room for one, so that nothing is known of the critique."""

    def metrics(self, valid: Sequence[bool]) -> dict[str, torch.Tensor]:
        """Vectors whose means are reported; ``valid`` says of which critiques one was wanted."""
        left_out = [not fits for fits, wanted in zip(self.fits, valid, strict=True) if wanted]
        lengths = [float("nan") if length is None else float(length) for length in self.lengths]
        return {
            "revision/length": torch.tensor(lengths),
            "revision/left_out_rate": torch.tensor(left_out, dtype=torch.float32),
        }


def revise_valid(
    worker: RolloutWorker,
    rows: Sequence[Row],
    critiques: Sequence[str],
    valid: Sequence[bool],
) -> Revised:
    """Revisions of the critiques that are valid. Collective."""
    chosen = [i for i, ok in enumerate(valid) if ok]
    answers = revise(worker, [rows[i] for i in chosen], [critiques[i] for i in chosen])
    texts, fits = [""] * len(valid), [True] * len(valid)
    lengths: list[int | None] = [None] * len(valid)
    for i, answer in zip(chosen, answers, strict=True):
        if answer is None:
            fits[i] = False
        else:
            texts[i], lengths[i] = worker.codec.decode(answer.token_ids), len(answer.token_ids)
    return Revised(texts=texts, lengths=lengths, fits=fits)


def reward_items(
    rows: Sequence[Row],
    critiques: Sequence[str],
    judgments: Sequence[bool | None],
    revisions: Sequence[str],
    lengths: Sequence[int],
) -> list[RewardItem]:
    """What the reward functions are given; ``lengths`` are the critiques' in tokens."""
    return [
        RewardItem(text=revision, critique=critique, judgment=judgment, row=row, length=length)
        for row, critique, judgment, revision, length in zip(
            rows, critiques, judgments, revisions, lengths, strict=True
        )
    ]


async def score_revised(
    worker: RolloutWorker, items: Sequence[RewardItem], fits: Sequence[bool]
) -> list[Fields]:
    """``score_fields`` of the items; nothing is known of those without a revision that ``fits``."""
    scores = await worker.score([item for item, ok in zip(items, fits, strict=True) if ok])
    known = iter(score_fields(scores))
    unknown: Fields = {
        **dict.fromkeys(("score", *map("reward/{}".format, worker.reward_weights))),
        **_verdict_fields(RewardOutcome(reward=None, error=_LEFT_OUT)),
    }
    return [next(known) if ok else unknown for ok in fits]


def score_fields(scores: Scores) -> list[Fields]:
    """Per row ``reward_fields`` and, of the critic's verdict, ``pass_rate``, ``copied``, ``cached``
    and ``detail``.
    """
    pairs = zip(reward_fields(scores), scores.outcomes, strict=True)
    return [{**rewards, **_verdict_fields(outcome)} for rewards, outcome in pairs]


def _verdict_fields(outcome: RewardOutcome | None) -> Fields:
    outcome = outcome or RewardOutcome(reward=None)
    return {
        "pass_rate": outcome.pass_rate,
        "copied": outcome.copied,
        "cached": outcome.cached,
        "detail": outcome.detail,
    }


@reads(*REVISIONS, *REWARDS)
def draw_and_judge(worker: DAGWorker, rows: Sequence[int], attempt: int) -> list[Sample]:
    """Critiques of ``rows`` with what came of them, for dynamic sampling. Collective."""
    drawn = draw_critiques(worker, rows, mini_batch_size=len(rows), attempt=attempt)
    about = [worker.train.row(sample.problem_id) for sample in drawn]
    critiques = [str(sample.fields["critique"]) for sample in drawn]
    valid = [bool(sample.fields["valid"]) for sample in drawn]
    judged = [judgment_of(sample.fields) for sample in drawn]
    revised = revise_valid(worker, about, critiques, valid)
    sizes = [len(sample.completion.token_ids) for sample in drawn]
    items = reward_items(about, critiques, judged, revised.texts, sizes)
    scored = worker.ask(lambda: score_revised(worker, items, revised.fits))
    return [
        dataclasses.replace(
            sample,
            fields={
                **sample.fields,
                "revision": revised.texts[i],
                "revision_length": revised.lengths[i],
                "revision_fits": revised.fits[i],
                **scored[i],
            },
        )
        for i, sample in enumerate(drawn)
    ]


def measure_critiques(samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """What the metrics say of critiques as they were drawn, and of their revisions if there are."""
    measured = length_metrics(samples, "critique")
    fields = columns([sample.fields for sample in samples])
    if samples:
        measured["critique/valid_rate"] = fields["valid"].float()
    if "revision_length" in fields:
        measured["revision/length"] = fields["revision_length"]
        measured["revision/left_out_rate"] = (~fields["revision_fits"])[fields["valid"]].float()
    return measured


# The baseline of ReMax (arXiv 2310.10505): what one greedy critique per prompt earns. Its fields
# stand in every row of a prompt's group.


@writes("greedy_critique", "greedy_valid", "greedy_judged_correct")
def draw_greedy_critiques(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """``greedy_critique``, ``greedy_valid``, ``greedy_judged_correct`` (B,): the actor's likeliest
    critique of each row's prompt.
    """
    heads = group_heads(batch)
    ids = texts(batch["problem_id"])
    prompts = [worker.train.prompts[worker.train.number_of[ids[head]]] for head in heads]
    limit = worker.config.data.max_response_length
    answers = generate(worker, "actor", prompts, greedy_params(worker, limit))
    return _over_rows(batch, [read_critique(worker, answer[0]) for answer in answers])


@reads(*REVISIONS)
@writes("greedy_revision", "greedy_revision_fits")
def revise_greedy_critiques(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """``greedy_revision`` (B,) text: the proxy's, empty for invalid critiques; and
    ``greedy_revision_fits`` (B,) bool.
    """
    heads = group_heads(batch)
    rows = [worker.train.row(texts(batch["problem_id"])[head]) for head in heads]
    critiques = [texts(batch["greedy_critique"])[head] for head in heads]
    valid = batch["greedy_valid"][heads].tolist()
    revised = revise_valid(worker, rows, critiques, valid)
    pairs = zip(revised.texts, revised.fits, strict=True)
    return _over_rows(batch, [{"revision": text, "revision_fits": fits} for text, fits in pairs])


@reads(*REWARDS)
@writes("reward_baselines")
async def judge_greedy_revisions(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """``reward_baselines`` (B,): the critic's part of the greedy critique's reward, NaN where it
    could not be judged. Runs beside the log-probs.
    """
    heads = group_heads(batch)
    judged = judgments(batch, "greedy_")
    items = reward_items(
        [worker.train.row(texts(batch["problem_id"])[head]) for head in heads],
        [texts(batch["greedy_critique"])[head] for head in heads],
        [judged[head] for head in heads],
        [texts(batch["greedy_revision"])[head] for head in heads],
        [0] * len(heads),
    )
    scored = await score_revised(worker, items, batch["greedy_revision_fits"][heads].tolist())
    weight = worker.reward_weights["critic"]
    rewards = [fields["reward/critic"] for fields in scored]
    earned = [None if r is None else weight * float(r) for r in rewards]
    per_row = columns([{"reward_baselines": earned[group]} for group in _group_of_rows(batch)])
    return NodeOutput(fields=per_row)


def group_heads(batch: TensorDict) -> list[int]:
    """The first row of each group, in order."""
    heads: dict[str, int] = {}
    for row, uid in enumerate(texts(batch["uid"])):
        heads.setdefault(uid, row)
    return list(heads.values())


def _group_of_rows(batch: TensorDict) -> list[int]:
    uids = texts(batch["uid"])
    number = {uids[head]: group for group, head in enumerate(group_heads(batch))}
    return [number[uid] for uid in uids]


def _over_rows(batch: TensorDict, per_group: Sequence[Fields]) -> NodeOutput:
    """Each group's fields, named ``greedy_...``, in all of its rows."""
    named = [{f"greedy_{name}": value for name, value in f.items()} for f in per_group]
    return NodeOutput(fields=columns([named[group] for group in _group_of_rows(batch)]))


# What is reported of a finished step


def critique_metrics(worker: DAGWorker, batch: TensorDict) -> dict[str, float]:
    """Speed, pass rates of first solutions and of revisions, how verdicts came about, and whether
    there was anything to learn. Collective.
    """
    rows = [worker.train.row(row) for row in texts(batch["problem_id"])]
    before = [row.pass_rate for row in rows]
    uids, revisions = texts(batch["uid"]), texts(batch["revision"])
    rates = worker.means(
        {
            "pass_rate/before": torch.tensor([rate for rate in before if rate is not None]),
            "pass_rate/after": batch["pass_rate"][batch["judged"] & batch["valid"]],
            "critique/copied_rate": batch["copied"][~batch["copied"].isnan()],
            "reward/cached_rate": batch["cached"][~batch["reward/critic"].isnan()].float(),
            **reward_signal(batch["reward/critic"], uids, rows, revisions, batch["valid"]),
            **critique_signal(texts(batch["critique"]), judgments(batch), rows),
        }
    )
    return {**step_performance(worker, batch), **rates}


def critique_examples(worker: DAGWorker, batch: TensorDict) -> list[dict[str, Any]]:
    """The first critique of each group with what came of it, those with a revision first."""
    uids, valid = texts(batch["uid"]), batch["valid"].tolist()
    written = {name: texts(batch[name]) for name in ("problem_id", "critique", "revision")}
    written |= {name: texts(batch[name]) for name in ("detail", "version")}
    examples: dict[str, dict[str, Any]] = {}
    for i in sorted(range(len(uids)), key=lambda i: not valid[i]):
        if uids[i] in examples:
            continue
        row = worker.train.row(written["problem_id"][i])
        examples[uids[i]] = {
            "id": row.id,
            "problem": row.problem,
            "solution": row.solution,
            "critique": written["critique"][i],
            "judgment": "valid" if valid[i] else "none",
            "revision": written["revision"][i],
            "reward": known(batch["reward/critic"][i]),
            "passed_before": row.pass_rate,
            "passed_after": known(batch["pass_rate"][i]),
            "copied": known(batch["copied"][i]),
            "detail": written["detail"][i],
            "versions": f"critique by {written['version'][i]}, revision by proxy",
        }
    return list(examples.values())[:EXAMPLES_PER_STEP]


def reward_signal(
    rewards: torch.Tensor,
    uids: Sequence[str],
    rows: Sequence[Row],
    revisions: Sequence[str],
    valid: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Vectors whose means are metrics; whole groups, named by ``uids``.

    ``rewards`` (B,), NaN for samples that were not judged; ``valid`` (B,) bool: the critique has a
    judgment, and so ``revisions`` a text. A group of one teaches nothing and has no share here.
    """
    groups: dict[str, list[int]] = {}
    for place, uid in enumerate(uids):
        groups.setdefault(uid, []).append(place)
    distinct = []
    for members in groups.values():
        texts = [revisions[i] for i in members if valid[i]]
        if len(texts) > 1:
            distinct.append(len(set(texts)) / len(texts))
    gains = [
        float(reward) - row.pass_rate
        for reward, row in zip(rewards, rows, strict=True)
        if row.pass_rate is not None
    ]
    return {
        "group/distinct_revision_rate": torch.tensor(distinct),
        "group/reward_minus_first": torch.tensor(gains),
    }


def critique_signal(
    critiques: Sequence[str],
    judgments: Sequence[bool | None],
    rows: Sequence[Row],
) -> dict[str, torch.Tensor]:
    """Vectors whose means are metrics: of critiques with a judgment, which it is; of critiques of
    rows whose columns ``wrong`` and ``right`` know the fault, whether they quote it.

    Quoted is what stands between backticks as a whole. Right programs have an empty ``wrong``.
    """
    named, exact = [], []
    for critique, row in zip(critiques, rows, strict=True):
        wrong, right = row.extra.get("wrong"), row.extra.get("right")
        if isinstance(wrong, str) and isinstance(right, str) and wrong:
            quotes = [f"`{text}`" in critique for text in (wrong, right)]
            named.append(float(quotes[0]))
            exact.append(float(all(quotes)))
    return {
        "judgment/correct_rate": torch.tensor(
            [float(said) for said in judgments if said is not None]
        ),
        "fault/named_rate": torch.tensor(named),
        "fault/exact_edit_rate": torch.tensor(exact),
    }

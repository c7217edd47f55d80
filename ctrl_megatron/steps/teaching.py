"""Distillation in a step (``algorithm.distillation``): the teacher's prompts, its pass over the
actor's responses, and the update on both losses.

Sources: on-policy distillation (arXiv 2306.13649), self-distillation with privileged information
(SDPO, arXiv 2601.20802; SDFT, 2601.19897). B rows are the responses of this data rank, R the
longest of them in tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict

from ctrl_megatron.algorithms import rows_in_varied_groups
from ctrl_megatron.config import Config
from ctrl_megatron.config.distillation import Distillation
from ctrl_megatron.data.rows import CRITIQUE, Row
from ctrl_megatron.errors import UserError
from ctrl_megatron.graph.columns import texts
from ctrl_megatron.graph.declarations import DISTILLATION, always, node
from ctrl_megatron.graph.node import NodeOutput
from ctrl_megatron.models.loss_scale import GlobalCounts
from ctrl_megatron.models.micro_batch import split_attended_values
from ctrl_megatron.models.policy import BasePolicy, Policy
from ctrl_megatron.models.shape import context_of
from ctrl_megatron.models.teaching import StudentHead
from ctrl_megatron.prompts import hint_messages, reference_hint
from ctrl_megatron.prompts.confidence import judgment_confidence
from ctrl_megatron.rewards.hints import execution_hint
from ctrl_megatron.steps.batch import data_rows_of, samples_of
from ctrl_megatron.steps.losses import ActorLoss, aggregate_loss_share
from ctrl_megatron.steps.worker import DAGWorker, require_on_rank
from ctrl_megatron.types import Verdict

_LEARNED = {
    "token": ("teacher_log_probs",),
    "top_k": ("teacher_top_ids", "teacher_top_log_probs"),
    "full": ("teacher_hidden",),
}
"""Estimator -> the fields from which the actor learns."""
TEACHER_FIELDS = (
    *("distilled", "teacher_entropy", "teacher_log_probs"),
    *("teacher_top_ids", "teacher_top_log_probs", "teacher_hidden"),
)
"""Fields that the teacher's pass may write."""


# What the teacher sees


@node(reads=DISTILLATION, needs=always("problem_id"), writes=("hint",), uses=("rewards",))
async def write_feedback_hints(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """``hint``: for every row what the teacher's prompt says about its program, which is
    judged by the row's tests; empty for a row without one, and where the judge failed. Runs beside
    the log-probs.
    """
    rows = data_rows_of(worker.train, batch)
    asked = list({(row.id, row.solution): row for row in rows if row.task == CRITIQUE}.values())
    verdicts = dict[tuple[str, str], Verdict | None]()
    if asked:
        if worker.rewards is None:
            raise UserError("a node asks for verdicts of a run without rewards", key="reward")
        found = await worker.rewards.judge_solutions([row.solution for row in asked], asked)
        outcomes = zip(asked, found, strict=True)
        verdicts = {(row.id, row.solution): outcome.verdict for row, outcome in outcomes}
    return _hint_column(worker, rows, verdicts)


@node(reads=DISTILLATION, needs=always("problem_id"), writes=("hint",))
def write_program_hints(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """As ``write_feedback_hints``, of the rows' reference programs alone, which no judge runs."""
    return _hint_column(worker, data_rows_of(worker.train, batch), {})


def _hint_column(
    worker: DAGWorker, rows: Sequence[Row], verdicts: Mapping[tuple[str, str], Verdict | None]
) -> NodeOutput:
    kind = worker.config.algorithm.distillation.hint
    hints = [hint_of_row(kind, row, verdicts.get((row.id, row.solution))) for row in rows]
    return NodeOutput(fields={"hint": NonTensorStack(*hints)})


def hint_of_row(kind: str, row: Row, verdict: Verdict | None) -> str:
    """The hint of a ``kind`` (``algorithm.distillation.hint``) for critiques of the row's first
    solution, on which ``verdict`` is; empty where a part of it is unknown."""
    if row.task != CRITIQUE:
        return ""
    parts = []
    if kind in ("feedback", "both"):
        known = verdict is not None and verdict.passed
        parts.append(execution_hint(row.attempt(), verdict).text if known and verdict else "")
    if kind in ("reference", "diff", "both"):
        program, changes = row.reference.strip(), kind == "diff"
        parts.append(reference_hint(row.solution, program, changes=changes) if program else "")
    return "\n".join(parts) if all(parts) else ""


# The teacher's pass


def needed_for_teacher(config: Config) -> dict[str, str]:
    """The fields of ``read_as_teacher``, as ``NodeFunction.needs`` has them."""
    keys, prefix = config.algorithm.distillation, "algorithm.distillation."
    needs = {"input_ids": "", "response_mask": ""}
    if keys.has_hint:
        needs["hint"] = f"{prefix}hint={keys.hint}"
    if keys.is_on and keys.on != "all":
        needs["token_level_scores"] = f"{prefix}on={keys.on}"
    return needs


def fields_of_teacher(config: Config) -> dict[str, str]:
    """The fields of the teacher that the update needs, as ``NodeFunction.needs`` has them."""
    keys = config.algorithm.distillation
    if not keys.is_on:
        return {}
    setting = f"algorithm.distillation.teacher={keys.teacher}"
    return dict.fromkeys(("distilled", *_LEARNED[keys.estimator]), setting)


@node(reads=DISTILLATION, needs=needed_for_teacher, writes=TEACHER_FIELDS)
def read_as_teacher(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """``models.teaching.TeacherFields`` of the responses, and ``distilled`` (B,) bool: the rows
    that have them. A row without a hint, or whose prompt with it is too long, has none; its numbers
    are 0. Nothing where the batch has the fields already, as that of a dumped step does.
    """
    if "distilled" in batch:
        return NodeOutput()
    keys = worker.config.algorithm.distillation
    teacher = _teacher(worker, keys)
    prompts = _teacher_prompts(worker, batch, keys)
    known = torch.tensor([prompt is not None for prompt in prompts])
    taught = known & ~_rows_with_spread(batch, keys)
    answered = batch["response_mask"].any(dim=1)
    chosen = (taught & answered).nonzero().flatten()
    rows = _rows_behind(prompts, batch, chosen)
    budget = worker.config.actor_rollout_ref.log_prob_token_budget
    found = teacher.teacher_pass(rows, keys, worker.temperature, token_budget=budget)
    shares = worker.config.actor_rollout_ref.actor.compute.param_offload and worker.has_actor
    if shares and teacher is worker.reference:
        teacher.offload("weights")
    fields = {"distilled": torch.zeros(len(batch), dtype=torch.bool)}
    fields["distilled"][chosen] = True
    for name, values in found.items():
        fields[name] = values.new_zeros((len(batch), *values.shape[1:]))
        fields[name][chosen] = values
    mask = rows["response_mask"]
    measured = {
        **_judgment_agreement(worker, batch, fields),
        "distillation/left_out_rate": (~known).float(),
        "distillation/row_rate": fields["distilled"].float(),
        "distillation/teacher_entropy": found["teacher_entropy"][mask],
        "distillation/teacher_probability": found["teacher_log_probs"][mask].exp(),
    }
    return NodeOutput(fields=fields, metrics=worker.global_means(measured))


def _judgment_agreement(
    worker: DAGWorker, batch: TensorDict, fields: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Of the responses with a judgment and a teacher: 1 where the teacher gives the judgment more
    than one half, else 0. Nothing where another world has the samples."""
    if "sample" not in batch:
        return {}
    agreed = list[float]()
    for sample, taught, own in zip(
        samples_of(batch), fields["distilled"].tolist(), fields["teacher_log_probs"], strict=True
    ):
        if taught and sample.judgment is not None:
            said = tuple(own[: len(sample.completion.token_ids)].tolist())
            heard = dataclasses.replace(sample.completion, log_probs=said)
            correct = judgment_confidence(worker.codec, heard, sample.text)
            assert correct is not None
            agreed.append(float((correct > 0.5) == sample.judgment))
    return {"distillation/judgment_agreement": torch.tensor(agreed)}


def _teacher(worker: DAGWorker, keys: Distillation) -> Policy | BasePolicy:
    if keys.teacher == "policy":
        return worker.policy
    return require_on_rank(worker.reference, "the reference")


def _teacher_prompts(
    worker: DAGWorker, batch: TensorDict, keys: Distillation
) -> list[list[int] | None]:
    """The teacher's prompt of every row; None for a row without one."""
    attended, start = batch["attention_mask"].bool(), batch["prompts"].shape[1]
    own, responses = split_attended_values(batch["input_ids"], attended, start)
    if not keys.has_hint:
        return [prompt.tolist() for prompt in own]
    room = _longest_row(worker)
    most = room if keys.max_prompt_length is None else keys.max_prompt_length
    encoded = dict[tuple[str, str, str], list[int]]()
    prompts = list[list[int] | None]()
    rows = data_rows_of(worker.train, batch)
    for row, hint, response in zip(rows, texts(batch["hint"]), responses, strict=True):
        if not hint:
            prompts.append(None)
            continue
        name = (row.id, row.solution, hint)
        if name not in encoded:
            messages = hint_messages(row.attempt().problem, row.solution, hint)
            encoded[name] = worker.codec.encode_chat(messages)
        prompt = encoded[name]
        fits = len(prompt) <= most and len(prompt) + len(response) <= room
        prompts.append(prompt if fits else None)
    return prompts


def _longest_row(worker: DAGWorker) -> int:
    """Tokens of the longest row of the teacher's pass."""
    family = worker.config.actor_rollout_ref
    shapes = [model.shape for model in (worker.actor,) if model is not None]
    if isinstance(worker.reference, Policy):
        shapes.append(worker.reference.shape)
    return min(family.log_prob_token_budget, *(context_of(s)[0] for s in shapes))


def _rows_with_spread(batch: TensorDict, keys: Distillation) -> torch.Tensor:
    """(B,) bool: rows that have no teacher because their group's rewards differ."""
    if keys.on == "all":
        return torch.zeros(len(batch), dtype=torch.bool)
    return rows_in_varied_groups(batch["token_level_scores"].sum(dim=1), texts(batch["uid"]))


def _rows_behind(
    prompts: Sequence[list[int] | None], batch: TensorDict, chosen: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The rows with the numbers ``chosen`` (n,), each behind its prompt, as a pass reads them; the
    responses keep their columns."""
    wanted = [prompts[number] or [] for number in chosen.tolist()]
    width = max(map(len, wanted), default=1)
    left = torch.zeros((len(wanted), width), dtype=torch.int64)
    attended = torch.zeros_like(left)
    for row, prompt in enumerate(wanted):
        left[row, width - len(prompt) :] = torch.tensor(prompt, dtype=torch.int64)
        attended[row, width - len(prompt) :] = 1
    start = batch["prompts"].shape[1]
    responses, seen = (batch[name][chosen][:, start:] for name in ("input_ids", "attention_mask"))
    return {
        "input_ids": torch.cat([left, responses], dim=1),
        "attention_mask": torch.cat([attended, seen], dim=1),
        "response_mask": batch["response_mask"][chosen],
    }


# The update


@dataclasses.dataclass(frozen=True, slots=True)
class DistillationLoss:
    """A loss of ``Policy.step`` with the vectors of ``models.teaching.StudentHead``: the actor's,
    and the mean divergence over the tokens that have a teacher."""

    actor: ActorLoss
    keys: Distillation
    response_limit: int

    def __call__(
        self,
        log_probs: torch.Tensor,
        entropy: torch.Tensor,
        divergence: torch.Tensor,
        rows: dict[str, torch.Tensor],
        counts: GlobalCounts,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss, scalars = self.actor(log_probs, entropy, rows, counts)
        share = aggregate_loss_share(
            divergence * rows["teacher_weight"],
            "token-mean",
            mask=rows.get("loss_mask", rows["response_mask"]),
            counts=counts,
            response_limit=self.response_limit,
        )
        return loss + self.keys.coef * share, {**scalars, "actor/divergence": share.detach()}


def actor_step(worker: DAGWorker, batch: TensorDict) -> tuple[Callable[..., dict[str, float]], int]:
    """(a function that makes an optimizer step of the actor on the rows of a mini-batch, with the
    keyword argument ``results`` of ``Policy.step``; the number of vectors in these). ``batch`` has
    the fields of ``update_actor``. Collective.
    """
    config, policy = worker.config, worker.policy
    keys, limit = config.algorithm.distillation, config.data.max_response_length
    taught = keys.is_on and "distilled" in batch
    actor = ActorLoss(
        config.actor_rollout_ref.actor,
        response_limit=limit,
        policy_loss_coef=keys.policy_loss_coef if taught else 1.0,
    )
    actor.check(batch)
    if not taught:
        return partial(policy.step, loss=actor, temperature=worker.temperature), 2
    loss = DistillationLoss(actor, keys, limit)
    weight = _teacher(worker, keys).output_weight() if keys.estimator == "full" else None

    def step(rows: dict[str, torch.Tensor], **options: Any) -> dict[str, float]:
        rows = rows | {"teacher_weight": _token_weights(worker, rows)}
        head = StudentHead(
            strategy=policy.strategy,
            keys=keys,
            temperature=worker.temperature,
            rows=rows,
            teacher_weight=weight,
        )
        return policy.step(rows, loss, worker.temperature, head=head, **options)

    return step, 3


def _token_weights(worker: DAGWorker, rows: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """(b, R) float32 whose weighted mean over all tokens in the loss is the mean over those that
    have a teacher. Collective."""
    mask = rows.get("loss_mask", rows["response_mask"]).bool()
    own = mask & rows["distilled"].unsqueeze(-1)
    counts = worker.groups.sum_over_data(torch.stack([mask.sum(), own.sum()]))
    every, taught = counts.tolist()
    return own.float() * (every / taught if taught else 0.0)

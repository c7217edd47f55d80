"""What the engine draws for a step, and the batch that is made of it.

B rows are samples of this data-parallel rank, P and R the longest prompt and response among them.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from tensordict import NonTensorStack, TensorDict

from ctrl_megatron.algorithms import groups_with_signal
from ctrl_megatron.data.balance import partition_groups
from ctrl_megatron.parallel.groups import ProcessGroups
from ctrl_megatron.pipeline.graph import NodeOutput
from ctrl_megatron.rewards import Scores, weighted_sum
from ctrl_megatron.types import Completion, SamplingParams

if TYPE_CHECKING:
    from ctrl_megatron.pipeline.worker import DAGWorker, RolloutWorker
    from ctrl_megatron.resharding.engine_weights import Role


EXAMPLES_PER_STEP = 6
"""Samples of a step that are kept for the report."""
Fields = Mapping[str, str | bool | int | float | None]
"""What nodes know of one row beyond its tokens, by field of the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One completion of one prompt, before it is padded into the batch."""

    uid: str
    """Names the group: all samples of one prompt in one step."""
    problem_id: str
    """The row of the data that the prompt is about."""
    mini_batch: int
    """Which optimizer step of this training step the sample belongs to."""
    prompt: tuple[int, ...]
    completion: Completion
    fields: Fields = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Prompt and response tokens."""
        return len(self.prompt) + len(self.completion.token_ids)


def draw_samples(
    worker: DAGWorker, rows: Sequence[int], *, mini_batch_size: int, attempt: int = 0
) -> list[Sample]:
    """The actor's ``rollout.n`` samples of this rank's share of ``rows`` (positions in the data).

    Every mini-batch of ``mini_batch_size`` prompts is shared equally between data-parallel ranks.
    ``attempt`` numbers the draws of one training step. Collective.
    """
    mine = share_prompts(len(rows), mini_batch_size, worker.groups)
    positions = [rows[prompt] for prompt, _ in mine]
    prompts = [worker.train.prompts[position] for position in positions]
    answers = generate(worker, "actor", prompts, sampling_params(worker, attempt=attempt))
    draw = f"{worker.config.trainer.experiment_name}/{worker.step}"
    draw += f"/{attempt}" if attempt else ""
    return [
        Sample(
            uid=str(uuid.uuid5(uuid.NAMESPACE_OID, f"{draw}/{prompt}")),
            problem_id=worker.train.rows[position].id,
            mini_batch=mini_batch,
            prompt=worker.train.prompts[position],
            completion=completion,
        )
        for (prompt, mini_batch), position, group in zip(mine, positions, answers, strict=True)
        for completion in group
    ]


def generate(
    worker: RolloutWorker, role: Role, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> list[list[Completion]]:
    """``params.n`` completions of each prompt from the role's weights, which the engine is given.

    Collective; the ranks of a model copy give and get the same. Raises RuntimeError if other
    weights drew any token.
    """
    version = worker.device.to_engine(worker.weights, role)

    async def ask_engine() -> list[list[Completion]]:
        assert worker.engine is not None
        return await worker.engine.generate([list(p) for p in prompts], params) if prompts else []

    answers = worker.ask(ask_engine)
    wrong = {v for group in answers for c in group if (v := versions_of(c)) != version}
    if wrong:
        raise RuntimeError(f"completions were drawn from {sorted(wrong)}, not from {version}")
    return answers


def sampling_params(worker: DAGWorker, *, attempt: int = 0) -> SamplingParams:
    """How training draws; the seed differs by step, data-parallel rank and ``attempt``."""
    config, rollout = worker.config, worker.config.actor_rollout_ref.rollout
    seed = rollout.seed * 1_000_003 + worker.step * 1009 + worker.groups.place.dp
    seed += attempt * 15_485_863
    return SamplingParams(
        max_tokens=config.data.max_response_length,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        n=rollout.n,
        seed=seed % 2**31,
        stop_token_ids=tuple(worker.codec.eos_token_ids),
    )


def greedy_params(worker: RolloutWorker, max_tokens: int) -> SamplingParams:
    """The likeliest completion, once; nobody learns from it, so nobody asks how likely it was."""
    stop = tuple(worker.codec.eos_token_ids)
    return SamplingParams(
        max_tokens=max_tokens, temperature=0.0, n=1, stop_token_ids=stop, log_probs=False
    )


def versions_of(completion: Completion) -> str:
    """The weights that drew the completion, joined by ``+`` where there are several."""
    return "+".join(dict.fromkeys(span.version for span in completion.spans))


def sampled(
    worker: DAGWorker,
    samples: list[Sample],
    measure: Callable[[Sequence[Sample]], dict[str, torch.Tensor]],
) -> NodeOutput:
    """The samples as this rank's batch, levelled over the data-parallel ranks, with the means of
    ``measure``. Collective.
    """
    shared = worker.config.actor_rollout_ref.model.shared_prefix
    samples = level_over_data_ranks(samples, worker.groups, shared_prefix=shared)
    batch = make_batch(samples, pad_token_id=worker.codec.pad_token_id)
    return NodeOutput(batch=batch, metrics=worker.means(measure(samples)))


def make_batch(samples: Sequence[Sample], *, pad_token_id: int) -> TensorDict:
    """``pad_rows`` of the samples with what else is known of them.

    Adds ``rollout_log_probs`` (B, R) float32, ``mini_batch`` (B,) int64, the non-tensor fields
    ``uid``, ``problem_id``, ``version`` (the weights that drew the response) and the samples' own
    ``fields`` as columns.
    """
    batch = pad_rows(
        [s.prompt for s in samples],
        [s.completion.token_ids for s in samples],
        pad_token_id=pad_token_id,
    )
    log_probs = torch.zeros(batch["responses"].shape, dtype=torch.float32)
    for i, sample in enumerate(samples):
        log_probs[i, : len(sample.completion.log_probs)] = torch.tensor(sample.completion.log_probs)
    batch["rollout_log_probs"] = log_probs
    batch["mini_batch"] = torch.tensor([s.mini_batch for s in samples])
    batch["uid"] = NonTensorStack(*[s.uid for s in samples])
    batch["problem_id"] = NonTensorStack(*[s.problem_id for s in samples])
    batch["version"] = NonTensorStack(*[versions_of(s.completion) for s in samples])
    for name, column in columns([s.fields for s in samples]).items():
        batch[name] = column
    return batch


def reward_spread(
    rewards: torch.Tensor, scores: torch.Tensor, uids: Sequence[str]
) -> dict[str, torch.Tensor]:
    """How ``rewards`` and ``scores`` (B,) lie, NaN where nothing is known: vectors whose means are
    the shares of the rewards' histogram, and the share of groups whose scores are all equal.
    """
    known = ~scores.isnan()
    groups = [uid for uid, judged in zip(uids, known.tolist(), strict=True) if judged]
    earned = rewards[~rewards.isnan()]
    within = (earned > 0) & (earned < 1)
    shares = {
        "zero": earned == 0,
        "up_to_half": within & (earned <= 0.5),
        "below_one": within & (earned > 0.5),
        "one": earned == 1,
        "elsewhere": (earned < 0) | (earned > 1),
    }
    signal = groups_with_signal(scores[known], groups).tolist() if groups else []
    same = [float(not teaches) for teaches in dict(zip(groups, signal, strict=True)).values()]
    return {f"reward_share/{name}": share.float() for name, share in shares.items()} | {
        "advantage/zero_std_rate": torch.tensor(same)
    }


def columns(rows: Sequence[Fields]) -> dict[str, Any]:
    """The rows' fields as fields of the batch: texts as non-tensor data, truth values as bool,
    everything else as float32 with NaN for None.
    """
    return {name: _column([row[name] for row in rows]) for name in (rows[0] if rows else ())}


def _column(values: Sequence[Any]) -> Any:
    if all(isinstance(value, str) for value in values):
        return NonTensorStack(*values)
    if all(isinstance(value, bool) for value in values):
        return torch.tensor(values)
    known = [float("nan") if value is None else float(value) for value in values]
    return torch.tensor(known, dtype=torch.float32)


def pad_rows(
    prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], *, pad_token_id: int
) -> TensorDict:
    """Token rows as a TensorDict of B rows: prompts padded on the left, responses on the right.

    Writes ``prompts`` (B, P), ``responses`` (B, R), ``input_ids``, ``attention_mask``,
    ``position_ids`` (B, P+R) int64 and ``response_mask`` (B, R) bool.
    """
    rows = len(prompts)
    width_p, width_r = max(map(len, prompts)), max(1, max(map(len, responses)))
    left = torch.full((rows, width_p), pad_token_id, dtype=torch.int64)
    right = torch.full((rows, width_r), pad_token_id, dtype=torch.int64)
    prompt_mask = torch.zeros((rows, width_p), dtype=torch.int64)
    response_mask = torch.zeros((rows, width_r), dtype=torch.bool)
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        left[i, width_p - len(prompt) :] = torch.tensor(prompt)
        prompt_mask[i, width_p - len(prompt) :] = 1
        right[i, : len(response)] = torch.tensor(response, dtype=torch.int64)
        response_mask[i, : len(response)] = True
    attention = torch.cat([prompt_mask, response_mask.long()], dim=1)
    return TensorDict(
        {
            "prompts": left,
            "responses": right,
            "input_ids": torch.cat([left, right], dim=1),
            "attention_mask": attention,
            "position_ids": (attention.cumsum(dim=1) - 1).clamp(min=0),
            "response_mask": response_mask,
        },
        batch_size=[rows],
    )


def tensors_of(batch: TensorDict) -> dict[str, torch.Tensor]:
    """The tensor fields of the batch as a plain mapping."""
    return {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}


def texts(field: Any) -> list[str]:
    """A non-tensor field of the batch as a list."""
    return field.tolist() if hasattr(field, "tolist") else list(field)


def known(value: torch.Tensor) -> float | None:
    """A number of the batch; None for NaN."""
    return None if value.isnan() else float(value)


def length_metrics(samples: Sequence[Sample], prefix: str) -> dict[str, torch.Tensor]:
    """Per sample (B,) float32: response tokens, and 1 where ``max_tokens`` cut it."""
    completions = [s.completion for s in samples]
    cut = [float(c.finish_reason == "length") for c in completions]
    return {
        f"{prefix}/length": torch.tensor([float(len(c.token_ids)) for c in completions]),
        f"{prefix}/cut_rate": torch.tensor(cut),
    }


def reward_fields(scores: Scores, weights: Mapping[str, float]) -> list[Fields]:
    """Per row ``score`` (the weighted sum) and ``reward/NAME`` of every reward function; None where
    nothing is known.
    """
    return [
        {"score": total, **{f"reward/{name}": part[row] for name, part in scores.parts.items()}}
        for row, total in enumerate(weighted_sum(scores.parts, weights))
    ]


def validation_batches(worker: RolloutWorker) -> list[list[int]]:
    """Positions of this rank's validation rows, ``data.val_batch_size`` at a time over all ranks.

    The same number of batches on every rank, because generating is collective.
    """
    assert worker.validation is not None
    size, total = worker.config.data.val_batch_size, len(worker.validation.rows)
    place, layout = worker.groups.place, worker.groups.layout
    return [
        list(range(start, min(start + size, total)))[place.dp :: layout.data]
        for start in range(0, total, size)
    ]


def share_prompts(
    num_prompts: int, mini_batch: int, groups: ProcessGroups
) -> list[tuple[int, int]]:
    """(prompt index, its mini-batch) for this rank: an equal part of every mini-batch."""
    part = mini_batch // groups.layout.data
    first = groups.place.dp * part
    return [
        (step * mini_batch + first + k, step)
        for step in range(num_prompts // mini_batch)
        for k in range(part)
    ]


def level_over_data_ranks(
    rows: list[Sample], groups: ProcessGroups, *, shared_prefix: bool
) -> list[Sample]:
    """This rank's rows when all ranks' rows are shared anew by ``share_rows``. Collective."""
    if groups.layout.data == 1:
        return rows
    everything = [row for part in groups.from_data_ranks(rows) for row in part]
    return share_rows(everything, groups, shared_prefix=shared_prefix)


def share_rows(
    everything: Sequence[Sample], groups: ProcessGroups, *, shared_prefix: bool
) -> list[Sample]:
    """This rank's share of the global rows: about as many tokens as every other rank's, of which a
    group's prompt is one row's where it is computed once (``shared_prefix``).

    Groups stay whole and inside their mini-batch, and every rank gets equally many of them: group
    statistics stay local, and no optimizer step lacks rows on a rank.
    """
    mine: list[Sample] = []
    for step in sorted({row.mini_batch for row in everything}):
        inside = [row for row in everything if row.mini_batch == step]
        costs = [row.num_tokens for row in inside]
        if shared_prefix:
            first = {row.uid: place for place, row in reversed([*enumerate(inside)])}
            for place, row in enumerate(inside):
                costs[place] -= len(row.prompt) * (place != first[row.uid])
        parts = partition_groups(costs, [row.uid for row in inside], groups.layout.data)
        mine += [inside[i] for i in sorted(parts[groups.place.dp])]
    return mine

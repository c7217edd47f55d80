"""Draws a step's samples from the engine, and shares them between the data ranks."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from tensordict import TensorDict

from ctrl_megatron.data.balance import partition_groups
from ctrl_megatron.data.tokens import TextCodec
from ctrl_megatron.errors import ServiceLost, UserError
from ctrl_megatron.graph.declarations import node
from ctrl_megatron.graph.node import NodeOutput
from ctrl_megatron.parallel.groups import ProcessGroups
from ctrl_megatron.steps.batch import (
    fields_of_samples,
    join_samples,
    make_batch,
    sample_sizes,
    samples_of,
)
from ctrl_megatron.steps.draws import StepDraw
from ctrl_megatron.steps.sample import ColumnMaker, Sample, SampleSize, weight_versions_text
from ctrl_megatron.types import Completion, SamplingParams

if TYPE_CHECKING:
    from ctrl_megatron.data.rows import Row
    from ctrl_megatron.resharding.device import Role
    from ctrl_megatron.rewards import RewardSum
    from ctrl_megatron.rollout.engine import CompletionListener
    from ctrl_megatron.steps.worker import DAGWorker, RolloutWorker

T = TypeVar("T")
V = TypeVar("V")
RowListener = Callable[["Row", Completion], None]
"""Called with every completion as soon as it is drawn, and the row that it belongs to."""
Asks = Callable[["Row"], Sequence[int]]
"""The prompt of a row, in tokens."""
EXAMPLES_PER_STEP = 6
"""Most samples of a step that the report shows."""


def begin_draw(
    worker: DAGWorker,
    rows: Sequence[int],
    *,
    mini_batch_size: int,
    attempt: int = 0,
    step: int | None = None,
    on_completion: RowListener | None = None,
    asks: Asks | None = None,
) -> StepDraw:
    """Start to draw the ``rollout.n`` samples of the worker's policy for this data rank's share of
    ``rows`` (positions in ``worker.train``), from its weights as they are now, and return.
    ``asks`` makes the prompt of a row, by default that of the data. Collective.

    The data ranks share every mini-batch of ``mini_batch_size`` prompts equally. ``attempt``
    numbers the draws of training step ``step``, by default the next one. ``on_completion`` is
    called with every completion as soon as it is drawn, on the leader's event loop.
    """
    number = worker.step if step is None else step
    version = worker.device_owner.to_engine(worker.role, worker.step)
    local = share_prompts(len(rows), mini_batch_size, worker.groups)
    table = [worker.train.rows[rows[prompt]] for prompt, _ in local]
    prompts = [list(_prompt_of(worker, rows[prompt], asks)) for prompt, _ in local]
    params = sampling_params(worker, [row.id for row in table], step=number, attempt=attempt)

    async def ask_engine() -> list[list[Completion]]:
        assert worker.engine is not None
        return await worker.engine.generate(
            prompts, params, finished=per_row_listener(table, params.n, on_completion)
        )

    groups = worker.begin_on_leader(ask_engine)
    return StepDraw(
        step=number,
        begun=worker.step,
        rows=tuple(rows),
        attempt=attempt,
        version=version,
        groups=groups,
    )


def _prompt_of(worker: DAGWorker, row: int, asks: Asks | None) -> Sequence[int]:
    return worker.train.prompts[row] if asks is None else asks(worker.train.rows[row])


def finish_draw(
    worker: DAGWorker,
    draw: StepDraw,
    *,
    mini_batch_size: int,
    on_completion: RowListener | None = None,
    asks: Asks | None = None,
) -> list[Sample]:
    """The samples of the draw, on all ranks of the model copy. Collective. Raises RuntimeError if
    other weights drew any token, unless weights may change meanwhile (``update_in_flight``).

    A draw whose engines are lost is begun anew on all ranks, from the policy's weights as they are
    now; ``on_completion`` and ``asks`` as in ``begin_draw``.
    """
    local = share_prompts(len(draw.rows), mini_batch_size, worker.groups)
    what = f"{len(local) * worker.config.actor_rollout_ref.rollout.n} texts of {draw.version}"
    try:
        answers = worker.wait_for_leader(draw.groups, f"{what} from the engines")
    except ServiceLost as lost:
        worker.device_owner.mark_lost(lost)
        worker.wait_for_draws()
        again = begin_draw(
            worker,
            draw.rows,
            mini_batch_size=mini_batch_size,
            attempt=draw.attempt,
            step=draw.step,
            on_completion=on_completion,
            asks=asks,
        )
        return finish_draw(
            worker, again, mini_batch_size=mini_batch_size, on_completion=on_completion, asks=asks
        )
    if not worker.config.actor_rollout_ref.rollout.update_in_flight:
        require_weight_version(answers, draw.version)
    return [
        Sample(
            uid=group_uid(worker, draw.step, draw.attempt, prompt),
            row_id=worker.train.rows[draw.rows[prompt]].id,
            task=worker.train.rows[draw.rows[prompt]].task,
            mini_batch=mini_batch,
            prompt=tuple(_prompt_of(worker, draw.rows[prompt], asks)),
            completion=completion,
        )
        for (prompt, mini_batch), group in zip(local, answers, strict=True)
        for completion in group
    ]


def group_uid(worker: DAGWorker, step: int, attempt: int, prompt: int) -> str:
    """The uid of the group of the ``prompt``th row of a step's draw."""
    name = f"{worker.config.trainer.experiment_name}/{step}"
    name += f"/{attempt}" if attempt else ""
    return str(uuid.uuid5(uuid.NAMESPACE_OID, f"{name}/{prompt}"))


@node(writes=())
def sync_weights(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """Push the policy's weights to the engines, if they have others. Collective.

    Every node that draws would do it too. It comes before the first of them and not after the
    update, because until then the trainer may need the device, for a save or a validation.
    """
    worker.device_owner.to_engine(worker.role, worker.step)
    return NodeOutput()


def draw_samples(
    worker: DAGWorker,
    rows: Sequence[int],
    *,
    mini_batch_size: int,
    attempt: int = 0,
    on_completion: RowListener | None = None,
    asks: Asks | None = None,
) -> list[Sample]:
    """The samples of ``begin_draw``, once they are all there; or of the draw of ``rows`` that an
    earlier step has begun. Collective.
    """
    if worker.config.actor_rollout_ref.rollout.update_in_flight:
        # What is being drawn goes on with the policy's weights as they are now.
        worker.device_owner.to_engine(worker.role, worker.step)
    draw = worker.ahead.draw_of_rows(worker.step, rows) or begin_draw(
        worker,
        rows,
        mini_batch_size=mini_batch_size,
        attempt=attempt,
        on_completion=on_completion,
        asks=asks,
    )
    return finish_draw(
        worker, draw, mini_batch_size=mini_batch_size, on_completion=on_completion, asks=asks
    )


def per_row_listener(
    rows: Sequence[Row], n: int, on_completion: RowListener | None
) -> CompletionListener | None:
    """A listener for ``n`` completions of each of the rows, which calls ``on_completion``; None
    where that is None."""
    return (
        None
        if on_completion is None
        else lambda place, drawn: on_completion(rows[place // n], drawn)
    )


def begin_judging(worker: RolloutWorker, start: Callable[[RewardSum], None]) -> None:
    """Let ``start`` begin to judge what a batch will be asked for later, on the leader's event
    loop, unless ``rollout.streaming`` is off. What is wrong with a row is raised by that batch.
    """
    if worker.config.actor_rollout_ref.rollout.streaming and worker.rewards is not None:
        with suppress(ValueError):
            start(worker.rewards)


def generate(
    worker: RolloutWorker,
    role: Role,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    finished: CompletionListener | None = None,
) -> list[list[Completion]]:
    """``params.n`` completions of each prompt, from the role's weights, which are pushed first
    where the engine has others. ``finished`` is called on the leader's event loop.

    Collective: the ranks of a model copy pass the same arguments and get the same completions.
    Raises RuntimeError if other weights drew any token.
    """
    worker.wait_for_draws()

    async def ask_engine() -> list[list[Completion]]:
        assert worker.engine is not None
        asked = [list(prompt) for prompt in prompts]
        return await worker.engine.generate(asked, params, finished=finished) if asked else []

    what = f"{len(prompts) * params.n} texts of the {role} from the engines"
    version, answers = prepare_and_ask(
        worker, lambda: worker.device_owner.to_engine(role, worker.step), ask_engine, what
    )
    require_weight_version(answers, version)
    return answers


def prepare_and_ask(
    worker: RolloutWorker,
    prepare: Callable[[], V],
    ask: Callable[[], Coroutine[Any, Any, T]],
    what: str,
) -> tuple[V, T]:
    """(what ``prepare`` returned, the leader's answer to ``ask``), on all ranks. Collective.

    ``ask`` calls the actor's engines, and ``prepare`` makes them ready for it. If they are lost,
    all ranks do both again, so that no answer is a mixture of two attempts.
    """
    while True:
        ready = prepare()
        try:
            return ready, worker.run_on_leader(ask, what)
        except ServiceLost as lost:
            worker.device_owner.mark_lost(lost)


def require_weight_version(answers: Sequence[Sequence[Completion]], version: str) -> None:
    """RuntimeError if other weights than ``version`` drew any token."""
    wrong = {v for group in answers for c in group if (v := weight_versions_text(c)) != version}
    if wrong:
        raise RuntimeError(f"completions were drawn from {sorted(wrong)}, not from {version}")


def draw_seed(seed: int, purpose: str, *numbers: int) -> int:
    """31-bit seed of a request, from the run's ``seed``, what the request is for, and the
    ``numbers`` that distinguish requests for that purpose, such as step and attempt.

    With it a completion depends on its prompt's name (``SamplingParams.rows``: the id of the row,
    which is unique over the files of a run) and its number in the group, and on nothing else.
    """
    text = "/".join(map(str, (seed, purpose, *numbers)))
    return int.from_bytes(blake2b(text.encode(), digest_size=4).digest(), "big") >> 1


def sampling_params(
    worker: DAGWorker, rows: Sequence[str], *, step: int, attempt: int = 0
) -> SamplingParams:
    """The parameters of training's draws for prompts of the ``rows`` with these ids."""
    config, rollout = worker.config, worker.config.actor_rollout_ref.rollout
    # What a policy reads may be another's draw, on which its own must not depend otherwise.
    purpose = "train" if worker.role == "actor" else f"train/{worker.role}"
    return SamplingParams(
        max_tokens=config.data.max_response_length,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        n=rollout.n,
        seed=draw_seed(rollout.seed, purpose, step, attempt),
        rows=tuple(rows),
        stop_token_ids=tuple(worker.codec.eos_token_ids),
    )


def greedy_params(codec: TextCodec, max_tokens: int) -> SamplingParams:
    """Parameters for the likeliest completion of each prompt in the tokens of ``codec``, without
    log-probs: no model is trained on it.
    """
    stop = tuple(codec.eos_token_ids)
    return SamplingParams(
        max_tokens=max_tokens, temperature=0.0, n=1, stop_token_ids=stop, log_probs=False
    )


def validation_params(worker: RolloutWorker, row_ids: Sequence[str]) -> SamplingParams:
    """Parameters for the texts of validation rows (``rollout.val_kwargs``): the same draws in every
    validation of a run.
    """
    rollout = worker.config.actor_rollout_ref.rollout
    keys = rollout.val_kwargs
    params = greedy_params(worker.codec, worker.config.data.max_response_length)
    if not keys.temperature:
        return params
    return replace(
        params,
        n=keys.n,
        temperature=keys.temperature,
        top_p=keys.top_p,
        top_k=keys.top_k,
        seed=draw_seed(rollout.seed, "validation"),
        rows=tuple(row_ids),
    )


def draw_arguments(worker: DAGWorker, batch: TensorDict) -> dict[str, Any]:
    """The arguments of ``draw_samples`` for a batch of rows: those of a step, whose mini-batches
    the data ranks share, or those of a round of dynamic sampling, which has its number in
    ``attempt``.
    """
    rows = batch["row"].tolist()
    if "attempt" in batch:
        return {"rows": rows, "mini_batch_size": len(rows), "attempt": int(batch["attempt"][0])}
    size = worker.config.actor_rollout_ref.actor.ppo_mini_batch_size
    return {"rows": rows, "mini_batch_size": size}


def node_output_of_samples(
    worker: DAGWorker,
    samples: list[Sample],
    measure: Callable[[Sequence[Sample]], dict[str, torch.Tensor]],
    *makers: ColumnMaker,
) -> NodeOutput:
    """The output of a node that drew ``samples``, this rank's: their batch with the columns of
    ``makers``, and as metrics the means of ``measure`` over all ranks. Collective."""
    batch = make_batch(samples, pad_token_id=worker.codec.pad_token_id)
    for name, column in fields_of_samples(samples, *makers).items():
        batch[name] = column
    return NodeOutput(batch=batch, metrics=worker.global_means(measure(samples)))


def length_metrics(samples: Sequence[Sample], prefix: str) -> dict[str, torch.Tensor]:
    """(B,) float32 each: tokens that the model drew of every response, and 1 where ``max_tokens``
    cut it.
    """
    cut = [float(s.completion.finish_reason == "length") for s in samples]
    return {
        f"{prefix}/length": torch.tensor([float(s.length) for s in samples]),
        f"{prefix}/cut_rate": torch.tensor(cut),
    }


def validation_batches(worker: RolloutWorker) -> list[list[int]]:
    """Positions of this data rank's validation rows, in batches of ``data.val_batch_size`` rows
    over all ranks.

    Every rank gets the same number of batches, because generating is collective.
    """
    assert worker.validation is not None
    size, total = worker.config.data.val_batch_size, len(worker.validation.rows)
    place, layout = worker.groups.place, worker.groups.layout
    return [
        list(range(start, min(start + size, total)))[place.dp :: layout.data]
        for start in range(0, total, size)
    ]


def rates_by_set(
    sets: Mapping[str, Collection[str]],
    results: Sequence[tuple[str, T]],
    rates: Callable[[list[T]], Mapping[str, float]],
) -> dict[str, float]:
    """``rates`` over all ``results``, which are pairs of a row's id and a result; and, with the
    prefix ``NAME/``, over the results of the rows in each of ``sets``.
    """
    by_name = dict(rates([result for _, result in results]))
    for name, ids in sets.items():
        of_set = rates([result for row, result in results if row in ids])
        by_name |= {f"{name}/{rate}": value for rate, value in of_set.items()}
    return by_name


def gather_samples(worker: DAGWorker, batch: TensorDict) -> list[Sample]:
    """The samples of all data ranks in a batch of the worker's policy, on every rank, wherever
    another policy has its rows. Collective."""
    return [one for part in worker.groups.gather_data_ranks(samples_of(batch)) for one in part]


def share_prompts(
    num_prompts: int, mini_batch: int, groups: ProcessGroups
) -> list[tuple[int, int]]:
    """This data rank's equal part of every mini-batch: pairs of a prompt's index and the number of
    its mini-batch.
    """
    size = mini_batch // groups.layout.data
    first = groups.place.dp * size
    return [
        (step * mini_batch + first + k, step)
        for step in range(num_prompts // mini_batch)
        for k in range(size)
    ]


def balance(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """Share the rows of all data ranks by ``share_rows``. Collective. UserError for a field whose
    rows cannot be padded to another length.
    """
    groups = worker.groups
    if groups.layout.data == 1:
        return NodeOutput()
    parts = groups.gather_data_ranks(batch)
    sizes = [size for part in parts for size in sample_sizes(part)]
    rows = share_rows(sizes, groups, shared_prefix=worker.config.shares_prefixes)
    dealt = join_samples(parts, pad_token_id=worker.codec.pad_token_id, rows=rows)
    if lost := [str(name) for name, _ in batch.items() if name not in dealt]:
        raise UserError(
            f"the node balance moves samples to other ranks, and the fields "
            f"{', '.join(sorted(lost))} have neither one value per sample nor one per "
            "response token",
            remedy="write them in a node after balance",
        )
    return NodeOutput(batch=dealt, moved=rows)


def share_rows(
    everything: Sequence[SampleSize], groups: ProcessGroups, *, shared_prefix: bool
) -> list[int]:
    """This data rank's share of the samples of all ranks, as numbers of ``everything``: about as
    many tokens as every other rank's. With ``shared_prefix`` the prompt of a group counts once, as
    it is computed.

    As ``deal_rows`` otherwise.
    """
    parts = deal_rows(everything, groups.layout.data, shared_prefix=shared_prefix)
    return parts[groups.place.dp]


def deal_rows(
    everything: Sequence[SampleSize], ranks: int, *, shared_prefix: bool
) -> list[list[int]]:
    """The share of each of ``ranks`` data ranks, as numbers of ``everything``.

    Groups stay whole and inside their mini-batch, and every rank gets equally many of them, or one
    less where they cannot be shared equally: group statistics stay local, and every optimizer step
    has rows on every rank.
    """
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    for step in sorted({row.mini_batch for row in everything}):
        inside = [number for number, row in enumerate(everything) if row.mini_batch == step]
        costs, seen = list[int](), set[str]()
        for row in (everything[number] for number in inside):
            paid = shared_prefix and row.uid in seen
            costs.append(row.response + (0 if paid else row.prompt))
            seen.add(row.uid)
        uids: list[object] = [everything[number].uid for number in inside]
        # Empty groups complete the last share.
        missing = range(-len(set(uids)) % ranks)
        parts = partition_groups([*costs, *(0.0 for _ in missing)], [*uids, *missing], ranks)
        for rows, part in zip(dealt, parts, strict=True):
            rows += [inside[i] for i in sorted(part) if i < len(inside)]
    return dealt

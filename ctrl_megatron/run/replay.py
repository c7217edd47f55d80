"""Repeats a dumped step: its update on any layout, or its judging.

The update starts from the recorded texts and rewards and walks the run's own graph, without the
nodes that draw and judge. It needs the weights before the step: a checkpoint, or, for the first
step, the models that the run began with.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict

from ctrl_megatron.background import BackgroundLoop
from ctrl_megatron.checkpoint.files import write_text_atomically
from ctrl_megatron.checkpoint.hf import load_hf
from ctrl_megatron.checkpoint.store import STATE_FILE, Checkpoint, CheckpointStore
from ctrl_megatron.config import Config
from ctrl_megatron.data.prompt_table import PromptTable
from ctrl_megatron.data.tokens import TextCodec
from ctrl_megatron.errors import UserError
from ctrl_megatron.graph.columns import select_rows, texts
from ctrl_megatron.graph.executor import Executor
from ctrl_megatron.graph.graph import NodeRole, NodeType, TaskGraph
from ctrl_megatron.graph.node import Node
from ctrl_megatron.parallel.groups import ProcessGroups
from ctrl_megatron.record.dump import ROW_ID, Dump
from ctrl_megatron.resharding.device import policy_role
from ctrl_megatron.rewards import RewardItem, RewardSum, Scores
from ctrl_megatron.rewards.build import build_reward_sum
from ctrl_megatron.rewards.plan import plan_rewards
from ctrl_megatron.run.build import build_kl_controller, build_policies, build_value_model
from ctrl_megatron.run.replay_comparison import FieldGap, StepComparison, largest_gaps, metric_pairs
from ctrl_megatron.run.session import Session, session
from ctrl_megatron.sandbox import EmbeddedSandbox, SandboxLimits
from ctrl_megatron.steps.batch import data_rows_of, sample_sizes, tensor_fields
from ctrl_megatron.steps.ctrl import judge_revisions
from ctrl_megatron.steps.dynamic_sampling import DynamicSampling
from ctrl_megatron.steps.grpo import reward_completions
from ctrl_megatron.steps.sample import (
    REVISION_COLUMNS,
    TURN_COLUMNS,
    CriticisedProgram,
    Revision,
    Sample,
)
from ctrl_megatron.steps.sampling import share_rows
from ctrl_megatron.steps.worker import DAGWorker
from ctrl_megatron.types import Completion

FOLDER, RESULT = "replay", "replay.json"


# The update


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StartWeights:
    """The weights that the step's update changed."""

    checkpoint: Checkpoint | None = None
    directory: Path | None = None
    """A Hugging Face directory. Without both: the models that the configuration names."""

    def __str__(self) -> str:
        if self.checkpoint is not None:
            return str(self.checkpoint.path)
        return str(self.directory or "the models that the run began with")


def find_start_weights(dump: Dump, config: Config, weights: Path | None) -> StartWeights:
    """Where the weights before the dumped step are; ``weights`` is what the user names.

    Raises UserError, with the steps that can be replayed, if there are none.
    """
    before = dump.step - 1
    if weights is not None and (weights / STATE_FILE).is_file():
        name = weights.absolute().name
        if name != f"global_step_{before}":
            raise UserError(
                f"step {dump.step} was computed from the weights after step {before}, and "
                f"{weights} is {name}",
                key="--weights",
                remedy=f"name the checkpoint global_step_{before}",
            )
        return StartWeights(checkpoint=Checkpoint(path=weights, step=before))
    if weights is not None:
        if config.needs_value_model:
            raise UserError(
                f"{weights} is no checkpoint, and the step also trains a value model",
                key="--weights",
                remedy=f"name the checkpoint global_step_{before}, which holds both models",
            )
        if config.refreshes_reference:
            raise UserError(
                f"{weights} is no checkpoint, and the reference had weights of its own",
                key="--weights",
                remedy=f"name the checkpoint global_step_{before}, which holds the reference",
            )
        if config.actor_rollout_ref.model.lora_rank:
            raise UserError(
                f"{weights} is no checkpoint, and adapters need their base beside them",
                key="--weights",
                remedy=f"name the checkpoint global_step_{before}, which holds the adapters",
            )
        return StartWeights(directory=weights)
    if before == 0:
        return StartWeights()
    folder = dump.run_dir / "checkpoints"
    store = CheckpointStore(folder, keep=-1, side_files=folder)
    known = {one.step: one for one in store.finished_checkpoints()} if folder.is_dir() else {}
    if before in known:
        return StartWeights(checkpoint=known[before])
    possible = ", ".join(str(step + 1) for step in (0, *known))
    raise UserError(
        f"step {dump.step} was computed from the weights after step {before}, of which {folder} "
        f"has no checkpoint; steps that can be replayed: {possible}",
        remedy=f"name the weights after step {before} with --weights (a checkpoint or a Hugging "
        "Face directory), or train with trainer.save_freq=1 where steps are dumped",
    )


def replay_update(
    config: Config, graph: TaskGraph, dump: Dump, start: StartWeights
) -> StepComparison | None:
    """Run the nodes for which ``uses_judged_samples`` is true over the dumped batch, on the ranks
    that the launcher started; rank 0 writes ``replay.json`` into the directory of ``config``. None
    if a signal stopped it. Collective.
    """
    comparisons: list[StepComparison] = []
    policies, own = len(config.agents), config.agents[dump.policy]
    # The policy's own layout, and no other's.
    with session(own) as run:
        worker = _worker(run, graph, dump, start)
        indices = samples_of_rank(dump.batch, run.groups, own)
        batch = TensorDict(
            select_rows([dict(dump.batch.items())], indices), batch_size=[len(indices)]
        )
        recorded = tensor_fields(batch)
        executor = Executor(
            graph,
            worker,
            agents=(worker,) * policies,
            runs=lambda node: node.agent_group == dump.policy and uses_judged_samples(node),
        )
        _, metrics = executor.run_step(batch.copy())
        after = executor.batches[dump.policy]
        recorded |= {name: value[indices] for name, value in dump.updated.items()}
        gaps = _gaps(recorded, tensor_fields(after), batch["response_mask"])
        parts = run.groups.gather_data_ranks((indices, gaps))
        # A replay has no engines, so it pushes no weights.
        computed = {n: value for n, value in metrics.items() if not n.startswith("sync/")}
        comparison = StepComparison(
            metrics=metric_pairs(dump.metrics or {}, computed), fields=_by_sample(parts)
        )
        if run.groups.is_first:
            path = Path(config.trainer.run_dir) / RESULT
            write_text_atomically(path, json.dumps(comparison.to_json(), indent=1))
        comparisons.append(comparison)
        worker.close()
        run.watch.stop_watching_others()
    return comparisons[0] if comparisons else None


def uses_judged_samples(node: Node) -> bool:
    """Whether the node works with drawn and judged samples: it neither draws nor runs aside."""
    draws = node.node_role in (NodeRole.ROLLOUT, NodeRole.DYNAMIC_SAMPLING)
    return not (draws or node.is_async or node.node_type is NodeType.MODEL_INFERENCE)


def _worker(run: Session, graph: TaskGraph, dump: Dump, start: StartWeights) -> DAGWorker:
    config, groups = run.config, run.groups
    role = policy_role(dump.policy)
    policy, reference = build_policies(config, groups, dump.total_steps, None, role)
    value = build_value_model(config, groups, dump.total_steps)
    worker = DAGWorker(
        config=config,
        groups=groups,
        background=run.background,
        stop=run.stop,
        role=role,
        codec=TextCodec(config.actor_rollout_ref.model.tokenizer),
        train=_table(dump),
        validation=None,
        draw=_draw_nothing,
        engine=None,
        owner=None,
        max_model_len=config.max_model_len,
        rewards=None,
        reward_weights=plan_rewards(config, graph.required_rewards).weights,
        actor=policy,
        reference=reference,
        value=value,
        kl_controller=build_kl_controller(config),
        peak_flops=1.0,
        step=dump.step - 1,
    )
    if start.checkpoint is not None:
        state = CheckpointStore.load(worker.saved_models, start.checkpoint).state
        controller = f"{role}/kl_controller" if dump.policy else "kl_controller"
        worker.kl_controller.load_state_dict(state[controller])
    elif start.directory is not None:
        load_hf(policy, start.directory)
        policy.start_optimizer()
    return worker


def _draw_nothing(count: int) -> list[int]:
    raise RuntimeError("a replayed step draws no rows")


def _table(dump: Dump) -> PromptTable:
    """The dump's rows; nothing that is replayed reads their prompts as tokens."""
    return PromptTable(rows=dump.rows, prompts=((),) * len(dump.rows), dropped=0)


def samples_of_rank(batch: TensorDict, groups: ProcessGroups, config: Config) -> list[int]:
    """The samples of the dump that this data rank computes: whole groups, shared as in training."""
    sizes = [dataclasses.replace(size, uid=group_of_uid(size.uid)) for size in sample_sizes(batch)]
    return share_rows(sizes, groups, shared_prefix=config.shares_prefixes)


def group_of_uid(uid: str) -> str:
    """The uid that a sample's group was drawn with, which ``place_scores`` changes where the sample
    has no reward."""
    return uid.partition("/unjudged/")[0]


def _gaps(
    recorded: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor], mask: torch.Tensor
) -> dict[str, list[float]]:
    """``largest_gaps`` of the fields that the replay has computed and the record has too."""
    computed = [n for n in recorded if n in after and after[n].data_ptr() != recorded[n].data_ptr()]
    return {
        name: largest_gaps(recorded[name], after[name], mask)
        for name in computed
        if after[name].shape in (mask.shape, mask.shape[:1])
    }


def _by_sample(
    parts: Sequence[tuple[Sequence[int], Mapping[str, Sequence[float]]]],
) -> tuple[FieldGap, ...]:
    names = dict.fromkeys(name for _, gaps in parts for name in gaps)
    return tuple(
        FieldGap(
            name=name,
            gaps={n: gap for rows, gaps in parts for n, gap in zip(rows, gaps[name], strict=True)},
        )
        for name in names
    )


# The judging


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplayJudgingWorker:
    """The attributes of a ``DAGWorker`` that judging nodes use."""

    config: Config
    train: PromptTable
    rewards: RewardSum
    reward_weights: Mapping[str, float]

    async def score(self, items: Sequence[RewardItem]) -> Scores:
        return await self.rewards.score(items)


def replay_judging(config: Config, graph: TaskGraph, dump: Dump) -> StepComparison:
    """Judge the recorded texts again in this process and compare the rewards. Starts a sandbox if
    the run used its own.

    Raises UserError for a dump without rows or without texts that are rewarded.
    """
    nodes = [node for node in graph.nodes.values() if node.agent_group == dump.policy]
    judging: list[Any] = [node.run for node in nodes if node.is_async]
    for node in nodes:
        judging += node.executable.judges if isinstance(node.executable, DynamicSampling) else []
    if not dump.rows:
        raise UserError(f"{dump.path} has no rows: the batch has no field {ROW_ID}")
    background = BackgroundLoop()
    plan = plan_rewards(config, graph.required_rewards)
    own = plan.runs_programs and config.reward.provider == "local"
    sandbox, token = None, secrets.token_urlsafe(32)
    try:
        if own and not config.sandbox.endpoint:
            sandbox = EmbeddedSandbox.start(
                workers=config.sandbox.workers,
                isolation=config.sandbox.isolation,  # type: ignore[arg-type]
                limits=SandboxLimits(problem_seconds=config.sandbox.problem_seconds),
                token=token,
            )
        rewards = build_reward_sum(
            config,
            plan,
            sandbox_endpoint=config.sandbox.endpoint or (sandbox.endpoint if sandbox else ""),
            sandbox_token=token if sandbox else None,
            rows=dump.rows,
            tokenizer=TextCodec(config.actor_rollout_ref.model.tokenizer).tokenizer,
        )
        judge = ReplayJudgingWorker(
            config=config, train=_table(dump), rewards=rewards, reward_weights=plan.weights
        )
        batch, fields = dump.batch.copy(), dict[str, Any]()
        # The recorded mask of a sample that was not judged is empty.
        batch["response_mask"] = batch["attention_mask"][:, batch["prompts"].shape[1] :].bool()
        for prefix in ("", "greedy_"):
            if samples := recorded_samples(batch, judge.train, prefix):
                batch[f"{prefix}sample"] = NonTensorStack(*samples)
        for judges in judging or _judging_of(dump):
            fields |= background.run(judges(worker=judge, batch=batch)).fields
        background.run(rewards.close())
    finally:
        background.close()
        if sandbox is not None:
            sandbox.stop()
    mask = dump.batch["response_mask"]
    replayed = {name: value for name, value in fields.items() if isinstance(value, torch.Tensor)}
    gaps = _gaps(tensor_fields(dump.batch), replayed, mask)
    gaps.pop("cached", None)  # says where a verdict came from, not what it is
    return StepComparison(metrics=(), fields=_by_sample([(range(len(mask)), gaps)]))


def recorded_samples(batch: TensorDict, train: PromptTable, prefix: str) -> list[Sample]:
    """The records that a dump's columns, whose names begin with ``prefix``, were made of, as far as
    judging reads them; none where it has no such columns."""
    texts_in = next((n for n in ("critique", "completion") if f"{prefix}{n}" in batch), None)
    if texts_in is None:
        return []
    names = (texts_in, "valid", "judged_correct", *REVISION_COLUMNS, *TURN_COLUMNS)
    columns = {n: batch[f"{prefix}{n}"].tolist() for n in names if f"{prefix}{n}" in batch}
    uids = texts(batch["uid"])
    samples = []
    for i, row in enumerate(data_rows_of(train, batch)):
        one, revision = {name: values[i] for name, values in columns.items()}, None
        if "revision" in one:
            revision = Revision(
                text=one["revision"],
                fits=one["revision_fits"],
                failure=one["revision_failure"],
                version=one["revision_version"],
            )
        turns: dict[str, Any] = {}
        if "turn" in one:
            known = one["parent"] or one["program"]
            program = CriticisedProgram(text=one["program"]) if known else None
            turns = {"turn": int(one["turn"]), "parent": one["parent"], "program": program}
        # The length of a greedy critique is not rewarded.
        tokens = () if prefix else batch["responses"][i][batch["response_mask"][i]].tolist()
        samples.append(
            Sample(
                uid=group_of_uid(uids[i]),
                row_id=row.id,
                task=row.task,
                completion=Completion(
                    token_ids=tuple(tokens), log_probs=(), finish_reason="stop", spans=()
                ),
                text=one[texts_in],
                judgment=one["judged_correct"] if one.get("valid") else None,
                revision=revision,
                **turns,
            )
        )
    return samples


def _judging_of(dump: Dump) -> list[Any]:
    """The judging functions of a graph whose drawing node judges as well."""
    if "revision" in dump.batch:
        return [judge_revisions]
    if "completion" in dump.batch:
        return [reward_completions]
    raise UserError(f"{dump.path} has neither revisions nor completions, and no node judges them")


def sample_names(dump: Dump) -> list[str]:
    """Each sample's number and, where it has one, the row that it is about."""
    ids = texts(dump.batch[ROW_ID]) if ROW_ID in dump.batch else []
    return [
        f"sample {number}" + (f" of row {ids[number]}" if ids else "")
        for number in range(len(dump.batch))
    ]

"""CTRL's training step, from prompts to new weights, in the order in which it runs.

Source: CTRL (arXiv 2502.03492). The actor criticises first solutions, the frozen proxy revises them
after the critique (``chain``), the tests of the revision give the critique its reward, and the
actor is trained on it.

B rows are the critiques of this data rank; P and R are their longest prompt and response, in
tokens. Every function runs on all ranks of a model copy, except ``judge_revisions``, which runs on
the leader's event loop beside the log-probs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict

from ctrl_megatron.algorithms import (
    ADV_ESTIMATOR_REGISTRY,
    ESTIMATOR_INPUTS,
    POLICY_LOSS_REGISTRY,
    compute_rollout_correction,
    estimate_advantages,
    explained_variance,
    explained_variance_sums,
    get_adv_estimator,
    reads_reward_parts,
    required_estimator_inputs,
    rollout_mismatch_metrics,
    rollout_mismatch_sums,
    rows_in_varied_groups,
    subtract_kl_penalty,
)
from ctrl_megatron.algorithms.rollout_correction import RolloutMismatchSums
from ctrl_megatron.config import Config
from ctrl_megatron.config.options import function_options
from ctrl_megatron.errors import UserError
from ctrl_megatron.graph.columns import texts
from ctrl_megatron.graph.declarations import (
    ADVANTAGES,
    CORRECTION,
    DISTILLATION,
    DRAWN,
    KL_IN_REWARD,
    LOSS,
    REFRESH,
    always,
    node,
)
from ctrl_megatron.graph.graph import Pipeline, StepReport, TaskGraph, policy_node_id
from ctrl_megatron.graph.node import NodeOutput
from ctrl_megatron.graph.siirl_names import NodeRole, NodeType
from ctrl_megatron.models.micro_batch import EXPERT_ROUTES
from ctrl_megatron.models.value import ValueModel
from ctrl_megatron.rewards.items import LARGEST_REWARD
from ctrl_megatron.rewards.registry import MODEL_REWARD, raise_no_rewards
from ctrl_megatron.steps.ahead import begin_draws_ahead, report_staleness
from ctrl_megatron.steps.batch import data_rows_of, fields_of_samples, samples_of, tensor_fields
from ctrl_megatron.steps.chain import TRAINED, FollowUp, judge, revise, with_decoded_text
from ctrl_megatron.steps.conversation import validate_critiques
from ctrl_megatron.steps.critique_report import (
    critique_examples,
    critique_metrics,
    measure_critiques,
    revision_metrics,
)
from ctrl_megatron.steps.dynamic_sampling import add_dynamic_sampling
from ctrl_megatron.steps.greedy_baseline import (
    draw_greedy_critiques,
    judge_greedy_revisions,
    revise_greedy_critiques,
)
from ctrl_megatron.steps.losses import (
    ValueLoss,
    means_over_steps,
    mini_batches,
    select_tokens,
)
from ctrl_megatron.steps.masks import batch_for_pass, field_name_of_pass, scored_passes
from ctrl_megatron.steps.model_reward import (
    model_reward,
    required_score_fields,
    total_rewards,
    weighted_parts,
)
from ctrl_megatron.steps.routes import with_engine_routes
from ctrl_megatron.steps.sample import (
    REVISION_COLUMNS,
    Sample,
    critique_columns,
    revision_columns,
    reward_columns,
    verdict_columns,
)
from ctrl_megatron.steps.sampling import (
    balance,
    draw_arguments,
    draw_samples,
    node_output_of_samples,
    sync_weights,
)
from ctrl_megatron.steps.teaching import (
    actor_step,
    fields_of_teacher,
    read_as_teacher,
    write_feedback_hints,
    write_program_hints,
)
from ctrl_megatron.steps.worker import DAGWorker

DRAWS: dict[str, Any] = {
    "node_type": NodeType.MODEL_INFERENCE,
    "node_role": NodeRole.ROLLOUT,
}
"""Keyword arguments of ``add_node`` for a node that draws from the engine."""
JUDGES: dict[str, Any] = {
    "node_type": NodeType.ENV_INTERACT,
    "node_role": NodeRole.REWARD,
}
"""Keyword arguments of ``add_node`` for a node that rewards on the leader's event loop."""


def ctrl_pipeline(config: Config) -> TaskGraph:
    """The graph of CTRL's step for the configuration.

    The sandbox node comes before the log-probs, and no node up to the scores depends on it, so it
    runs while they are computed. With dynamic sampling one node draws, revises and judges until
    enough groups contain different rewards; no other node runs beside it.
    """
    report = StepReport(
        metrics=critique_metrics,
        examples=critique_examples,
        validate=validate_critiques if config.data.val_files else None,
        rewards=("critic",),
    )
    pipeline = Pipeline("ctrl_training_pipeline", "critique, revise, judge, update", report=report)
    if config.algorithm.filter_groups.enable:
        drawn, judged = add_dynamic_sampling(
            pipeline,
            (generate_critiques, generate_revisions, judge_revisions),
            measure_critiques,
            (critique_columns, revision_columns, reward_columns, verdict_columns),
        )
    else:
        drawn, judged = _add_chain_nodes(pipeline, config)
    add_update_nodes(pipeline, config, drawn=drawn, judged=judged)
    return pipeline.build()


def _add_chain_nodes(pipeline: Pipeline, config: Config) -> tuple[str, list[str]]:
    """Add the nodes from prompts to verdicts; returns the last node that draws, and the nodes that
    judge.
    """
    remax = config.algorithm.adv_estimator == "remax"
    if remax and "critic" not in config.reward.reward_funcs:
        raise ValueError(
            "algorithm.adv_estimator=remax takes its baseline from the critic's reward of a greedy "
            "critique, and reward.reward_funcs has no critic; add it, or take another estimator"
        )
    drawn, judged = "generate_critiques", ["sandbox"]
    pipeline.add_node(drawn, generate_critiques, add_weight_sync(pipeline, config), **DRAWS)
    if remax:
        pipeline.add_node("greedy_critiques", draw_greedy_critiques, [drawn], **DRAWS)
        drawn = "greedy_critiques"
    pipeline.add_node("generate_revisions", generate_revisions, [drawn], **DRAWS)
    pipeline.add_node("sandbox", judge_revisions, ["generate_revisions"], **JUDGES)
    drawn = "generate_revisions"
    if remax:
        pipeline.add_node("greedy_revisions", revise_greedy_critiques, [drawn], **DRAWS)
        drawn = "greedy_revisions"
        pipeline.add_node("greedy_sandbox", judge_greedy_revisions, [drawn], **JUDGES)
        judged.append("greedy_sandbox")
    return add_next_draw_and_balance(pipeline, config, drawn, begin_next_critiques), judged


def add_weight_sync(pipeline: Pipeline, config: Config) -> list[str]:
    """Add the node that pushes the weights, for the first node that draws to depend on. None with
    ``rollout.staleness``, where ``generate_ahead`` pushes, once nothing is being drawn.
    """
    if config.actor_rollout_ref.rollout.staleness:
        return []
    pipeline.add_node("sync_weights", sync_weights, **DRAWS)
    return ["sync_weights"]


def add_next_draw_and_balance(
    pipeline: Pipeline, config: Config, drawn: str, begin_next: Callable[..., NodeOutput]
) -> str:
    """Add the nodes after the last one that draws: ``begin_next``, where the next step's samples
    are drawn while this one trains, and the balance of the data ranks. Returns the last node.
    """
    if config.actor_rollout_ref.rollout.staleness:
        pipeline.add_node("generate_ahead", begin_next, [drawn], **DRAWS)
        drawn = "generate_ahead"
    pipeline.add_node("balance", balance, [drawn], **DRAWS)
    return "balance"


def add_update_nodes(
    pipeline: Pipeline,
    config: Config,
    *,
    drawn: str,
    judged: list[str],
    corrects: bool = True,
    agent_group: int = 0,
) -> None:
    """Add the second half of a step: from the responses of the node ``drawn`` and the rewards of
    the nodes ``judged`` to new weights in the trainer, which engines get before the next step draws
    (``add_weight_sync``). Every built-in pipeline ends with it.
    ``corrects`` says whether the engine's log-probs are compared with the trainer's. The nodes of a
    further policy, ``agent_group``, have its name before theirs: ``agent1_actor_update``.

    Without a setting that needs ``old_log_probs`` before the update (``needs_old_log_prob``), the
    update computes them itself, and the node for them is left out.
    """
    forward: dict[str, Any] = {"node_type": NodeType.MODEL_TRAIN, "only_forward_compute": True}
    train: dict[str, Any] = {"node_type": NodeType.MODEL_TRAIN}
    actor, advantage, reward = NodeRole.ACTOR, NodeRole.ADVANTAGE, NodeRole.REWARD
    added: dict[str, str] = {}

    def add(name: str, function: Callable[..., Any], after: list[str], **kinds: Any) -> None:
        added[name] = policy_node_id(name, agent_group)
        deps = [added.get(node, node) for node in after]
        pipeline.add_node(added[name], function, deps, agent_group=agent_group, **kinds)

    before, drawn_last = needs_old_log_prob(config), drawn
    if before:
        add("old_log_prob", old_log_prob, [drawn], node_role=actor, **forward)
        drawn = "old_log_prob"
    add("ref_log_prob", ref_log_prob, [drawn_last], node_role=NodeRole.REFERENCE, **forward)
    hinted = list[str]()
    if config.algorithm.distillation.has_hint:
        if config.algorithm.distillation.tells_feedback:
            add("hints", write_feedback_hints, [drawn_last], **JUDGES)
            # The scores report how the judge fared with all programs of the step.
            judged = [*judged, "hints"]
        else:
            add("hints", write_program_hints, [drawn_last], node_role=reward)
        hinted = ["hints"]
    if config.needs_value_model:
        add("values", compute_values, [drawn_last], node_role=NodeRole.CRITIC, **forward)
    if config.needs_reward_model and not config.algorithm.filter_groups.enable:
        inference: dict[str, Any] = {"node_type": NodeType.MODEL_INFERENCE}
        add(MODEL_REWARD, model_reward, [drawn_last], node_role=NodeRole.REWARD_MODEL, **inference)
        judged = [*judged, MODEL_REWARD]
    add("scores", place_scores, judged, node_role=reward)
    ready = ["advantages"]
    if before and corrects:
        add("rollout_correction", rollout_correction, ["scores", drawn], node_role=advantage)
        ready.append("rollout_correction")
    inputs = ["scores", "ref_log_prob", *(["old_log_prob"] if before else [])]
    add("token_rewards", token_rewards, inputs, node_role=reward)
    inputs = ["token_rewards", "values"] if config.needs_value_model else ["token_rewards"]
    add("advantages", advantages, inputs, node_role=advantage)
    if (taught := config.algorithm.distillation).is_on:
        role = NodeRole.REFERENCE if taught.teacher == "reference" else actor
        after = [*hinted, *(["scores"] if taught.on != "all" else []), drawn_last]
        add("teacher", read_as_teacher, after, node_role=role, **forward)
        ready.append("teacher")
    if config.needs_value_model:
        add("critic_update", update_critic, ready, node_role=NodeRole.CRITIC, **train)
    add("actor_update", update_actor, ready, node_role=actor, **train)
    if corrects and not before:
        add("rollout_correction", rollout_correction, ["actor_update"], node_role=advantage)
    if config.refreshes_reference:
        add("refresh_reference", refresh_reference, ["actor_update"], node_role=actor, **train)
    if not agent_group:
        add("report_weight_sync", report_weight_sync, ["actor_update"], node_role=actor)


def needs_old_log_prob(config: Config) -> bool:
    """Whether a setting needs ``old_log_probs`` before the update."""
    return setting_that_needs_old_log_probs(config) is not None


def setting_that_needs_old_log_probs(config: Config) -> str | None:
    """The setting that needs ``old_log_probs`` before the update; None where there is none.

    It is a second optimizer step on the batch, a KL in the reward, a correction by the engine's
    probabilities, or a loss that chooses tokens over the whole batch.
    """
    actor, batch = config.actor_rollout_ref.actor, config.data.train_batch_size
    family, mini = "actor_rollout_ref.actor", actor.ppo_mini_batch_size
    if actor.ppo_epochs > 1:
        return f"{family}.ppo_epochs={actor.ppo_epochs}"
    if batch > mini:
        return f"data.train_batch_size={batch} above {family}.ppo_mini_batch_size={mini}"
    if config.algorithm.use_kl_in_reward:
        return "algorithm.use_kl_in_reward=true"
    if (correcting := _correcting(config)) is not None:
        return correcting
    if POLICY_LOSS_REGISTRY.get(actor.policy_loss).selection is not None:
        return f"{family}.policy_loss={actor.policy_loss}"
    if config.actor_rollout_ref.rollout.router_replay == "trainer":
        return "actor_rollout_ref.rollout.router_replay=trainer"
    return None


def _correcting(config: Config) -> str | None:
    keys = config.algorithm.rollout_correction
    for name in ("rollout_is", "rollout_rs"):
        if getattr(keys, name) != "none":
            return f"algorithm.rollout_correction.{name}={getattr(keys, name)}"
    return None


# The fields that the nodes below need (``node_fields``)


def _needs_of_correction(config: Config) -> dict[str, str]:
    setting = _correcting(config)
    before = {} if setting is None else {"old_log_probs": setting}
    return {**before, "rollout_log_probs": setting or ""}


def _needs_of_rewards(config: Config) -> dict[str, str]:
    needs = {"token_level_scores": ""}
    if config.algorithm.use_kl_in_reward:
        setting = "algorithm.use_kl_in_reward=true"
        needs |= {"old_log_probs": setting, "ref_log_prob": setting}
    return needs


def _needs_of_advantages(config: Config) -> dict[str, str]:
    name = config.algorithm.adv_estimator
    if name not in ADV_ESTIMATOR_REGISTRY:
        return {}  # the check of the key reports it
    own = required_estimator_inputs(name) & {"values", "reward_baselines"}
    setting = f"algorithm.adv_estimator={name}"
    return {"token_level_rewards": "", **dict.fromkeys(sorted(own), setting)}


def _needs_of_update(config: Config) -> dict[str, str]:
    needs = {"advantages": ""}
    if config.actor_rollout_ref.actor.use_kl_loss:
        needs["ref_log_prob"] = "actor_rollout_ref.actor.use_kl_loss=true"
    try:
        before = setting_that_needs_old_log_probs(config)
    except ValueError:
        return needs  # the check of the key reports an unknown loss
    if before is not None:
        needs["old_log_probs"] = before
    correcting = _correcting(config)
    if correcting is not None:
        needs["loss_mask"] = correcting
    return needs | fields_of_teacher(config)


# Critiques, revisions and their verdicts


@node(writes=(*DRAWN, "sample", "task", "critique", "valid", "judged_correct", "problem_id"))
def generate_critiques(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """From ``row`` (positions of the global batch) to the batch of this data rank's critiques, with
    ``critique_columns``.
    """
    samples = draw_critiques(worker, batch, TRAINED)
    return node_output_of_samples(worker, samples, measure_critiques, critique_columns)


def draw_critiques(worker: DAGWorker, batch: TensorDict, then: FollowUp) -> list[Sample]:
    """This data rank's critiques of first solutions, which ``then`` follows. Collective."""
    listener = then.revision_listener(worker)
    drawn = draw_samples(worker, **draw_arguments(worker, batch), on_completion=listener)
    return [with_decoded_text(worker, sample) for sample in drawn]


def begin_next_critiques(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """Begins the next step's critiques, with the actor's weights before this step's update."""
    begin_draws_ahead(worker, TRAINED.revision_listener(worker))
    return report_staleness(worker, batch)


@node(writes=("sample", *REVISION_COLUMNS), uses=("proxy",))
def generate_revisions(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """From ``sample`` to the samples with the frozen proxy's revisions, and ``revision_columns``;
    none for critiques without a judgment.
    """
    samples = samples_of(batch)
    revised = revise(worker, samples, data_rows_of(worker.train, batch))
    metrics = worker.global_means(revision_metrics(revised))
    return NodeOutput(fields=fields_of_samples(revised, revision_columns), metrics=metrics)


@node(writes=("sample", "score", "pass_rate", "cached", "detail"), uses=("rewards",))
async def judge_revisions(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """From ``sample`` to the judged samples, ``reward_columns`` and ``verdict_columns``. Runs
    beside the log-probs.
    """
    samples = samples_of(batch)
    judged = await judge(worker, samples, data_rows_of(worker.train, batch))
    return NodeOutput(fields=fields_of_samples(judged, reward_columns, verdict_columns))


# Log-probs and values


@node(writes=("old_log_probs", EXPERT_ROUTES))
def old_log_prob(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """``old_log_probs`` (B, R) float32: the actor's log-probs before the update; of a
    masked-diffusion model its coupled scores, for every pass of the update (``pipeline.masks``).
    With ``router_replay=trainer`` also ``expert_routes`` (B, P+R, layers with experts, top_k).
    """
    config, fields, entropies = worker.config, dict[str, torch.Tensor](), []
    budget = config.actor_rollout_ref.log_prob_token_budget
    batch = with_engine_routes(worker, batch)
    if config.actor_rollout_ref.rollout.router_replay == "trainer":
        rows = tensor_fields(batch)
        old, entropy, routes = worker.policy.log_probs_and_routes(rows, worker.temperature, budget)
        metrics = worker.global_means({"actor/entropy": entropy[batch["response_mask"]]})
        return NodeOutput(fields={"old_log_probs": old, EXPERT_ROUTES: routes}, metrics=metrics)
    for number in scored_passes(batch, config):
        rows = tensor_fields(batch_for_pass(batch, number, config))
        fields[field_name_of_pass("old_log_probs", number)], entropy = worker.policy.log_probs(
            rows, worker.temperature, token_budget=budget
        )
        entropies.append(entropy[batch["response_mask"]])
    return NodeOutput(
        fields=fields, metrics=worker.global_means({"actor/entropy": torch.cat(entropies)})
    )


@node(needs=always("input_ids", "response_mask"), writes=("ref_log_prob",))
def ref_log_prob(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """``ref_log_prob`` (B, R) float32: the reference's log-probs; no field where the objective has
    no KL. A masked-diffusion model has scores for every pass, as in ``old_log_prob``.
    """
    if worker.reference is None or not worker.config.has_kl_to_reference:
        return NodeOutput()
    fields = {}
    for number in scored_passes(batch, worker.config):
        rows = tensor_fields(batch_for_pass(batch, number, worker.config))
        rows.pop(EXPERT_ROUTES, None)  # those of another model
        log_probs, _ = worker.reference.log_probs(rows, worker.temperature)
        fields[field_name_of_pass("ref_log_prob", number)] = log_probs
    if worker.config.actor_rollout_ref.actor.compute.param_offload and worker.has_actor:
        worker.reference.offload("weights")
    return NodeOutput(fields=fields)


@node(needs=always("input_ids", "response_mask"), writes=("values",), uses=("value",))
def compute_values(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """``values`` (B, R) float32: the return that the value model expects before each response
    token.
    """
    rows = tensor_fields(batch.exclude(EXPERT_ROUTES))
    return NodeOutput(fields={"values": require_value_model(worker).values(rows)})


def require_value_model(worker: DAGWorker) -> ValueModel:
    """The worker's value model. Raises RuntimeError where the run has none."""
    if worker.value is None:
        raise RuntimeError("a node of the pipeline uses a value model; set critic.enable=true")
    return worker.value


# Rewards and advantages


@node(
    needs=required_score_fields, writes=("token_level_scores", "rewarded", "response_mask", "uid")
)
def place_scores(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """``token_level_scores`` (B, R) float32: the weighted sum of rewards (``total_rewards``) on the
    last token of each response that the model drew.

    The rewards of single functions are reported where the batch has them (``reward/NAME``). A row
    without a reward (its sandbox failed) leaves the loss and its group: ``rewarded`` (B,) is False,
    its mask is emptied, and its uid is made unique. Raises ServiceFault where the service that
    judges failed too often (``RolloutWorker.judged_rate_metrics``), and UserError where no row has
    a reward.
    """
    judging = worker.judged_rate_metrics()
    mask, total = batch["response_mask"], total_rewards(worker, batch)
    if len(huge := total[total.abs() > LARGEST_REWARD]):
        raise UserError(
            f"the field score contains {float(huge[0]):g}, and a reward may be at most "
            f"{LARGEST_REWARD:g} in size",
            remedy="correct the node that writes it; NaN marks an unknown reward",
        )
    rewarded = ~total.isnan()
    if "reward_baselines" in batch:
        rewarded &= ~batch["reward_baselines"].isnan()
    scores = torch.zeros(mask.shape, dtype=torch.float32)
    # The first place of the largest count is the last token of the mask; 0 in an empty one.
    scores[torch.arange(len(mask)), mask.cumsum(dim=1).argmax(dim=1)] = total
    uids = [
        uid if ok else f"{uid}/unjudged/{i}"
        for i, (uid, ok) in enumerate(zip(texts(batch["uid"]), rewarded.tolist(), strict=True))
    ]
    parts = {n: batch[n] for n in map("reward/{}".format, worker.reward_weights) if n in batch}
    first, *others = parts or {"score": total}
    measured = {"reward/mean": batch[first], "reward/masked_rate": (~rewarded).float()}
    measured |= {name: parts[name] for name in others}
    measured |= reward_spread_metrics(batch[first] if parts else total, total, texts(batch["uid"]))
    if others:
        measured["reward/total"] = total[rewarded]
    metrics = {**worker.global_means(measured), **judging}
    if metrics["reward/masked_rate"] == 1:
        known = {first: "reward/mean", **{name: name for name in others}}
        silent = [name for name in parts if known[name] not in metrics]
        raise_no_rewards([name.removeprefix("reward/") for name in silent])
    return NodeOutput(
        fields={
            "token_level_scores": torch.where(rewarded[:, None], scores, 0.0),
            "response_mask": mask & rewarded[:, None],
            "rewarded": rewarded,
            "uid": NonTensorStack(*uids),
        },
        metrics=metrics,
    )


def reward_spread_metrics(
    rewards: torch.Tensor, scores: torch.Tensor, uids: Sequence[str]
) -> dict[str, torch.Tensor]:
    """Vectors whose means are the shares of a histogram of ``rewards``, and the share of groups
    whose ``scores`` are all equal. ``rewards`` and ``scores`` (B,) are NaN where unknown.
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
    signal = rows_in_varied_groups(scores[known], groups).tolist() if groups else []
    same = [float(not teaches) for teaches in dict(zip(groups, signal, strict=True)).values()]
    return {f"reward_share/{name}": share.float() for name, share in shares.items()} | {
        "advantage/zero_std_rate": torch.tensor(same)
    }


@node(reads=CORRECTION, needs=_needs_of_correction, writes=("loss_mask", "rollout_is_weights"))
def rollout_correction(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """``loss_mask`` (B, R) bool and, where enabled, ``rollout_is_weights`` (B, R) float32.

    Metrics compare the engine's probabilities with the trainer's. They are missing in steps of
    ``trainer.critic_warmup`` without the node ``old_log_prob``: the trainer computes none there.
    """
    if "old_log_probs" not in batch:
        return NodeOutput()
    keys = worker.config.algorithm.rollout_correction
    log_probs_and_mask = batch["old_log_probs"], batch["rollout_log_probs"], batch["response_mask"]
    correction = compute_rollout_correction(*log_probs_and_mask, **dataclasses.asdict(keys))
    local = rollout_mismatch_sums(*log_probs_and_mask, correction, keys.rollout_is_threshold)
    total = RolloutMismatchSums(
        sums=worker.groups.sum_over_data(local.sums),
        largest=torch.tensor(max(worker.groups.gather_data_ranks(float(local.largest)))),
    )
    fields = {"loss_mask": correction.response_mask}
    if correction.weights is not None:
        fields["rollout_is_weights"] = correction.weights.float()
    return NodeOutput(fields=fields, metrics=rollout_mismatch_metrics(total))


@node(reads=KL_IN_REWARD, needs=_needs_of_rewards, writes=("token_level_rewards",))
def token_rewards(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """``token_level_rewards`` (B, R) float32: the scores, minus beta times the KL where the KL is
    in the reward.
    """
    algorithm, mask = worker.config.algorithm, batch["response_mask"]
    metrics: dict[str, float] = {}
    rewards = batch["token_level_scores"]
    if "ref_log_prob" in batch and "old_log_probs" in batch:
        metrics = kl_to_reference_metric(worker, batch, batch["old_log_probs"])
    if algorithm.use_kl_in_reward:
        beta = worker.kl_controller.value
        rewards, kl = subtract_kl_penalty(
            rewards,
            batch["old_log_probs"],
            batch["ref_log_prob"],
            mask,
            beta=beta,
            kl_penalty=algorithm.kl_penalty,
        )
        mean = worker.global_means({"kl": kl[mask]})["kl"]
        rows = worker.config.data.train_batch_size * worker.config.actor_rollout_ref.rollout.n
        worker.kl_controller.update(current_kl=mean, n_steps=rows)
        metrics |= {"actor/reward_kl_penalty": mean, "actor/kl_coef": beta}
    return NodeOutput(fields={"token_level_rewards": rewards}, metrics=metrics)


def kl_to_reference_metric(
    worker: DAGWorker, batch: TensorDict, log_probs: torch.Tensor
) -> dict[str, float]:
    """``actor/kl_to_reference``: mean over tokens of ``log_probs`` (B, R), the actor's, minus the
    reference's.
    """
    gap = (log_probs - batch["ref_log_prob"])[batch["response_mask"]]
    return worker.global_means({"actor/kl_to_reference": gap})


@node(reads=ADVANTAGES, needs=_needs_of_advantages, writes=("advantages", "returns"))
def advantages(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """``advantages``, ``returns`` (B, R) float32 by the configured estimator, which gets the inputs
    that it has parameters for, and its own options. Every group is whole on its data rank.
    """
    algorithm, mask = worker.config.algorithm, batch["response_mask"]
    offered = {
        "token_level_rewards": batch["token_level_rewards"],
        "response_mask": mask,
        "index": texts(batch["uid"]),
        "gamma": algorithm.gamma,
        "lam": algorithm.lam,
        "norm_adv_by_std_in_grpo": algorithm.norm_adv_by_std_in_grpo,
        "weight_factor_in_cpgd": algorithm.weight_factor_in_cpgd,
    }
    for name in ("values", "reward_baselines"):
        if name in batch:
            offered[name] = batch[name]
    if reads_reward_parts(algorithm.adv_estimator):
        offered["reward_parts"], offered["reward_weights"] = weighted_parts(worker, batch)
    offered |= function_options(
        get_adv_estimator(algorithm.adv_estimator),
        algorithm.adv_estimator_options,
        "algorithm.adv_estimator_options",
        inputs=ESTIMATOR_INPUTS,
    )
    estimates, returns = estimate_advantages(
        algorithm.adv_estimator, offered, reduce=worker.groups.sum_over_data
    )
    metrics = worker.global_means({"advantage/mean_abs": estimates[mask].abs()})
    return NodeOutput(fields={"advantages": estimates, "returns": returns}, metrics=metrics)


# The update


@node(needs=always("values", "returns", "response_mask", "mini_batch"), writes=(), uses=("value",))
def update_critic(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """Train the value model for ``critic.ppo_epochs`` passes over the mini-batches; metrics are
    means over the optimizer steps.

    ``critic/explained_variance`` is computed from the values before the update.
    """
    config, model = worker.config, require_value_model(worker)
    steps = []
    loss = ValueLoss(
        config.critic.cliprange_value,
        loss_agg_mode=config.actor_rollout_ref.actor.loss_agg_mode,
        response_limit=config.data.max_response_length,
    )
    # Tokens that the rollout correction removes from the actor's loss still have returns to learn.
    learned = batch.exclude("loss_mask", EXPERT_ROUTES)
    for _ in range(config.value_epochs):
        steps += [model.step(rows, loss) for rows in mini_batches(learned, worker.groups)]
    sums = worker.groups.sum_over_data(
        explained_variance_sums(batch["values"], batch["returns"], batch["response_mask"])
    )
    metrics = means_over_steps(steps, "critic")
    explained = explained_variance(sums)
    if explained == explained:
        # NaN where the returns do not vary.
        metrics["critic/explained_variance"] = explained
    return NodeOutput(metrics=metrics)


@node(reads=(*LOSS, *DISTILLATION), needs=_needs_of_update, writes=("old_log_probs",))
def update_actor(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """Train the actor for ``ppo_epochs`` passes over the mini-batches; metrics are means over the
    optimizer steps.

    ``actor/ppo_kl_first`` is the first step's ``ppo_kl``, which must be 0: its weights are those
    that computed ``old_log_probs``. Without ``old_log_probs`` in the batch there is one optimizer
    step, and the field gets the log-probs of that step. During ``trainer.critic_warmup`` the actor
    is not trained. An optimizer step that is skipped (``ParallelModel.step``) has no metrics.
    """
    if not worker.actor_learns:
        return NodeOutput()
    actor, steps = worker.config.actor_rollout_ref.actor, []
    if "old_log_probs" not in batch and needs_old_log_prob(worker.config):
        raise ValueError(
            "the batch has no old_log_probs, which this configuration needs before the update; "
            "add the node old_log_prob to the pipeline"
        )
    batch = with_engine_routes(worker, batch)
    make_step, vectors = actor_step(worker, batch)
    if "old_log_probs" not in batch:
        # The step's own forward pass computes what the node ``old_log_prob`` would.
        rows, policy = tensor_fields(batch_for_pass(batch, 0, worker.config)), worker.policy
        results = policy.allocate_results(rows, vectors)
        step = make_step(rows, results=results)
        log_probs, entropy, *_ = policy.broadcast_results(results)
        metrics = means_over_steps([step], "actor") | first_step_kl_metric([step])
        metrics |= worker.global_means({"actor/entropy": entropy[batch["response_mask"]]})
        if "ref_log_prob" in batch:
            metrics |= kl_to_reference_metric(worker, batch, log_probs)
        return NodeOutput(fields={"old_log_probs": log_probs}, metrics=metrics)
    for number in range(actor.ppo_epochs):
        seen = batch_for_pass(batch, number, worker.config)
        for rows in mini_batches(seen, worker.groups):
            rows |= select_tokens(worker, batch, rows, draw=len(steps))
            steps.append(make_step(rows))
    metrics = means_over_steps(steps, "actor")
    return NodeOutput(metrics=metrics | first_step_kl_metric(steps))


def first_step_kl_metric(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """``actor/ppo_kl_first`` of the optimizer steps; nothing where the first one was skipped."""
    return {"actor/ppo_kl_first": steps[0]["actor/ppo_kl"]} if steps[0] else {}


@node(reads=REFRESH, writes=())
def refresh_reference(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """After every ``ref.sync_steps`` steps, and after those of ``ref.sync_at``, the reference
    becomes ``ref.sync_mix`` of the actor's weights and the rest of its own, on the ranks that have
    both.
    """
    keys, reference = worker.config.actor_rollout_ref.ref, worker.refreshed_reference
    step = worker.step + 1
    due = step in keys.sync_at or (keys.sync_steps and step % keys.sync_steps == 0)
    if reference is None or not due:
        return NodeOutput()
    reference.interpolate_towards(worker.policy, keys.sync_mix)
    if worker.config.actor_rollout_ref.actor.compute.param_offload:
        reference.offload("weights")
    return NodeOutput()


@node(writes=())
def report_weight_sync(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """Reports what the pushes of the step have moved (``sync_weights``, the proxy's weights)."""
    if worker.owner is None:
        return NodeOutput()  # a replay has no engines
    reports = worker.owner.pop_push_reports()
    metrics = {"sync/pushes": float(len(reports))}
    if reports:  # none where the engine already had the right weights
        moved = [report for report in reports if report.num_bytes]
        gigabytes = sum(report.num_bytes for report in moved) / 1e9
        metrics |= {"sync/seconds": sum(r.seconds for r in reports), "sync/gigabytes": gigabytes}
        if moved:
            metrics["sync/gigabytes_per_second"] = gigabytes / sum(r.seconds for r in moved)
    return NodeOutput(metrics=metrics)

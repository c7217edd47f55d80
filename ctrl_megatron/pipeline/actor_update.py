"""The actor's optimizer steps: policy loss, entropy bonus, KL term, by configuration."""

from __future__ import annotations

from collections import defaultdict

import torch
from tensordict import TensorDict

from ctrl_megatron.algorithms import agg_loss, get_policy_loss_terms, kl_penalty
from ctrl_megatron.config.actor import Actor
from ctrl_megatron.models.loss_scale import GlobalCounts
from ctrl_megatron.pipeline.batch import tensors_of
from ctrl_megatron.pipeline.executor import NodeOutput
from ctrl_megatron.pipeline.worker import DAGWorker


class ActorLoss:
    """A ``models.policy.LossFn``: this micro-batch's share of the global loss and its scalars."""

    def __init__(self, actor: Actor, *, with_kl: bool) -> None:
        self._actor, self._with_kl = actor, with_kl
        self._terms = get_policy_loss_terms(actor.policy_loss)

    def __call__(
        self,
        log_probs: torch.Tensor,
        entropy: torch.Tensor,
        rows: dict[str, torch.Tensor],
        counts: GlobalCounts,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        actor, mask = self._actor, rows["response_mask"]

        def whole(values: torch.Tensor, mode: str = actor.loss_agg_mode) -> torch.Tensor:
            return agg_loss(
                values,
                mask,
                mode,
                batch_num_tokens=counts.tokens,
                global_batch_size=counts.sequences,
            )

        terms = self._terms(
            old_log_prob=rows["old_log_probs"],
            log_prob=log_probs,
            advantages=rows["advantages"],
            response_mask=mask,
            config=actor,
        )
        policy = whole(terms.loss)
        scalars = {
            "actor/pg_loss": policy,
            "actor/ppo_kl": whole(terms.approx_kl, "token-mean"),
            "actor/pg_clipfrac": whole(terms.clipped, "token-mean"),
            "actor/pg_clipfrac_lower": whole(terms.clipped_lower, "token-mean"),
        }
        loss = policy
        if actor.entropy_coeff:
            loss = loss - actor.entropy_coeff * whole(entropy)
        if self._with_kl:
            kl = whole(kl_penalty(log_probs, rows["ref_log_prob"], actor.kl_loss_type, mask))
            loss = loss + actor.kl_loss_coef * kl
            scalars["actor/kl_loss"] = kl
        return loss, {name: value.detach() for name, value in scalars.items()}


def update_actor(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """``ppo_epochs`` passes over the mini-batches; metrics are means over the optimizer steps.

    The first step's ``ppo_kl`` is reported by itself: with the weights that computed
    ``old_log_probs`` it must be 0.
    """
    actor = worker.config.actor_rollout_ref.actor
    loss = ActorLoss(actor, with_kl=actor.use_kl_loss)
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(actor.ppo_epochs):
        for mini_batch in sorted(set(batch["mini_batch"].tolist())):
            rows = (batch["mini_batch"] == mini_batch).nonzero().squeeze(-1)
            done = worker.policy.step(tensors_of(batch, rows), loss, worker.temperature)
            for name, value in done.items():
                found[name if "/" in name else f"actor/{name}"].append(value)
    metrics = {name: sum(values) / len(values) for name, values in found.items()}
    metrics["actor/ppo_kl_first"] = found["actor/ppo_kl"][0]
    return NodeOutput(metrics=metrics)

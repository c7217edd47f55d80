"""The losses of a mini-batch: the actor's policy loss, entropy bonus and KL term, and the value
model's loss.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict

from ctrl_megatron.algorithms import (
    LOSS_INPUTS,
    POLICY_LOSS_REGISTRY,
    PolicyLossTerms,
    agg_loss,
    kl_penalty,
    log_prob_and_advantage_sums,
    require_equal_shapes,
    scatter_selection,
    token_random_numbers,
    value_loss_terms,
)
from ctrl_megatron.algorithms.registry import LossScalars
from ctrl_megatron.config import Actor
from ctrl_megatron.config.options import accepted_options, function_options
from ctrl_megatron.errors import (
    UserError,
    convert_user_code_errors,
    describe_location,
    is_user_defined,
)
from ctrl_megatron.graph.columns import texts
from ctrl_megatron.models.loss_scale import GlobalCounts
from ctrl_megatron.parallel.groups import ProcessGroups
from ctrl_megatron.steps.batch import tensor_fields
from ctrl_megatron.steps.worker import DAGWorker


class ActorLoss:
    """A ``models.policy.LossFn``: this micro-batch's share of the global loss, and its scalars.

    Rows without ``old_log_probs`` are used for one optimizer step, by the weights that drew them:
    then the old log-probs are the new ones, without a gradient.
    ``response_limit`` is the constant of ``seq-mean-token-sum-norm``: the width of a batch is its
    longest response, which differs between ranks and steps. The policy loss, not the bonus and the
    KL beside it, is multiplied by ``policy_loss_coef``.
    """

    def __init__(self, actor: Actor, *, response_limit: int, policy_loss_coef: float = 1.0) -> None:
        self._actor, self._response_limit = actor, response_limit
        self._policy_loss_coef = policy_loss_coef
        self._function = POLICY_LOSS_REGISTRY.get(actor.policy_loss).function
        self._options = function_options(
            self._function,
            actor.policy_loss_options,
            "actor_rollout_ref.actor.policy_loss_options",
            inputs=LOSS_INPUTS,
        )
        self._who = f"policy loss {actor.policy_loss!r} ({describe_location(self._function)})"

    @staticmethod
    def check(batch: TensorDict) -> None:
        """ValueError for a field of another shape, which the loss would broadcast."""
        names = ("old_log_probs", "advantages", "loss_mask", "rollout_is_weights", "ref_log_prob")
        require_equal_shapes(
            response_mask=batch["response_mask"], **{name: batch.get(name) for name in names}
        )

    def __call__(
        self,
        log_probs: torch.Tensor,
        entropy: torch.Tensor,
        rows: dict[str, torch.Tensor],
        counts: GlobalCounts,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        actor, mask = self._actor, rows.get("loss_mask", rows["response_mask"])
        whole = partial(
            aggregate_loss_share, mask=mask, counts=counts, response_limit=self._response_limit
        )
        mode = actor.loss_agg_mode
        offered = {
            "old_log_prob": rows.get("old_log_probs", log_probs.detach()),
            "log_prob": log_probs,
            "advantages": rows["advantages"],
            "response_mask": mask,
            "loss_agg_mode": mode,
            "config": actor,
            "rollout_is_weights": rows.get("rollout_is_weights"),
            "selected": rows.get("selected"),
            **self._options,
        }
        if is_user_defined(self._function):
            terms = self._checked(offered)
        else:
            terms = self._function(**accepted_options(self._function, offered))
        if isinstance(terms, PolicyLossTerms):
            policy, clipped = whole(terms.loss, mode), whole(terms.clipped, "token-mean")
            approx_kl = whole(terms.approx_kl, "token-mean")
            clipped_lower = whole(terms.clipped_lower, "token-mean")
        else:
            policy, clipped, approx_kl, clipped_lower = mini_batch_shares(terms, mode, mask, counts)
        scalars = {
            "actor/pg_loss": policy,
            "actor/ppo_kl": approx_kl,
            "actor/pg_clipfrac": clipped,
            "actor/pg_clipfrac_lower": clipped_lower,
        }
        loss = policy if self._policy_loss_coef == 1 else policy * self._policy_loss_coef
        if actor.entropy_coeff:
            loss = loss - actor.entropy_coeff * whole(entropy, mode)
        if actor.use_kl_loss:
            gaps = kl_penalty(log_probs, rows["ref_log_prob"], actor.kl_loss_type, mask)
            kl = whole(gaps, mode)
            loss = loss + actor.kl_loss_coef * kl
            scalars["actor/kl_loss"] = kl
        return loss, {name: value.detach() for name, value in scalars.items()}

    def _checked(self, offered: Mapping[str, Any]) -> PolicyLossTerms | LossScalars:
        """The result of a policy loss of the user's (``check_user_loss``)."""
        mask, log_prob = offered["response_mask"], offered["log_prob"]
        if not mask.any():
            # A mean over no token is not a number.
            zero = torch.where(mask.bool(), log_prob, log_prob.new_zeros(())).sum()
            return zero, zero, zero, zero
        with convert_user_code_errors(f"{self._who} failed"):
            found = self._function(**accepted_options(self._function, offered))
            return check_user_loss(self._who, found, mask, self._actor.loss_agg_mode)


def check_user_loss(
    who: str, found: Any, mask: torch.Tensor, loss_agg_mode: str
) -> PolicyLossTerms | LossScalars:
    """``found``, the result of a policy loss of the user's; ``who`` begins messages.

    UserError for anything but ``PolicyLossTerms`` of the mask's shape (B, R) or four scalar
    tensors, for a loss that is not finite, and for scalars where ``loss_agg_mode`` divides by the
    response limit, which such a function does not know.
    """
    if isinstance(found, PolicyLossTerms):
        parts, expected = {f.name: getattr(found, f.name) for f in fields(found)}, mask.shape
        loss = found.loss
    elif isinstance(found, tuple) and len(found) == 4:
        names = ("pg_loss", "pg_clipfrac", "ppo_kl", "pg_clipfrac_lower")
        parts, expected = dict(zip(names, found, strict=True)), torch.Size()
        loss = found[0]
        if loss_agg_mode == "seq-mean-token-sum-norm":
            raise UserError(
                f"{who} returns scalars, which cannot be divided by the response limit as "
                f"actor_rollout_ref.actor.loss_agg_mode={loss_agg_mode} requires",
                remedy="return PolicyLossTerms, or choose another loss_agg_mode",
            )
    else:
        raise UserError(
            f"{who} returns {type(found).__name__}, neither PolicyLossTerms nor four scalars "
            "(pg_loss, pg_clipfrac, ppo_kl, pg_clipfrac_lower)"
        )
    for name, value in parts.items():
        if getattr(value, "shape", None) != expected:
            raise UserError(
                f"{who} returns {name} of shape {tuple(getattr(value, 'shape', ()))}; expected a "
                f"tensor of {tuple(expected)}"
                + (", the shape of response_mask" if expected else "")
            )
    if not (loss[mask.bool()] if expected else loss).isfinite().all():
        raise UserError(f"{who} returns a loss that is not finite")
    return found


def mini_batch_shares(
    scalars: LossScalars, loss_agg_mode: str, mask: torch.Tensor, counts: GlobalCounts
) -> LossScalars:
    """The share of the whole mini-batch's (loss, three shares of tokens) in those of a micro-batch,
    which are means over its tokens or its rows.
    """
    tokens, rows = mask.sum(), mask.any(dim=1).sum()
    loss, *others = scalars
    by_tokens = loss_agg_mode == "token-mean"
    loss = loss * tokens / counts.tokens if by_tokens else loss * rows / counts.sequences
    clipped, approx_kl, clipped_lower = (value * tokens / counts.tokens for value in others)
    return loss, clipped, approx_kl, clipped_lower


class ValueLoss:
    """A ``models.value.ValueLossFn``: this micro-batch's share of the global loss, and scalars.

    ``response_limit`` is the constant of ``seq-mean-token-sum-norm``.
    """

    def __init__(self, cliprange: float, *, loss_agg_mode: str, response_limit: int) -> None:
        self._cliprange, self._loss_agg_mode = cliprange, loss_agg_mode
        self._response_limit = response_limit

    def __call__(
        self, values: torch.Tensor, rows: dict[str, torch.Tensor], counts: GlobalCounts
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mask = rows["response_mask"]

        whole = partial(
            aggregate_loss_share, mask=mask, counts=counts, response_limit=self._response_limit
        )
        terms = value_loss_terms(values, rows["returns"], rows["values"], mask, self._cliprange)
        loss = whole(terms.loss, self._loss_agg_mode)
        scalars = {
            "critic/vf_loss": loss,
            "critic/vf_clipfrac": whole(terms.clipped, "token-mean"),
            "critic/value_mean": whole(values, "token-mean"),
        }
        return loss, {name: value.detach() for name, value in scalars.items()}


def aggregate_loss_share(
    values: torch.Tensor,
    mode: str,
    *,
    mask: torch.Tensor,
    counts: GlobalCounts,
    response_limit: int,
) -> torch.Tensor:
    """() float: this micro-batch's share of the global aggregate of ``values`` (b, R) under
    ``mask`` (b, R); the shares of all micro-batches add up to it."""
    return agg_loss(
        values,
        mask,
        mode,
        batch_num_tokens=counts.tokens,
        global_batch_size=counts.sequences,
        loss_scale_factor=response_limit,
    )


def select_tokens(
    worker: DAGWorker, batch: TensorDict, rows: dict[str, torch.Tensor], *, draw: int
) -> dict[str, torch.Tensor]:
    """``selected`` (b, R) bool for losses that select tokens of the whole mini-batch; its ``rows``
    are some of ``batch`` (``mini_batches``). Collective.

    The selection depends on the log-probs from before the training step, and on lots that depend
    on the run's seed, the step, the rows' uids and their places in their groups. So it is the same
    for all micro-batches, ranks and orders. ``draw`` numbers the optimizer steps of the
    training step.
    """
    actor, groups = worker.config.actor_rollout_ref.actor, worker.groups
    selection = POLICY_LOSS_REGISTRY.get(actor.policy_loss).selection
    if selection is None:
        return {}
    old, gains = rows["old_log_probs"], rows["advantages"]
    mask = rows.get("loss_mask", rows["response_mask"])
    sums = groups.sum_over_data(log_prob_and_advantage_sums(old, gains, mask))
    covariances = selection.covariances(old, old, gains, mask, actor, sums)[mask]
    draw_name = f"{worker.config.trainer.seed}/{worker.step}/{draw}"
    uids = texts(batch["uid"])
    names = row_names(uids, [f"{draw_name}/{uid}" for uid in uids])
    lots = token_random_numbers([names[place] for place in rows["place"].tolist()], mask)
    parts = groups.gather_data_ranks((covariances, lots[mask]))
    every, lots = (torch.cat(column) for column in zip(*parts, strict=True))
    chosen = selection.choose(every, actor, lots)
    first = sum(len(part) for part, _ in parts[: groups.place.dp])
    return {"selected": scatter_selection(chosen[first : first + len(covariances)], mask)}


def row_names(uids: Sequence[str], groups: Sequence[str]) -> list[str]:
    """Names of the rows: those of their ``groups`` and their places in them; groups are whole."""
    seen: Counter[str] = Counter()
    names = []
    for uid, group in zip(uids, groups, strict=True):
        names.append(f"{group}/{seen[uid]}")
        seen[uid] += 1
    return names


def mini_batches(batch: TensorDict, groups: ProcessGroups) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors of every mini-batch in the order of its number; ``place`` (b,) int64 are its rows
    in ``batch``.

    A mini-batch without a token in the loss on any rank, because none of its rows was judged or all
    were rejected, is left out. ValueError if all are. Collective.
    """
    tensors, numbers = tensor_fields(batch), batch["mini_batch"]
    tensors["place"] = torch.arange(len(numbers))
    mask = tensors.get("loss_mask", tensors["response_mask"])
    # A rank may have no row of a mini-batch.
    every = sorted({n for own in groups.gather_data_ranks(numbers.unique().tolist()) for n in own})
    pieces = [(numbers == number).nonzero().squeeze(-1) for number in every]
    tokens = groups.sum_over_data(torch.stack([mask[rows].sum() for rows in pieces]))
    taught = [rows for rows, count in zip(pieces, tokens.tolist(), strict=True) if count]
    if not taught:
        raise ValueError("no response token of the step takes part in the loss; see its metrics")
    for rows in taught:
        yield {name: value[rows] for name, value in tensors.items()}


def means_over_steps(steps: Sequence[Mapping[str, float]], prefix: str) -> dict[str, float]:
    """Mean of every scalar over the optimizer steps; bare names get ``prefix/``."""
    values: dict[str, list[float]] = defaultdict(list)
    for step in steps:
        for name, value in step.items():
            values[name if "/" in name else f"{prefix}/{name}"].append(value)
    return {name: sum(each) / len(each) for name, each in values.items()}

"""Shows that engines compute with the weights that they were sent.

Equal checksums say that an engine has the bytes, a *probe* that it computes with them: one row of
tokens, whose log-probs are compared in engine and trainer. How close they are says little, because
rounding in bfloat16 moves them further than a training step does. So the probe asks how much of a
*change*, from other weights to the new ones, is there in the engine's log-probs: nothing or all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from ctrl_megatron.models.policy import Policy
from ctrl_megatron.parallel.groups import RankSet

VerifyMode = Literal["false", "first", "every", "true"]
PROBE_TOKENS = 64
"""Length of the longest probe."""
_SHORTEST = 4
_ERRORS = 4.0
"""Standard errors by which a share must be off one half, which it has where rounding in trainer and
engine hides the change (half of the regressor's noise, that of ``old``, is in ``held - old``)."""


def share_of_change(
    held: torch.Tensor, old: torch.Tensor, new: torch.Tensor
) -> tuple[float, float]:
    """(share of the change from ``old`` to ``new`` that is there in ``held``, its standard error).

    All are (N,) log-probs of the same tokens, N of 3 or more. The share is the slope of the linear
    regression of ``held - old`` on ``new - old``; its error is infinite where nothing has changed.
    """
    change, seen = new.double() - old.double(), held.double() - old.double()
    change, seen = change - change.mean(), seen - seen.mean()
    size = change.square().sum()
    if size == 0:
        return 0.0, float("inf")
    share = change @ seen / size
    rest = (seen - share * change).square().sum() / (len(change) - 2)
    return share.item(), (rest / size).sqrt().item()


@dataclass(slots=True)
class _Policy:
    """What is shown about the engines' weights of one policy, and its probe's log-probs."""

    pushes: int = 0
    is_probed: bool = False
    """The probe has shown that the engines follow the trainer."""
    old: torch.Tensor | None = None
    """(N,) log-probs of the weights called ``old_name``, which are not those of the next push."""
    old_name: str = ""
    new: torch.Tensor | None = None
    """(N,) log-probs of the weights of the next push; None if it is not probed."""


class PushProof:
    """Says which pushes are verified, and compares their probes. All ranks of the trainer call the
    same methods in the same order."""

    def __init__(
        self,
        mode: VerifyMode,
        groups: RankSet,
        *,
        probe: Sequence[int],
        checksums: bool = True,
        merges: bool = False,
    ) -> None:
        """``first`` compares the checksums of the first push, and probes pushes 1, 2, 4, 8, ... of
        each policy until the weights have changed more than rounding can hide.
        ``probe`` are the row's tokens; fewer than four make no probe. ``checksums`` is off for
        engines whose weights cannot be read back. ``merges`` says that adapters are merged into
        what the engines get: rounding may take all of a small change, which is only worth a
        warning.
        """
        self._mode, self._groups, self._checksums = mode, groups, checksums
        self._merges, self._warned = merges, False
        self.probe = list(probe[:PROBE_TOKENS])
        self._policies = defaultdict[str, _Policy](_Policy)
        self._compared = False
        """Checksums were equal once since the engines' start."""

    def forget(self, *roles: str) -> None:
        """Nothing is shown any more about the weights of ``roles``, or of all without any: engines
        were started again, or get another model."""
        self._compared = False
        for role in roles or tuple(self._policies):
            self._policies.pop(role, None)

    @property
    def compares_checksums(self) -> bool:
        """Whether the next push has to."""
        first = self._mode == "first" and not self._compared
        return self._checksums and (first or self._mode in ("every", "true"))

    def needs_probe(self, role: str) -> bool:
        """Whether the next push for ``role`` is probed. What is still to be shown is looked for
        after twice as many pushes each time: the change grows with them."""
        own = self._policies[role]
        if self._mode == "false" or len(self.probe) < _SHORTEST:
            return False
        first = self._mode == "first"
        return not (first and (own.is_probed or own.pushes & (own.pushes + 1)))

    def begin_probe(self, role: str, policy: Policy) -> None:
        """Compute what the engines should say after the push of ``policy``. Collective; takes the
        device for the policy."""
        own = self._policies[role]
        own.new = self._log_probs(policy)
        if policy.shape.lora is not None:
            with policy.without_adapters():
                own.old, own.old_name = self._log_probs(policy), "the model without its adapters"

    def _log_probs(self, policy: Policy) -> torch.Tensor:
        tokens = torch.tensor([self.probe])
        attended = torch.ones_like(tokens)
        rows = {"input_ids": tokens, "attention_mask": attended}
        found, _ = policy.log_probs({**rows, "response_mask": attended[:, 1:].bool()})
        return found[0]

    def is_probing(self, role: str) -> bool:
        """Whether the engines have to say their log-probs after the push for ``role``."""
        return self._policies[role].new is not None

    def end_push(self, role: str, version: str, held: Sequence[Sequence[float]] = ()) -> None:
        """A push for ``role`` is done. ``held`` are the probe's log-probs by each engine of this
        host, where it was probed. Collective. RuntimeError if an engine does not compute with the
        weights of ``version``.
        """
        own = self._policies[role]
        own.pushes, self._compared = own.pushes + 1, True
        if own.new is None:
            return
        new, own.new = own.new, None
        others = {"a constant": torch.zeros_like(new)}
        if own.old is not None:
            others[own.old_name] = own.old
        sure = [
            self._is_sure(
                *(torch.tensor(log_probs), old, new, f"from {name} to {version}"),
                rounds=self._merges and old is own.old,
            )
            for log_probs in held
            for name, old in others.items()
        ]
        # Every rank with engines has to be sure of all of them.
        (unsure,) = self._groups.any_rank(own.old is None or not all(sure))
        own.is_probed = self._mode == "first" and not unsure
        if own.old is None or not unsure:
            own.old, own.old_name = new, version

    def _is_sure(
        self,
        held: torch.Tensor,
        old: torch.Tensor,
        new: torch.Tensor,
        change: str,
        *,
        rounds: bool,
    ) -> bool:
        """Whether the ``change`` is so large that it must be seen in what an engine says.
        RuntimeError where it is not seen then, a warning where rounding may have taken it
        (``rounds``)."""
        share, error = share_of_change(held, old, new)
        if new.isfinite().all() and not held.isfinite().all():
            share, error = 0.0, 0.0
        if share - _ERRORS * error > 0.5:
            return True
        if not share + _ERRORS * error < 0.5:
            return False
        seen = (
            f"of the change of {len(new)} log-probs {change} its own have {share:.2f} (0 is "
            f"nothing, 1 all of it; standard error {error:.2f})"
        )
        if not rounds:
            raise RuntimeError(
                f"an engine does not compute with the weights that it was sent: {seen}; "
                "docs/rollout.md, Verified pushes"
            )
        if not self._warned:
            print(
                f"warning: an engine computes with merged adapters that are rounded: {seen}; "
                "actor_rollout_ref.rollout.adapter_push=true keeps them apart (docs/adapters.md)",
                flush=True,
            )
        self._warned = True
        return True

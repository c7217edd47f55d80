"""Keys of ``algorithm.distillation``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ctrl_megatron.config.keys import ABOVE_0, AT_LEAST_0, AT_LEAST_1, Range, key, when

_TAUGHT = when(".teacher", "policy", "reference")


@dataclass(frozen=True, slots=True, kw_only=True)
class Distillation:
    """A dense signal beside the rewards: a teacher reads the actor's own responses, behind a prompt
    that may say more than the actor's, and the actor moves towards the teacher's probabilities,
    token by token."""

    teacher: Literal["none", "policy", "reference"] = "none"
    """The teacher's weights: the actor's before each update, or those of the reference
    (actor_rollout_ref.ref): a model of its own, the start, or with sync_steps and sync_mix an
    average of the actor."""
    hint: Literal["none", "feedback", "reference", "diff", "both"] = key("feedback", read=_TAUGHT)
    """What the teacher's prompt says beside the actor's: what the tests found about the first
    solution, the reference program (column reference of the rows), its difference from the first
    solution, or feedback and reference program."""
    coef: float = key(1.0, AT_LEAST_0, read=_TAUGHT)
    """Factor of the divergence in the loss; 0 makes no teacher's pass."""
    policy_loss_coef: float = key(1.0, AT_LEAST_0, read=_TAUGHT)
    """Factor of the policy loss beside it; 0 learns from the teacher alone."""
    divergence: Literal["reverse_kl", "forward_kl", "jsd"] = key("reverse_kl", read=_TAUGHT)
    """reverse_kl is KL(actor || teacher), forward_kl KL(teacher || actor), jsd the
    Jensen-Shannon divergence of both."""
    jsd_weight: float = key(
        0.5,
        Range("a number between 0 and 1, exclusive", lambda value: 0 < value < 1),
        read=(_TAUGHT, when(".divergence", "jsd")),
    )
    """The teacher's share in the mixture of jsd."""
    estimator: Literal["token", "top_k", "full"] = key("top_k", read=_TAUGHT)
    """The tokens that a divergence compares at each place of a response: the one that was drawn
    (reverse_kl only), the teacher's top_k likeliest and all others together, or the whole
    vocabulary."""
    top_k: int = key(20, AT_LEAST_1, read=(_TAUGHT, when(".estimator", "top_k")))
    """Number of the teacher's likeliest tokens."""
    on: Literal["all", "groups_without_spread"] = key("all", read=_TAUGHT)
    """Responses that the teacher reads: all, or those of groups whose rewards are all equal, from
    which the policy loss learns nothing."""
    cap: float | None = key(None, ABOVE_0, read=_TAUGHT)
    """Largest divergence of a token, in nats: larger ones are scaled down; None for no bound."""
    max_prompt_length: int | None = key(None, AT_LEAST_1, read=_TAUGHT)
    """Tokens of the teacher's longest prompt; responses with a longer one have no teacher
    (distillation/left_out_rate). None for as many as a pass has room for."""

    @property
    def is_on(self) -> bool:
        """Whether a teacher reads the responses."""
        return self.teacher != "none" and self.coef > 0

    @property
    def has_hint(self) -> bool:
        """Whether the teacher's prompts differ from the actor's."""
        return self.is_on and self.hint != "none"

    @property
    def tells_feedback(self) -> bool:
        """Whether hints need a verdict on the first solution."""
        return self.has_hint and self.hint in ("feedback", "both")

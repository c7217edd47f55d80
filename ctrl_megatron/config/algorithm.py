"""Keys of ``algorithm``, ``critic``, ``reward`` and ``sandbox``: from a verdict to an advantage."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ctrl_megatron.config.actor import KlName


@dataclass(frozen=True, slots=True, kw_only=True)
class KlControl:
    """The coefficient of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """Constant, or steered towards target_kl."""
    kl_coef: float = 0.001
    """The coefficient, or where it starts."""
    target_kl: float = 0.1
    """KL per sequence that the adaptive controller aims at."""
    horizon: int = 10000
    """Samples over which the adaptive controller corrects an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """From token rewards to advantages."""

    adv_estimator: str = "grpo"
    """Registered name of the advantage estimator."""
    gamma: float = 1.0
    """Discount per token."""
    lam: float = 1.0
    """Trace decay of GAE."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide by the group's standard deviation; False is Dr.GRPO."""
    use_kl_in_reward: bool = False
    """Subtract the KL to the reference from the token rewards (excludes actor.use_kl_loss)."""
    kl_penalty: KlName = "kl"
    """Estimator of the KL in the reward."""
    kl_ctrl: KlControl = field(default_factory=KlControl)


@dataclass(frozen=True, slots=True, kw_only=True)
class Critic:
    """The value model."""

    enable: bool = False
    """Train a value model; not available yet."""
    cliprange_value: float = 0.5
    """Clip range of the value loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """How a verdict becomes a score."""

    run_all_cases: bool = True
    """Score is the pass rate; False scores 1 only where every test passes."""
    num_examine: int = 0
    """Critiques per step that are printed."""
    max_requests: int = 256
    """Revisions that are judged at the same time."""
    run_timeout: float = 10.0
    """Seconds per test where the row has no time limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    """The service that runs untrusted programs."""

    endpoint: str | None = None
    """Address of a running service, http(s)://host:port; None starts an embedded one."""
    isolation: Literal["strict", "standard", "none"] = "standard"
    """Isolation level of the embedded service; strict refuses to start without namespaces."""
    workers: int | None = None
    """Programs that the embedded service runs at the same time; None for one per CPU."""
    max_concurrency: int = 256
    """Requests that one trainer process keeps open."""
    attempts: int = 5
    """Tries per request before a service fault counts as an error."""
    startup_timeout: float = 60.0
    """Seconds until an embedded service that does not answer counts as failed."""

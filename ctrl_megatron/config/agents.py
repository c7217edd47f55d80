"""Keys of ``agent1``, the second policy of a step."""

from __future__ import annotations

from dataclasses import dataclass

from ctrl_megatron.config.keys import ABOVE_0, AT_LEAST_1, Condition, group, key

SECOND = Condition(("agent1.model.path",), bool, "{0}=DIRECTORY")
"""The condition of keys of a second policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondAgentModel:
    """The model that the second policy starts from."""

    path: str | None = None
    """Hugging Face directory with the actor's architecture and tokenizer; None trains the actor
    alone. The graph is one of your own whose nodes have agent_group 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondAgentOptim:
    """The second policy's optimizer; its other settings are ``actor_rollout_ref.actor.optim``."""

    lr: float = key(1e-6, ABOVE_0)
    """Peak learning rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondAgentRollout:
    """How the second policy samples; its other settings are ``actor_rollout_ref.rollout``."""

    n: int | None = key(None, AT_LEAST_1)
    """Samples per prompt; None for the actor's number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondAgent:
    """A second policy that learns in the same steps, for nodes of `agent_group` 1; its other
    settings are those of ``actor_rollout_ref``."""

    model: SecondAgentModel = group(SecondAgentModel)
    optim: SecondAgentOptim = group(SecondAgentOptim)
    rollout: SecondAgentRollout = group(SecondAgentRollout)

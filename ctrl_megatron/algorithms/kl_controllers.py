"""The coefficient of the KL in the reward: fixed, or steered towards a target."""

from __future__ import annotations

import math
from typing import Any

_LARGEST_ERROR = 0.2


class FixedKLController:
    """A coefficient that stays. A resumed run follows its own configuration, as with the LR."""

    def __init__(self, kl_coef: float) -> None:
        self.value = _checked_coefficient("kl_coef", kl_coef)

    def update(self, current_kl: float, n_steps: int) -> None:
        """Nothing to learn."""

    def state_dict(self) -> dict[str, Any]:
        """Which kind it is: there is nothing to restore."""
        return {"type": "fixed"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the configured value; ValueError if another kind of controller saved ``state``."""
        _demand_kind("fixed", state)


class AdaptiveKLController:
    """Proportional control of the coefficient (Ziegler et al., arXiv 1909.08593, section 2.2).

    ``target_kl`` is a mean per token, like ``current_kl``; ``horizon`` counts sequences.
    """

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: int) -> None:
        if not (target_kl > 0 and horizon > 0):
            raise ValueError(f"target_kl={target_kl} and horizon={horizon} must be positive")
        self.value = _checked_coefficient("init_kl_coef", init_kl_coef)
        self.target, self.horizon = target_kl, horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """Scale by 1 + clip(current_kl / target - 1, -0.2, 0.2) * n_steps / horizon.

        All ranks must pass the same numbers. Raises ValueError for a KL that is not finite, which
        would destroy the coefficient, and for a horizon so short that its sign would flip.
        """
        if not math.isfinite(current_kl):
            raise ValueError(f"current_kl={current_kl} is not finite; look at the log-probs")
        error = min(max(current_kl / self.target - 1, -_LARGEST_ERROR), _LARGEST_ERROR)
        scale = 1 + error * n_steps / self.horizon
        if scale <= 0:
            raise ValueError(
                f"kl_ctrl.horizon={self.horizon} is too short for steps of {n_steps} sequences; "
                f"make it larger than {_LARGEST_ERROR * n_steps:g}"
            )
        self.value *= scale

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs; target and horizon come from the configuration."""
        return {"type": "adaptive", "value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict``; ValueError if another kind of controller saved it."""
        _demand_kind("adaptive", state)
        self.value = _checked_coefficient("the saved KL coefficient", float(state["value"]))


KLController = FixedKLController | AdaptiveKLController


def get_kl_controller(
    type: str, kl_coef: float, target_kl: float | None = None, horizon: int | None = None
) -> KLController:
    """The controller of a configuration's ``kl_ctrl`` group; ``type`` is ``fixed`` or ``adaptive``.

    Raises ValueError for another type, and for ``adaptive`` without target or horizon.
    """
    if type == "fixed":
        return FixedKLController(kl_coef)
    if type != "adaptive":
        raise ValueError(f"unknown kl_ctrl.type {type!r}; known: fixed, adaptive")
    if target_kl is None or horizon is None:
        raise ValueError("kl_ctrl.type=adaptive needs kl_ctrl.target_kl and kl_ctrl.horizon")
    return AdaptiveKLController(kl_coef, target_kl, horizon)


def _checked_coefficient(name: str, value: float) -> float:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} must be a finite number of at least 0, got {value}")
    return value


def _demand_kind(kind: str, state: dict[str, Any]) -> None:
    if state.get("type") != kind:
        raise ValueError(
            f"the checkpoint holds a {state.get('type')!r} KL controller, the configuration asks "
            f"for {kind!r}; resume with the same kl_ctrl.type"
        )

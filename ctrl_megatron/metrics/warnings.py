"""Warnings about the metrics of a step: no signal, collapse, truncated answers, an engine that
differs from the trainer. Each says what to try.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

Metrics = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWarning:
    """A condition on one metric, and the text of the warning."""

    name: str
    metric: str
    """End of the metric's name; a step without the metric has no such warning."""
    holds: Callable[[float, float], bool]
    """(value in this step, value in the first) -> whether to warn."""
    text: str
    """The meaning and what to try; {value} is the value of the metric."""


WARNINGS = (
    StepWarning(
        name="no_signal",
        metric="advantage/mean_abs",
        holds=lambda now, first: now == 0,
        text="all groups had equal rewards, so nothing was learned: raise "
        "actor_rollout_ref.rollout.n or the temperature, use problems of another difficulty, or "
        "algorithm.filter_groups",
    ),
    StepWarning(
        name="saturated",
        metric="reward/mean",
        holds=lambda now, first: 0.98 <= now <= 1,
        text="the mean reward is {value:.3f}: there is hardly anything left to learn from these "
        "rows",
    ),
    StepWarning(
        name="no_reward",
        metric="reward/mean",
        holds=lambda now, first: now == 0,
        text="no answer earned anything: look at the examples, and whether the reward reads what "
        "the model writes",
    ),
    StepWarning(
        name="entropy_collapse",
        metric="actor/entropy",
        holds=lambda now, first: now < 0.1 * first,
        text="the entropy is {value:.3g}, below a tenth of the first step's: lower the learning "
        "rate, or raise actor_rollout_ref.actor.entropy_coeff or clip_ratio_high",
    ),
    StepWarning(
        name="cut_responses",
        metric="/cut_rate",
        holds=lambda now, first: now > 0.2,
        text="{value:.0%} of the responses end at data.max_response_length: raise it, or turn on "
        "reward.overlong_buffer",
    ),
    StepWarning(
        name="engine_differs",
        metric="rollout/probs_diff_mean",
        holds=lambda now, first: now > 0.02,
        text="engine and trainer give tokens probabilities that differ by {value:.3f} in the mean: "
        "give both one dtype, or turn on algorithm.rollout_correction",
    ),
    StepWarning(
        name="not_judged",
        metric="reward/judged_rate",
        holds=lambda now, first: now < 0.9,
        text="only {value:.0%} of the programs could be judged: look at the faults of the sandbox "
        "or the provider, in the log and in the field detail of the examples",
    ),
    StepWarning(
        name="unjudgeable",
        metric="reward/unjudgeable_rate",
        holds=lambda now, first: now > 0.1,
        text="on {value:.0%} of the programs a test could not be judged, which earns nothing: the "
        "log names rows of which no program could be; leave these out, or let their tests compare "
        "data",
    ),
)


_VALIDATED = "val/revision_pass_rate"
_REWARDS = ("reward/total", "reward/mean")
"""The reward of training is the sum, and where there is one function only, its mean."""
_FALL, _RISE = 0.05, 0.02
"""Changes since the best validation that are more than noise of a few dozen rows."""


class StepWarnings:
    """The warnings of a run's steps."""

    def __init__(self) -> None:
        self._first: dict[str, float] = {}
        self._rewards: list[float] = []
        """Mean rewards of the steps since the last validation."""
        self._best: tuple[float, float | None] | None = None
        """The best validation so far, and the mean reward of the steps before it; None where it
        came before all steps."""

    def check(self, metrics: Metrics) -> dict[str, str]:
        """Name and text of every warning of a step."""
        found = {}
        for warning in WARNINGS:
            for name, value in metrics.items():
                if name.endswith(warning.metric):
                    first = self._first.setdefault(name, value)
                    if warning.holds(value, first):
                        found[warning.name] = warning.text.format(value=value)
        return found | self._diverging(metrics)

    def _diverging(self, metrics: Metrics) -> dict[str, str]:
        """A warning where the reward of training rises and that of validation falls."""
        self._rewards += [metrics[name] for name in _REWARDS if name in metrics][:1]
        if _VALIDATED not in metrics:
            return {}
        now, rewards = metrics[_VALIDATED], self._rewards
        if not rewards:
            self._best = now, None
            return {}
        reward, self._rewards = sum(rewards) / len(rewards), []
        if self._best is not None and self._best[1] is None:
            self._best = self._best[0], rewards[0]
        if self._best is None or now >= self._best[0]:
            self._best = now, reward
        best, reward_then = self._best
        assert reward_then is not None
        if now > best - _FALL or reward < reward_then + _RISE:
            return {}
        return {
            "reward_is_gamed": f"since the best validation the training reward rose from "
            f"{reward_then:.3f} to {reward:.3f}, and {_VALIDATED} fell from {best:.3f} to "
            f"{now:.3f}: read the examples for what the reward pays by mistake, use more rows, or "
            "stop at the best checkpoint"
        }

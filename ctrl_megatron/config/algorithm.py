"""Keys of ``algorithm``, ``critic``, ``reward`` and ``sandbox``."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from ctrl_megatron.config.actor_rollout_ref import (
    REFERENCE,
    REVISIONS,
    KlName,
    RoleLayout,
    ValueModelFiles,
)
from ctrl_megatron.config.distillation import Distillation
from ctrl_megatron.config.keys import (
    ABOVE_0,
    AT_LEAST_0,
    AT_LEAST_1,
    SHARE,
    SOME_SHARE,
    Condition,
    Range,
    Secret,
    group,
    key,
    when,
)
from ctrl_megatron.config.reward_model import REWARD_MODEL
from ctrl_megatron.errors import UserError


class AdvantageEstimator(Enum):
    """The built-in estimators, under the name of siiRL's guide (section 8.1)."""

    GRPO = "grpo"
    GAE = "gae"
    RLOO = "rloo"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline"
    REMAX = "remax"
    OPO = "opo"
    GPG = "gpg"
    CPGD = "cpgd"
    GRPO_PASSK = "grpo_passk"
    GDPO = "gdpo"


ADV_ESTIMATORS = tuple(str(one.value) for one in AdvantageEstimator)

VALUE_MODEL = Condition(
    ("critic.enable", "algorithm.adv_estimator"),
    lambda enable, estimator: estimator == "gae" if enable is None else enable,
    "{1}=gae (or {0}=true with a pipeline of your own)",
)
"""The condition of keys of the value model."""


def _estimators(*names: str) -> Condition:
    return when(".adv_estimator", *names, known=ADV_ESTIMATORS)


_IN_REWARD = when("algorithm.use_kl_in_reward", True)
_REJECTING = when(".rollout_rs", "token", "sequence", "geometric")
_ADAPTIVE = when(".type", "adaptive")
_OWN_SANDBOX = when("reward.provider", "local")
_EMBEDDED = (_OWN_SANDBOX, when("sandbox.endpoint", None))


@dataclass(frozen=True, slots=True, kw_only=True)
class KlControl:
    """The coefficient of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """Constant, or steered towards target_kl."""
    kl_coef: float = key(0.001, AT_LEAST_0)
    """The coefficient, or its initial value."""
    target_kl: float = key(0.1, ABOVE_0, read=_ADAPTIVE)
    """Target of the adaptive controller: mean KL per token."""
    horizon: int = key(10000, AT_LEAST_1, read=_ADAPTIVE)
    """Sequences over which the adaptive controller corrects an error; more than a fifth of those of
    a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterGroups:
    """Dynamic sampling: groups whose rewards are all equal have no signal and are replaced."""

    enable: bool = False
    """Train only on groups with different rewards; sample more prompts until there are enough."""
    max_num_gen_batches: int = key(10, AT_LEAST_1, read=when(".enable", True))
    """Batches of data.gen_batch_size prompts that one step may sample before it fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCorrection:
    """Correction of the difference between the engine's probabilities and the trainer's."""

    rollout_is: Literal["none", "token", "sequence"] = "none"
    """Weight the loss by the trainer's probability over the engine's, per token or sequence."""
    rollout_is_threshold: float = key(2.0, ABOVE_0, read=when(".rollout_is", "token", "sequence"))
    """Upper bound of the weights."""
    rollout_rs: Literal["none", "token", "sequence", "geometric"] = "none"
    """Reject tokens or sequences with a ratio out of bounds; geometric uses the mean log-ratio."""
    rollout_rs_threshold: float = key(2.0, ABOVE_0, read=_REJECTING)
    """Largest ratio that is kept."""
    rollout_rs_threshold_lower: float | None = key(None, AT_LEAST_0, read=_REJECTING)
    """Smallest ratio that is kept, 0 for no bound; None for 1 / rollout_rs_threshold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """The computation of advantages from token rewards."""

    adv_estimator: str = "grpo"
    """Registered name of the advantage estimator."""
    adv_estimator_options: dict[str, Any] = field(default_factory=dict)
    """Options of the estimator without a key here: its parameters by name, e.g. f_norm of gpg."""
    gamma: float = key(1.0, SHARE, read=_estimators("gae", "reinforce_plus_plus"))
    """Discount per token."""
    lam: float = key(1.0, SHARE, read=_estimators("gae"))
    """Trace decay of GAE."""
    norm_adv_by_std_in_grpo: bool = key(True, read=_estimators("grpo", "grpo_passk", "gdpo"))
    """Divide by the group's standard deviation; False gives Dr.GRPO."""
    weight_factor_in_cpgd: Literal["STD_weight", "clip_filter_like_weight", "naive"] = key(
        "STD_weight", read=_estimators("cpgd")
    )
    """Scale of a group in cpgd: by its standard deviation, by the share of groups with signal, or
    none."""
    use_kl_in_reward: bool = False
    """Subtract the KL to the reference from the token rewards (excludes actor.use_kl_loss)."""
    kl_penalty: KlName = key("kl", read=_IN_REWARD)
    """Estimator of the KL in the reward."""
    kl_ctrl: KlControl = group(KlControl, read=_IN_REWARD)
    filter_groups: FilterGroups = group(FilterGroups)
    rollout_correction: RolloutCorrection = group(RolloutCorrection)
    distillation: Distillation = group(Distillation)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueOptim:
    """The value model's optimizer; its other settings are ``actor_rollout_ref.actor.optim``."""

    lr: float = key(1e-5, ABOVE_0)
    """Peak learning rate."""


Where = tuple[int, ...] | dict[str, Any]
"""A list of ranks, ``{hosts: [1]}`` or ``{share: 0.25}``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolePlacement:
    """The ranks of roles: a list of ranks, `{hosts: [1]}` for all ranks of hosts, or `{share:
    0.25}` for the last ranks of the run. Roles that are not named here share the other ranks, among
    them rank 0. Two roles may name the same ranks; engines share theirs with sandboxes only. On
    every host the ranks of these roles follow the others. `placement: auto` is short for
    `placement.auto: true`."""

    auto: bool = False
    """Let the memory plan choose the ranks of the models when the run starts, as ctrl-plan
    --placement does: one world where it fits, else the shortest step that fits."""
    gpu_memory: float | None = key(None, ABOVE_0, read=when(".auto", True))
    """Memory of a device that this plan counts with, in GiB; None for what the device has (a CPU's
    is not limited)."""

    critic: Where = key((), read=VALUE_MODEL)
    """Ranks that have the value model; empty: with the actor."""
    reference: Where = key((), read=REFERENCE)
    """Ranks that have the frozen reference; empty: with the actor."""
    reward_model: Where = key((), read=REWARD_MODEL)
    """Ranks that have the reward model; empty: with the actor."""
    rollout: Where = ()
    """Ranks without a model, whose devices belong to the engines of actor and proxy; empty: the
    hosts of the actor have the engines."""
    sandbox: Where = key((), read=_EMBEDDED)
    """Ranks whose hosts have a sandbox each; empty: the hosts of the actor."""

    @property
    def services_only(self) -> RolePlacement:
        """The same with all models on one world."""
        return RolePlacement(rollout=self.rollout, sandbox=self.sandbox)


_APART = Condition(("placement.critic",), bool, "{0}=RANKS")


@dataclass(frozen=True, slots=True, kw_only=True)
class Critic:
    """The value model; its other settings are those of ``actor_rollout_ref.actor``."""

    enable: bool | None = None
    """Train a value model; None trains one if the estimator reads values (gae)."""
    model: ValueModelFiles = group(ValueModelFiles)
    optim: ValueOptim = group(ValueOptim)
    megatron: RoleLayout = group(RoleLayout, read=_APART)
    ppo_epochs: int | None = key(None, AT_LEAST_1)
    """Passes over the batch of one training step; None for the actor's number."""
    cliprange_value: float = key(0.5, AT_LEAST_0)
    """Distance from the old value beyond which a prediction is clipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlongBuffer:
    """Soft overlong punishment of critiques (DAPO)."""

    enable: bool = False
    """Subtract from the reward where a critique nears data.max_response_length."""
    len: int = key(64, AT_LEAST_1)
    """Tokens before the limit over which the punishment grows from 0 to penalty_factor."""
    penalty_factor: float = key(1.0, AT_LEAST_0)
    """Punishment at the limit."""


@dataclass(frozen=True, slots=True)
class RewardStage:
    """Weights of reward functions from a training step on (an entry of ``reward.schedule``)."""

    from_step: int
    weights: dict[str, float]

    @classmethod
    def from_config(cls, number: int, stage: dict[str, Any]) -> RewardStage:
        """The stage in entry ``number`` of the key. Raises UserError that names the entry."""
        first, weights = stage.get("from_step"), stage.get("weights")
        named = stage.keys() == {"from_step", "weights"} and type(first) is int and first >= 1
        if not (named and isinstance(weights, dict) and all(map(_is_number, weights.values()))):
            raise UserError(
                f"{stage!r} is no stage",
                key=f"reward.schedule[{number}]",
                remedy="write {from_step: 21, weights: {judge: 0.2}}; the first step is 1",
            )
        assert isinstance(first, int)
        return cls(first, {name: float(weight) for name, weight in weights.items()})


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


_JUDGING = Condition(
    (".weight", "reward.schedule", "reward.reward_funcs"),
    lambda weight, schedule, names: (
        bool(weight) or "judge" in names or any("judge" in str(stage) for stage in schedule)
    ),
    "{0} above 0, {1} with a weight of judge, or judge in {2}",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeValues:
    """The reward of a critique's judgment, "Overall judgment: Correct" or "Incorrect", of the first
    solution."""

    weight: float = key(0.0, AT_LEAST_0, read=REVISIONS)
    """Weight of the reward `judge`; with 0 it is computed only where reward.schedule or
    reward.reward_funcs names it."""
    right: float = key(1.0, read=_JUDGING)
    """Reward of a true judgment."""
    wrong: float = key(0.0, read=_JUDGING)
    """Reward of a false judgment; -1 in the code of Critique-RL."""
    unreadable: float = key(0.0, read=_JUDGING)
    """Reward of a critique without a judgment; -1 there."""
    correct_if: float = key(1.0, SOME_SHARE, read=REVISIONS)
    """Share of its tests that a right first solution passes at least; 1 is all of them."""
    gate: float | None = key(None, read=REVISIONS)
    """The total reward of a critique with a false judgment or none, whatever its revision earns;
    None for no such rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransitionBonuses:
    """Numbers that are added to the reward, by the verdicts of first solution and revision; an
    ablation."""

    wrong_to_right: float = 0.0
    """The first solution failed, the revision passes every test."""
    right_to_right: float = 0.0
    """Both pass."""
    right_to_wrong: float = 0.0
    """The first solution passes every test, the revision fails."""
    wrong_to_wrong: float = 0.0
    """Both fail."""

    @property
    def is_on(self) -> bool:
        """Whether any transition adds to the reward."""
        return self != TransitionBonuses()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """The computation of scores from verdicts."""

    reward_funcs: tuple[str, ...] = ("critic",)
    """Functions whose weighted sum is the reward of a critique: critic (the pass rate of its
    revision), delta (that less the first solution's), echo_gain (that gain, weighted near 1), leak
    (1 for a critique that quotes tests or the reference program), code, binary_code, code_format,
    ioi_code, soft_overlong_punishment, module:function or FILE.py:function."""
    reward_weights: tuple[float, ...] = ()
    """One weight per reward function; empty for 1 each."""
    schedule: tuple[dict[str, Any], ...] = ()
    """Stages whose weights differ: `[{from_step: 1, weights: {critic: 0, judge: 1}}, {from_step:
    21, weights: {critic: 1, judge: 0.2}}]`. A weight that a stage does not name stays as it was.
    The rewards of a step are added with the weights of that step."""
    reward_options: dict[str, Any] = field(default_factory=dict)
    """Reward function -> its options."""
    reward_tasks: dict[str, Any] = field(default_factory=dict)
    """Reward function -> list of the tasks (column task of the rows) that it rewards; a function
    that is not named here rewards the rows of all tasks."""
    run_all_cases: bool = key(True, read=REVISIONS)
    """True: the score is the pass rate; False: it is 1 if every test passes, else 0."""
    max_requests: int = key(256, AT_LEAST_1)
    """Programs that each trainer process judges concurrently."""
    run_timeout: float = key(10.0, ABOVE_0)
    """Seconds of processor time per test if the row has no time limit; the sandbox of this package
    allows three times as many by the clock, other providers count these."""
    shared_process_graders: bool = False
    """Judge rows with grader_files, whose programs run in the process of the answer's program: it
    can read their input, print what they would print, and exit. False refuses such rows."""
    max_failed_share: float = key(0.2, SHARE)
    """Share of a step's programs that the sandbox or provider may fail to judge. Their samples are
    left out of the loss; beyond it, and where all of them failed, the step is not trained on and
    the run ends (exit code 14)."""
    judging_retries: int = key(3, AT_LEAST_0)
    """How often a trainer process judges programs again, after 5, 10, 20, ... seconds, before more
    than this share counts as failed."""
    function_timeout: float = key(1800.0, ABOVE_0)
    """Seconds that a reward function of your own may take for one batch. Then the run ends and
    names it."""
    request_timeout: float = key(640.0, ABOVE_0)
    """Seconds without a sign of life from the sandbox or provider after which a request has failed,
    all its attempts together; one attempt may take half of it. Waiting in its queue does not
    count."""
    provider: Literal["local", "sandbox_fusion", "e2b", "morph"] = "local"
    """The service that runs programs: the sandbox of this package, or an external one."""
    provider_options: dict[str, Any] = key(
        {},
        read=when(".provider", "sandbox_fusion", "e2b", "morph"),
        secret=Secret(
            whole=True,
            instead="set the provider's variable (E2B_API_KEY, MORPH_API_KEY, "
            "SANDBOX_FUSION_ENDPOINT)",
        ),
    )
    """Options of the provider's class; keys and addresses are environment variables. No file of the
    run has its texts."""
    cache_path: str | None = None
    """SQLite file of verdicts that runs share; None keeps them in memory."""
    cache_key: Literal["program", "normalised"] = "program"
    """Programs that share a verdict: equal ones, or as in CTRL those with one normal form, in which
    private variables have numbers. Other tests than calls of functions are refused with
    normalised."""
    judge: JudgeValues = group(JudgeValues, read=REVISIONS)
    transition: TransitionBonuses = group(TransitionBonuses, read=REVISIONS)
    copying: Literal["measure", "penalise", "mask"] = key("measure", read=REVISIONS)
    """Treatment of a critique that carries the program of its revision: measure only counts it
    (critique/copied_rate), penalise gives it 0, mask takes it out of the loss."""
    copying_threshold: float = key(0.5, SHARE, read=when(".copying", "penalise", "mask"))
    """Share of the revision's lines that a critique may contain."""
    overlong_buffer: OverlongBuffer = group(
        OverlongBuffer, read=when("reward.overlong_buffer.enable", True)
    )

    @property
    def weights(self) -> dict[str, float]:
        """Reward function -> weight."""
        weights = self.reward_weights or (1.0,) * len(self.reward_funcs)
        return dict(zip(self.reward_funcs, weights, strict=True))

    @property
    def stages(self) -> tuple[RewardStage, ...]:
        """``schedule`` as records. Raises UserError for a stage of another form."""
        return tuple(
            RewardStage.from_config(number, one) for number, one in enumerate(self.schedule)
        )

    @property
    def tasks_by_function(self) -> dict[str, tuple[str, ...]]:
        """Reward function -> the tasks of ``reward_tasks``."""
        return {name: tuple(tasks) for name, tasks in self.reward_tasks.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    """The service that runs untrusted programs."""

    endpoint: str | None = key(
        None,
        Range("an address such as http://127.0.0.1:8080", re.compile(r"https?://[^/\s]+").match),
        read=_OWN_SANDBOX,
        secret=Secret(instead="name a file with the token by sandbox.token_file"),
    )
    """Address of a running service, http(s)://host:port; None starts an embedded one."""
    token_file: str | None = key(
        None, read=Condition((".endpoint",), lambda endpoint: endpoint is not None, "{0}=ADDRESS")
    )
    """File whose first line is the bearer token of the services at endpoint."""
    isolation: Literal["strict", "standard", "none"] = key("standard", read=_EMBEDDED)
    """Isolation level of the embedded service. strict requires namespaces; standard requires
    namespaces or Landlock, which keep programs away from the host's files."""
    workers: int | None = key(None, AT_LEAST_1, read=_EMBEDDED)
    """Programs that a host's embedded service runs concurrently; None for one per core that the
    process may use, less one for each rank of the host."""
    problem_seconds: float = key(160.0, ABOVE_0, read=_EMBEDDED)
    """Seconds of processor time that all tests of one problem may take on workers of the embedded
    service; by the clock they may take three times as long. Tests that have not run by then count
    as failed. Waiting for a worker does not count."""

"""Keys of ``algorithm``, ``critic``, ``reward`` and ``sandbox``: from a verdict to an advantage."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from ctrl_megatron.config.actor import KlName, LossAggregation, ModelFiles, Optim


@dataclass(frozen=True, slots=True, kw_only=True)
class KlControl:
    """The coefficient of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """Constant, or steered towards target_kl."""
    kl_coef: float = 0.001
    """The coefficient, or where it starts."""
    target_kl: float = 0.1
    """Mean KL per token that the adaptive controller aims at."""
    horizon: int = 10000
    """Sequences over which the adaptive controller corrects an error; more than a fifth of those
    of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterGroups:
    """Dynamic sampling: groups whose rewards are all equal teach nothing and are replaced."""

    enable: bool = False
    """Train only on groups with different rewards; sample more prompts until there are enough."""
    max_num_gen_batches: int = 10
    """Batches of data.gen_batch_size prompts that one step may sample before it gives up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCorrection:
    """What is done about the engine's probabilities differing from the trainer's."""

    rollout_is: Literal["none", "token", "sequence"] = "none"
    """Weigh the loss by trainer over engine probability, per token or per sequence."""
    rollout_is_threshold: float = 2.0
    """Weights are truncated here."""
    rollout_rs: Literal["none", "token", "sequence", "geometric"] = "none"
    """Leave tokens or whole sequences out of the loss whose ratio is out of bounds; geometric
    takes a sequence's mean log ratio."""
    rollout_rs_threshold: float = 2.0
    """Largest ratio that stays."""
    rollout_rs_threshold_lower: float | None = None
    """Smallest ratio that stays, 0 for no bound; None for 1 / rollout_rs_threshold."""


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
    weight_factor_in_cpgd: Literal["STD_weight", "clip_filter_like_weight", "naive"] = "STD_weight"
    """How cpgd scales a group: by its standard deviation, like filtering, or not at all."""
    f_norm: float = 1.0
    """What gpg divides its advantages by."""
    use_kl_in_reward: bool = False
    """Subtract the KL to the reference from the token rewards (excludes actor.use_kl_loss)."""
    kl_penalty: KlName = "kl"
    """Estimator of the KL in the reward."""
    kl_ctrl: KlControl = field(default_factory=KlControl)
    filter_groups: FilterGroups = field(default_factory=FilterGroups)
    rollout_correction: RolloutCorrection = field(default_factory=RolloutCorrection)


@dataclass(frozen=True, slots=True, kw_only=True)
class Critic:
    """The value model."""

    enable: bool | None = None
    """Train a value model; None for where the estimator reads its values (gae)."""
    model: ModelFiles = field(default_factory=ModelFiles)
    optim: Optim = field(default_factory=lambda: Optim(lr=1e-5))
    ppo_mini_batch_size: int | None = None
    """Prompts per optimizer step, over all ranks; None takes the actor's."""
    ppo_epochs: int | None = None
    """Passes over the batch of one training step; None takes the actor's."""
    ppo_max_token_len_per_gpu: int | None = None
    """Token budget of a packed micro-batch; None takes the actor's."""
    cliprange_value: float = 0.5
    """How far a value may move from where it was before it stops to count."""
    loss_agg_mode: LossAggregation = "token-mean"
    """How per-token losses become one number."""
    grad_clip: float = 1.0
    """Largest global gradient norm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlongBuffer:
    """Soft overlong punishment of critiques (DAPO)."""

    enable: bool = False
    """Subtract from the reward where a critique nears data.max_response_length."""
    len: int = 64
    """Tokens before the limit over which the punishment grows from nothing to all."""
    penalty_factor: float = 1.0
    """The punishment at the limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """Added to the reward by what the revision made of the first solution; an ablation."""

    wrong_to_right: float = 0.0
    """The first solution failed, the revision passes every test."""
    right_to_right: float = 0.0
    """Both pass."""
    right_to_wrong: float = 0.0
    """The revision broke a right solution."""
    wrong_to_wrong: float = 0.0
    """Both fail."""

    @property
    def is_on(self) -> bool:
        """Whether any transition adds to the reward."""
        return self != Transition()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """How a verdict becomes a score."""

    reward_funcs: tuple[str, ...] = ("critic",)
    """Reward functions whose weighted sum a critique earns: critic (the pass rate of its revision),
    code, binary_code, code_format, ioi_code, soft_overlong_punishment, or module:function."""
    reward_weights: tuple[float, ...] = ()
    """One weight per reward function; empty for 1 each."""
    reward_options: dict[str, Any] = field(default_factory=dict)
    """Reward function -> its options."""
    run_all_cases: bool = True
    """Score is the pass rate; False scores 1 only where every test passes."""
    num_examine: int = 0
    """Critiques per step that are printed."""
    max_requests: int = 256
    """Programs that one engine leader has judged at the same time; a run has a leader per model
    copy."""
    run_timeout: float = 10.0
    """Seconds per test where the row has no time limit."""
    provider: Literal["local", "sandbox_fusion", "e2b", "morph", "piston"] = "local"
    """Who runs the revisions: our sandbox, or a service outside of the run."""
    provider_options: dict[str, Any] = field(default_factory=dict)
    """Options of the provider's class, such as a template; keys and addresses come from the
    environment."""
    cache_path: str | None = None
    """SQLite file of verdicts that runs share; None keeps them in memory."""
    compare_lax: bool = False
    """Also ask a grader that believes exit codes and report reward/forgery_rate: the share of
    revisions that only it accepts. Costs a second run of function problems; our sandbox only."""
    judgment_weight: float = 0.0
    """Added to the reward where the judgment is true of the first solution; an ablation (the
    paper's reward never looks)."""
    transition: Transition = field(default_factory=Transition)
    overlong_buffer: OverlongBuffer = field(default_factory=OverlongBuffer)

    @property
    def weights(self) -> dict[str, float]:
        """Reward function -> weight."""
        weights = self.reward_weights or (1.0,) * len(self.reward_funcs)
        return dict(zip(self.reward_funcs, weights, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    """The service that runs untrusted programs."""

    endpoint: str | None = None
    """Address of a running service, http(s)://host:port; None starts an embedded one."""
    token_file: str | None = None
    """File whose first line is the bearer token of the services at endpoint."""
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

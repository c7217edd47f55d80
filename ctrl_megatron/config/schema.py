"""The root of the configuration, and the keys of ``data``, ``trainer``, ``dag`` and ``sft``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from ctrl_megatron.config.actor_rollout_ref import (
    COUPLED_GRPO_PIPELINE,
    REFERENCE,
    REVISIONS,
    ActorRolloutRef,
    Schedule,
)
from ctrl_megatron.config.agents import has_own_engines, with_own_settings
from ctrl_megatron.config.algorithm import (
    VALUE_MODEL,
    Algorithm,
    Critic,
    Reward,
    RolePlacement,
    Sandbox,
)
from ctrl_megatron.config.coerce import KeyPlace, build_config
from ctrl_megatron.config.keys import (
    ABOVE_0,
    AT_LEAST_0,
    AT_LEAST_1,
    COUNT_OR_MINUS_1,
    SHARE,
    Condition,
    Key,
    Range,
    group,
    key,
    keys_of_class,
    when,
)
from ctrl_megatron.config.reward_model import REWARD_MODEL, RewardModelConfig
from ctrl_megatron.errors import begin_lines_of_errors

TRACKERS = ("wandb", "mlflow", "trackio", "swanlab")
"""Sinks of metrics that file the run under a project."""
_SINKS = ("console", "jsonl", "tensorboard", *TRACKERS)
_SINK = Range(
    f"{', '.join(_SINKS)}, or a class of your own as module:Class or FILE.py:Class",
    lambda name: name in _SINKS or ":" in name,
)
_FILTERED = when("algorithm.filter_groups.enable", True)
_VALIDATED = Condition(("data.val_files",), bool, "{0}=FILES")
_TRACKED = Condition(
    (".logger",),
    lambda names: any(name in TRACKERS or ":" in name for name in names),
    f"{{0}}=[{'], ['.join(TRACKERS)}] or [module:Class]",
)
_IN_EPOCHS = when(".total_training_steps", None)
_NAME = Range(
    "of 1 to 200 bytes, without line breaks and control characters",
    lambda v: 1 <= len(v.encode(errors="replace")) <= 200 and v.isprintable(),
)
_STEPS = Range("a list of steps (from 1), or all", re.compile(r"(all|[1-9][0-9]*)$").match)
_SERVED = Condition((".metrics_port",), bool, "{0}=PORT")
_SEVERAL = Condition(("policies",), bool, "{0}.agent1")
_PROFILED = Condition((".profile_steps",), bool, "{0}=[STEP]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """The training and validation rows of the RL stage."""

    train_files: tuple[str, ...] = ()
    """Parquet file or list of parquet files to train on (required)."""
    val_files: tuple[str, ...] = ()
    """Parquet file or list of parquet files to validate on; empty for no validation.
    Each of several files also has its own metrics, val/NAME/..., with the file's name."""
    prompt_key: str = "prompt"
    """Column of the critique prompt."""
    max_prompt_length: int = key(1536, AT_LEAST_1)
    """Longest critique prompt, in tokens."""
    max_response_length: int = key(768, AT_LEAST_1)
    """Longest critique, in tokens."""
    train_batch_size: int = key(1024, AT_LEAST_1)
    """Prompts per training step, over all ranks."""
    gen_batch_size: int | None = key(None, AT_LEAST_1, read=_FILTERED)
    """Prompts per draw of dynamic sampling; None for train_batch_size."""
    val_batch_size: int = key(256, AT_LEAST_1, read=_VALIDATED)
    """Prompts per request to the engine in validation, over all ranks."""
    mixture: tuple[float, ...] = key((), ABOVE_0)
    """Share of each of several train_files in the drawn rows, of any sum; empty draws all rows
    alike. Every file then has epochs of its own."""
    shuffle: bool = True
    """Draw the training rows in a new random order every epoch."""
    filter_overlong_prompts: bool = True
    """Drop (and count) rows whose prompt exceeds max_prompt_length; False makes them an error."""
    bad_rows: Literal["refuse", "drop"] = "refuse"
    """Treatment of rows that cannot be read, lack a value that a reward reads, whose tests the
    sandbox or provider cannot judge or every program passes, or whose reference fails: refuse ends
    the start and names the first with its file; drop leaves them out, counts them, and names the
    first."""

    @property
    def val_set_names(self) -> tuple[str, ...]:
        """The names under which several ``val_files`` are reported: the file's name, after its
        folder's if two files have the same one. Empty for one file.
        """
        if len(self.val_files) < 2:
            return ()
        paths = [Path(file).absolute() for file in self.val_files]
        stems = [path.stem for path in paths]
        names = (
            path.stem if stems.count(path.stem) == 1 else f"{path.parent.name}_{path.stem}"
            for path in paths
        )
        return tuple(re.sub(r"[^\w.-]", "_", name) for name in names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """The training loop and its output."""

    project_name: str = key("ctrl_megatron", _NAME, read=_TRACKED)
    """Project under which trackers file the run."""
    experiment_name: str = key(
        "run",
        Range(
            f"a plain directory name, {_NAME.text}",
            lambda v: _NAME.holds(v) and not {"/", "\\"} & set(v) and v not in (".", ".."),
        ),
    )
    """Name of the run and its directory."""
    default_local_dir: str = "runs"
    """Parent of the run's directory."""
    total_epochs: int = key(1, AT_LEAST_1, read=_IN_EPOCHS, stage="rl")
    """Passes over the training rows; with dynamic sampling, which draws several batches of them for
    a step, the rows that are drawn count."""
    total_training_steps: int | None = key(None, AT_LEAST_1, stage="rl")
    """Number of training steps, instead of total_epochs; None for all epochs."""
    save_freq: int = key(-1, COUNT_OR_MINUS_1)
    """Steps between checkpoints; -1 saves only at the end."""
    save_hf_freq: int = key(-1, COUNT_OR_MINUS_1, stage="rl")
    """Steps between Hugging Face directories of the weights; -1 writes none."""
    async_save: bool = False
    """Write checkpoints while training continues, from a copy in host memory."""
    test_freq: int = key(-1, COUNT_OR_MINUS_1, stage="rl")
    """Steps between validations; -1 validates at the end, where there are data.val_files."""
    val_before_train: bool = key(False, stage="rl")
    """Validate before the first step."""
    critic_warmup: int = key(0, AT_LEAST_0, stage="rl")
    """Training steps in which only the value model learns."""
    turn_steps: int = key(0, AT_LEAST_0, read=_SEVERAL, stage="rl")
    """Steps in a row in which one policy learns before the next one does; 0: all learn in every
    step."""
    resume_mode: str = "auto"
    """auto continues from the newest checkpoint, disable starts over, and a path continues from
    that checkpoint, or from the newest one that the run has saved since."""
    logger: tuple[str, ...] = key(("console", "jsonl", "tensorboard"), _SINK)
    """Sinks of the metrics; a class of your own is named by its import path."""
    seed: int = 1
    """Seed of the row order and of everything without a separate seed."""
    verify_weight_sync: Literal["false", "first", "every", "true"] = key("first", stage="rl")
    """After which weight updates checksums, and one row's log-probs, are compared in trainer and
    engine. first: after the first of an engine, and log-probs of each policy until its weights have
    visibly changed. every, true: after each."""
    max_bad_steps: int = key(3, AT_LEAST_1)
    """Steps in a row with a loss or gradient that is not finite, whose updates are skipped, after
    which the run ends."""
    max_ckpt_to_keep: int = key(2, COUNT_OR_MINUS_1)
    """Number of checkpoints to keep; -1 keeps all."""
    dump_steps: tuple[str, ...] = key((), _STEPS, stage="rl")
    """Steps whose batch is kept as files below dumps/, from which ctrl-replay repeats the update or
    the judging: a list, or all."""
    profile_steps: tuple[str, ...] = key((), _STEPS)
    """Steps whose phases on all ranks are written to profile/step_N.json, a trace that Perfetto and
    Chrome open: a list, or all."""
    profile_torch: bool = key(False, read=_PROFILED)
    """Add a trace by torch.profiler for each rank to the profiled steps."""
    profile_memory: bool = key(False, read=_PROFILED)
    """Add the GPU memory's history of each rank to the profiled steps (needs a GPU)."""
    nnodes: int = key(1, AT_LEAST_1)
    """Hosts of the run; compared with the number that was started."""
    min_nnodes: int | None = key(None, AT_LEAST_1)
    """Fewest hosts on which the run goes on after others are lost; None: only on nnodes."""
    n_gpus_per_node: int = key(1, AT_LEAST_1)
    """Processes per host; nnodes times this must be the number of started processes."""
    peak_tflops_per_device: float | None = key(None, ABOVE_0)
    """Peak of one device in the model's type, for MFU; None for the value of a table."""
    failure_timeout: float = key(20.0, ABOVE_0)
    """Seconds until a silent rank or service counts as dead."""
    service_restarts: int = key(3, AT_LEAST_0)
    """How often within an hour an engine or a sandbox of the run that has died or fallen silent is
    started again; its next end ends the run. 0 lets the first one end it."""
    distributed_timeout: float = key(600.0, ABOVE_0)
    """Time-out of a collective and of the start of an engine, in seconds."""
    metrics_port: int | None = key(None, Range("between 1 and 65535", lambda v: 1 <= v <= 65535))
    """Port at which rank 0 serves the run's newest metrics (/metrics, for Prometheus) and health
    (/healthz); None serves nothing."""
    metrics_host: str = key("127.0.0.1", read=_SERVED)
    """Address at which it listens; 0.0.0.0 for all of the host's, without any access control."""
    wait_timeout: float = key(7200.0, ABOVE_0, stage="rl")
    """Seconds that the ranks wait for one piece of work beside the trainer: a batch of texts from
    the engines, its judging, the end of a weight push, a coroutine node of your own. Then the run
    ends and names the work."""

    def is_dump_step(self, step: int) -> bool:
        return _names(self.dump_steps, step)

    def is_profile_step(self, step: int) -> bool:
        """Whether step number ``step`` is profiled."""
        return _names(self.profile_steps, step)

    @property
    def run_dir(self) -> Path:
        """Directory of all files that the run writes."""
        return Path(self.default_local_dir) / self.experiment_name


def _names(steps: tuple[str, ...], step: int) -> bool:
    return "all" in steps or str(step) in steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Dag:
    """The task graph."""

    custom_pipeline_fn: str | None = key(
        None, Range("of the form package.module:function", re.compile(r"[\w.]+:[\w.]+$").match)
    )
    """Function that builds the pipeline, as module:function; None for CTRL's."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of this function: its parameters after the configuration, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sft:
    """Supervised fine-tuning; its other keys are in ``actor_rollout_ref`` and ``trainer``."""

    train_files: tuple[str, ...] = ()
    """Parquet file or list of parquet files to train on (required for SFT)."""
    val_files: tuple[str, ...] = ()
    """Parquet file or list of parquet files to validate on; empty for no validation."""
    train_batch_size: int = key(16, AT_LEAST_1)
    """Sequences per optimizer step, over all ranks."""
    max_length: int = key(1024, AT_LEAST_1)
    """Longest sequence, prompt and critique together, in tokens."""
    canvas: int | None = key(None, AT_LEAST_1)
    """Masked-diffusion models only: response tokens of every row, filled up with end-of-text tokens
    as the sampler's canvas (data.max_response_length of RL) is; longer responses are left out. None
    adds one end-of-text token."""
    total_epochs: int = key(1, AT_LEAST_1, read=_IN_EPOCHS)
    """Passes over the training rows."""
    total_training_steps: int | None = key(None, AT_LEAST_1)
    """Number of fine-tuning steps, instead of the epochs; None for all epochs."""
    lr: float = key(2e-5, ABOVE_0)
    """Peak learning rate."""
    warmup_steps_ratio: float = key(0.0, SHARE)
    """Warm-up as a share of all optimizer steps."""
    lr_scheduler_type: Schedule = "cosine"
    """Shape of the schedule after the warm-up."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """The configuration of a run. ``load_config`` makes one."""

    written: ClassVar[Mapping[str, KeyPlace]] = MappingProxyType({})
    """The keys that are set and the place of each, filled in by ``load_config``. Not a key."""
    unresolved: ClassVar[Mapping[str, tuple[Any, Any]]] = MappingProxyType({})
    """The keys that refer to the environment: value, and as it was written. Not a key."""
    translation: ClassVar[tuple[str, ...]] = ()
    """What became of the keys of another trainer (``config_format``), a line each. Not a key."""
    run: ClassVar[Config | None] = None
    """The run's configuration, of which this is a further policy's, filled in by ``agents``. Not a
    key."""
    number: ClassVar[int] = 0
    """The ``agent_group`` of that policy. Not a key."""

    data: Data = group(Data)
    actor_rollout_ref: ActorRolloutRef = group(ActorRolloutRef)
    critic: Critic = group(Critic, read=VALUE_MODEL)
    placement: RolePlacement = group(RolePlacement)
    algorithm: Algorithm = group(Algorithm)
    reward: Reward = group(Reward)
    reward_model: RewardModelConfig = group(RewardModelConfig, read=REWARD_MODEL)
    sandbox: Sandbox = group(Sandbox)
    trainer: Trainer = group(Trainer, stage="both")
    policies: dict[str, Any] = field(default_factory=dict)
    """Further policies that learn in the same steps, for nodes of agent_group 1, 2, ...: `{agent1:
    {actor_rollout_ref: {model: {path: DIRECTORY}}}}`, each with settings of its own over those of
    the run; with actor_rollout_ref.rollout.name among them it has engines of its own. The graph is
    co_train_pipeline or one of your own."""
    dag: Dag = group(Dag)
    sft: Sft = group(Sft, stage="sft")

    @cached_property
    def agents(self) -> tuple[Config, ...]:
        """The configuration of each policy that learns, by the number of its ``agent_group``: this
        one, and of each of ``policies`` one in which it has the actor's place. UserError for
        settings that no policy can have.
        """
        further = []
        for number, (name, own) in enumerate(self.policies.items(), 1):
            with begin_lines_of_errors(f"policies.{name}."):
                config = build_config(Config, with_own_settings(asdict(self), own), {})
            object.__setattr__(config, "written", self.written)
            object.__setattr__(config, "unresolved", self.unresolved)
            object.__setattr__(config, "run", self)
            object.__setattr__(config, "number", number)
            further.append(config)
        return (self, *further)

    @property
    def engine_owners(self) -> tuple[int, ...]:
        """For each policy that learns, the number of the one whose engines it draws with: its own,
        or that of the run."""
        own = enumerate(self.policies.values(), 1)
        return (0, *(number if has_own_engines(given) else 0 for number, given in own))

    @property
    def most_tensor_ranks(self) -> int:
        """The most ranks that split one weight, of all policies."""
        layouts = (own.actor_rollout_ref.actor.megatron for own in self.agents)
        return max(layout.tensor_model_parallel_size for layout in layouts)

    def learns_in(self, step: int) -> bool:
        """Whether the policy learns in the training step before which ``step`` are finished:
        after ``trainer.critic_warmup``, and in its turn (``trainer.turn_steps``)."""
        count = 1 + len((self.run or self).policies)
        after, each = step - self.trainer.critic_warmup, self.trainer.turn_steps
        return after >= 0 and (not each or after // each % count == self.number)

    def replace_groups(self, **groups: Any) -> Config:
        """``dataclasses.replace``, which keeps what is no key."""
        config = replace(self, **groups)
        for name in ("run", "number"):
            object.__setattr__(config, name, getattr(self, name))
        object.__setattr__(config, "written", self.written)
        object.__setattr__(config, "unresolved", self.unresolved)
        return config

    @property
    def max_critique_sequence_tokens(self) -> int:
        """Longest critique prompt plus the longest critique."""
        return self.data.max_prompt_length + self.data.max_response_length

    @property
    def needed_model_len(self) -> int:
        """Longest sequence of the actor's engines with the built-in prompts, in tokens: where the
        proxy shares them, a revision prompt contains problem, solution and critique, so it counts
        as a whole critique sequence. ``pipeline.inputs`` computes what the rows need."""
        revision = self.actor_rollout_ref.rollout.revision_max_tokens
        return self.max_critique_sequence_tokens + (revision if self.proxy_shares_engines else 0)

    @property
    def max_model_len(self) -> int:
        """Longest sequence of the engine, in tokens."""
        given = self.actor_rollout_ref.rollout.max_model_len
        return self.needed_model_len if given is None else given

    @property
    def writes_revisions(self) -> bool:
        """False if the pipeline has no revisions, and therefore no proxy."""
        return REVISIONS.is_met(self)

    @property
    def proxy_shares_engines(self) -> bool:
        """True if the policy and the proxy generate on the same engines."""
        kind = self.actor_rollout_ref.proxy.kind
        if self.run is not None:
            return self.writes_revisions and kind == "agent1" and self.number == 1
        shared = kind == "shared" or (kind == "agent1" and not any(self.engine_owners[1:2]))
        return self.writes_revisions and shared

    @property
    def shares_engines_with_frozen_proxy(self) -> bool:
        """True if the actor's engines also generate with a proxy that does not learn."""
        return self.proxy_shares_engines and self.actor_rollout_ref.proxy.kind == "shared"

    @property
    def has_proxy_engines(self) -> bool:
        """True if the proxy has engines of its own."""
        own = self.actor_rollout_ref.proxy.kind == "engine"
        return self.run is None and self.writes_revisions and own

    @property
    def engine_gpus_per_node(self) -> int:
        """GPUs of a host that belong to engines alone, in addition to those of the ranks."""
        if self.placement.rollout:
            return 0
        proxy = self.actor_rollout_ref.proxy.engine
        agents = zip(self.agents, self.engine_owners, strict=True)
        groups = [own.actor_rollout_ref.rollout for n, (own, of) in enumerate(agents) if n == of]
        owners = [(proxy, self.has_proxy_engines)]
        owners += [(keys, keys.placement == "dedicated") for keys in groups]
        return sum(keys.n_gpus_per_node or 0 for keys, alone in owners if alone)

    @property
    def needs_value_model(self) -> bool:
        """True if a value model is trained."""
        return VALUE_MODEL.is_met(self)

    @property
    def needs_reference(self) -> bool:
        """True if the objective contains a KL to the reference, or learns from it."""
        return REFERENCE.is_met(self)

    @property
    def has_kl_to_reference(self) -> bool:
        """True if the objective contains a KL to the reference."""
        return self.actor_rollout_ref.actor.use_kl_loss or self.algorithm.use_kl_in_reward

    @property
    def needs_reward_model(self) -> bool:
        """True if ``reward_model.enable``: a frozen reward model scores texts."""
        return REWARD_MODEL.is_met(self)

    @property
    def shares_prefixes(self) -> bool:
        """True if passes compute a prompt once for all of its responses in a micro-batch. In a
        masked-diffusion model a prompt sees its response, so that nothing can be shared."""
        coupled = self.dag.custom_pipeline_fn == COUPLED_GRPO_PIPELINE
        return self.actor_rollout_ref.model.shared_prefix and not coupled

    @property
    def max_training_row_tokens(self) -> int:
        """Tokens of the longest row of a training pass: of a sequence, or under
        ``coupled_grpo_pipeline`` of its three masked versions one after the other
        (``models.masked_versions``), which is three times as many."""
        coupled = self.dag.custom_pipeline_fn == COUPLED_GRPO_PIPELINE
        return self.max_critique_sequence_tokens * (3 if coupled else 1)

    @property
    def reference_is_base(self) -> bool:
        """True if the reference is the actor with its adapters off."""
        family, apart = self.actor_rollout_ref, self.placement.reference
        same = family.ref.model.path in (None, family.model.path)
        return self.needs_reference and same and family.model.lora_rank > 0 and not apart

    @property
    def refreshes_reference(self) -> bool:
        """True if the reference gets the actor's weights every few steps."""
        return self.needs_reference and self.actor_rollout_ref.ref.is_synced

    @property
    def value_epochs(self) -> int:
        """Passes of the value model over the batch of one training step."""
        return self.critic.ppo_epochs or self.actor_rollout_ref.actor.ppo_epochs

    @property
    def gen_batch_size(self) -> int:
        """Prompts per draw."""
        own = self.data.gen_batch_size if self.algorithm.filter_groups.enable else None
        return self.data.train_batch_size if own is None else own


KEYS: dict[str, Key] = {k.name: k for k in keys_of_class(Config)}
"""Dotted name -> declaration of every key, in the order of the schema."""
ALIASES: dict[str, str] = {
    name.replace(".compute.", ".megatron."): name for name in KEYS if ".actor.compute." in name
}
"""Other name of a key -> its name."""
ALIASES |= {
    "agent1.model.path": "policies.agent1.actor_rollout_ref.model.path",
    "agent1.optim.lr": "policies.agent1.actor_rollout_ref.actor.optim.lr",
    "agent1.rollout.n": "policies.agent1.actor_rollout_ref.rollout.n",
}

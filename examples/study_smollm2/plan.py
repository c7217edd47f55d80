"""The study's arms, test sets and proxies, as data; ``study.py`` reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

HOME = Path("examples/study_smollm2")
CONFIG, KEPT = HOME / "mutants.yaml", HOME / "transcripts"
RUNS, MODEL = Path("runs/study"), Path("runs/models/smollm2")
DATA, TASKS, REAL = RUNS / "data", RUNS / "tasks", RUNS / "real"
"""Rows made from mutants, rows of other tasks, and rows made from programs of people and models."""
TEACHER = RUNS / "teacher"
"""A critic that was fine-tuned with the lines that repair a program in its prompt, and its rows."""
SEEDS = (1, 2, 3)
STEPS = 10
"""Steps of RL, and of the control: further fine-tuning instead."""
SAMPLES = 4
"""Critiques of each first solution, each with its revision."""
ROUNDS = 5
"""Rounds of critique and revision, and as many independent critiques of the same program."""
TESTED = 100
"""Most first solutions of each test set."""


ORACLE = "oracle"
WRITTEN = ("bland", "zero-shot", "self-critique", "execution feedback", ORACLE)
"""Arms without training, from the lower baseline to the upper one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proxy:
    """A model that revises."""

    name: str
    path: Path
    piece: str
    """The piece that makes it."""
    files: Sequence[Path] = ()
    """Examples of following critiques, with which it was fine-tuned; empty for a model as it is."""
    steps: int = 12
    engine: bool = False
    """Whether it has an engine of its own, because it is no model of the actor's shape."""

    @property
    def settings(self) -> list[str]:
        """The keys that choose it."""
        own = ("kind=engine", "engine.name=vllm", "engine.kv_cache_gib=1.0") if self.engine else ()
        return [f"actor_rollout_ref.proxy.{key}" for key in (*own, f"model.path={self.path}")]


TUNED = Proxy(
    name="tuned", path=RUNS / "proxy/hf", piece="proxy", files=(DATA / "proxy_sft.parquet",)
)
TUNED_ON_MODELS = Proxy(
    name="tuned_on_models",
    path=RUNS / "proxy_models/hf",
    piece="proxy_models",
    files=(DATA / "proxy_sft.parquet", REAL / "proxy_sft.parquet"),
    steps=24,
)
"""Tuned on longer programs too, which models wrote for the training problems."""
UNTUNED = Proxy(name="untuned", path=MODEL, piece="model.smollm2")
OTHER_FAMILY = Proxy(
    name="tinyllama", path=Path("runs/models/tinyllama"), piece="model.tinyllama", engine=True
)
PROXIES = (TUNED, TUNED_ON_MODELS, UNTUNED, OTHER_FAMILY)


@dataclass(frozen=True, slots=True, kw_only=True)
class TestSet:
    """First solutions on which arms are measured."""

    __test__ = False

    name: str
    folder: Path
    """The directory with NAME.parquet and the critiques of the oracle and of no change."""
    judged: bool = False
    """Whether it has right and wrong programs: it measures judgments only."""
    proxy: Proxy = TUNED
    """The proxy that revises."""
    others: Sequence[Proxy] = ()
    """Further proxies that revise by the oracle's critiques: what each could gain at most."""
    untrained: Sequence[str] = WRITTEN
    """Arms without training that are measured on it."""

    @property
    def title(self) -> str:
        """The name as tables have it."""
        return self.name.replace("_", " ").capitalize()


UNSEEN_MUTANTS = TestSet(name="unseen_mutants", folder=DATA, others=(UNTUNED, OTHER_FAMILY))
UNSEEN_PROBLEMS = TestSet(name="unseen_problems", folder=DATA)
HUMAN_FAULTS, MODEL_EDITS = (
    TestSet(name=name, folder=REAL, proxy=TUNED_ON_MODELS, others=(TUNED, UNTUNED))
    for name in ("human_faults", "model_edits")
)
# For these no oracle critique is known.
MODEL_FAULTS = TestSet(
    name="model_faults", folder=REAL, proxy=TUNED_ON_MODELS, untrained=WRITTEN[:-1]
)
JUDGING = TestSet(
    name="right_and_wrong",
    folder=REAL,
    judged=True,
    proxy=TUNED_ON_MODELS,
    untrained=("bland", "zero-shot"),
)
TESTS = (UNSEEN_MUTANTS, UNSEEN_PROBLEMS, HUMAN_FAULTS, MODEL_EDITS, MODEL_FAULTS, JUDGING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A critic that is trained with every seed: by reinforcement on mutants unless it says
    otherwise.
    """

    name: str
    """Its name in tables."""
    run: str
    """Prefix of its runs' names."""
    settings: Sequence[str] = ()
    """The keys that choose the algorithm."""
    files: Sequence[Path] = (DATA / "rl.parquet",)
    """Training files; several files are a mixture of tasks."""
    reinforced: bool = True
    start: str | None = "sft"
    """Prefix of the runs whose weights it starts from; None for SmolLM2 itself."""
    base: str = "SFT"
    """The arm that it is compared with."""
    steps: int = STEPS
    proxy: Proxy = TUNED
    tests: Sequence[TestSet] = (UNSEEN_MUTANTS,)
    proxies: Sequence[Proxy] = ()
    """Further proxies with which it is measured, on unseen mutants."""
    taught: bool = False
    """Whether ``TEACHER`` is a part of its settings."""
    rounds: bool = False
    """Whether it is measured over several rounds, on unseen mutants."""

    def seed_of(self, seed: int) -> int:
        """The seed of a run: further fine-tuning must not repeat the order of the first."""
        return seed + 100 if not self.reinforced and self.start else seed


CRITIQUES = 96
"""Critiques of a step of reinforcement (mutants.yaml: 6 programs, 16 critiques each)."""
_OTHERS = (UNTUNED, OTHER_FAMILY)
_REAL_TESTS = (HUMAN_FAULTS, MODEL_EDITS, MODEL_FAULTS, JUDGING)
_ON_MODELS = "SFT on models' programs"
# Differences within a group count as they are: that of a repair more than that of a mishap.
_GRPO = ("algorithm.adv_estimator=grpo", "algorithm.norm_adv_by_std_in_grpo=false")
_BY_DEVIATION, _PPO = "algorithm.adv_estimator=grpo", "algorithm.adv_estimator=gae"
_VALUES_FIRST = "trainer.critic_warmup=4"
_LOSS = "actor_rollout_ref.actor"
_MIXED_REWARDS = "{critic: [critique], judge: [judging], code: [solving]}"

_FIRST = (
    Arm(
        name="SFT",
        run="sft",
        files=(DATA / "critic_sft.parquet",),
        reinforced=False,
        start=None,
        steps=12,
        tests=TESTS,
        proxies=_OTHERS,
        rounds=True,
    ),
    Arm(name="SFT + GRPO", run="grpo", settings=_GRPO, tests=TESTS, proxies=_OTHERS, rounds=True),
    Arm(
        name="SFT, more steps",
        run="more_sft",
        files=(DATA / "critic_sft.parquet",),
        reinforced=False,
        tests=(UNSEEN_MUTANTS, UNSEEN_PROBLEMS),
    ),
    Arm(name="SFT + PPO", run="ppo", settings=(_PPO,), tests=(UNSEEN_MUTANTS, UNSEEN_PROBLEMS)),
)
_ALGORITHMS = (
    Arm(name="SFT + GRPO, by deviation", run="grpo_std", settings=(_BY_DEVIATION,)),
    Arm(
        name="SFT + Dr. GRPO",
        run="dr_grpo",
        settings=(*_GRPO, f"{_LOSS}.loss_agg_mode=seq-mean-token-sum-norm"),
    ),
    Arm(name="SFT + RLOO", run="rloo", settings=("algorithm.adv_estimator=rloo",)),
    Arm(
        name="SFT + DAPO",
        run="dapo",
        settings=(
            _BY_DEVIATION,
            "algorithm.filter_groups.enable=true",
            f"{_LOSS}.clip_ratio_high=0.28",
        ),
    ),
    Arm(
        name="SFT + GSPO",
        run="gspo",
        settings=(
            _BY_DEVIATION,
            *(f"{_LOSS}.policy_loss=gspo", f"{_LOSS}.loss_agg_mode=seq-mean-token-mean"),
            *(f"{_LOSS}.clip_ratio_low=3e-4", f"{_LOSS}.clip_ratio_high=4e-4"),
        ),
    ),
    # PPO whose value model learns alone at first; then with a shorter horizon, or not whitened.
    Arm(
        name="SFT + PPO, values first",
        run="ppo_first",
        settings=(_PPO, _VALUES_FIRST),
        steps=STEPS + 4,
    ),
    Arm(
        name="SFT + PPO, values first, lambda 0.95",
        run="ppo_lambda",
        settings=(_PPO, _VALUES_FIRST, "algorithm.lam=0.95"),
        steps=STEPS + 4,
    ),
    Arm(
        name="SFT + PPO, values first, not whitened",
        run="ppo_raw",
        settings=(_PPO, _VALUES_FIRST, "algorithm.adv_estimator_options={whiten: false}"),
        steps=STEPS + 4,
    ),
)
_OTHER_TRAINING = (
    Arm(
        name="SFT + GRPO, untuned proxy",
        run="grpo_untuned",
        settings=_GRPO,
        proxy=UNTUNED,
        proxies=_OTHERS,
    ),
    Arm(
        name="SFT + GRPO, TinyLlama as proxy",
        run="grpo_tinyllama",
        settings=_GRPO,
        proxy=OTHER_FAMILY,
        proxies=_OTHERS,
    ),
    Arm(
        name="SFT + GRPO, copies earn 0",
        run="grpo_uncopied",
        settings=(*_GRPO, "reward.copying=penalise"),
    ),
    Arm(
        name="SFT + GRPO, mixture of tasks",
        run="mixture",
        settings=(
            *(*_GRPO, "data.mixture=[0.8,0.1,0.1]"),
            "reward.reward_funcs=[critic,judge,code]",
            f"reward.reward_tasks={_MIXED_REWARDS}",
        ),
        files=(DATA / "rl.parquet", TASKS / "judging.parquet", TASKS / "solving.parquet"),
        steps=30,
        tests=(UNSEEN_MUTANTS, JUDGING),
    ),
)
# Trained on programs that models wrote for the training problems.
_REAL = (
    Arm(
        name=_ON_MODELS,
        run="real_sft",
        files=(REAL / "critic_sft.parquet",),
        reinforced=False,
        start=None,
        steps=24,
        tests=_REAL_TESTS,
    ),
    Arm(
        name="the same + GRPO on models' faults",
        run="real_grpo",
        settings=_GRPO,
        files=(REAL / "rl.parquet",),
        proxy=TUNED_ON_MODELS,
        start="real_sft",
        base=_ON_MODELS,
        tests=_REAL_TESTS,
    ),
    Arm(
        name="the same + GRPO on mutants of models' programs",
        run="real_mutants_grpo",
        settings=_GRPO,
        files=(REAL / "rl_mutants.parquet",),
        proxy=TUNED_ON_MODELS,
        start="real_sft",
        base=_ON_MODELS,
        tests=_REAL_TESTS,
    ),
    # Where most tests pass already, a wrong edit costs more than a right one gains.
    Arm(
        name="SFT + GRPO on mutants of any pass rate",
        run="all_mutants_grpo",
        settings=_GRPO,
        files=(REAL / "rl_all_mutants.parquet",),
        proxy=TUNED_ON_MODELS,
        tests=(HUMAN_FAULTS, UNSEEN_MUTANTS),
    ),
)
# Trained on mutants and on programs of models, with and without a teacher (docs/distillation.md).
_DISTIL, _BOTH = "algorithm.distillation", "SFT on mutants and models' programs"
# With 0.5 and more the teacher outweighs the reward (docs/experiments/learning.md).
_WEIGHT = f"{_DISTIL}.coef=0.1"
_REINFORCED = Arm(
    name="the same + GRPO on both",
    run="both_grpo",
    settings=_GRPO,
    files=(DATA / "rl.parquet", REAL / "rl.parquet"),
    proxy=TUNED_ON_MODELS,
    start="both_sft",
    base=_BOTH,
    tests=(HUMAN_FAULTS, MODEL_FAULTS, UNSEEN_MUTANTS),
)
_DISTILLED = (
    Arm(
        name=_BOTH,
        run="both_sft",
        files=(DATA / "critic_sft.parquet", REAL / "critic_sft.parquet"),
        reinforced=False,
        start=None,
        steps=36,
        tests=_REINFORCED.tests,
    ),
    _REINFORCED,
    replace(
        _REINFORCED,
        name="the same + GRPO + the critic itself with hints",
        run="both_own",
        settings=(*_GRPO, f"{_DISTIL}.teacher=policy", f"{_DISTIL}.hint=both", _WEIGHT),
    ),
    replace(
        _REINFORCED,
        name="the same + GRPO + a teacher with hints",
        run="both_taught",
        settings=(
            *(*_GRPO, f"{_DISTIL}.teacher=reference", f"{_DISTIL}.hint=diff"),
            *(f"{_DISTIL}.divergence=forward_kl", _WEIGHT),
            *(f"actor_rollout_ref.ref.model.path={TEACHER / 'hf'}", f"{_LOSS}.use_kl_loss=false"),
        ),
        taught=True,
    ),
)
ARMS = {arm.name: arm for arm in (*_FIRST, *_REAL, *_DISTILLED, *_ALGORITHMS, *_OTHER_TRAINING)}
"""All trained arms by name, in the order of the tables; a base comes before what it is compared
with."""
CURVES = tuple(arm.name for arm in (*_FIRST, *_ALGORITHMS) if arm.reinforced)
"""Arms whose rewards are drawn over critiques and seconds: they differ in the algorithm only."""

"""Every metric that a run of the built-in pipelines logs, and what it says; ``docs/metrics.md`` and
the titles of the report follow from it.

A capital word in a name stands for what the run puts there. Names of pipelines and losses of one's
own need no entry.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """One logged number."""

    meaning: str
    title: str = ""
    """Of its curve in the report; "" for a metric of the trainer that is not drawn by itself."""
    headline: bool = False
    """Whether its last value stands at the top of the report."""


_WEIGHT = "importance weights (or plain ratios) of trainer over engine: "
METRICS: dict[str, Metric] = {
    "reward/mean": Metric("the first reward function over judged samples", "Reward"),
    "reward/total": Metric("the weighted sum of all reward functions, where there are several"),
    "reward/NAME": Metric("the reward function NAME, unweighted, beside the first one"),
    "reward_share/zero": Metric("share of judged samples whose reward is 0"),
    "reward_share/up_to_half": Metric("share above 0 and up to 0.5"),
    "reward_share/below_one": Metric("share above 0.5 and below 1"),
    "reward_share/one": Metric("share that earned exactly 1"),
    "reward_share/elsewhere": Metric("share below 0 or above 1"),
    "reward/judged_rate": Metric(
        "share of samples with a reward; the sandbox lost the others, or reward.copying masks them"
    ),
    "reward/cached_rate": Metric("share of verdicts that no program had to run for"),
    "pass_rate/before": Metric("tests that the first solutions pass", headline=True),
    "pass_rate/after": Metric("tests that revisions of valid critiques pass", headline=True),
    "critique/valid_rate": Metric("share of critiques that contain a judgment", headline=True),
    "critique/copied_rate": Metric(
        "share of a revision's program that its critique already holds (reward.copying)",
        "Program in the critique",
    ),
    "critique/length": Metric("tokens of a critique"),
    "critique/cut_rate": Metric("share of critiques cut at data.max_response_length"),
    "judgment/correct_rate": Metric("share of critiques with a judgment that say correct"),
    "fault/named_rate": Metric("share that quote the fault, where the rows' column wrong has it"),
    "fault/exact_edit_rate": Metric("of these rows, share that quote what belongs there too"),
    "group/distinct_revision_rate": Metric("different revisions of a group, as a share of all"),
    "group/reward_minus_first": Metric(
        "reward minus the pass rate of the first solution", headline=True
    ),
    "revision/length": Metric("tokens of a revision"),
    "revision/left_out_rate": Metric(
        "share of valid critiques whose revision prompt is too long for the engine; left out"
    ),
    "response/length": Metric("tokens of a completion of grpo_pipeline"),
    "response/cut_rate": Metric("share of completions cut at data.max_response_length"),
    "actor/ppo_kl": Metric("old policy to new policy, per token", "KL of the update"),
    "actor/kl_to_reference": Metric("policy to reference model, per token", "KL to the reference"),
    "actor/pg_clipfrac": Metric("share whose ratio left the clip range", "Clipped tokens"),
    "actor/entropy": Metric("nats per response token, before the update", "Entropy"),
    "actor/grad_norm": Metric("global norm before clipping", "Gradient norm"),
    "actor/loss": Metric("what the optimizer steps minimised: policy loss, entropy, KL"),
    "actor/pg_loss": Metric("the policy loss alone"),
    "actor/kl_loss": Metric("the KL term of the loss, before its coefficient"),
    "actor/ppo_kl_first": Metric("actor/ppo_kl of the step's first optimizer step; 0 is right"),
    "actor/pg_clipfrac_lower": Metric("share of tokens that the dual clip bounded"),
    "actor/lr": Metric("learning rate, the mean over the step's optimizer steps", "Learning rate"),
    "actor/kl_coef": Metric("coefficient of the KL in the reward"),
    "actor/reward_kl_penalty": Metric("KL per token that the reward was charged for"),
    "advantage/mean_abs": Metric("absolute advantage per token; 0: nothing to learn from"),
    "advantage/zero_std_rate": Metric(
        "share of groups whose samples earned the same; they teach nothing", "Groups without signal"
    ),
    "critic/explained_variance": Metric("explained share of the returns' variance", "Value model"),
    "critic/loss": Metric("what the value model's steps minimised"),
    "critic/vf_loss": Metric("half the squared error of the values, clipped"),
    "critic/vf_clipfrac": Metric("share of tokens whose value left the clip range"),
    "critic/value_mean": Metric("value per token"),
    "critic/grad_norm": Metric("the value model's gradient norm before clipping"),
    "critic/lr": Metric("the value model's learning rate"),
    "filter/NAME": Metric("share of rows that the filter_plugin of the node NAME lets stay"),
    "sampling/rounds": Metric("draws until enough groups had different rewards"),
    "sampling/useful_rate": Metric("share of this step's groups with different rewards"),
    "sampling/reserve": Metric("useful groups kept for the next step"),
    "rollout/probs_diff_mean": Metric(
        "mean difference of a token's probability", "Engine against trainer"
    ),
    "rollout/probs_diff_max": Metric("largest difference of a token's probability"),
    "rollout/kl": Metric("KL of the engine's to the trainer's distribution, per token (k3)"),
    "rollout/ess": Metric("effective sample size of the weights, as a share of the tokens"),
    "rollout/is_mean": Metric(_WEIGHT + "their mean"),
    "rollout/is_truncated": Metric(_WEIGHT + "share at the threshold"),
    "rollout/rejected": Metric("share of tokens that rollout_correction took out of the loss"),
    "sft/loss": Metric("cross-entropy per response token, nats", headline=True),
    "sft/entropy": Metric("nats per response token"),
    "sft/grad_norm": Metric("global norm before clipping"),
    "sft/lr": Metric("learning rate"),
    "perf/tokens_per_second": Metric("all tokens over the whole step", "Throughput"),
    "perf/mfu": Metric("share of the devices' peak that the model's arithmetic used", "MFU"),
    "perf/overlap_seconds": Metric("time of the sandbox's work beside the trainer's"),
    "perf/engine_balance": Metric("fewest over most tokens that one of several engines drew"),
    "sync/pushes": Metric("times that weights went to the engines"),
    "sync/seconds": Metric("time of these, checksums included where they are on"),
    "sync/gigabytes_per_second": Metric("speed of these"),
    "sandbox/isolation": Metric("how programs are held: 2 strict, 1 standard, 0 not at all"),
    "time/step": Metric("seconds of the whole step"),
    "time/NAME": Metric("seconds of the node NAME; wait_NAME: of waiting for it"),
    "memory/host_gib": Metric(
        "GiB of host memory that the rank with most holds at the step's end", "Host memory"
    ),
    "memory/NAME_peak_gib": Metric("most GiB of a GPU that tensors took in the phase NAME"),
    "memory/NAME_device_gib": Metric("most GiB of a GPU in use by anybody in the phase NAME"),
    "checkpoint/seconds": Metric("from the save's begin until the directory had its name"),
    "checkpoint/blocked_seconds": Metric("of these, those in which training stood still"),
    "checkpoint/gib_per_rank": Metric("GiB by the rank that wrote most"),
    "val/valid_critique_rate": Metric("share of greedy critiques that contain a judgment"),
    "val/judgment_accuracy": Metric(
        "share that judge the first solution rightly; none is wrong", headline=True
    ),
    "val/pass_rate_before": Metric("tests that the first solutions pass"),
    "val/revision_pass_rate": Metric("tests that the greedy revisions pass"),
    "val/solved_before": Metric("share of first solutions that pass every test", headline=True),
    "val/solved_after": Metric("share of revisions that pass every test", headline=True),
    "val/to_right": Metric("share of attempts that became right"),
    "val/to_wrong": Metric("share of attempts that became wrong"),
    "val/rounds": Metric("attempts that the rates are over"),
    "val/unjudged": Metric("attempts left out, for the sandbox failed to judge them"),
    "val/reward/NAME": Metric("the reward function NAME over greedy completions (grpo_pipeline)"),
    "val/NAME/RATE": Metric("RATE of the file NAME alone, where data.val_files has several"),
    "val/nll": Metric("held-out cross-entropy of fine-tuning, nats per token", headline=True),
}


def metric_of(name: str) -> Metric | None:
    """What is declared about a logged name; None for one of somebody's own."""
    exact = METRICS.get(name)
    if exact is not None:
        return exact
    found = next((m for pattern, m in METRICS.items() if _matches(pattern, name)), None)
    rate = rate_of_all(name)
    return metric_of(rate) if found is None and rate is not None else found


def rate_of_all(name: str) -> str | None:
    """Of a rate of one validation file, ``val/NAME/RATE``, that of all of them, ``val/RATE``; None
    for any other name.
    """
    parts = re.fullmatch(r"val/(?!reward/)[\w.-]+/(.+)", name)
    return f"val/{parts[1]}" if parts else None


def _matches(pattern: str, name: str) -> bool:
    return "NAME" in pattern and bool(re.fullmatch(pattern.replace("NAME", r"[\w:./-]+"), name))

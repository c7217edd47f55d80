"""The metrics of the built-in pipelines with their meanings, from which ``docs/metrics.md`` and the
titles of the report are made.

A capital word in a name is a placeholder. Metrics of a user's own pipelines and losses need no
entry.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """One logged number."""

    meaning: str
    title: str = ""
    """Title of its curve in the report; "" for a metric without a curve."""
    headline: bool = False
    """Whether the report shows its last value at the top."""


_RESTARTS = "how often {} of the run have been started again, where any has been"
_WEIGHT = "importance weights (or plain ratios) of trainer over engine: "
METRICS: dict[str, Metric] = {
    "reward/mean": Metric("the first reward function over judged samples", "Reward"),
    "reward/total": Metric("the weighted sum of all reward functions, where there are several"),
    "reward/NAME": Metric("the reward function NAME, unweighted, beside the first one"),
    "reward_model/length": Metric("tokens of a conversation that the reward model reads"),
    "reward_share/zero": Metric("share of judged samples whose reward is 0"),
    "reward_share/up_to_half": Metric("share above 0 and up to 0.5"),
    "reward_share/below_one": Metric("share above 0.5 and below 1"),
    "reward_share/one": Metric("share that earned exactly 1"),
    "reward_share/elsewhere": Metric("share below 0 or above 1"),
    "reward/judged_rate": Metric(
        "share of the programs to judge that the sandbox or provider judged; critiques without a "
        "judgment have none"
    ),
    "reward/masked_rate": Metric(
        "share of samples without a reward, which the loss leaves out: not judged, masked by "
        "reward.copying, or no room for a revision"
    ),
    "reward/unjudgeable_rate": Metric(
        "share of the programs to judge on which a test could not be judged, which counts as a "
        "failure; the log names rows without any other program"
    ),
    "reward/cached_rate": Metric("share of verdicts that were cached"),
    "pass_rate/before": Metric("tests that the first solutions pass", headline=True),
    "pass_rate/after": Metric("tests that revisions of valid critiques pass", headline=True),
    "critique/valid_rate": Metric("share of critiques that contain a judgment", headline=True),
    "critique/copied_rate": Metric(
        "share of the lines of a revision's program that its critique contains (reward.copying)",
        "Program in the critique",
    ),
    "critique/leaked_rate": Metric(
        "share of critiques that quote a test, a value of one, or a line of the reference program "
        "other than in the place of a line that they name (reward function leak)",
        "Leaks in critiques",
    ),
    "critique/length": Metric("tokens of a critique"),
    "critique/cut_rate": Metric("share of critiques cut at data.max_response_length"),
    "judgment/correct_rate": Metric("share of critiques with a judgment that say correct"),
    "fault/named_rate": Metric("share that quote the fault, where the rows' column wrong has it"),
    "fault/exact_edit_rate": Metric("share, of these rows, that also quote the correct code"),
    "group/distinct_revision_rate": Metric("different revisions of a group, as a share of all"),
    "group/reward_minus_first": Metric(
        "reward minus the pass rate of the first solution", headline=True
    ),
    "turn/N/share": Metric("critiques of turn N among all (ctrl_rounds_pipeline)"),
    "turn/N/pass_rate_before": Metric("tests that the programs pass that turn N criticises"),
    "turn/N/pass_rate_after": Metric("tests that the revisions of turn N pass"),
    "turn/N/right": Metric("share of the revisions of turn N that pass every test"),
    "turn/N/undone": Metric("share of right programs that turn N made wrong"),
    "turn/N/called_right_rightly": Metric("share of critiques that say correct of a right program"),
    "turn/N/called_right_wrongly": Metric("share of critiques that say correct of a wrong program"),
    "program/pass_rate": Metric("tests that the solver's first programs pass (co_train_pipeline)"),
    "program/right": Metric("share of the first programs that pass every test: pass@1"),
    "program/length": Metric("tokens of a first program"),
    "program/cut_rate": Metric("share of first programs cut at data.max_response_length"),
    "revised_program/pass_rate": Metric("tests that the solver's revisions pass"),
    "revised_program/right": Metric("share of the revisions that pass every test"),
    "revised_program/length": Metric("tokens of a revision"),
    "revised_program/cut_rate": Metric("share of revisions cut at data.max_response_length"),
    "task/NAME/share": Metric(
        "share of the responses to rows of the task NAME, if there are several"
    ),
    "task/NAME/reward": Metric("weighted rewards of the responses to rows of the task NAME"),
    "task/NAME/length": Metric("tokens of a response to a row of the task NAME"),
    "revision/length": Metric("tokens of a revision"),
    "revision/left_out_rate": Metric(
        "share of valid critiques whose revision prompt is too long for the engine; left out"
    ),
    "response/length": Metric(
        "tokens that the model drew of a completion of grpo_pipeline, or of an episode"
    ),
    "response/cut_rate": Metric("share of them cut at data.max_response_length"),
    "episode/turns": Metric("answers of the model in an episode", "Turns"),
    "episode/done_rate": Metric("share of episodes that the environment ended"),
    "episode/observed_tokens": Metric("tokens of an episode that the model read between answers"),
    "episode/gain": Metric("score of an episode less its score after the first answer", "Gain"),
    "embodied/success_rate": Metric(
        "share of the episodes of embodied_srpo_pipeline that reached their goal", "Success"
    ),
    "embodied/progress": Metric("reward of those that did not"),
    "actor/ppo_kl": Metric("old policy to new policy, per token", "KL of the update"),
    "actor/kl_to_reference": Metric("policy to reference model, per token", "KL to the reference"),
    "actor/pg_clipfrac": Metric("share whose ratio left the clip range", "Clipped tokens"),
    "actor/entropy": Metric("nats per response token, before the update", "Entropy"),
    "actor/grad_norm": Metric("global norm before clipping", "Gradient norm"),
    "actor/loss": Metric("the minimised loss: policy loss, entropy bonus, KL"),
    "actor/pg_loss": Metric("the policy loss alone"),
    "actor/kl_loss": Metric("the KL term of the loss, before its coefficient"),
    "actor/divergence": Metric(
        "mean divergence from the teacher over the tokens that have one, before its coefficient "
        "(algorithm.distillation)",
        "Divergence from the teacher",
    ),
    "distillation/row_rate": Metric("share of responses from whose teacher the actor learns"),
    "distillation/left_out_rate": Metric(
        "share of responses without a teacher, because a part of the hint is unknown or the "
        "prompt with it is too long"
    ),
    "distillation/teacher_entropy": Metric("mean entropy of the teacher's probabilities"),
    "distillation/teacher_probability": Metric(
        "mean probability that the teacher gives to the actor's tokens"
    ),
    "distillation/judgment_agreement": Metric(
        "share of the actor's judgments to which the teacher gives more than one half"
    ),
    "actor/ppo_kl_first": Metric("actor/ppo_kl of the step's first optimizer step; 0 is right"),
    "actor/pg_clipfrac_lower": Metric("share of tokens that the dual clip bounded"),
    "actor/lr": Metric("learning rate, the mean over the step's optimizer steps", "Learning rate"),
    "actor/kl_coef": Metric("coefficient of the KL in the reward"),
    "actor/reward_kl_penalty": Metric("KL per token that was subtracted from the reward"),
    "advantage/mean_abs": Metric("absolute advantage per token; 0: nothing to learn from"),
    "advantage/zero_std_rate": Metric(
        "share of groups whose samples all earned the same",
        "Groups without signal",
    ),
    "critic/explained_variance": Metric("explained share of the returns' variance", "Value model"),
    "critic/loss": Metric("the value model's minimised loss"),
    "critic/vf_loss": Metric("half the squared error of the values, clipped"),
    "critic/vf_clipfrac": Metric("share of tokens whose value left the clip range"),
    "critic/value_mean": Metric("value per token"),
    "critic/grad_norm": Metric("the value model's gradient norm before clipping"),
    "critic/lr": Metric("the value model's learning rate"),
    "critic/moe/NAME": Metric("moe/NAME of the value model"),
    "moe/max_load": Metric(
        "tokens of the busiest expert over the mean of its layer, in the layer where that is most",
        "Busiest expert",
    ),
    "moe/replayed_rate": Metric("share of the routers' choices that were replayed"),
    "moe/replay_differs_rate": Metric("share of these in which the router's own choice differs"),
    "moe/max_load/NAME": Metric("the same of layer NAME, counted from 0"),
    "moe/balance_loss": Metric("moe_aux_loss_coeff's loss, mean over layers; 1 if all is even"),
    "moe/z_loss": Metric("moe_z_loss_coeff's loss, mean over layers"),
    "filter/NAME": Metric("share of rows that the filter_plugin of the node NAME keeps"),
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
    "rollout/staleness": Metric(
        "updates between the weights that drew a token and those that train on it; with "
        "actor_rollout_ref.rollout.staleness"
    ),
    "rollout/mixed_rate": Metric(
        "share of samples that several versions of the weights drew; with "
        "actor_rollout_ref.rollout.update_in_flight"
    ),
    "rollout/rejected": Metric("share of tokens that rollout_correction took out of the loss"),
    "sft/loss": Metric("cross-entropy per response token, nats", headline=True),
    "sft/entropy": Metric("nats per response token"),
    "sft/grad_norm": Metric("global norm before clipping"),
    "sft/lr": Metric("learning rate"),
    "update/skipped": Metric(
        "updates of the step that were skipped, because the loss or the gradient was not finite; "
        "missing where there were none"
    ),
    "perf/tokens_per_second": Metric("all tokens over the whole step", "Throughput"),
    "perf/mfu": Metric("share of the devices' peak that the model's arithmetic used", "MFU"),
    "perf/overlap_seconds": Metric("time in which sandbox and trainer worked simultaneously"),
    "perf/engine_balance": Metric("fewest over most tokens that one of several engines drew"),
    "engine/tokens_per_second": Metric(
        "tokens that the engines drew per second with a request, summed over the actor's engines",
        "Engine throughput",
    ),
    "engine/cache_hit_rate": Metric(
        "share of the prompts' tokens whose keys an engine had already (vllm, sglang)"
    ),
    "engine/queue_length": Metric(
        "completions that waited for room in an engine, the mean while it had requests (vllm, "
        "sglang)"
    ),
    "proxy/requests": Metric("requests to servers of the proxy, without repeated attempts"),
    "proxy/cached_rate": Metric(
        "share of the revisions asked of servers that a cached answer or an equal request spared",
        "Cached revisions",
    ),
    "engine/restarts": Metric(_RESTARTS.format("engines")),
    "sandbox/restarts": Metric(_RESTARTS.format("sandboxes")),
    "engine/preemptions": Metric(
        "completions that an engine interrupted for want of cache memory (vllm, sglang)"
    ),
    "sync/pushes": Metric("pushes of weights to the engines"),
    "sync/seconds": Metric("time of the pushes, including what verifies them"),
    "sync/gigabytes": Metric("what the pushes sent; kept weights of the proxy are sent once"),
    "sync/gigabytes_per_second": Metric("speed of the pushes that sent anything"),
    "sandbox/isolation": Metric("isolation of programs: 2 strict, 1 standard, 0 none"),
    "time/step": Metric("seconds of the whole step"),
    "time/NAME": Metric("seconds of the node NAME; wait_NAME: seconds of waiting for it"),
    "memory/host_gib": Metric(
        "GiB of host memory of the largest rank at the end of the step", "Host memory"
    ),
    "memory/NAME_peak_gib": Metric("peak GiB of a GPU for tensors in the phase NAME"),
    "memory/NAME_device_gib": Metric("GiB of a GPU in use by all processes after the phase NAME"),
    "checkpoint/seconds": Metric("from the start of the save to the final name of the directory"),
    "checkpoint/blocked_seconds": Metric("the part of it in which training waited"),
    "checkpoint/gib_per_rank": Metric("GiB written by the rank that wrote most"),
    "val/valid_critique_rate": Metric("share of critiques that contain a judgment"),
    "val/judgment_accuracy": Metric(
        "share that judge the first solution rightly; none is wrong",
        headline=True,
    ),
    "val/f1_macro": Metric("mean F1 of judgments over both classes", headline=True),
    "val/auc": Metric("a right program's probability of Correct above a wrong one's"),
    "val/ece": Metric("calibration error of that probability, in ten bins"),
    "val/brier": Metric("mean square of that probability less 1 (right) or 0 (wrong)"),
    "val/pass_rate_before": Metric("tests that the first solutions pass"),
    "val/revision_pass_rate": Metric("tests that the greedy revisions pass"),
    "val/solved_before": Metric("share of first solutions that pass every test", headline=True),
    "val/solved_after": Metric("share of revisions that pass every test", headline=True),
    "val/to_right": Metric("share of attempts that became right"),
    "val/to_wrong": Metric("share of attempts that became wrong"),
    "val/rounds": Metric("number of attempts in the rates"),
    "val/unjudged": Metric("attempts that the sandbox failed to judge, which are left out"),
    "val/reward/NAME": Metric("the reward function NAME over completions (grpo_pipeline)"),
    "val/pass@K": Metric("share of rows that one of the K texts of rollout.val_kwargs.n solves"),
    "val/turn/N/solved": Metric("share of chains that are right after turn N"),
    "val/turn/N/stopped_solved": Metric(
        "the same where revising stops at the first critique that says correct"
    ),
    "val/episode_score": Metric("the score of episodes", headline=True),
    "val/episode_turns": Metric("answers of the model in an episode"),
    "val/NAME/RATE": Metric("RATE of the file NAME alone, where data.val_files has several"),
    "agent1/NAME": Metric("NAME of the policy agent1 (policies); agent2/NAME of the next one"),
    "val/nll": Metric("held-out cross-entropy of fine-tuning, nats per token", headline=True),
}


def describe_metric(name: str) -> Metric | None:
    """The entry of a logged name; None for a metric of a user's own."""
    entry, rate = metric_pattern(name), rate_name_of_all_sets(name)
    if entry is None:
        return None if rate is None else describe_metric(rate)
    return METRICS[entry]


def metric_pattern(name: str) -> str | None:
    """The key of ``METRICS`` for a logged name: itself, or the pattern that it matches."""
    if name in METRICS:
        return name
    return next((pattern for pattern in METRICS if _matches(pattern, name)), None)


def rate_name_of_all_sets(name: str) -> str | None:
    """``val/RATE`` for ``val/NAME/RATE``, the rate of one validation file; None for other names."""
    parts = re.fullmatch(r"val/(?!reward/)[\w.-]+/(.+)", name)
    return f"val/{parts[1]}" if parts else None


def _matches(pattern: str, name: str) -> bool:
    return "NAME" in pattern and bool(re.fullmatch(pattern.replace("NAME", r"[\w:./-]+"), name))

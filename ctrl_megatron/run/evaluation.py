"""Evaluating critics: from a checked configuration to a directory of transcripts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from ctrl_megatron.checkpoint.run_directory import require_writable_run_directory
from ctrl_megatron.config import Config
from ctrl_megatron.config.secrets import hide_credentials_in_text
from ctrl_megatron.data.tokens import TextCodec
from ctrl_megatron.errors import UserError, convert_input_errors, run_all_checks
from ctrl_megatron.eval.labelled import LabelledAnswer, read_labelled_answers
from ctrl_megatron.eval.pairwise import ResponsePair, read_response_pairs
from ctrl_megatron.eval.transcripts import (
    LABELLED_FOLDER,
    PAIRS_FOLDER,
    TURNS_FOLDER,
    ChainPlan,
    begin_evaluation,
    check_evaluation_folder,
    transcript_part_file,
    write_transcript_part,
)
from ctrl_megatron.eval.written import is_critique_file, read_critiques
from ctrl_megatron.models.safetensors_dir import SafetensorsDirectory
from ctrl_megatron.parallel.stop import StopRequested
from ctrl_megatron.resharding.transports import sender_class
from ctrl_megatron.rewards.plan import plan_rewards
from ctrl_megatron.rollout.engine import require_engine
from ctrl_megatron.rollout.engine_specs import proxy_path
from ctrl_megatron.run.build import rollout_worker
from ctrl_megatron.run.checked_rows import inputs_with_checked_tests
from ctrl_megatron.run.checks.models import check_model_files, check_proxy, check_tokenizers
from ctrl_megatron.run.checks.rewards import check_rewards
from ctrl_megatron.run.inputs import RunInputs, read_inputs
from ctrl_megatron.run.session import session
from ctrl_megatron.steps.conversation import (
    judge_labelled,
    judge_pairs,
    pair_prompts,
    row_of_labelled,
    run_conversations,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationJob:
    """The critics that are evaluated, and the draws for each of them."""

    critics: Mapping[str, str]
    """Name -> HF directory with the actor's architecture, or ``.jsonl`` file of critiques."""
    plan: ChainPlan
    seeds: tuple[int, ...]
    pairs: Path | None = None
    """File of pairs in JudgeBench's format; None evaluates no pairs."""
    labelled: Path | None = None
    """File of answers whose verdict is known (``eval.labelled``); None judges none."""
    overwrite: bool = False
    """Replace transcripts that are there, also where the settings differ."""


def evaluate(config: Config, job: EvaluationJob) -> bool:
    """Write the transcripts of every critic and seed that are not yet in
    ``config.trainer.run_dir``; returns False if a signal stopped it. The configured proxy revises.

    Raises UserError, before any process starts, for every argument that cannot be used.
    """
    check_evaluation(config, job.critics)
    out, settings = Path(config.trainer.run_dir), transcript_settings(config, job)
    critics = {name: _weights(path) for name, path in job.critics.items()}
    anew = check_evaluation_folder(out, settings, critics, overwrite=job.overwrite)
    with convert_input_errors("--out"):
        require_writable_run_directory(out, "--out")
    rewards, pairs = plan_rewards(config, ("critic",)), []
    labelled: list[LabelledAnswer] = []
    inputs = read_inputs(config, rewards, trains=False, revises=True)
    if job.labelled is not None:
        labelled = _read_labelled(job.labelled, config, inputs)
    if job.pairs is not None:
        pairs = _read_pairs(job.pairs, config, inputs)
    _check_turns(job.plan, inputs)
    written = {
        name: _read_written(path, job, inputs)
        for name, path in job.critics.items()
        if is_critique_file(path)
    }
    # Written critiques need no weights but the proxy's.
    weights = {
        name: config.actor_rollout_ref.model.path if name in written else path
        for name, path in job.critics.items()
    }
    todo = list(_missing(out, job, anew))
    if not todo:
        return True
    finished = False
    with session(config) as run:
        first, inputs = run.groups.is_first, inputs_with_checked_tests(run, inputs)
        if first:
            aside = begin_evaluation(out, settings, critics, anew=anew, overwrite=job.overwrite)
            _say_what_changed(anew, aside)
            print(
                *inputs.bad_row_warnings(),
                sep="\n",
                end="\n" * bool(inputs.bad_row_warnings()),
                flush=True,
            )
        services = run.start_services(
            max_model_len=inputs.max_model_len,
            proxy_model_len=inputs.proxy_model_len,
            judges=inputs.rewards.runs_programs,
        )
        loaded = weights[todo[0][0]]
        worker = rollout_worker(run, services, loaded, inputs)
        try:
            for critic, seed, kind in todo:
                if weights[critic] != loaded and critic not in written:
                    loaded = weights[critic]
                    worker.device_owner.set_directory("actor", loaded)
                if first:
                    print(f"{critic}: {kind}, seed {seed}", flush=True)
                draw: Callable[..., Sequence[Any]] = partial(
                    run_conversations, written=written.get(critic)
                )
                if kind == PAIRS_FOLDER:
                    draw = partial(judge_pairs, pairs=pairs)
                elif kind == LABELLED_FOLDER:
                    draw = partial(judge_labelled, answers=labelled)
                records = draw(worker, plan=job.plan, critic=critic, seed=seed)
                if first:
                    write_transcript_part(transcript_part_file(out, critic, seed, kind), records)
            finished = True
        except StopRequested:
            if first:
                print(f"stopped by a signal; finished transcripts are in {out}", flush=True)
        run.watch.stop_watching_others()
        worker.close()
    return finished


def _say_what_changed(anew: Sequence[str], aside: Path | None) -> None:
    for name in anew:
        print(f"{name}: its weights have changed; drawing it again", flush=True)
    if aside is not None:
        print(f"transcripts of the previous weights are now in {aside}", flush=True)


def _missing(out: Path, job: EvaluationJob, anew: Sequence[str]) -> Iterable[tuple[str, int, str]]:
    """The transcripts to write, as (critic, seed, folder), ordered by critic."""
    kinds = [TURNS_FOLDER]
    kinds += [PAIRS_FOLDER] if job.pairs else []
    kinds += [LABELLED_FOLDER] if job.labelled else []
    for critic in job.critics:
        for kind in kinds:
            for seed in job.seeds:
                there = transcript_part_file(out, critic, seed, kind).is_file()
                if job.overwrite or critic in anew or not there:
                    yield critic, seed, kind


def check_evaluation(config: Config, critics: Mapping[str, str]) -> None:
    """Raise UserError with a line for every argument of an evaluation that cannot be used."""
    if not config.data.val_files:
        raise UserError("data.val_files is empty; there is nothing to evaluate on")
    others = {
        f"{stage}={path}": path for stage, path in critics.items() if not is_critique_file(path)
    }
    rollout = config.actor_rollout_ref.rollout
    run_all_checks(
        lambda: check_model_files(config, "rl", others),
        lambda: require_engine(rollout.name, rollout.python),
        lambda: sender_class(rollout.weight_transport),
        lambda: check_tokenizers(config, "rl", others),
        lambda: check_proxy(config),
        lambda: _check_frozen(config),
        lambda: check_rewards(config),
    )


def transcript_settings(config: Config, job: EvaluationJob) -> dict[str, Any]:
    """The settings that all transcripts of a directory share, so that critics are comparable."""
    family, plan = config.actor_rollout_ref, job.plan
    tokenizer = family.model.tokenizer
    drawn = {"top_p": family.rollout.top_p, "top_k": family.rollout.top_k}
    return {
        "rows": [_file(Path(path)) for path in config.data.val_files],
        "pairs": None if job.pairs is None else _file(job.pairs),
        **({} if job.labelled is None else {"labelled": _file(job.labelled)}),
        "proxy": _proxy(config),
        "tokenizer": {"path": tokenizer, "digest": TextCodec(tokenizer).fingerprint()},
        "prompt_key": config.data.prompt_key,
        "samples": plan.samples,
        "turns": plan.turns,
        "temperature": plan.temperature,
        **(drawn if plan.temperature else {}),
        "engine": family.rollout.name,
        "dtype": family.rollout_dtype,
        "max_prompt_length": config.data.max_prompt_length,
        "max_response_length": config.data.max_response_length,
        "revision_max_tokens": family.rollout.revision_max_tokens,
        "run_timeout": config.reward.run_timeout,
    }


def _file(path: Path) -> dict[str, str]:
    with convert_input_errors():
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return {"path": str(path), "digest": digest}


def _weights(directory: str) -> dict[str, str]:
    """The critic's path, and a digest of its weights or of its file of critiques."""
    if is_critique_file(directory):
        return {"path": directory, "weights": _file(Path(directory))["digest"]}
    return {"path": directory, "weights": SafetensorsDirectory(directory).fingerprint()}


def _check_frozen(config: Config) -> None:
    """UserError for a proxy that a run trains."""
    if config.actor_rollout_ref.proxy.kind == "agent1":
        raise UserError(
            "nothing learns in an evaluation",
            key="actor_rollout_ref.proxy.kind=agent1",
            remedy="set it to shared, and actor_rollout_ref.proxy.model.path to the policy's "
            "directory (ctrl-convert-megatron-to-hf --model agent1)",
        )


def _proxy(config: Config) -> dict[str, str]:
    keys = config.actor_rollout_ref.proxy
    if keys.kind == "api":
        servers = ", ".join(map(hide_credentials_in_text, keys.api.base_url))
        return {"model": keys.api.model, "path": f"{keys.api.model} on {servers}"}
    return _weights(proxy_path(config))


def _read_written(path: str, job: EvaluationJob, inputs: RunInputs) -> dict[str, str]:
    """Row id -> critique, from a file. Raises UserError where the job cannot use them."""
    assert inputs.validation is not None
    given = (("--pairs", job.pairs), ("--labelled", job.labelled))
    asked_for = {flag: file is not None for flag, file in given}
    for flag, asked in {"--turns": job.plan.turns > 1, **asked_for}.items():
        if asked:
            raise UserError(
                f"{path} contains critiques of the first solutions only",
                key=flag,
                remedy="leave the flag out, or give a model instead of a file",
            )
    critiques = read_critiques(Path(path))
    for row in inputs.validation.rows:
        if row.id not in critiques:
            raise UserError(
                f"{path} has no critique of {row.id} ({row.place})",
                remedy="add one: every validation row needs a critique",
            )
        text = critiques[row.id]
        if (back := inputs.codec.decode(inputs.codec.encode(text))) != text:
            offset = next(i for i in count() if text[: i + 1] != back[: i + 1])
            raise UserError(
                f"{path}: the tokenizer does not reproduce the critique of {row.id} from character "
                f"{offset} on: {text[offset : offset + 20]!r}",
                remedy="remove special tokens and characters that are not text",
            )
    return critiques


def _read_pairs(path: Path, config: Config, inputs: RunInputs) -> list[ResponsePair]:
    with convert_input_errors("--pairs"):
        pairs, longest = read_response_pairs(path), config.data.max_prompt_length
        for pair in pairs:
            tokens = max(
                len(inputs.codec.encode_chat(messages, add_generation_prompt=True))
                for messages in pair_prompts(pair)
            )
            if tokens > longest:
                raise UserError(
                    f"{path}: the prompt for the pair {pair.pair_id} has {tokens} tokens, more "
                    f"than data.max_prompt_length={longest}",
                    remedy="raise it, or remove the pair",
                )
    return pairs


def _read_labelled(path: Path, config: Config, inputs: RunInputs) -> list[LabelledAnswer]:
    with convert_input_errors("--labelled"):
        answers, longest = read_labelled_answers(path), config.data.max_prompt_length
        for answer in answers:
            request = list(row_of_labelled(answer).prompt)
            tokens = len(inputs.codec.encode_chat(request, add_generation_prompt=True))
            if tokens > longest:
                raise UserError(
                    f"{path}: the request for a critique of {answer.id} has {tokens} tokens, more "
                    f"than data.max_prompt_length={longest}",
                    remedy="raise it, or remove the answer",
                )
    return answers


def _check_turns(plan: ChainPlan, inputs: RunInputs) -> None:
    """Raise UserError where the first turn's request is not the one that later turns use."""
    assert inputs.validation is not None
    if plan.turns == 1:
        return
    for row in inputs.validation.rows:
        if not row.has_built_in_prompt:
            raise UserError(
                f"{row.place}: the row's prompt differs from the built-in request for a critique, "
                "which later turns use",
                key="--turns",
                remedy="leave --turns out for rows with prompts of your own",
            )

"""Checks and reads the input of a run before processes and models start.

The command that starts the ranks, and every rank, find the same problems and raise them as one
UserError with a line for each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

from ctrl_megatron.checkpoint.store import CheckpointStore
from ctrl_megatron.config import Config, to_yaml
from ctrl_megatron.config.environment import read_launch
from ctrl_megatron.data.prompt_table import PromptTable, load_prompt_table
from ctrl_megatron.data.rows import CRITIQUE, Row, read_rows, rows_by_id
from ctrl_megatron.data.tokens import TextCodec
from ctrl_megatron.errors import UserError, begin_lines_of_errors, convert_input_errors
from ctrl_megatron.models.hf_config import read_shape
from ctrl_megatron.models.shape import context_of
from ctrl_megatron.prompts import revision_messages
from ctrl_megatron.record.recorder import config_changes, read_stage_table
from ctrl_megatron.rewards.build import make_row_check
from ctrl_megatron.rewards.plan import RewardPlan
from ctrl_megatron.rollout.engine_specs import proxy_path
from ctrl_megatron.rollout.weight_update import read_model_config
from ctrl_megatron.run.checks.models import check_proxy, check_reward_model, load_checked_tokenizer
from ctrl_megatron.run.checks.rewards import check_rows_rewardable

_REENCODED_SHARE = 8
"""The text of a critique may encode to an eighth more tokens than were drawn; a longer one counts
as too long in the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInputs:
    """The rows of a run as tokens, and the tokenizer that made them."""

    codec: TextCodec
    train: PromptTable
    validation: PromptTable | None
    rewards: RewardPlan
    max_model_len: int
    """Longest sequence that the actor's engines are built for, in tokens."""
    proxy_codec: TextCodec | None = None
    """The tokenizer of a proxy with engines of its own."""
    proxy_model_len: int | None = None
    """Longest sequence of these engines, in tokens."""
    reward_codec: TextCodec | None = None
    """The reward model's tokenizer."""
    further: tuple[RunInputs, ...] = ()
    """The same for each further policy: the run's rows, as tokens of its own."""

    def of_policy(self, number: int) -> RunInputs:
        """Those of the policy with that ``agent_group``."""
        return self.further[number - 1] if number and self.further else self

    def with_tables(self, train: PromptTable, validation: PromptTable | None) -> RunInputs:
        """The same with other tables, for all policies."""

        def own(table: PromptTable | None, rows: PromptTable | None) -> PromptTable | None:
            return None if table is None or rows is None else table.of_rows(rows.rows)

        further = tuple(
            replace(
                one,
                train=one.train.of_rows(train.rows),
                validation=own(one.validation, validation),
            )
            for one in self.further
        )
        return replace(self, train=train, validation=validation, further=further)

    def bad_row_warnings(self) -> list[str]:
        """A warning for each table of which bad rows were left out."""
        tables = {"data.train_files": self.train, "data.val_files": self.validation}
        if self.validation is self.train:
            del tables["data.train_files"]
        return [
            f"warning: {len(table.bad)} rows of {key} are left out (data.bad_rows=drop), the first "
            f"because {table.bad[0]}"
            for key, table in tables.items()
            if table is not None and table.bad
        ]


def is_finished(
    config: Config,
    steps: int,
    *,
    models: tuple[str, ...],
    stage: str | None,
    files: tuple[str, ...] = (),
) -> bool:
    """Whether the run has done its steps and written its final files; then rank 0 prints so.

    ``models`` are the folders of a checkpoint's models.
    ``stage`` is the last row of the final table; None for a run without validation.
    """
    trainer, run_dir = config.trainer, Path(config.trainer.run_dir)
    store = CheckpointStore(run_dir / "checkpoints", keep=-1, side_files=run_dir)
    checkpoint = store.find_undamaged(trainer.resume_mode, models)
    if checkpoint is None or checkpoint.step < steps:
        return False
    stages = {None, *(row["stage"] for row in read_stage_table(run_dir))}
    left = ("report.html", *files)
    if stage not in stages or not all((run_dir / name).exists() for name in left):
        return False
    if read_launch().rank == 0:
        changed = config_changes(run_dir, to_yaml(config))
        other = f"; it was trained with other keys: {'; '.join(changed)}" if changed else ""
        print(
            f"nothing to do: {checkpoint.path} holds the last of {steps} steps; raise "
            "total_training_steps or total_epochs to go on, or name another "
            f"trainer.experiment_name{other}",
            flush=True,
        )
    return True


def read_inputs(
    config: Config,
    rewards: RewardPlan,
    *,
    trains: bool = True,
    validates: bool = True,
    revises: bool = False,
) -> RunInputs:
    """The tables of the run; those of an evaluation (``trains=False``) are the validation rows.

    ``rewards`` can reward every row (``make_row_check``). Without ``validates`` there is no table
    of validation rows. If the run ``revises`` first solutions, engines get room for the revision
    prompts.

    UserError naming file, row and column of a wrong value, and for too few rows for a step.
    """
    found = _own_inputs(config, rewards, trains=trains, validates=validates, revises=revises)
    if not trains or not config.policies:
        return found
    further, longest = list[RunInputs](), config.data.max_response_length
    for number, own in enumerate(config.agents[1:], 1):
        if config.engine_owners[number] != number:
            further.append(found)
            continue
        asked = number == 1 and config.actor_rollout_ref.proxy.kind == "agent1"
        with begin_lines_of_errors(f"policies.agent{number}."):
            theirs = _own_inputs(
                own,
                rewards,
                validates=validates,
                revises=revises and asked,
                reads=(found.codec, longest),
            )
        further.append(theirs)
    tables = [one.train for one in further]
    validated = [one.validation for one in further if one.validation is not None]
    train = _common_rows(found.train, tables)
    require_enough_rows(len(train.rows), train.dropped, len(train.bad), config)
    validation = found.validation and _common_rows(found.validation, validated)
    return replace(found, further=tuple(further)).with_tables(train, validation)


def _common_rows(table: PromptTable, others: Sequence[PromptTable]) -> PromptTable:
    """The rows whose prompt is short enough for every policy."""
    rows = [r for r in table.rows if all(r.id in other.row_number_by_id for other in others)]
    lost = len(table.rows) - len(rows)
    return replace(table.of_rows(rows), dropped=table.dropped + lost)


def _own_inputs(
    config: Config,
    rewards: RewardPlan,
    *,
    trains: bool = True,
    validates: bool = True,
    revises: bool = False,
    reads: tuple[TextCodec, int] | None = None,
) -> RunInputs:
    """``read_inputs`` of one policy. If it ``revises``, ``reads`` are the tokenizer and the longest
    critique of the policy that it answers, by default its own."""
    codec, proxy_codec = load_checked_tokenizer(config), check_proxy(config)
    reward_codec, check = (
        check_reward_model(config) if trains else None,
        make_row_check(config, rewards),
    )
    if trains:
        train, validation = prompt_tables(config, codec, validates=validates, check=check)
        require_enough_rows(len(train.rows), train.dropped, len(train.bad), config)
    else:
        files = config.data.val_files
        train = validation = _table(config, codec, "data.val_files", files, check=check)
        _require_critiques(config, validation.rows)
    rows = list(train.rows)
    if trains and validation is not None:
        rows += validation.rows
    check_rows_rewardable(rewards, rows)
    own = None
    if proxy_codec is not None:
        own = proxy_engine_max_length(config, codec, proxy_codec, rows)
    shares = revises and config.proxy_shares_engines
    return RunInputs(
        codec=codec,
        train=train,
        validation=validation,
        rewards=rewards,
        max_model_len=actor_engine_max_length(config, codec, rows, revises=shares, reads=reads),
        proxy_codec=proxy_codec,
        proxy_model_len=own,
        reward_codec=reward_codec,
    )


def actor_engine_max_length(
    config: Config,
    codec: TextCodec,
    rows: Sequence[Row],
    *,
    revises: bool,
    reads: tuple[TextCodec, int] | None = None,
) -> int:
    """Longest sequence of the actor's engines, in tokens: the configured length; else the length
    that follows from the other keys, or more if the rows' revision prompts (problem, solution and
    the longest critique, whose text may encode to other tokens than were drawn) need it, up to the
    model's context. ``reads`` are the tokenizer and the longest critique of another policy that
    writes them.

    UserError if no row leaves room for a critique and a revision.
    """
    if not revises:
        return config.max_model_len
    critique, family = config.data.max_response_length, config.actor_rollout_ref
    path, bare = family.model.path, _bare_lengths(codec, rows)
    longest = critique + critique // _REENCODED_SHARE
    if reads is not None:
        longest = _critique_length(reads[1], bare, _bare_lengths(reads[0], rows))
    return _revising_length(
        config,
        "actor_rollout_ref.rollout.max_model_len",
        bare,
        given=family.rollout.max_model_len,
        least=config.max_model_len,
        critique=longest,
        context=lambda: context_of(read_shape(path, family.actor.strategy))[0],
    )


def proxy_engine_max_length(
    config: Config, actor: TextCodec, codec: TextCodec, rows: Sequence[Row]
) -> int:
    """Longest sequence of the proxy's own engines, in its tokens: as ``actor_engine_max_length``
    for critiques in the tokens of ``actor`` that ``codec`` encodes.

    UserError if no row leaves room for a critique and a revision, and for a model that does not
    name its context.
    """
    path, bare = proxy_path(config), _bare_lengths(codec, rows)
    return _revising_length(
        config,
        "actor_rollout_ref.proxy.engine.max_model_len",
        bare,
        given=config.actor_rollout_ref.proxy.engine.max_model_len,
        least=0,
        critique=_critique_length(
            config.data.max_response_length, bare, _bare_lengths(actor, rows)
        ),
        context=lambda: _context_of(path),
    )


def _critique_length(longest: int, ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Tokens of our tokenizer for a critique of ``longest`` tokens of theirs: twice as many as the
    rows' prompts let expect, whose lengths are ``ours`` and ``theirs``."""
    return 2 * ceil(longest * max(own / other for own, other in zip(ours, theirs, strict=True)))


def _bare_lengths(codec: TextCodec, rows: Sequence[Row]) -> list[int]:
    """Tokens of every row's revision prompt without a critique."""
    return [
        len(codec.encode_chat(revision_messages(row.attempt().problem, row.solution, "")))
        for row in rows
        if row.task == CRITIQUE
    ]


def _context_of(path: str) -> int:
    """The context of any language model, in tokens."""
    keys = read_model_config(path)
    context = keys.get("max_position_embeddings")
    if not isinstance(context, int):
        raise UserError(
            f"{path}/config.json names no max_position_embeddings",
            key="actor_rollout_ref.proxy.engine.max_model_len",
            remedy="set it to the longest sequence of the model",
        )
    return context


def _revising_length(
    config: Config,
    key: str,
    bare: Sequence[int],
    *,
    given: int | None,
    least: int,
    critique: int,
    context: Callable[[], int],
) -> int:
    revision, longest = config.actor_rollout_ref.rollout.revision_max_tokens, given or least
    if given is None:
        longest = max(least, min(max(bare) + critique + revision, context()))
    if min(bare) + revision >= longest:
        raise UserError(
            f"problem and solution take {min(bare)} tokens or more in every row's revision prompt, "
            f"and with actor_rollout_ref.rollout.revision_max_tokens={revision} nothing of "
            f"{longest} is left for a critique",
            key=key,
            remedy="raise it, or lower revision_max_tokens",
        )
    return longest


def check_rows(config: Config, rewards: RewardPlan, *, validates: bool = True) -> None:
    """The checks of ``read_inputs`` except for the lengths of prompts: nothing is tokenised."""
    load_checked_tokenizer(config)
    check_proxy(config)
    data, count, rows, check = config.data, 0, list[Row](), make_row_check(config, rewards)
    left_out: list[str] | None = [] if data.bad_rows == "drop" else None
    bad = 0
    kept = data.val_files if validates else ()
    for key, files in (("data.train_files", data.train_files), ("data.val_files", kept)):
        if files:
            with convert_input_errors(key):
                file_rows = read_rows(
                    files, prompt_key=data.prompt_key, check=check, left_out=left_out
                )
                rows = [*rows, *file_rows]
                if files is kept:
                    _require_critiques(config, file_rows)
                else:
                    count, bad = len(file_rows), len(left_out or ())
    rows_by_id(rows)
    require_enough_rows(count, 0, bad, config)
    check_rows_rewardable(rewards, rows)


def _require_critiques(config: Config, validated: Sequence[Row]) -> None:
    """UserError for a validation row of another task in a pipeline that validates critiques."""
    other = next((row for row in validated if row.task != CRITIQUE), None)
    if config.writes_revisions and other is not None:
        raise UserError(
            f"{other.place or f'row {other.id!r}'} has the task {other.task!r}, and validation "
            "measures critiques by their revisions",
            key="data.val_files",
            remedy=f"leave rows of other tasks than {CRITIQUE!r} out",
        )


def require_enough_rows(count: int, dropped: int, bad: int, config: Config) -> None:
    """UserError if ``count`` training rows are too few for a step; ``dropped`` and ``bad`` are left
    out.
    """
    drawn = (
        ("train_batch_size", config.data.train_batch_size),
        ("gen_batch_size", config.gen_batch_size),
    )
    key, size = max(drawn, key=lambda one: one[1])
    if count < size:
        reasons = {"have an overlong prompt": dropped, "are left out by data.bad_rows=drop": bad}
        why = ", ".join(f"{number} {reason}" for reason, number in reasons.items() if number)
        left_out = f" ({why})" if why else ""
        raise UserError(
            f"data.train_files has {count} usable rows{left_out}, fewer than data.{key}={size}",
            remedy="lower it, with a divisor in actor_rollout_ref.actor.ppo_mini_batch_size, or "
            "add rows",
        )


def prompt_tables(
    config: Config,
    codec: TextCodec,
    *,
    validates: bool = True,
    check: Callable[[Row], object] | None = None,
) -> tuple[PromptTable, PromptTable | None]:
    """The training rows and the validation rows, if there are any; ``check`` raises UserError for
    a row that cannot be used.

    One file may serve both. UserError for different rows with one id.
    """
    trained = config.data.train_files
    mixed = [str(number) for number, _ in enumerate(trained)] if config.data.mixture else []
    train = _table(config, codec, "data.train_files", trained, mixed, check=check)
    files = config.data.val_files if validates else ()
    sets = config.data.val_set_names
    validation = None
    if files:
        validation = _table(config, codec, "data.val_files", files, sets, check=check)
    _require_critiques(config, validation.rows if validation else ())
    rows_by_id([*train.rows, *(validation.rows if validation else ())])
    return train, validation


def _table(
    config: Config,
    codec: TextCodec,
    key: str,
    files: tuple[str, ...],
    sets: Sequence[str] = (),
    *,
    check: Callable[[Row], object] | None = None,
) -> PromptTable:
    data = config.data
    with convert_input_errors(key):
        return load_prompt_table(
            files,
            codec,
            max_prompt_length=data.max_prompt_length,
            filter_overlong=data.filter_overlong_prompts,
            prompt_key=data.prompt_key,
            sets=sets,
            check=check,
            drop_bad=data.bad_rows == "drop",
        )

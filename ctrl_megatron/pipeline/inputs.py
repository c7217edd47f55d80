"""Checks and reads the input of a run before processes and models start.

The command that starts the ranks, and every rank, find the same problems and raise them as one
UserError with a line for each.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from math import ceil
from pathlib import Path

import torch

from ctrl_megatron.checkpoint.files import require_space
from ctrl_megatron.checkpoint.run_directory import check_run_directory
from ctrl_megatron.checkpoint.store import EXPORT_FOLDER, CheckpointStore, read_state
from ctrl_megatron.config import (
    COMPLETION_PIPELINES,
    COUPLED_GRPO_PIPELINE,
    CTRL_PIPELINE,
    GRPO_PIPELINE,
    Config,
    Purpose,
    to_yaml,
)
from ctrl_megatron.config.environment import read_launch
from ctrl_megatron.data.prompt_table import PromptTable, load_prompt_table
from ctrl_megatron.data.rows import CRITIQUE, Row, read_rows, rows_by_id
from ctrl_megatron.data.tokens import MEANING, TextCodec, different_part, tokenizer_parts
from ctrl_megatron.engine_kinds import ENGINES
from ctrl_megatron.errors import UserError, all_of, users_input
from ctrl_megatron.memory.disk import disk_use
from ctrl_megatron.memory.fit import require_fit
from ctrl_megatron.memory.shapes import model_shapes
from ctrl_megatron.metrics.flops import peak_flops
from ctrl_megatron.models.families import engine_obstacle
from ctrl_megatron.models.hf_config import read_shape
from ctrl_megatron.models.layer_spec import has_transformer_engine
from ctrl_megatron.models.lora import adapted, configured
from ctrl_megatron.models.rope import engine_difference
from ctrl_megatron.models.safetensors_dir import SafetensorsDirectory
from ctrl_megatron.models.shape import AnyShape, ModelShape, MultiLatentAttention, is_reward_model
from ctrl_megatron.models.shards import check_split
from ctrl_megatron.parallel.layout import world_with, worlds_of
from ctrl_megatron.pipeline.recorder import config_changes, stages_of
from ctrl_megatron.pipeline.reward_reader import check_reward_model
from ctrl_megatron.pipeline.services import proxy_path
from ctrl_megatron.prompts import revision_messages
from ctrl_megatron.rewards.build import row_check
from ctrl_megatron.rewards.plan import RewardPlan
from ctrl_megatron.rollout.denoising import DenoisingOptions
from ctrl_megatron.rollout.engine import require_engine
from ctrl_megatron.rollout.weight_update import read_manifest, read_model_config

_SOCKET_PATH = 107
"""Bytes of the longest path of a Unix socket (``sun_path``, without its end)."""
_MODEL = "actor_rollout_ref.model.path"
_PROXY = "actor_rollout_ref.proxy.model.path"
_AGENT = "agent1.model.path"
_ROLES = {"actor_rollout_ref.ref.model.path": "reference", "critic.model.path": "critic"}
"""The key of a model that generates no text, and its role."""
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

    def left_out(self) -> list[str]:
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


def check_together(*checks: Callable[[], object]) -> None:
    """Run all checks and raise the UserErrors of those that fail as one."""
    problems = []
    for check in checks:
        try:
            check()
        except UserError as error:
            problems.append(error)
    all_of(problems)


def check_place(config: Config) -> None:
    """UserError if the run cannot write its directory."""
    with users_input("trainer.default_local_dir"):
        check_run_directory(Path(config.trainer.run_dir))


def check_temporary_directory(config: Config) -> None:
    """UserError if an engine cannot create its sockets in the temporary directory of this host."""
    family, folder = config.actor_rollout_ref, tempfile.gettempdir()
    names = {family.rollout.name, *([family.proxy.engine.name] if config.has_proxy_engines else ())}
    longest = max(names, key=lambda name: ENGINES[name].socket_name)
    most, size = _SOCKET_PATH - ENGINES[longest].socket_name, len(os.fsencode(folder))
    if ENGINES[longest].socket_name and size > most:
        raise UserError(
            f"the temporary directory {folder} has {size} bytes: the paths of the sockets that "
            f"engine {longest} creates in it would be longer than the {_SOCKET_PATH} bytes that "
            "the system allows",
            key="TMPDIR",
            remedy=f"set TMPDIR to a directory whose path has at most {most} bytes, such as /tmp",
        )


def check_models(config: Config, purpose: Purpose, others: Mapping[str, str] | None = None) -> None:
    """UserError for a model whose files do not fit each other, the layout or the other models.

    Only headers are read, and a tied head that is also stored. ``others`` maps arguments to the
    directories of further critics.
    """
    actor = config.actor_rollout_ref.model.path
    wanted = [(_MODEL, actor), *(others or {}).items()]
    if purpose == "rl":
        wanted += list(_roles(config, actor))
    first_of: dict[str, str] = {}
    for key, path in wanted:
        first_of.setdefault(path, key)  # a model with several roles is reported once
    shapes, strategy = dict[str, AnyShape](), config.actor_rollout_ref.actor.strategy
    problems = []
    for path, key in first_of.items():
        try:
            with users_input(key):
                shapes[path] = shape = read_shape(path, strategy)
                if purpose == "rl":
                    _check_kind(config, key, path, shape)
                tensors = SafetensorsDirectory(path)
                tensors.check(shape)
                _check_role(config, key, path, shape, shapes.get(actor))
                _check_context(config, purpose, key, path, shape)
                _check_engine(config, purpose, key, path, shape)
                if purpose == "rl":
                    _check_engine_takes(config, path, shape, tensors)
        except UserError as error:
            problems.append(error)
    all_of(problems)


def check_gpu(config: Config, purpose: Purpose) -> None:
    """UserError if the run does not fit this rank's GPU, with phase, largest items and remedy, and
    if the GPU's peak is neither known nor configured.

    Nothing is checked on a CPU, whose memory other processes share.
    """
    if (gpu := this_gpu()) is None:
        return
    name, memory = gpu
    if config.trainer.peak_tflops_per_device is None:
        peak_flops(name)
    kernels = "te" if has_transformer_engine() else "torch"
    shapes = model_shapes(config, purpose)
    require_fit(config, shapes, gpu_memory=memory, purpose=purpose, kernels=kernels)


def check_disk(config: Config, purpose: Purpose) -> None:
    """UserError if the disk of the run's directory is too small for the run's files."""
    run_dir = Path(config.trainer.run_dir)
    use = disk_use(config, model_shapes(config, purpose).trained, purpose)
    there = sum(
        path.stat().st_size
        for name in ("checkpoints", EXPORT_FOLDER, "hf")
        for path in (run_dir / name).rglob("*")
        if path.is_file()
    )
    with users_input("trainer.default_local_dir"):
        require_space(run_dir, use.still_needed(there), f"a run that keeps {use} at once")


def this_gpu() -> tuple[str, int] | None:
    """Name and memory, in bytes, of this rank's CUDA device; None without one."""
    if not torch.cuda.is_available():
        return None
    device = torch.cuda.get_device_properties(read_launch().local_rank)
    return device.name, device.total_memory


def _roles(config: Config, actor: str) -> Iterator[tuple[str, str]]:
    family = config.actor_rollout_ref
    if config.has_frozen_proxy:
        yield _PROXY, family.proxy.model.path or actor
    if config.agent1.model.path is not None:
        yield _AGENT, config.agent1.model.path
    if config.needs_reference:
        yield "actor_rollout_ref.ref.model.path", family.ref.model.path or actor
    if config.needs_values:
        yield "critic.model.path", config.critic.model.path or actor


def _check_kind(config: Config, key: str, path: str, shape: AnyShape) -> None:
    """UserError for a masked-diffusion model in RL of another kind, and the reverse."""
    pipeline, denoises = config.dag.custom_pipeline_fn, shape.diffusion is not None
    built_in = pipeline in (None, CTRL_PIPELINE, *COMPLETION_PIPELINES)
    others = (built_in and pipeline != COUPLED_GRPO_PIPELINE) or config.needs_values
    if denoises and others:
        raise UserError(
            f"{path} is a masked-diffusion model, which RL trains on coupled scores alone",
            remedy=f"set dag.custom_pipeline_fn={COUPLED_GRPO_PIPELINE}, or name an "
            "autoregressive model",
        )
    if pipeline == COUPLED_GRPO_PIPELINE and not denoises:
        raise UserError(
            f"{path}, of type {shape.family!r}, is no masked-diffusion model, and {pipeline} "
            "trains no others",
            remedy=f"set dag.custom_pipeline_fn={GRPO_PIPELINE}, or make a start for one with "
            "tools/make_diffusion_start.py",
        )
    if key == _MODEL and ENGINES[config.actor_rollout_ref.rollout.name].denoises:
        with users_input("actor_rollout_ref.rollout.engine_kwargs"):
            DenoisingOptions.read(config.actor_rollout_ref.rollout.engine_kwargs)


def _check_role(
    config: Config, key: str, path: str, shape: AnyShape, actor: AnyShape | None
) -> None:
    trained = key == _MODEL or key in _ROLES
    if trained and key != "actor_rollout_ref.ref.model.path":
        adapted(shape, configured(config, value=key == "critic.model.path"))
    if isinstance(shape, ModelShape):
        _check_megatron(config, key, path, shape, trained=trained)
    if shape.value_head and key != "critic.model.path":
        kind = "reward" if is_reward_model(shape) else "value"
        raise UserError(
            f"{path} is a {kind} model, which writes no text", remedy="name a language model"
        )
    refreshed = config.refreshes_reference and key == "actor_rollout_ref.ref.model.path"
    if refreshed and actor is not None and shape != actor:
        raise UserError(
            f"{path} has another architecture than the actor, whose weights it gets with "
            f"actor_rollout_ref.ref.sync_steps={config.actor_rollout_ref.ref.sync_steps}",
            remedy="use a model of the actor's shape, or leave sync_steps out",
        )
    if not trained and actor is not None and shape != actor:
        raise UserError(
            f"{path} has another architecture than the actor; the same engines generate with both",
            remedy="use a model of the actor's shape, or give the proxy engines of its own "
            "(actor_rollout_ref.proxy.kind=engine)"
            if key == _PROXY
            else "use a model of the actor's shape",
        )


def _check_megatron(
    config: Config, key: str, path: str, shape: ModelShape, *, trained: bool
) -> None:
    if trained:
        worlds = worlds_of(config.trainer.nnodes * config.trainer.n_gpus_per_node, config)
        layout = world_with(worlds, _ROLES.get(key, "actor")).layout
        check_split(shape, layout)
        layout.check_layers(shape.num_layers)
    rate = config.actor_rollout_ref.actor.megatron.moe_router_bias_update_rate
    if key == _MODEL and rate and not any(kind.correction_bias for kind in shape.expert_kinds):
        raise UserError(
            f"the routers of {path}, of type {shape.family!r}, have no bias",
            key=f"actor_rollout_ref.actor.megatron.moe_router_bias_update_rate={rate:g}",
            remedy="set it to 0; moe_aux_loss_coeff balances the experts of any family",
        )


def _check_engine_takes(
    config: Config, path: str, shape: AnyShape, tensors: SafetensorsDirectory
) -> None:
    if tensors.block is not None:
        raise UserError(
            f"the weights of {path} have 8 bits, in which engines would load them and receive no "
            "others",
            remedy="convert them: ctrl-convert-hf-to-megatron, then ctrl-convert-megatron-to-hf",
        )
    engine = config.actor_rollout_ref.rollout.name
    if engine != "hf" and isinstance(shape.attention, MultiLatentAttention):
        # They multiply parts of its weights with each other when they load a model.
        raise UserError(
            f"{path} has multi-latent attention, whose weights cannot be pushed to engine "
            f"{engine!r}",
            remedy="set actor_rollout_ref.rollout.name to 'hf'",
        )


def check_tokenizers(
    config: Config, purpose: Purpose, others: Mapping[str, str] | None = None
) -> None:
    """UserError for a model with another tokenizer: a run uses one tokenizer and one chat template
    for all models.

    Models that write text must have both in common; for models that only read, equal token ids are
    enough. A directory without a tokenizer is not checked. ``others`` as in ``check_models``.
    """
    family, own = config.actor_rollout_ref, "actor_rollout_ref.model.tokenizer_path"
    ours = family.model.tokenizer
    wanted = [(_MODEL, family.model.path), *(others or {}).items()]
    if purpose == "rl":
        wanted += list(_roles(config, family.model.path))
    differing = {path: key for key, path in reversed(wanted) if path != ours}
    if not differing:
        return
    with users_input(own):
        known = tokenizer_parts(ours)
    problems = []
    for path, key in differing.items():
        try:
            with users_input(key):
                found = tokenizer_parts(path)
        except UserError as error:
            problems.append(error)
            continue
        reads = key in (_MODEL, *_ROLES)
        if not known or not found:
            continue
        part = different_part(known, found, MEANING if reads else known)
        if part is not None:
            problems.append(
                UserError(
                    f"the tokenizer of {path} differs in its {part} from that of {ours}, which "
                    "encodes the texts of all models of the run",
                    key=key,
                    remedy=f"name a model with the same tokenizer, or another {own}"
                    + (", or set actor_rollout_ref.proxy.kind=engine" if key == _PROXY else ""),
                )
            )
    all_of(problems)


def _check_context(config: Config, purpose: Purpose, key: str, path: str, shape: AnyShape) -> None:
    """UserError if the run has longer sequences than the model's context."""
    data, rollout = config.data, config.actor_rollout_ref.rollout
    prompt, response = data.max_prompt_length, data.max_response_length
    asked = f"data.max_prompt_length={prompt} + data.max_response_length={response}"
    longest = config.sequence_tokens
    if purpose == "sft":
        asked, longest = f"sft.max_length={config.sft.max_length}", config.sft.max_length
    elif key not in _ROLES and config.max_model_len > longest:
        longest = config.max_model_len
        if rollout.max_model_len is not None:
            asked = f"actor_rollout_ref.rollout.max_model_len={longest}"
        else:
            revision = rollout.revision_max_tokens
            asked += f" + actor_rollout_ref.rollout.revision_max_tokens={revision}"
    if longest > shape.max_position_embeddings:
        raise UserError(
            f"the model of {path} has a context of max_position_embeddings="
            f"{shape.max_position_embeddings} tokens, and {asked} makes {longest}",
            remedy="lower these keys, or name a model with a longer context",
        )


def check_proxy(config: Config) -> TextCodec | None:
    """The tokenizer of a proxy with engines of its own; None for another proxy. UserError if its
    engine is not installed, its model is incomplete, or its tokenizer cannot be used.
    """
    if not config.has_proxy_engines:
        return None
    keys, path = config.actor_rollout_ref.proxy.engine, proxy_path(config)
    require_engine(keys.name, keys.python)
    with users_input(_PROXY):
        read_manifest(path, config.actor_rollout_ref.dtype_in(keys))
        codec = TextCodec(path)
        codec.encode_chat([{"role": "user", "content": "?"}])
        if not codec.eos_token_ids:
            raise UserError(f"{path} names no end-of-text token (eos_token)")
    return codec


def _check_engine(config: Config, purpose: Purpose, key: str, path: str, shape: AnyShape) -> None:
    """UserError if the engine would compute another model than the trainer."""
    if purpose == "sft" or key in _ROLES or not isinstance(shape, ModelShape):
        return
    engine = config.actor_rollout_ref.rollout.name
    difference = engine_difference(shape.rope, engine, shape.max_position_embeddings)
    if difference is not None:
        raise UserError(f"the rope scaling of {path}/config.json: {difference}")
    if (obstacle := engine_obstacle(shape, engine)) is not None:
        raise UserError(f"{path}/config.json: {obstacle}", key="actor_rollout_ref.rollout.name")


def check_tokenizer(config: Config) -> TextCodec:
    """The loaded tokenizer. UserError if it cannot be loaded, has no chat template or end token, or
    has more tokens than the model.
    """
    with users_input("actor_rollout_ref.model.tokenizer_path"):
        codec = TextCodec(config.actor_rollout_ref.model.tokenizer)
        codec.encode_chat([{"role": "user", "content": "?"}])
        largest = max((*codec.eos_token_ids, *codec.tokenizer.get_vocab().values()))
        try:
            family = config.actor_rollout_ref
            rows = read_shape(family.model.path, family.actor.strategy).vocab_size
        except UserError:
            return codec  # check_models reports it
        if largest >= rows:
            raise UserError(
                f"{codec.path} has token number {largest}, but the model of "
                f"{config.actor_rollout_ref.model.path} knows {rows}",
                remedy="use the model's own tokenizer",
            )
    return codec


def check_loggers(config: Config) -> None:
    """UserError for a logger whose library is not installed."""
    for name in config.trainer.logger:
        if name in ("wandb", "mlflow", "tensorboard") and find_spec(name) is None:
            raise UserError(
                f"trainer.logger names {name}, which is not installed; pip install {name}, or "
                "remove it from the list"
            )


def check_checkpoint(config: Config, models: tuple[str, ...], parts: tuple[str, ...]) -> None:
    """UserError if the checkpoint to continue from is incomplete, or from another kind of run."""
    trainer = config.trainer
    store = CheckpointStore(
        Path(trainer.run_dir) / "checkpoints", keep=-1, side_files=Path(trainer.run_dir)
    )
    checkpoint = store.find(trainer.resume_mode, models)
    if checkpoint is not None:
        with users_input():
            read_state(checkpoint, models, parts)


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
    checkpoint = store.find(trainer.resume_mode, models)
    if checkpoint is None or checkpoint.step < steps:
        return False
    stages = {None, *(row["stage"] for row in stages_of(run_dir))}
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

    ``rewards`` can reward every row (``row_check``). Without ``validates`` there is no table of
    validation rows. If the run ``revises`` first solutions, engines get room for the revision
    prompts.

    UserError naming file, row and column of a wrong value, and for too few rows for a step.
    """
    codec, proxy_codec = check_tokenizer(config), check_proxy(config)
    reward_codec, check = check_reward_model(config) if trains else None, row_check(config, rewards)
    if trains:
        train, validation = prompt_tables(config, codec, validates=validates, check=check)
        require_a_step(len(train.rows), train.dropped, len(train.bad), config)
    else:
        files = config.data.val_files
        train = validation = _table(config, codec, "data.val_files", files, check=check)
        _require_critiques(config, validation.rows)
    rows = list(train.rows)
    if trains and validation is not None:
        rows += validation.rows
    rewards.check_rows(rows)
    own = None
    if proxy_codec is not None:
        own = proxy_length(config, codec, proxy_codec, rows)
    shares = revises and config.shares_engines
    return RunInputs(
        codec=codec,
        train=train,
        validation=validation,
        rewards=rewards,
        max_model_len=engine_length(config, codec, rows, revises=shares),
        proxy_codec=proxy_codec,
        proxy_model_len=own,
        reward_codec=reward_codec,
    )


def engine_length(config: Config, codec: TextCodec, rows: Sequence[Row], *, revises: bool) -> int:
    """Longest sequence of the actor's engines, in tokens: the configured length; else the length
    that follows from the other keys, or more if the rows' revision prompts (problem, solution and
    the longest critique, whose text may encode to other tokens than were drawn) need it, up to the
    model's context.

    UserError if no row leaves room for a critique and a revision.
    """
    if not revises:
        return config.max_model_len
    critique, family = config.data.max_response_length, config.actor_rollout_ref
    path = family.model.path
    return _revising_length(
        config,
        "actor_rollout_ref.rollout.max_model_len",
        _bare_lengths(codec, rows),
        given=family.rollout.max_model_len,
        least=config.max_model_len,
        critique=critique + critique // _REENCODED_SHARE,
        context=lambda: read_shape(path, family.actor.strategy).max_position_embeddings,
    )


def proxy_length(config: Config, actor: TextCodec, codec: TextCodec, rows: Sequence[Row]) -> int:
    """Longest sequence of the proxy's own engines, in its tokens: as ``engine_length``, with room
    for twice as long a critique as the rows let expect, which both tokenizers ``actor`` and
    ``codec`` encode.

    UserError if no row leaves room for a critique and a revision, and for a model that does not
    name its context.
    """
    path, bare = proxy_path(config), _bare_lengths(codec, rows)
    ratio = max(
        ours / theirs for ours, theirs in zip(bare, _bare_lengths(actor, rows), strict=True)
    )
    return _revising_length(
        config,
        "actor_rollout_ref.proxy.engine.max_model_len",
        bare,
        given=config.actor_rollout_ref.proxy.engine.max_model_len,
        least=0,
        critique=2 * ceil(ratio * config.data.max_response_length),
        context=lambda: _context_of(path),
    )


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
    check_tokenizer(config)
    check_proxy(config)
    data, count, rows, check = config.data, 0, list[Row](), row_check(config, rewards)
    left_out: list[str] | None = [] if data.bad_rows == "drop" else None
    bad = 0
    kept = data.val_files if validates else ()
    for key, files in (("data.train_files", data.train_files), ("data.val_files", kept)):
        if files:
            with users_input(key):
                found = read_rows(files, prompt_key=data.prompt_key, check=check, left_out=left_out)
                rows = [*rows, *found]
                if files is kept:
                    _require_critiques(config, found)
                else:
                    count, bad = len(found), len(left_out or ())
    rows_by_id(rows)
    require_a_step(count, 0, bad, config)
    rewards.check_rows(rows)


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


def require_a_step(count: int, dropped: int, bad: int, config: Config) -> None:
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
            remedy="lower it, or add rows",
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
    sets = config.data.val_sets
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
    with users_input(key):
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

"""A run of fine-tuning, from a checked configuration to an HF directory, in the loop of RL runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ctrl_megatron.checkpoint.hf import save_hf
from ctrl_megatron.checkpoint.store import POLICY_FOLDER, CheckpointStore
from ctrl_megatron.config import Config
from ctrl_megatron.data.sampler import ResumableSampler
from ctrl_megatron.data.tokens import TextCodec
from ctrl_megatron.errors import UserError, convert_input_errors, run_all_checks
from ctrl_megatron.models.hf_config import read_shape
from ctrl_megatron.models.kernels import kernels_line
from ctrl_megatron.parallel.waiting import WaitRules
from ctrl_megatron.record.profile import step_profile_watchers
from ctrl_megatron.record.recorder import Recorder, banner
from ctrl_megatron.run.build import build_policy, optimizer_options
from ctrl_megatron.run.checks.machine import (
    check_checkpoint,
    check_disk,
    check_gpu,
    check_loggers,
    check_profile,
    check_writable_run_directory,
)
from ctrl_megatron.run.checks.models import (
    check_model_files,
    check_tokenizers,
    load_checked_tokenizer,
)
from ctrl_megatron.run.inputs import is_finished
from ctrl_megatron.run.loop import Schedule, TrainingLoop
from ctrl_megatron.run.session import session
from ctrl_megatron.sft.examples import SftExample, read_examples
from ctrl_megatron.sft.nodes import SftWorker, Tokens, sft_pipeline
from ctrl_megatron.steps.performance import device_memory, peak_flops_per_device


def train_sft(config: Config) -> bool:
    """Run fine-tuning on this rank; returns False if a signal stopped it.

    At the end the weights are in ``<run directory>/hf`` as an HF directory.
    """
    check_sft(config)
    finished = False
    codec, given, kept = load_sft_examples(config)
    with convert_input_errors("sft.train_files"):
        examples, dropped = tokenise_examples(codec, given, config)
        steps = sft_total_steps(config, len(examples))
    with convert_input_errors("sft.val_files"):
        held_out, _ = tokenise_examples(codec, kept, config)
    models, stage = (POLICY_FOLDER,), "after SFT" if held_out else None
    if is_finished(config, steps, models=models, stage=stage, files=("hf",)):
        return True
    with session(config) as run:
        groups, path = run.groups, config.actor_rollout_ref.model.path
        sampler = ResumableSampler(len(examples), seed=config.trainer.seed)
        policy = build_policy(
            config,
            groups,
            path=path,
            optimizer=replace(
                optimizer_options(config, "sft.lr", steps),
                warmup_steps=int(config.sft.warmup_steps_ratio * steps),
                schedule=config.sft.lr_scheduler_type,
                min_lr_ratio=0.0,
            ),
            budget=config.actor_rollout_ref.update_token_budget,
        )
        run.raise_if_stop_requested_on_any_rank()
        recorder = Recorder(config, active=groups.is_first, total_steps=steps, served=run.served)
        memory = device_memory(groups)
        worker = SftWorker(
            groups=groups,
            background=run.background,
            stop=run.stop,
            wait_conditions=WaitRules(
                groups=groups, stop=run.stop, limit=config.trainer.distributed_timeout
            ),
            policy=policy,
            codec=codec,
            examples=examples,
            held_out=held_out,
            seed=config.trainer.seed,
            peak_flops=peak_flops_per_device(config, groups),
            timeline=recorder.timeline(memory),
        )
        loop = TrainingLoop(
            worker=worker,
            graph=sft_pipeline(validates=bool(held_out)),
            sampler=sampler,
            store=CheckpointStore(
                Path(config.trainer.run_dir) / "checkpoints",
                keep=config.trainer.max_ckpt_to_keep,
                side_files=Path(path),
                asynchronous=config.trainer.async_save,
            ),
            recorder=recorder,
            memory=memory,
            watchers=step_profile_watchers(config, worker),
            schedule=Schedule(
                batch_size=config.sft.train_batch_size,
                total_steps=steps,
                save_freq=config.trainer.save_freq,
                resume_mode=config.trainer.resume_mode,
                max_bad_steps=config.trainer.max_bad_steps,
                stage="SFT",
            ),
        )
        for line in banner(
            config,
            groups.layout,
            steps=f"{steps} steps of {config.sft.train_batch_size} examples",
            rows=len(examples),
            dropped={"longer than sft.max_length or sft.canvas": dropped},
            validation=len(held_out),
        ):
            recorder.show_line(line)
        dtype, on_gpu = config.actor_rollout_ref.model_dtype, groups.device.type == "cuda"
        recorder.show_line(kernels_line(on_gpu=on_gpu, dtype=dtype))
        loop.resume()
        finished = loop.run()
        if finished:
            weights = Path(config.trainer.run_dir) / "hf"
            save_hf(policy, weights, side_files=path)
            recorder.show_line(f"wrote {weights}; report: {config.trainer.run_dir}/report.html")
        recorder.close(report=True)
        run.watch.stop_watching_others()
    return finished


def check_sft(config: Config) -> None:
    """Raise UserError, one line per problem, for wrong input of a run other than its rows."""
    run_all_checks(
        lambda: check_model_files(config, "sft"),
        lambda: _check_canvas(config),
        lambda: check_tokenizers(config, "sft"),
        lambda: check_loggers(config),
        lambda: check_profile(config),
        lambda: check_writable_run_directory(config),
        lambda: check_checkpoint(config, (POLICY_FOLDER,), ("sampler",)),
    )
    check_gpu(config, "sft")
    check_disk(config, "sft")


def _check_canvas(config: Config) -> None:
    path, strategy = config.actor_rollout_ref.model.path, config.actor_rollout_ref.actor.strategy
    if config.sft.canvas is not None and read_shape(path, strategy).diffusion is None:
        raise UserError(
            f"{path} is no masked-diffusion model, whose responses fill a canvas",
            key="sft.canvas",
            remedy="leave it out",
        )


def load_sft_examples(config: Config) -> tuple[TextCodec, list[SftExample], list[SftExample]]:
    """The tokenizer, training and validation examples. Raises UserError for unusable ones."""
    codec = load_checked_tokenizer(config)
    with convert_input_errors("sft.train_files"):
        train = read_examples(config.sft.train_files)
        sft_total_steps(config, len(train))
    with convert_input_errors("sft.val_files"):
        return codec, train, read_examples(config.sft.val_files)


def tokenise_examples(
    codec: TextCodec, examples: Sequence[SftExample], config: Config
) -> tuple[list[tuple[Tokens, Tokens]], int]:
    """Return (prompt and response tokens of each example within ``sft.max_length``, the number of
    longer examples). A response ends with the token that the chat template writes behind it.
    Raises UserError if every example is longer.
    """
    rows, dropped = [], 0
    for example in examples:
        prompt = tuple(codec.encode_chat(example.prompt, add_generation_prompt=True))
        fill, canvas = codec.eos_token_ids[0], config.sft.canvas
        end = fill if codec.turn_end_token_id is None else codec.turn_end_token_id
        response = (*codec.encode(example.response), end)
        if len(response) > (canvas or len(response)):
            dropped += 1
            continue
        response += (fill,) * ((canvas or 0) - len(response))
        if len(prompt) + len(response) > config.sft.max_length:
            dropped += 1
        else:
            rows.append((prompt, response))
    if examples and not rows:
        raise UserError(
            f"no example of sft.train_files fits in sft.max_length={config.sft.max_length} tokens"
            + (f" and its response in sft.canvas={config.sft.canvas}" if config.sft.canvas else "")
        )
    return rows, dropped


def sft_total_steps(config: Config, rows: int) -> int:
    """Optimizer steps of the run. Raises UserError if the rows do not fill one batch."""
    per_epoch = rows // config.sft.train_batch_size
    if per_epoch == 0:
        raise UserError(
            f"sft.train_files has {rows} usable rows, fewer than "
            f"sft.train_batch_size={config.sft.train_batch_size}",
            remedy="lower it, or add rows",
        )
    wanted = config.sft.total_training_steps
    return per_epoch * config.sft.total_epochs if wanted is None else wanted

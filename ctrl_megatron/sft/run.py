"""Builds a fine-tuning run from its configuration and runs it with the same loop as RL."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tensordict import TensorDict

from ctrl_megatron.checkpoint.hf import save_hf
from ctrl_megatron.checkpoint.store import CheckpointStore
from ctrl_megatron.config import Config
from ctrl_megatron.data.sampler import ResumableSampler
from ctrl_megatron.data.tokens import TextCodec
from ctrl_megatron.metrics import mfu, seconds_by_name
from ctrl_megatron.models.optimizer import OptimizerOptions
from ctrl_megatron.parallel.background import BackgroundLoop
from ctrl_megatron.pipeline.batch import pad_rows, tensors_of
from ctrl_megatron.pipeline.executor import Executor
from ctrl_megatron.pipeline.interrupt import StopFlag
from ctrl_megatron.pipeline.loop import LoopOptions, TrainingLoop
from ctrl_megatron.pipeline.models import build_policy
from ctrl_megatron.pipeline.recorder import Recorder
from ctrl_megatron.pipeline.run import device_peak_of, guarded, join
from ctrl_megatron.pipeline.step_metrics import flops_of, sequence_lengths
from ctrl_megatron.sft.examples import SftExample, read_examples
from ctrl_megatron.sft.nodes import SftWorker, Tokens, sft_pipeline

_VALIDATION_ROWS = 64


def train_sft(config: Config) -> bool:
    """A whole fine-tuning run on this rank; False if it was stopped by a signal.

    At the end the weights stand in ``<run directory>/hf`` as an HF directory.
    """
    stop = StopFlag().install()
    groups = join(config)
    with guarded(groups, config) as (watch, clean_up):
        codec = TextCodec(config.actor_rollout_ref.model.tokenizer)
        examples, dropped = _tokenise(codec, read_examples(config.sft.train_files), config)
        held_out, _ = _tokenise(codec, read_examples(config.sft.val_files), config)
        sampler = ResumableSampler(len(examples), seed=config.data.seed)
        total = _total_steps(config, len(examples))
        path = config.actor_rollout_ref.model.path
        policy = build_policy(
            config,
            groups,
            path=path,
            optimizer=_optimizer(config, total),
            budget=config.sft.max_token_len_per_gpu,
        )
        background = BackgroundLoop()
        clean_up.append(background.close)
        recorder = Recorder(config, active=groups.is_first, total_steps=total)
        worker = SftWorker(
            groups=groups,
            background=background,
            stop=stop,
            policy=policy,
            codec=codec,
            examples=examples,
            timeline=recorder.timeline(),
        )
        peak = device_peak_of(config, groups)
        loop = TrainingLoop(
            worker=worker,
            executor=Executor(sft_pipeline(), worker),
            sampler=sampler,
            store=CheckpointStore(
                Path(config.trainer.run_dir) / "checkpoints",
                keep=config.trainer.max_ckpt_to_keep,
                side_files=Path(config.actor_rollout_ref.model.path),
            ),
            recorder=recorder,
            options=LoopOptions(
                batch_size=config.sft.train_batch_size,
                total_steps=total,
                save_freq=config.sft.save_freq,
                resume_mode=config.trainer.resume_mode,
                stage="SFT",
            ),
            measure=lambda batch: (_performance(worker, batch, peak), []),
            validate=(lambda: _held_out_loss(worker, held_out)) if held_out else None,
            parts={},
        )
        if dropped:
            recorder.say(f"{dropped} examples are longer than sft.max_length and are left out")
        loop.resume()
        finished = loop.run()
        if finished:
            save_hf(policy, Path(config.trainer.run_dir) / "hf", side_files=path)
        recorder.close(report=True)
        watch.quiet()
    stop.restore()
    return finished


def _tokenise(
    codec: TextCodec, examples: Sequence[SftExample], config: Config
) -> tuple[list[tuple[Tokens, Tokens]], int]:
    rows, dropped = [], 0
    for example in examples:
        prompt = tuple(codec.encode_chat(example.prompt, add_generation_prompt=True))
        response = (*codec.encode(example.response), codec.eos_token_ids[0])
        if len(prompt) + len(response) > config.sft.max_length:
            dropped += 1
        else:
            rows.append((prompt, response))
    if examples and not rows:
        raise ValueError(
            f"no example of sft.train_files fits in sft.max_length={config.sft.max_length} tokens"
        )
    return rows, dropped


def _total_steps(config: Config, rows: int) -> int:
    per_epoch = rows // config.sft.train_batch_size
    if per_epoch == 0:
        raise ValueError(
            f"sft.train_files has {rows} usable rows, fewer than "
            f"sft.train_batch_size={config.sft.train_batch_size}"
        )
    wanted = config.sft.total_training_steps
    return per_epoch * config.sft.total_epochs if wanted is None else wanted


def _optimizer(config: Config, total: int) -> OptimizerOptions:
    sft, actor = config.sft, config.actor_rollout_ref.actor
    optim = actor.optim
    return OptimizerOptions(
        lr=sft.lr,
        total_steps=total,
        weight_decay=optim.weight_decay,
        betas=optim.betas,
        eps=optim.eps,
        warmup_steps=int(sft.warmup_steps_ratio * total),
        schedule=sft.lr_scheduler_type,
        clip_grad=actor.grad_clip,
        distributed=actor.megatron.use_distributed_optimizer,
    )


def _performance(worker: SftWorker, batch: TensorDict, peak: float) -> dict[str, Any]:
    lengths, responses = sequence_lengths(batch, worker.groups)
    seconds, elapsed = seconds_by_name(worker.timeline.phases()), worker.timeline.elapsed()
    return {
        **seconds,
        "time/step": elapsed,
        "perf/tokens_per_second": sum(lengths) / elapsed,
        "perf/mfu": mfu(
            flops=flops_of(worker.policy.shape, lengths, responses=responses, backward=True),
            seconds=seconds["time/update"],
            devices=worker.groups.layout.world_size,
            peak=peak,
        ),
    }


def _held_out_loss(worker: SftWorker, examples: list[tuple[Tokens, Tokens]]) -> dict[str, float]:
    """Mean negative log-likelihood per response token of the first held-out examples."""
    dp, size = worker.groups.place.dp, worker.groups.layout.data
    chosen = examples[: _VALIDATION_ROWS // size * size] or examples
    prompts, responses = zip(*(chosen[dp::size] or chosen[:1]), strict=True)
    batch = pad_rows(prompts, responses, pad_token_id=worker.codec.pad_token_id)
    log_probs, _ = worker.policy.log_probs(tensors_of(batch))
    mask = batch["response_mask"]
    pairs = worker.groups.from_data_ranks((float(log_probs[mask].sum()), int(mask.sum())))
    return {"nll": -sum(total for total, _ in pairs) / sum(count for _, count in pairs)}

"""The functions that the processes of ``in_process`` run."""

from __future__ import annotations

import asyncio
import dataclasses
import warnings
from typing import Any

import torch

warnings.filterwarnings("ignore")


def judge_beside_log_probs(
    overrides: list[str], rows: list[dict[str, Any]], lost: str
) -> dict[str, Any]:
    """The nodes between generation and reward on hand-made critiques and revisions.

    ``rows``: uid, row_id, prompt, critique, revision. The service fails for programs that
    contain ``lost``.
    """
    from ctrl_megatron.config import load_config
    from ctrl_megatron.graph.executor import Executor
    from ctrl_megatron.sandbox import EmbeddedSandbox
    from ctrl_megatron.steps.ctrl import critique_metrics

    config = load_config("examples/ctrl_smollm2_cpu.yaml", overrides)
    with EmbeddedSandbox.start(workers=2) as service:
        worker, judge = _worker(config, service.endpoint, lost)
        batch = _batch(worker.codec, rows)
        before = batch["response_mask"].clone()
        worker.timeline.begin_step()
        done, metrics = Executor(_graph(config), worker).run_step(batch)
        metrics |= critique_metrics(worker, done)
        worker.background.run(judge.client.close())
    names = ("token_level_scores", "response_mask", "old_log_probs", "ref_log_prob")
    return {
        **{name: done[name] for name in names},
        "mask_before": before,
        "uid": done["uid"].tolist(),
        "detail": done["detail"].tolist(),
        "metrics": metrics,
        "phases": [dataclasses.asdict(phase) for phase in worker.timeline.phases()],
        "programs": judge.programs,
        "requests": judge.client.counters.requests,
    }


class FaultyJudge:
    """The real client, but that the service fails for programs with ``lost`` in them."""

    def __init__(self, client: Any, lost: str) -> None:
        self.client, self._lost = client, lost
        self.programs: list[str] = []

    async def identity(self) -> object:
        """See ``rewards.grading.Judge``."""
        return await self.client.identity()

    async def submit(self, request: Any) -> Any:
        """See ``rewards.grading.Judge``."""
        from ctrl_megatron.sandbox.client import SandboxError

        self.programs.append(request.completion)
        if self._lost in request.completion:
            raise SandboxError("the service fell over")
        return await self.client.submit(request)


def _worker(config: Any, endpoint: str, lost: str) -> tuple[Any, FaultyJudge]:
    from ctrl_megatron.algorithms import FixedKLController
    from ctrl_megatron.background import BackgroundLoop
    from ctrl_megatron.data.tokens import TextCodec
    from ctrl_megatron.parallel.groups import initialize_groups
    from ctrl_megatron.parallel.layout import Layout
    from ctrl_megatron.parallel.stop import StopFlag
    from ctrl_megatron.rewards import RewardModelForCritic, RewardSum
    from ctrl_megatron.run.build import build_policy
    from ctrl_megatron.run.inputs import prompt_tables
    from ctrl_megatron.sandbox import SandboxClient
    from ctrl_megatron.steps.worker import DAGWorker

    groups = initialize_groups(Layout(), seed=config.trainer.seed, timeout_seconds=60)
    path = config.actor_rollout_ref.model.path
    codec = TextCodec(path)
    policy, reference = (
        build_policy(config, groups, path=path, optimizer=None, budget=4096) for _ in range(2)
    )
    judge = FaultyJudge(SandboxClient(endpoint), lost)
    reward = RewardModelForCritic(
        config.data.train_files, codec.tokenizer, sandbox=judge, show_progress=False
    )
    unused: Any = None
    worker = DAGWorker(
        config=config,
        groups=groups,
        background=BackgroundLoop(),
        stop=StopFlag(),
        codec=codec,
        engine=None,
        rewards=RewardSum({"critic": reward}, judge=judge),
        reward_weights={"critic": 1.0},
        owner=None,
        max_model_len=4096,
        actor=policy,
        reference=reference,
        value=None,
        peak_flops=1e9,
        kl_controller=FixedKLController(0.0),
        draw=unused,
        train=prompt_tables(config, codec)[0],
        validation=None,
    )
    return worker, judge


def _batch(codec: Any, rows: list[dict[str, Any]]) -> Any:
    from ctrl_megatron.prompts import parse_judgment
    from ctrl_megatron.steps.batch import fields_of_samples, make_batch
    from ctrl_megatron.steps.sample import Revision, Sample, critique_columns, revision_columns
    from ctrl_megatron.types import Completion, VersionSpan

    drawn = []
    for row in rows:
        tokens = (*codec.tokenizer.encode(row["critique"]), codec.eos_token_ids[0])
        completion = Completion(
            token_ids=tokens,
            log_probs=(-1.0,) * len(tokens),
            finish_reason="stop",
            spans=(VersionSpan("actor@0", 0, len(tokens)),),
        )
        prompt = tuple(codec.encode_chat([{"role": "user", "content": row["prompt"]}]))
        drawn.append(
            Sample(
                uid=row["uid"],
                row_id=row["row_id"],
                prompt=prompt,
                completion=completion,
                text=row["critique"],
                judgment=parse_judgment(row["critique"]),
                revision=Revision(text=row["revision"]),
            )
        )
    batch = make_batch(drawn, pad_token_id=codec.pad_token_id)
    for name, column in fields_of_samples(drawn, critique_columns, revision_columns).items():
        batch[name] = column
    return batch


def _graph(config: Any) -> Any:
    """The nodes of the built-in pipeline from the sandbox to the scores, in its order."""
    from ctrl_megatron.pipeline import TaskGraph, ctrl_pipeline

    whole, part = ctrl_pipeline(config), TaskGraph("judging")
    for name in ("sandbox", "old_log_prob", "ref_log_prob", "scores"):
        node = whole.get_node(name)
        before = ("generate_revisions", "balance")
        node.dependencies = [name for name in node.dependencies if name not in before]
        part.add_node(node)
    return part


def speak_and_listen(engine: str, model: str, prompts: list[str], count: int) -> dict[str, Any]:
    """Log-probs of an engine and of the trainer for the same tokens, through three updates."""
    from ctrl_megatron.background import BackgroundLoop
    from ctrl_megatron.data.tokens import TextCodec
    from ctrl_megatron.parallel.layout import Layout
    from ctrl_megatron.parallel.stop import StopFlag
    from ctrl_megatron.parallel.waiting import WaitRules
    from ctrl_megatron.resharding.plan import EngineLayout
    from ctrl_megatron.resharding.push import push
    from ctrl_megatron.resharding.sources import DirectorySource, ModelSource
    from ctrl_megatron.resharding.transports import sender_class
    from ctrl_megatron.rollout.engine import EngineSpec
    from ctrl_megatron.rollout.launch import EngineProcess

    spec = EngineSpec(
        name=engine,
        model_path=model,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=8,
        kv_cache_gib=0.25,
        threads=1,
    )
    with EngineProcess(spec) as process:
        groups, policy = _frozen_policy(model, Layout())
        codec, loop = TextCodec(model), BackgroundLoop()
        dialogues = [codec.encode_chat([{"role": "user", "content": text}]) for text in prompts]
        process.wait_ready()
        remote, layout = process.connect(), EngineLayout(dtype="float32", bucket_bytes=64 << 20)
        sender = sender_class("shared_memory")(groups)
        waiting = WaitRules(groups=groups, stop=StopFlag(), limit=280.0)
        actor = ModelSource(policy, layout)
        proxy = DirectorySource(model, layout, groups)
        results = {}
        for version, source in (("actor@0", actor), ("actor@1", actor), ("proxy", proxy)):
            if version == "actor@1":
                _change(policy)
            verify = version == "actor@1"
            push(source, remote, loop, sender, waiting, version=version, verify=verify)
            found = loop.run(_speak(remote, dialogues, count))
            found["digests"] = loop.run(remote.checksums())
            if source is actor:
                found["gaps"] = _gaps(policy, dialogues, found["sampled"], codec.pad_token_id)
            results[version] = found
        loop.run(remote.close())
    return results


def _frozen_policy(model: str, layout: Any) -> tuple[Any, Any]:
    from ctrl_megatron.checkpoint.hf import load_hf
    from ctrl_megatron.models.build import BuildOptions
    from ctrl_megatron.models.hf_config import read_model_shape
    from ctrl_megatron.models.policy import Policy
    from ctrl_megatron.models.strategy import ModelOptions
    from ctrl_megatron.parallel.groups import initialize_groups

    groups = initialize_groups(layout, seed=1, timeout_seconds=60)
    options = ModelOptions(build=BuildOptions(dtype="float32"), optimizer=None)
    policy = Policy(read_model_shape(model), groups, options)
    load_hf(policy, model)
    return groups, policy


@torch.no_grad()
def _change(policy: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    for parameter in policy.models[0].parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.add_(0.1 * parameter.abs().mean() * noise)


async def _speak(remote: Any, dialogues: list[list[int]], count: int) -> dict[str, Any]:
    from ctrl_megatron.types import SamplingParams

    drawn = await remote.generate(dialogues, SamplingParams(max_tokens=count, seed=5))
    likeliest = await remote.generate(dialogues, SamplingParams(max_tokens=count, temperature=0.0))
    await asyncio.sleep(0)
    return {"sampled": [c for (c,) in drawn], "greedy": [c.token_ids for (c,) in likeliest]}


def _gaps(
    policy: Any, dialogues: list[list[int]], sampled: list[Any], pad_token_id: int
) -> torch.Tensor:
    """|p_engine - p_trainer| of every sampled token."""
    from ctrl_megatron.steps.batch import pad_rows, tensor_fields

    batch = pad_rows(dialogues, [c.token_ids for c in sampled], pad_token_id=pad_token_id)
    log_probs, _ = policy.log_probs(tensor_fields(batch), 1.0)
    theirs = torch.tensor([value for c in sampled for value in c.log_probs])
    return (log_probs[batch["response_mask"]].exp() - theirs.exp()).abs()


def run_command(name: str, arguments: list[str]) -> dict[str, Any]:
    """Exit code and output of a command of the package."""
    import os
    from importlib import import_module
    from pathlib import Path

    code = import_module(f"ctrl_megatron.commands.{name}").main(arguments)
    log = Path(os.readlink("/proc/self/fd/1"))
    return {"code": code, "output": log.read_text(errors="replace")}

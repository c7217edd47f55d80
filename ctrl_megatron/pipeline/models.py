"""The models of a run, as its configuration describes them, with their weights and optimizers."""

from __future__ import annotations

from ctrl_megatron.checkpoint.hf import load_hf
from ctrl_megatron.config import Config
from ctrl_megatron.models.build import BuildOptions
from ctrl_megatron.models.hf_config import read_model_shape, value_shape
from ctrl_megatron.models.optimizer import OptimizerOptions
from ctrl_megatron.models.parallel_model import ModelOptions
from ctrl_megatron.models.policy import Policy
from ctrl_megatron.models.value import ValueModel
from ctrl_megatron.parallel.groups import Groups


def model_options(
    config: Config, *, optimizer: OptimizerOptions | None, budget: int
) -> ModelOptions:
    """How the run's models compute; without an optimizer they are frozen."""
    megatron = config.actor_rollout_ref.actor.megatron
    return ModelOptions(
        build=BuildOptions(
            dtype=config.actor_rollout_ref.model.dtype,
            recompute_granularity=megatron.recompute_granularity if optimizer else None,
            recompute_num_layers=megatron.recompute_num_layers,
            overrides=megatron.override_transformer_config,
        ),
        token_budget=budget,
        logprob_chunk=megatron.logprob_chunk_size,
        optimizer=optimizer,
    )


def build_policy(
    config: Config, groups: Groups, *, path: str, optimizer: OptimizerOptions | None, budget: int
) -> Policy:
    """A policy with the weights of the HF directory ``path``."""
    options = model_options(config, optimizer=optimizer, budget=budget)
    policy = Policy(read_model_shape(path), groups, options)
    load_hf(policy, path)
    if optimizer is not None:
        policy.start_optimizer()
    return policy


def actor_optimizer(config: Config, total_steps: int) -> OptimizerOptions:
    """The actor's optimizer for a run of ``total_steps`` training steps."""
    actor = config.actor_rollout_ref.actor
    per_step = actor.ppo_epochs * (config.data.train_batch_size // actor.ppo_mini_batch_size)
    learning = max(1, total_steps - config.trainer.critic_warmup)
    return _optimizer_options(config, actor.optim.lr, learning * per_step)


def value_optimizer(config: Config, total_steps: int) -> OptimizerOptions:
    """The value model's optimizer for a run of ``total_steps`` training steps."""
    size = config.actor_rollout_ref.actor.ppo_mini_batch_size
    per_step = config.value_epochs * (config.data.train_batch_size // size)
    return _optimizer_options(config, config.critic.optim.lr, total_steps * per_step)


def _optimizer_options(config: Config, lr: float, steps: int) -> OptimizerOptions:
    actor = config.actor_rollout_ref.actor
    optim = actor.optim
    return OptimizerOptions(
        lr=lr,
        total_steps=steps,
        weight_decay=optim.weight_decay,
        betas=optim.betas,
        eps=optim.eps,
        warmup_steps=int(optim.lr_warmup_steps_ratio * steps),
        schedule=optim.lr_scheduler_type,
        min_lr_ratio=optim.min_lr_ratio,
        clip_grad=actor.grad_clip,
        distributed=actor.megatron.use_distributed_optimizer,
    )


def build_policies(config: Config, groups: Groups, total: int) -> tuple[Policy, Policy | None]:
    """The actor for ``total`` training steps, and the reference where the objective has a KL."""
    family = config.actor_rollout_ref
    policy = build_policy(
        config,
        groups,
        path=family.model.path,
        optimizer=actor_optimizer(config, total),
        budget=family.actor.ppo_max_token_len_per_gpu,
    )
    if not config.needs_reference:
        return policy, None
    reference = build_policy(
        config, groups, path=family.ref_path, optimizer=None, budget=family.log_prob_token_budget
    )
    if family.actor.megatron.param_offload:
        reference.to_host()
    return policy, reference


def build_value_model(config: Config, groups: Groups, total: int) -> ValueModel | None:
    """The value model for ``total`` training steps; None where nothing reads its values."""
    if not config.needs_values:
        return None
    options = model_options(
        config,
        optimizer=value_optimizer(config, total),
        budget=config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu,
    )
    model = ValueModel(value_shape(read_model_shape(config.value_path)), groups, options)
    load_hf(model, config.value_path)
    model.start_optimizer()
    return model

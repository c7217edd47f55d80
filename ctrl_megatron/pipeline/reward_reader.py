"""A reward model with the tokenizer through which it reads conversations, and the checks of both
before a run starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ctrl_megatron.config import Config
from ctrl_megatron.data.tokens import TextCodec
from ctrl_megatron.errors import UserError, users_input
from ctrl_megatron.models.hf_config import read_shape
from ctrl_megatron.models.safetensors_dir import SafetensorsDirectory
from ctrl_megatron.models.shape import AnyShape, ModelShape, is_reward_model
from ctrl_megatron.models.shards import check_split
from ctrl_megatron.models.value import RewardModel
from ctrl_megatron.parallel.layout import world_with, worlds_of
from ctrl_megatron.pipeline.batch import pad_rows, tensors_of

_NOTHING = ([0], [0])
"""A row in the place of one that is too long: all ranks make a pass, also with nothing to read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardReader:
    """The reward model of a run on one rank."""

    model: RewardModel
    codec: TextCodec
    """Its own tokenizer and chat template."""
    padding: int | None
    """The token that its config.json calls padding: transformers reads the head at the last token
    that is another one."""
    longest: int
    """Tokens of the longest conversation that it reads."""

    def tokens(
        self, prompt: Sequence[Mapping[str, str]], answer: str
    ) -> tuple[list[int], list[int]]:
        """The conversation up to the token at which the head is read, as the part that all answers
        to ``prompt`` begin with, and the rest."""
        shared, rest = self.codec.encode_answered(prompt, answer)
        while rest and rest[-1] == self.padding:
            rest.pop()
        while not rest and len(shared) > 1 and shared[-1] == self.padding:
            shared.pop()
        return shared, rest

    def rewards(self, conversations: Sequence[tuple[list[int], list[int]]]) -> list[float | None]:
        """The rewards of what ``tokens`` returned; None for a conversation that is too long.

        Every rank of the model copy calls this with the same conversations and gets the same
        result; data ranks call it together.
        """
        fits = [len(shared) + len(rest) <= self.longest for shared, rest in conversations]
        # The head is read before one more token, whatever that is.
        read = [
            (shared, [*rest, 0]) if fit else _NOTHING
            for fit, (shared, rest) in zip(fits, conversations, strict=True)
        ]
        rows = tensors_of(
            pad_rows([shared for shared, _ in read], [rest for _, rest in read], pad_token_id=0)
        )
        answered = rows["response_mask"]
        rows["response_mask"] = torch.zeros_like(answered)
        rows["response_mask"][torch.arange(len(read)), answered.sum(dim=1) - 1] = True
        found = self.model.rewards(rows).tolist()
        return [reward if fit else None for fit, reward in zip(fits, found, strict=True)]


def check_reward_model(config: Config) -> TextCodec | None:
    """The tokenizer of the reward model; None without one. UserError if its files do not fit each
    other or the layout, if it is no model with one number for a conversation, and if its tokenizer
    cannot be used.
    """
    if not config.needs_reward_model:
        return None
    keys, strategy = config.reward_model, config.actor_rollout_ref.actor.strategy
    path = keys.model.path
    assert path is not None  # config.checks
    with users_input("reward_model.model.path"):
        shape = read_shape(path, strategy)
        if not is_reward_model(shape):
            raise UserError(
                f"{path} is {'a value' if shape.value_head else 'a language'} model, which has no "
                "number for a conversation",
                remedy="name a model of sequence classification (*ForSequenceClassification) with "
                "one label",
            )
        SafetensorsDirectory(path).check(shape)
        if isinstance(shape, ModelShape):
            worlds = worlds_of(config.trainer.nnodes * config.trainer.n_gpus_per_node, config)
            layout = world_with(worlds, "reward_model").layout
            check_split(shape, layout)
            layout.check_layers(shape.num_layers)
    longest = longest_conversation(config, shape)
    with users_input("reward_model.model.tokenizer_path"):
        codec = TextCodec(keys.model.tokenizer_path or path)
        question = {"role": "user", "content": "?"}
        shared, rest = codec.encode_answered([question], "?")
        largest = max(codec.tokenizer.get_vocab().values())
        if largest >= shape.vocab_size:
            raise UserError(
                f"{codec.path} has token number {largest}, but the model of {path} knows "
                f"{shape.vocab_size}",
                remedy="use the model's own tokenizer",
            )
        if len(shared) + len(rest) > longest:
            raise UserError(
                f"the shortest conversation has {len(shared) + len(rest)} tokens, and {longest} "
                "are read",
                key="reward_model.max_length",
                remedy="raise it",
            )
    return codec


def longest_conversation(config: Config, shape: AnyShape) -> int:
    """Tokens of the longest conversation that the reward model of ``shape`` reads. UserError for a
    ``reward_model.max_length`` above the model's context or the token budget of a pass.
    """
    family, given = config.actor_rollout_ref, config.reward_model.max_length
    # A token follows the conversation.
    budget, context = family.log_prob_token_budget - 1, shape.max_position_embeddings
    if given is not None and given > min(budget, context):
        raise UserError(
            f"{given} tokens are more than the model's context of max_position_embeddings="
            f"{context} or the {budget} of a pass",
            key="reward_model.max_length",
            remedy="lower it, or raise actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu",
        )
    return given or min(budget, context)

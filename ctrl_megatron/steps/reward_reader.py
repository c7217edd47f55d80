"""A reward model with the tokenizer through which it reads conversations, and the checks of both
before a run starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ctrl_megatron.config import Config
from ctrl_megatron.data.tokens import TextCodec
from ctrl_megatron.models.shape import AnyShape, context_of
from ctrl_megatron.models.value import RewardModel
from ctrl_megatron.steps.batch import pad_rows, tensor_fields

_NOTHING = ([0], [0])
"""A row in the place of one that is too long: all ranks make a pass, also with nothing to read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRewardModel:
    """The reward model of a run on one rank."""

    model: RewardModel
    codec: TextCodec
    """Its own tokenizer and chat template."""
    padding: int | None
    """The token that its config.json calls padding: transformers reads the head at the last token
    that is another one."""
    longest: int
    """Tokens of the longest conversation that it reads."""

    def conversation_tokens(
        self, prompt: Sequence[Mapping[str, str]], answer: str
    ) -> tuple[list[int], list[int]]:
        """The conversation up to the token at which the head is read, as the part that all answers
        to ``prompt`` begin with, and the rest."""
        shared, rest = self.codec.encode_chat_and_answer(prompt, answer)
        while rest and rest[-1] == self.padding:
            rest.pop()
        while not rest and len(shared) > 1 and shared[-1] == self.padding:
            shared.pop()
        return shared, rest

    def score_conversations(
        self, conversations: Sequence[tuple[list[int], list[int]]]
    ) -> list[float | None]:
        """The rewards of ``conversations`` (``conversation_tokens``); None where one is too long.

        Every rank of the model copy calls this with the same conversations and gets the same
        result; data ranks call it together.
        """
        fits = [len(shared) + len(rest) <= self.longest for shared, rest in conversations]
        # The head is read before one more token, whatever that is.
        read = [
            (shared, [*rest, 0]) if fit else _NOTHING
            for fit, (shared, rest) in zip(fits, conversations, strict=True)
        ]
        rows = tensor_fields(
            pad_rows([shared for shared, _ in read], [rest for _, rest in read], pad_token_id=0)
        )
        answered = rows["response_mask"]
        rows["response_mask"] = torch.zeros_like(answered)
        rows["response_mask"][torch.arange(len(read)), answered.sum(dim=1) - 1] = True
        found = self.model.rewards(rows).tolist()
        return [reward if fit else None for fit, reward in zip(fits, found, strict=True)]


def max_conversation_tokens(config: Config, shape: AnyShape) -> int:
    """Tokens of the longest conversation that the reward model of ``shape`` reads: it
    fits in the model's context and, with the token that follows it, in a pass."""
    budget = config.actor_rollout_ref.log_prob_token_budget - 1
    return min(config.reward_model.max_length or budget, budget, context_of(shape)[0])

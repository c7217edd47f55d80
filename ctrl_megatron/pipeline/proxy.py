"""The sources of revisions: the frozen proxy on the actor's engines, on engines of its own, or on
servers of OpenAI's protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ctrl_megatron.data.tokens import TextCodec
from ctrl_megatron.pipeline.batch import versions_of
from ctrl_megatron.pipeline.sampling import generate, greedy_params
from ctrl_megatron.pipeline.worker import Answer, Conversation, Failure, RolloutWorker
from ctrl_megatron.rollout.engine import INITIAL_VERSION, Engine
from ctrl_megatron.types import Completion, SamplingParams

Ask = Callable[[list[list[int]], SamplingParams], list[list[Completion]]]
"""Takes prompts and parameters; returns ``params.n`` completions of each prompt. Collective."""


class SharedProxy:
    """A proxy on the actor's engines, which get its weights before it answers.

    It has the actor's shape, tokenizer and chat template. ``max_model_len`` is the engines' longest
    sequence, in tokens.
    """

    label = "proxy on the actor's engines"

    def __init__(self, codec: TextCodec, *, max_model_len: int) -> None:
        self._codec, self._longest = codec, max_model_len

    def revise(
        self, worker: RolloutWorker, conversations: Sequence[Conversation], max_tokens: int
    ) -> list[Answer | Failure | None]:
        def ask(prompts: list[list[int]], params: SamplingParams) -> list[list[Completion]]:
            return generate(worker, "proxy", prompts, params)

        return answers_of(ask, self._codec, self._longest, conversations, max_tokens)

    async def close(self) -> None:
        """The engines are the run's; nothing is to be closed."""


class EngineProxy:
    """A proxy on engines of its own, which keep its weights.

    ``engine`` is a client of all of them on leaders, None elsewhere; ``max_model_len`` is their
    longest sequence, in the tokens of ``codec``.
    """

    def __init__(self, engine: Engine | None, codec: TextCodec, *, max_model_len: int) -> None:
        self._engine, self._codec, self._longest = engine, codec, max_model_len
        self.label = f"proxy:{codec.path.resolve().name}"

    def revise(
        self, worker: RolloutWorker, conversations: Sequence[Conversation], max_tokens: int
    ) -> list[Answer | Failure | None]:
        def ask(prompts: list[list[int]], params: SamplingParams) -> list[list[Completion]]:
            async def ask_engine() -> list[list[Completion]]:
                assert self._engine is not None
                return await self._engine.generate(prompts, params) if prompts else []

            return worker.ask(ask_engine, "the proxy to revise")

        found = answers_of(ask, self._codec, self._longest, conversations, max_tokens)
        for answer in found:
            if isinstance(answer, Answer) and answer.version != INITIAL_VERSION:
                raise RuntimeError(f"{self.label} answered with the weights {answer.version}")
        return [
            replace(answer, version=self.label) if isinstance(answer, Answer) else answer
            for answer in found
        ]

    async def close(self) -> None:
        if self._engine is not None:
            await self._engine.close()


def answers_of(
    ask: Ask,
    codec: TextCodec,
    longest: int,
    conversations: Sequence[Conversation],
    max_tokens: int,
) -> list[Answer | Failure | None]:
    """``Proxy.revise`` by engines for sequences of up to ``longest`` tokens, which ``ask`` asks for
    completions of prompts in the tokens of ``codec``.
    """
    encoded = [
        codec.encode_chat(messages, add_generation_prompt=True) for messages in conversations
    ]
    fitting = [list(prompt) for prompt in encoded if len(prompt) + max_tokens <= longest]
    drawn = iter(ask(fitting, greedy_params(codec, max_tokens)))
    return [
        _answer(codec, next(drawn)[0]) if len(prompt) + max_tokens <= longest else None
        for prompt in encoded
    ]


def _answer(codec: TextCodec, completion: Completion) -> Answer:
    return Answer(
        text=codec.decode(completion.token_ids),
        tokens=len(completion.token_ids),
        version=versions_of(completion),
        finish_reason=completion.finish_reason,
    )

"""The messages that models receive, and the parsing of the texts that they return."""

from ctrl_megatron.prompts.code_block import (
    desanitize,
    extract_code,
    fence_code,
    sanitize,
    sanitized_answer,
)
from ctrl_megatron.prompts.messages import (
    JUDGED_CORRECT,
    JUDGED_INCORRECT,
    REVISION_SENTENCE,
    choice_messages,
    critique_messages,
    find_judgment_word,
    generation_messages,
    hint_messages,
    judging_messages,
    parse_choice,
    parse_judgment,
    reference_hint,
    revision_messages,
    revision_request,
)
from ctrl_megatron.prompts.settled_answer import NormalisedAnswer, normalise_answer

__all__ = [
    "JUDGED_CORRECT",
    "JUDGED_INCORRECT",
    "REVISION_SENTENCE",
    "NormalisedAnswer",
    "choice_messages",
    "critique_messages",
    "desanitize",
    "extract_code",
    "fence_code",
    "find_judgment_word",
    "generation_messages",
    "hint_messages",
    "judging_messages",
    "normalise_answer",
    "parse_choice",
    "parse_judgment",
    "reference_hint",
    "revision_messages",
    "revision_request",
    "sanitize",
    "sanitized_answer",
]

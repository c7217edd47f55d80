"""Everything the models are told and everything read back from their text."""

from ctrl_megatron.prompts.code_block import desanitize, extract_code, fenced, sanitize
from ctrl_megatron.prompts.messages import (
    JUDGED_CORRECT,
    JUDGED_INCORRECT,
    REVISION_SENTENCE,
    choice_messages,
    critique_messages,
    generation_messages,
    hint_messages,
    parse_choice,
    parse_judgment,
    revision_request,
)

__all__ = [
    "JUDGED_CORRECT",
    "JUDGED_INCORRECT",
    "REVISION_SENTENCE",
    "choice_messages",
    "critique_messages",
    "desanitize",
    "extract_code",
    "fenced",
    "generation_messages",
    "hint_messages",
    "parse_choice",
    "parse_judgment",
    "revision_request",
    "sanitize",
]

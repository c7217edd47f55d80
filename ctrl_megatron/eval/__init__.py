"""What critiques are worth on held-out problems."""

from ctrl_megatron.eval.measures import pass_at_k
from ctrl_megatron.eval.results import evaluate_turns
from ctrl_megatron.eval.transcripts import ProgramResult, Turn

__all__ = ["ProgramResult", "Turn", "evaluate_turns", "pass_at_k"]

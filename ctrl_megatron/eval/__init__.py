"""How much critiques improve solutions of held-out problems."""

from ctrl_megatron.eval.measures import pass_at_k
from ctrl_megatron.eval.results import evaluate_turns
from ctrl_megatron.eval.transcripts import Turn
from ctrl_megatron.types import Verdict

__all__ = ["Turn", "Verdict", "evaluate_turns", "pass_at_k"]

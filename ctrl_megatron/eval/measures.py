"""What one problem, one program or one judgment counts: formulas without any model or file."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import SequenceMatcher

from ctrl_megatron.prompts import extract_code

_WORD = re.compile(r"\w+|[^\w\s]")


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that among ``k`` of ``n`` samples, drawn without replacement, one is right when
    ``c`` are: the unbiased estimator (HumanEval, arXiv 2107.03374, section 2.1).

    Raises ValueError unless 1 <= k <= n and 0 <= c <= n.
    """
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(f"pass@{k} of {c} right among {n} samples does not exist")
    # Whole numbers: exact however many samples there are.
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def similarity(draft: str, revision: str) -> float:
    """How much of two answers' programs is the same, in [0, 1]; 1 for equal ones.

    Twice the matching words and signs over all of both (Ratcliff and Obershelp); white space does
    not count.
    """
    both = [_WORD.findall(extract_code(text)) for text in (draft, revision)]
    return SequenceMatcher(None, *both, autojunk=False).ratio()


def wilson_interval(right: int, n: int, level: float = 0.9) -> tuple[float, float]:
    """Interval of a share of ``right`` among ``n`` independent draws (E. B. Wilson, 1927).

    Raises ValueError for no draw.
    """
    from statistics import NormalDist

    if n < 1:
        raise ValueError("a share of nothing has no interval")
    z2 = NormalDist().inv_cdf((1 + level) / 2) ** 2
    share = right / n
    middle = share + z2 / (2 * n)
    half = math.sqrt(z2 * (share * (1 - share) / n + z2 / (4 * n * n)))
    low, high = ((middle + sign * half) / (1 + z2 / n) for sign in (-1, 1))
    # What rounding leaves of an exact end.
    return (0.0 if right == 0 else low, 1.0 if right == n else high)


@dataclass(frozen=True, slots=True)
class JudgmentCounts:
    """How often a critic said what of how many programs; sums add up over programs."""

    correct_as_correct: float = 0.0
    correct_as_incorrect: float = 0.0
    incorrect_as_correct: float = 0.0
    incorrect_as_incorrect: float = 0.0
    correct_as_none: float = 0.0
    """A right program whose critique holds no judgment."""
    incorrect_as_none: float = 0.0

    @staticmethod
    def of(judged: Iterable[tuple[bool | None, bool]]) -> JudgmentCounts:
        """From (what the critique says, whether the program passes every test)."""
        counts = dict.fromkeys(JudgmentCounts.__slots__, 0.0)
        names = {True: "correct", False: "incorrect", None: "none"}
        for said, true in judged:
            counts[f"{names[true]}_as_{names[said]}"] += 1
        return JudgmentCounts(**counts)


def discrimination(counts: JudgmentCounts) -> dict[str, float]:
    """Precision, recall and F1 of "the program is right" (``correct``) and of "it is wrong"
    (``incorrect``), and their mean F1 (``f1_macro``), as CTRL's table of discrimination has them.

    A missing judgment finds neither class: it lowers the recall of the program's own. What has no
    value is left out: a precision where the class is never named, a recall where no program belongs
    to it, an F1 where both hold, ``f1_macro`` unless both classes have an F1.
    """
    c, found = counts, {}
    sides = {
        "correct": (c.correct_as_correct, c.incorrect_as_correct, c.correct_as_incorrect),
        "incorrect": (c.incorrect_as_incorrect, c.correct_as_incorrect, c.incorrect_as_correct),
    }
    for name, (hits, false_alarms, mistaken) in sides.items():
        missed = mistaken + (c.correct_as_none if name == "correct" else c.incorrect_as_none)
        ratios = {
            f"precision_{name}": (hits, hits + false_alarms),
            f"recall_{name}": (hits, hits + missed),
            f"f1_{name}": (2 * hits, 2 * hits + false_alarms + missed),
        }
        found |= {key: part / whole for key, (part, whole) in ratios.items() if whole > 0}
    if "f1_correct" in found and "f1_incorrect" in found:
        found["f1_macro"] = (found["f1_correct"] + found["f1_incorrect"]) / 2
    return found

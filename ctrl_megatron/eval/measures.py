"""Formulas of an evaluation: pass@k, similarity, intervals, counts of judgments, F1."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from ctrl_megatron.prompts import extract_code

_WORD = re.compile(r"\w+|[^\w\s]")


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that at least one of ``k`` samples is right, drawn without replacement from ``n``
    samples of which ``c`` are right: the unbiased estimator (HumanEval, arXiv 2107.03374, section
    2.1).

    Raises ValueError unless 1 <= k <= n and 0 <= c <= n.
    """
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(f"pass@{k} of {c} right among {n} samples does not exist")
    # Integers, so that the quotient is exact for any number of samples.
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def pass_rate_of_draws(draws: Mapping[str, Sequence[bool | None]]) -> dict[str, float]:
    """``pass@K``: the share of problems that one of their K draws solves, of which None is unknown.
    Problems with an unknown draw, or fewer than K, are left out; empty where K is 1 or nothing is
    left.
    """
    k = max(map(len, draws.values()), default=0)
    known = [own for own in draws.values() if len(own) == k and None not in own]
    return {f"pass@{k}": sum(map(any, known)) / len(known)} if known and k > 1 else {}


def program_similarity(draft: str, revision: str) -> float:
    """Similarity of the programs in two answers, in [0, 1]; 1 for equal programs.

    It is twice the number of matching words and signs over the number of all words and signs of
    both programs (Ratcliff and Obershelp); white space does not count.
    """
    both = [_WORD.findall(extract_code(text)) for text in (draft, revision)]
    return SequenceMatcher(None, *both, autojunk=False).ratio()


def wilson_interval(right: int, n: int, level: float = 0.9) -> tuple[float, float]:
    """Confidence interval of the share ``right`` / ``n`` of independent draws (E. B. Wilson, 1927).

    Raises ValueError where ``n`` is 0.
    """
    if n < 1:
        raise ValueError("a share of nothing has no interval")
    z2 = NormalDist().inv_cdf((1 + level) / 2) ** 2
    share = right / n
    middle = share + z2 / (2 * n)
    half = math.sqrt(z2 * (share * (1 - share) / n + z2 / (4 * n * n)))
    low, high = ((middle + sign * half) / (1 + z2 / n) for sign in (-1, 1))
    # Exact ends, which rounding would change.
    return (0.0 if right == 0 else low, 1.0 if right == n else high)


def judgment_counts(judged: Iterable[tuple[bool | None, bool]]) -> NDArray[np.float64]:
    """Counts (6,) of (judgment of a program, True where the program is right).

    The first three columns count right programs, the other three wrong programs: judged correct,
    judged incorrect, no judgment. Counts of several programs may be added.
    """
    counts = np.zeros(6)
    for judgment, right in judged:
        counts[(0 if right else 3) + (2 if judgment is None else int(not judgment))] += 1
    return counts


def discrimination_rates(counts: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
    """Precision, recall and F1 of "the program is right" (``correct``) and of "it is wrong"
    (``incorrect``), and their mean F1 (``f1_macro``), as CTRL's table of discrimination has them.

    ``counts`` are (..., 6) ``judgment_counts``; every rate is (...). A missing judgment counts for
    neither class and lowers the recall of the program's class. A rate without a value is nan: a
    precision where the class is never named, a recall where no program belongs to the class, and
    every F1 where all programs are right or all are wrong, because a critic that always names one
    class would be perfect there.
    """
    rates = {}
    both = (counts[..., :3].sum(axis=-1) > 0) & (counts[..., 3:].sum(axis=-1) > 0)
    for name, (hits, false_alarms, mistaken, unsaid) in {
        "correct": (0, 3, 1, 2),
        "incorrect": (4, 1, 3, 5),
    }.items():
        hit, named = counts[..., hits], counts[..., hits] + counts[..., false_alarms]
        there = hit + counts[..., mistaken] + counts[..., unsaid]
        rates[f"precision_{name}"] = ratio_or_nan(hit, named)
        rates[f"recall_{name}"] = ratio_or_nan(hit, there)
        rates[f"f1_{name}"] = ratio_or_nan(2 * hit, np.where(both, named + there, 0))
    rates["f1_macro"] = (rates["f1_correct"] + rates["f1_incorrect"]) / 2
    return rates


def ratio_or_nan(part: NDArray[np.float64], whole: NDArray[np.float64]) -> NDArray[np.float64]:
    """``part`` / ``whole``, element by element; nan where ``whole`` is 0."""
    return np.divide(part, whole, out=np.full(np.shape(whole), np.nan), where=whole > 0)

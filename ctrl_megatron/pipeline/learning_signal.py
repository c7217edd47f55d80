"""Whether a step's critiques can teach anything: what their rewards and texts say of that."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ctrl_megatron.data.rows import Row


def reward_signal(
    rewards: torch.Tensor,
    uids: Sequence[str],
    rows: Sequence[Row],
    revisions: Sequence[str],
    valid: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Vectors whose means are metrics; whole groups, named by ``uids``.

    ``rewards`` (B,), NaN for samples that were not judged; ``valid`` (B,) bool: the critique has a
    judgment, and so ``revisions`` a text. A group of one teaches nothing and has no share here.
    """
    groups: dict[str, list[int]] = {}
    for place, uid in enumerate(uids):
        groups.setdefault(uid, []).append(place)
    distinct = []
    for members in groups.values():
        texts = [revisions[i] for i in members if valid[i]]
        if len(texts) > 1:
            distinct.append(len(set(texts)) / len(texts))
    gains = [
        float(reward) - row.pass_rate
        for reward, row in zip(rewards, rows, strict=True)
        if row.pass_rate is not None
    ]
    return {
        "group/distinct_revision_rate": torch.tensor(distinct),
        "group/reward_minus_first": torch.tensor(gains),
    }


def critique_signal(
    critiques: Sequence[str],
    judgments: Sequence[bool | None],
    rows: Sequence[Row],
) -> dict[str, torch.Tensor]:
    """Vectors whose means are metrics: of critiques with a judgment, which it is; of critiques of
    rows whose columns ``wrong`` and ``right`` know the fault, whether they quote it.

    Quoted is what stands between backticks as a whole. Right programs have an empty ``wrong``.
    """
    named, exact = [], []
    for critique, row in zip(critiques, rows, strict=True):
        wrong, right = row.extra.get("wrong"), row.extra.get("right")
        if isinstance(wrong, str) and isinstance(right, str) and wrong:
            quotes = [f"`{text}`" in critique for text in (wrong, right)]
            named.append(float(quotes[0]))
            exact.append(float(all(quotes)))
    return {
        "judgment/correct_rate": torch.tensor(
            [float(said) for said in judgments if said is not None]
        ),
        "fault/named_rate": torch.tensor(named),
        "fault/exact_edit_rate": torch.tensor(exact),
    }

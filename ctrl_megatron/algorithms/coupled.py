"""Coupled masks of a masked-diffusion model's responses, and the score that they estimate.

Source: DiffuCoder (arXiv 2506.20639, section 4). Every response is scored in three versions: wholly
masked, masked in a random share of its tokens, and masked in exactly the others. So each token is
predicted twice, and both partial versions together mask it exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch

LOWEST, HIGHEST = 0.2, 0.8
"""Bounds of the share of a response that the second version masks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoupledMaskOptions:
    """How masks are drawn. The defaults are those of DiffuCoder's recipe."""

    random_masking: bool = True
    """Draw other masks in every step and iteration; else a row has the same masks always."""
    p_mask_prompt: float = 0.0
    """Probability of a prompt's token to be masked, alike in all three versions (d1, arXiv
    2504.12216). DiffuCoder's trainer has the key and masks no prompt."""

    def __post_init__(self) -> None:
        if not 0 <= self.p_mask_prompt < 1:
            raise ValueError(f"p_mask_prompt must lie in [0, 1), got {self.p_mask_prompt}")

    def row_seed(self, run_seed: int, step: int, row: str, iteration: int) -> int:
        """63-bit seed of a row's masks. ``row`` names the row and its sample, so that masks depend
        on no rank and no batch; ``iteration`` counts the passes over a step's samples. Without
        ``random_masking`` neither ``step`` nor ``iteration`` counts."""
        when = (step, iteration) if self.random_masking else ()
        digest = blake2b(repr((run_seed, row, *when)).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CoupledMasks:
    """The masks of B rows with P + R columns each, whose last R are the response."""

    masked: torch.Tensor
    """(B, P+R) bool: in the response what the second version masks, in the prompt what all versions
    mask; off for padding."""
    share: torch.Tensor
    """(B,) float32: the probability with which a response token is masked in the second version."""


def draw_coupled_masks(
    attention_mask: torch.Tensor,
    response_width: int,
    seeds: Sequence[int],
    rule: CoupledMaskOptions,
) -> CoupledMasks:
    """The masks of rows with ``attention_mask`` (B, P+R), R = ``response_width``, one seed per row.

    A row's masks depend on its seed and its own numbers of tokens, never on padding.
    """
    attended = attention_mask.bool().cpu()
    masked, shares = torch.zeros_like(attended), []
    start = attended.shape[1] - response_width
    for row, seed in enumerate(seeds):
        generator = torch.Generator().manual_seed(seed)
        numbers = torch.rand(1 + int(attended[row].sum()), generator=generator, dtype=torch.float64)
        share = (LOWEST + (HIGHEST - LOWEST) * numbers[0]).float()
        response = int(attended[row, start:].sum())
        # The response's numbers come first, so that prompts without masks change nothing.
        own, prompt = numbers[1:].split([response, len(numbers) - 1 - response])
        masked[row, start:][attended[row, start:]] = own < share
        masked[row, :start][attended[row, :start]] = prompt < rule.p_mask_prompt
        shares.append(share)
    return CoupledMasks(masked=masked, share=torch.stack(shares) if shares else torch.zeros(0))


def coupled_log_prob_weights(
    masked: torch.Tensor, share: torch.Tensor
) -> tuple[float, torch.Tensor]:
    """(weight of the wholly masked version, weights of the partial one that masks the token), the
    latter (R,) float32 for the mask ``masked`` (R,) of the second version and its ``share`` ().

    The score of a token is the sum of its two log-probs with these weights: (log p + w log p') / 2,
    w = 1 / share in the second version and 1 / (1 - share) in the third. It is no log-prob: its
    expectation over masks is the mean of two, but a single one is up to three times as large.
    """
    return 0.5, 0.5 / torch.where(masked, share, 1.0 - share)

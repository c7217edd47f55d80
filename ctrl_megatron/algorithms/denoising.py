"""Masks for the fine-tuning of masked-diffusion models.

Source: LLaDA (arXiv 2502.09992, section 2 and algorithm 2). Every row has a level t, uniform in
(0, 1]; each token of its response is masked with probability t and predicted from all others, and
-log p / t, summed over the masked tokens, is an unbiased estimate of a bound of the response's
negative log-likelihood.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

LOWEST_LEVEL = 1e-3
"""Smallest level: the weights 1 / t stay finite."""


def draw_denoising_masks(
    attention_mask: torch.Tensor, response_width: int, seeds: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(masked (B, P+R) bool, level (B,) float32) of rows with ``attention_mask`` (B, P+R), whose
    last ``response_width`` columns are the response; one seed per row. Prompts and padding are
    never masked.

    A row's masks depend on its seed and on the number of its response tokens, never on padding.
    """
    attended = attention_mask.bool().cpu()
    masked, levels = torch.zeros_like(attended), torch.zeros(len(attended))
    start = attended.shape[1] - response_width
    for row, seed in enumerate(seeds):
        generator, here = torch.Generator().manual_seed(seed), attended[row, start:]
        numbers = torch.rand(1 + int(here.sum()), generator=generator, dtype=torch.float64)
        level = LOWEST_LEVEL + (1 - LOWEST_LEVEL) * numbers[0]
        masked[row, start:][here] = numbers[1:] < level
        levels[row] = level
    return masked, levels

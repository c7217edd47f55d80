"""Sampling from a masked-diffusion model: a canvas of mask tokens behind the prompt, of which every
step commits those that the model is surest of (Dream, arXiv 2508.15487; LLaDA, arXiv 2502.09992).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol, get_args

import torch

from ctrl_megatron.rollout.decoding import DecodingRow
from ctrl_megatron.rollout.sampling import (
    inverse_sample,
    tempered_log_probs,
    truncate_probabilities,
)
from ctrl_megatron.types import SamplingParams

Order = Literal["entropy", "margin", "random"]
"""The measure of how sure a position is: low entropy, a large lead of the likeliest token over the
second, or chance."""
_LAST = 1e-3
"""The time at which the last step ends; it commits what is left."""
_TOGETHER = 256
"""Places whose probabilities are computed together, which bounds the memory of logits."""
_LEAST = 1e-10


@dataclass(frozen=True, slots=True, kw_only=True)
class DenoisingOptions:
    """How a sampler commits tokens. ValueError for a value outside of its range."""

    steps: int | None = None
    """Passes over a canvas; None makes as many as it has tokens. More steps than tokens commit
    nothing in some of them."""
    alg: Order = "entropy"
    alg_temp: float = 0.0
    """0 commits the surest places. Above it they are drawn without replacement, with probabilities
    softmax(sureness / alg_temp)."""
    block_length: int | None = None
    """Blocks of so many tokens are denoised one after the other, each in its share of the steps
    (semi-autoregressive); None makes the canvas one block."""
    keep_prefix: bool = False
    """Compute the keys and values of prompt and finished blocks in a block's first pass only, and
    keep them for its other passes (the prefix cache of Fast-dLLM, arXiv 2505.22618). This is an
    approximation: all tokens see each other, so those keys change a little with every token that
    the block commits."""

    def __post_init__(self) -> None:
        for name in ("steps", "block_length"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        if not isinstance(self.keep_prefix, bool):
            raise ValueError(f"keep_prefix must be true or false, got {self.keep_prefix!r}")
        if self.alg not in get_args(Order):
            raise ValueError(f"alg must be one of {', '.join(get_args(Order))}, got {self.alg!r}")
        if not self.alg_temp >= 0:
            raise ValueError(f"alg_temp must be at least 0, got {self.alg_temp!r}")

    @classmethod
    def from_extra(cls, given: Mapping[str, Any]) -> DenoisingOptions:
        """The options of ``EngineSpec.extra``; ValueError names an unknown one."""
        known = [field.name for field in fields(cls)]
        if unknown := sorted(given.keys() - set(known)):
            raise ValueError(
                f"engine 'diffusion' knows no {', '.join(unknown)}; known: {', '.join(known)}"
            )
        return cls(**given)

    def commit_schedule(self, tokens: int) -> list[tuple[slice, int]]:
        """(the block, how many of its tokens are committed) of every step over a canvas."""
        size = self.block_length or tokens
        blocks = [slice(a, min(a + size, tokens)) for a in range(0, tokens, size)]
        steps = max(1, (self.steps or tokens) // len(blocks))
        plan = []
        for block in blocks:
            left = block.stop - block.start
            for count in commits_per_step(left, steps):
                plan.append((block, count))
        return plan


def commits_per_step(tokens: int, steps: int) -> list[int]:
    """How many of ``tokens`` masked tokens each step commits: time falls evenly from 1 to 0.001,
    and a step from t to s commits a share of 1 - s/t of what is left, rounded down."""
    times = torch.linspace(1.0, _LAST, steps + 1, dtype=torch.float64).tolist()
    counts, left = [], tokens
    for step in range(steps):
        share = 1.0 - times[step + 1] / times[step]
        counts.append(int(left * share) if step < steps - 1 else left)
        left -= counts[-1]
    return counts


class PrefixKVCache(Protocol):
    """The keys and values of all tokens of a pass before those that it predicted."""

    def logits(
        self, tokens: torch.Tensor, attended: torch.Tensor, rows: Sequence[int]
    ) -> torch.Tensor:
        """(B, places, V) logits as those of ``Denoiser.logits``, for the rows with the numbers
        ``rows`` in the pass that made this prefix. Only what follows the prefix is computed."""
        ...


@dataclass(frozen=True, slots=True)
class DenoisingFunctions:
    """The forward functions of a masked-diffusion model, as the sampler calls them."""

    logits: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
    """(tokens (B, T), attended (B, T) bool, places) -> (B, places, V): the logits that predict the
    last ``places`` tokens."""
    keep: Callable[[torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, PrefixKVCache]]
    """As ``logits``, with the pass's prefix."""
    mask_token: int
    device: torch.device


@dataclass(frozen=True, slots=True)
class _Kept:
    """A prefix with what it was computed for."""

    block: slice
    version: str
    canvases: list[_Canvas]
    prefix: PrefixKVCache


class DenoisingBatch:
    """Rows whose canvases are denoised together. A row ends as soon as it has all tokens before a
    stop token. Its numbers come from its own stream, as many in every step as its canvas has
    places, so they depend on no other row."""

    def __init__(
        self,
        model: DenoisingFunctions,
        options: DenoisingOptions,
        rows: Sequence[DecodingRow],
        params: SamplingParams,
    ) -> None:
        self._model, self._options, self._params = model, options, params
        self.alive = list(rows)
        self._plan, self._step = options.commit_schedule(params.max_tokens), 0
        self._canvases = [_Canvas(row, params.max_tokens, model.mask_token) for row in rows]
        self._width = params.max_tokens + max((len(row.prompt) for row in rows), default=0)
        self._kept: _Kept | None = None

    def step(self, version: str) -> None:
        """Commit the next tokens of every unfinished row."""
        block, count = self._plan[self._step]
        canvases = [canvas for canvas in self._canvases if canvas.row.finish_reason is None]
        numbers = [canvas.numbers() for canvas in canvases]
        if count:
            logits = self._logits(canvases, block, version)
            places = [canvas.masked(block) for canvas in canvases]
            wanted = torch.cat(
                [row[own - block.start] for row, own in zip(logits, places, strict=True)]
            )
            drawn = torch.cat([own[0, at] for own, at in zip(numbers, places, strict=True)])
            lengths = [len(own) for own in places]
            for canvas, own, at, *found in zip(
                canvases,
                numbers,
                places,
                *(part.split(lengths) for part in self._propose(wanted, drawn)),
                strict=True,
            ):
                tokens, log_probs, sureness = (part.cpu() for part in found)
                if self._options.alg == "random":
                    sureness = own[1, at]
                elif self._options.alg_temp > 0:
                    # The largest of these keys are a draw without replacement (Gumbel's trick).
                    gumbel = -(-own[1, at].clamp(min=_LEAST).log()).log()
                    sureness = sureness.double() / self._options.alg_temp + gumbel
                best = sureness.sort(descending=True, stable=True).indices[:count]
                canvas.commit(at[best], tokens[best], log_probs[best], self._step, version)
        self._step += 1
        for canvas in canvases:
            canvas.take(self._params)
        self.alive = [row for row in self.alive if row.finish_reason is None]

    def _logits(self, canvases: list[_Canvas], block: slice, version: str) -> torch.Tensor:
        """(rows, places from the block's start, V)."""
        tokens, attended = self._padded(canvases)
        places, kept = self._params.max_tokens - block.start, self._kept
        if not self._options.keep_prefix:
            return self._model.logits(tokens, attended, places)
        # Other weights have other keys.
        if kept is None or (kept.block, kept.version) != (block, version):
            logits, prefix = self._model.keep(tokens, attended, places)
            self._kept = _Kept(block, version, canvases, prefix)
            return logits
        rows = [kept.canvases.index(canvas) for canvas in canvases]
        return kept.prefix.logits(tokens, attended, rows)

    def _padded(self, canvases: list[_Canvas]) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens, attended), each (rows, width), with the padding before the prompts."""
        texts = [[*canvas.row.prompt, *canvas.tokens.tolist()] for canvas in canvases]
        width, device = self._width, self._model.device
        tokens = torch.tensor([[0] * (width - len(text)) + text for text in texts], device=device)
        lengths = torch.tensor([[len(text)] for text in texts], device=device)
        return tokens, torch.arange(width, device=device) >= width - lengths

    def _propose(
        self, logits: torch.Tensor, numbers: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(m, V) logits, (m,) numbers -> tokens, their log-probs before truncation, sureness."""
        parts = [
            self._propose_some(*part)
            for part in zip(logits.split(_TOGETHER), numbers.split(_TOGETHER), strict=True)
        ]
        tokens, log_probs, sureness = (torch.cat(part) for part in zip(*parts, strict=True))
        return tokens, log_probs, sureness

    def _propose_some(
        self, logits: torch.Tensor, numbers: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        params = self._params
        log_probs = tempered_log_probs(logits, params.temperature)
        # The mask token is no token of a text, but the trainer's softmax has it.
        possible = log_probs.clone()
        possible[:, self._model.mask_token] = -torch.inf
        kept = truncate_probabilities(possible, params.top_p, params.top_k)
        greedy = params.temperature == 0
        tokens = possible.argmax(-1) if greedy else inverse_sample(kept, numbers)
        shares = kept / kept.sum(-1, keepdim=True)
        if self._options.alg == "margin":
            first, second = shares.topk(2, dim=-1).values.unbind(-1)
            sureness = first - second
        else:
            sureness = (shares * (shares + _LEAST).log()).sum(-1)
        chosen = log_probs.gather(-1, tokens[:, None]).squeeze(-1)
        return tokens, chosen, sureness


class _Canvas:
    """The tokens behind a prompt, masked or committed."""

    def __init__(self, row: DecodingRow, length: int, mask_token: int) -> None:
        self.row = row
        self.tokens = torch.full((length,), mask_token)
        self._order = torch.full((length,), -1)
        self._log_probs = torch.zeros(length)
        self._versions = [""] * length

    def numbers(self) -> torch.Tensor:
        """(2, length) float64: the next numbers of the row's stream."""
        return torch.rand(2, len(self.tokens), generator=self.row.stream, dtype=torch.float64)

    def masked(self, block: slice) -> torch.Tensor:
        return block.start + (self._order[block] < 0).nonzero().squeeze(-1)

    def commit(
        self,
        places: torch.Tensor,
        tokens: torch.Tensor,
        log_probs: torch.Tensor,
        step: int,
        version: str,
    ) -> None:
        self.tokens[places], self._log_probs[places], self._order[places] = tokens, log_probs, step
        for place in places.tolist():
            self._versions[place] = version

    def take(self, params: SamplingParams) -> None:
        """Give the row what comes next to its tokens and does not change any more."""
        while self.row.finish_reason is None:
            position = len(self.row.tokens)
            if self._order[position] < 0:
                return
            self.row.order.append(int(self._order[position]))
            self.row.append_token(
                int(self.tokens[position]),
                float(self._log_probs[position]),
                self._versions[position],
                params,
            )

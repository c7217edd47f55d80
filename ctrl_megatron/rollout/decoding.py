"""Batched decoding with a transformers model: left padding, KV cache, rows end one by one.

It runs in a thread; ``PauseControl`` pauses or ends it between two steps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import torch

from ctrl_megatron.rollout.hf_routes import RouteRecorder, joined_routes
from ctrl_megatron.rollout.sampling import sample_tokens, tempered_log_probs
from ctrl_megatron.types import Completion, FinishReason, SamplingParams, VersionSpan


@dataclass(slots=True)
class DecodingRow:
    """One unfinished completion."""

    prompt: Sequence[int]
    stream: torch.Generator
    show: Callable[[Sequence[int]], object] | None = None
    """Called with every token that is drawn."""
    ended: Callable[[Completion], object] | None = None
    """Called with the completion when it ends."""
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    """As ``Completion.order``."""
    routes: list[torch.Tensor] = field(default_factory=list)
    """The experts that the weights of the latest pass, and those before it of the same weights,
    chose: (tokens, layers, top_k) int16 of each pass."""
    finish_reason: FinishReason | None = None

    def append_token(
        self, token: int, log_prob: float, version: str, params: SamplingParams
    ) -> None:
        """Append a drawn token, and set the finish reason if it ends the completion."""
        self.tokens.append(token)
        if params.log_probs:
            self.log_probs.append(log_prob)
        self.versions.append(version)
        if self.show is not None:
            self.show((token,))
        if token in params.stop_token_ids:
            self.finish("stop")
        elif len(self.tokens) == params.max_tokens:
            self.finish("length")

    def finish(self, reason: FinishReason) -> None:
        """Draw no further token."""
        self.finish_reason = reason
        if self.ended is not None:
            self.ended(self.completion())

    def completion(self) -> Completion:
        """The completion as a record; the row must be finished."""
        assert self.finish_reason is not None
        return Completion(
            token_ids=tuple(self.tokens),
            log_probs=tuple(self.log_probs),
            finish_reason=self.finish_reason,
            spans=version_spans(self.versions),
            order=tuple(self.order),
            routes=joined_routes(self.routes, self.versions[-1]) if self.routes else None,
        )


def version_spans(versions: Sequence[str]) -> tuple[VersionSpan, ...]:
    """Spans of neighbouring tokens with equal versions, from one version per token."""
    starts = [i for i, v in enumerate(versions) if i == 0 or v != versions[i - 1]]
    borders = [*starts, len(versions)]
    return tuple(VersionSpan(versions[s], s, e) for s, e in pairwise(borders))


class StepwiseBatch(Protocol):
    """Rows that step together."""

    alive: list[DecodingRow]
    """The unfinished ones."""

    def step(self, version: str) -> None:
        """Draw the next tokens of every unfinished row by one pass of the model, whose weights are
        called ``version``."""
        ...


class DecodingBatch:
    """Rows that step together, with the KV cache of the weights called ``version``."""

    def __init__(
        self,
        model: Any,
        rows: Sequence[DecodingRow],
        params: SamplingParams,
        recorder: RouteRecorder | None = None,
    ) -> None:
        self._model, self._params, self._recorder = model, params, recorder
        self.alive = list(rows)
        self._cached: list[DecodingRow] = []
        self._cache: Any = None
        self._mask = torch.empty(0)
        self._version = ""

    def step(self, version: str) -> None:
        """Draw one token for every unfinished row."""
        stale = self._cache is None or version != self._version
        logits = self._prefill() if stale else self._decode()
        self._version = version
        log_probs = tempered_log_probs(logits, self._params.temperature)
        tokens = sample_tokens(log_probs, self._params, [row.stream for row in self.alive])
        chosen = log_probs.gather(-1, tokens[:, None]).squeeze(-1)
        for row, token, log_prob in zip(self.alive, tokens.tolist(), chosen.tolist(), strict=True):
            row.append_token(token, log_prob, version, self._params)
        self.alive = [row for row in self.alive if row.finish_reason is None]

    def _prefill(self) -> torch.Tensor:
        """Run all tokens so far; (B, V) logits of the next one."""
        texts = [[*row.prompt, *row.tokens] for row in self.alive]
        width, device = max(map(len, texts)), self._model.device
        # Padding comes first, so that the last column is every row's newest token.
        padded = [[0] * (width - len(text)) + text for text in texts]
        real = [[0] * (width - len(text)) + [1] * len(text) for text in texts]
        self._mask = torch.tensor(real, device=device)
        self._cache = None
        for row in self.alive:
            row.routes.clear()
        return self._forward(torch.tensor(padded, device=device))

    def _decode(self) -> torch.Tensor:
        """Run the last token of each row with the cache; (B, V) logits of the next one."""
        if len(self.alive) < len(self._cached):
            places = {id(row): place for place, row in enumerate(self._cached)}
            keep = torch.tensor([places[id(row)] for row in self.alive], device=self._mask.device)
            # Also of states, for which `batch_select_indices` has no code.
            self._cache.reorder_cache(keep)
            self._mask = self._mask[keep]
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(self.alive), 1)], dim=1)
        last = [[row.tokens[-1]] for row in self.alive]
        return self._forward(torch.tensor(last, device=self._mask.device))

    def _forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        # Padding would get -1, which is no position; the mask hides it.
        positions = (self._mask.cumsum(-1) - 1).clamp(min=0)[:, -input_ids.shape[1] :]
        output = self._model(
            input_ids=input_ids,
            attention_mask=self._mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self._cache, self._cached = output.past_key_values, list(self.alive)
        if self._recorder is not None:
            chosen = self._recorder.take_pass(len(self.alive))
            seen = self._mask[:, -input_ids.shape[1] :].bool().cpu()
            for row, ids, real in zip(self.alive, chosen, seen, strict=True):
                row.routes.append(ids[real])
        return output.logits[:, -1]


@torch.inference_mode()
def score_tokens(model: Any, recorder: RouteRecorder | None, tokens: Sequence[int]) -> list[float]:
    """The log-probs of all ``tokens`` but the first, at temperature 1, in one pass of a model that
    nothing else uses meanwhile."""
    ids = torch.tensor([tokens], device=model.device)
    log_probs = tempered_log_probs(model(input_ids=ids, use_cache=False).logits[0, :-1], 1.0)
    if recorder is not None:
        recorder.take_pass(1)
    return log_probs.gather(-1, ids[0, 1:, None]).squeeze(-1).tolist()


class CancelToken:
    """Identifies the work of one call of ``generate``."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch


class PauseControl:
    """Pauses and resumes decoding: the event loop sets the state, the thread reads it every
    step."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._paused = self._stepping = False
        # Counts aborts; work begun in an earlier epoch must end.
        self._epoch = 0

    def begin_work(self) -> CancelToken:
        """A token for a new call of ``generate``, which ``cancel`` takes."""
        with self._changed:
            return CancelToken(self._epoch)

    def cancel(self, token: CancelToken) -> None:
        """Cancel the ``generate`` call that ``token`` belongs to."""
        with self._changed:
            # Earlier than every epoch, so that no abort is needed to end it.
            token.epoch = -1
            self._changed.notify_all()

    def begin_step(self, token: CancelToken) -> bool:
        """Wait until a pause ends. Returns False if the token's work must end; else call
        ``end_step``."""
        with self._changed:
            self._changed.wait_for(lambda: not self._paused or token.epoch < self._epoch)
            if token.epoch < self._epoch:
                return False
            self._stepping = True
            return True

    def end_step(self) -> None:
        with self._changed:
            self._stepping = False
            self._changed.notify_all()

    def pause(self, *, abort: bool) -> None:
        """Return when no step runs and none can begin; with ``abort`` end all work begun so far."""
        with self._changed:
            self._paused = True
            self._epoch += abort
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._stepping)

    def resume(self) -> None:
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    @property
    def is_paused(self) -> bool:
        with self._changed:
            return self._paused


def decode_all(
    begin: Callable[[Sequence[DecodingRow], SamplingParams], StepwiseBatch],
    rows: Sequence[DecodingRow],
    params: SamplingParams,
    *,
    max_rows: int,
    control: PauseControl,
    token: CancelToken,
    version: Callable[[], str],
) -> None:
    """Finish every row, in batches of ``max_rows``; with reason ``abort`` once the token is
    cancelled."""
    for first in range(0, len(rows), max_rows):
        batch = begin(rows[first : first + max_rows], params)
        while batch.alive:
            if not control.begin_step(token):
                for row in batch.alive:
                    row.finish("abort")
                break
            try:
                with torch.inference_mode():
                    batch.step(version())
            finally:
                control.end_step()

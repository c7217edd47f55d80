"""The proof of pushes: how much of a change an engine shows, and which pushes have to be probed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_device import OneRank

from ctrl_megatron.resharding.proof import PROBE_TOKENS, PushProof, share_of_change

ROW = range(3, 3 + PROBE_TOKENS)
N = PROBE_TOKENS - 1
NOISE = 0.007
"""Mean difference of an engine's log-probs in bfloat16 from the trainer's."""


def drawn(seed: int, scale: float = 1.0) -> torch.Tensor:
    """(N,) numbers of zero mean and the given spread."""
    return scale * torch.randn(N, generator=torch.Generator().manual_seed(seed))


@given(st.integers(0, 2**31), st.floats(-2, 2), st.floats(1e-3, 1))
def test_the_share_is_the_slope_of_a_regression(seed: int, share: float, noise: float) -> None:
    old, change = drawn(seed, 3.0), drawn(seed + 1, 0.1)
    held = old + share * change + 0.3 + drawn(seed + 2, noise)
    design = np.stack([change.double().numpy(), np.ones(N)], axis=1)
    seen = (held.double() - old.double()).numpy()
    (slope, _), (rest,), *_ = np.linalg.lstsq(design, seen, rcond=None)
    error = np.sqrt(rest / (N - 2) * np.linalg.inv(design.T @ design)[0, 0])
    found = share_of_change(held, old, old + change)
    # The sums above are in float32.
    assert found == pytest.approx((slope, error), rel=1e-4, abs=1e-4)


def test_without_a_change_nothing_is_said() -> None:
    old = drawn(0)
    assert share_of_change(old + 1, old, old) == (0.0, float("inf"))


class FakePolicy:
    """A policy whose log-probs are given, but for the rounding of each pass."""

    def __init__(
        self, log_probs: torch.Tensor, base: torch.Tensor | None = None, noise: float = NOISE
    ) -> None:
        self.now, self.base, self.noise, self.passes = log_probs, base, noise, 0
        self.shape = SimpleNamespace(lora=None if base is None else object())

    def log_probs(self, rows: Any) -> tuple[torch.Tensor, torch.Tensor]:
        assert rows["input_ids"].tolist() == [list(ROW)]
        assert rows["attention_mask"].all() and rows["response_mask"].shape == (1, N)
        self.passes += 1
        rounded = self.now + drawn(1000 + self.passes, self.noise)
        return rounded[None], torch.zeros(1, N)

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        assert self.base is not None
        on, self.now = self.now, self.base
        yield
        self.now = on


def proof(mode: Any = "first", **given: Any) -> PushProof:
    return PushProof(mode, OneRank(), probe=ROW, **given)  # type: ignore[arg-type]


def push(
    shown: PushProof,
    policy: FakePolicy,
    version: str,
    engine: Callable[[torch.Tensor], torch.Tensor] = lambda now: now,
) -> bool:
    """One push, after which an engine says ``engine(log-probs of the trainer)``; whether it was
    probed."""
    if not shown.needs_probe("actor"):
        shown.end_push("actor", version)
        return False
    shown.begin_probe("actor", policy)  # type: ignore[arg-type]
    assert shown.is_probing("actor")
    shown.end_push("actor", version, [engine(policy.now).tolist()])
    assert not shown.is_probing("actor")
    return True


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("adapters", [False, True])
def test_pushes_are_probed_until_the_weights_have_visibly_changed(
    seed: int, adapters: bool
) -> None:
    """Each step changes less than what rounding does, in trainer and engine."""
    first, way, noise = drawn(seed, 2.0), drawn(seed + 50), iter(range(100, 1000))
    policy, shown = FakePolicy(first, first if adapters else None), proof()
    probed = []
    for step in range(70):
        policy.now = first + 0.001 * step * way
        probed.append(
            push(shown, policy, f"actor@{step}", lambda now: now + drawn(next(noise), NOISE))
        )
    # Then it is told from rounding.
    pushes = [step for step, was in enumerate(probed, 1) if was]
    assert pushes in ([1, 2, 4, 8, 16], [1, 2, 4, 8, 16, 32], [1, 2, 4, 8, 16, 32, 64])
    # Engines that were started again have to show it again.
    shown.forget()
    assert push(shown, policy, "actor@70", lambda now: now + drawn(7, NOISE))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("adapters", [False, True])
def test_an_engine_that_stays_behind_is_found_as_soon_as_it_can_be_seen(
    seed: int, adapters: bool
) -> None:
    first, way, noise = drawn(seed, 2.0), drawn(seed + 50), iter(range(100, 1000))
    policy, shown = FakePolicy(first, first if adapters else None), proof()
    with pytest.raises(RuntimeError, match="Verified pushes"):
        for step in range(70):
            policy.now = first + 0.001 * step * way
            push(shown, policy, f"actor@{step}", lambda now: first + drawn(next(noise), NOISE))
    assert 4 < step < 64


@pytest.mark.parametrize("behind", ["first", "zeros", "random", "nan"])
def test_an_engine_without_the_new_weights_ends_the_run(behind: str) -> None:
    first = drawn(0, 2.0)
    policy, shown = FakePolicy(first), proof()
    others = {
        "first": lambda now: first + drawn(3, NOISE),
        "zeros": lambda now: torch.full((N,), -6.0),
        "random": lambda now: drawn(5, 1.0) - 6,
        "nan": lambda now: now * float("nan"),
    }
    if behind == "first":
        push(shown, policy, "actor@0", lambda now: now + drawn(2, NOISE))
        policy.now = first + drawn(1, 0.1)
    names = "actor@0 to actor@1" if behind == "first" else "a constant to actor@1"
    with pytest.raises(RuntimeError, match=f"{names} its own have -?0.*Verified pushes"):
        push(shown, policy, "actor@1", others[behind])


def test_weights_that_do_not_change_pass() -> None:
    policy, shown = FakePolicy(drawn(0, 2.0)), proof()
    probed = [
        push(shown, policy, f"actor@{n}", lambda now: now + drawn(9, NOISE)) for n in range(8)
    ]
    assert probed == [True, True, False, True, False, False, False, True]


def test_an_engine_that_ignores_adapters_ends_the_run() -> None:
    base = drawn(0, 2.0)
    policy, shown = FakePolicy(base, base), proof()
    assert push(shown, policy, "actor@0", lambda now: base)  # B is zero
    policy.now = base + drawn(1, 0.1)
    with pytest.raises(RuntimeError, match="from the model without its adapters to actor@1"):
        push(shown, policy, "actor@1", lambda now: base + drawn(2, NOISE))
    # Also the first push of a resumed run.
    with pytest.raises(RuntimeError, match="from the model without its adapters to actor@5"):
        push(proof(), policy, "actor@5", lambda now: base + drawn(2, NOISE))
    shown = proof()
    assert push(shown, policy, "actor@5") and not push(shown, policy, "actor@6")


def test_rounding_may_take_what_merged_adapters_change(capsys: pytest.CaptureFixture[str]) -> None:
    base = drawn(0, 2.0)
    policy, shown = FakePolicy(base + drawn(1, 0.1), base), proof(merges=True)
    assert push(shown, policy, "actor@1", lambda now: base + 0.3 * (now - base) + drawn(2, NOISE))
    assert "merged adapters that are rounded" in capsys.readouterr().out
    assert not push(shown, policy, "actor@2")
    # An engine without weights is still one.
    with pytest.raises(RuntimeError, match="from a constant"):
        push(proof(merges=True), policy, "actor@1", lambda now: drawn(5) - 6)


@pytest.mark.parametrize(
    ("mode", "checksums", "probes"),
    [
        ("false", [0, 0, 0], [0, 0, 0]),
        ("first", [1, 0, 0], [1, 1, 0]),
        ("every", [1, 1, 1], [1, 1, 1]),
        ("true", [1, 1, 1], [1, 1, 1]),
    ],
)
def test_the_modes(mode: str, checksums: list[int], probes: list[int]) -> None:
    policy, shown = FakePolicy(drawn(0)), proof(mode)
    unread = proof(mode, checksums=False)
    for step, (compared, probed) in enumerate(zip(checksums, probes, strict=True)):
        policy.now = drawn(step)
        assert shown.compares_checksums == bool(compared)
        assert not unread.compares_checksums
        assert push(shown, policy, f"actor@{step}") == bool(probed)
    # A directory has no probe.
    assert shown.compares_checksums == (mode in ("every", "true"))
    shown.end_push("proxy", "proxy")
    shown.forget("proxy")
    assert shown.compares_checksums == (mode != "false")


def test_a_row_that_is_too_short_is_no_probe() -> None:
    assert not PushProof("every", OneRank(), probe=[1, 2, 3]).needs_probe("actor")  # type: ignore[arg-type]

"""Requests are checked, streams have seeds, tokens are drawn; against the definitions."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ctrl_megatron.rollout.decoding import version_spans
from ctrl_megatron.rollout.sampling import (
    check_request,
    inverse_sample,
    random_numbers_at,
    sample_tokens,
    stream_seed,
    tempered_log_probs,
    truncate_probabilities,
    truncate_rows,
)
from ctrl_megatron.types import SamplingParams, VersionSpan


@given(st.integers(0, 2**40), st.integers(0, 50) | st.text(), st.integers(0, 50))
def test_streams_are_seeds_that_torch_takes(seed: int, row: int | str, sample: int) -> None:
    value = stream_seed(seed, row, sample)
    assert 0 <= value < 2**63
    text = f"{seed}:{row}:{sample}".encode()
    assert value == int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") // 2


def test_streams_differ() -> None:
    seeds = {stream_seed(s, i, j) for s in range(8) for i in range(16) for j in range(8)}
    assert len(seeds) == 8 * 16 * 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 0}, "n must"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"top_k": -2}, "top_k"),
    ],
)
def test_bad_sampling_parameters_are_named(change: dict[str, float], message: str) -> None:
    params = SamplingParams(**{"max_tokens": 4, **change})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        check_request([[1]], params, max_model_len=8, vocab_size=10)


def test_a_prompt_may_fill_the_length_exactly() -> None:
    params = SamplingParams(max_tokens=4)
    check_request([[1, 2, 3, 9]], params, max_model_len=8, vocab_size=10)
    with pytest.raises(ValueError, match="row 1 has 5 tokens"):
        check_request([[1], [1] * 5], params, max_model_len=8, vocab_size=10)
    with pytest.raises(ValueError, match="row 0 has token ids outside"):
        check_request([[1, -1]], params, max_model_len=8, vocab_size=10)
    named = replace(params, rows=("a", "b"))
    with pytest.raises(ValueError, match="row b is empty"):
        check_request([[1], []], named, max_model_len=8, vocab_size=10)
    with pytest.raises(ValueError, match="2 rows name 1 prompts"):
        check_request([[1]], named, max_model_len=8, vocab_size=10)


def kept_by_definition(probabilities: np.ndarray, top_p: float, top_k: int) -> set[int]:
    """Top-k, then the shortest prefix, likeliest first, that holds top_p of what is left."""
    order = sorted(range(len(probabilities)), key=lambda v: -probabilities[v])
    order = order if top_k == -1 else order[:top_k]
    total, held, kept = sum(probabilities[v] for v in order), 0.0, set()
    for token in order:
        if held >= top_p * total:
            break
        kept.add(token)
        held += probabilities[token]
    return kept


@settings(deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(2, 12),
    st.sampled_from([1.0, 0.83, 0.51, 0.07]),
    st.sampled_from([-1, 1, 3, 50]),
)
def test_truncation_keeps_what_the_definition_keeps(
    seed: int, size: int, top_p: float, top_k: int
) -> None:
    logits = torch.randn(2, size, generator=torch.Generator().manual_seed(seed)) * 2
    log_probs = tempered_log_probs(logits, 1.0)
    cut = truncate_probabilities(log_probs, top_p, top_k)
    for row in range(2):
        exact = log_probs[row].double().exp().numpy()
        kept = kept_by_definition(exact, top_p, top_k)
        assert set(cut[row].nonzero().flatten().tolist()) == kept
        for token in kept:
            assert cut[row, token] == pytest.approx(exact[token], rel=1e-5)


def test_tempering_is_the_softmax_of_scaled_logits() -> None:
    logits = torch.tensor([[0.0, 1.0, 3.0]])
    exact = np.exp(np.array([0.0, 1.0, 3.0]) / 0.5)
    np.testing.assert_allclose(
        tempered_log_probs(logits, 0.5).exp()[0], exact / exact.sum(), rtol=1e-6
    )
    np.testing.assert_array_equal(tempered_log_probs(logits, 0.0), tempered_log_probs(logits, 1.0))


def test_a_row_draws_the_same_alone_and_in_company() -> None:
    params = SamplingParams(max_tokens=1, top_p=0.9)
    log_probs = tempered_log_probs(torch.randn(5, 40), 1.0)

    def streams() -> list[torch.Generator]:
        return [torch.Generator().manual_seed(i) for i in range(5)]

    together = sample_tokens(log_probs, params, streams()).tolist()
    alone = [
        sample_tokens(log_probs[i : i + 1], params, [s]).item() for i, s in enumerate(streams())
    ]
    assert together == alone


def test_a_token_without_mass_is_never_drawn() -> None:
    log_probs = tempered_log_probs(torch.tensor([[0.0, -torch.inf, 0.0, -torch.inf]]), 1.0)
    stream = torch.Generator().manual_seed(0)
    params = SamplingParams(max_tokens=1)
    drawn = [sample_tokens(log_probs, params, [stream]).item() for _ in range(200)]
    assert set(drawn) == {0, 2}


@settings(deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from([1, 255, 256, 257, 1000]),
    st.floats(0, 1, exclude_max=True),
    st.sampled_from([0.0, 0.9, 0.999]),
)
def test_a_number_picks_where_it_falls_in_the_summed_weights(
    seed: int, size: int, number: float, empty: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(3, size, generator=generator)
    weights[torch.rand(3, size, generator=generator) < empty] = 0.0
    weights[:, seed % size] = 0.5
    numbers = torch.tensor([number, 0.0, 1.0], dtype=torch.float64)
    for row, token in enumerate(inverse_sample(weights, numbers).tolist()):
        assert weights[row, token] > 0
        mass = np.cumsum(weights[row].double().numpy())
        below, target = mass[token - 1] if token else 0.0, float(numbers[row]) * mass[-1]
        # Blocks are summed in float32.
        assert below - 1e-6 * mass[-1] <= target <= mass[token] + 1e-6 * mass[-1]


def test_spans_are_runs_of_a_version() -> None:
    assert version_spans([]) == ()
    assert version_spans(["a", "a", "b", "a"]) == (
        VersionSpan("a", 0, 2),
        VersionSpan("b", 2, 3),
        VersionSpan("a", 3, 4),
    )


def splitmix64(seed: int, place: int) -> float:
    """Number ``place`` of the stream, in Python's integers."""
    mask = 2**64 - 1
    mixed = (seed + (place + 1) * 0x9E3779B97F4A7C15) & mask
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & mask
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
    return ((mixed ^ (mixed >> 31)) >> 11) / 2**53


@given(st.lists(st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 2**31)), min_size=1))
def test_numbers_of_a_stream_are_had_by_their_place(asked: list[tuple[int, int]]) -> None:
    seeds, places = torch.tensor(asked, dtype=torch.int64).unbind(-1)
    assert random_numbers_at(seeds, places).tolist() == [splitmix64(*pair) for pair in asked]


def test_numbers_of_a_stream_are_uniform_and_its_own() -> None:
    seeds = torch.tensor([stream_seed(0, row, 0) for row in range(8)])
    drawn = torch.stack(
        [random_numbers_at(seeds, torch.full((8,), place)) for place in range(500)], -1
    )
    ordered = drawn.flatten().sort().values
    expected = torch.arange(1, len(ordered) + 1) / len(ordered)
    # Kolmogorov and Smirnov: a hundred-thousandth of all uniform samples is further off.
    assert float((ordered - expected).abs().max()) < 2.5 / len(ordered) ** 0.5
    assert float((torch.corrcoef(drawn) - torch.eye(8)).abs().max()) < 0.25


def test_every_row_is_truncated_by_its_own_bounds() -> None:
    probabilities = torch.randn(6, 50, generator=torch.Generator().manual_seed(1)).softmax(-1)
    bounds = [(1.0, 50), (0.5, 50), (1.0, 3), (0.9, 7), (1.0, 1), (0.2, 2**30)]
    top_p, top_k = (torch.tensor(column) for column in zip(*bounds, strict=True))
    kept = truncate_rows(probabilities, top_p, top_k)
    for row, (p, k) in enumerate(bounds):
        alone = truncate_probabilities(probabilities[row : row + 1].log(), p, min(k, 50))
        torch.testing.assert_close(kept[row : row + 1], alone, atol=1e-6, rtol=0)

"""The gated delta rule over packed rows against its recurrence, token by token in float64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from ctrl_megatron.models.delta_rule import (
    CHUNK,
    DeltaTokens,
    causal_convolution,
    continue_rows,
    gated_delta_rule,
    packed_rows,
    products_per_token,
)
from ctrl_megatron.models.packed_layout import PackedLayout, build_packed_layout
from ctrl_megatron.models.shape import GatedDeltaNet

CPU = torch.device("cpu")
GROUPS, HEADS, KEY, VALUE = 2, 4, 6, 5
START = torch.zeros(HEADS, KEY, VALUE, dtype=torch.float64)
LAYOUTS = {
    "one row": [(3, [4])],
    "whole chunks": [(64, [64]), (128, [64])],
    "rows": [(70, [3]), (5, [2]), (60, [140])],
    "shared": [(70, [3, 130, 64]), (5, [2]), (64, [1, 65])],
    "short prompt": [(2, [1, 1, 3, 70])],
    "an empty response": [(9, [0, 4, 2])],
}


def recur(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    rate: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The reads of a row's tokens and its last state, by the definition."""
    times = value.shape[1] // query.shape[1]
    query, key = (x.repeat_interleave(times, dim=1) for x in (query, key))
    query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    out = []
    for q, k, v, g, beta in zip(query / KEY**0.5, key, value, decay, rate, strict=True):
        state = state * g.exp()[:, None, None]
        change = beta[:, None] * (v - torch.einsum("hkv,hk->hv", state, k))
        state = state + torch.einsum("hk,hv->hkv", k, change)
        out.append(torch.einsum("hkv,hk->hv", state, q))
    return torch.stack(out), state


def drawn(tokens: int) -> list[torch.Tensor]:
    """Queries, keys, values, decays and rates of so many tokens, in float64."""
    generator = torch.Generator().manual_seed(tokens)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(tokens, *size, generator=generator, dtype=torch.float64)

    heads = normal(GROUPS, KEY), normal(GROUPS, KEY), normal(HEADS, VALUE)
    return [*heads, -F.softplus(normal(HEADS)), normal(HEADS).sigmoid()]


def of_rows(layout: PackedLayout, groups: list[tuple[int, list[int]]]) -> list[torch.Tensor]:
    """The tokens of every row, its prompt's first, in the order of the rows."""
    prompts = [prompt for prompt, rows in groups for _ in rows]
    return [
        torch.tensor([*range(p.prompt_end - prompt, p.prompt_end), *range(p.start, p.end)])
        for p, prompt in zip(layout.rows, prompts, strict=True)
    ]


def is_close(found: torch.Tensor, exact: torch.Tensor, bound: float) -> bool:
    return float((found.detach().double() - exact).norm()) <= bound * float(exact.norm())


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
@pytest.mark.parametrize("groups", LAYOUTS.values(), ids=LAYOUTS)
def test_packed_rows_read_what_the_recurrence_does(
    groups: list[tuple[int, list[int]]], dtype: torch.dtype, bound: float
) -> None:
    """Values and gradients, of a sum that counts the tokens of a shared prompt once."""
    layout = build_packed_layout(groups, filler=5)
    given = [x.requires_grad_() for x in drawn(layout.num_tokens)]
    narrow = [x.detach().to(dtype).requires_grad_() for x in given]
    found = gated_delta_rule(*narrow, layout)
    exact = torch.zeros(found.shape, dtype=torch.float64)
    weights = torch.linspace(-1, 2, exact.numel(), dtype=torch.float64).view(exact.shape)
    left, total = weights.clone(), torch.zeros((), dtype=torch.float64)
    filler = torch.arange(layout.num_tokens - 5, layout.num_tokens)
    for tokens in [*of_rows(layout, groups), filler]:
        row, _ = recur(*(x[tokens] for x in given), START)
        exact[tokens] = row.detach()
        total = total + (row * left[tokens]).sum()
        left[tokens] = 0
    assert found.dtype is dtype and is_close(found, exact, bound)
    gradients = torch.autograd.grad((found * weights.to(dtype)).sum(), narrow)
    for own, want in zip(gradients, torch.autograd.grad(total, given), strict=True):
        assert is_close(own, want, bound * 10)


def test_a_state_that_is_carried_over_three_pieces_is_that_of_one_row() -> None:
    """Also its gradient, through both states between the pieces."""
    given = [x.requires_grad_() for x in drawn(200)]
    exact, last = recur(*given, START)
    state, out = None, []
    for piece in ([0, 70], [70, 75], [75, 200]):
        rows = packed_rows([piece[1] - piece[0]], CPU)
        own = DeltaTokens(*(x[slice(*piece)] for x in given))
        found, state = continue_rows(own, rows, state)
        out.append(found)
    assert state is not None
    assert is_close(torch.cat(out), exact, 1e-12) and is_close(state[0], last, 1e-12)
    weights = torch.linspace(-1, 2, last.numel(), dtype=torch.float64).view(last.shape)
    wanted = torch.autograd.grad((last * weights).sum(), given[1:])
    for own, want in zip(
        torch.autograd.grad((state[0] * weights).sum(), given[1:]), wanted, strict=True
    ):
        assert is_close(own, want, 1e-11)


def test_states_are_wider_than_bfloat16() -> None:
    """Ten thousand small changes add up, which a sum in bfloat16 would lose."""
    tokens = 4096
    ones = torch.ones(tokens, 1, 1, dtype=torch.bfloat16)
    rate = torch.full((tokens, 1), 1e-3, dtype=torch.bfloat16)
    rows = packed_rows([tokens], CPU)
    given = DeltaTokens(ones, ones, ones, torch.zeros(tokens, 1), rate)
    _, state = continue_rows(given, rows, None)
    assert state.dtype is torch.float32 and float(state) == pytest.approx(1 - math.exp(-4.1), 1e-2)


def test_the_convolution_of_bfloat16_is_rounded_once() -> None:
    layout = build_packed_layout([(20, [30])])
    u, weight = (torch.randn(size).bfloat16() for size in ((50, 8), (8, 4)))
    exact = causal_convolution(u.double(), weight.double(), layout)
    found = causal_convolution(u, weight, layout)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("groups", LAYOUTS.values(), ids=LAYOUTS)
def test_the_convolution_reaches_into_the_prompt_and_no_further(
    groups: list[tuple[int, list[int]]],
) -> None:
    layout = build_packed_layout(groups, filler=5)
    generator = torch.Generator().manual_seed(1)
    u, weight = (
        torch.randn(size, generator=generator, dtype=torch.float64)
        for size in ((layout.num_tokens, 3), (3, 4))
    )
    found = causal_convolution(u, weight, layout)
    for tokens in of_rows(layout, groups):
        padded = F.pad(u[tokens].T, (3, 0)).unsqueeze(0)
        exact = F.silu(F.conv1d(padded, weight.unsqueeze(1), groups=3))[0].T
        torch.testing.assert_close(found[tokens], exact, rtol=1e-12, atol=1e-14)
    torch.autograd.gradcheck(
        lambda *given: causal_convolution(*given, layout),
        (u.requires_grad_(), weight.requires_grad_()),
        fast_mode=True,
    )


def test_the_products_of_a_token_are_counted() -> None:
    """All but the triangular solutions, which torch's counter does not see."""
    net = GatedDeltaNet(
        **{"key_heads": GROUPS, "value_heads": HEADS, "key_dim": KEY, "value_dim": VALUE},
        **{"kernel": 4, "by_head": False},
    )
    tokens = 3 * CHUNK
    with FlopCounterMode(display=False) as counter:
        gated_delta_rule(*drawn(tokens), build_packed_layout([(tokens - 1, [1])]))
    solved = HEADS * CHUNK * (KEY + VALUE) // 2
    assert counter.get_total_flops() == 2 * tokens * (products_per_token(net) - solved)

"""Measure what coupled masks save: the variance of a masked-diffusion model's score over masks,
with a pair of complementary masks and with two independent ones, on a small trained model:
``python tools/bench/coupled_variance.py``.

The text is a random walk: each token follows from the one before it and a coin. Both estimates cost
two passes and have the same expectation, twice the mean log-prob of a masked token. The pass over
the wholly masked response, which the score has beside them, has no variance.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import transformers

from ctrl_megatron.algorithms.coupled import (
    CoupledMaskOptions,
    coupled_log_prob_weights,
    draw_coupled_masks,
)
from ctrl_megatron.config.flags import ToolParser

WORDS, MASK, LENGTH = 31, 31, 24
"""Tokens of the text, the mask token behind them, and tokens of a response; a prompt has one."""


def texts(rows: int, generator: torch.Generator) -> torch.Tensor:
    """(rows, 1 + LENGTH) int64."""
    columns = [torch.randint(WORDS, (rows,), generator=generator)]
    for _ in range(LENGTH):
        coin = torch.randint(2, (rows,), generator=generator)
        columns.append((5 * columns[-1] + 3 + 7 * coin) % WORDS)
    return torch.stack(columns, dim=1)


def build() -> torch.nn.Module:
    """A Llama of two layers; its tokens see all."""
    config = transformers.LlamaConfig(
        vocab_size=WORDS + 1,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    return transformers.LlamaForCausalLM(config)


def log_probs(model: torch.nn.Module, ids: torch.Tensor, masked: torch.Tensor) -> torch.Tensor:
    """(B, LENGTH): the log-probs of the response's tokens ``ids`` where ``masked`` (B, LENGTH)."""
    hidden = ids.clone()
    hidden[:, 1:][masked] = MASK
    everything = torch.zeros(1, 1, ids.shape[1], ids.shape[1])
    logits = model(hidden, attention_mask=everything).logits[:, 1:]
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def train(steps: int, rows: int, seed: int) -> tuple[torch.nn.Module, float]:
    """(the model, its last loss): masks of a share t of the response, weighted by 1/t."""
    torch.manual_seed(seed)
    model, generator = build(), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, 5 * (1 - step / steps))
        ids = texts(rows, generator)
        share = 0.05 + 0.95 * torch.rand((rows, 1), generator=generator)
        masked = torch.rand((rows, LENGTH), generator=generator) < share
        loss = -(log_probs(model, ids, masked) * masked / share).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return model.eval(), sum(losses[-50:]) / len(losses[-50:])


@torch.no_grad()
def estimates(
    model: torch.nn.Module, ids: torch.Tensor, draws: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(coupled, independent), each (draws, B, LENGTH): the sum of the two partial terms."""
    rule, rows = CoupledMaskOptions(), range(len(ids))
    attention = torch.ones_like(ids)
    coupled, independent = [], []
    for draw in range(draws):
        first, second = (
            draw_coupled_masks(
                attention, LENGTH, [rule.row_seed(seed, draw, f"{row}", half) for row in rows], rule
            )
            for half in range(2)
        )
        mask, other = first.masked[:, 1:], second.masked[:, 1:]
        terms = []
        for own, share in ((mask, first.share), (~mask, 1 - first.share), (other, second.share)):
            # Twice the weight of the score, which halves everything.
            weight = 2 * coupled_log_prob_weights(torch.tensor(True), share)[1]
            terms.append(torch.where(own, log_probs(model, ids, own) * weight[:, None], 0.0))
        coupled.append(terms[0] + terms[1])
        independent.append(terms[0] + terms[2])
    return torch.stack(coupled).double(), torch.stack(independent).double()


def main() -> None:
    """Entry point."""
    parser = ToolParser(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--train-rows", type=int, default=64)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--draws", type=int, default=300)
    options = parser.parse_args()
    print("variance over masks, coupled / independent (independent to coupled); gap of the means")
    for seed in range(options.seeds):
        model, loss = train(options.steps, options.train_rows, seed)
        ids = texts(options.rows, torch.Generator().manual_seed(1000 + seed))
        found = estimates(model, ids, options.draws, seed)
        token = [float(one.var(dim=0).mean()) for one in found]
        row = [float(one.sum(dim=-1).var(dim=0).mean()) for one in found]
        means = [one.sum(dim=-1).mean(dim=0) for one in found]
        errors = [one.sum(dim=-1).var(dim=0) / options.draws for one in found]
        error = (errors[0] + errors[1]).sqrt()
        gap = float(((means[0] - means[1]) / error).square().mean().sqrt())
        print(
            f"seed {seed} (loss {loss:.3f}): a token's score {token[0]:.3f} / {token[1]:.3f} "
            f"({token[1] / token[0]:.2f}), a row's {row[0]:.2f} / {row[1]:.2f} "
            f"({row[1] / row[0]:.2f}); means differ by {gap:.2f} standard errors",
            flush=True,
        )


if __name__ == "__main__":
    main()

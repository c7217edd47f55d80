"""Log-probs under a vocabulary split over processes against one that holds it whole."""

from __future__ import annotations

import torch
from world import run_world

from ctrl_megatron.algorithms.distillation import token_divergence
from ctrl_megatron.parallel.vocab import vocab_range

# 101 over 2 and 3 needs padding; of 4 over 3, the last rank holds no real column at all. Tiles by
# the ranks' real columns would have 5 and 4 tokens for 2559 over 2.
CASES = [(101, 2), (101, 3), (4, 3), (2559, 2)]


def test_split_vocabularies_give_the_values_and_gradients_of_whole_ones() -> None:
    results = run_world("vocab_log_probs", 3, cases=CASES, temperature=0.7, chunk=4)
    for number, (vocab, size) in enumerate(CASES):
        found = [result[number] for result in results[:size]]
        hidden, weight = found[0]["hidden"].double(), found[0]["weight"].double()
        hidden.requires_grad_()
        weight.requires_grad_()
        log_p = torch.log_softmax(hidden @ weight.t() / 0.7, dim=-1)
        log_probs = log_p.gather(-1, found[0]["targets"][:, None])[:, 0]
        entropy = -(log_p.exp() * log_p).sum(-1)
        upstream = found[0]["upstream"].double()
        (log_probs * upstream[0] + entropy * upstream[1]).sum().backward()
        for rank, own in enumerate(found):
            torch.testing.assert_close(own["log_probs"].double(), log_probs, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(own["entropy"].double(), entropy, rtol=1e-5, atol=1e-5)
            assert torch.equal(own["log_probs"], found[0]["log_probs"])
            first, real, share = vocab_range(vocab, rank, size)
            assert own["grad_weight"].shape == (share, hidden.shape[1])
            torch.testing.assert_close(
                own["grad_weight"][:real].double(),
                weight.grad[first : first + real],  # type: ignore[index]
                rtol=1e-4,
                atol=1e-5,
            )
            assert torch.all(own["grad_weight"][real:] == 0)
        total = sum(own["grad_hidden"].double() for own in found)
        torch.testing.assert_close(total, hidden.grad, rtol=1e-4, atol=1e-5)
        theirs = log_p.detach().flip(0)
        for own in found:
            assert torch.equal(own["likeliest"], theirs.topk(3, dim=-1).indices)
            highest = theirs.gather(-1, own["likeliest"])
            torch.testing.assert_close(own["highest"].double(), highest, rtol=1e-5, atol=1e-5)
        for name in ("reverse_kl", "forward_kl", "jsd"):
            leaf = found[0]["hidden"].double().requires_grad_()
            logs = torch.log_softmax(leaf @ weight.detach().t() / 0.7, dim=-1)
            divergence = token_divergence(logs, theirs, name)
            (divergence * upstream[0]).sum().backward()
            for own in found:
                torch.testing.assert_close(own[name].double(), divergence, rtol=1e-5, atol=1e-5)
                assert torch.equal(own[name], found[0][name])
            total = sum(own[f"grad_{name}"].double() for own in found)
            torch.testing.assert_close(total, leaf.grad, rtol=1e-4, atol=1e-5)

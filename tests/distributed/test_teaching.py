"""Learning from a teacher on every layout, against transformers' whole logits in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from test_policy import LAYOUTS, ranks
from tiny_models import VOCAB, layers_for, predicted, random_batch, save_tiny, widest_gap
from world import run_world

TEMPERATURE = 0.8
CASES: dict[str, dict[str, Any]] = {
    "token": {"estimator": "token"},
    "top_k": {"estimator": "top_k", "top_k": 5},
    "top_k_jsd": {"estimator": "top_k", "top_k": 3, "divergence": "jsd", "jsd_weight": 0.3},
    "full": {"estimator": "full"},
    "full_forward": {"estimator": "full", "divergence": "forward_kl", "cap": 0.2},
}
APART = ("top_k", "full")
"""Cases that are computed without shared prompts too."""


def behind_other_prompts(batch: dict[str, Any]) -> dict[str, Any]:
    """The rows as the teacher reads them: the same responses behind longer prompts."""
    rows, answered = batch["response_mask"].shape
    generator = torch.Generator().manual_seed(9)
    prompts = torch.randint(0, VOCAB, (2, 17), generator=generator)
    own = torch.arange(rows) % 2
    start = batch["input_ids"].shape[1] - answered
    attended = torch.ones(rows, 17, dtype=torch.int64)
    attended[own == 1, :4] = 0
    return {
        "input_ids": torch.cat([prompts[own], batch["input_ids"][:, start:]], dim=1),
        "attention_mask": torch.cat([attended, batch["attention_mask"][:, start:]], dim=1),
        "response_mask": batch["response_mask"],
    }


def logs_of(model: Any, ids: torch.Tensor, seen: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(n, V) log-probs before the masked tokens of a row."""
    places = predicted(seen, mask)
    return (model(ids[seen.bool()][None]).logits[0][places - 1] / TEMPERATURE).log_softmax(-1)


def divergence(student: Any, teacher: Any, drawn: torch.Tensor, keys: dict[str, Any]) -> Any:
    """(n,) divergences of whole log-probs (n, V), from the definition; with ``token`` a number with
    its gradient."""
    p, q, name = student.exp(), teacher.exp(), keys.get("divergence", "reverse_kl")
    if keys["estimator"] == "token":
        log_p, log_q = (one.gather(-1, drawn[:, None])[:, 0] for one in (student, teacher))
        return (log_p - log_q).detach() * log_p
    if keys["estimator"] == "top_k":
        ids = q.topk(keys["top_k"], dim=-1).indices
        p, q = (torch.cat([x.gather(-1, ids), x.new_zeros(len(x), 1)], -1) for x in (p, q))
        p, q = (torch.cat([x[:, :-1], 1 - x.sum(-1, keepdim=True)], -1) for x in (p, q))
    weight = keys.get("jsd_weight", 0.5)
    mean = (1 - weight) * p + weight * q
    terms = {
        "reverse_kl": p * (p / q).log(),
        "forward_kl": q * (q / p).log(),
        "jsd": (1 - weight) * p * (p / mean).log() + weight * q * (q / mean).log(),
    }
    found = terms[name].sum(-1)
    return found * (keys.get("cap", 1e9) / found.detach()).clamp(max=1)


def expected(
    directory: Path, teacher: Path, batch: dict, other: dict, keys: dict[str, Any], out: Path
) -> Path:
    """transformers' gradients of the weighted mean of the divergences, saved as a model."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    student, theirs = (load(path, dtype=torch.float64) for path in (directory, teacher))
    fields = ("input_ids", "attention_mask", "response_mask")
    for row, mask in enumerate(batch["response_mask"]):
        own, given = (
            logs_of(m, *(b[name][row] for name in fields))
            for m, b in (
                (student, batch),
                (theirs, other),
            )
        )
        ids, seen = batch["input_ids"][row], batch["attention_mask"][row]
        drawn = ids[seen.bool()][predicted(seen, mask)]
        values = divergence(own, given.detach(), drawn, keys)
        (values * batch["advantages"][row][mask]).sum().div(batch["response_mask"].sum()).backward()
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.copy_(parameter.grad)
    student.float().save_pretrained(out)
    return out


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, Path]]:
    """Number of layers -> (the student, a teacher of another hidden size)."""
    root = tmp_path_factory.mktemp("teaching")
    return {
        layers: (
            save_tiny("llama", root / f"student{layers}", num_hidden_layers=layers),
            save_tiny("qwen2", root / f"teacher{layers}", num_hidden_layers=layers, hidden_size=32),
        )
        for layers in (2, 4)
    }


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        *((name, "megatron") for name in ("tp2_sp", "cp2", "tp2_pp2_dp2")),
        *(pytest.param(n, "megatron", marks=pytest.mark.long) for n in ("tp1", "dp2", "pp2")),
        ("dp2", "fsdp"),
    ],
)
def test_gradients_are_those_of_whole_logits(
    models: dict[int, tuple[Path, Path]], tmp_path: Path, name: str, strategy: str
) -> None:
    layout, batch = LAYOUTS[name], random_batch(seed=3, group=3, holes=True)
    student, teacher = models[layers_for(layout)]
    other = behind_other_prompts(batch)
    run_world(
        "taught_gradients",
        ranks(layout),
        layout=layout,
        student=str(student),
        teacher=str(teacher),
        batch=batch,
        other=other,
        cases=CASES,
        apart=APART,
        temperature=TEMPERATURE,
        strategy=strategy,
        out=str(tmp_path),
    )
    for case, keys in CASES.items():
        theirs = expected(student, teacher, batch, other, keys, tmp_path / "theirs" / case)
        wanted = load_file(theirs / "model.safetensors")
        for way in ("shared", "apart") if case in APART else ("shared",):
            found = load_file(tmp_path / way / case / "model.safetensors")
            gap, whose = widest_gap(found, wanted)
            assert gap < 1e-5, (case, way, whose, gap)

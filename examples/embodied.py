"""An agent in a simulated world, reinforced by ``embodied_srpo_pipeline``.

    python examples/embodied.py runs/embodied
    ctrl-train-rl --config runs/embodied/config.yaml

The first command writes a model, rows and a configuration. The world is a grid with a goal. The
agent is a language model whose tokens are actions and coordinates: each of its answers is one
action. It starts with random weights. A failed episode earns a reward for the way that it shares
with successful ones: the embedding of an episode is the path of the agent, which a real world
would compute from its pictures.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from ctrl_megatron.pipeline import Observation

SIZE, STEPS = 4, 8
"""Cells of a side of the grid, and most actions of an episode."""
MOVES = {"right": (1, 0), "left": (-1, 0), "up": (0, 1), "down": (0, -1)}
_SPECIAL = ("<pad>", "<end>", "<world>", "<agent>", "<unk>")
_TEMPLATE = (
    "{% for m in messages %}<{{ 'agent' if m.role == 'assistant' else 'world' }}> "
    "{{ m.content }} <end> {% endfor %}{% if add_generation_prompt %}<agent>{% endif %}"
)


class GridWorld:
    """The world of one episode: ``EnvironmentMaker`` and ``Environment`` of the pipeline."""

    def __init__(self, worker: Any, row: Any, seed: int) -> None:
        self._row = row
        self._place = int(row["x"]), int(row["y"])
        self._goal = int(row["goal_x"]), int(row["goal_y"])
        self._path = [self._place]

    async def reset(self) -> Sequence[dict[str, str]]:
        """The row's prompt: where the agent is, and where the goal is."""
        return self._row.prompt

    async def step(self, action: str) -> Observation:
        """Moves the agent, unless the action is none or leads out of the grid."""
        move = MOVES.get(action.strip(), (0, 0))
        moved = tuple(here + by for here, by in zip(self._place, move, strict=True))
        if all(0 <= at < SIZE for at in moved):
            self._place = moved[0], moved[1]
        self._path.append(self._place)
        success = self._place == self._goal
        return Observation(
            text="at {} {}".format(*self._place),
            done=success,
            score=float(success),
            fields={"success": success, "trajectory": json.dumps(self._path)},
        )

    async def close(self) -> None:
        """Nothing is held."""


def embed(trajectories: Sequence[str]) -> torch.Tensor:
    """(n, 2 (STEPS + 1)): the path of every episode, whose last place is repeated."""
    paths = [json.loads(text) for text in trajectories]
    whole = [path + path[-1:] * (STEPS + 1 - len(path)) for path in paths]
    return torch.tensor(whole, dtype=torch.float32).flatten(1)


def problems(seed: int, count: int) -> list[dict[str, Any]]:
    """Rows with a start and a goal two to four moves away; those with the same goal are a task."""
    draw, rows = random.Random(seed), list[dict[str, Any]]()
    while len(rows) < count:
        x, y, goal_x, goal_y = (draw.randrange(SIZE) for _ in range(4))
        if 2 <= abs(x - goal_x) + abs(y - goal_y) <= 4:
            rows.append(
                {
                    "id": f"{len(rows)}",
                    "problem_id": f"goal {goal_x} {goal_y}",
                    "prompt": f"at {x} {y} goal {goal_x} {goal_y}",
                    **{"x": x, "y": y, "goal_x": goal_x, "goal_y": goal_y},
                }
            )
    return rows


def write_model(folder: Path) -> None:
    """A random Llama of two layers whose tokens are the words of the world."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    words = [*_SPECIAL, *MOVES, "at", "goal", *map(str, range(SIZE))]
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        eos_token="<end>",
        unk_token="<unk>",
        additional_special_tokens=["<world>", "<agent>"],
    )
    tokenizer.chat_template = _TEMPLATE
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, trust_remote_code=False
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_config(folder: Path) -> None:
    """A configuration of a run on one CPU."""
    (folder / "config.yaml").write_text(
        f"""\
dag:
  custom_pipeline_fn: ctrl_megatron.pipeline:embodied_srpo_pipeline
  options:
    environment: {Path(__file__).resolve()}:GridWorld
    embedding: {Path(__file__).resolve()}:embed
    turns: {STEPS}
    turn_tokens: 1
data:
  train_files: {folder.resolve()}/train.parquet
  max_prompt_length: 16
  max_response_length: 96
  train_batch_size: 8
actor_rollout_ref:
  model: {{path: {folder.resolve()}/model, dtype: float32}}
  actor:
    ppo_mini_batch_size: 8
    ppo_max_token_len_per_gpu: 4096
    optim: {{lr: 3e-3}}
  rollout: {{name: hf, n: 8}}
trainer:
  default_local_dir: {folder.resolve()}
  experiment_name: run
  total_training_steps: 30
  n_gpus_per_node: 1
"""
    )


def main(folder: Path) -> None:
    """Write everything that a run needs."""
    write_model(folder / "model")
    pq.write_table(pa.Table.from_pylist(problems(seed=0, count=64)), folder / "train.parquet")
    write_config(folder)
    print(f"ctrl-train-rl --config {folder}/config.yaml")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/embodied"))

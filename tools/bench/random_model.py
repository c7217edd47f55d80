"""Write a model of a ``config.json`` with random weights below ``runs/models``, once, and print its
directory: ``python tools/bench/random_model.py examples/shapes/qwen3-0.6b.json``.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


def random_model(config: Path, dtype: str) -> Path:
    """The directory, with the file ``config`` and normally distributed weights of deviation 0.02,
    norms too. A GPU draws them where there is one, 7 billion in seconds."""
    import torch
    from safetensors.torch import save_file

    from ctrl_megatron.models.hf_config import read_model_shape
    from ctrl_megatron.resharding.plan import hf_specs

    folder = Path("runs/models") / f"random-{config.stem}"
    file = folder / "model.safetensors"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(config, folder / "config.json")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        draw = torch.Generator(device).manual_seed(0)
        tensors = {
            spec.name: torch.randn(spec.shape, generator=draw, device=device)
            .mul_(0.02)
            .to("cpu", getattr(torch, spec.dtype))
            for spec in hf_specs(read_model_shape(folder), dtype)
        }
        save_file(tensors, folder / "partial")
        (folder / "partial").rename(file)
    return folder


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", type=Path, help="config.json")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    print(random_model(options.shape, options.dtype))


if __name__ == "__main__":
    main()

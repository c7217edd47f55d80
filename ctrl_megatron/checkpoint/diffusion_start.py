"""From an autoregressive model to the start of a masked-diffusion model, which still has to be
trained (DiffuLLaMA, arXiv 2410.17891): the same weights as a Dream model, and a mask token."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from ctrl_megatron.checkpoint.convert import Progress
from ctrl_megatron.checkpoint.files import (
    require_free_disk_bytes,
    require_replaceable_directory,
    tool_output_directory,
)
from ctrl_megatron.checkpoint.hf import FILE_BYTES, HfDirectoryWriter, copy_side_files
from ctrl_megatron.data.tokens import MaskToken, add_mask_token
from ctrl_megatron.errors import UserError
from ctrl_megatron.models.build import DTYPES
from ctrl_megatron.models.hf_config import parse_model_shape, read_model_shape
from ctrl_megatron.models.safetensors_dir import SafetensorsDirectory
from ctrl_megatron.models.shape import GroupedQueryAttention, ModelShape
from ctrl_megatron.resharding.plan import hf_specs, place_in_buckets
from ctrl_megatron.rollout.weight_chunks import spec_bytes
from ctrl_megatron.types import TensorSpec

STARTS = ("llama", "qwen2")
"""The families whose layers are Dream's; a Llama gets biases of zero."""
_TOOL = "make_diffusion_start"
_BY_TOKEN = ("model.embed_tokens.weight", "lm_head.weight")


def hf_to_masked_diffusion(
    hf: Path,
    out: Path,
    *,
    mask_token: str,
    overwrite: bool = False,
    file_bytes: int = FILE_BYTES,
    progress: Progress = lambda done, total: None,
) -> ModelShape:
    """Write the model of ``hf`` as a Dream model to ``out``; its shape.

    The tokenizer gets ``mask_token`` unless it has it. A token that is new begins with the mean of
    the tokenizer's tokens as its embedding and output; the vocabulary grows if no row is free.
    Predictions stay shifted by one place. Memory has one file of at most ``file_bytes``. UserError
    for a model of another family, for a directory without a tokenizer, and for ``out`` as
    ``convert.hf_to_megatron`` does.
    """
    require_replaceable_directory(out, _TOOL, overwrite=overwrite)
    source = read_model_shape(hf)
    if source.family not in STARTS or source.value_head:
        kind = "a value model" if source.value_head else f"of the {source.family} family"
        raise UserError(
            f"{hf} is {kind}; a language model of the families {' and '.join(STARTS)} can become "
            "a masked-diffusion model"
        )
    config = json.loads((hf / "config.json").read_text())
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    if dtype not in DTYPES:
        raise UserError(f"{hf}: dtype {dtype} is not supported; known: {', '.join(DTYPES)}")
    tensors = SafetensorsDirectory(hf, mapped=False)
    tensors.check(source)
    with TemporaryDirectory() as folder:
        side = Path(folder)
        copy_side_files(hf, side)
        mask = add_mask_token(side, mask_token)
        config |= _dream_keys(source, mask)
        (side / "config.json").write_text(json.dumps(config, indent=2))
        shape = parse_model_shape(config, str(hf / "config.json"))
        specs = hf_specs(shape, dtype)
        total, done = sum(map(spec_bytes, specs)), 0
        require_free_disk_bytes(out, total, "the model")
        read = _Reader(tensors, mask)
        with tool_output_directory(out, _TOOL, overwrite=overwrite) as work:
            files = HfDirectoryWriter(work)
            for _, bucket in groupby(place_in_buckets(specs, file_bytes), key=lambda p: p.bucket):
                placed = [place.spec for place in bucket]
                files.write_weights_file({spec.name: read.tensor(spec) for spec in placed})
                done += sum(map(spec_bytes, placed))
                progress(done, total)
            files.write_side_files(side, dtype, shape)
    return shape


def _dream_keys(given: ModelShape, mask: MaskToken) -> dict[str, object]:
    """The keys that differ, or whose defaults do."""
    attention = given.attention
    assert isinstance(attention, GroupedQueryAttention)
    return {
        "model_type": "Dream",
        "architectures": ["DreamModel"],
        "mask_token_id": mask.number,
        "vocab_size": max(given.vocab_size, mask.number + 1),
        "num_key_value_heads": attention.groups,
        "head_dim": attention.head_dim,
        "max_position_embeddings": given.max_position_embeddings,
        "rms_norm_eps": given.norm_epsilon,
        "tie_word_embeddings": given.tied_embeddings,
    }


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads the tensors of the start, one at a time."""

    tensors: SafetensorsDirectory
    mask: MaskToken

    def tensor(self, spec: TensorSpec) -> torch.Tensor:
        kind = DTYPES[spec.dtype]
        if spec.name not in self.tensors.shapes():
            return torch.zeros(spec.shape, dtype=kind)  # a bias that a Llama lacks
        tensor = self.tensors.read(spec.name)
        if spec.name not in _BY_TOKEN or not self.mask.is_new:
            return tensor.to(kind)
        whole = torch.zeros(spec.shape, dtype=kind)
        whole[: len(tensor)] = tensor
        whole[self.mask.number] = tensor[: self.mask.others].float().mean(0)
        return whole

"""Whole conversions between HF directories and Megatron checkpoints, outside of a run.

A checkpoint carries the small HF files (config, tokenizer) in its ``hf`` folder, so that it can be
turned back without the directory that it came from.
"""

from __future__ import annotations

import json
import multiprocessing
import socket
from dataclasses import replace
from pathlib import Path

from ctrl_megatron.checkpoint.files import whole_directory
from ctrl_megatron.checkpoint.hf import copy_side_files, load_hf, save_hf
from ctrl_megatron.checkpoint.store import (
    HF_FOLDER,
    POLICY_FOLDER,
    STATE_FILE,
    VALUE_FOLDER,
    load_sharded,
    save_sharded,
)
from ctrl_megatron.config.environment import read_launch
from ctrl_megatron.models.build import BuildOptions
from ctrl_megatron.models.hf_config import read_model_shape, value_shape
from ctrl_megatron.models.parallel_model import ModelOptions, ParallelModel
from ctrl_megatron.parallel.groups import ProcessGroups, initialize, shutdown
from ctrl_megatron.parallel.layout import Layout

_TIMEOUT_SECONDS = 600.0


def hf_to_megatron(hf: Path, out: Path, *, tensor: int, pipeline: int) -> None:
    """Write ``hf`` as a checkpoint (step 0, weights only) with tensor x pipeline processes.

    The layout only spreads the work; the checkpoint loads on any other. Raises ValueError for a
    model that is not supported or does not divide over the layout.
    """
    layout = Layout(tensor=tensor, pipeline=pipeline)
    shape = read_model_shape(hf)
    folder = VALUE_FOLDER if shape.value_head else POLICY_FOLDER
    layout.check_layers(shape.num_layers)
    context = multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with whole_directory(out) as work:
        (work / folder).mkdir()
        ranks = [
            context.Process(target=_write, args=(rank, layout, port, hf, work / folder))
            for rank in range(layout.world_size)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        failed = [r for r, process in enumerate(ranks) if process.exitcode]
        if failed:
            raise ValueError(f"converting {hf} failed in process {failed[0]}, see above")
        (work / STATE_FILE).write_text(json.dumps({"step": 0, "weights_only": True}))
        copy_side_files(hf, work / HF_FOLDER)


def megatron_to_hf(checkpoint: Path, out: Path, *, folder: str = POLICY_FOLDER) -> None:
    """Export the weights of a checkpoint's ``folder`` in the type in which they were trained.

    A value model becomes transformers' token classification model with one label.
    """
    side = checkpoint / HF_FOLDER
    if not (checkpoint / folder).is_dir() or not side.is_dir():
        raise ValueError(
            f"{checkpoint} is not a checkpoint with a {folder} model: it holds no {folder}/ and "
            f"{HF_FOLDER}/; give a directory like runs/NAME/checkpoints/global_step_N"
        )
    groups = initialize(
        Layout(), seed=1, timeout_seconds=_TIMEOUT_SECONDS, launch=read_launch(environ={})
    )
    try:
        model = _model(side, groups, folder)
        load_sharded(model, checkpoint / folder)
        save_hf(model, out, side_files=side)
    finally:
        shutdown()


def _write(rank: int, layout: Layout, port: int, hf: Path, out: Path) -> None:
    size, single = layout.world_size, read_launch(environ={})
    place = {"rank": rank, "world_size": size, "local_rank": rank, "local_world_size": size}
    launch = replace(single, **place, master_port=port)
    groups = initialize(layout, seed=1, timeout_seconds=_TIMEOUT_SECONDS, launch=launch)
    model = _model(hf, groups, out.name)
    load_hf(model, hf)
    save_sharded(model, out)
    shutdown()


def _model(side: Path, groups: ProcessGroups, folder: str) -> ParallelModel:
    config = json.loads((side / "config.json").read_text())
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    options = ModelOptions(build=BuildOptions(dtype=dtype))
    shape = read_model_shape(side)
    if folder == VALUE_FOLDER:
        shape = value_shape(shape)
    return ParallelModel(shape, groups, options)

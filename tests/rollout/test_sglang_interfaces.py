"""SGLang still has the interfaces that the adapter uses; without starting an engine.

Much of it only a GPU would run. A release that moves it fails here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from patience import PATIENCE

from ctrl_megatron.rollout.engine import EngineSpec, available_engines
from ctrl_megatron.rollout.launch import engine_environment

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        "sglang" not in available_engines(), reason="the optional sglang is not installed"
    ),
]

SCRIPT = """
import inspect, json, sys
from dataclasses import replace
from ctrl_megatron.rollout import sglang_engine, sglang_worker
from ctrl_megatron.rollout.engine import EnginePart, EngineSpec
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers import io_struct
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.constants import GPU_MEMORY_ALL_TYPES
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.common import cpu_has_amx_support
import torch

def names(function):
    return list(inspect.signature(function).parameters)

def refusal(extra):
    try:
        sglang_engine.server_args(replace(spec, extra=extra))
    except ValueError as error:
        return str(error)

def on_a_gpu(spec):
    torch.cuda.is_available = lambda: True
    try:
        return sglang_engine.server_args(spec)
    finally:
        torch.cuda.is_available = lambda: False

spec = EngineSpec(name="sglang", model_path=sys.argv[1], dtype="float32", kv_cache_gib=0.5,
    max_model_len=128, gpu_memory_utilization=0.6, tensor_parallel_size=4, may_sleep=True)
control = ("pause_generation continue_generation begin_weight_update end_weight_update flush_cache "
    "update_weight_version check_weights release_memory_occupation resume_memory_occupation")
requests = ("PauseGenerationReqInput ContinueGenerationReqInput BeginWeightUpdateReqInput "
    "EndWeightUpdateReqInput UpdateWeightVersionReqInput CheckWeightsReqInput "
    "ReleaseMemoryOccupationReqInput ResumeMemoryOccupationReqInput RpcReqInput")
gpu = on_a_gpu(spec)
part = EnginePart(number=1, of=2, first=sys.argv[2], group_port=7001, watch_port=7002, token="t")
print(json.dumps({
    "control": {name: names(getattr(TokenizerManager, name)) for name in control.split()},
    "requests": {n: getattr(io_struct, n).__struct_fields__ for n in requests.split()},
    "generate": names(Engine.async_generate),
    "collective_rpc": names(Engine.collective_rpc),
    "detokenizer": names(Engine._launch_detokenizer_subprocesses),
    "release": names(SchedulerWeightUpdaterManager.release_memory_occupation),
    "memory": list(GPU_MEMORY_ALL_TYPES),
    "launches": isinstance(inspect.getattr_static(Engine, "run_scheduler_process_func"),
        staticmethod),
    "unknown": [name for name in gpu if name not in ServerArgs.__struct_fields__],
    "gpu": {name: str(value) for name, value in gpu.items()},
    "cpu": {name: str(value) for name, value in sglang_engine.server_args(spec).items()},
    "formats": [sglang_engine.server_args(replace(spec, awaits_weights=awaits))["load_format"]
        for awaits in (True, False)],
    "amx": cpu_has_amx_support(),
    "refused": refusal({"atention_backend": "triton"}),
    "taken": sglang_engine.server_args(replace(spec, extra={"page_size": 16}))["page_size"],
    "part": sglang_engine.server_args(replace(spec, part=part)),
    "prepared": sglang_worker.patch_sglang(),
}))
"""

FIRST = "fd00::7"
"""The host of an engine's first part."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """SGLang as a process sees it that loads our adapter."""
    folder = tmp_path_factory.mktemp("config")
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    (folder / "config.json").write_text(json.dumps(config))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), FIRST],
        env=engine_environment(EngineSpec(name="sglang", model_path="", threads=1)),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_calls_have_the_arguments_we_give(found: dict[str, Any]) -> None:
    assert found["control"].pop("flush_cache") == ["self", "timeout_s"]
    assert all(given[:2] == ["self", "obj"] for given in found["control"].values())
    fields = found["requests"]
    assert "mode" in fields["PauseGenerationReqInput"]
    assert "torch_empty_cache" in fields["ContinueGenerationReqInput"]
    assert {"new_version", "abort_all_requests"} <= {*fields["UpdateWeightVersionReqInput"]}
    assert "action" in fields["CheckWeightsReqInput"]
    assert {"input_ids", "sampling_params", "return_logprob"} <= {*found["generate"]}
    assert found["collective_rpc"] == ["self", "method", "kwargs"]
    assert found["launches"] and found["detokenizer"][0] == "server_args"


def test_memory_is_given_back_by_our_tags(found: dict[str, Any]) -> None:
    for name in ("ReleaseMemoryOccupationReqInput", "ResumeMemoryOccupationReqInput"):
        assert "tags" in found["requests"][name]
    assert found["release"] == ["self", "recv_req"]
    assert {"weights", "kv_cache"} <= {*found["memory"]}


def test_a_gpu_gets_the_keys_of_the_configuration(found: dict[str, Any]) -> None:
    assert found["unknown"] == []
    gpu = found["gpu"]
    assert gpu["mem_fraction_static"] == "0.6" and gpu["tp_size"] == "4"
    assert gpu["enable_memory_saver"] == gpu["enable_weights_cpu_backup"] == "True"
    assert gpu["disable_cuda_graph"] == "False" and "device" not in gpu


def test_a_cpu_gets_plain_torch_and_a_cache_of_the_size_asked_for(found: dict[str, Any]) -> None:
    cpu = found["cpu"]
    assert (cpu["device"], cpu["attention_backend"]) == ("cpu", "torch_native")
    # Keys and values of 2 layers, 4 heads of 16, fp32.
    assert int(cpu["max_total_tokens"]) == 2**29 // (2 * 2 * 4 * 16 * 4)
    assert found["amx"] is False


def test_a_part_of_an_engine_meets_the_others_at_the_first(found: dict[str, Any]) -> None:
    part = found["part"]
    assert (part["nnodes"], part["node_rank"]) == (2, 1)
    assert part["dist_init_addr"] == f"[{FIRST}]:7001"
    assert found["cpu"].keys() == part.keys() - {"nnodes", "node_rank", "dist_init_addr"}


def test_weights_that_a_push_brings_are_not_read(found: dict[str, Any]) -> None:
    assert found["formats"] == ["dummy", "auto"]


def test_engine_kwargs_are_checked_by_name(found: dict[str, Any]) -> None:
    assert "'atention_backend'" in found["refused"]
    assert "did you mean 'attention_backend'" in found["refused"]
    assert found["taken"] == 16

"""Whether the kit's packages suffice for a run with vLLM, on a machine without a GPU: ``python
tools/check/gpu_kit/dry_config.py MODEL`` makes the engine's configuration for one H100 and imports
its worker and the modules behind it. README.md says what has to be on the path.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

MODULES = (
    "ctrl_megatron.rollout.vllm_worker",
    *("vllm.v1.worker.gpu_worker", "vllm.v1.worker.gpu_model_runner"),
    *("vllm.model_executor.models.llama", "vllm.v1.attention.backends.flash_attn"),
    *("vllm.v1.engine.core", "vllm.v1.engine.async_llm"),
)


def pretend_one_h100() -> None:
    """Answer what vLLM's configuration asks of a driver."""
    import torch
    import vllm.third_party.pynvml as driver  # type: ignore[import-not-found]

    memory = SimpleNamespace(total=80 << 30, free=79 << 30, used=1 << 30)
    answers = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetCudaComputeCapability": lambda handle: (9, 0),
        "nvmlDeviceGetName": lambda handle: "NVIDIA H100 80GB HBM3",
        "nvmlDeviceGetMemoryInfo": lambda handle: memory,
        "nvmlDeviceGetUUID": lambda handle: "GPU-0",
        "nvmlSystemGetDriverVersion": lambda: "580.159.04",
    }
    for name, answer in answers.items():
        setattr(driver, name, answer)
    torch.cuda.get_device_capability = lambda *given: (9, 0)
    torch.cuda.get_device_properties = lambda *given: SimpleNamespace(total_memory=memory.total)
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1


def main() -> None:
    """Print each step; the first that fails ends with its error."""
    pretend_one_h100()
    from vllm.platforms import current_platform  # type: ignore[import-not-found]

    print("platform", type(current_platform).__name__, current_platform.get_device_capability())
    from ctrl_megatron.rollout import vllm_engine
    from ctrl_megatron.rollout.engine import EngineSpec

    spec = EngineSpec(
        name="vllm",
        model_path=sys.argv[1],
        dtype="bfloat16",
        max_model_len=2048,
        may_sleep=True,
        awaits_weights=True,
        max_num_seqs=64,
    )
    config = vllm_engine._engine_config(spec)
    graphs = config.compilation_config.cudagraph_mode
    print("engine's configuration:", graphs, config.scheduler_config.max_num_batched_tokens)
    for name in MODULES:
        importlib.import_module(name)
        print("imported", name)


if __name__ == "__main__":
    main()

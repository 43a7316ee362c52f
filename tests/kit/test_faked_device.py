"""The kit on a faked CUDA device: what SGLang's processes import there is a stand-in, or is never called."""

from __future__ import annotations

import json
import subprocess
import sys
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch

from tools.gpu import site

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the device must be faked"),
]

PROGRAM = """
import importlib, json, sys, types
import torch

device = types.SimpleNamespace(name="H100", major=9, minor=0, multi_processor_count=132, total_memory=80 << 30,
                               is_integrated=0)
torch.version.cuda = "13.0"
fakes = {"is_available": True, "device_count": 1, "current_device": 0, "get_device_capability": (9, 0),
         "get_device_properties": device, "mem_get_info": (79 << 30, 80 << 30)}
for name, answer in fakes.items():
    setattr(torch.cuda, name, lambda *_, answer=answer: answer)
from sglang.srt.plugins import load_plugins

load_plugins()
for name in sys.argv[1:]:
    importlib.import_module(f"sglang.srt.{name}")
import sgl_kernel
from sglang.kernels.jit.utils.compile import loader
from sglang.srt.speculative.dflash_utils import is_dflash_sampling_verify_available

found = {value._name for module in list(sys.modules.values()) if module.__name__.startswith("sglang.")
         for value in vars(module).values() if isinstance(value, sgl_kernel.Missing)}
print(json.dumps({"missing": sorted(found), "sampling": is_dflash_sampling_verify_available(),
                  "jit": str(loader.load_jit("norm", cuda_wrappers=[("rmsnorm", "")]).rmsnorm.func)}))
"""
# What a server's processes import, with the models of the five cards.
MODULES = (
    *("managers.scheduler", "managers.tp_worker", "entrypoints.http_server", "model_executor.model_runner"),
    *("model_executor.runner.decode_cuda_graph_runner", "speculative.dflash_worker_v2", "layers.sampler"),
    *("layers.attention.triton_backend", "layers.attention.flashattention_backend", "models.dflash"),
    *("layers.attention.linear.gdn_backend", "layers.moe.moe_runner.triton_utils.fused_moe"),
    *("models.qwen3", "models.qwen3_moe", "models.qwen3_5", "models.qwen3_next"),
)
# Names without a stand-in -> why no step of the kit calls them.
UNREACHABLE = {
    "sgl_kernel.gelu*": "the activation of the five architectures and their drafters is SiLU",
    "sgl_kernel.kvcacheio.*": "hierarchical cache, which is off",
    "sgl_kernel.merge_state_v2": "cascades of FlashAttention; attention is Triton's",
    "sgl_kernel.moe_sum": "GGUF weights; weights are bfloat16",
    "sgl_kernel.quantization.*": "GGUF weights; weights are bfloat16",
    "sgl_kernel.scalar_type.*": "quantised weights; weights are bfloat16",
    "sgl_kernel.int8_scaled_mm": "quantised weights; weights are bfloat16",
}


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("site")
    site.unpack(folder)
    environment = site.environment(folder, site.CUDA)
    command = [sys.executable, "-c", PROGRAM, *MODULES]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=folder)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return dict(json.loads(ended.stdout.splitlines()[-1]))


def test_sglangs_worker_starts_without_flashinfer(imported: dict[str, Any]) -> None:
    assert imported["sampling"] is False
    assert imported["jit"].startswith("<function rmsnorm at ")


def test_every_kernel_of_the_five_architectures_has_a_stand_in_or_is_unreachable(imported: dict[str, Any]) -> None:
    without = [name for name in imported["missing"] if not any(fnmatchcase(name, each) for each in UNREACHABLE)]
    assert not without, f"no stand-in: {without}"
    for pattern in UNREACHABLE:
        assert any(fnmatchcase(name, pattern) for name in imported["missing"]), f"{pattern} is no longer imported"

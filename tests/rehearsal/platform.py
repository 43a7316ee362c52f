"""The platform of a rehearsal: device "cpu", served by what a GPU is served by."""

from __future__ import annotations

from typing import Any

from sglang.srt.platforms.interface import PlatformCapabilities

from sglang_dflash.launch.launch import DRAFT_BACKENDS, OUR_BACKEND
from sglang_dflash_cpu.platform import DFlashCpuPlatform
from tests.rehearsal import backends


class RehearsalPlatform(DFlashCpuPlatform):
    """The CPU platform with SGLang's attention of a GPU, its pools and its graph runners."""

    device_name = "rehearsal"
    capabilities = PlatformCapabilities(graph_capture=True)

    def get_default_attention_backend(self) -> str:
        return backends.target()

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        return backend in {*DRAFT_BACKENDS, OUR_BACKEND}

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        return "triton"

    def get_kv_pool_cls(self, *, kind: str) -> None:
        return None

    def get_speculative_cache_locs_fn(self) -> None:
        return None

    def get_graph_runner_cls(self) -> Any:
        return lambda runner: runner._decode_cuda_graph_runner_cls()(runner)  # as on CUDA

    def get_full_graph_backend_cls(self) -> None:
        return None

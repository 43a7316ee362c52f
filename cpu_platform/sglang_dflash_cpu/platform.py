"""The out-of-tree platform, on a machine without an accelerator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from sglang_dflash_cpu import torchvision_import

# SGLang imports this module before torchvision.
torchvision_import.install()

from sglang.srt.platforms.cpu import CpuDeviceMixin  # noqa: E402
from sglang.srt.platforms.device_mixin import PlatformEnum  # noqa: E402
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform  # noqa: E402

from sglang_dflash.errors import DFlashError  # noqa: E402
from sglang_dflash_cpu.layers import ATTENTION_BACKEND  # noqa: E402


class DFlashCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Plain torch on the host: no Triton, no graphs, no streams."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Refuse to start without the replacements."""
        from sglang_dflash_cpu.replacements import missing_hooks

        if missing := missing_hooks():
            raise DFlashError(
                f"{len(missing)} of the CPU platform's replacements are not in place, {missing[0]} first",
                remedy="leave SGLANG_PLUGINS unset or name both in it, and look for 'Failed to' in the log above",
            )

    def get_device(self, device_id: int = 0) -> str:
        return "cpu"  # a name, not a torch.device

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False

    # --- attention and memory
    def get_default_attention_backend(self) -> str:
        return ATTENTION_BACKEND

    def get_kv_pool_cls(self, *, kind: Literal["mha", "mla", "dsa"]) -> type | None:
        if kind != "mha":  # SGLang's own pool of latent K/V runs on a CPU
            return None
        from sglang_dflash_cpu.layers.pools import CpuKVPool

        return CpuKVPool

    def support_mamba_cache_extra_buffer(self) -> bool:
        return True

    # --- speculative decoding
    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm == "DFLASH"

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        return backend == ATTENTION_BACKEND

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        return ATTENTION_BACKEND

    def get_speculative_cache_locs_fn(self) -> Callable[..., Any]:
        from sglang_dflash_cpu.layers.pools import block_slots

        return block_slots

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> Any:
        from torch.profiler import ProfilerActivity

        return ProfilerActivity.CPU

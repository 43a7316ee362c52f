"""Can this GPU run the backends that were asked for? The rules are SGLang 0.5.23's, which checks some after loading.

Sources there: ``layers/attention/attention_registry.py`` and ``arg_groups/attention_hook.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang_dflash.check.findings import Finding, error, ok, warn
from sglang_dflash.memory.device import Device

# Backend -> major compute capabilities that can run it; the others run everywhere.
_MAJORS = {"fa3": {8, 9}, "fa4": {9, 10, 11}, "trtllm_mha": {9, 10, 12}}
_HYBRID_ON_BLACKWELL = {"triton", "trtllm_mha", "flashinfer", "fa4"}
_TARGET_FLAGS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")


def check_backends(args: Any, device: Device | None, *, hybrid: bool) -> Iterator[Finding]:
    """Findings on the backends of a command line.

    Args:
        args: server arguments by SGLang's names.
        device: the GPU; None where there is none, which leaves nothing to check.
        hybrid: whether the target has recurrent layers.
    """
    flags = [*_TARGET_FLAGS, "speculative_draft_attention_backend"]
    asked = {flag: name for flag in flags if (name := getattr(args, flag))}
    if device is None:
        yield ok("backends", f"{', '.join(asked.values()) or 'chosen by SGLang'}; no NVIDIA GPU to hold them against")
        return
    for flag, name in asked.items():
        allowed = hybrid and device.is_blackwell and flag in _TARGET_FLAGS
        yield _backend(flag, name, device, only=_HYBRID_ON_BLACKWELL if allowed else None)
    if needs_bfloat16_states(args, device):
        yield warn(
            "recurrent state's dtype",
            f"FlashInfer's linear decode on {device.name} keeps states in bfloat16 only",
            expected="--mamba-ssm-dtype bfloat16",
            remedy="none needed: the server sets it; say so yourself to silence this",
        )


def needs_bfloat16_states(args: Any, device: Device | None) -> bool:
    """Whether SGLang would refuse these arguments for want of ``--mamba-ssm-dtype bfloat16``."""
    decode = args.linear_attn_decode_backend or args.linear_attn_backend
    blackwell = device is not None and device.is_blackwell
    return blackwell and decode == "flashinfer" and args.mamba_ssm_dtype is None


def _backend(flag: str, name: str, device: Device, only: set[str] | None) -> Finding:
    option = "--" + flag.replace("_", "-")
    major, minor = device.capability
    runs = major in _MAJORS.get(name, {major}) and (only is None or name in only)
    if runs:
        return ok(option, f"{name} on {device.name}")
    best = "trtllm_mha" if major in (10, 12) else "fa3" if major in (8, 9) else "flashinfer"
    return error(
        option,
        f"{option} {name} on {device.name} (compute capability {major}.{minor})",
        expected=f"a backend that this GPU can run: {best}, flashinfer or triton",
        remedy=f"set {option} {best}",
    )

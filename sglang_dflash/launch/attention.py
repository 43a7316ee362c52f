"""The target's attention on an NVIDIA GPU: the backend that SGLang chooses, and those that cannot verify a block.

Sources: SGLang 0.5.23's ``arg_groups/model_overrides``, ``model_override_base.py`` (``get_default_attn_backend``),
``model_hook.py`` and ``layers/attention``; FlashInfer 0.7.2's ``jit/xqa.py`` and ``mla/_core.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_dflash.errors import first_true
from sglang_dflash.launch.device import Device
from sglang_dflash.launch.layers import count, layers_of

# model type -> major compute capability -> SGLang's choice; 0: all others
_LATENT = {9: "fa3", 10: "flashinfer", 0: "triton"}
_CHOICES: dict[str, Mapping[int, str]] = {
    "gpt_oss": {9: "fa3", 10: "trtllm_mha", 0: "triton"},
    "gemma4_text": {10: "trtllm_mha", 0: "triton"},
    "nemotron_h": {9: "fa3", 10: "trtllm_mha", 12: "triton", 0: "flashinfer"},
    **dict.fromkeys(("deepseek_v3", "kimi_k2"), _LATENT | {10: "trtllm_mla"}),
}
# what SGLang asserts of them, on NVIDIA GPUs
_ACCEPTED = {
    "gpt_oss": {"fa3", "fa4", "triton", "trtllm_mha"},
    "gemma4_text": {"fa4", "triton", "trtllm_mha"},
}
_LATENT_ONLY = {"cutedsl_mla", "flashmla", "trtllm_mla"}
_XQA = {9, 12}  # FlashInfer's kernels of trtllm_mha


def default_backend(text: Mapping[str, Any], device: Device) -> str:
    """Return the backend that SGLang chooses for a target without a flag, if FlashInfer is installed."""
    choices = _CHOICES.get(str(text.get("model_type"))) or (_LATENT if text.get("kv_lora_rank") else None)
    if choices is None or device.capability is None:
        return device.default_backend
    return choices.get(device.capability[0], choices[0])


def verify_obstacle(backend: str, text: Mapping[str, Any], major: int) -> str | None:
    """Return why a backend cannot verify a target's blocks on GPUs of a major compute capability, or None."""
    family, latent = str(text.get("model_type")), bool(text.get("kv_lora_rank"))
    heads = max(count(text, key, 0) for key in ("head_dim", "global_head_dim"))
    slides, xqa = layers_of(text).sliding > 0, backend == "trtllm_mha" and major in _XQA
    dedicated = backend == "fa4" and major in (10, 11) and not latent
    obstacles = {
        "it serves latent attention (MLA) alone": backend in _LATENT_ONLY and not latent,
        "it does not serve latent attention (MLA)": latent and backend == "trtllm_mha",
        "it serves latent attention (MLA) on Hopper alone": latent and backend == "fa3" and major != 9,
        "it serves latent attention (MLA) on sm_100 and sm_110 alone": latent and backend == "fa4" and major < 10,
        f"SGLang does not serve {family} with it": backend not in _ACCEPTED.get(family, {backend}),
        "its verify ignores the window of sliding layers": slides and backend == "flashinfer" and not latent,
        f"its kernels for this GPU verify heads of up to 256, not {heads}": xqa and heads > 256,
        # FA4's own kernel for heads of 256 refuses the lengths of a K/V cache (``flash_attn/cute/interface.py``)
        f"its kernels for this GPU take heads of up to 128, not {heads}": dedicated and heads > 128,
    }
    return first_true(obstacles)

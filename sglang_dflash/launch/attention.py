"""The target's attention on an NVIDIA GPU: SGLang's default backend, and backends that cannot verify a block.

Sources: SGLang 0.5.23's ``arg_groups/model_overrides``, ``model_override_base.py`` (``get_default_attn_backend``) and
``layers/attention``.
"""

from collections.abc import Mapping
from typing import Any

from sglang_dflash.errors import first_true
from sglang_dflash.launch.device import Device
from sglang_dflash.launch.sizes import count, layers_of

# model type -> major compute capability -> SGLang's choice; 0: all others
_DEFAULT = {9: "fa3", 10: "trtllm_mha", 0: "flashinfer"}
_LATENT = {9: "fa3", 10: "flashinfer", 0: "triton"}
_CHOICES: dict[str, Mapping[int, str]] = {
    "gpt_oss": {9: "fa3", 10: "trtllm_mha", 0: "triton"},
    "gemma4_text": {10: "trtllm_mha", 0: "triton"},
    **dict.fromkeys(("deepseek_v3", "kimi_k2"), _LATENT | {10: "trtllm_mla"}),
}


def default_backend(text: Mapping[str, Any], device: Device) -> str:
    """Return the backend that SGLang chooses for a target without a flag, if FlashInfer is installed."""
    choices = _CHOICES.get(str(text.get("model_type"))) or (_LATENT if text.get("kv_lora_rank") else _DEFAULT)
    return choices.get((device.capability or (0, 0))[0], choices[0])


def verify_obstacle(backend: str | None, text: Mapping[str, Any], major: int) -> str | None:
    """Return why a backend cannot verify a target's blocks on GPUs of a major compute capability, or None.

    SGLang refuses these late or not at all. It asserts the rest before it downloads weights.
    """
    slides, latent = bool(text) and layers_of(text).sliding > 0, bool(text.get("kv_lora_rank"))
    heads = 0 if latent else max(count(text, key, 0) for key in ("head_dim", "global_head_dim"))
    return first_true({
        "it runs on compute capabilities 8 and 9 alone": backend == "fa3" and major not in (8, 9),
        "its verify ignores the window of sliding layers": backend == "flashinfer" and slides and not latent,
        # its kernel for heads of 256 refuses the lengths of a K/V cache (``flash_attn/cute/interface.py``)
        "its kernels for this GPU take heads of up to 128": backend == "fa4" and major in (10, 11) and heads > 128,
    })  # fmt: skip
